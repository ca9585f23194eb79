"""Page views per app, the job of the README: `stillframe run examples/page_views.py`."""

from pyspark.sql import SparkSession

import stillframe

spark = SparkSession.builder.appName("page-views").getOrCreate()
still = stillframe.on(spark)  # the one new line

clicks = still.readStream.format("clicks").option("records", 1_000_000).load()
views = clicks.groupBy("app_id").count()

query = (
    views.writeStream.queryName("page-views")
    .outputMode("update")
    .format("parquet")
    .option("path", "views/")
    .option("checkpointLocation", "checkpoints/")
    .option("checkpointInterval", "1 second")
    .start()
)
query.awaitTermination()

spark.read.parquet("views/").groupBy("app_id").max("count").orderBy("app_id").show(5)
