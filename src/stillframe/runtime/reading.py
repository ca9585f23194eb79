"""Blocking readers in a thread of their own, a few batches ahead of the loop.

Theory of operation
-------------------
The thread iterates `read` and puts what it yields into a bounded queue, which the loop polls: one
handover for a whole batch. What the loop wants of the reader meanwhile goes two ways. Splits, and
that there are no more, are said by the loop thread itself: the reader puts them where it looks.
That a checkpoint is complete is a letter of which only the newest is kept; the thread delivers it
between two items, while it waits for room, and after the end.

Rules of this file
------------------
1. `on_checkpoint_complete` and `read` are called by the reader's thread, all else by the loop's.
2. The position of a split is that of what the loop has taken, not of what the thread has read.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, cast

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    EndOfData,
    Lag,
    NothingYet,
    Polled,
    ReadItem,
    SourceReader,
    Split,
)
from stillframe.errors import UserCodeError
from stillframe.ids import CheckpointId, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.stacks import Places, as_frame, frames_of, innermost_own
from stillframe.user_code import lazily, shown

_AHEAD_BATCHES_MAX = 4
_OFFER_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 1.0
_NO_SPLITS: frozenset[str] = frozenset()

log = logging.getLogger("stillframe")


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


_Read: TypeAlias = tuple[Split, pa.RecordBatch | None] | _SplitEnded | EndOfData


@dataclass(frozen=True, slots=True)
class ReaderAtWork:
    """A call of a blocking reader that has not returned."""

    name: str
    """Of its source, in words."""
    thread: int
    call: int
    """Another number means another call."""
    must_return: bool
    """Whether its contract says that it returns soon; otherwise it may wait for records."""
    is_ours: bool
    """Whether it is one of our own, in which only what it calls of the user's is of interest."""


