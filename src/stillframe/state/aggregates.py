"""Running aggregates per key: count, sum, min, max, avg, on whole columns, with Spark's meanings.

A table maps keys to rows (`key_index`) and keeps what each aggregate has accumulated as numpy
columns with one value per row (`columns`). A batch is folded in by a few numpy calls per aggregate.
Freezing costs references; snapshot rows are sorted by key group later, in the background.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError, DataError
from stillframe.key_groups import (
    NO_COLUMNS_HASH,
    Flags,
    Positions,
    fixed_width_values,
    key_column,
    key_groups_of,
    stored_dtype,
    unsupported_key_type,
    validity,
)
from stillframe.state.columns import Array, ChangingColumns, ColumnSpec, FrozenColumns
from stillframe.state.key_index import (
    FrozenKeyIndex,
    KeyIndex,
    arrow_of_words,
    fixed_width_array,
)

_INT64_MAX = 2**63 - 1


def unsupported(call: AggregateCall, input_type: pa.DataType | None) -> str | None:
    """Why this aggregate cannot be kept, in one clause; None if it can.

    `input_type` is that of the column it reads; None for a count of records.
    """
    if call.function == "count":
        return _type_mismatch(call, pa.int64())
    if input_type is None:
        return f"{call.function} needs a column to read"
    if call.function in ("sum", "avg"):
        if not _is_summable(input_type):
            return f"{call.function} of type {input_type} is not supported"
        whole = call.function == "sum" and pt.is_integer(input_type)
        return _type_mismatch(call, pa.int64() if whole else pa.float64())
    if not (_is_ordered_fixed_width(input_type) or _is_plain_text(input_type)):
        return f"{call.function} of type {input_type} is not supported"
    return _type_mismatch(call, input_type)


def _type_mismatch(call: AggregateCall, made: pa.DataType) -> str | None:
    if call.type == made:
        return None
    return f"{call.name} makes values of type {made}, not {call.type}"


def _is_summable(type_: pa.DataType) -> bool:
    whole = pt.is_integer(type_) and not pt.is_uint64(type_)
    return bool(whole or pt.is_float32(type_) or pt.is_float64(type_))


def _is_ordered_fixed_width(type_: pa.DataType) -> bool:
    return bool(
        pt.is_integer(type_)
        or pt.is_float32(type_)
        or pt.is_float64(type_)
        or pt.is_boolean(type_)
        or pt.is_date(type_)
        or pt.is_timestamp(type_)
    )


def _is_plain_text(type_: pa.DataType) -> bool:
    return bool(pt.is_string(type_) or pt.is_large_string(type_))


# --- what a batch means to the aggregates


class _Touched:
    """The rows of a table that a batch touches."""

    def __init__(self, rows: Positions, scratch: npt.NDArray[np.int32]) -> None:
        self.rows = rows
        """The row of each record."""
        self._scratch = scratch
        order = np.arange(len(rows), dtype=np.int32)
        scratch[rows[::-1]] = order[::-1]  # of several writes to one row the last stays
        self.first_records: Positions = np.flatnonzero(scratch.take(rows) == order)
        """The record in which each touched row appears first."""
        self.distinct: Positions = rows.take(self.first_records)
        """Each touched row once, in the order of first appearance."""
        self._groups: Positions | None = None

    @property
    def groups(self) -> Positions:
        """For each record, the place of its row in `distinct`."""
        if self._groups is None:
            self._scratch[self.distinct] = np.arange(len(self.distinct), dtype=np.int32)
            self._groups = self._scratch.take(self.rows).astype(np.int64)
        return self._groups


# --- the aggregates


class _Accumulator(ABC):
    """One aggregate call: its columns, how a batch is folded in, and what comes out."""

    columns: tuple[ColumnSpec, ...]

    def __init__(self, call: AggregateCall) -> None:
        self.call = call

    @abstractmethod
    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        """Take a batch's values into the columns."""

    @abstractmethod
    def result(self, parts: Sequence[Array]) -> pa.Array:
        """The aggregate's value for rows whose columns are given."""

    def snapshot_fields(self) -> list[pa.Field]:
        return [pa.field(self.call.name, self.call.type)]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        return [self.result(parts)]

    @abstractmethod
    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        """The columns' values, the reverse of `to_snapshot`."""


