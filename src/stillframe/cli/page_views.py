"""Page views: every click passes through to files, and is counted by app on its way."""

import sys

from pyspark.sql import SparkSession

import stillframe

output, records, records_per_second, partitions, seed = sys.argv[1:]

spark = SparkSession.builder.appName("page-views").getOrCreate()
still = stillframe.on(spark)

clicks = (
    still.readStream.format("clicks")
    .option("records", records)
    .option("recordsPerSecond", records_per_second)
    .option("partitions", partitions)
    .option("seed", seed)
    .load()
)
views = clicks.groupBy("app_id").count()

query = still.start(
    "page-views",
    clicks.writeStream.format("parquet").option("path", f"{output}/clicks"),
    views.writeStream.format("parquet").option("path", f"{output}/counts").outputMode("update"),
    checkpointLocation=f"{output}/checkpoints",
    checkpointInterval="1 second",
)
query.awaitTermination()
