"""Late rows as a stream of their own, and whole results, on real Spark with a `kill -9`."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import stillframe
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.coordinator.query import Query
from stillframe.spark.stream import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECORDS, PARTITIONS, APPS = 40_000, 2, 20
WAIT_SECONDS_MAX = 120.0


@pytest.fixture
def clicks(spark: SparkSession) -> Stream:
    """Every tenth click says that it is an hour old."""
    at = F.when(F.col("id") % 10 == 0, F.expr("at - INTERVAL 1 HOUR")).otherwise(F.col("at"))
    return (
        stillframe.on(spark)
        .readStream.format("clicks")
        .options(records=RECORDS, partitions=PARTITIONS, apps=APPS, batchRows=500)
        .option("recordsPerSecond", 20_000)
        .load()
        .withColumn("at", at)
        .withWatermark("at", "1 second")
    )


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    return {
        "checkpointLocation": str(tmp_path / "checkpoints"),
        "checkpointInterval": "300 ms",
        "restartDelay": "100 ms",
        "restartAttempts": "10",
        "parallelism": "2",
    }


def finish_with_a_kill(query: Query) -> None:
    """Run to the end; a slot dies after the second checkpoint."""
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, CheckpointCompleted) and event.checkpoint_id == 2:
            os.kill(query.slot_pids[1], signal.SIGKILL)

    query.add_listener(listen)
    assert query.awaitTermination(WAIT_SECONDS_MAX), [str(event) for event in events]
    restored = [e for e in events if isinstance(e, AttemptStarted) and e.restored_from]
    assert len(restored) == 1, [str(event) for event in events]


def test_every_click_is_either_counted_or_late_and_once_after_a_kill(
    clicks: Stream, options: dict[str, str], tmp_path: Path
) -> None:
    counts, late = (
        clicks.groupBy(F.window("at", "1 second"), "app_id")
        .agg(F.sum("id").alias("ids"), F.count("user_id").alias("views"))
        .with_late()
    )
    assert late.columns == clicks.columns
    query = clicks.still.start(
        "late",
        counts.writeStream.option("path", str(tmp_path / "counts")),
        late.writeStream.option("path", str(tmp_path / "late")),
        **options,
    )
    finish_with_a_kill(query)

    counted, too_late = (pq.read_table(tmp_path / name) for name in ("counts", "late"))
    ids = too_late["id"].to_pylist()
    assert len(ids) > RECORDS / 20
    assert len(set(ids)) == len(ids)
    assert all(number % 10 == 0 for number in ids)
    assert too_late.schema.names == clicks.columns
    assert sum(counted["views"].to_pylist()) + len(ids) == RECORDS
    assert sum(counted["ids"].to_pylist()) + sum(ids) == sum(range(RECORDS))
    assert query.summary.records_late == 0, "what is read is not dropped"


def test_clicks_that_are_dropped_are_counted(clicks: Stream, options: dict[str, str]) -> None:
    seen: list[int] = []
    query = (
        clicks.groupBy(F.window("at", "1 second"), "app_id")
        .agg(F.max("id"), F.count("user_id").alias("views"))
        .writeStream.queryName("dropped")
        .foreachBatch(lambda df, _: seen.extend(row.views for row in df.collect()))
        .options(**options)
        .start()
    )
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    late = query.summary.records_late
    assert late > RECORDS / 20
    assert sum(seen) + late == RECORDS
    assert sum(each["numRowsDroppedByWatermark"] for each in query.recentProgress) == late


def same_clicks(spark: SparkSession) -> DataFrame:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    batches = [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
    at = F.when(F.col("id") % 10 == 0, F.expr("at - INTERVAL 1 HOUR")).otherwise(F.col("at"))
    return spark.createDataFrame(pa.Table.from_batches(batches)).withColumn("at", at)


def rows_of(frame: DataFrame) -> Counter[tuple[Any, ...]]:
    return Counter(map(tuple, frame.collect()))


@pytest.mark.parametrize("unaligned", ["false", "true"])
def test_every_epoch_is_the_whole_result_and_the_last_one_the_true_one_after_a_kill(
    spark: SparkSession, clicks: Stream, options: dict[str, str], unaligned: str
) -> None:
    def counted(rows: Any) -> Any:
        per_app = rows.groupBy(F.window("at", "5 seconds", "1 second"), "app_id").count()
        return per_app.select("window.start", "app_id", F.col("count").alias("views"))

    epochs: dict[int, Counter[tuple[Any, ...]]] = {}
    query = (
        counted(clicks)
        .writeStream.queryName("whole")
        .outputMode("complete")
        .foreachBatch(lambda df, epoch: epochs.update({epoch: rows_of(df)}))
        .options(**options, unalignedCheckpoints=unaligned)
        .start()
    )
    finish_with_a_kill(query)

    assert epochs[max(epochs)] == rows_of(counted(same_clicks(spark)))
    for table in epochs.values():
        keys = [row[:2] for row in table.elements()]
        assert len(keys) == len(set(keys)), "a window of an app is there once"
    assert list(totals(epochs)) == sorted(totals(epochs)), "and its counts only grow"
    assert query.summary.records_late == 0


def totals(epochs: dict[int, Counter[tuple[Any, ...]]]) -> Iterator[int]:
    for epoch in sorted(epochs):
        yield sum(row[2] for row in epochs[epoch].elements())


def test_the_memory_table_is_replaced_by_each_epoch(
    spark: SparkSession, clicks: Stream, options: dict[str, str]
) -> None:
    def counted(rows: Any) -> Any:
        return rows.groupBy("app_id").count()

    query = (
        counted(clicks)
        .filter("count % 2 >= 0")
        .writeStream.queryName("apps_in_memory")
        .outputMode("complete")
        .format("memory")
        .options(**options)
        .start()
    )
    finish_with_a_kill(query)

    assert query.summary.checkpoints_completed > 2
    assert rows_of(spark.table("apps_in_memory")) == rows_of(counted(same_clicks(spark)))
