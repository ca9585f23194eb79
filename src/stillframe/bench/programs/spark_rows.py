"""Spark Structured Streaming: a user's Python function per row, and one with state per key.

url -> site by a Python UDF, then `groupBy("site")` and a `StatefulProcessor` with one value state
that emits (site, count) for every row. Variant "pandas" is `transformWithStateInPandas`, variant
"rows" is `transformWithState`.

Spark hands all the rows a key has in a micro-batch to one call. The processor therefore reads the
state once and writes it once a call, as the guide's examples do (a read or a write is a round trip
over a socket to the JVM: one of each per row would be many times slower), and counts row by row.
"""

from __future__ import annotations

import glob
import math
import os
import time
from collections.abc import Iterator
from typing import Any

STARTED_S = time.time()

import pandas as pd  # noqa: E402
import pyspark  # noqa: E402
import spark_session as ours  # noqa: E402
from pyspark.sql import DataFrame, Row, SparkSession  # noqa: E402
from pyspark.sql.functions import udf  # noqa: E402
from pyspark.sql.streaming.query import StreamingQuery  # noqa: E402
from pyspark.sql.streaming.stateful_processor import (  # noqa: E402
    StatefulProcessor,
    StatefulProcessorHandle,
)

ROWS_PER_BATCH = {"pandas": 2_000_000, "rows": 1_000_000}
ARROW_RECORDS_PER_BATCH = 100_000
WARM_UP_BATCHES_MIN = 2
MEASURED_BATCHES_MIN = 3

_OUTPUT = "site string, count long"
_URL = (
    "concat('https://app-', pmod(xxhash64(value), 1000), '.example.org/p/', value % 1000,"
    " '?u=', pmod(xxhash64(value, 1), 1000000)) as url"
)


def site_of(url: str) -> str:
    return url.split("/")[2]


