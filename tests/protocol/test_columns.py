"""Which columns of a state may come and go."""

from __future__ import annotations

import pytest

from stillframe.protocol.columns import Changed, Column, Part, Refused, StateColumns, change_of

LONG, DOUBLE = "int64", "double"


def part(name: str, *columns: tuple[str, str]) -> Part:
    return Part(name, tuple(Column(*each) for each in columns))


COUNT = part("count", ("count", LONG))
SUM = part("sum", ("sum", LONG))
AVG = part("avg", ("avg.sum", DOUBLE), ("avg.n", LONG))


def changed(before: str, *parts: Part, given=(), keys="app", lasting=()) -> Changed | Refused:
    """`before`: names of columns, all of one type; the first is the key."""
    there = [Column(name, LONG) for name in before.split()]
    now = StateColumns((keys,), tuple(lasting), parts)
    return change_of(there, [there[0].name], now, given)


def test_what_is_new_is_told_by_aggregate_and_what_is_gone_by_column():
    assert changed("app count", COUNT, AVG) == Changed(("avg",), ())
    assert changed("app count avg.sum avg.n", COUNT) == Changed((), ("avg.sum", "avg.n"))


@pytest.mark.parametrize(
    ("before", "parts", "said"),
    [
        ("user count", [COUNT], "kept by user in the snapshot and by app"),
        ("app avg.sum", [AVG], "avg is kept in other columns"),
        ("app sum.digits", [SUM], "sum is kept in other columns"),
        ("app sum sum_2", [SUM], "sum and sum_2 cannot be told apart"),
        ("app count", [SUM], "sum is new and count is gone"),
    ],
)
def test_what_cannot_be_known_for_sure_is_refused(before, parts, said):
    refused = changed(before, *parts)

    assert isinstance(refused, Refused)
    assert said in refused.why


def test_a_column_that_says_what_a_row_belongs_to_has_to_be_there():
    assert changed("app pane count", COUNT, lasting=["pane"]) == Changed()
    assert isinstance(changed("app count", COUNT, lasting=["pane"]), Refused)


def test_a_person_may_say_that_what_is_new_is_not_what_is_gone():
    assert changed("app count", SUM, given=["sum"]) == Changed(("sum",), ("count",))
