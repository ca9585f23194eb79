"""The timers of one subtask, as columns: found by key and time, taken in the order of times.

Theory of operation
-------------------
Keys are kept once, with a number each. A timer of one clock is a pair of a key's number and a time,
and such pairs have numbers too, given by a second index: whether a timer is there is one lookup and
one flag. What is to fire next is kept in *runs*, arrays of timers sorted by time. A batch that is
registered becomes a run, and runs of about the same length are merged, so there are never many. The
next timers are the first of what stands at the heads of all runs. A deleted timer stays in its run,
without its flag, and is passed over when its time comes.

Numbers are never used again; when most of them are of timers that are gone, all is built anew.

A frozen table is the arrays as they were, which only grow, and a copy of the flags.

Rules of this file
------------------
1. Loops go over runs and clocks, never over timers or keys.
2. Times are int64 in microseconds since 1970 in UTC.
3. Called by the loop thread only; a frozen table is read by one background thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.timers import TimerClock
from stillframe.key_groups import Flags, Positions, fixed_width_values, hash_columns, key_groups_of
from stillframe.state.aggregates import by_key_group
from stillframe.state.columns import AppendOnly, with_capacity
from stillframe.state.key_index import FrozenKeyIndex, KeyIndex, fixed_width_array
from stillframe.state.key_places import keyed_by

TIME = "time"
"""The column of the times, where timers are shown."""
TIME_TYPE = pa.timestamp("us", "UTC")
CLOCKS: tuple[TimerClock, ...] = ("event", "processing")

_SAVED_TIME = "__timer_time"
_SAVED_CLOCK = "__timer_clock"
_ROWS_LOOKED_AT_MIN = 16
_NUMBERS_MIN = 16_384
"""With fewer numbers than this it is not worth looking for unused ones."""
_NUMBERS_PER_TIMER_MAX = 8

Times = npt.NDArray[np.int64]


# --- the timers of one clock


@dataclass(slots=True)
class _Run:
    """Timers in the order of their times; those before `start` are taken."""

    times: Times
    timers: Positions
    start: int = 0

    def __len__(self) -> int:
        return len(self.timers) - self.start

    def head(self, until_us: int, rows_max: int) -> slice:
        """Where the first timers until this time are."""
        window = self.times[self.start : self.start + rows_max]
        return slice(self.start, self.start + int(np.searchsorted(window, until_us, side="right")))

    def merged(self, younger: _Run) -> _Run:
        times = np.concatenate([self.times[self.start :], younger.times])
        timers = np.concatenate([self.timers[self.start :], younger.timers])
        order = np.argsort(times, kind="stable")  # of two sorted runs: a merge
        return _Run(times[order], timers[order])

    def without(self, is_deleted: Flags) -> _Run:
        kept = ~is_deleted
        return _Run(self.times[self.start :][kept], self.timers[self.start :][kept])


class _Clock:
    """The timers of one clock, by numbers of keys."""

    def __init__(self) -> None:
        self._index = KeyIndex([pa.int64(), pa.int64()], slots_log2=8)
        self._keys = AppendOnly(np.int64)
        self._times = AppendOnly(np.int64)
        self._is_there: Flags = np.zeros(0, dtype=np.bool_)
        self._is_in_run: Flags = np.zeros(0, dtype=np.bool_)
        self._runs: list[_Run] = []
        self._count = 0
        self._next_us: int | None = None
        self._is_next_known = True
        self._looked_at = _ROWS_LOOKED_AT_MIN

    def __len__(self) -> int:
        return self._count

    @property
    def numbers(self) -> int:
        """How many timers have a number, those that are gone among them."""
        return len(self._keys)

    def register(self, keys: Positions, times: Times) -> None:
        timers = self._numbered(keys, times)
        new = np.unique(timers[~self._is_there[timers]])
        self._is_there[new] = True
        self._count += len(new)
        self._queue(new[~self._is_in_run[new]])
        self._is_next_known = False

    def delete(self, keys: Positions, times: Times) -> None:
        """Those of keys that have no number, -1, are not there."""
        columns = [pa.array(keys), pa.array(times)]
        timers = self._index.find(columns, hash_columns(columns))
        timers = timers[timers >= 0]
        gone = np.unique(timers[self._is_there[timers]])
        self._is_there[gone] = False
        self._count -= len(gone)
        self._is_next_known = False

    def next_us(self) -> int | None:
        """The earliest time; None: there is no timer."""
        if not self._is_next_known:
            self._drop_deleted()
            heads = [int(run.times[run.start]) for run in self._runs]
            self._next_us = min(heads, default=None)
            self._is_next_known = True
        return self._next_us

    def take(self, until_us: int, rows_max: int) -> tuple[Positions, Times]:
        """The first timers until this time, each of another key: their keys and times."""
        next_us = self.next_us()
        if next_us is None or next_us > until_us:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        looked_at = min(self._looked_at, rows_max)
        timers, run_of = self._first(until_us, looked_at)
        count = self._until_repeated(timers)
        self._looked_at = max(2 * count, _ROWS_LOOKED_AT_MIN)
        for run, taken in zip(
            self._runs, np.bincount(run_of[:count], minlength=len(self._runs)), strict=True
        ):
            run.start += int(taken)
        return self._fired(timers[:count])

    def of_keys(self, wanted: Flags | None) -> tuple[Positions, Times]:
        """The timers of these keys, by their numbers, or of all, in the order of their times."""
        there = np.flatnonzero(self._is_there[: self.numbers])
        keys, times = self._keys.rows[there], self._times.rows[there]
        if wanted is not None:
            keys, times = keys[wanted[keys]], times[wanted[keys]]
        order = np.argsort(times, kind="stable")
        return keys[order], times[order]

    def freeze(self) -> _FrozenClock:
        there = self._is_there[: self.numbers].copy()
        return _FrozenClock(self._keys.rows, self._times.rows, there)

    def _numbered(self, keys: Positions, times: Times) -> Positions:
        before = self.numbers
        timers = self._index.rows_of([pa.array(keys), pa.array(times)])
        added = len(self._index) - before
        if added:
            new = timers >= before
            for column, values in ((self._keys, keys), (self._times, times)):
                placed = np.zeros(added, dtype=np.int64)
                placed[timers[new] - before] = values[new]
                column.append(placed)
            self._is_there = with_capacity(self._is_there, before, self.numbers)
            self._is_in_run = with_capacity(self._is_in_run, before, self.numbers)
        return timers

    def _queue(self, timers: Positions) -> None:
        if not len(timers):
            return
        self._is_in_run[timers] = True
        times = self._times.rows[timers]
        order = np.argsort(times, kind="stable")
        run = _Run(times[order], timers[order])
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = self._without_deleted(self._runs.pop()).merged(run)
        self._runs.append(run)

    def _without_deleted(self, run: _Run) -> _Run:
        left = run.timers[run.start :]
        is_deleted = ~self._is_there[left]
        self._is_in_run[left[is_deleted]] = False
        return run.without(is_deleted) if is_deleted.any() else run

    def _drop_deleted(self) -> None:
        """So that a timer that is there stands at the head of every run."""
        for run in self._runs:
            while len(run):
                window = run.timers[run.start : run.start + 1024]
                there = self._is_there[window]
                deleted = int(there.argmax()) if there.any() else len(window)
                self._is_in_run[window[:deleted]] = False
                run.start += deleted
                if deleted < len(window):
                    break
        self._runs = [run for run in self._runs if len(run)]

    def _first(self, until_us: int, rows_max: int) -> tuple[Positions, Positions]:
        """The first timers of all runs, and which run each is in: a prefix of every run."""
        heads = [run.head(until_us, rows_max) for run in self._runs]
        pairs = list(zip(self._runs, heads, strict=True))
        times = np.concatenate([run.times[head] for run, head in pairs])
        timers = np.concatenate([run.timers[head] for run, head in pairs])
        run_of = np.repeat(np.arange(len(pairs)), [head.stop - head.start for head in heads])
        order = np.argsort(times, kind="stable")[:rows_max]
        return timers[order], run_of[order]

    def _until_repeated(self, timers: Positions) -> int:
        """How many of these may go together: up to the second of any key."""
        there = np.flatnonzero(self._is_there[timers])
        keys = self._keys.rows[timers[there]]
        _, first = np.unique(keys, return_index=True)
        if len(first) == len(keys):
            return len(timers)
        repeated = np.ones(len(keys), dtype=np.bool_)
        repeated[first] = False
        return int(there[repeated.argmax()])

    def _fired(self, timers: Positions) -> tuple[Positions, Times]:
        self._is_in_run[timers] = False
        fired = timers[self._is_there[timers]]
        self._is_there[fired] = False
        self._count -= len(fired)
        self._is_next_known = False
        return self._keys.rows[fired], self._times.rows[fired]


@dataclass(frozen=True, slots=True)
class _FrozenClock:
    keys: Positions
    times: Times
    is_there: Flags

    def rows(self) -> tuple[Positions, Times]:
        there = np.flatnonzero(self.is_there)
        return self.keys[there], self.times[there]


# --- all of them


class TimerTable:
    """All timers of one operator of one subtask."""

    def __init__(
        self, key_schema: pa.Schema, max_parallelism: int, numbers_min: int = _NUMBERS_MIN
    ) -> None:
        # Null is a key, whatever the input says.
        self._fields = [pa.field(field.name, field.type) for field in key_schema]
        self._max_parallelism = max_parallelism
        self._numbers_min = numbers_min
        self.schema = pa.schema([*self._fields, pa.field(TIME, TIME_TYPE)])
        saved = [*self._fields, (_SAVED_TIME, TIME_TYPE), (_SAVED_CLOCK, pa.string())]
        self.snapshot_schema = keyed_by(pa.schema(saved), range(len(self._fields)))
        """Of timers that are shown or fired."""
        self._version = 0
        self._keys = self._no_keys()
        self._clocks = {clock: _Clock() for clock in CLOCKS}

    def __len__(self) -> int:
        return sum(map(len, self._clocks.values()))

    @property
    def numbers(self) -> int:
        """How many keys and timers have a number, those that are gone among them."""
        return len(self._keys) + sum(each.numbers for each in self._clocks.values())

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    def register(self, keys: Sequence[pa.Array], times: Times, clock: TimerClock) -> None:
        """A timer for each of these keys at its time; those that are there already stay one."""
        self._version += 1
        self._clocks[clock].register(self._keys.rows_of(keys), times)
        self._take_numbers_back()

    def delete(self, keys: Sequence[pa.Array], times: Times, clock: TimerClock) -> None:
        """Forget these; those that are not there are passed over."""
        self._version += 1
        self._clocks[clock].delete(self._keys.find(keys, hash_columns(keys)), times)

    def next_us(self, clock: TimerClock) -> int | None:
        """The earliest time; None: there is no timer."""
        return self._clocks[clock].next_us()

    def take(self, clock: TimerClock, until_us: int, rows_max: int) -> pa.RecordBatch:
        """The first timers until this time, which are gone then, in the order of their times.

        No key is among them twice, so there may be fewer than `rows_max` and yet more to take; if
        any is due there is at least one.
        """
        self._version += 1
        return self._shown(*self._clocks[clock].take(until_us, rows_max))

    def registered(self, keys: Sequence[pa.Array] | None, clock: TimerClock) -> pa.RecordBatch:
        """All timers of these keys, or of all keys, in the order of their times."""
        if keys is None:
            return self._shown(*self._clocks[clock].of_keys(None))
        wanted = np.zeros(len(self._keys) + 1, dtype=np.bool_)
        wanted[self._keys.find(keys, hash_columns(keys))] = True  # -1 is the one more
        return self._shown(*self._clocks[clock].of_keys(wanted))

    def clear(self) -> None:
        """Forget all."""
        self._version += 1
        self._keys = self._no_keys()
        self._clocks = {clock: _Clock() for clock in CLOCKS}

    def freeze(self) -> FrozenTimers:
        """The table as it is now: the synchronous part of a snapshot."""
        clocks = [each.freeze() for each in self._clocks.values()]
        keys, schema = self._keys.freeze(), self.snapshot_schema
        return FrozenTimers(keys, clocks, len(self), schema, self._max_parallelism)

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back."""
        clocks = batch.column(_SAVED_CLOCK)
        for clock in CLOCKS:
            rows = batch.filter(pc.equal(clocks, clock))
            keys = rows.columns[: len(self._fields)]
            times = fixed_width_values(rows.column(_SAVED_TIME))
            self.register(keys, times, clock)

    def _no_keys(self) -> KeyIndex:
        return KeyIndex([field.type for field in self._fields], slots_log2=8)

    def _shown(self, keys: Positions, times: Times) -> pa.RecordBatch:
        columns = [column.take(keys) for column in self._keys.freeze().columns]
        return pa.RecordBatch.from_arrays(
            [*columns, fixed_width_array(times, None, TIME_TYPE)], schema=self.schema
        )

    def _take_numbers_back(self) -> None:
        """Build all anew of what is there, when that is little beside what was."""
        numbers = self.numbers
        if numbers <= self._numbers_min or numbers <= _NUMBERS_PER_TIMER_MAX * len(self):
            return
        columns = self._keys.freeze().columns
        timers = {clock: each.of_keys(None) for clock, each in self._clocks.items()}
        self._keys = self._no_keys()
        self._clocks = {clock: _Clock() for clock in CLOCKS}
        for clock, (keys, times) in timers.items():
            anew = self._keys.rows_of([column.take(keys) for column in columns])
            self._clocks[clock].register(anew, times)


