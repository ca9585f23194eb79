"""Small sources that are written by hand and right, and some that are each wrong in one place."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    Discovered,
    EndOfData,
    NothingYet,
    Source,
    SourceReader,
    Split,
    SplitEnumerator,
)

SCHEMA = pa.schema([("split", pa.string()), ("n", pa.int64())])
_ROWS = 7


@dataclass(frozen=True)
class SmallSource(Source):
    """Right: some splits of seven numbers, read two or three at a time, in turn."""

    count: int = 3

    @property
    def schema(self):
        return SCHEMA

    def splits(self, parallelism):
        return [Split(f"s{index}", {"next": 0}) for index in range(self.count)]

    def open(self, splits, context):
        return SmallReader(splits)

    def describe(self):
        return f"small {self.count}"


def batch_of(split_id: str, first: int, rows: int) -> pa.RecordBatch:
    numbers = list(range(first, min(first + rows, _ROWS)))
    return pa.record_batch([[split_id] * len(numbers), pa.array(numbers, pa.int64())], SCHEMA)


class SmallReader(SourceReader):
    def __init__(self, splits: Sequence[Split]) -> None:
        self._next = {split.id: split.position["next"] for split in splits}
        self._polled = None
        self._turns = 0

    def poll(self):
        unread = [split_id for split_id, at in self._next.items() if at < _ROWS]
        if not unread:
            return EndOfData()
        self._turns += 1
        if self._turns % 4 == 0:
            return NothingYet(0.01)
        return self._batch(unread[self._turns % len(unread)])

    def _batch(self, split_id):
        batch = batch_of(split_id, self._next[split_id], 2 + self._turns % 2)
        self._next[split_id] += batch.num_rows
        self._polled = split_id
        return batch

    def splits(self):
        return [Split(split_id, {"next": at}) for split_id, at in self._next.items()]

    def open_splits(self):
        return frozenset(split_id for split_id, at in self._next.items() if at < _ROWS)

    def polled_split(self):
        return self._polled

    def add_splits(self, splits):
        self._next |= {split.id: split.position["next"] for split in splits}

    def close(self):
        pass


@dataclass(frozen=True)
class GrowingSource(SmallSource):
    """Right too: its splits are lines of a file, and an enumerator finds them."""

    path: str = ""

    @property
    def discovery_interval_seconds(self):
        return 1.0

    def splits(self, parallelism):
        return []

    def open_enumerator(self, state):
        return GrowingEnumerator(self, state)

    def open(self, splits, context):
        return SmallReader(splits)

    def there(self) -> list[str]:
        with open(self.path) as file:
            return file.read().split()


class GrowingEnumerator(SplitEnumerator):
    def __init__(self, source, state):
        self._source = source
        self._found = state["found"] if state else 0

    def discover(self):
        there = self._source.there()
        new, self._found = there[self._found :], len(there)
        return Discovered([Split(each, {"next": 0}) for each in new], {"found": self._found})


def growing(kind, directory):
    """A source of this kind that has something to begin with."""
    path = directory / "there"
    path.write_text("a b")
    return kind(path=str(path))


def grow(source):
    there = source.there()
    with open(source.path, "a") as file:
        file.write(f" x{len(there)}")


@dataclass(frozen=True)
class QueueSource(SmallSource):
    """Right too: what is acknowledged is gone."""

    path: str = ""

    def open(self, splits, context):
        return QueueReader(splits, self)

    def acknowledged(self, split_id: str) -> int:
        path = os.path.join(self.path, split_id)
        if not os.path.exists(path):
            return 0
        with open(path) as file:
            return int(file.read())

    def acknowledge(self, split_id: str, rows: int) -> None:
        with open(os.path.join(self.path, split_id), "w") as file:
            file.write(str(rows))


class QueueReader(SmallReader):
    def __init__(self, splits, source):
        super().__init__(splits)
        self._source = source
        for split in splits:
            gone = source.acknowledged(split.id)
            self._next[split.id] = max(self._next[split.id], gone)

    def on_checkpoint_complete(self, checkpoint_id, splits):
        for split in splits:
            self._source.acknowledge(split.id, split.position["next"])


@dataclass(frozen=True)
class EndlessSource(GrowingSource):
    """Right too: one blocking reader takes splits while it runs, and none of them ends."""

    def open(self, splits, context):
        return EndlessReader(splits)


class EndlessReader(BlockingReader):
    takes_splits = True
    _ends_now = False

    def __init__(self, splits):
        self._added = queue.SimpleQueue()
        self._is_over = threading.Event()
        self.add_splits(splits)

    def add_splits(self, splits):
        for split in splits:
            self._added.put(split)

    def read(self):
        reading: dict = {}
        while not self._is_over.is_set():
            while not self._added.empty():
                split = self._added.get()
                reading[split.id] = split.position["next"]
            for split_id, at in reading.items():
                batch = batch_of(split_id, at, 3)
                reading[split_id] += batch.num_rows
                yield Split(split_id, {"next": reading[split_id]}), batch
            if self._ends_now and all(at == _ROWS for at in reading.values()):
                return
            yield None
            self._is_over.wait(0.001)

    def no_more_splits(self, *, until_now):
        self._ends_now = until_now

    def interrupt(self):
        self._is_over.set()

    def close(self):
        pass


# --- wrong ones --------------------------------------------------------------------------------


class MovesTooEarly(SmallSource):
    """Reads one batch ahead, and is positioned behind it."""

    def open(self, splits, context):
        return _MovesTooEarly(splits)


class _MovesTooEarly(SmallReader):
    _ahead = None

    def poll(self):
        if self._ahead is None:
            self._ahead = super().poll()
        polled = self._ahead
        self._ahead = None if isinstance(polled, EndOfData) else super().poll()
        return polled

    def open_splits(self):
        return None


class MovesTooLate(SmallSource):
    def open(self, splits, context):
        return _MovesTooLate(splits)


class _MovesTooLate(SmallReader):
    """Its position is that of the batch it has returned last."""

    def splits(self):
        return [
            Split(each.id, {"next": max(0, each.position["next"] - (each.id == self._polled))})
            for each in super().splits()
        ]


class ForgetsAdded(GrowingSource):
    def open(self, splits, context):
        return _ForgetsAdded(splits)


class _ForgetsAdded(SmallReader):
    def splits(self):
        return [each for each in super().splits() if each.position["next"]]


class RemembersOutside(GrowingSource):
    def open_enumerator(self, state):
        return _RemembersOutside(self, state)


_SEEN: dict = {}


class _RemembersOutside(GrowingEnumerator):
    def discover(self):
        there, seen = self._source.there(), _SEEN.setdefault(self._source.path, set())
        new = [each for each in there if each not in seen]
        seen.update(new)
        return Discovered([Split(each, {"next": 0}) for each in new], {})


class ForgetsWhatItFound(GrowingSource):
    def open_enumerator(self, state):
        return GrowingEnumerator(self, None)


class AcknowledgesWhatWasRead(QueueSource):
    def open(self, splits, context):
        return _AcknowledgesWhatWasRead(splits, self)


class _AcknowledgesWhatWasRead(QueueReader):
    def on_checkpoint_complete(self, checkpoint_id, splits):
        for split in self.splits():
            self._source.acknowledge(split.id, split.position["next"])


class ChangesItsPosition(SmallSource):
    def open(self, splits, context):
        return _ChangesItsPosition(splits)


class _ChangesItsPosition(SmallReader):
    def __init__(self, splits):
        self._own = [Split(each.id, dict(each.position)) for each in splits]
        super().__init__(splits)

    def splits(self):
        for each in self._own:
            each.position["next"] = self._next[each.id]
        return self._own


class PositionGrows(SmallSource):
    def open(self, splits, context):
        return _PositionGrows(splits)


class _PositionGrows(SmallReader):
    def splits(self):
        return [
            Split(each.id, {**each.position, "read": ["a row"] * 50 * each.position["next"]})
            for each in super().splits()
        ]


class NoJson(SmallSource):
    def splits(self, parallelism):
        return [Split("s0", {"next": 0, "range": (0, 7)})]


@dataclass(frozen=True)
class NeedsItsOwnProcess(SmallSource):
    cursor: dict = field(default_factory=dict, compare=False)

    def open(self, splits, context):
        return _NeedsItsOwnProcess(splits, self)


class _NeedsItsOwnProcess(SmallReader):
    """The positions are in the source, and its splits only name them."""

    def __init__(self, splits, source):
        super().__init__(splits)
        self._source = source
        for each in splits:
            self._next[each.id] = source.cursor.get((each.id, each.position["next"]), 0)

    def splits(self):
        for each in super().splits():
            self._source.cursor[each.id, each.position["next"]] = each.position["next"]
        return super().splits()


class BlocksForEver(SmallSource):
    def open(self, splits, context):
        return _BlocksForEver(splits)


class _BlocksForEver(BlockingReader):
    def __init__(self, splits):
        self._splits = splits

    def read(self):
        for split in self._splits:
            rest = batch_of(split.id, split.position["next"], _ROWS)
            yield Split(split.id, {"next": _ROWS}), rest
        threading.Event().wait(1)

    def close(self):
        pass


class ClosesASplitTooEarly(SmallSource):
    def open(self, splits, context):
        return _ClosesASplitTooEarly(splits)


class _ClosesASplitTooEarly(SmallReader):
    def open_splits(self):
        return frozenset(id for id, at in self._next.items() if 0 < at < _ROWS)
