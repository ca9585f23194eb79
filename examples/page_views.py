"""Page views per app and ten seconds, the job of the README: it runs until somebody stops it."""

from pyspark.sql import SparkSession
from pyspark.sql.functions import window

import stillframe

spark = SparkSession.builder.appName("page-views").getOrCreate()
still = stillframe.on(spark)  # the only new line

clicks = still.readStream.format("clicks").option("recordsPerSecond", 1000).load()
views = (
    clicks.withWatermark("at", "1 second")
    .groupBy(window("at", "10 seconds"), "app_id")
    .count()
    .select("window.start", "app_id", "count")
)

query = (
    views.writeStream.queryName("page-views")
    .outputMode("append")
    .format("parquet")
    .option("path", "views/")
    .option("checkpointLocation", "checkpoints/")
    .option("checkpointInterval", "1 second")
    .start()
)
query.awaitTermination()
