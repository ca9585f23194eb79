"""Running aggregates per key: count, sum, min, max, avg, on whole columns, with Spark's meanings.

A table maps keys to rows (`key_index`) and keeps what each aggregate has accumulated as numpy
columns with one value per row (`columns`). A batch is folded in by a few numpy calls per aggregate.
Freezing costs references; snapshot rows are sorted by key group later, in the background.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import (
    NO_COLUMNS_HASH,
    Flags,
    Positions,
    Words,
    key_column,
    key_groups_of,
)
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.columns import Array, ChangingColumns, FrozenColumns, arranged
from stillframe.state.folding import Accumulator, Touched
from stillframe.state.key_index import FrozenKeyIndex, KeyIndex, arrow_of_words
from stillframe.state.key_places import keyed_by
from stillframe.state.number_index import FrozenNumbers, NumberIndex

_ROWS_AT_ONCE = 32_768
"""So many rows of a snapshot become columns at a time: of strings that are Python objects, within
a millisecond with Python's lock."""


class Layout:
    """Where the columns of each aggregate are, in memory and in a snapshot."""

    def __init__(self, key_fields: Sequence[pa.Field], accumulators: Sequence[Accumulator]) -> None:
        self.accumulators = accumulators
        self.key_count = len(key_fields)
        self.columns = [spec for each in accumulators for spec in each.columns]
        self._in_memory = _consecutive([len(each.columns) for each in accumulators])
        fields = [each.snapshot_fields() for each in accumulators]
        self.in_snapshot = _consecutive([len(each) for each in fields], self.key_count)
        # Null is a key, whatever the input says; and nullability is not worth a mismatch.
        keys = [pa.field(field.name, field.type) for field in key_fields]
        self.snapshot_schema = keyed_by(
            pa.schema([*keys, *(field for each in fields for field in each)]), range(len(keys))
        )
        self.result_schema = pa.schema(
            [*keys, *(pa.field(each.call.name, each.call.type) for each in accumulators)]
        )

    @property
    def held_bytes(self) -> int:
        """What the aggregates hold outside of their columns."""
        return sum(each.held_bytes for each in self.accumulators)

    def each_in_memory(self) -> Iterator[tuple[Accumulator, slice]]:
        """Each accumulator, and where its columns are among those of the table."""
        return zip(self.accumulators, self._in_memory, strict=True)


def _consecutive(lengths: Sequence[int], start: int = 0) -> list[slice]:
    slices = []
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return slices


