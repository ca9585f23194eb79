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
import os
import time

STARTED_S = time.time()

import spark_session as ours  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402

# Larger batches are faster, for a batch writes each key's count once however often it came, and
# wait longer for their checkpoint. With few keys nothing is gained beyond these.
ROWS_PER_BATCH_FEW_KEYS = 5_000_000
ROWS_PER_BATCH_MANY_KEYS = 10_000_000

_INTEGER = "pmod(xxhash64(value), {keys})"
_COLUMNS = {"strings": "app_id", "integers": "user_id"}


def key_expression(workload: str, keys: int) -> str:
    """The key of record `value`; strings come from a table, which is cheaper than making them."""
    number = _INTEGER.format(keys=keys)
    if workload == "integers":
        return f"{number} as key"
    table = ", ".join(f"'app-{app}'" for app in range(keys))
    return f"array({table})[cast({number} as int)] as key"


def counted_by(keyed: DataFrame) -> DataFrame:
    return keyed.groupBy("key").count()


def measure_generated(spark: SparkSession, params: ours.Params, rows: int) -> ours.Measured:
    key = key_expression(params["workload"], params["keys"])
    views = ours.rate_batches(spark, params, rows).selectExpr(key)
    return ours.measure_generated(params, rows, counted_by(views))


def measure_files(spark: SparkSession, params: ours.Params, rows: int) -> ours.Measured:
    """The warm-up reads one file through a directory of its own, the measured job all of them."""
    files = sorted(glob.glob(os.path.join(params["input"], "*.parquet")))
    a_batch = max(1, round(rows * len(files) / params["input_records"]))
    one = os.path.join(params["directory"], "one")
    os.mkdir(one)
    os.symlink(files[0], os.path.join(one, os.path.basename(files[0])))
    for turn in range(ours.WARM_UP_BATCHES_MIN):
        read_files(spark, params, f"warm-up-{turn}", one, a_batch)
    before_s = ours.cpu_seconds()
    done, checkpoint = read_files(spark, params, "measured", params["input"], a_batch)
    return ours.Measured(done, checkpoint, ours.cpu_seconds_since(before_s))


def read_files(
    spark: SparkSession, params: ours.Params, name: str, path: str, files_per_batch: int
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    source = spark.readStream.schema("app_id string, user_id long, url string")
    source = source.option("maxFilesPerTrigger", files_per_batch)
    views = source.parquet(path).selectExpr(f"{_COLUMNS[params['workload']]} as key")
    query = ours.start(counted_by(views), checkpoint, bounded=True)
    query.awaitTermination()
    return ours.progress_of(query), checkpoint


def main() -> None:
    params = ours.params_given()
    if params["workload"] not in _COLUMNS or params["variant"] not in ("", "sql"):
        ours.refuse("This program counts strings or integers in the variant sql only.")
    ours.refuse_without_checkpoints(params)
    spark = ours.session(params)
    startup_s = time.time() - STARTED_S
    few = params["keys"] <= 10_000
    rows = ROWS_PER_BATCH_FEW_KEYS if few else ROWS_PER_BATCH_MANY_KEYS
    measure = measure_files if params["source"] == "parquet" else measure_generated
    measured = measure(spark, params, rows)
    counted = ours.counted_in_state(spark, measured)
    settings = ours.state_settings(params["backend"])
    ours.report_measured(spark, params, startup_s, measured, counted, settings)
    spark.stop()


if __name__ == "__main__":
    main()
