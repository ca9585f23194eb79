"""Lists, maps and structs as functions of pandas see them and give them back, as in PySpark."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from stillframe.errors import DataError
from stillframe.runtime.row_functions import PandasFunction

INSTANT = pa.timestamp("us", "UTC")
NOON = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC)
HERE = pd.Timestamp("2024-07-01 08:00")
"""The same in New York."""
CLOCK = datetime.datetime(2024, 7, 1, 12)
LARGE = 2**60 + 1
LONG = pa.int64()
SEEN: dict[str, tuple[pa.DataType, Any, Any]] = {
    "a map": (pa.map_(pa.string(), LONG), [("a", 1), ("b", None)], {"a": 1, "b": None}),
    "times in a list": (pa.list_(INSTANT), [NOON, None], [HERE, None]),
    "times in a map": (pa.map_(pa.string(), INSTANT), [("a", NOON)], {"a": HERE}),
    "times as keys": (pa.map_(INSTANT, LONG), [(NOON, 1)], {HERE: 1}),
    "times in a struct": (
        pa.struct([("at", INSTANT), ("n", LONG)]),
        {"at": NOON, "n": None},
        {"at": HERE, "n": None},
    ),
    "times in structs in a list": (
        pa.list_(pa.struct([("at", INSTANT)])),
        [{"at": NOON}, None],
        [{"at": HERE}, None],
    ),
    "lists in a list": (pa.list_(pa.list_(INSTANT)), [[NOON], [], None], [[HERE], [], None]),
    "maps in a struct": (
        pa.struct([("m", pa.map_(pa.string(), LONG))]),
        {"m": [("a", LARGE)]},
        {"m": {"a": LARGE}},
    ),
    "clocks": (pa.list_(pa.timestamp("us")), [CLOCK], [pd.Timestamp(CLOCK)]),
    "large numbers beside a missing one": (pa.list_(LONG), [LARGE, None], [LARGE, None]),
    "numbers": (pa.list_(LONG), [1, 2], [1, 2]),
}


def plain(value: Any) -> Any:
    """Arrays as lists, however deep, and what pandas has for a missing time as nothing."""
    if isinstance(value, np.ndarray | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return None if value is pd.NaT else value


@pytest.mark.parametrize("zone", ["America/New_York", "GMT-4"])
@pytest.mark.parametrize("what", SEEN)
def test_a_function_sees_what_it_sees_in_pyspark_and_gives_it_back_as_it_was(
    what: str, zone: str
) -> None:
    kind, value, seen = SEEN[what]
    batch = pa.record_batch([pa.array([value, None], kind)], ["x"])
    frames: list[pd.DataFrame] = []

    def noted(given: Any) -> Any:
        for frame in given:
            frames.append(frame)
            yield frame

    [made] = PandasFunction(noted, batch.schema, zone)(iter((batch,)))

    assert [plain(each) for each in frames[0]["x"]] == [seen, None]
    assert made.equals(batch)


@pytest.mark.parametrize("what", sorted(SEEN.keys() - {"lists in a list"}))  # which it refuses
def test_pyspark_itself_shows_the_same(what: str) -> None:
    conversion = pytest.importorskip("pyspark.sql.conversion")
    if not hasattr(conversion, "ArrowBatchTransformer"):
        pytest.skip("PySpark has it elsewhere before 4.3")
    kind, value, seen = SEEN[what]
    batch = pa.record_batch([pa.array([value, None], kind)], ["x"])

    [series] = conversion.ArrowBatchTransformer.to_pandas(batch, timezone="America/New_York")

    assert [plain(each) for each in series] == [seen, None]


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        (pa.list_(INSTANT), [NOON, HERE, np.datetime64("2024-07-01T08:00"), pd.NaT], [NOON] * 3),
        (pa.list_(INSTANT), np.array(["2024-07-01T08:00"], "M8[ns]"), [NOON]),
        (pa.struct([("at", INSTANT)]), (HERE,), {"at": NOON}),
        (pa.map_(pa.string(), INSTANT), [("a", HERE)], [("a", NOON)]),
        (pa.map_(pa.string(), INSTANT), {"a": pd.NaT}, [("a", None)]),
        (
            pa.struct([("at", INSTANT), ("x", pa.float64())]),
            {"at": HERE, "x": math.inf},
            {"at": NOON, "x": math.inf},
        ),
    ],
    ids=str,
)
def test_times_within_that_have_no_zone_are_of_the_sessions(
    kind: pa.DataType, value: Any, made: Any
) -> None:
    frame = pd.DataFrame({"x": pd.Series([value, None, float("nan")], dtype=object)})
    function = PandasFunction(lambda _: [frame], pa.schema([("x", kind)]), "America/New_York")

    [batch] = function(iter(()))
    first, *others = batch.column(0).to_pylist()
    assert (first[:3] if isinstance(first, list) else first) == made
    assert others == [None, None]


@pytest.mark.parametrize("value", [[5], ["2024-07-01"], [pd.Timestamp(5)], 7, "noon"])
def test_what_is_no_time_within_is_refused(value: Any) -> None:
    frame = pd.DataFrame({"x": pd.Series([value], dtype=object)})
    function = PandasFunction(lambda _: [frame], pa.schema([("x", pa.list_(INSTANT))]), "UTC")

    with pytest.raises(DataError, match="gave back values for column x that are no list"):
        list(function(iter(())))
