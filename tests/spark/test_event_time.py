"""Windows on real local Spark with a `kill -9` in the middle, compared with Spark's own results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Rows = Counter[tuple[Any, ...]]


def flat(row: dict[str, Any]) -> tuple[Any, ...]:
    window = row.pop("window")
    moments = (window["start"].timestamp(), window["end"].timestamp())
    return (*moments, *(row[name] for name in sorted(row)))


def truth(frame: DataFrame) -> Rows:
    return Counter(flat(row.asDict(recursive=True)) for row in frame.collect())


@pytest.mark.parametrize("slide", ["2 seconds", "500 milliseconds"])
def test_every_window_comes_out_once_and_whole_after_a_kill(
    clicks: Any, run_and_kill: Any, slide: str
) -> None:
    def counted(rows: Any) -> Any:
        return rows.groupBy(F.window("at", "2 seconds", slide), "app_id").agg(
            F.count("*").alias("views"), F.max("id").alias("last")
        )

    stream = counted(clicks.stream().withWatermark("at", "1 second"))
    rows = run_and_kill(stream.writeStream.outputMode("append").format("parquet"))

    assert Counter(map(flat, rows)) == truth(counted(clicks.frame()))


def test_windows_behind_a_union_and_a_row_function_go_by_the_watermark_after_it(
    clicks: Any, run_and_kill: Any
) -> None:
    def counted(rows: Any, time: str) -> Any:
        return rows.groupBy(F.window(time, "2 seconds"), "app_id").agg(F.count("*").alias("views"))

    marked = clicks.stream().withWatermark("at", "1 second")
    halves = [marked.filter(f"id % 2 = {each}").select("at", "app_id") for each in (0, 1)]
    renamed = (
        halves[0]
        .union(halves[1])
        .map_rows(lambda row: (row.at, row.app_id), "moment timestamp, app_id string")
    )
    stream = counted(renamed.withWatermark("moment", "1 second"), "moment")
    rows = run_and_kill(stream.writeStream.outputMode("append").format("parquet"))

    assert Counter(map(flat, rows)) == truth(counted(clicks.frame(), "at"))


@pytest.mark.parametrize("slide", ["2 seconds", "500 milliseconds"])
def test_updates_of_windows_end_with_the_true_values_after_a_kill(
    clicks: Any, run_and_kill: Any, slide: str
) -> None:
    def counted(rows: Any) -> Any:
        return rows.groupBy(F.window("at", "2 seconds", slide), "app_id").count()

    stream = counted(clicks.stream().withWatermark("at", "1 second"))
    rows = run_and_kill(stream.writeStream.outputMode("update").format("parquet"))
    last: dict[tuple[Any, ...], int] = {}
    for row in rows:
        start, end, app, count = flat(row)
        last[start, end, app] = max(count, last.get((start, end, app), 0))

    found = Counter((*key[:2], key[2], count) for key, count in last.items())
    assert found == truth(counted(clicks.frame()))


@pytest.mark.parametrize("kind", ["window", "session_window"])
def test_windows_over_times_without_a_zone_are_those_of_spark(
    clicks: Any, job_options: dict[str, str], kind: str
) -> None:
    def counted(rows: Any) -> Any:
        made = {
            "window": F.window("local", "2 seconds", "500 milliseconds"),
            "session_window": F.session_window("local", "10 milliseconds"),
        }[kind]
        local = rows.selectExpr("id", "app_id", "CAST(at AS timestamp_ntz) AS local")
        return local.groupBy(made.alias("window"), "app_id").agg(
            F.count("*").alias("views"), F.max("local").alias("newest")
        )

    stream, frame = counted(clicks.stream()), counted(clicks.frame())
    assert stream.schema.simpleString() == frame.schema.simpleString()
    writer = stream.writeStream.queryName(f"wall_{kind}").outputMode("complete").format("memory")
    assert writer.options(**job_options).start().awaitTermination(120)

    assert truth(clicks.still.spark.table(f"wall_{kind}")) == truth(frame)
