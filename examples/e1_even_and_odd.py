"""The numbers 1, 2, 3, … split into even and odd ones, and summed.

A checkpoint is a photograph of the whole job: how far the source has read, and what the sums were
at exactly that point. With the first five numbers read, the sums are 2 + 4 = 6 and 1 + 3 + 5 = 9;
the job ends there, and its last checkpoint holds position 5 together with 6 and 9. See it with

    stillframe run examples/e1_even_and_odd.py -- e1
    stillframe inspect e1/checkpoints/even-and-odd --rows 2

It runs as well with `python` and with `spark-submit`. Arguments: a directory, and how many numbers.
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, when
from pyspark.sql.functions import sum as total

import stillframe


def start(spark, directory, rows=5, rows_per_second=5, **options):
    """Start the job; `options` are further options of the job."""
    still = stillframe.on(spark)
    numbers = (
        still.readStream.format("rate")
        .option("start", 1)
        .option("rows", rows)
        .option("rowsPerSecond", rows_per_second)
        .load()
        .parallelism(1)
    )
    parity = when(col("value") % 2 == 0, "even").otherwise("odd")
    sums = (
        numbers.withColumn("parity", parity)
        .groupBy("parity")
        .agg(total("value").alias("sum"))
        .uid("sums")
    )
    return (
        sums.writeStream.queryName("even-and-odd")
        .outputMode("update")
        .option("path", f"{directory}/sums")
        .option("checkpointLocation", f"{directory}/checkpoints")
        .option("checkpointInterval", "1 second")
        .option("parallelism", 2)
        .options(**options)
        .start()
    )


def final_sums(spark, directory):
    """The last value of each sum: every value is one row, and sums of positive numbers grow."""
    written = spark.read.parquet(f"{directory}/sums")
    rows = written.groupBy("parity").max("sum").collect()
    return dict(rows)


if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else "e1"
    rows = sys.argv[2] if len(sys.argv) > 2 else 5
    session = SparkSession.builder.appName("even-and-odd").getOrCreate()
    start(session, directory, rows).awaitTermination()
    print(final_sums(session, directory))
