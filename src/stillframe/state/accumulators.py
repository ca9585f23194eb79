"""Aggregate functions as columns: what each keeps per row, and how a batch is folded into it.

The meanings are Spark's. An accumulator holds no values itself: its columns belong to a table of
running aggregates (`aggregates`) or to the groups of one batch (`partials`), and it works on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError, DataError
from stillframe.key_groups import (
    Positions,
    fixed_width_values,
    stored_dtype,
    unsupported_key_type,
    validity,
)
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.key_index import fixed_width_array

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


class Touched:
    """The rows of a table that a batch touches."""

    def __init__(self, rows: Positions, scratch: npt.NDArray[np.int32]) -> None:
        """`scratch` has a place for every row of the table; what it holds does not matter."""
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


class Accumulator(ABC):
    """One aggregate call: its columns, how a batch is folded in, and what comes out."""

    columns: tuple[ColumnSpec, ...]

    def __init__(self, call: AggregateCall) -> None:
        self.call = call

    @abstractmethod
    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        """Take a batch's values into the columns."""

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        """Take what other records have accumulated, as `to_snapshot` gives it, into the columns.

        Where the aggregate is one value, that is the aggregate of such values.
        """
        self.fold(arrays, touched, columns[0])

    @abstractmethod
    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        """Row by row what two have accumulated together; neither is changed."""

    def input_of(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The column this aggregate reads; None if it reads none."""
        return None if self.call.input is None else batch.column(self.call.input)

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


class _CountRecords(Accumulator):
    columns = (ColumnSpec(np.int64, 0),)

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        np.add.at(arrays[0], touched.rows, 1)

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        np.add.at(arrays[0], touched.rows, fixed_width_values(columns[0]))

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        return [parts[0] + others[0]]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return fixed_width_array(parts[0], None, pa.int64())

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [fixed_width_values(columns[0])]


class _CountValues(_CountRecords):
    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        valid = validity(column)
        np.add.at(arrays[0], touched.rows if valid is None else touched.rows[valid], 1)


class _ValueOrNull(Accumulator):
    """Keeps one value per row and whether there has been a non-null one."""

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        return [self._both(parts[0], others[0]), parts[1] | others[1]]

    @abstractmethod
    def _both(self, values: Array, others: Array) -> Array:
        """The aggregate of both; where there has been no value, one is what a row begins with."""

    def result(self, parts: Sequence[Array]) -> pa.Array:
        values, seen = parts
        return fixed_width_array(values, seen, self.call.type)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        seen = np.asarray(columns[0].is_valid())
        return [np.where(seen, fixed_width_values(columns[0]), self.columns[0].initial), seen]

    def _mark_seen(self, seen: Array, touched: Touched, rows: Positions) -> None:
        """These rows, which are all touched ones where there are no nulls, have had a value."""
        rows = touched.distinct if rows is touched.rows else rows
        if not seen.take(rows).all():
            seen[rows] = True


class _SumOfFloats(_ValueOrNull):
    columns = (ColumnSpec(np.float64, 0.0), ColumnSpec(np.bool_, False))

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        np.add.at(arrays[0], rows, values.astype(np.float64, copy=False))
        self._mark_seen(arrays[1], touched, rows)

    def _both(self, values: Array, others: Array) -> Array:
        return values + others


class _SumOfIntegers(_ValueOrNull):
    columns = (ColumnSpec(np.int64, 0), ColumnSpec(np.bool_, False))

    def __init__(self, call: AggregateCall) -> None:
        super().__init__(call)
        self._bound = 0
        """No sum can be further from 0; while it fits 64 bits, nothing needs to be checked."""

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
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

    def _fold_checked(self, sums: Array, touched: Touched, column: pa.Array | None) -> None:
        groups, values = _non_null(touched.groups, column)
        of_batch = self._sums(groups, values.astype(np.int64, copy=False), len(touched.distinct))
        sums[touched.distinct] = self._both(sums.take(touched.distinct), of_batch)

    def _both(self, values: Array, others: Array) -> Array:
        after = values + others
        # Overflow: both summands have the sign that the result has not.
        if bool((((values ^ after) & (others ^ after)) < 0).any()):
            raise self._overflow()
        return after

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

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        self._fold.at(arrays[0], rows, values)
        self._mark_seen(arrays[1], touched, rows)

    def _both(self, values: Array, others: Array) -> Array:
        both: Array = self._fold(values, others)
        return both


class _ExtremeText(Accumulator):
    """min and max of strings, in the order of their code points, which is that of their bytes.

    Strings are kept as Python objects, which nobody can change, None where there was no value.
    """

    columns = (ColumnSpec(np.object_, None),)

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        function = self.call.function
        table = pa.table({"group": touched.groups, "value": column})
        reduced = table.group_by("group", use_threads=False).aggregate([("value", function)])
        reduced = reduced.filter(reduced.column(f"value_{function}").is_valid())
        rows = touched.distinct[reduced.column("group").to_numpy()]
        candidates = _objects(reduced.column(f"value_{function}"))
        [arrays[0][rows]] = self.combined([arrays[0][rows]], [candidates])

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        texts, others_texts = parts[0], others[0]
        best = np.where(texts == _NO_TEXT, others_texts, texts)
        both = (texts != _NO_TEXT) & (others_texts != _NO_TEXT)
        better = np.minimum if self.call.function == "min" else np.maximum
        best[both] = better(texts[both], others_texts[both])
        return [best]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return pa.array(parts[0], self.call.type)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [_objects(columns[0])]


_NO_TEXT = np.array(None, dtype=np.object_)


def _objects(column: pa.Array) -> Array:
    return np.asarray(column.to_pylist(), dtype=np.object_)


class _Average(Accumulator):
    columns = (ColumnSpec(np.float64, 0.0), ColumnSpec(np.int64, 0))

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = _non_null(touched.rows, column)
        np.add.at(arrays[0], rows, values.astype(np.float64))
        np.add.at(arrays[1], rows, 1)

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        for array, column in zip(arrays, columns, strict=True):
            np.add.at(array, touched.rows, fixed_width_values(column))

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        return [part + other for part, other in zip(parts, others, strict=True)]

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


def _accumulator(call: AggregateCall, input_type: pa.DataType | None) -> Accumulator:
    if call.function == "count":
        return _CountRecords(call) if call.input is None else _CountValues(call)
    assert input_type is not None
    if call.function == "avg":
        return _Average(call)
    if call.function == "sum":
        return _SumOfIntegers(call) if pt.is_integer(input_type) else _SumOfFloats(call)
    return _ExtremeText(call) if _is_plain_text(input_type) else _Extreme(call, input_type)


# --- what an aggregation reads


def key_fields_of(schema: pa.Schema, keys: Sequence[str]) -> list[pa.Field]:
    """The fields of these keys; raises if one is missing or cannot be a key."""
    fields = [_field(schema, key) for key in keys]
    for field in fields:
        if reason := unsupported_key_type(field.type):
            raise BuildError(f"groups cannot be made by column {field.name!r}: {reason}")
    return fields


def accumulators_of(schema: pa.Schema, calls: Sequence[AggregateCall]) -> list[Accumulator]:
    """One for each call; raises if one cannot be kept."""
    return [_checked_accumulator(schema, call) for call in calls]


def _checked_accumulator(schema: pa.Schema, call: AggregateCall) -> Accumulator:
    input_type = None if call.input is None else _field(schema, call.input).type
    if reason := unsupported(call, input_type):
        raise BuildError(f"aggregate {call.name!r} cannot be kept: {reason}")
    return _accumulator(call, input_type)


def _field(schema: pa.Schema, name: str) -> pa.Field:
    index = schema.get_field_index(name)
    if index < 0:
        raise BuildError(
            f"there is no single column {name!r} to aggregate: there are {', '.join(schema.names)}"
        )
    return schema.field(index)
