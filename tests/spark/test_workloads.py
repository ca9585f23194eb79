"""Jobs as people write them, on awkward data and with kills, compared with Spark's own recount."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from stillframe.coordinator.history import CheckpointCompleted, Event
from stillframe.coordinator.query import Query
from stillframe.errors import BuildError, StartRefused
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream
from stillframe.spark.writer import StreamWriter

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAIT_SECONDS_MAX = 120.0

KEYS = {
    "text": """CASE id % 9 WHEN 0 THEN NULL WHEN 1 THEN '' WHEN 2 THEN '数据流'
               WHEN 3 THEN repeat('x', 4000) WHEN 4 THEN concat('é', char(0), 'z')
               ELSE concat('k', id % 23) END""",
    "number": "CASE WHEN id % 7 = 0 THEN NULL ELSE CAST(id % 5 AS int) END",
    "instant": "CASE WHEN id % 5 = 0 THEN NULL ELSE timestamp_micros(id % 4 * 1000003 - 5) END",
    "flag": "CASE WHEN id % 3 = 0 THEN NULL ELSE id % 2 = 0 END",
    "day": "CASE WHEN id % 4 = 0 THEN NULL ELSE date_add(date'1960-01-01', int(id % 3)) END",
    "ratio": """CASE id % 5 WHEN 0 THEN double('NaN') WHEN 1 THEN -0.0D WHEN 2 THEN 0.0D
                WHEN 3 THEN double('-Infinity') ELSE NULL END""",
}
VALUES = {
    "v": "CASE WHEN id % 4 = 0 THEN NULL ELSE id END",
    "x": "CASE id % 6 WHEN 0 THEN NULL WHEN 1 THEN double('NaN') ELSE id % 1000 * 0.25D END",
}


def test_keys_and_values_full_of_nulls_and_extremes_are_grouped_as_spark_groups_them(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    columns = [f"{sql} AS {name}" for name, sql in {**KEYS, **VALUES}.items()]
    spark.range(0, 16_000, 1, 4).selectExpr(*columns).write.parquet(str(tmp_path / "in"))
    records = spark.read.parquet(str(tmp_path / "in"))
    figures = [
        F.count("*").alias("n"),
        F.count("v").alias("n_of_v"),
        F.sum("v").alias("total"),
        F.avg("v").alias("mean"),
        F.min("x").alias("least"),
        F.max("x").alias("most"),
        F.min("text").alias("first_text"),
        (F.sum("v") + F.count("*") * 2).alias("mixed"),
    ]
    stream = _slowed(still.readStream.schema(records.schema).parquet(str(tmp_path / "in")))
    updates = stream.groupBy(*KEYS).agg(*figures).writeStream.outputMode("update")
    updates = updates.trigger(availableNow=True)
    _run_with_a_kill(_start(still, tmp_path, updates.option("path", str(tmp_path / "out"))))

    newest = Window.partitionBy(*KEYS).orderBy(F.desc("n"))
    out = spark.read.parquet(str(tmp_path / "out")).withColumn("age", F.row_number().over(newest))
    _same(out.where("age = 1").drop("age"), records.groupBy(*KEYS).agg(*figures))


def test_sinks_of_four_kinds_show_the_same_rows_after_a_kill(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    # Sorted, so Spark does not repeat it: it is spooled. Nested, so that every format has work.
    nested = spark.range(0, 30_000, 1, 3).selectExpr(
        "id", "named_struct('a', id, 'b', array(id, null)) AS st", "CAST(id AS decimal(20, 3)) AS d"
    )
    epochs: dict[int, list[int]] = {}

    def keep(df: DataFrame, epoch: int) -> None:
        epochs[epoch] = [row.id for row in df.select("id").collect()]

    stream = _slowed(still.stream(nested.orderBy(F.desc("id"))))
    query = _start(
        still,
        tmp_path,
        stream.writeStream.format("parquet").option("path", str(tmp_path / "parquet")),
        stream.writeStream.format("json").option("path", str(tmp_path / "json")),
        stream.writeStream.foreachBatch(keep),
        stream.writeStream.format("memory").queryName("four_kinds"),
    )
    _run_with_a_kill(query)

    _same(spark.read.parquet(str(tmp_path / "parquet")), nested)
    _same(spark.read.schema(nested.schema).json(str(tmp_path / "json")), nested)
    _same(spark.table("four_kinds"), nested)
    assert sorted(id for ids in epochs.values() for id in ids) == list(range(30_000))
    assert sorted(epochs) == list(range(len(epochs)))


def test_an_epoch_that_its_function_refused_comes_again_when_the_job_has_restarted(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    epochs: dict[int, list[int]] = {}
    refused: list[tuple[int, list[int]]] = []

    def keep(df: DataFrame, epoch: int) -> None:
        ids = sorted(row.id for row in df.select("id").collect())
        if epoch == 1 and not refused:
            refused.append((epoch, ids))
            raise OSError("the table is locked")
        epochs[epoch] = ids

    def start() -> Query:
        stream = _slowed(still.stream(spark.range(0, 60_000, 1, 2)))
        return _start(still, tmp_path, stream.writeStream.foreachBatch(keep))

    query = start()
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    [failure] = query.failures
    assert (
        "function keep given to foreachBatch raised OSError: the table is locked" in failure.reason
    )
    assert "epoch 1" in failure.blame.record
    assert [epochs[epoch] for epoch, _ in refused] == [ids for _, ids in refused]
    assert sorted(id for ids in epochs.values() for id in ids) == list(range(60_000))


@pytest.mark.parametrize("sink", ["parquet", "json", "foreachBatch"])
def test_columns_that_differ_by_case_alone_are_refused_as_spark_could_not_read_them(
    spark: SparkSession, still: Still, tmp_path: Path, sink: str
) -> None:
    stream = still.stream(spark.range(10)).selectExpr("id", "id + 1 AS ID")
    writer = stream.writeStream
    if sink == "foreachBatch":
        writer.foreachBatch(lambda df, epoch: None)
    else:
        writer.format(sink).option("path", str(tmp_path / "out"))

    with pytest.raises(BuildError, match=r"id and ID differ only by case"):
        _start(still, tmp_path, writer)


def test_columns_that_differ_by_case_alone_are_fine_where_spark_tells_them_apart(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        stream = still.stream(spark.range(10)).selectExpr("id", "id + 1 AS ID")
        writer = stream.writeStream.option("path", str(tmp_path / "out"))
        assert _start(still, tmp_path, writer).awaitTermination(WAIT_SECONDS_MAX)
        assert spark.read.parquet(str(tmp_path / "out")).selectExpr("sum(ID)").first()[0] == 55
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_column_of_empty_arrays_passes_through(spark: SparkSession, still: Still) -> None:
    stream = still.stream(spark.range(3).selectExpr("id", "array() AS nothing"))

    assert stream.dtypes == [("id", "bigint"), ("nothing", "array<void>")]


def test_a_function_that_cannot_be_sent_to_executors_is_refused_by_name_at_the_start(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    lock = threading.Lock()

    def guarded(row: Any) -> tuple[int]:
        with lock:
            return (row.id,)

    stream = still.stream(spark.range(10)).map_rows(guarded, "id long")
    writer = stream.writeStream.option("path", str(tmp_path / "out"))

    with pytest.raises(StartRefused, match=r"map guarded cannot be sent .* '_thread.lock'"):
        _start(still, tmp_path, writer)


def test_the_progress_of_all_checkpoints_together_counts_every_row_once(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    stream = still.stream(spark.range(0, 60_000, 1, 2))  # read long before progress is due
    query = _start(still, tmp_path, stream.writeStream.option("path", str(tmp_path / "out")))
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    assert sum(progress["numInputRows"] for progress in query.recentProgress) == 60_000


# --- How they are run ---------------------------------------------------------------------------


def _slowed(stream: Stream) -> Stream:
    """Long enough for several checkpoints."""

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        import time

        for batch in batches:
            time.sleep(0.2)
            yield batch

    return stream.mapInArrow(slowly, stream.schema)


def _start(still: Still, directory: Path, *writers: StreamWriter) -> Query:
    options: dict[str, Any] = {
        "checkpointLocation": str(directory / "checkpoints"),
        "checkpointInterval": "100 ms",
        "restartDelay": "50 ms",
        "parallelism": 2,
    }
    return still.start("workload", *writers, **options)


def _run_with_a_kill(query: Query) -> None:
    """Kill a slot behind the first completed checkpoint, and wait for the end."""
    killed: list[int] = []

    def kill_once(event: Event) -> None:
        if isinstance(event, CheckpointCompleted) and not killed and query.slot_pids:
            killed.append(query.slot_pids[0])
            os.kill(killed[0], signal.SIGKILL)

    query.add_listener(kill_once)
    assert query.awaitTermination(WAIT_SECONDS_MAX), query.events
    assert query.summary.restarts >= 1


def _same(seen: DataFrame, truth: DataFrame) -> None:
    """As multisets."""
    assert seen.exceptAll(truth).take(3) == []
    assert truth.exceptAll(seen).take(3) == []
