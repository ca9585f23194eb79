"""Windows on real local Spark with a `kill -9` in the middle, compared with Spark's own results."""

from __future__ import annotations

import os
import signal
from collections import Counter
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
from stillframe.spark.stream import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECORDS, PARTITIONS, APPS = 40_000, 2, 20
WAIT_SECONDS_MAX = 120.0
Rows = Counter[tuple[Any, ...]]


def clicks(spark: SparkSession) -> Stream:
    """One partition for each slot, each in the order of time: nothing is late."""
    return (
        stillframe.on(spark)
        .readStream.format("clicks")
        .options(records=RECORDS, partitions=PARTITIONS, apps=APPS, batchRows=500)
        .option("recordsPerSecond", 20_000)
        .load()
    )


def same_clicks(spark: SparkSession) -> DataFrame:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    batches = [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
    return spark.createDataFrame(pa.Table.from_batches(batches))


def run_and_kill(stream: Stream, mode: str, directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Run to the end; a slot dies after the second checkpoint. What came out, and restores."""
    events: list[Event] = []
    query = (
        stream.writeStream.queryName("windows")
        .outputMode(mode)
        .format("parquet")
        .option("path", str(directory / "out"))
        .option("checkpointLocation", str(directory / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("restartDelay", "100 ms")
        .option("restartAttempts", "10")
        .option("parallelism", "2")
        .start()
    )

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, CheckpointCompleted) and event.checkpoint_id == 2:
            os.kill(query.slot_pids[1], signal.SIGKILL)

    query.add_listener(listen)
    assert query.awaitTermination(WAIT_SECONDS_MAX), [str(event) for event in events]
    restores = [e for e in events if isinstance(e, AttemptStarted) and e.restored_from]
    return pq.read_table(directory / "out").to_pylist(), len(restores)


def flat(row: dict[str, Any]) -> tuple[Any, ...]:
    window = row.pop("window")
    moments = (window["start"].timestamp(), window["end"].timestamp())
    return (*moments, *(row[name] for name in sorted(row)))


def truth(frame: DataFrame) -> Rows:
    return Counter(flat(row.asDict(recursive=True)) for row in frame.collect())


@pytest.mark.parametrize("slide", ["2 seconds", "500 milliseconds"])
def test_every_window_comes_out_once_and_whole_after_a_kill(
    spark: SparkSession, tmp_path: Path, slide: str
) -> None:
    def counted(rows: Any) -> Any:
        return rows.groupBy(F.window("at", "2 seconds", slide), "app_id").agg(
            F.count("*").alias("views"), F.max("id").alias("last")
        )

    stream = counted(clicks(spark).withWatermark("at", "1 second"))
    rows, restores = run_and_kill(stream, "append", tmp_path)

    assert restores == 1
    assert Counter(map(flat, rows)) == truth(counted(same_clicks(spark)))


def test_updates_of_windows_end_with_the_true_values_after_a_kill(
    spark: SparkSession, tmp_path: Path
) -> None:
    def counted(rows: Any) -> Any:
        return rows.groupBy(F.window("at", "2 seconds"), "app_id").count()

    rows, restores = run_and_kill(
        counted(clicks(spark).withWatermark("at", "1 second")), "update", tmp_path
    )
    last: dict[tuple[Any, ...], int] = {}
    for row in rows:
        start, end, app, count = flat(row)
        last[start, end, app] = max(count, last.get((start, end, app), 0))

    assert restores == 1
    found = Counter((*key[:2], key[2], count) for key, count in last.items())
    assert found == truth(counted(same_clicks(spark)))
