"""Aggregates that keep many values per group: lists that are appended to, never rewritten.

Theory of operation
-------------------
The column of such an aggregate has a *list* in each row, an object that nobody changes: None for
none, `(before, values, start, stop)` for a part of an Arrow array behind another list, or a pair of
lists for both. A batch is sorted by group, as a whole; its values become one array, of which every
group gets a part behind what it had. So appending costs what comes, however much is there, a frozen
view of the column stays what it was, and windows are merged by naming both lists.

Where values repeat, as in a set, a list gets longer than what it stands for. When more has been
appended to all lists together than they had after the last time, all are made as short as can be.
That changes no meaning, so frozen views do not mind, and costs little for each value.

Rules of this file
------------------
1. Loops go over the parts of lists, never over values.
2. Null is in no list.
3. An array in a list holds nothing but values of lists: it is copied out of what it came with.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import Positions, fixed_width_values
from stillframe.state.columns import Array, ColumnSpec, runs
from stillframe.state.folding import Accumulator, Touched
from stillframe.state.ordering import ranks

_SHORTENED_FROM = 262_144
"""With fewer values than this it is not worth making lists shorter."""
_PAIR = 2

Grouped = tuple[Positions, pa.Array]
"""Values, and the group of each."""


class Lists(Accumulator):
    """Keeps the values that `gathered` finds in a batch."""

    columns = (ColumnSpec(np.object_, None),)
    repeats = False
    """Whether `shortened` makes fewer values of many."""

    def __init__(self, call: AggregateCall, element: pa.DataType) -> None:
        super().__init__(call)
        self._element = element
        self._appended = 0
        self._count = 0
        """Of all values when lists were shortened last."""
        self._bytes = 0

    # --- what a kind of list says

    def gathered(self, groups: Positions, column: pa.Array) -> Grouped:
        """What a batch adds."""
        if not column.null_count:
            return groups, column
        valid = column.is_valid()
        return groups[np.asarray(valid)], column.filter(valid)

    def shortened(self, groups: Positions, values: pa.Array) -> Grouped:
        """As few values as stand for these."""
        return groups, values

    @abstractmethod
    def final(self, groups: Positions, values: pa.Array, count: int) -> pa.Array:
        """The aggregate of each of so many groups; groups ascend."""

    # --- an accumulator

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        self._append(arrays[0], touched, *self.gathered(touched.groups, column))

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        self._append(arrays[0], touched, *_flattened(touched.groups, columns[0]))

    def _append(self, lists: Array, touched: Touched, groups: Positions, values: pa.Array) -> None:
        groups, values = _sorted(*self.shortened(groups, values))
        if not len(groups):
            return
        begins, ends = _runs(groups)
        rows = touched.distinct.take(groups.take(begins))
        lists[rows] = _parts(lists.take(rows).tolist(), values, begins, ends)
        self._appended += len(values)
        self._bytes += values.nbytes
        if self.repeats and self._appended > max(_SHORTENED_FROM, self._count):
            self._shorten(lists)

    def _shorten(self, lists: Array) -> None:
        groups, values = self._values_of(lists)
        begins, ends = _runs(groups)
        lists[groups.take(begins)] = _parts(itertools.repeat(None), values, begins, ends)
        self._appended, self._count, self._bytes = 0, len(values), values.nbytes

    def _values_of(self, lists: Array) -> Grouped:
        """As few as stand for all that is in them, by list."""
        groups, values = _gone_through(lists.tolist(), self._element)
        return _sorted(*self.shortened(groups, values)) if self.repeats else (groups, values)

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        one, other = parts[0].reshape(-1).tolist(), others[0].reshape(-1).tolist()
        both = (
            (ours, theirs) if ours and theirs else ours or theirs
            for ours, theirs in zip(one, other, strict=True)
        )
        return [np.fromiter(both, np.object_, len(one)).reshape(parts[0].shape)]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return self.final(*self._values_of(parts[0]), len(parts[0]))

    def snapshot_fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.call.name}.values", pa.list_(self._element))]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        groups, values = self._values_of(parts[0])
        return [as_lists(groups, values, len(parts[0]), pa.list_(self._element))]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        count = len(columns[0])
        groups, values = _sorted(*_flattened(np.arange(count), columns[0]))
        begins, ends = _runs(groups)
        lists = np.full(count, None, np.object_)
        lists[groups.take(begins)] = _parts(itertools.repeat(None), values, begins, ends)
        self._appended += len(values)
        self._bytes += values.nbytes
        return [lists]


class Collected(Lists):
    """collect_list: values in the order in which they came."""

    def final(self, groups: Positions, values: pa.Array, count: int) -> pa.Array:
        return as_lists(groups, values, count, self.call.type)


class CollectedOnce(Collected):
    """collect_set."""

    repeats = True

    def shortened(self, groups: Positions, values: pa.Array) -> Grouped:
        return told_apart(groups, values)[:2]


class Joined(Lists):
    """listagg: strings, or bytes, with something between them; null of none."""

    def final(self, groups: Positions, values: pa.Array, count: int) -> pa.Array:
        [between, order] = self.call.parameters
        if order:
            by = ranks(values)
            ascending = np.lexsort((by if order == "asc" else ~by, groups))
            values = values.take(pa.array(ascending))
        lists = as_lists(groups, values, count, pa.list_(self._element))
        made = pc.binary_join(lists, pa.scalar(between, self._element))
        is_empty = pc.equal(pc.list_value_length(lists), 0)
        return pc.if_else(is_empty, pa.scalar(None, made.type), made).cast(self.call.type)


class Distinct(CollectedOnce):
    """Any other aggregate, of the values that are different."""

    def __init__(self, call: AggregateCall, element: pa.DataType, inner: Accumulator) -> None:
        super().__init__(call, element)
        self._inner = inner

    def gathered(self, groups: Positions, column: pa.Array) -> Grouped:
        groups, values = super().gathered(groups, column)
        counts_several = self.call.function == "count" and self.call.parameters == (True,)
        if not counts_several:
            return groups, values
        # Of several columns that are counted together none may be null.
        valid = np.ones(len(values), dtype=np.bool_)
        for field in values.flatten():
            valid &= np.asarray(field.is_valid())
        return groups[valid], values.filter(pa.array(valid))

    def final(self, groups: Positions, values: pa.Array, count: int) -> pa.Array:
        parts = [np.full(count, spec.initial, spec.dtype) for spec in self._inner.columns]
        touched = Touched(groups, np.empty(count, dtype=np.int32))
        with np.errstate(all="ignore"):  # infinities and NaN are values
            self._inner.fold(parts, touched, values)
        return self._inner.result(parts)


# --- values that repeat


def told_apart(
    groups: Positions, values: pa.Array, counts: Positions | None = None
) -> tuple[Positions, pa.Array, Positions]:
    """Each different value of each group once, and how often it is there; groups ascend.

    NaN equals NaN, and -0.0 equals 0.0.
    """
    values = with_one_zero(values)
    numbers = ranks(values) if pt.is_nested(values.type) else _numbers(values)
    pairs = groups * (int(numbers.max(initial=0)) + 1) + numbers
    _, first, often = np.unique(pairs, return_index=True, return_counts=True)
    if counts is not None:
        ascending = np.argsort(pairs, kind="stable")
        begins = np.cumsum(often) - often
        often = np.add.reduceat(counts.take(ascending), begins) if len(begins) else often
    return groups[first], values.take(pa.array(first)), often


def _numbers(values: pa.Array) -> Positions:
    """Equal where values are, of which none is null."""
    return fixed_width_values(values.dictionary_encode().indices).astype(np.int64)


def with_one_zero(values: pa.Array) -> pa.Array:
    """The same numbers, with 0.0 for -0.0 and one NaN."""
    if not pt.is_floating(values.type):
        return values
    numbers = fixed_width_values(values) + 0  # -0.0 + 0 is 0.0
    numbers[np.isnan(numbers)] = np.nan
    return pa.array(numbers, values.type)


# --- lists


def as_lists(groups: Positions, values: pa.Array, count: int, type_: pa.DataType) -> pa.Array:
    """A list for each of so many groups, which ascend; empty for those that have none."""
    offsets = pa.array(np.searchsorted(groups, np.arange(count + 1))).cast(pa.int32())
    if values.type != type_.value_type:
        values = values.cast(type_.value_type)
    return pa.ListArray.from_arrays(offsets, values, type=type_)


def _flattened(groups: Positions, column: pa.Array) -> Grouped:
    """The values of lists, each with the group of its list."""
    lengths = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
    return np.repeat(groups, lengths), column.flatten()


def _sorted(groups: Positions, values: pa.Array) -> Grouped:
    """By group; within one in the order they are in. The values are a copy."""
    order = np.argsort(groups, kind="stable")
    return groups.take(order), values.take(pa.array(order))


def _runs(groups: Positions) -> tuple[Positions, Positions]:
    """Where the values of each group, which ascend, begin and end."""
    if not len(groups):
        return groups, groups
    begins = np.append(0, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
    return begins, np.append(begins[1:], len(groups))


def _parts(before: Iterable[Any], values: pa.Array, begins: Positions, ends: Positions) -> Array:
    """Lists: each of these, and a part of the values behind it."""
    parts = zip(before, itertools.repeat(values), begins.tolist(), ends.tolist(), strict=False)
    return np.fromiter(parts, np.object_, len(begins))


def _gone_through(lists: list[Any], element: pa.DataType) -> Grouped:
    """All values, by list."""
    owners: list[int] = []
    parts: list[tuple[Any, ...]] = []
    waiting: list[Any] = []
    # From the last part to the first, which knows none behind it.
    for owner in range(len(lists) - 1, -1, -1):
        each = lists[owner]
        while each or waiting:
            if not each:
                each = waiting.pop()
            elif len(each) == _PAIR:
                before, each = each
                waiting.append(before)
            else:
                owners.append(owner)
                parts.append(each)
                each = each[0]
    if not parts:
        return np.zeros(0, dtype=np.int64), pa.array([], element)
    _, arrays, starts, stops = zip(*reversed(parts), strict=True)
    begins, lengths = np.array(starts), np.array(stops) - np.array(starts)
    groups = np.repeat(np.array(owners[::-1]), lengths)
    return groups, _taken(arrays, begins, lengths)


def _taken(arrays: Sequence[pa.Array], begins: Positions, lengths: Positions) -> pa.Array:
    """So many values of each array, from one on. Each array is gone to once."""
    ids = np.fromiter(map(id, arrays), np.int64, len(arrays))
    _, firsts, which = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which.take(order), np.arange(len(firsts) + 1)).tolist()
    found = []
    for number, first in enumerate(firsts.tolist()):
        here = order[bounds[number] : bounds[number + 1]]
        found.append(arrays[first].take(pa.array(runs(begins[here], lengths[here]))))
    if len(found) == 1:
        return found[0]
    places = np.empty(len(arrays), dtype=np.int64)
    ends = np.cumsum(lengths.take(order))
    places[order] = ends - lengths.take(order)
    return pa.concat_arrays(found).take(pa.array(runs(places, lengths)))