class _CountRecords(_Accumulator):
    columns = (ColumnSpec(np.int64, 0),)

    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        np.add.at(arrays[0], touched.rows, 1)

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return fixed_width_array(parts[0], None, pa.int64())

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [fixed_width_values(columns[0])]


class _CountValues(_CountRecords):
    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        assert column is not None
        valid = validity(column)
        np.add.at(arrays[0], touched.rows if valid is None else touched.rows[valid], 1)


class _ValueOrNull(_Accumulator):
    """Keeps one value per row and whether there has been a non-null one."""

    def result(self, parts: Sequence[Array]) -> pa.Array:
        values, seen = parts
        return fixed_width_array(values, seen, self.call.type)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        seen = np.asarray(columns[0].is_valid())
        return [np.where(seen, fixed_width_values(columns[0]), self.columns[0].initial), seen]

    def _mark_seen(self, seen: Array, touched: _Touched, rows: Positions) -> None:
        """These rows, which are all touched ones where there are no nulls, have had a value."""
        rows = touched.distinct if rows is touched.rows else rows
        if not seen.take(rows).all():
            seen[rows] = True


class _SumOfFloats(_ValueOrNull):
    columns = (ColumnSpec(np.float64, 0.0), ColumnSpec(np.bool_, False))

    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        np.add.at(arrays[0], rows, values.astype(np.float64, copy=False))
        self._mark_seen(arrays[1], touched, rows)


class _SumOfIntegers(_ValueOrNull):
    columns = (ColumnSpec(np.int64, 0), ColumnSpec(np.bool_, False))

    def __init__(self, call: AggregateCall) -> None:
        super().__init__(call)
        self._bound = 0
        """No sum can be further from 0; while it fits 64 bits, nothing needs to be checked."""

    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        self._bound += _furthest_from_zero(values) * len(values)
        if self._bound <= _INT64_MAX:
            np.add.at(arrays[0], rows, values.astype(np.int64, copy=False))
        else:
            self._fold_checked(arrays[0], touched, column)
        self._mark_seen(arrays[1], touched, rows)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        sums, seen = super().from_snapshot(columns)
        self._bound += _furthest_from_zero(sums)
        return [sums, seen]

    def _fold_checked(self, sums: Array, touched: _Touched, column: pa.Array | None) -> None:
        groups, values = _non_null(touched.groups, column)
        of_batch = self._sums(groups, values.astype(np.int64, copy=False), len(touched.distinct))
        before = sums.take(touched.distinct)
        after = before + of_batch
        # Overflow: both summands have the sign that the result has not.
        if bool((((before ^ after) & (of_batch ^ after)) < 0).any()):
            raise self._overflow()
        sums[touched.distinct] = after

    def _sums(self, groups: Positions, values: Array, count: int) -> Array:
        sums = np.zeros(count, dtype=np.int64)
        if _furthest_from_zero(values) * len(values) <= _INT64_MAX:
            np.add.at(sums, groups, values)
            return sums
        # The halves of 32 bits cannot overflow on their own; put together they may.
        high, low = sums, np.zeros(count, dtype=np.int64)
        np.add.at(high, groups, values >> 32)
        np.add.at(low, groups, values & 0xFFFFFFFF)
        high += low >> 32
        if bool((high >= 2**31).any() or (high < -(2**31)).any()):
            raise self._overflow()
        return (high << 32) | (low & 0xFFFFFFFF)

    def _overflow(self) -> DataError:
        return DataError(
            f"{self.call.name} has left the range of a 64-bit integer: sum a double instead,"
            f" as in sum(cast({self.call.input} as double))"
        )