class AheadReader(SourceReader):
    """Makes something that blocks pollable; keeps the positions of what was really emitted."""

    def __init__(self, splits: Sequence[Split], wake: Callable[[], None], name: str) -> None:
        self._splits = {split.id: split for split in splits}
        self._polled: str | None = None
        self._wake = wake
        self._name = f"source {name}"
        self._ahead: queue.Queue[_Read | BaseException] = queue.Queue(_AHEAD_BATCHES_MAX)
        self._completed: deque[tuple[CheckpointId, Sequence[Split]]] = deque(maxlen=1)
        """A letter for the reader: the newest checkpoint that it has not been told of."""
        self._news = threading.Event()
        """Set when there is a letter, or an end of it all."""
        self._closing = threading.Event()
        self._calls = 0
        self._is_calling = False
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)

    @abstractmethod
    def _read(self) -> Iterator[_Read | None]:
        """Iterated by the thread."""

    @property
    @abstractmethod
    def _now_reading(self) -> BlockingReader | None:
        """The reader that is to be told something, or looked at."""

    def splits(self) -> list[Split]:
        return list(self._splits.values())

    def polled_split(self) -> str | None:
        return self._polled

    def on_checkpoint_complete(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        self._completed.append((checkpoint_id, splits))
        self._news.set()

    def awaits(self) -> str | None:
        reader = self._now_reading
        return None if reader is None else reader.awaits()

    def lag(self) -> Lag | None:
        reader = self._now_reading
        return None if reader is None else reader.lag(self.splits())

    def at_work(self) -> ReaderAtWork | None:
        """What the reader is doing; None: nothing."""
        call, reader, thread = self._calls, self._now_reading, self._thread.ident
        if reader is None or thread is None or not self._is_calling:
            return None
        is_ours = type(reader).__module__.startswith("stillframe.")
        return ReaderAtWork(self._name, thread, call, reader.takes_splits, is_ours)

    def _next(self) -> _Read | NothingYet:
        try:
            item = self._ahead.get_nowait()
        except queue.Empty:
            return NothingYet(_POLL_SECONDS)
        if isinstance(item, BaseException):
            raise item
        return item

    def _emit(self, split: Split, batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
        """Move the split; the batch, unless there is nothing in it."""
        if split.id not in self._splits:
            self._refuse(f"yielded split {split.id!r}, which it was not given")
        self._splits[split.id] = split
        if batch is None or not batch.num_rows:
            return None
        self._polled = split.id
        return batch

    def _refuse(self, what: str) -> NoReturn:
        raise UserCodeError(f"the reader of {self._name} {what}")

    # --- the thread

    def _run(self) -> None:
        try:
            if self._read_on():
                self._linger()
        except BaseException as error:  # the loop raises it where the job can see it
            self._offer(error)

    def _read_on(self) -> bool:
        """Whether it came to an end by itself."""
        items, is_wanted = self._read(), True
        while is_wanted and not self._closing.is_set():
            self._begin_call()
            try:
                item = next(items)
            except StopIteration:
                return True
            finally:
                self._is_calling = False
            is_wanted = item is None or self._offer(item)
            self._tell()
        self._tell()  # a letter that came with the end
        return False

    def _linger(self) -> None:
        """The last batches are acknowledged when nothing is left to read."""
        reader = self._now_reading
        while reader is not None and _hears_of_checkpoints(reader):
            self._tell()
            if self._closing.is_set():
                return
            self._news.wait()
            self._news.clear()

    def _begin_call(self) -> None:
        self._calls += 1
        self._is_calling = True

    def _tell(self) -> None:
        reader = self._now_reading
        if not self._completed or reader is None:
            return
        checkpoint_id, splits = self._completed.popleft()
        self._begin_call()
        try:
            reader.on_checkpoint_complete(checkpoint_id, self._of_reader(splits))
        finally:
            self._is_calling = False

    def _of_reader(self, splits: Sequence[Split]) -> Sequence[Split]:
        """Those of the reader that is told."""
        return splits

    def _offer(self, item: _Read | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put(item, timeout=_OFFER_SECONDS)
            except queue.Full:
                if not isinstance(item, BaseException):
                    self._tell()
                continue
            self._wake()
            return True
        return False

    def _checked(self, items: Iterable[ReadItem]) -> Iterator[_Read | None]:
        for item in lazily(items):
            match item:
                case None | (Split(), None) | (Split(), pa.RecordBatch()):
                    yield item
                case _:
                    self._refuse(
                        f"yielded {shown(item)}: yield (Split, RecordBatch), (Split, None) to move"
                        " a position, or None if nothing has come"
                    )

    def _join(self) -> bool:
        """Whether the thread has ended, now that the reader was interrupted."""
        self._closing.set()
        self._news.set()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            return True
        frames = [as_frame(frame) for frame in frames_of(self._thread.ident or 0)]
        log.error(
            "the reader of %s does not end %g s after interrupt was called: it waits at %s and is"
            " left behind with all it holds until its process ends; let read end when interrupt is"
            " called",
            self._name,
            _CLOSE_SECONDS,
            innermost_own(frames, Places.here()) or (frames[-1] if frames else "an unknown line"),
        )
        return False


def _hears_of_checkpoints(reader: BlockingReader) -> bool:
    return type(reader).on_checkpoint_complete is not BlockingReader.on_checkpoint_complete


class ThreadedReader(AheadReader):
    """Reads all splits of its subtask with one reader; more may come, if it takes them."""

    def __init__(
        self,
        splits: Sequence[Split],
        reader: BlockingReader,
        wake: Callable[[], None],
        name: str = "",
    ) -> None:
        super().__init__(splits, wake, name)
        self.reads_in_turn = reader.reads_in_turn
        self._reader = reader
        self._has_all = False
        """Whether no split will come; of a reader that takes them."""
        self._ended = False
        self._open = {split.id: None for split in splits if not reader.has_ended(split)}
        self._told_open = frozenset(self._open)
        self._thread.start()

    @property
    def _now_reading(self) -> BlockingReader:
        return self._reader

    def poll(self) -> Polled:
        # In one turn no more than were ahead: positions may move again and again without a record.
        for _ in range(_AHEAD_BATCHES_MAX):
            read = EndOfData() if self._ended else self._next()
            match read:
                case NothingYet():
                    all_ended = self._reader.takes_splits and not self._open
                    return EndOfData() if all_ended else read
                case EndOfData():
                    self._on_end()
                    return read
                case _SplitEnded():
                    raise AssertionError("one reader reads all splits")
                case (split, batch):
                    emitted = self._emit(split, batch)
                    self._note_ended(split)
                    if emitted is not None:
                        return emitted
        return NothingYet(0.0)

    def open_splits(self) -> frozenset[str]:
        return self._told_open

    def records_malformed(self) -> int:
        return self._reader.records_malformed()

    def add_splits(self, splits: Sequence[Split]) -> None:
        self._splits |= {split.id: split for split in splits}
        self._open |= {split.id: None for split in splits if not self._reader.has_ended(split)}
        self._told_open = frozenset(self._open)
        if splits:
            self._reader.add_splits(splits)

    def no_more_splits(self, *, until_now: bool) -> None:
        self._has_all = True
        self._reader.no_more_splits(until_now=until_now)

    def _on_end(self) -> None:
        if self._reader.takes_splits and not self._has_all:
            self._refuse(
                "has ended although more splits may come: it takes splits, so let read go on, and"
                " yield None while there is nothing to read, until no_more_splits is called"
            )
        self._ended = True
        self._open.clear()
        self._told_open = _NO_SPLITS

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
        if self._join():
            self._reader.close()

    def _read(self) -> Iterator[_Read | None]:
        yield from self._checked(self._reader.read())
        yield EndOfData()


class SplitAfterSplitReader(AheadReader):
    """Reads splits as they come, one after the other, each with a reader of its own.

    One that was read to its end is dropped: the source's enumerator remembers it, and a directory
    that is followed for a year would otherwise be in every checkpoint, file by file.

    Event time waits for splits that came together, as in Spark for the files of one micro-batch,
    and not for those that came later: where some are always waiting, it would stand still.
    """

    reads_in_turn = True

    def __init__(
        self,
        open_split: Callable[[Split], BlockingReader],
        wake: Callable[[], None],
        name: str = "",
    ) -> None:
        super().__init__((), wake, name)
        self._open_split = open_split
        self._reading: tuple[str, BlockingReader] | None = None
        """The split that is read now, and what reads it; set by the thread."""
        self._records_malformed = 0
        """Of those before it."""
        self._groups: deque[frozenset[str]] = deque()
        """The splits that have not ended, by when they came."""
        # No bound of its own: what waits here is what the coordinator has assigned.
        self._waiting: queue.SimpleQueue[Split | None] = queue.SimpleQueue()
        self._thread.start()

    @property
    def _now_reading(self) -> BlockingReader | None:
        reading = self._reading
        return None if reading is None else reading[1]

    def poll(self) -> Polled:
        while self._splits:
            read = self._next()
            match read:
                case _SplitEnded(split_id):
                    self._end(split_id)
                case NothingYet() | EndOfData():
                    return read
                case (split, batch):
                    emitted = self._emit(split, batch)
                    if emitted is not None:
                        return emitted
        return EndOfData()

    def open_splits(self) -> frozenset[str]:
        return self._groups[0] if self._groups else _NO_SPLITS

    def records_malformed(self) -> int:
        reader = self._now_reading
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
        if (reader := self._now_reading) is not None:
            reader.interrupt()
        self._join()

    def _of_reader(self, splits: Sequence[Split]) -> Sequence[Split]:
        reading = self._reading
        return [split for split in splits if reading is not None and split.id == reading[0]]

    def _read(self) -> Iterator[_Read | None]:
        while (split := self._next_split()) is not None:
            reader = self._open_split(split)
            self._reading = split.id, reader
            try:
                yield from self._checked(reader.read())
            finally:
                self._reading = None
                self._records_malformed += reader.records_malformed()
                reader.close()
            yield _SplitEnded(split.id)

    def _next_split(self) -> Split | None:
        self._is_calling = False  # it is we who wait
        split = self._waiting.get()
        self._begin_call()
        return split
