"""Blocking readers in a thread of their own, a few batches ahead of the loop."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    EndOfData,
    NothingYet,
    Polled,
    SourceReader,
    Split,
)
from stillframe.ids import OperatorUid
from stillframe.json_values import JsonObject
from stillframe.user_code import lazily

_AHEAD_BATCHES_MAX = 4
_OFFER_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
_NO_SPLITS: frozenset[str] = frozenset()


def splits_of(items: Iterable[JsonObject]) -> list[Split]:
    """Splits out of what snapshots and orders say of them."""
    return [Split(str(item["id"]), cast(JsonObject, item["position"])) for item in items]


def times_of_splits(items: Iterable[JsonObject], uid: OperatorUid) -> dict[str, int]:
    """How far event time had come in each split, as the operator `uid` saw it."""
    times = {str(item["id"]): cast(JsonObject, item.get("times", {})) for item in items}
    return {split: cast(int, seen[uid]) for split, seen in times.items() if uid in seen}


@dataclass(frozen=True, slots=True)
class _SplitEnded:
    split_id: str


_Read: TypeAlias = tuple[Split, pa.RecordBatch] | _SplitEnded | EndOfData
_POLL_SECONDS = 1.0


class _AheadReader(SourceReader):
    """Makes something that blocks pollable; keeps the positions of what was really emitted."""

    def __init__(self, splits: Sequence[Split], wake: Callable[[], None]) -> None:
        self._splits = {split.id: split for split in splits}
        self._polled: str | None = None
        self._wake = wake
        self._ahead: queue.Queue[_Read | BaseException] = queue.Queue(_AHEAD_BATCHES_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)

    @abstractmethod
    def _read(self) -> Iterator[_Read]:
        """Iterated by the thread."""

    def splits(self) -> list[Split]:
        return list(self._splits.values())

    def polled_split(self) -> str | None:
        return self._polled

    def _next(self) -> _Read | NothingYet:
        try:
            item = self._ahead.get_nowait()
        except queue.Empty:
            return NothingYet(_POLL_SECONDS)
        if isinstance(item, BaseException):
            raise item
        return item

    def _emit(self, read: tuple[Split, pa.RecordBatch]) -> pa.RecordBatch:
        split, batch = read
        self._splits[split.id] = split
        self._polled = split.id
        return batch

    def _run(self) -> None:
        try:
            for item in self._read():
                if not self._offer(item):
                    return
        except BaseException as error:  # the loop raises it where the job can see it
            self._offer(error)

    def _offer(self, item: _Read | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put(item, timeout=_OFFER_SECONDS)
            except queue.Full:
                continue
            self._wake()
            return True
        return False


class ThreadedReader(_AheadReader):
    """Reads the splits of a source that has them all from the beginning, with one reader."""

    def __init__(
        self, splits: Sequence[Split], reader: BlockingReader, wake: Callable[[], None]
    ) -> None:
        super().__init__(splits, wake)
        self.reads_in_turn = reader.reads_in_turn
        self._reader = reader
        self._ended = False
        self._open = {split.id: None for split in splits if not reader.has_ended(split)}
        self._told_open = frozenset(self._open)
        self._thread.start()

    def poll(self) -> Polled:
        if self._ended:
            return EndOfData()
        read = self._next()
        match read:
            case EndOfData():
                self._ended = True
                return read
            case NothingYet():
                return read
            case _SplitEnded():
                raise AssertionError("one reader reads all splits")
            case _:
                self._note_ended(read[0])
                return self._emit(read)

    def open_splits(self) -> frozenset[str]:
        return self._told_open

    def records_malformed(self) -> int:
        return self._reader.records_malformed()

    def _note_ended(self, read: Split) -> None:
        """What has ended now that the split is at this position."""
        before = len(self._open)
        if self.reads_in_turn and read.id in self._open:
            while next(iter(self._open)) != read.id:
                del self._open[next(iter(self._open))]
        if self._reader.has_ended(read):
            self._open.pop(read.id, None)
        if len(self._open) < before:
            self._told_open = frozenset(self._open)

    def close(self) -> None:
        self._closing.set()
        self._reader.interrupt()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._reader.close()

    def _read(self) -> Iterator[_Read]:
        yield from lazily(self._reader.read())
        yield EndOfData()


class SplitAfterSplitReader(_AheadReader):
    """Reads splits as they come, one after the other, each with a reader of its own.

    One that was read to its end is dropped: the source's enumerator remembers it, and a directory
    that is followed for a year would otherwise be in every checkpoint, file by file.

    Event time waits for splits that came together, as in Spark for the files of one micro-batch,
    and not for those that came later: where some are always waiting, it would stand still.
    """

    reads_in_turn = True

    def __init__(
        self, open_split: Callable[[Split], BlockingReader], wake: Callable[[], None]
    ) -> None:
        super().__init__((), wake)
        self._open_split = open_split
        self._reader: BlockingReader | None = None
        """The one that reads now; set by the thread."""
        self._records_malformed = 0
        """Of those before it."""
        self._groups: deque[frozenset[str]] = deque()
        """The splits that have not ended, by when they came."""
        # No bound of its own: what waits here is what the coordinator has assigned.
        self._waiting: queue.SimpleQueue[Split | None] = queue.SimpleQueue()
        self._thread.start()

    def poll(self) -> Polled:
        while self._splits:
            read = self._next()
            match read:
                case _SplitEnded(split_id):
                    self._end(split_id)
                case NothingYet() | EndOfData():
                    return read
                case _:
                    return self._emit(read)
        return EndOfData()

    def open_splits(self) -> frozenset[str]:
        return self._groups[0] if self._groups else _NO_SPLITS

    def records_malformed(self) -> int:
        reader = self._reader
        return self._records_malformed + (reader.records_malformed() if reader is not None else 0)

    def _end(self, split_id: str) -> None:
        del self._splits[split_id]
        self._groups[0] -= {split_id}
        if not self._groups[0]:
            self._groups.popleft()

    def add_splits(self, splits: Sequence[Split]) -> None:
        if splits:
            self._groups.append(frozenset(split.id for split in splits))
        for split in splits:
            self._splits[split.id] = split
            self._waiting.put(split)

    def close(self) -> None:
        self._closing.set()
        self._waiting.put(None)
        if (reader := self._reader) is not None:
            reader.interrupt()
        self._thread.join(_CLOSE_SECONDS)

    def _read(self) -> Iterator[_Read]:
        while (split := self._waiting.get()) is not None:
            self._reader = reader = self._open_split(split)
            try:
                yield from lazily(reader.read())
            finally:
                self._reader = None
                self._records_malformed += reader.records_malformed()
                reader.close()
            yield _SplitEnded(split.id)
