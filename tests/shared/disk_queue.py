"""A queue on disk that forgets a message only when it is acknowledged, which a completed checkpoint
does.

A message is a file with the number of the click that it holds. What was acknowledged cannot be read
again: a reader that asks for it says that the queue was acknowledged too early.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stillframe import (
    BlockingReader,
    DataError,
    EndOfData,
    NothingYet,
    Source,
    SourceContext,
    SourceReader,
    Split,
)

SCHEMA = pa.schema([("id", pa.int64()), ("app_id", pa.string())])
BATCH = 4
PAUSE_SECONDS = 0.004
"""After each batch, so that there are checkpoints in between."""


@dataclass(frozen=True)
class QueueSource(Source):
    home: str
    queues: int
    messages: int
    """In each queue."""
    blocks: bool

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def fill(self) -> None:
        for number in range(self.queues):
            queue = Path(self.home, f"queue-{number}")
            queue.mkdir(parents=True)
            for message in range(self.messages):
                (queue / str(message)).write_text(str(number * self.messages + message))

    def left(self) -> list[str]:
        """What nobody has acknowledged."""
        return [str(path) for path in Path(self.home).glob("*/*")]

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"queue-{number}", {"next": 0}) for number in range(self.queues)]

    def open(self, splits: Sequence[Split], context: SourceContext):
        return (_BlockingReader if self.blocks else _PolledReader)(_Queues(self, splits))

    def describe(self) -> str:
        return f"queues {self.home}"


class _Queues:
    def __init__(self, source: QueueSource, splits: Sequence[Split]) -> None:
        self._source = source
        self.next = {split.id: split.position["next"] for split in splits}

    def take(self, name: str) -> tuple[Split, pa.RecordBatch] | None:
        """The next messages of this queue; None: it has no more."""
        begin = self.next[name]
        end = min(begin + BATCH, self._source.messages)
        if begin == end:
            return None
        ids = [int(self._message(name, number)) for number in range(begin, end)]
        self.next[name] = end
        apps = [f"app-{i % 17}" for i in ids]
        return Split(name, {"next": end}), pa.record_batch([ids, apps], schema=SCHEMA)

    def _message(self, name: str, number: int) -> str:
        try:
            return Path(self._source.home, name, str(number)).read_text()
        except FileNotFoundError:
            raise DataError(f"message {number} of {name} was acknowledged too early") from None

    def acknowledge(self, splits: Sequence[Split]) -> None:
        for split in splits:
            queue = os.path.join(self._source.home, split.id)
            for message in os.listdir(queue):
                if int(message) < split.position["next"]:
                    os.unlink(os.path.join(queue, message))


class _BlockingReader(BlockingReader):
    def __init__(self, queues: _Queues) -> None:
        self._queues = queues
        self._ending = threading.Event()

    def read(self) -> Iterator:
        names = list(self._queues.next)
        while names and not self._ending.is_set():
            for name in list(names):
                taken = self._queues.take(name)
                if taken is None:
                    names.remove(name)
                else:
                    yield taken
            self._ending.wait(PAUSE_SECONDS)

    def on_checkpoint_complete(self, checkpoint_id, splits: Sequence[Split]) -> None:
        self._queues.acknowledge(splits)

    def interrupt(self) -> None:
        self._ending.set()

    def close(self) -> None:
        pass


class _PolledReader(SourceReader):
    def __init__(self, queues: _Queues) -> None:
        self._queues = queues
        self._names = list(queues.next)
        self._pauses = False

    def poll(self):
        self._pauses = not self._pauses
        if self._pauses and self._names:
            return NothingYet(PAUSE_SECONDS)
        while self._names:
            name = self._names.pop(0)
            taken = self._queues.take(name)
            if taken is not None:
                self._names.append(name)
                return taken[1]
        return EndOfData()

    def splits(self) -> list[Split]:
        return [Split(name, {"next": at}) for name, at in self._queues.next.items()]

    def on_checkpoint_complete(self, checkpoint_id, splits: Sequence[Split]) -> None:
        self._queues.acknowledge(splits)

    def close(self) -> None:
        pass
