"""Aggregates of how often each value is there: percentile, median, percentile_approx, mode.

They keep lists of values and counts, so a value that comes again costs nothing.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import Positions, fixed_width_values
from stillframe.state.columns import Array
from stillframe.state.lists import Grouped, Lists, as_lists, told_apart
from stillframe.state.ordering import ranks


class _Frequencies(Lists):
    repeats = True

    def __init__(self, call: AggregateCall, value: pa.DataType) -> None:
        fields = [pa.field("value", value), pa.field("times", pa.int64())]
        super().__init__(call, pa.struct(fields))

    def gathered(self, groups: Positions, column: pa.Array) -> Grouped:
        groups, values = super().gathered(groups, column)
        return groups, self._counted(values, np.ones(len(values), dtype=np.int64))

    def shortened(self, groups: Positions, values: pa.Array) -> Grouped:
        value, times = values.flatten()
        groups, value, often = told_apart(groups, value, fixed_width_values(times))
        return groups, self._counted(value, often)

    def _counted(self, values: pa.Array, times: Positions) -> pa.Array:
        return pa.StructArray.from_arrays([values, pa.array(times)], fields=list(self._element))

    def final(self, groups: Positions, values: pa.Array, count: int) -> pa.Array:
        value, times = values.flatten()
        order = np.lexsort((ranks(value), groups))
        often = fixed_width_values(times).take(order)
        return self.of_sorted(groups.take(order), value.take(pa.array(order)), often, count)

    @abstractmethod
    def of_sorted(
        self, groups: Positions, values: pa.Array, times: Positions, count: int
    ) -> pa.Array:
        """The aggregate of each of so many groups, of values that ascend in each."""


class _Placed(_Frequencies):
    """Values at places among those that a group has, in order."""

    def of_sorted(
        self, groups: Positions, values: pa.Array, times: Positions, count: int
    ) -> pa.Array:
        shares, is_list, *_ = self.call.parameters
        ends = np.cumsum(times)
        bounds = np.append(0, ends).take(np.searchsorted(groups, np.arange(count + 1)))
        sizes = np.diff(bounds)
        there = np.flatnonzero(sizes)
        self._first, self._sizes, self._ends = bounds[there], sizes[there], ends
        columns = [self.at_share(values, share) for share in shares]
        if not is_list:
            return _spread(columns[0], there, count).cast(self.call.type)
        one_after_the_other = pa.concat_arrays(columns) if columns else values.slice(0, 0)
        order = np.arange(len(columns) * len(there)).reshape(len(columns), -1).T.reshape(-1)
        in_groups = np.repeat(np.arange(len(there)), len(columns))
        flat = one_after_the_other.take(pa.array(order))
        lists = as_lists(in_groups, flat, len(there), pa.list_(flat.type))
        return _spread(lists, there, count).cast(self.call.type)

    @abstractmethod
    def at_share(self, values: pa.Array, share: float) -> pa.Array:
        """Of each group that has any value."""

    def at(self, values: pa.Array, places: Array) -> pa.Array:
        """The values at these places, of each group one."""
        where = np.searchsorted(self._ends, self._first + places.astype(np.int64), side="right")
        return values.take(pa.array(where))


def _spread(values: pa.Array, there: Positions, count: int) -> pa.Array:
    """Null where there is none."""
    places = np.zeros(count, dtype=np.int64)
    places[there] = np.arange(len(there))
    absent = np.ones(count, dtype=np.bool_)
    absent[there] = False
    return values.take(pa.array(places, mask=absent))


class Percentile(_Placed):
    """percentile and median, in proportion between two values; percentile_disc, the lower one."""

    def at_share(self, values: pa.Array, share: float) -> pa.Array:
        last = self._sizes - 1
        if self.call.function == "percentile_disc":
            lower = higher = position = np.maximum(np.ceil(self._sizes * share) - 1, 0)
        else:
            position = last * share
            lower, higher = np.floor(position), np.ceil(position)
        is_descending = self.call.parameters[2]
        one, other = (
            _doubles(self.at(values, last - place if is_descending else place))
            for place in (lower, higher)
        )
        with np.errstate(all="ignore"):  # infinities and NaN are values
            between = (higher - position) * one + (position - lower) * other
        found = np.where((higher == lower) | (one == other), one, between)
        if pt.is_duration(values.type):
            return pa.array(found.astype(np.int64)).view(values.type)
        return pa.array(found)


class ApproximatePercentile(_Placed):
    """A value at its rank: exact, where Spark's may be off by as much as `accuracy` says."""

    def at_share(self, values: pa.Array, share: float) -> pa.Array:
        error = 1.0 / self.call.parameters[2]
        places = np.clip(np.ceil(share * self._sizes) - 1, 0, self._sizes - 1)
        if share <= error:
            places = np.zeros_like(places)
        elif share >= 1 - error:
            places = self._sizes - 1
        return self.at(values, places)


def _doubles(column: pa.Array) -> Array:
    if pt.is_decimal(column.type):
        return np.array([float(each) for each in column.to_pylist()], dtype=np.float64)
    return fixed_width_values(column).astype(np.float64)


class Mode(_Frequencies):
    """The value that is there most often; of several the lowest, or the highest."""

    def of_sorted(
        self, groups: Positions, values: pa.Array, times: Positions, count: int
    ) -> pa.Array:
        [is_highest] = self.call.parameters
        places = np.arange(len(groups))
        order = np.lexsort((places if is_highest else -places, times, groups))
        bounds = np.searchsorted(groups, np.arange(count + 1))
        there = np.flatnonzero(np.diff(bounds))
        modes = values.take(pa.array(order.take(bounds[1:][there] - 1)))
        return _spread(modes, there, count)
