"""Spark Structured Streaming: the queries of the benchmark 'language' on the same files. Where
they count different values exactly, which Spark refuses on streams, it has its sketch count them.

In update mode to the no-op sink, with `availableNow`: micro-batches one after the other, each with
its checkpoint. What Spark counted is read back from its state, and must be what its progress says
was read.
"""

from __future__ import annotations

import glob
import os
import time

STARTED_S = time.time()

import language  # noqa: E402
import spark_session as ours  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

FILES_PER_BATCH = 4
"""A quarter of them: smaller batches are slower, and so are checkpoints that come once in a long
time."""


def read_files(
    spark: SparkSession, params: ours.Params, name: str, path: str
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    reader = spark.readStream.option("maxFilesPerTrigger", FILES_PER_BATCH)
    counts = language.SPARK_S_QUERIES[params["workload"]](reader, path)
    query = ours.start(counts, checkpoint, bounded=True)
    query.awaitTermination()
    return ours.progress_of(query), checkpoint


def main() -> None:
    params = ours.params_given()
    if params["workload"] not in language.SPARK_S_QUERIES:
        ours.refuse(f"spark_language has no workload {params['workload']!r}")
    spark = ours.session(params)
    startup_s = time.time() - STARTED_S
    first, *_ = sorted(glob.glob(os.path.join(params["input"], "part-*")))
    one = os.path.join(params["directory"], "one")
    os.mkdir(one)
    os.symlink(first, os.path.join(one, os.path.basename(first)))
    for turn in range(ours.WARM_UP_BATCHES_MIN):
        read_files(spark, params, f"warm-up-{turn}", one)
    before_s = ours.cpu_seconds()
    done, checkpoint = read_files(spark, params, "measured", params["input"])
    measured = ours.Measured(done, checkpoint, ours.cpu_seconds_since(before_s))
    counted = ours.counted_in_state(spark, measured)
    counted //= language.COUNTED_EACH.get(params["workload"], 1)
    settings = ours.state_settings(params["backend"])
    ours.report_measured(spark, params, startup_s, measured, counted, settings)
    spark.stop()


if __name__ == "__main__":
    main()