class FrozenTimers:
    """The timers as they were at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        keys: FrozenKeyIndex,
        clocks: Sequence[_FrozenClock],
        count: int,
        schema: pa.Schema,
        max_parallelism: int,
    ) -> None:
        self.snapshot_schema = schema
        self._keys = keys
        self._clocks = clocks
        self._count = count
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        return self._count

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The timers of each key group that has any, in ascending order of key groups."""
        rows = [clock.rows() for clock in self._clocks]
        keys = np.concatenate([keys for keys, _ in rows])
        times = np.concatenate([times for _, times in rows])
        clock_of = np.repeat(np.arange(len(rows)), [len(keys) for keys, _ in rows])
        groups = key_groups_of(self._keys.hashes.take(keys), self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            here = order[bounds[group] : bounds[group + 1]]
            yield group, self._batch(keys[here], times[here], clock_of[here])

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        self._clocks = ()
        self._count = 0

    def _batch(self, keys: Positions, times: Times, clock_of: Positions) -> pa.RecordBatch:
        columns = [column.take(keys) for column in self._keys.columns]
        clocks = pa.array(CLOCKS).take(pa.array(clock_of))
        return pa.RecordBatch.from_arrays(
            [*columns, fixed_width_array(times, None, TIME_TYPE), clocks],
            schema=self.snapshot_schema,
        )