def _furthest_from_zero(values: Array) -> int:
    return max(-int(values.min()), int(values.max())) if len(values) else 0


class _Extreme(_ValueOrNull):
    """min and max; NaN is larger than any other number, as in Spark."""

    def __init__(self, call: AggregateCall, input_type: pa.DataType) -> None:
        super().__init__(call)
        dtype = np.dtype(stored_dtype(input_type))
        smallest = call.function == "min"
        initial: Any = smallest
        self._fold: np.ufunc
        if dtype.kind == "f":
            # fmin takes the number beside a NaN, so NaN is what every number replaces.
            self._fold = np.fmin if smallest else np.maximum
            initial = np.nan if smallest else -np.inf
        else:
            self._fold = np.minimum if smallest else np.maximum
            if dtype.kind in "iu":
                limits = np.iinfo(dtype)
                initial = limits.max if smallest else limits.min
        self.columns = (ColumnSpec(dtype, initial), ColumnSpec(np.bool_, False))

    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        self._fold.at(arrays[0], rows, values)
        self._mark_seen(arrays[1], touched, rows)


class _ExtremeText(_Accumulator):
    """min and max of strings, in the order of their code points, which is that of their bytes.

    Strings are kept as Python objects, which nobody can change, None where there was no value.
    """

    columns = (ColumnSpec(np.object_, None),)

    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        function = self.call.function
        table = pa.table({"group": touched.groups, "value": column})
        reduced = table.group_by("group", use_threads=False).aggregate([("value", function)])
        reduced = reduced.filter(reduced.column(f"value_{function}").is_valid())
        rows = touched.distinct[reduced.column("group").to_numpy()]
        candidates = _objects(reduced.column(f"value_{function}"))
        current = arrays[0][rows]
        current = np.where(current == _NO_TEXT, candidates, current)
        better = np.minimum if function == "min" else np.maximum
        arrays[0][rows] = better(current, candidates)

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return pa.array(parts[0], self.call.type)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [_objects(columns[0])]


_NO_TEXT = np.array(None, dtype=np.object_)


def _objects(column: pa.Array) -> Array:
    return np.asarray(column.to_pylist(), dtype=np.object_)


