"""The newest row of each key, of a stream whose rows are looked up.

Theory of operation
-------------------
Whole rows are kept as Arrow batches, of which each new one is put behind the others; two of about
the same size are made one, so that there are never many. A key is a row of a `KeyIndex`, and a
column beside it says at which place among all kept rows its newest one is. What is replaced stays
where it is until it is more than what counts; then the rows that count are copied together. So
each row is copied a bounded number of times per doubling.

Freezing costs references: batches are never changed, and the columns of places can be frozen.

Rules of this file
------------------
1. A row without one of its keys is never found, so it is not kept.
2. Newer is what has the later event time, and of those that have the same one what came later. A
   row without event time is older than any that has one. Without a column of event time it is what
   came later.
3. Keys are never forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.key_groups import Flags, Positions, hash_columns, key_groups_of
from stillframe.state.accumulators import key_fields_of
from stillframe.state.aggregates import by_key_group, plain
from stillframe.state.columns import ChangingColumns, ColumnSpec, FrozenColumns
from stillframe.state.key_index import FrozenKeyIndex, KeyIndex
from stillframe.state.key_places import keyed_by
from stillframe.state.panes import microseconds
from stillframe.state.reached import BEGINNING_US

_PLACE, _TIME = 0, 1
_SPARE_ROWS_MIN = 65_536
"""With fewer replaced rows than this it is not worth copying those that count."""


class NewestRows:
    """The newest rows of one subtask. Used by the loop thread only."""

    def __init__(
        self, schema: pa.Schema, keys: Sequence[str], time: str | None, max_parallelism: int
    ) -> None:
        # Nullability is not worth a mismatch between a snapshot and the stream.
        fields = [pa.field(field.name, field.type) for field in schema]
        self.schema = keyed_by(pa.schema(fields), [schema.get_field_index(key) for key in keys])
        self._keys = tuple(keys)
        self._time = time
        self._max_parallelism = max_parallelism
        self._index = KeyIndex([field.type for field in key_fields_of(schema, keys)])
        self._columns = _no_rows()
        self._kept = _KeptRows(self.schema)
        self._version = 0

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._index)

    @property
    def kept_rows(self) -> int:
        """How many rows there are, with those that were replaced."""
        return len(self._kept)

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    def update(self, batch: pa.RecordBatch) -> None:
        """Take a batch in: the newest row of each of its keys, where it is newer than what is."""
        batch = self._with_keys(batch)
        if not batch.num_rows:
            return
        rows = self._index.rows_of([batch.column(key) for key in self._keys])
        self._columns.extend_to(len(self._index))
        times_us = self._times_of(batch)
        newest = _newest_of_each(rows, times_us)
        is_newer: Flags = times_us[newest] >= self._columns.arrays[_TIME].take(rows[newest])
        newest = newest[is_newer]
        if len(newest):
            self._replace(batch.take(pa.array(newest)), rows[newest], times_us[newest])

    def find(self, keys: Sequence[pa.Array]) -> Positions:
        """The place of the newest row of each of these keys, -1 where there is none."""
        rows = self._index.find(keys, hash_columns(keys))  # none of a null: it is not kept
        places = np.full(len(rows), -1, dtype=np.int64)
        here = rows >= 0
        places[here] = self._columns.arrays[_PLACE].take(rows[here])
        return places

    def take(self, places: Positions) -> pa.RecordBatch:
        """The rows at these places, which `find` has answered; of nulls where it is -1."""
        return self._kept.freeze().take(places)

    def freeze(self) -> FrozenNewestRows:
        """The rows as they are now, by reference: the synchronous part of a snapshot."""
        return FrozenNewestRows(
            self._index.freeze(),
            self._columns.freeze(),
            self._kept.freeze(),
            self._max_parallelism,
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any other."""
        self.update(batch)

    def _with_keys(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for key in self._keys:
            column = batch.column(key)
            if column.null_count:
                batch = batch.filter(column.is_valid())
        return batch

    def _times_of(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        if self._time is None:
            return np.zeros(batch.num_rows, dtype=np.int64)
        times = batch.column(self._time)
        times_us = microseconds(times)
        return np.where(np.asarray(times.is_valid()), times_us, BEGINNING_US)

    def _replace(
        self, batch: pa.RecordBatch, rows: Positions, times_us: npt.NDArray[np.int64]
    ) -> None:
        self._columns.before_change(rows)
        places, known_us = self._columns.arrays
        places[rows] = np.arange(len(self._kept), len(self._kept) + len(rows))
        known_us[rows] = times_us
        self._kept.append(batch)
        self._version += 1
        if len(self._kept) > 2 * len(self._index) + _SPARE_ROWS_MIN:
            self._drop_replaced()

    def _drop_replaced(self) -> None:
        count = len(self._index)
        places, known_us = (array[:count] for array in self._columns.arrays)
        self._kept = _KeptRows(self.schema, self._kept.freeze().take(places))
        # Others, not changed ones: a snapshot under way goes on with the old places.
        self._columns, old_us = _no_rows(), known_us
        self._columns.extend_to(count)
        self._columns.arrays[_PLACE][:count] = np.arange(count)
        self._columns.arrays[_TIME][:count] = old_us


def _no_rows() -> ChangingColumns:
    return ChangingColumns([ColumnSpec(np.int64, -1), ColumnSpec(np.int64, BEGINNING_US)])


def _newest_of_each(rows: Positions, times_us: npt.NDArray[np.int64]) -> Positions:
    """Where the newest record of each row is, in their order."""
    order = np.lexsort((times_us, rows))  # stable: of equal times the last came last
    ordered = rows.take(order)
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    return np.sort(order[is_last])


class _KeptRows:
    """Rows one behind the other, in batches of which each is at least twice as long as the next."""

    def __init__(self, schema: pa.Schema, first: pa.RecordBatch | None = None) -> None:
        self._schema = schema
        self._batches: tuple[pa.RecordBatch, ...] = () if first is None else (first,)
        self._count = 0 if first is None else first.num_rows

    def __len__(self) -> int:
        return self._count

    def append(self, batch: pa.RecordBatch) -> None:
        last = pa.RecordBatch.from_arrays(list(map(plain, batch.columns)), schema=self._schema)
        self._count += last.num_rows
        batches = self._batches
        while batches and batches[-1].num_rows < 2 * last.num_rows:
            last = pa.concat_batches([batches[-1], last])
            batches = batches[:-1]
        self._batches = (*batches, last)

    def freeze(self) -> _FrozenBatches:
        return _FrozenBatches(self._schema, self._batches)


class _FrozenBatches:
    """Rows one behind the other, which do not change."""

    def __init__(self, schema: pa.Schema, batches: tuple[pa.RecordBatch, ...]) -> None:
        self.schema = schema
        self._batches = batches or (pa.RecordBatch.from_pylist([], schema=schema),)
        lengths = [batch.num_rows for batch in self._batches]
        self._begins = np.cumsum([0, *lengths[:-1]])

    def take(self, places: Positions) -> pa.RecordBatch:
        """The rows at these places; of nulls where it is -1."""
        if len(self._batches) == 1:
            return self._batches[0].take(_indices(places))
        # Batch by batch: Arrow makes one of a chunked column before it takes anything of it.
        which = np.searchsorted(self._begins, places, side="right") - 1  # -1 for none: the first
        order = np.argsort(which, kind="stable")
        which = np.maximum(which.take(order), 0)
        bounds = np.searchsorted(which, np.arange(len(self._batches) + 1))
        parts = []
        for place, batch in enumerate(self._batches):
            wanted = places.take(order[bounds[place] : bounds[place + 1]])
            offset = np.where(wanted < 0, wanted, wanted - self._begins[place])
            if len(wanted):
                parts.append(batch.take(_indices(offset)))
        if not parts:
            return self._batches[0].slice(0, 0)
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_batches(parts).take(pa.array(back))


def _indices(places: Positions) -> pa.Array:
    is_absent = places < 0
    return pa.array(places, mask=is_absent if is_absent.any() else None)


class FrozenNewestRows:
    """The newest rows as they were at the barrier."""

    def __init__(
        self,
        index: FrozenKeyIndex,
        columns: FrozenColumns,
        kept: _FrozenBatches,
        max_parallelism: int,
    ) -> None:
        self._index = index
        self._columns = columns
        self._kept = kept
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._kept.schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups."""
        places = self._places()
        groups = key_groups_of(self._index.hashes, self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            yield group, self._kept.take(places.take(order[bounds[group] : bounds[group + 1]]))

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        self._columns.release()

    def _places(self) -> Positions:
        whole = np.empty(len(self), dtype=np.int64)
        start = 0
        for chunk in range(self._columns.chunk_count):
            part = self._columns.chunk(chunk)[_PLACE]
            whole[start : start + len(part)] = part
            start += len(part)
        return whole