class AggregateTable:
    """The running aggregates of one subtask. Used by the loop thread only."""

    ROWS_MAX: ClassVar[int] = 2**31 - 2

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        max_parallelism: int,
        keys_expected: int | None = None,
        index: KeyIndex | NumberIndex | None = None,
    ) -> None:
        """`keys_expected` makes a table small if there will be few; more than that may come.

        `index` is an empty one of these keys that suits them better than any.
        """
        self._keys = tuple(keys)
        key_fields = key_fields_of(input_schema, keys)
        self._layout = Layout(key_fields, accumulators_of(input_schema, calls))
        if index is None:
            index = key_index([field.type for field in key_fields], keys_expected)
        self._index = index
        self._by_group = GroupPlaces(max_parallelism)
        self._columns = ChangingColumns(self._layout.columns)
        self._scratch: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._version = 0

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._index)

    @property
    def state_bytes(self) -> int:
        """Roughly what the table occupies; Python strings of min and max are not counted."""
        working = self._index.nbytes + self._columns.nbytes + self._scratch.nbytes
        return working + self._by_group.size_bytes + self._layout.held_bytes

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    @property
    def result_schema(self) -> pa.Schema:
        return self._layout.result_schema

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._layout.snapshot_schema

    def update(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Fold the batch in; the new values of each key it touched, by first appearance."""
        return self._results(*self._updated(batch))

    def merge(self, partials: pa.RecordBatch) -> pa.RecordBatch:
        """As `update`, of rows like those of a snapshot, each made of several records."""
        return self._results(*self._merged(partials))

    def take_in(self, batch: pa.RecordBatch, *, partial: bool) -> None:
        """As `merge` if the rows are partial aggregates, else as `update`, without an answer."""
        if partial:
            self._merged(batch)
        else:
            self._updated(batch)

    def _updated(self, batch: pa.RecordBatch) -> tuple[list[pa.Array], Touched]:
        keys = [canonical(batch.column(key)) for key in self._keys]
        touched = self._touched(keys, batch.num_rows)
        with np.errstate(all="ignore"):  # infinities and NaN are values; overflow is looked for
            for accumulator, where in self._layout.each_in_memory():
                accumulator.fold(self._columns.arrays[where], touched, accumulator.input_of(batch))
        return keys, touched

    def _merged(self, partials: pa.RecordBatch) -> tuple[list[pa.Array], Touched]:
        keys = partials.columns[: self._layout.key_count]
        touched = self._touched(keys, partials.num_rows)
        with np.errstate(all="ignore"):
            for (accumulator, where), columns in zip(
                self._layout.each_in_memory(), self._layout.in_snapshot, strict=True
            ):
                accumulator.merge(self._columns.arrays[where], touched, partials.columns[columns])
        return keys, touched

    def results(self) -> pa.RecordBatch:
        """The values of all keys."""
        columns = self._keys_at(np.arange(len(self)))
        for accumulator, where in self._layout.each_in_memory():
            parts = [array[: len(self)].copy() for array in self._columns.arrays[where]]
            columns.append(accumulator.result(parts))
        return pa.RecordBatch.from_arrays(columns, schema=self._layout.result_schema)

    def keys(self) -> pa.RecordBatch:
        """All keys."""
        schema = pa.schema(list(self._layout.result_schema)[: self._layout.key_count])
        return pa.RecordBatch.from_arrays(self._keys_at(np.arange(len(self))), schema=schema)

    def parts(self) -> list[Array]:
        """What has been accumulated of all keys, by reference: good until the next change."""
        return [array[: len(self)] for array in self._columns.arrays]

    def held_of(self, keys: Sequence[pa.Array], hashes: Words) -> tuple[Positions, list[Array]]:
        """Which of these keys are here, by their places, and what has been accumulated of them."""
        rows = self._index.find(keys, hashes)
        here = np.flatnonzero(rows >= 0)
        return here, [array.take(rows[here]) for array in self._columns.arrays]

    def _keys_at(self, rows: Positions) -> list[pa.Array]:
        return [key.take(rows) for key in self._index.freeze().columns]

    def freeze(self) -> FrozenTable:
        """The table as it is now, by reference: the synchronous part of a snapshot."""
        return FrozenTable(
            self._index.freeze(), self._columns.freeze(), self._layout, self._by_group
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any update, each key at most once in all calls."""
        self._put(self._rows_of(batch.columns[: self._layout.key_count], batch.num_rows), batch)

    def _put(self, rows: Positions, batch: pa.RecordBatch) -> None:
        """Rows of a snapshot in the place of these; of several for one row the last stays."""
        self._columns.before_change(rows)
        for (accumulator, memory), snapshot in zip(
            self._layout.each_in_memory(), self._layout.in_snapshot, strict=True
        ):
            values = accumulator.from_snapshot(batch.columns[snapshot])
            for array, restored in zip(self._columns.arrays[memory], values, strict=True):
                array[rows] = restored

    def _touched(self, keys: Sequence[pa.Array], count: int) -> Touched:
        touched = Touched(self._rows_of(keys, count), self._scratch_for_all_rows())
        self._columns.before_change(touched.distinct)
        return touched

    def _rows_of(
        self, keys: Sequence[pa.Array], count: int, hashes: Words | None = None
    ) -> Positions:
        if not keys:
            hashes = np.full(count, NO_COLUMNS_HASH, dtype=np.uint64)
        rows = self._index.rows_of(keys, hashes)
        self._version += count > 0  # whoever asks for rows is about to change them
        self._columns.extend_to(len(self._index))
        return rows

    def _scratch_for_all_rows(self) -> npt.NDArray[np.int32]:
        if len(self._scratch) < len(self._index):
            self._scratch = np.zeros(2 * len(self._index), dtype=np.int32)
        return self._scratch

    def _results(self, keys: Sequence[pa.Array], touched: Touched) -> pa.RecordBatch:
        first = pa.array(touched.first_records)
        columns = [plain(key.take(first)) for key in keys]
        for accumulator, where in self._layout.each_in_memory():
            arrays = self._columns.arrays[where]
            columns.append(accumulator.result([array.take(touched.distinct) for array in arrays]))
        return pa.RecordBatch.from_arrays(columns, schema=self._layout.result_schema)


class FrozenTable:
    """A table as it was at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        index: FrozenKeyIndex | FrozenNumbers,
        columns: FrozenColumns,
        layout: Layout,
        places: GroupPlaces,
    ) -> None:
        self._index = index
        self._columns = columns
        self._layout = layout
        self._places = places

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._layout.snapshot_schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups.

        Numpy lets go of the interpreter while it copies, sorts and moves plain numbers, so the loop
        goes on beside it. Columns are made of many groups at once and cut afterwards: a group may
        have a few rows only, and every call for it may wait for the loop.
        """
        places, starts = self._places.of(self._index, len(self))
        keys = [key.arranged(places) for key in self._index.columns]
        columns = self._columns.arranged(places)
        for groups in _runs(starts):
            first, last = starts[groups.start], starts[groups.stop]
            parts = [column[first:last] for column in columns]
            batch = self._batch([between(first, last) for between in keys], parts)
            for group in groups:
                if rows := starts[group + 1] - starts[group]:
                    yield group, batch.slice(starts[group] - first, rows)

    def rows(self) -> pa.RecordBatch:
        """All rows at once, in no order."""
        everyone = np.arange(len(self))
        return self._batch([key.take(everyone) for key in self._index.columns], self.columns())

    @property
    def hashes(self) -> Words:
        """The hash of each row's key, in the order of `rows`; there after a release too."""
        return self._index.hashes

    def columns(self) -> list[Array]:
        """What has been accumulated, copied: good after a release."""
        return self._columns.whole()

    def rows_at(self, rows: Positions, columns: Sequence[Array]) -> pa.RecordBatch:
        """Some rows, of the `columns` this view gave; after a release too."""
        keys = [key.take(rows) for key in self._index.columns]
        return self._batch(keys, [column.take(rows) for column in columns])

    def release(self) -> None:
        """Give the memory back; later updates copy nothing for this view. May be called twice."""
        self._columns.release()

    def _batch(self, keys: Sequence[pa.Array], parts: Sequence[Array]) -> pa.RecordBatch:
        columns = list(keys)
        for accumulator, where in self._layout.each_in_memory():
            columns.extend(accumulator.to_snapshot(parts[where]))
        return pa.RecordBatch.from_arrays(columns, schema=self._layout.snapshot_schema)


class GroupPlaces:
    """Where the rows of a table are by key group, kept from one snapshot to the next.

    A table only ever gets more rows, so they have other places only if there are more. Finding
    them is two fifths of what a snapshot of plain numbers costs. One snapshot at a time asks for
    them; another that does so in the same moment may find them again, and finds the same.
    """

    def __init__(self, max_parallelism: int) -> None:
        self._max_parallelism = max_parallelism
        self._known: tuple[Positions, list[int]] | None = None

    @property
    def size_bytes(self) -> int:
        return 0 if self._known is None else self._known[0].nbytes

    def of(self, index: FrozenKeyIndex | FrozenNumbers, rows: int) -> tuple[Positions, list[int]]:
        """The place of each of so many rows, which are all that the index knows, and at which each
        key group begins; the last of the beginnings is the end of all."""
        known = self._known
        if known is None or len(known[0]) != rows:
            groups = key_groups_of(index.hashes, self._max_parallelism)
            order, bounds = by_key_group(groups, self._max_parallelism)
            known = self._known = arranged(np.arange(rows), order), bounds.tolist()
        return known


def _runs(starts: list[int]) -> Iterator[range]:
    """Neighbouring key groups, as many as have so many rows together as become columns at a time;
    one that has more is alone."""
    first, count = 0, len(starts) - 1
    while first < count:
        stop = max(first + 1, bisect_right(starts, starts[first] + _ROWS_AT_ONCE) - 1)
        yield range(first, stop)
        first = stop


def by_key_group(
    groups: npt.NDArray[np.int32], max_parallelism: int
) -> tuple[Positions, Positions]:
    """Row numbers by key group and by row within one, and where each key group begins.

    The last of the beginnings is the end of all. 16-bit numbers are sorted by radix.
    """
    narrow = groups.astype(np.uint16) if max_parallelism <= 1 << 16 else groups
    order = np.argsort(narrow, kind="stable")
    # Not bincount, which keeps the interpreter to itself.
    return order, np.searchsorted(groups.take(order), np.arange(max_parallelism + 1))


def key_index(types: Sequence[pa.DataType], keys_expected: int | None) -> KeyIndex:
    """An index with many times more places than keys are expected, so that few collide."""
    if keys_expected is None:
        return KeyIndex(types)
    return KeyIndex(types, slots_log2=min(max((16 * keys_expected).bit_length(), 8), 16))


def numbers_of(index: KeyIndex, keys: Sequence[pa.Array], count: int) -> Positions:
    """The row of each of `count` records' keys as Spark groups them; new keys get the next rows.

    Without any key column all records are of one group.
    """
    if not keys:
        return index.rows_of([], np.full(count, NO_COLUMNS_HASH, dtype=np.uint64))
    return index.rows_of([canonical(key) for key in keys])


def canonical(key: pa.Array) -> pa.Array:
    """A key column as it is emitted: Spark makes -0.0 into 0.0 before it groups."""
    if not pt.is_floating(key.type):
        return key
    prepared: Any = key_column(key)
    valid: Flags = np.asarray(key.is_valid())
    return arrow_of_words(prepared.words, valid, key.type)


def plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column
