"""How far apart two event times can be, as a condition over them says.

Theory of operation: every comparison that a condition demands is looked at by itself. If either
side of it is one of the two columns, as it is or moved by an interval, it limits how much later the
second can be than the first; of several limits the tightest holds. What a comparison says in any
other way is not understood and limits nothing.

Rule of this file: a bound may be too loose, never too tight. Records are forgotten by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stillframe.graph.expressions import Call, Column, Expression, Literal

_DAY_US = 86_400_000_000
_MONTH_DAYS_MIN, _MONTH_DAYS_MAX = 28, 31
_CLOCK_CHANGE_US = _DAY_US
"""More than any zone has ever moved its clocks within the time that an interval spans."""


@dataclass(frozen=True, slots=True)
class TimeBounds:
    """The least and the most that one time is after the other; None: no limit."""

    earliest_us: int | None = None
    latest_us: int | None = None

    def and_also(self, other: TimeBounds) -> TimeBounds:
        earliest = [us for us in (self.earliest_us, other.earliest_us) if us is not None]
        latest = [us for us in (self.latest_us, other.latest_us) if us is not None]
        return TimeBounds(max(earliest, default=None), min(latest, default=None))

    def loosened(self, by_us: int) -> TimeBounds:
        earliest_us, latest_us = self.earliest_us, self.latest_us
        return TimeBounds(
            None if earliest_us is None else earliest_us - by_us,
            None if latest_us is None else latest_us + by_us,
        )


def time_bounds(condition: Expression | None, first: str, second: str) -> TimeBounds:
    """By how much the column `second` is after the column `first` where the condition is true."""
    bounds = TimeBounds()
    for part in _demanded(condition):
        bounds = bounds.and_also(_bounds_of(part, first, second))
    return bounds


def _demanded(condition: Expression | None) -> Iterator[Call]:
    """The parts that must all be true."""
    match condition:
        case Call("and", (left, right)):
            yield from _demanded(left)
            yield from _demanded(right)
        case Call():
            yield condition


def _bounds_of(part: Call, first: str, second: str) -> TimeBounds:
    match part:
        case Call("less_equal", (lower, upper)) | Call("greater_equal", (upper, lower)):
            return _of_order(lower, upper, first, second, least_us=0)
        case Call("less", (lower, upper)) | Call("greater", (upper, lower)):
            return _of_order(lower, upper, first, second, least_us=1)
        case Call("equal", (one, other)):
            upwards = _of_order(one, other, first, second, least_us=0)
            return upwards.and_also(_of_order(other, one, first, second, least_us=0))
        case _:
            return TimeBounds()


def _of_order(
    lower: Expression, upper: Expression, first: str, second: str, least_us: int
) -> TimeBounds:
    """What it says that `upper` is at least so much after `lower`."""
    before, after = _moved(lower), _moved(upper)
    if before is None or after is None:
        return TimeBounds()
    # before.column + before.by + least <= after.column + after.by
    least_us += before.by_us_min - after.by_us_max
    if (before.column, after.column) == (first, second):
        return TimeBounds(earliest_us=least_us)
    if (before.column, after.column) == (second, first):
        return TimeBounds(latest_us=-least_us)
    return TimeBounds()


@dataclass(frozen=True, slots=True)
class _Moved:
    """A column moved by an interval whose length may depend on where it begins."""

    column: str
    by_us_min: int = 0
    by_us_max: int = 0


def _moved(expression: Expression) -> _Moved | None:
    match expression:
        case Column(name):
            return _Moved(name)
        case Call("add_interval", (moments, *interval)):
            before = _moved(moments)
            if before is None:
                return None
            shortest_us, longest_us = _length_us(*(_constant(part) for part in interval))
            return _Moved(
                before.column, before.by_us_min + shortest_us, before.by_us_max + longest_us
            )
        case _:
            return None


def _constant(part: Expression) -> Any:
    assert isinstance(part, Literal), "intervals are constant"
    return part.value.as_py()


def _length_us(months: int, days: int, micros: int, zone: str) -> tuple[int, int]:
    ends = sorted((months * _MONTH_DAYS_MIN, months * _MONTH_DAYS_MAX))
    shortest, longest = ((end + days) * _DAY_US + micros for end in ends)
    if (months or days) and zone != "UTC":
        return shortest - _CLOCK_CHANGE_US, longest + _CLOCK_CHANGE_US
    return shortest, longest