class _Average(_Accumulator):
    columns = (ColumnSpec(np.float64, 0.0), ColumnSpec(np.int64, 0))

    def fold(self, arrays: Sequence[Array], touched: _Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        np.add.at(arrays[0], rows, values.astype(np.float64))
        np.add.at(arrays[1], rows, 1)

    def result(self, parts: Sequence[Array]) -> pa.Array:
        sums, counts = parts
        return fixed_width_array(sums / np.maximum(counts, 1), counts > 0, pa.float64())

    def snapshot_fields(self) -> list[pa.Field]:
        name = self.call.name
        return [
            pa.field(f"{name}.sum", pa.float64()),
            pa.field(f"{name}.non_null_count", pa.int64()),
        ]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        types = (pa.float64(), pa.int64())
        return [
            fixed_width_array(part, None, type_) for part, type_ in zip(parts, types, strict=True)
        ]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [fixed_width_values(column) for column in columns]


def _non_null(places: Positions, column: pa.Array | None) -> tuple[Positions, Array]:
    """The values that are not null, and where each belongs."""
    assert column is not None
    values, valid = fixed_width_values(column), validity(column)
    return (places, values) if valid is None else (places[valid], values[valid])


def _accumulator(call: AggregateCall, input_type: pa.DataType | None) -> _Accumulator:
    if call.function == "count":
        return _CountRecords(call) if call.input is None else _CountValues(call)
    assert input_type is not None
    if call.function == "avg":
        return _Average(call)
    if call.function == "sum":
        return _SumOfIntegers(call) if pt.is_integer(input_type) else _SumOfFloats(call)
    return _ExtremeText(call) if _is_plain_text(input_type) else _Extreme(call, input_type)


# --- the table


class _Layout:
    """Where the columns of each aggregate are, in memory and in a snapshot."""

    def __init__(
        self, key_fields: Sequence[pa.Field], accumulators: Sequence[_Accumulator]
    ) -> None:
        self.accumulators = accumulators
        self.key_count = len(key_fields)
        self.columns = [spec for each in accumulators for spec in each.columns]
        self.in_memory = _consecutive([len(each.columns) for each in accumulators])
        fields = [each.snapshot_fields() for each in accumulators]
        self.in_snapshot = _consecutive([len(each) for each in fields], self.key_count)
        # Null is a key, whatever the input says; and nullability is not worth a mismatch.
        keys = [pa.field(field.name, field.type) for field in key_fields]
        self.snapshot_schema = pa.schema([*keys, *(field for each in fields for field in each)])
        self.result_schema = pa.schema(
            [*keys, *(pa.field(each.call.name, each.call.type) for each in accumulators)]
        )


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
    ) -> None:
        self._key_columns = [_column_index(input_schema, key) for key in keys]
        self._input_columns = [
            None if call.input is None else _column_index(input_schema, call.input)
            for call in calls
        ]
        self._max_parallelism = max_parallelism
        key_fields = [input_schema.field(index) for index in self._key_columns]
        _refuse_unsupported(input_schema, key_fields, calls, self._input_columns)
        accumulators = [
            _accumulator(call, None if index is None else input_schema.field(index).type)
            for call, index in zip(calls, self._input_columns, strict=True)
        ]
        self._layout = _Layout(key_fields, accumulators)
        self._index = KeyIndex([field.type for field in key_fields])
        self._columns = ChangingColumns(self._layout.columns)
        self._scratch: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._index)

    @property
    def state_bytes(self) -> int:
        """Roughly what the table occupies; Python strings of min and max are not counted."""
        return self._index.nbytes + self._columns.nbytes + self._scratch.nbytes

    @property
    def result_schema(self) -> pa.Schema:
        return self._layout.result_schema

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._layout.snapshot_schema

    def update(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Fold the batch in; the new values of each key it touched, by first appearance."""
        keys = [_canonical(batch.column(index)) for index in self._key_columns]
        touched = _Touched(self._rows_of(keys, batch.num_rows), self._scratch_for_all_rows())
        self._columns.before_change(touched.distinct)
        with np.errstate(all="ignore"):  # infinities and NaN are values; overflow is looked for
            self._fold(batch, touched)
        return self._results(keys, touched)

    def freeze(self) -> FrozenTable:
        """The table as it is now, by reference: the synchronous part of a snapshot."""
        return FrozenTable(
            self._index.freeze(), self._columns.freeze(), self._layout, self._max_parallelism
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any update, each key at most once in all calls."""
        rows = self._rows_of(batch.columns[: self._layout.key_count], batch.num_rows)
        self._columns.before_change(rows)
        for accumulator, memory, snapshot in zip(
            self._layout.accumulators,
            self._layout.in_memory,
            self._layout.in_snapshot,
            strict=True,
        ):
            values = accumulator.from_snapshot(batch.columns[snapshot])
            for array, restored in zip(self._columns.arrays[memory], values, strict=True):
                array[rows] = restored

    def _fold(self, batch: pa.RecordBatch, touched: _Touched) -> None:
        for accumulator, where, index in zip(
            self._layout.accumulators, self._layout.in_memory, self._input_columns, strict=True
        ):
            column = None if index is None else batch.column(index)
            accumulator.fold(self._columns.arrays[where], touched, column)

    def _rows_of(self, keys: Sequence[pa.Array], count: int) -> Positions:
        hashes = None if keys else np.full(count, NO_COLUMNS_HASH, dtype=np.uint64)
        rows = self._index.rows_of(keys, hashes)
        self._columns.extend_to(len(self._index))
        return rows

    def _scratch_for_all_rows(self) -> npt.NDArray[np.int32]:
        if len(self._scratch) < len(self._index):
            self._scratch = np.zeros(2 * len(self._index), dtype=np.int32)
        return self._scratch

    def _results(self, keys: Sequence[pa.Array], touched: _Touched) -> pa.RecordBatch:
        first = pa.array(touched.first_records)
        columns = [_plain(key.take(first)) for key in keys]
        for accumulator, where in zip(
            self._layout.accumulators, self._layout.in_memory, strict=True
        ):
            arrays = self._columns.arrays[where]
            columns.append(accumulator.result([array.take(touched.distinct) for array in arrays]))
        return pa.RecordBatch.from_arrays(columns, schema=self._layout.result_schema)


class FrozenTable:
    """A table as it was at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        index: FrozenKeyIndex,
        columns: FrozenColumns,
        layout: _Layout,
        max_parallelism: int,
    ) -> None:
        self._index = index
        self._columns = columns
        self._layout = layout
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._layout.snapshot_schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups.

        Numpy lets go of the interpreter while it copies, sorts and takes plain numbers, so the
        loop goes on beside it; what holds it works on one key group at a time.
        """
        groups = key_groups_of(self._index.hashes, self._max_parallelism)
        order = _order_of(groups, self._max_parallelism)
        # Not bincount, which keeps the interpreter to itself.
        bounds = np.searchsorted(groups.take(order), np.arange(self._max_parallelism + 1))
        columns = self._whole_columns()
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = order[bounds[group] : bounds[group + 1]]
            yield group, self._batch(rows, [column.take(rows) for column in columns])

    def release(self) -> None:
        """Give the memory back; later updates copy nothing for this view. May be called twice."""
        self._columns.release()

    def _whole_columns(self) -> list[Array]:
        whole = [np.empty(len(self), dtype=spec.dtype) for spec in self._layout.columns]
        start = 0
        for chunk in range(self._columns.chunk_count):
            parts = self._columns.chunk(chunk)
            for column, part in zip(whole, parts, strict=True):
                column[start : start + len(part)] = part
            start += len(parts[0]) if parts else 0
        return whole

    def _batch(self, rows: Positions, parts: Sequence[Array]) -> pa.RecordBatch:
        columns = [key.take(rows) for key in self._index.columns]
        for accumulator, where in zip(
            self._layout.accumulators, self._layout.in_memory, strict=True
        ):
            columns.extend(accumulator.to_snapshot(parts[where]))
        return pa.RecordBatch.from_arrays(columns, schema=self._layout.snapshot_schema)


def _order_of(groups: npt.NDArray[np.int32], max_parallelism: int) -> Positions:
    """Row numbers by key group, and by row within one; 16-bit numbers are sorted by radix."""
    narrow = groups.astype(np.uint16) if max_parallelism <= 1 << 16 else groups
    return np.argsort(narrow, kind="stable")


def _column_index(schema: pa.Schema, name: str) -> int:
    index = schema.get_field_index(name)
    if index < 0:
        raise BuildError(
            f"there is no single column {name!r} to aggregate: there are {', '.join(schema.names)}"
        )
    return int(index)


def _refuse_unsupported(
    schema: pa.Schema,
    keys: Sequence[pa.Field],
    calls: Sequence[AggregateCall],
    inputs: Sequence[int | None],
) -> None:
    for key in keys:
        if reason := unsupported_key_type(key.type):
            raise BuildError(f"groups cannot be made by column {key.name!r}: {reason}")
    for call, index in zip(calls, inputs, strict=True):
        reason = unsupported(call, None if index is None else schema.field(index).type)
        if reason:
            raise BuildError(f"aggregate {call.name!r} cannot be kept: {reason}")


def _canonical(key: pa.Array) -> pa.Array:
    """The key column as it will be emitted: Spark makes -0.0 into 0.0 before it groups."""
    if not pt.is_floating(key.type):
        return key
    prepared: Any = key_column(key)
    valid: Flags = np.asarray(key.is_valid())
    return arrow_of_words(prepared.words, valid, key.type)


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column
