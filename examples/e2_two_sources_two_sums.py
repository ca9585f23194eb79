"""Two sources count 1, 2, 3, … each; one task sums the even numbers of both, one the odd ones.

    source 0 ──┬──▶ sum of even ──▶ sink 0
               ╳
    source 1 ──┴──▶ sum of odd  ──▶ sink 1

Both sources feed both sums, so the barriers of a checkpoint cross in the middle: each sum gets two
of them, at different moments, and holds the channel of the first until the second has come. Only
then are "what source 0 had sent" and "what source 1 had sent" the same point in both sums.

Streams cannot be united yet, so the two sources are the two partitions of one: with parallelism 2
that makes two source subtasks, two sum subtasks (the key "even" belongs to the first, "odd" to the
second) and a sink subtask behind each. Kill one of the Python workers while it runs:

    stillframe run examples/e2_two_sources_two_sums.py -- e2

It runs as well with `python` and with `spark-submit`. Arguments: a directory, and how many numbers
each source has.
"""

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, when
from pyspark.sql.functions import sum as total

import stillframe


def start(spark, directory, numbers_each=500_000, numbers_per_second=50_000, **options):
    """Start the job; `options` are further options of the job."""
    still = stillframe.on(spark)
    rate = (
        still.readStream.format("rate")
        .option("numPartitions", 2)
        .option("rows", 2 * int(numbers_each))
        .option("rowsPerSecond", 2 * numbers_per_second)
        .load()
    )
    # Partition 0 has the values 0, 2, 4, … and partition 1 the values 1, 3, 5, …: half of each,
    # plus one, is 1, 2, 3, … in both.
    numbers = rate.selectExpr("value % 2 AS source", "value div 2 + 1 AS number")
    parity = when(col("number") % 2 == 0, "even").otherwise("odd")
    sums = (
        numbers.withColumn("parity", parity)
        .groupBy("parity")
        .agg(total("number").alias("sum"))
        .uid("sums")
    )
    return (
        sums.writeStream.queryName("two-sources-two-sums")
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
    directory = sys.argv[1] if len(sys.argv) > 1 else "e2"
    numbers_each = sys.argv[2] if len(sys.argv) > 2 else 500_000
    session = SparkSession.builder.appName("two-sources-two-sums").getOrCreate()
    start(session, directory, numbers_each).awaitTermination()
    print(final_sums(session, directory))
