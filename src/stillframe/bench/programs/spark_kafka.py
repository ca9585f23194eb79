"""Spark Structured Streaming: page views from Kafka counted by app, in Spark SQL.

`from_json` of five fields, `groupBy(app_id).count()` in update mode to the no-op sink, with
`availableNow`: micro-batches one after the other, each with its checkpoint.

Spark's Kafka source is not in its wheel: its jars are fetched by Maven and named in `jars`. What
Spark counted is read back from its state, and must be what its progress says was read.
"""

from __future__ import annotations

import glob
import os
import time

STARTED_S = time.time()

import spark_session as ours  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

ROWS_PER_BATCH = 1_000_000
"""About what it reads in a few seconds: smaller batches are slower, and so are checkpoints that
come once in a long time."""

_FIELDS = "app_id string, user_id long, url string, at long, referrer string"


def read_topic(
    spark: SparkSession, params: ours.Params, name: str, topic: str
) -> tuple[list[ours.Progress], str]:
    checkpoint = os.path.join(params["directory"], name)
    source = spark.readStream.format("kafka").option("subscribe", topic)
    source = source.option("kafka.bootstrap.servers", params["brokers"])
    source = source.option("startingOffsets", "earliest")
    source = source.option("maxOffsetsPerTrigger", ROWS_PER_BATCH)
    views = source.load().selectExpr(f"from_json(cast(value AS string), '{_FIELDS}') AS view")
    counts = views.selectExpr("view.app_id AS key").groupBy("key").count()
    query = ours.start(counts, checkpoint, bounded=True)
    query.awaitTermination()
    return ours.progress_of(query), checkpoint


def main() -> None:
    params = ours.params_given()
    home = os.environ["STILLFRAME_BENCH_HOME"]
    jars = glob.glob(os.path.join(home, "spark-kafka-jars", "*.jar"))
    if not jars:
        ours.refuse("Spark's wheel has no Kafka source, and its jars are not installed.")
    spark = ours.session(params, {"spark.jars": ",".join(jars)})
    startup_s = time.time() - STARTED_S
    read_topic(spark, params, "warm-up", params["warmup_input"])
    before_s = ours.cpu_seconds()
    done, checkpoint = read_topic(spark, params, "measured", params["input"])
    measured = ours.Measured(done, checkpoint, ours.cpu_seconds_since(before_s))
    counted = ours.counted_in_state(spark, measured)
    settings = ours.state_settings(params["backend"])
    ours.report_measured(spark, params, startup_s, measured, counted, settings)
    spark.stop()


if __name__ == "__main__":
    main()
