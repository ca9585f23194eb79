"""`KeyProcessor`s on real local Spark: how they are built, and with a `kill -9` in the middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

import stillframe
from stillframe.errors import BuildError
from stillframe.graph.logical import Process, Transform
from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

WIDTH = timedelta(seconds=2)
USERS = StructType([StructField("user_id", LongType(), nullable=False)])


class PerTwoSeconds(stillframe.KeyProcessor):
    """Per app and two seconds of event time: clicks, users, and the longest user id, at its end."""

    def __init__(self, width: timedelta = WIDTH) -> None:
        self.width = width

    def open(self, states: stillframe.KeyStates) -> None:
        self.states = states
        end = "end timestamp"
        self.clicks = states.map("clicks", end, "n long", ttl="1 hour")
        self.users = states.map("users", "end timestamp, user_id long", USERS)
        self.all = states.aggregating(
            "all", "n long", lambda kept, n: ((kept or (0,))[0] + n,), sum
        )
        totals = {"n": "sum", "last": "max"}
        self.totals = states.reducing("totals", "n long, last timestamp", totals)
        self.seen = states.opaque("seen", ttl=timedelta(days=1), ttl_refresh="read and write")

    def process(self, key: Any, rows: Iterator[Any]) -> None:
        for row in rows:
            spans = row.at.timestamp() // self.width.total_seconds() + 1
            end = datetime.fromtimestamp(spans * self.width.total_seconds(), row.at.tzinfo)
            before = self.clicks.get((end,))
            self.clicks.put((end,), (1 if before is None else before.n + 1,))
            self.users.put((end, row.user_id), (row.user_id,))
            self.all.add(1)
            self.totals.add((1, row.at))
            self.seen.update((self.seen.get() or frozenset()) | {row.user_id})
            self.states.register_timer(end)

    def on_timer(self, key: Any, time: datetime, clock: str) -> Iterator[Any]:
        users = [found for found, _ in self.users.items() if found.end == time]
        yield key.app_id, time, self.clicks.get((time,)).n, len(users)
        self.clicks.remove((time,))
        for found in users:
            self.users.remove(found)
        assert {found.user_id for found in users} <= self.seen.get()
        assert self.totals.get().n == self.all.get() > 0
        assert self.totals.get().last >= time - self.width


SCHEMA = "app_id string, end timestamp, clicks long, users long"


@pytest.mark.slow
def test_a_processor_with_states_of_all_kinds_says_everything_once_after_a_kill(
    clicks: Any, run_and_kill: Any
) -> None:
    watched = clicks.stream().withWatermark("at", "1 second")
    counted = watched.groupBy("app_id").process(PerTwoSeconds, SCHEMA)
    rows = run_and_kill(counted.writeStream)

    found = Counter((r["app_id"], r["end"].timestamp(), r["clicks"], r["users"]) for r in rows)
    windows = clicks.frame().groupBy(F.window("at", "2 seconds"), "app_id")
    truth = windows.agg(F.count("*").alias("n"), F.count_distinct("user_id").alias("users"))
    assert found == Counter(
        (row.app_id, row.window.end.timestamp(), row.n, row.users) for row in truth.collect()
    )


# --- how it is built ----------------------------------------------------------------------------


@pytest.fixture
def numbers(spark: SparkSession) -> Stream:
    return stillframe.on(spark).stream(spark.range(10).selectExpr("id", "id % 7 AS key"))


class Batches(stillframe.KeyedFunction):
    def process(self, batch: Any) -> Any:
        return [batch]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (PerTwoSeconds, Transform),
        (partial(PerTwoSeconds, timedelta(seconds=1)), Transform),
        (lambda: PerTwoSeconds(), Transform),
        (Batches, Process),
        (partial(Batches), Process),
        (lambda: Batches(), Process),
    ],
)
def test_what_a_function_makes_is_known_where_the_job_is_built(
    numbers: Stream, make: Any, kind: type
) -> None:
    made = numbers.groupBy("key").process(make, SCHEMA)

    assert type(made.node.operator) is kind
    assert made.columns == ["app_id", "end", "clicks", "users"]


class Undone(stillframe.KeyProcessor):
    pass


class WrongSchema(PerTwoSeconds):
    def open(self, states: stillframe.KeyStates) -> None:
        states.value("v", StructType([StructField("a", StringType())]))
        states.value("w", "n lung")


class Breaks(PerTwoSeconds):
    def open(self, states: stillframe.KeyStates) -> None:
        raise OSError("no such server")


def breaks() -> Any:
    raise ValueError("not here")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (PerTwoSeconds(), "takes what makes a PerTwoSeconds"),
        (Undone, "Undone does not say what to do in process"),
        (partial(dict), "subclass of KeyProcessor or KeyedFunction, not the class dict"),
        (lambda: 7, "made a int: process takes what makes a KeyProcessor or KeyedFunction"),
        (breaks, "breaks, which is also called here .* raised ValueError: not here"),
        (WrongSchema, r"WrongSchema cannot be used: .* \(Unsupported data type 'LUNG'\)"),
        (Breaks, r"Breaks.open, which is also called here .* raised OSError: no such server"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(numbers: Stream, make: Any, says: str) -> None:
    with pytest.raises(BuildError, match=says):
        numbers.groupBy("key").process(make, SCHEMA)
