"""Spark Structured Streaming: page views counted by app or by user, in Spark SQL.

Variant "sql": `groupBy(key).count()` in update mode to the no-op sink, run by the default trigger
(the next micro-batch as soon as the last is done), checkpointed at every micro-batch.

source "generator" is `rate-micro-batch`; the key is made of the record number by `xxhash64`, the
pseudo-random function that Spark SQL has built in (splitmix64 would be a dozen expressions more).
source "parquet" is Spark's own streaming file source with `availableNow`.

What Spark counted is read back from the state it committed, through the `statestore` reader, and
must be what its progress says was read.
"""

from __future__ import annotations

import glob
import math
import os
import time
from typing import Any

STARTED_S = time.time()

import pyspark  # noqa: E402
import spark_session as ours  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from pyspark.sql.streaming.query import StreamingQuery  # noqa: E402

# Larger batches are faster, for a batch writes each key's count once however often it came, and
# wait longer for their checkpoint. With few keys nothing is gained beyond these.
ROWS_PER_BATCH_FEW_KEYS = 5_000_000
ROWS_PER_BATCH_MANY_KEYS = 10_000_000
WARM_UP_BATCHES_MIN = 2
MEASURED_BATCHES_MIN = 3

_INTEGER = "pmod(xxhash64(value), {keys})"
_COLUMNS = {"strings": "app_id", "integers": "user_id"}


def key_expression(workload: str, keys: int) -> str:
    """The key of record `value`; strings come from a table, which is cheaper than making them."""
    number = _INTEGER.format(keys=keys)
    if workload == "integers":
        return f"{number} as key"
    table = ", ".join(f"'app-{app}'" for app in range(keys))
    return f"array({table})[cast({number} as int)] as key"


def generated(spark: SparkSession, params: ours.Params, rows_per_batch: int) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch")
    source = source.option("rowsPerBatch", rows_per_batch)
    source = source.option("numPartitions", params["parallelism"])
    return source.load().selectExpr(key_expression(params["workload"], params["keys"]))


def read(spark: SparkSession, params: ours.Params, path: str, files_per_batch: int) -> DataFrame:
    source = spark.readStream.schema("app_id string, user_id long, url string")
    source = source.option("maxFilesPerTrigger", files_per_batch)
    return source.parquet(path).selectExpr(f"{_COLUMNS[params['workload']]} as key")


def start(keyed: DataFrame, checkpoint: str, bounded: bool) -> StreamingQuery:
    writer = keyed.groupBy("key").count().writeStream.format("noop").outputMode("update")
    writer = writer.option("checkpointLocation", checkpoint)
    if bounded:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def run_batches(
    spark: SparkSession, params: ours.Params, name: str, rows_per_batch: int, batches: int
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    query = start(generated(spark, params, rows_per_batch), checkpoint, bounded=False)
    return ours.await_batches(query, batches), checkpoint


def run_files(
    spark: SparkSession, params: ours.Params, name: str, path: str, files_per_batch: int
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    query = start(read(spark, params, path, files_per_batch), checkpoint, bounded=True)
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
    """The warm-up reads one file through a directory of its own, the measured job all of them."""
    files = sorted(glob.glob(os.path.join(params["input"], "*.parquet")))
    a_batch = max(1, round(rows * len(files) / params["input_records"]))
    one = os.path.join(params["directory"], "one")
    os.mkdir(one)
    os.symlink(files[0], os.path.join(one, os.path.basename(files[0])))
    for turn in range(WARM_UP_BATCHES_MIN):
        run_files(spark, params, f"warm-up-{turn}", one, a_batch)
    cpu_s = ours.cpu_seconds()
    done, checkpoint = run_files(spark, params, "measured", params["input"], a_batch)
    return done, checkpoint, cpu_s


def result_of(
    spark: SparkSession, params: ours.Params, done: list[ours.Progress], checkpoint: str
) -> dict[str, Any]:
    records = ours.rows_of(done)
    counted = ours.counted_in_state(spark, checkpoint, done[-1]["batchId"], "value.count")
    if counted != records:
        raise RuntimeError(f"Spark counted {counted} of the {records} records that it read.")
    seconds = ours.seconds_of(done)
    return {
        "engine": "spark",
        "version": pyspark.__version__,
        "variant": "sql",
        "workload": params["workload"],
        "records": records,
        "seconds": seconds,
        "records_per_second": records / seconds,
        "counted": counted,
        "checkpoints": ours.checkpoints_of(done, params["parallelism"]),
        "latency_ms": None,
        "java": ours.java_version(spark),
    }


def main() -> None:
    params = ours.params_given()
    if params["workload"] not in _COLUMNS or params["variant"] not in ("", "sql"):
        ours.refuse("This program counts strings or integers in the variant sql only.")
    if params["checkpoint_interval_ms"] is None:
        ours.refuse("Spark Structured Streaming checkpoints every micro-batch; it cannot be off.")
    spark = ours.session(params)
    startup_s = time.time() - STARTED_S
    few = params["keys"] <= 10_000
    rows = params.get("rows_per_batch") or (
        ROWS_PER_BATCH_FEW_KEYS if few else ROWS_PER_BATCH_MANY_KEYS
    )
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
        **ours.state_settings(params["backend"]),
    }
    ours.report(result)
    spark.stop()


if __name__ == "__main__":
    main()
