"""Aggregate functions as columns: what each keeps per row, and how a batch is folded into it.

The meanings are Spark's. An accumulator holds no values itself: its columns belong to a table of
running aggregates (`aggregates`) or to the groups of one batch (`partials`), and it works on them
(`folding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import WRAPS, AggregateCall
from stillframe.errors import BuildError, DataError
from stillframe.key_groups import (
    Positions,
    fixed_width_values,
    is_word_type,
    stored_dtype,
    unsupported_key_type,
    validity,
)
from stillframe.state.by_spark import BySpark
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.decimal_aggregates import AverageOfDecimals, SumOfDecimals
from stillframe.state.folding import Accumulator, Touched, ValueOrNull, non_null
from stillframe.state.frequencies import ApproximatePercentile, Mode, Percentile
from stillframe.state.key_index import fixed_width_array
from stillframe.state.lists import Collected, CollectedOnce, Distinct, Joined
from stillframe.state.moments import MOMENTS
from stillframe.state.ordering import is_ordered
from stillframe.state.picked import Picked
from stillframe.state.sketches import ApproximateCount
from stillframe.state.xxhash import is_hashed

_INT64_MAX = 2**63 - 1


def unsupported(call: AggregateCall, input_type: pa.DataType | None) -> str | None:
    """Why this aggregate cannot be kept, in one clause; None if it can.

    `input_type` is that of the column it reads; None for a count of records.
    """
    if call.is_distinct and input_type is not None and not is_ordered(input_type):
        return f"values of type {input_type} are not told apart"
    if call.function == "count":
        return _type_mismatch(call, pa.int64())
    if input_type is None:
        return f"{call.function} needs a column to read"
    if call.function in _KINDS:
        reads = _KINDS[call.function].reads(input_type)
        return None if reads else f"{call.function} of type {input_type} is not supported"
    if call.function in MOMENTS:
        numbers = list(input_type) if pt.is_struct(input_type) else [pa.field("", input_type)]
        mismatch = _type_mismatch(call, pa.float64())
        return mismatch or next(filter(None, (_unsummable(call, n.type) for n in numbers)), None)
    if call.function in ("sum", "avg") and pt.is_decimal128(input_type):
        return None if pt.is_decimal128(call.type) else f"{call.name} makes decimals"
    if call.function in ("sum", "avg"):
        if reason := _unsummable(call, input_type):
            return reason
        whole = call.function == "sum" and pt.is_integer(input_type)
        return _type_mismatch(call, pa.int64() if whole else pa.float64())
    if not is_ordered(input_type):
        return f"{call.function} of type {input_type} is not supported"
    return _type_mismatch(call, input_type)


def _type_mismatch(call: AggregateCall, made: pa.DataType) -> str | None:
    if call.type == made:
        return None
    return f"{call.name} makes values of type {made}, not {call.type}"


def _unsummable(call: AggregateCall, type_: pa.DataType) -> str | None:
    return None if _is_summable(type_) else f"{call.function} of type {type_} is not supported"


def _is_summable(type_: pa.DataType) -> bool:
    whole = pt.is_integer(type_) and not pt.is_uint64(type_)
    return bool(whole or pt.is_float32(type_) or pt.is_float64(type_))


def _is_ordered_object(type_: pa.DataType) -> bool:
    is_text = pt.is_string(type_) or pt.is_large_string(type_)
    return bool(is_text or pt.is_binary(type_) or pt.is_decimal128(type_))


# --- the aggregates


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


class _SumOfFloats(ValueOrNull):
    columns = (ColumnSpec(np.float64, 0.0), ColumnSpec(np.bool_, False))

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = non_null(touched.rows, column)
        np.add.at(arrays[0], rows, values.astype(np.float64, copy=False))
        self.mark_seen(arrays[1], touched, rows)

    def both(self, values: Array, others: Array) -> Array:
        return values + others


class _SumOfIntegers(ValueOrNull):
    columns = (ColumnSpec(np.int64, 0), ColumnSpec(np.bool_, False))

    def __init__(self, call: AggregateCall) -> None:
        super().__init__(call)
        self._wraps = call.parameters == (WRAPS,)
        self._bound = 0
        """No sum can be further from 0; while it fits 64 bits, nothing needs to be checked."""

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = non_null(touched.rows, column)
        self._bound += _furthest_from_zero(values) * len(values)
        if self._wraps or self._bound <= _INT64_MAX:
            np.add.at(arrays[0], rows, values.astype(np.int64, copy=False))
        else:
            self._fold_checked(arrays[0], touched, column)
        self.mark_seen(arrays[1], touched, rows)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        sums, seen = super().from_snapshot(columns)
        self._bound += _furthest_from_zero(sums)
        return [sums, seen]

    def _fold_checked(self, sums: Array, touched: Touched, column: pa.Array | None) -> None:
        groups, values = non_null(touched.groups, column)
        of_batch = self._sums(groups, values.astype(np.int64, copy=False), len(touched.distinct))
        sums[touched.distinct] = self.both(sums.take(touched.distinct), of_batch)

    def both(self, values: Array, others: Array) -> Array:
        after = values + others
        # Overflow: both summands have the sign that the result has not.
        if not self._wraps and bool((((values ^ after) & (others ^ after)) < 0).any()):
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


class _Reduced(ValueOrNull):
    """Keeps what numpy makes of any two values."""

    _reduce: np.ufunc

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = non_null(touched.rows, column)
        self._reduce.at(arrays[0], rows, values)
        self.mark_seen(arrays[1], touched, rows)

    def both(self, values: Array, others: Array) -> Array:
        both: Array = self._reduce(values, others)
        return both


class _Extreme(_Reduced):
    """min and max; NaN is larger than any other number, as in Spark."""

    def __init__(self, call: AggregateCall, input_type: pa.DataType) -> None:
        super().__init__(call)
        dtype = np.dtype(stored_dtype(input_type))
        smallest = call.function == "min"
        initial: Any = smallest
        if dtype.kind == "f":
            # fmin takes the number beside a NaN, so NaN is what every number replaces.
            self._reduce = np.fmin if smallest else np.maximum
            initial = np.nan if smallest else -np.inf
        else:
            self._reduce = np.minimum if smallest else np.maximum
            if dtype.kind in "iu":
                limits = np.iinfo(dtype)
                initial = limits.max if smallest else limits.min
        self.columns = (ColumnSpec(dtype, initial), ColumnSpec(np.bool_, False))


class _Bits(_Reduced):
    """bit_and, bit_or and bit_xor."""

    def __init__(self, call: AggregateCall, input_type: pa.DataType) -> None:
        super().__init__(call)
        self._reduce = getattr(np, f"bitwise_{call.function.removeprefix('bit_')}")
        initial = -1 if call.function == "bit_and" else 0
        self.columns = (ColumnSpec(stored_dtype(input_type), initial), ColumnSpec(np.bool_, False))


class _ExtremeObject(Accumulator):
    """min and max of strings, in the order of their code points, which is that of their bytes; of
    bytes, and of decimals.

    They are kept as Python objects, which nobody can change, None where there was no value.
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
        values, other_values = parts[0], others[0]
        best = np.where(values == _NOTHING, other_values, values)
        both = (values != _NOTHING) & (other_values != _NOTHING)
        better = np.minimum if self.call.function == "min" else np.maximum
        best[both] = better(values[both], other_values[both])
        return [best]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return pa.array(parts[0], self.call.type)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [_objects(columns[0])]


