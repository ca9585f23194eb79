"""What a condition says about two event times, and that nothing is read into it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.graph.expressions import Call, Column, Expression, Literal
from stillframe.graph.time_bounds import TimeBounds, time_bounds

UTC = pa.timestamp("us", "UTC")
LEFT, RIGHT, OTHER = (Column(name, UTC) for name in ("left", "right", "other"))
DAY = 86_400_000_000


def moved(
    time: Expression, micros: int = 0, days: int = 0, months: int = 0, zone: str = "UTC"
) -> Expression:
    parts = (pa.scalar(part, pa.int64()) for part in (months, days, micros))
    return Call("add_interval", (time, *map(Literal, parts), Literal(pa.scalar(zone))), UTC)


def is_(function: str, *arguments: Expression) -> Expression:
    return Call(function, arguments, pa.bool_())


def bounds(condition: Expression | None) -> tuple[int | None, int | None]:
    found = time_bounds(condition, "left", "right")
    return found.earliest_us, found.latest_us


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (None, (None, None)),
        (is_("less_equal", LEFT, RIGHT), (0, None)),
        (is_("less", LEFT, RIGHT), (1, None)),
        (is_("less_equal", RIGHT, LEFT), (None, 0)),
        (is_("less", RIGHT, LEFT), (None, -1)),
        (is_("greater_equal", RIGHT, LEFT), (0, None)),
        (is_("greater", LEFT, RIGHT), (None, -1)),
        (is_("equal", RIGHT, LEFT), (0, 0)),
        (is_("equal", moved(LEFT, 5), RIGHT), (5, 5)),
        (is_("less_equal", RIGHT, moved(LEFT, 7)), (None, 7)),
        (is_("less_equal", moved(RIGHT, -7), LEFT), (None, 7)),
        (is_("less_equal", moved(RIGHT, 3), moved(LEFT, 7)), (None, 4)),
        (is_("less_equal", moved(moved(LEFT, 3), 4), RIGHT), (7, None)),
    ],
)
def test_each_way_to_say_it_is_understood(
    condition: Expression | None, expected: tuple[int | None, int | None]
) -> None:
    assert bounds(condition) == expected


def test_of_several_limits_the_tightest_holds() -> None:
    parts = [
        is_("less_equal", LEFT, RIGHT),
        is_("less_equal", moved(LEFT, 2), RIGHT),
        is_("less_equal", RIGHT, moved(LEFT, 9)),
        is_("less_equal", RIGHT, moved(LEFT, 8)),
    ]
    condition = is_("and", is_("and", parts[0], parts[2]), is_("and", parts[1], parts[3]))
    assert bounds(condition) == (2, 8)


def test_what_need_not_be_true_limits_nothing() -> None:
    both = (is_("less_equal", LEFT, RIGHT), is_("less_equal", RIGHT, LEFT))
    assert bounds(is_("or", *both)) == (None, None)
    assert bounds(is_("not", both[0])) == (None, None)


def test_other_columns_and_constants_limit_nothing() -> None:
    constant = Literal(pa.scalar(0, UTC))
    for pair in ((LEFT, OTHER), (OTHER, RIGHT), (LEFT, LEFT), (LEFT, constant), (constant, RIGHT)):
        assert bounds(is_("less_equal", *pair)) == (None, None)


def test_days_are_exact_in_utc_and_generous_where_clocks_are_changed() -> None:
    assert bounds(is_("less_equal", RIGHT, moved(LEFT, days=2))) == (None, 2 * DAY)
    in_paris = moved(LEFT, days=2, zone="Europe/Paris")
    assert bounds(is_("less_equal", RIGHT, in_paris)) == (None, 3 * DAY)
    assert bounds(is_("less_equal", in_paris, RIGHT)) == (DAY, None)


def test_a_month_is_as_long_as_it_may_be() -> None:
    assert bounds(is_("less_equal", RIGHT, moved(LEFT, months=2))) == (None, 62 * DAY)
    assert bounds(is_("less_equal", moved(LEFT, months=2), RIGHT)) == (56 * DAY, None)
    assert bounds(is_("less_equal", RIGHT, moved(LEFT, months=-1))) == (None, -28 * DAY)


def test_bounds_add_up() -> None:
    found = TimeBounds(None, 5).and_also(TimeBounds(-3, None)).and_also(TimeBounds(-9, 4))
    assert found == TimeBounds(-3, 4)