class CountPandas(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        before = self._count.get()
        count = before[0] if before is not None else 0
        for frame in rows:
            counts = []
            for _site in frame["site"]:
                count += 1
                counts.append(count)
            yield pd.DataFrame({"site": frame["site"], "count": counts})
        self._count.update((count,))

    def close(self) -> None:
        pass


class CountRows(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self._count.get()
        count = before[0] if before is not None else 0
        site = key[0]
        for _row in rows:
            count += 1
            yield Row(site=site, count=count)
        self._count.update((count,))

    def close(self) -> None:
        pass


def counted(urls: DataFrame, variant: str, arrow: bool) -> DataFrame:
    sites = urls.select(udf(site_of, "string", useArrow=arrow)("url").alias("site"))
    grouped = sites.groupBy("site")
    if variant == "rows":
        return grouped.transformWithState(CountRows(), _OUTPUT, "Update", "None")
    return grouped.transformWithStateInPandas(CountPandas(), _OUTPUT, "Update", "None")


def start(urls: DataFrame, params: ours.Params, checkpoint: str, bounded: bool) -> StreamingQuery:
    rows = counted(urls, params["variant"], params.get("arrow_udf", True))
    writer = rows.writeStream.format("noop").outputMode("update")
    writer = writer.option("checkpointLocation", checkpoint)
    if bounded:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def run_batches(
    spark: SparkSession, params: ours.Params, name: str, rows_per_batch: int, batches: int
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    source = spark.readStream.format("rate-micro-batch")
    source = source.option("rowsPerBatch", rows_per_batch)
    source = source.option("numPartitions", params["parallelism"])
    query = start(source.load().selectExpr(_URL), params, checkpoint, bounded=False)
    return ours.await_batches(query, batches), checkpoint


def run_files(
    spark: SparkSession, params: ours.Params, name: str, path: str, files_per_batch: int
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    source = spark.readStream.schema("app_id string, user_id long, url string")
    source = source.option("maxFilesPerTrigger", files_per_batch)
    query = start(source.parquet(path).select("url"), params, checkpoint, bounded=True)
    query.awaitTermination()
    return ours.progress_of(query), checkpoint


def measure_generated(
    spark: SparkSession, params: ours.Params, rows: int
) -> tuple[list[ours.Progress], str, float | None]:
    """The warm-up, and then as many batches as fill the time at the warm-up's last speed."""
    batches = max(WARM_UP_BATCHES_MIN, math.ceil(params["warmup_records"] / rows))
    warm, _ = run_batches(spark, params, "warm-up", rows, batches)
    batch_s = ours.seconds_of(warm[-1:])
    batches = max(MEASURED_BATCHES_MIN, math.ceil(params["seconds"] / batch_s))
    cpu_s = ours.cpu_seconds()
    done, checkpoint = run_batches(spark, params, "measured", rows, batches)
    return done, checkpoint, cpu_s


def measure_files(
    spark: SparkSession, params: ours.Params, rows: int
) -> tuple[list[ours.Progress], str, float | None]:
    """The warm-up is generated (the Python workers are what is slow to start), then all files."""
    run_batches(spark, params, "warm-up", rows // 4, WARM_UP_BATCHES_MIN)
    files = glob.glob(os.path.join(params["input"], "*.parquet"))
    a_batch = max(1, round(rows * len(files) / params["input_records"]))
    cpu_s = ours.cpu_seconds()
    done, checkpoint = run_files(spark, params, "measured", params["input"], a_batch)
    return done, checkpoint, cpu_s


def counted_in_state(spark: SparkSession, checkpoint: str, batch: int) -> int:
    reader = spark.read.format("statestore").option("batchId", batch)
    state = reader.option("stateVarName", "count").load(checkpoint)
    total = state.selectExpr("sum(value.count)").first()
    assert total is not None
    return int(total[0])


def result_of(
    spark: SparkSession, params: ours.Params, done: list[ours.Progress], checkpoint: str
) -> dict[str, Any]:
    records = ours.rows_of(done)
    in_state = counted_in_state(spark, checkpoint, done[-1]["batchId"])
    if in_state != records:
        raise RuntimeError(f"Spark counted {in_state} of the {records} records that it read.")
    seconds = ours.seconds_of(done)
    return {
        "engine": "spark",
        "version": pyspark.__version__,
        "variant": params["variant"],
        "workload": "rows",
        "records": records,
        "seconds": seconds,
        "records_per_second": records / seconds,
        "counted": in_state,
        "checkpoints": ours.checkpoints_of(done, params["parallelism"]),
        "latency_ms": None,
        "java": ours.java_version(spark),
    }


def main() -> None:
    params = ours.params_given()
    if params["workload"] != "rows" or params["variant"] not in ROWS_PER_BATCH:
        ours.refuse("This program does rows in the variants pandas and rows only.")
    if params["checkpoint_interval_ms"] is None:
        ours.refuse("Spark Structured Streaming checkpoints every micro-batch; it cannot be off.")
    params["backend"] = "rocksdb"  # The only one that transformWithState runs on.
    arrow_records = params.get("arrow_records") or ARROW_RECORDS_PER_BATCH
    tuned = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(arrow_records)}
    tuned.update(params.get("more", {}))
    spark = ours.session(params, tuned)
    startup_s = time.time() - STARTED_S
    rows = params.get("rows_per_batch") or ROWS_PER_BATCH[params["variant"]]
    measure = measure_files if params["source"] == "parquet" else measure_generated
    done, checkpoint, cpu_before_s = measure(spark, params, rows)
    cpu_after_s = ours.cpu_seconds()
    result = result_of(spark, params, done, checkpoint)
    result["startup_s"] = startup_s
    result["batch_seconds_p50"] = ours.batch_seconds_p50(done)
    if cpu_before_s is not None and cpu_after_s is not None:
        result["cpu_seconds"] = cpu_after_s - cpu_before_s
    result["settings"] = {
        "rows per batch": done[0]["numInputRows"],
        "shuffle partitions": params["parallelism"],
        **tuned,
        **ours.state_settings("rocksdb"),
    }
    ours.report(result)
    spark.stop()


if __name__ == "__main__":
    main()
