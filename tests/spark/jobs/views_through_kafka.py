"""A job for spark-submit, for `kafka_jobs.kill_again_and_again`: the same as on plain processes."""

import sys
from pathlib import Path

from driven_jobs import OPTIONS, serve
from kafka_jobs import WINDOW_SECONDS
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import stillframe

home, servers, topic, out, counts, windows, parallelism = sys.argv[1:]
spark = SparkSession.builder.appName("views").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
still = stillframe.on(spark)
views = (
    still.readStream.format("kafka")
    .option("kafka.bootstrap.servers", servers)
    .option("subscribe", topic)
    .option("startingOffsets", "earliest")
    .option("valueFormat", "json")
    .option("discoveryInterval", "200 ms")
    .schema("app string, id long, at timestamp")
    .load()
    .uid("views")
)
counted = views.groupBy("app").count().uid("count")
over = (
    views.withWatermark("at", "0 seconds")
    .groupBy(F.window("at", f"{WINDOW_SECONDS} seconds"), "app")
    .count()
    .uid("windows")
)


def written(rows, to, mode="append"):
    writer = rows.writeStream.format("kafka").outputMode(mode).uid(f"write-{to}")
    return writer.option("kafka.bootstrap.servers", servers).option("topic", to)


query = still.start(
    "views",
    written(views.selectExpr("app AS key", "string(id) AS value"), out),
    written(counted.selectExpr("app AS key", "string(count) AS value"), counts, "update"),
    written(
        over.selectExpr(
            "concat(string(unix_seconds(window.start)), ' ', app) AS key", "string(count) AS value"
        ),
        windows,
    ),
    checkpointLocation=f"{home}/chk",
    parallelism=int(parallelism),
    **OPTIONS,
)
serve(query, Path(home))
spark.stop()
