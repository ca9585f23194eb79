"""Functions with timers on real local Spark, with a `kill -9` in the middle, against the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import stillframe
from stillframe.errors import BuildError
from stillframe.graph.logical import Process
from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

WIDTH_US = 2_000_000


class CountPerTwoSeconds(stillframe.KeyedFunction):
    """What a window does, by hand: counts per app and span, said when a timer at its end fires."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def open(self, timers: stillframe.Timers) -> None:
        self._timers = timers

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        times = batch["at"].cast(pa.int64())
        ends = pc.multiply(pc.add(pc.divide(times, WIDTH_US), 1), WIDTH_US)
        self._counts.update(zip(batch["app_id"].to_pylist(), ends.to_pylist(), strict=True))
        self._timers.register(batch, ends.cast(pa.timestamp("us", "UTC")))
        return ()

    def on_event_timers(self, fired: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        ends = fired["time"].cast(pa.int64()).to_pylist()
        counts = [
            self._counts.pop(key) for key in zip(fired["app_id"].to_pylist(), ends, strict=True)
        ]
        columns = [fired["app_id"], fired["time"], pa.array(counts, pa.int64())]
        yield pa.record_batch(columns, ["app_id", "end", "views"])

    def snapshot(self) -> pa.RecordBatch:
        rows = [{"app_id": a, "end": e, "n": n} for (a, e), n in self._counts.items()]
        schema = pa.schema([("app_id", pa.string()), ("end", pa.int64()), ("n", pa.int64())])
        return pa.RecordBatch.from_pylist(rows, schema)

    def restore(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            self._counts[row["app_id"], row["end"]] = row["n"]


def truth(frame: DataFrame) -> Counter[tuple[Any, ...]]:
    windows = frame.groupBy(F.window("at", "2 seconds"), "app_id").count().collect()
    return Counter((row.app_id, row.window.end.timestamp(), row["count"]) for row in windows)


@pytest.mark.slow
@pytest.mark.parametrize("unaligned", ["false", "true"])
def test_a_function_with_timers_says_everything_once_after_a_kill(
    clicks: Any, run_and_kill: Any, unaligned: str
) -> None:
    watched = clicks.stream().withWatermark("at", "1 second")
    counted = watched.groupBy("app_id").process(
        CountPerTwoSeconds, "app_id string, end timestamp, views long"
    )  # fmt: skip
    rows = run_and_kill(counted.writeStream, unalignedCheckpoints=unaligned)

    found = Counter((row["app_id"], row["end"].timestamp(), row["views"]) for row in rows)
    assert found == truth(clicks.frame())


# --- how it is built ----------------------------------------------------------------------------


@pytest.fixture
def numbers(spark: SparkSession) -> Stream:
    frame = spark.range(10).selectExpr(
        "id", "id % 7 AS key", "cast(id AS double) AS amount", "array(id) AS list", "now() AS at"
    )
    return stillframe.on(spark).stream(frame)


class Undone(stillframe.KeyedFunction):
    pass


SCHEMA = "app_id string"


def test_a_process_stands_behind_an_exchange_by_its_keys(numbers: Stream) -> None:
    made = numbers.groupBy("key", numbers.amount).process(CountPerTwoSeconds, SCHEMA)
    named = made.uid("counting").parallelism(3)

    assert isinstance(named.node.operator, Process)
    assert named.node.operator.keys == ("key", "amount")
    assert (named.node.uid, named.node.parallelism) == ("counting", 3)
    assert made.columns == ["app_id"]


@pytest.mark.parametrize(
    ("process", "says"),
    [
        (lambda s: s.groupBy("key").process(CountPerTwoSeconds(), SCHEMA), "give the class"),
        (lambda s: s.groupBy("key").process(dict, SCHEMA), "KeyedFunction, not the class dict"),
        (
            lambda s: s.groupBy("key").process(7, SCHEMA),
            "subclass of KeyProcessor or KeyedFunction, not 7",
        ),
        (lambda s: s.groupBy("key").process(Undone, SCHEMA), "does not say what to do in process"),
        (lambda s: s.groupBy().process(CountPerTwoSeconds, SCHEMA), "name columns in groupBy"),
        (
            lambda s: s.groupBy(s.key + 1).process(CountPerTwoSeconds, SCHEMA),
            r"with withColumn\(...\) first",
        ),
        (
            lambda s: s.groupBy("list").process(CountPerTwoSeconds, SCHEMA),
            r"process by 'list' is not possible, .* by a array<bigint>",
        ),
        (
            lambda s: (
                s.withWatermark("at", "1 second")
                .groupBy(F.window("at", "1 second"), "key")
                .process(CountPerTwoSeconds, SCHEMA)
            ),
            "leave the window out and register timers",
        ),
        (
            lambda s: s.groupBy("key").process(CountPerTwoSeconds, "a long, a long"),
            "two columns would have the name a",
        ),
        (lambda s: s.groupBy("key").count().groupBy("key"), "already aggregated"),
    ],
)
def test_what_cannot_be_processed_is_refused_in_one_sentence(
    numbers: Stream, process: Any, says: str
) -> None:
    with pytest.raises(BuildError, match=says):
        process(numbers)