_NOTHING = np.array(None, dtype=np.object_)


def _objects(column: pa.Array) -> Array:
    return np.asarray(column.to_pylist(), dtype=np.object_)


class _Average(Accumulator):
    columns = (ColumnSpec(np.float64, 0.0), ColumnSpec(np.int64, 0))

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        rows, values = non_null(touched.rows, column)
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


# --- all there are


class _Kind(NamedTuple):
    """An aggregate that is one class, whatever it reads."""

    reads: Callable[[pa.DataType], bool]
    """Which types."""
    accumulator: Callable[[AggregateCall, pa.DataType], Accumulator]


def _anything(_: pa.DataType) -> bool:
    return True


def _has_order(pairs: pa.DataType) -> bool:
    return is_ordered(pairs.field(1).type)


def _is_number(type_: pa.DataType) -> bool:
    return _is_summable(type_) or bool(pt.is_decimal128(type_) or pt.is_duration(type_))


def _is_joined(type_: pa.DataType) -> bool:
    return bool(pt.is_string(type_) or pt.is_binary(type_))


_KINDS: dict[str, _Kind] = {
    "bit_and": _Kind(pt.is_signed_integer, _Bits),
    "bit_or": _Kind(pt.is_signed_integer, _Bits),
    "bit_xor": _Kind(pt.is_signed_integer, _Bits),
    "first": _Kind(_anything, Picked),
    "last": _Kind(_anything, Picked),
    "min_by": _Kind(_has_order, Picked),
    "max_by": _Kind(_has_order, Picked),
    "collect_list": _Kind(_anything, Collected),
    "collect_set": _Kind(is_ordered, CollectedOnce),
    "listagg": _Kind(_is_joined, Joined),
    "approx_count_distinct": _Kind(is_hashed, ApproximateCount),
    "percentile": _Kind(_is_number, Percentile),
    "percentile_disc": _Kind(_is_number, Percentile),
    "percentile_approx": _Kind(is_ordered, ApproximatePercentile),
    "mode": _Kind(is_ordered, Mode),
    "by_spark": _Kind(pt.is_struct, BySpark),
}
"""A new aggregate is a class, and a line here."""


def _accumulator(call: AggregateCall, input_type: pa.DataType | None) -> Accumulator:
    if call.is_distinct and input_type is not None:
        return Distinct(call, input_type, _plain_accumulator(call, input_type))
    return _plain_accumulator(call, input_type)


def _plain_accumulator(call: AggregateCall, input_type: pa.DataType | None) -> Accumulator:
    if call.function == "count":
        return _CountRecords(call) if call.input is None else _CountValues(call)
    assert input_type is not None
    if call.function in _KINDS:
        return _KINDS[call.function].accumulator(call, input_type)
    if call.function in MOMENTS:
        return MOMENTS[call.function](call)
    is_decimal = pt.is_decimal128(input_type)
    if call.function == "avg":
        return AverageOfDecimals(call, input_type) if is_decimal else _Average(call)
    if call.function == "sum":
        if is_decimal:
            return SumOfDecimals(call)
        return _SumOfIntegers(call) if pt.is_integer(input_type) else _SumOfFloats(call)
    if _is_ordered_object(input_type):
        return _ExtremeObject(call)
    return _Extreme(call, input_type) if is_word_type(input_type) else Picked(call, input_type)


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
