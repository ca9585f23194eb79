"""Which keys have been seen, and until when each is remembered.

Theory of operation
-------------------
A key is a row of a `KeyIndex`; where keys are forgotten, a column beside it says when. A batch is
looked up as a whole: a record passes if its row is new, or if its key was due to be forgotten, and
if it is the first such record of its key in the batch.

A key whose time has come counts as forgotten at once, but its row stays until many can be freed
together: the rows that still count are then put into a new index. That is done when event time
passes the median of the times at which keys are forgotten, as it was when the table was last looked
at, which is when it has doubled. So at least a quarter of the rows goes each time, and a row is
moved a bounded number of times on average.

Rules of this file
------------------
1. A record whose event time is not after the watermark is late, and changes nothing.
2. A record without event time is never late, and its key is never forgotten. (Spark does so where
   the event time is among the keys; within a watermark it takes null for 1970, and then it depends
   on where batches end what comes of duplicates.)
3. What a key does follows from the watermark and never from when rows are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.key_groups import (
    NO_COLUMNS_HASH,
    Flags,
    Positions,
    hash_batch,
    key_groups_of,
)
from stillframe.state.accumulators import key_fields_of
from stillframe.state.aggregates import by_key_group, canonical, plain
from stillframe.state.columns import Array, ChangingColumns, ColumnSpec, FrozenColumns
from stillframe.state.key_index import FrozenKeyIndex, KeyIndex
from stillframe.state.key_places import keyed_by
from stillframe.state.panes import microseconds
from stillframe.state.reached import BEGINNING_US, GroupSpan, Reached

EXPIRES = "__expires_us"
"""The column of a snapshot that says until when a key is remembered."""

_NEVER_US = 2**63 - 1
_ROWS_MIN = 16_384
"""With fewer rows than this it is not worth looking for forgotten ones."""

_Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sifted:
    """What a batch came to."""

    fresh: pa.RecordBatch
    late: pa.RecordBatch


class SeenKeys:
    """The keys that one subtask remembers. Used by the loop thread only."""

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        max_parallelism: int,
        time: str | None = None,
        keep_us: int | None = None,
    ) -> None:
        """`keep_us` is how long after its event time a key is remembered; None: for ever."""
        assert keep_us is None or time is not None, "keys are forgotten by event time"
        self._keys = tuple(keys)
        self._max_parallelism = max_parallelism
        self._time = time
        self._keep_us = keep_us
        # Null is a key, whatever the input says; and nullability is not worth a mismatch.
        fields = [pa.field(each.name, each.type) for each in key_fields_of(input_schema, keys)]
        self._types = [field.type for field in fields]
        self._float_places = [
            input_schema.get_field_index(each.name) for each in fields if pt.is_floating(each.type)
        ]
        # Without keys too: a batch without columns would not say that its one row is there.
        has_times = keep_us is not None or not fields
        expires = [pa.field(EXPIRES, pa.int64())] if has_times else []
        self.snapshot_schema = keyed_by(pa.schema([*fields, *expires]), range(len(fields)))
        self._index = KeyIndex(self._types)
        self._expires = _no_times()
        self._now_us = BEGINNING_US
        self._reached: Reached | None = None
        self._looked_at_rows = 0
        self._sweep_us = _NEVER_US
        self._version = 0

    def __len__(self) -> int:
        """How many rows there are, with those that wait to be freed."""
        return len(self._index)

    @property
    def state_bytes(self) -> int:
        return self._index.nbytes + self._expires.nbytes

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    def sift(self, batch: pa.RecordBatch) -> Sifted:
        """Remember the keys of a batch; the records that are the first of theirs, and late ones."""
        is_late = self._late_in(batch)
        late = batch.slice(0, 0)
        if is_late is not None and is_late.any():
            late = batch.filter(pa.array(is_late))
            batch = batch.filter(pa.array(~is_late))
        firsts = self._firsts_of(batch)
        whole = len(firsts) == batch.num_rows
        return Sifted(self._shown(batch if whole else batch.take(pa.array(firsts))), late)

    def advance(self, time_us: int) -> None:
        """Event time has come this far: the keys due by then are forgotten."""
        self._now_us = max(self._now_us, time_us)
        if self._reached is not None and self._reached.is_passed_by(self._now_us):
            self._reached = None
        if self._keep_us is not None and self._now_us >= self._sweep_us:
            self._sweep()

    def resume(self, watermark_us: int | None, further: Iterable[GroupSpan] = ()) -> None:
        """How far event time had come before a restore.

        `further` are key groups for which it had come further.
        """
        self._now_us = BEGINNING_US if watermark_us is None else watermark_us
        self._reached = Reached.beyond(watermark_us, self._max_parallelism, further)
        self._look_at_times()

    @property
    def reached(self) -> Reached | None:
        """Key groups for which event time had come further before a restore."""
        return self._reached

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any record, each key at most once in all calls."""
        rows = self._rows_of(batch.columns[: len(self._keys)], batch.num_rows)
        if self._keep_us is not None:
            self._expires.extend_to(len(self._index))
            self._expires.arrays[0][rows] = np.asarray(batch.column(len(self._keys)))

    def freeze(self) -> FrozenSeenKeys:
        """The keys as they are now, by reference: the synchronous part of a snapshot."""
        return FrozenSeenKeys(
            self._index.freeze(),
            self._expires.freeze(),
            None if self._keep_us is None else self._now_us,
            self.snapshot_schema,
            self._max_parallelism,
        )

    # --- records

    def _late_in(self, batch: pa.RecordBatch) -> Flags | None:
        """Which records are late; None: none of them."""
        if self._time is None or (self._now_us == BEGINNING_US and self._reached is None):
            return None
        times = batch.column(self._time)
        is_late: Flags = microseconds(times) <= self._now_of(batch)
        return is_late & np.asarray(times.is_valid()) if times.null_count else is_late

    def _now_of(self, batch: pa.RecordBatch) -> _Times | np.int64:
        """How far event time has come, for all records or for each."""
        if self._reached is None:
            return np.int64(self._now_us)
        return np.maximum(self._reached.times_of(hash_batch(batch, self._keys)), self._now_us)

    def _firsts_of(self, batch: pa.RecordBatch) -> Positions:
        """The positions of the records that pass, in their order."""
        known = len(self._index)
        rows = self._rows_of([batch.column(key) for key in self._keys], batch.num_rows)
        firsts = _first_of_each_new(rows, known, len(self._index))
        if self._keep_us is not None:
            self._expires.extend_to(len(self._index))
            again = self._first_of_each_forgotten(batch, rows, known)
            firsts = np.union1d(firsts, again) if len(again) else firsts
            self._remember(batch, rows, firsts)
            if len(self._index) >= max(2 * self._looked_at_rows, _ROWS_MIN):
                self._look_at_times()
        self._version += len(firsts) > 0
        return firsts

    def _first_of_each_forgotten(
        self, batch: pa.RecordBatch, rows: Positions, known: int
    ) -> Positions:
        due = np.flatnonzero(rows < known)
        now_us = self._now_of(batch)
        by_then = now_us if isinstance(now_us, np.int64) else now_us[due]
        due = due[self._expires.arrays[0].take(rows[due]) <= by_then]
        return due[np.unique(rows[due], return_index=True)[1]]

    def _remember(self, batch: pa.RecordBatch, rows: Positions, firsts: Positions) -> None:
        assert self._time is not None
        assert self._keep_us is not None
        times = batch.column(self._time)
        times_us = microseconds(times)[firsts]
        expires_us = np.minimum(times_us, _NEVER_US - self._keep_us) + self._keep_us
        if times.null_count:
            expires_us[~np.asarray(times.is_valid())[firsts]] = _NEVER_US
        changed = rows[firsts]
        self._expires.before_change(changed)
        self._expires.arrays[0][changed] = expires_us

    def _shown(self, fresh: pa.RecordBatch) -> pa.RecordBatch:
        """Which of 0.0 and -0.0 came first says nothing: both are shown as the key that they are,
        as in Spark's tables."""
        for place in self._float_places:
            column = canonical(fresh.column(place))
            fresh = fresh.set_column(place, fresh.schema.field(place), column)
        return fresh

    def _rows_of(self, keys: Sequence[pa.Array], count: int) -> Positions:
        hashes = None if keys else np.full(count, NO_COLUMNS_HASH, dtype=np.uint64)
        return self._index.rows_of(keys, hashes)

    # --- forgetting

    def _look_at_times(self) -> None:
        """When half of the rows there are can be freed."""
        self._looked_at_rows = rows = len(self._index)
        if self._keep_us is None or rows < _ROWS_MIN:
            self._sweep_us = _NEVER_US
            return
        expires_us = self._expires.arrays[0][:rows]
        self._sweep_us = int(np.partition(expires_us, rows // 2)[rows // 2])

    def _sweep(self) -> None:
        """Move the rows that still count into a new index."""
        expires_us = self._expires.arrays[0][: len(self._index)]
        kept = np.flatnonzero(expires_us > self._now_us)
        times_us = expires_us.take(kept)
        columns = [plain(keys.take(kept)) for keys in self._index.freeze().columns]
        self._index, self._expires = KeyIndex(self._types), _no_times()
        rows = self._rows_of(columns, len(kept))
        self._expires.extend_to(len(self._index))
        self._expires.arrays[0][rows] = times_us
        self._look_at_times()


def _no_times() -> ChangingColumns:
    return ChangingColumns([ColumnSpec(np.int64, _NEVER_US)])


def _first_of_each_new(rows: Positions, known: int, count: int) -> Positions:
    """Where each row from `known` to `count` appears first; all of them appear."""
    new = np.flatnonzero(rows >= known)
    if len(new) == count - known:
        return new
    where = rows[new] - known
    first = np.empty(count - known, dtype=np.int64)
    first[where[::-1]] = new[::-1]  # of several writes to one row the last stays
    is_first: Flags = first.take(where) == new
    return new[is_first]


class FrozenSeenKeys:
    """The keys as they were at the barrier, without the forgotten ones."""

    def __init__(
        self,
        index: FrozenKeyIndex,
        expires: FrozenColumns,
        forgotten_us: int | None,
        snapshot_schema: pa.Schema,
        max_parallelism: int,
    ) -> None:
        """Those that expire until `forgotten_us` are left out; None: all are there."""
        self._index = index
        self._expires = expires
        self._forgotten_us = forgotten_us
        self.snapshot_schema = snapshot_schema
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        """How many rows there are at most: the forgotten ones are left out in the background."""
        return len(self._index.hashes)

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups."""
        expires_us = self._expires_us()
        kept = np.arange(len(self))
        if self._forgotten_us is not None:
            kept = np.flatnonzero(expires_us > self._forgotten_us)
        groups = key_groups_of(self._index.hashes.take(kept), self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = kept[order[bounds[group] : bounds[group + 1]]]
            columns = [keys.take(rows) for keys in self._index.columns]
            if len(columns) < len(self.snapshot_schema):
                columns.append(pa.array(expires_us.take(rows)))
            yield group, pa.RecordBatch.from_arrays(columns, schema=self.snapshot_schema)

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        self._expires.release()

    def _expires_us(self) -> Array:
        """When each key is forgotten; of those that never are, there is no column."""
        whole = np.full(len(self), _NEVER_US, dtype=np.int64)
        start = 0
        for chunk in range(self._expires.chunk_count):
            (part,) = self._expires.chunk(chunk)
            whole[start : start + len(part)] = part
            start += len(part)
        return whole
