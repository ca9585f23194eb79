"""Timers that are registered one by one, for the key that is at work.

`state/timers` is for those who register whole columns. Here a key's timers are found at once, as a
program that handles one key after the other lists and deletes them all the time.

Theory of operation: a key's timers are a list state of its own, in the backend with all others;
what falls due next is found in a heap of (time, key), made anew at every start. A deleted timer
stays in the heap, and is passed over when its time comes and the key no longer has it; when more of
the heap is deleted than not, it is made anew without them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Generic

import pyarrow as pa

from stillframe.state.backends import VALUE, Backend, Declared, Key, Kind
from stillframe.state.rows import RowType

_DELETED_MIN = 1_000
"""So few are not worth to be looked for."""
_SCHEMA = pa.schema([pa.field("time_ms", pa.int64(), nullable=False)])


class KeyTimers(Generic[Key]):
    """The timers of one clock, of all keys of a subtask; times are in milliseconds since 1970."""

    def __init__(self, backend: Backend[Key], name: str) -> None:
        self._backend = backend
        self.table = backend.lists(Declared(name, Kind.LIST, RowType(_SCHEMA)))
        self._queue: list[tuple[int, Key]] = []
        self._queued: set[tuple[int, Key]] = set()
        """The same, to be found: what is deleted and registered again is there already."""
        self._deleted = 0
        """At most so many of them are."""

    @property
    def queued(self) -> int:
        """How many there are, with those that are deleted and not forgotten yet."""
        return len(self._queue)

    def of(self, key: Key) -> list[int]:
        """The times of this key's timers, ascending."""
        return sorted(row[0] for row in self.table.get(key, 0))

    def register(self, key: Key, time_ms: int) -> None:
        """A timer that is there already stays one."""
        if not self.is_registered(key, time_ms):
            self.table.append(key, [(time_ms,)], None)
            timer = (time_ms, key)
            if timer in self._queued:
                self._deleted -= 1
            else:
                self._queued.add(timer)
                heapq.heappush(self._queue, timer)

    def delete(self, key: Key, time_ms: int) -> None:
        """Forget it; there may be none."""
        rows = self.table.get(key, 0)
        if (time_ms,) in rows:
            self.table.put(key, [row for row in rows if row != (time_ms,)], None)
            if (time_ms, key) in self._queued:  # one that fires is not
                self._deleted += 1
                self._forget_deleted()

    def next_ms(self) -> int | None:
        """The earliest time; None: there is no timer."""
        queue = self._queue
        while queue and not self.is_registered(queue[0][1], queue[0][0]):
            self._pop()
            self._deleted -= 1
        return queue[0][0] if queue else None

    def due(self, until_ms: int, count_max: int) -> list[tuple[Key, int]]:
        """The first timers until this time, in their order; each is there until it is deleted.

        They are answered once: whoever asks fires them, or deletes them.
        """
        found: list[tuple[Key, int]] = []
        while len(found) < count_max:
            next_ms = self.next_ms()
            if next_ms is None or next_ms > until_ms:
                break
            time_ms, key = self._pop()
            found.append((key, time_ms))
        return found

    def is_registered(self, key: Key, time_ms: int) -> bool:
        return (time_ms,) in self.table.get(key, 0)

    def restore(self, batch: pa.RecordBatch) -> None:
        self.table.restore(batch)
        numbers, keys = self._backend.keys_of(batch.columns[: batch.num_columns - 1])
        times = batch.column(VALUE).field(0).to_pylist()
        restored = zip(times, [keys[number] for number in numbers.tolist()], strict=True)
        self._replace([*self._queue, *restored], self._deleted)

    def rebuild(self) -> None:
        """Find in the backend what falls due: it has come back with its states."""
        lists = self.table.entries(0)
        self._replace([(row[0], key) for key, rows in lists for row in rows])

    def rename(self, renamed: Mapping[Key, Key]) -> None:
        """The backend has given its keys other names; those that are not there have no timers."""
        queue = [(time, renamed[key]) for time, key in self._queue if key in renamed]
        self._replace(queue, self._deleted)

    def clear(self) -> None:
        """Forget all."""
        for _, key in self._queue:
            self.table.clear(key)
        self._replace([])

    def _pop(self) -> tuple[int, Key]:
        timer = heapq.heappop(self._queue)
        self._queued.discard(timer)
        return timer

    def _forget_deleted(self) -> None:
        if self._deleted > _DELETED_MIN and 2 * self._deleted > len(self._queue):
            self._replace([each for each in self._queue if self.is_registered(each[1], each[0])])

    def _replace(self, queue: list[tuple[int, Key]], deleted: int = 0) -> None:
        heapq.heapify(queue)
        self._queue, self._queued, self._deleted = queue, set(queue), deleted
