"""Timers that are registered one by one, for the key that is at work.

`state/timers` is for those who register whole columns. Here a key's timers are found at once, as a
program that handles one key after the other lists and deletes them all the time.

Theory of operation: a key's timers are a list state of its own, in the backend with all others;
what falls due next is found in a heap of (time, key), made anew at every start. A deleted timer
stays in the heap, and is passed over when its time comes and the key no longer has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Generic

import pyarrow as pa

from stillframe.state.backends import VALUE, Backend, Declared, Key, Kind
from stillframe.state.rows import RowType

_SCHEMA = pa.schema([pa.field("time_ms", pa.int64(), nullable=False)])


class KeyTimers(Generic[Key]):
    """The timers of one clock, of all keys of a subtask; times are in milliseconds since 1970."""

    def __init__(self, backend: Backend[Key], name: str) -> None:
        self._backend = backend
        self.table = backend.lists(Declared(name, Kind.LIST, RowType(_SCHEMA)))
        self._queue: list[tuple[int, Key]] = []

    def of(self, key: Key) -> list[int]:
        """The times of this key's timers, ascending."""
        return sorted(row[0] for row in self.table.get(key, 0))

    def register(self, key: Key, time_ms: int) -> None:
        """A timer that is there already stays one."""
        if not self.is_registered(key, time_ms):
            self.table.append(key, [(time_ms,)], None)
            heapq.heappush(self._queue, (time_ms, key))

    def delete(self, key: Key, time_ms: int) -> None:
        """Forget it; there may be none."""
        rows = self.table.get(key, 0)
        if (time_ms,) in rows:
            self.table.put(key, [row for row in rows if row != (time_ms,)], None)

    def next_ms(self) -> int | None:
        """The earliest time; None: there is no timer."""
        queue = self._queue
        while queue and not self.is_registered(queue[0][1], queue[0][0]):
            heapq.heappop(queue)
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
            time_ms, key = heapq.heappop(self._queue)
            found.append((key, time_ms))
        return found

    def is_registered(self, key: Key, time_ms: int) -> bool:
        return (time_ms,) in self.table.get(key, 0)

    def restore(self, batch: pa.RecordBatch) -> None:
        self.table.restore(batch)
        numbers, keys = self._backend.keys_of(batch.columns[: batch.num_columns - 1])
        times = batch.column(VALUE).field(0).to_pylist()
        self._queue += zip(times, [keys[number] for number in numbers.tolist()], strict=True)
        heapq.heapify(self._queue)

    def rebuild(self) -> None:
        """Find in the backend what falls due: it has come back with its states."""
        lists = self.table.entries(0)
        self._queue = [(row[0], key) for key, rows in lists for row in rows]
        heapq.heapify(self._queue)

    def rename(self, renamed: Mapping[Key, Key]) -> None:
        """The backend has given its keys other names; those that are not there have no timers."""
        self._queue = [(time, renamed[key]) for time, key in self._queue if key in renamed]
        heapq.heapify(self._queue)

    def clear(self) -> None:
        """Forget all."""
        for _, key in self._queue:
            self.table.clear(key)
        self._queue = []
