"""A job for spark-submit: a DataFrame of clicks in, page views per app and the clicks themselves
out to two Spark tables, through foreachBatch. Prints one JSON line per event and the verdict last.
"""

import sys
import time

import pyspark.sql.functions as F
from pyspark.sql import SparkSession
from telling import say, tell_of

import stillframe

RECORDS, APPS = 600_000, 50


def slowly(batches):
    """Holds the stream back, so that there is time to kill something."""
    for batch in batches:
        time.sleep(0.12)
        yield batch


checkpoint_location = sys.argv[1]
spark = SparkSession.builder.appName("page views").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
say(kind="SessionStarted")
still = stillframe.on(spark)

source = spark.range(0, RECORDS, 1, 2).select(
    "id", F.concat(F.lit("app-"), (F.col("id") % APPS).cast("string")).alias("app_id")
)
clicks = still.stream(source).mapInArrow(slowly, source.schema)
views = clicks.groupBy("app_id").count()


def to_table(name):
    def write(frame, epoch):
        frame.withColumn("epoch", F.lit(epoch)).write.mode("append").saveAsTable(name)

    return write


query = still.start(
    "page-views",
    clicks.writeStream.foreachBatch(to_table("clicks")).uid("clicks"),
    views.writeStream.foreachBatch(to_table("views")).uid("views").outputMode("update"),
    checkpointLocation=checkpoint_location,
    checkpointInterval="1 second",
)
tell_of(query)
query.awaitTermination()

table = spark.table("clicks")
expected = source.groupBy("app_id").count()
final = spark.table("views").groupBy("app_id").agg(F.max("count").alias("count"))
say(
    kind="Verdict",
    restarts=query.summary.restarts,
    attempts=query.attempts,
    rows=table.count(),
    lost=source.exceptAll(table.select("id", "app_id")).count(),
    doubled=table.select("id", "app_id").exceptAll(source).count(),
    wrong_counts=expected.exceptAll(final).count() + final.exceptAll(expected).count(),
)
spark.stop()
