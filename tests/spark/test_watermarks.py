"""Inputs that differ in speed and age on real local Spark, compared with Spark's own results."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import stillframe
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.spark.stream import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAIT_SECONDS_MAX = 120.0
Rows = Counter[tuple[Any, ...]]


def clicks(spark: SparkSession, records: int, per_second: int, partitions: int = 2) -> Stream:
    return (
        stillframe.on(spark)
        .readStream.format("clicks")
        .options(records=records, partitions=partitions, apps=5, batchRows=100)
        .option("recordsPerSecond", per_second)
        .load()
    )


def table_of(records: int, partitions: int = 2) -> pa.Table:
    source = ClickSource(records=records, partitions=partitions, apps=5)
    return pa.Table.from_batches(
        [clicks_table(source, each, 0, records // partitions) for each in range(partitions)]
    )


def newest_of(table: pa.Table) -> float:
    newest: float = pc.max(table["at"]).as_py().timestamp()
    return newest


def counted(rows: Any) -> Any:
    return (
        rows.groupBy(F.window("at", "2 seconds"), "app_id")
        .agg(F.count("*").alias("views"), F.sum("id").alias("ids"))
        .select("window.start", "app_id", "views", "ids")
    )


def truth(frame: DataFrame) -> Rows:
    return Counter(
        (row["start"].timestamp(), row["app_id"], row["views"], row["ids"])
        for row in counted(frame).collect()
    )


def seen(out: Path) -> Rows:
    rows = pq.read_table(out).to_pylist() if out.exists() and any(out.glob("*.parquet")) else []
    return Counter((r["start"].timestamp(), r["app_id"], r["views"], r["ids"]) for r in rows)


def start(stream: Stream, directory: Path, parallelism: int, **options: str) -> Any:
    return appending(stream, directory, parallelism).options(**options).start()


def appending(stream: Stream, directory: Path, parallelism: int) -> Any:
    return (
        counted(stream)
        .writeStream.queryName("watermarks")
        .outputMode("append")
        .format("parquet")
        .option("path", str(directory / "out"))
        .option("checkpointLocation", str(directory / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("parallelism", str(parallelism))
    )


def wait_until(query: Any, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not happened():
        assert time.monotonic() < deadline, "it never came to it"
        assert query.isActive, query.exception()
        threading.Event().wait(0.2)


def test_two_inputs_of_very_different_speed_lose_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    fast, slow = clicks(spark, 30_000, 30_000), clicks(spark, 3_000, 1_000, partitions=3)
    marked = [each.withWatermark("at", "1 second") for each in (fast, slow)]
    query = start(marked[0].union(marked[1]), tmp_path, parallelism=2)
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    both = pa.concat_tables([table_of(30_000), table_of(3_000, 3)])
    assert seen(tmp_path / "out") == truth(spark.createDataFrame(both))


def test_files_of_which_the_later_is_older_lose_nothing_however_many_read_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = table_of(6_000, 1)
    (tmp_path / "in").mkdir()
    for number in range(6):  # the first file by name has the newest records
        newest_first = table.slice((5 - number) * 1_000, 1_000)
        pq.write_table(newest_first, tmp_path / "in" / f"{number}.parquet", row_group_size=100)
    frame = spark.read.parquet(str(tmp_path / "in"))
    whole, reached = truth(frame), newest_of(table)
    expected = Counter({row: n for row, n in whole.items() if row[0] + 2 <= reached})
    assert 0 < expected.total() < whole.total()
    for parallelism in (1, 2):
        reader = stillframe.on(spark).readStream.schema(frame.schema)
        stream = reader.parquet(str(tmp_path / "in")).withWatermark("at", "0 seconds")
        writer = appending(stream, tmp_path / str(parallelism), parallelism)
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_SECONDS_MAX)

        assert seen(tmp_path / str(parallelism) / "out") == expected


def test_an_input_that_gives_nothing_does_not_keep_windows_open_for_ever(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    busy = clicks(spark, 4_000, 4_000)
    reader = stillframe.on(spark).readStream.schema(spark.createDataFrame(table_of(2)).schema)
    idle = reader.option("followInterval", "1 s").parquet(str(tmp_path / "in"))
    marked = [each.withWatermark("at", "1 second") for each in (busy, idle)]
    query = start(marked[0].union(marked[1]), tmp_path, 2, watermarkIdleTimeout="1 s")
    reached = newest_of(table_of(4_000)) - 1
    whole = truth(spark.createDataFrame(table_of(4_000)))
    expected = Counter({row: n for row, n in whole.items() if row[0] + 2 <= reached})
    try:
        wait_until(query, lambda: seen(tmp_path / "out") == expected)
    finally:
        query.stop()

    assert 0 < expected.total() < whole.total(), "what is idle may still give records"


def test_what_is_available_moves_time_as_far_as_in_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both read one directory for ever; neither closes more than its records allow."""
    (tmp_path / "in").mkdir()
    pq.write_table(table_of(6_000, 1), tmp_path / "in" / "0.parquet", row_group_size=100)
    schema = spark.read.parquet(str(tmp_path / "in")).schema
    theirs = (
        counted(
            spark.readStream.schema(schema)
            .parquet(str(tmp_path / "in"))
            .withWatermark("at", "3 seconds")
        )
        .writeStream.outputMode("append")
        .option("checkpointLocation", str(tmp_path / "theirs"))
        .start(str(tmp_path / "their-out"))
    )
    reader = stillframe.on(spark).readStream.schema(schema).option("followInterval", "100 ms")
    followed = reader.parquet(str(tmp_path / "in")).withWatermark("at", "3 seconds")
    ours = start(followed, tmp_path, parallelism=1)
    try:
        theirs.processAllAvailable()
        wait_until(ours, lambda: ours.summary.records_in == 6_000)
        ours.processAllAvailable()
    finally:
        ours.stop()
        theirs.stop()

    closed = seen(tmp_path / "out")
    assert closed == seen(tmp_path / "their-out")
    assert 0 < closed.total() < truth(spark.read.parquet(str(tmp_path / "in"))).total()
