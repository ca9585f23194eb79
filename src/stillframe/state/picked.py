"""Aggregates that keep a value of one record: first and last, min_by and max_by, and min and max
of what numpy does not compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import (
    Flags,
    Positions,
    fixed_width_values,
    is_word_type,
    stored_dtype,
)
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.folding import Accumulator, Touched
from stillframe.state.key_index import fixed_width_array
from stillframe.state.ordering import ranks, sort_keys

_LOWEST = ("min", "min_by")
_WITHOUT_ORDER = ("first", "last")


class Kept:
    """How one value of a type is kept per row, null or not: as a number, else as a Python object,
    which nobody changes."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self._is_number = is_word_type(type_)
        self.columns: tuple[ColumnSpec, ...] = (ColumnSpec(np.object_, None),)
        if self._is_number:
            self.columns = (ColumnSpec(stored_dtype(type_), 0), ColumnSpec(np.bool_, False))

    def parts(self, column: pa.Array) -> list[Array]:
        if self._is_number:
            return [fixed_width_values(column), np.asarray(column.is_valid())]
        return [np.fromiter(column.to_pylist(), np.object_, len(column))]

    def array(self, parts: Sequence[Array]) -> pa.Array:
        if self._is_number:
            return fixed_width_array(parts[0], parts[1], self.type)
        return pa.array(parts[0].tolist(), self.type)

    def is_there(self, parts: Sequence[Array]) -> Flags:
        """Which are not null."""
        there: Flags = parts[-1] if self._is_number else np.not_equal(parts[0], _NOTHING)
        return there.astype(np.bool_, copy=False)

    def is_lower(self, parts: Sequence[Array], others: Sequence[Array]) -> tuple[Flags, Flags]:
        """Where the former are lower than the latter, and where these are lower; of none is null.

        The same where neither is.
        """
        if self._is_number:
            one, other = sort_keys(parts[0]), sort_keys(others[0])
        else:
            both = ranks(pa.concat_arrays([self.array(parts), self.array(others)]))
            one, other = both[: len(both) // 2], both[len(both) // 2 :]
        return one < other, other < one


_NOTHING = np.array(None, dtype=np.object_)


class Picked(Accumulator):
    """Of two records with the same order the later one stays, as in Spark; of `first` the earlier.

    What it reads is a column of values, or structs of a value and what it is chosen by: where that
    is null, the record does not count.
    """

    def __init__(self, call: AggregateCall, input_type: pa.DataType) -> None:
        super().__init__(call)
        function = call.function
        self._value = Kept(call.type)
        self._by: Kept | None = None
        """What it is chosen by, if that is not the value."""
        if function in _WITHOUT_ORDER:
            self._by = Kept(pa.bool_())
        elif function.endswith("_by"):
            self._by = Kept(input_type.field(1).type)
        order = () if self._by is None else self._by.columns
        self.columns = (*self._value.columns, *order)
        self._ignores_nulls, self._reads_pairs = call.parameters or (False, self._by is not None)

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        values, order = column.flatten() if self._reads_pairs else (column, column)
        if self.call.function in _WITHOUT_ORDER:
            counts = np.ones(len(column), dtype=np.bool_)
            if self._reads_pairs:
                counts &= np.asarray(order.is_valid())
            if self._ignores_nulls:
                counts &= np.asarray(values.is_valid())
            order = pa.array(counts, mask=~counts)
        self._take_in(arrays, touched, values, order)

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        self._take_in(arrays, touched, columns[0], columns[-1])

    def _take_in(
        self, arrays: Sequence[Array], touched: Touched, values: pa.Array, order: pa.Array
    ) -> None:
        records = self._chosen(touched.groups, order)
        rows = touched.distinct.take(touched.groups.take(records))
        chosen = pa.array(records)
        others = self._value.parts(values.take(chosen))
        if self._by is not None:
            others += self._by.parts(order.take(chosen))
        after = self.combined([array.take(rows) for array in arrays], others)
        for array, value in zip(arrays, after, strict=True):
            array[rows] = value

    def _chosen(self, groups: Positions, order: pa.Array) -> Positions:
        """Of each group that has any record that counts, the one to keep."""
        records = np.arange(len(groups))
        if order.null_count:
            records = np.flatnonzero(np.asarray(order.is_valid()))
            groups, order = groups.take(records), order.take(pa.array(records))
        if not len(groups):
            return records
        if self.call.function in _WITHOUT_ORDER:
            ascending = np.argsort(groups, kind="stable")
        else:
            is_number = is_word_type(order.type)
            by = sort_keys(fixed_width_values(order)) if is_number else ranks(order)
            ascending = np.lexsort((~by if self.call.function in _LOWEST else by, groups))
        groups, records = groups.take(ascending), records.take(ascending)
        is_new = np.append(True, groups[1:] != groups[:-1])
        ends = is_new if self.call.function == "first" else np.append(is_new[1:], True)
        chosen: Positions = records[ends]
        return chosen

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        shape = parts[0].shape
        flat, other = [p.reshape(-1) for p in parts], [o.reshape(-1) for o in others]
        here, there = self._is_there(flat), self._is_there(other)
        taken = there & ~here
        both = np.flatnonzero(here & there)
        if len(both):
            taken[both] = self._gives_way([p[both] for p in flat], [o[both] for o in other])
        return [
            np.where(taken, theirs, ours).astype(ours.dtype, copy=False).reshape(shape)
            for ours, theirs in zip(flat, other, strict=True)
        ]

    def _gives_way(self, parts: Sequence[Array], others: Sequence[Array]) -> Flags | bool:
        """Whether the former make place for the latter."""
        if self.call.function in _WITHOUT_ORDER:
            return self.call.function == "last"
        by = self._by or self._value
        ours_lower, theirs_lower = by.is_lower(self._order(parts), self._order(others))
        return ~(ours_lower if self.call.function in _LOWEST else theirs_lower)

    def _is_there(self, parts: Sequence[Array]) -> Flags:
        return (self._by or self._value).is_there(self._order(parts))

    def _order(self, parts: Sequence[Array]) -> Sequence[Array]:
        return parts if self._by is None else parts[len(self._value.columns) :]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return self._value.array(parts[: len(self._value.columns)])

    def snapshot_fields(self) -> list[pa.Field]:
        name = self.call.name
        value = pa.field(name, self.call.type)
        return [value] if self._by is None else [value, pa.field(f"{name}.by", self._by.type)]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        value = self.result(parts)
        return [value] if self._by is None else [value, self._by.array(self._order(parts))]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        parts = self._value.parts(columns[0])
        return parts if self._by is None else [*parts, *self._by.parts(columns[1])]
