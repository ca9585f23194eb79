"""Partitions that never end and come while a job runs, all of a subtask read by one reader.

A partition is a file to which lines are appended, each the id of a click, or `-`, a marker that is
no record. This is Kafka in small: the reader takes splits and gives batches of whichever has some.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stillframe import BlockingReader, Discovered, Source, SourceContext, Split, SplitEnumerator

SCHEMA = pa.schema([("id", pa.int64()), ("app_id", pa.string())])
READ_BYTES = 600


@dataclass(frozen=True)
class LogSource(Source):
    home: str

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    @property
    def discovery_interval_seconds(self) -> float:
        return 0.05

    def splits(self, parallelism: int) -> list[Split]:
        return []

    def open_enumerator(self, state) -> SplitEnumerator:
        return _Partitions(self.home, [] if state is None else state["found"])

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        assert not splits
        return _Consumer(self.home)

    def goes_back(self, position, later) -> bool:
        return later["offset"] < position["offset"]

    def describe(self) -> str:
        return f"logs {self.home}"


class _Partitions(SplitEnumerator):
    def __init__(self, home: str, found: list[str]) -> None:
        self._home, self._found = home, found

    def discover(self) -> Discovered:
        new = sorted(set(os.listdir(self._home)) - set(self._found))
        self._found = self._found + new
        return Discovered([Split(name, {"offset": 0}) for name in new], {"found": self._found})


class _Consumer(BlockingReader):
    takes_splits = True

    def __init__(self, home: str) -> None:
        self._home = home
        self._coming: queue.SimpleQueue[Split] = queue.SimpleQueue()
        self._offsets: dict[str, int] = {}
        self._stops_at_now = False
        self._ending = threading.Event()

    def add_splits(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._coming.put(split)

    def no_more_splits(self, *, until_now: bool) -> None:
        self._stops_at_now = until_now

    def read(self) -> Iterator:
        while not self._ending.is_set():
            stops = self._stops_at_now  # before looking: what was given by then is read below
            while not self._coming.empty():
                split = self._coming.get()
                self._offsets[split.id] = split.position["offset"]
            gave = False
            for name in list(self._offsets):
                lines = self._lines(name)
                if lines:
                    gave = True
                    yield self._item(name, lines)
            if not gave and stops:
                return
            if not gave:
                self._ending.wait(0.01)
                yield None

    def _lines(self, name: str) -> bytes:
        with open(os.path.join(self._home, name), "rb") as log:
            log.seek(self._offsets[name])
            chunk = log.read(READ_BYTES)
        return chunk[: chunk.rfind(b"\n") + 1]

    def _item(self, name: str, lines: bytes) -> tuple[Split, pa.RecordBatch | None]:
        self._offsets[name] += len(lines)
        ids = [int(line) for line in lines.split() if line != b"-"]
        apps = [f"app-{i % 17}" for i in ids]
        split = Split(name, {"offset": self._offsets[name]})
        return split, pa.record_batch([ids, apps], schema=SCHEMA) if ids else None

    def interrupt(self) -> None:
        self._ending.set()

    def close(self) -> None:
        pass


class Logs:
    """What writes them."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.home = home
        self.written = 0

    def source(self) -> LogSource:
        return LogSource(str(self.home))

    def append(self, partition: str, records: int) -> None:
        """So many clicks, and a marker after each hundredth."""
        with open(self.home / partition, "ab") as log:
            for _ in range(records):
                log.write(b"%d\n" % self.written)
                self.written += 1
                if self.written % 100 == 0:
                    log.write(b"-\n")
