"""Joins of two streams on real local Spark, row by row beside Spark's join of the same inputs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import stillframe
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.query import Query
from stillframe.spark.stream import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PARTITIONS, APPS = 2, 20
WAIT_SECONDS_MAX = 120.0
Rows = Counter[tuple[Any, ...]]


def shown(rows: Any) -> Any:
    """The left side: what was shown when; every seventh row has no app."""
    app = F.when(F.col("id") % 7 > 0, F.col("app_id"))
    return rows.select("id", app.alias("app"), F.col("at").alias("shown"))


def clicked(rows: Any) -> Any:
    """The right side: what was clicked when; every fifth row has no app."""
    app = F.when(F.col("id") % 5 > 0, F.col("app_id"))
    at = F.expr("at + INTERVAL 3 MILLISECONDS")
    return rows.select(F.col("id").alias("click"), app.alias("app"), at.alias("clicked"))


def stream(spark: SparkSession, records: int, records_per_second: int, seed: int) -> Stream:
    return (
        stillframe.on(spark)
        .readStream.format("clicks")
        .options(records=records, partitions=PARTITIONS, apps=APPS, batchRows=250, seed=seed)
        .option("recordsPerSecond", records_per_second)
        .load()
    )


def frame(spark: SparkSession, records: int, seed: int) -> DataFrame:
    source = ClickSource(records=records, partitions=PARTITIONS, apps=APPS, seed=seed)
    batches = [clicks_table(source, p, 0, records // PARTITIONS) for p in range(PARTITIONS)]
    return spark.createDataFrame(pa.Table.from_batches(batches))


def within_20_ms(left: Any, right: Any) -> Column:
    later = right.clicked.between(left.shown, left.shown + F.expr("INTERVAL 20 MILLISECONDS"))
    return (left.app == right.app) & later & (left.id % 3 != right.click % 3)


def joined(left: Any, right: Any, how: str) -> Any:
    both = left.join(right, within_20_ms(left, right), how)
    return both if how == "left_semi" else both.drop(right.app)


def watermarked(left: Stream, right: Stream) -> tuple[Stream, Stream]:
    return left.withWatermark("shown", "1 second"), right.withWatermark("clicked", "1 second")


def started(rows: Stream, directory: Path, **options: str) -> Query:
    return (
        rows.writeStream.queryName("joined")
        .format("parquet")
        .option("path", str(directory / "out"))
        .option("checkpointLocation", str(directory / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("restartDelay", "100 ms")
        .option("restartAttempts", "10")
        .option("parallelism", "2")
        .options(**options)
        .start()
    )


def plain(value: Any) -> Any:
    return value.timestamp() if hasattr(value, "timestamp") else value


def seen(directory: Path) -> Rows:
    out = directory / "out"
    rows = pq.read_table(out).to_pylist() if out.exists() and any(out.glob("*.parquet")) else []
    return Counter(tuple(map(plain, row.values())) for row in rows)


def truth(rows: DataFrame) -> Rows:
    return Counter(tuple(map(plain, row)) for row in rows.collect())


@pytest.mark.parametrize(("how", "unaligned"), [("inner", "false"), ("full", "true")])
def test_every_row_comes_out_once_after_a_kill(
    spark: SparkSession, tmp_path: Path, finish_with_a_kill: Any, how: str, unaligned: str
) -> None:
    records = 20_000
    sides = shown(stream(spark, records, 10_000, 1)), clicked(stream(spark, records, 10_000, 2))
    query = started(joined(*watermarked(*sides), how), tmp_path, unalignedCheckpoints=unaligned)
    finish_with_a_kill(query)

    expected = truth(
        joined(shown(frame(spark, records, 1)), clicked(frame(spark, records, 2)), how)
    )
    assert sum(expected.values()) > records
    assert seen(tmp_path) == expected


@pytest.mark.parametrize("how", ["left", "right", "left_semi"])
def test_inputs_of_very_different_speeds_are_joined_as_spark_joins_them(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    slow, fast = (3_000, 1_500), (30_000, 300_000)
    first, second = (fast, slow) if how != "right" else (slow, fast)
    sides = shown(stream(spark, *first, 1)), clicked(stream(spark, *second, 2))
    query = started(joined(*watermarked(*sides), how), tmp_path)
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    left, right = shown(frame(spark, first[0], 1)), clicked(frame(spark, second[0], 2))
    assert seen(tmp_path) == truth(joined(left, right, how))


def test_a_stream_is_joined_with_itself_and_counted_in_windows_behind_that(
    spark: SparkSession, tmp_path: Path
) -> None:
    def counted(rows: Any) -> Any:
        one, other = rows.alias("one"), rows.alias("other")
        later = F.expr("other.at BETWEEN one.at AND one.at + INTERVAL 50 MILLISECONDS")
        both = one.join(other, (F.col("one.app_id") == F.col("other.app_id")) & later)
        per_second = both.groupBy(F.window("one.at", "1 second"), "one.app_id").count()
        return per_second.select("window.start", "app_id", "count")

    clicks = stream(spark, 10_000, 10_000, 1).withWatermark("at", "1 second")
    query = started(counted(clicks), tmp_path)
    assert query.awaitTermination(WAIT_SECONDS_MAX)
    assert seen(tmp_path) == truth(counted(frame(spark, 10_000, 1)))


def test_unmatched_rows_come_out_beside_an_input_that_gives_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    schema = clicked(frame(spark, 2, 2)).schema
    left = shown(stream(spark, 4_000, 4_000, 1)).filter("id < 3000")
    reader = stillframe.on(spark).readStream.schema(schema)
    idle = reader.option("followInterval", "1 s").parquet(str(tmp_path / "in"))
    rows = joined(*watermarked(left, idle), "left")
    query = started(rows, tmp_path, watermarkIdleTimeout="1 s")
    deadline = time.monotonic() + 90
    try:
        while sum(seen(tmp_path).values()) < 3_000 - 1_100:  # a second is still open
            assert time.monotonic() < deadline, "nothing comes out"
            assert query.isActive, query.exception()
            threading.Event().wait(0.2)
    finally:
        query.stop()
    assert all(row[3:] == (None, None) for row in seen(tmp_path))


def test_late_rows_are_dropped_and_counted_and_the_others_joined(
    spark: SparkSession, tmp_path: Path
) -> None:
    def delayed(rows: Any) -> Any:
        """Every tenth row says that it is an hour old."""
        late = F.when(F.col("id") % 10 == 0, F.expr("shown - INTERVAL 1 HOUR"))
        return shown(rows).withColumn("shown", late.otherwise(F.col("shown")))

    records = 10_000
    sides = delayed(stream(spark, records, 10_000, 1)), clicked(stream(spark, records, 10_000, 2))
    query = started(joined(*watermarked(*sides), "left"), tmp_path)
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    left, right = delayed(frame(spark, records, 1)), clicked(frame(spark, records, 2))
    made, whole = seen(tmp_path), truth(joined(left, right, "left"))
    assert not made - whole
    dropped = whole - made
    assert all(row[0] % 10 == 0 and row[3] is None for row in dropped)
    assert sum(dropped.values()) == query.summary.records_late > records / 20
