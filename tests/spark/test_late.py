"""Late rows as a stream of their own, and whole results, on real Spark with a `kill -9`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stillframe.spark.stream import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAIT_SECONDS_MAX = 120.0


def with_late_clicks(rows: Any) -> Any:
    """Every tenth click says that it is an hour old."""
    at = F.when(F.col("id") % 10 == 0, F.expr("at - INTERVAL 1 HOUR")).otherwise(F.col("at"))
    return rows.withColumn("at", at)


@pytest.fixture
def watched(clicks: Any) -> Stream:
    stream: Stream = with_late_clicks(clicks.stream()).withWatermark("at", "1 second")
    return stream


def test_every_click_is_either_counted_or_late_and_once_after_a_kill(
    clicks: Any,
    watched: Stream,
    job_options: dict[str, str],
    finish_with_a_kill: Any,
    tmp_path: Path,
) -> None:
    counts, late = (
        watched.groupBy(F.window("at", "1 second"), "app_id")
        .agg(F.sum("id").alias("ids"), F.count("user_id").alias("views"))
        .with_late()
    )
    assert late.columns == watched.columns
    query = watched.still.start(
        "late",
        counts.writeStream.option("path", str(tmp_path / "counts")),
        late.writeStream.option("path", str(tmp_path / "late")),
        **job_options,
    )
    finish_with_a_kill(query)

    counted, too_late = (pq.read_table(tmp_path / name) for name in ("counts", "late"))
    ids = too_late["id"].to_pylist()
    assert len(ids) > clicks.records / 20
    assert len(set(ids)) == len(ids)
    assert all(number % 10 == 0 for number in ids)
    assert too_late.schema.names == watched.columns
    assert sum(counted["views"].to_pylist()) + len(ids) == clicks.records
    assert sum(counted["ids"].to_pylist()) + sum(ids) == sum(range(clicks.records))
    assert query.summary.records_late == 0, "what is read is not dropped"


def test_clicks_that_are_dropped_are_counted(
    clicks: Any, watched: Stream, job_options: dict[str, str]
) -> None:
    seen: list[int] = []
    query = (
        watched.groupBy(F.window("at", "1 second"), "app_id")
        .agg(F.max("id"), F.count("user_id").alias("views"))
        .writeStream.queryName("dropped")
        .foreachBatch(lambda df, _: seen.extend(row.views for row in df.collect()))
        .options(**job_options)
        .start()
    )
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    late = query.summary.records_late
    assert late > clicks.records / 20
    assert sum(seen) + late == clicks.records
    assert sum(each["numRowsDroppedByWatermark"] for each in query.recentProgress) == late


def rows_of(frame: DataFrame) -> Counter[tuple[Any, ...]]:
    return Counter(map(tuple, frame.collect()))


@pytest.mark.parametrize("unaligned", ["false", "true"])
def test_every_epoch_is_the_whole_result_and_the_last_one_the_true_one_after_a_kill(
    clicks: Any,
    watched: Stream,
    job_options: dict[str, str],
    finish_with_a_kill: Any,
    unaligned: str,
) -> None:
    def counted(rows: Any) -> Any:
        per_app = rows.groupBy(F.window("at", "5 seconds", "1 second"), "app_id").count()
        return per_app.select("window.start", "app_id", F.col("count").alias("views"))

    epochs: dict[int, Counter[tuple[Any, ...]]] = {}
    query = (
        counted(watched)
        .writeStream.queryName("whole")
        .outputMode("complete")
        .foreachBatch(lambda df, epoch: epochs.update({epoch: rows_of(df)}))
        .options(**job_options, unalignedCheckpoints=unaligned)
        .start()
    )
    finish_with_a_kill(query)

    assert epochs[max(epochs)] == rows_of(counted(with_late_clicks(clicks.frame())))
    for table in epochs.values():
        keys = [row[:2] for row in table.elements()]
        assert len(keys) == len(set(keys)), "a window of an app is there once"
    assert list(totals(epochs)) == sorted(totals(epochs)), "and its counts only grow"
    assert query.summary.records_late == 0


def totals(epochs: dict[int, Counter[tuple[Any, ...]]]) -> Iterator[int]:
    for epoch in sorted(epochs):
        yield sum(row[2] for row in epochs[epoch].elements())


def test_the_memory_table_is_replaced_by_each_epoch(
    spark: SparkSession,
    clicks: Any,
    watched: Stream,
    job_options: dict[str, str],
    finish_with_a_kill: Any,
) -> None:
    def counted(rows: Any) -> Any:
        return rows.groupBy("app_id").count()

    query = (
        counted(watched)
        .filter("count % 2 >= 0")
        .writeStream.queryName("apps_in_memory")
        .outputMode("complete")
        .format("memory")
        .options(**job_options)
        .start()
    )
    finish_with_a_kill(query)

    assert query.summary.checkpoints_completed > 2
    expected = counted(with_late_clicks(clicks.frame()))
    assert rows_of(spark.table("apps_in_memory")) == rows_of(expected)
