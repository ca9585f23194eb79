"""Page views with two sinks beside each other: the job of `stillframe playground`.

An ordinary job file. Clicks are checked, shown by our sink and by a naive one, and counted by app.
"""

import json
import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

import stillframe
from stillframe.connectors.file_sink import FileSink
from stillframe.playground.naive import NaiveSink
from stillframe.playground.truth import click_source
from stillframe.testing.faults import FaultySink, FaultySource

given = json.loads(sys.argv[1])
out, faults = given["output"], given["faults"]
still = stillframe.on(SparkSession.builder.appName("playground").getOrCreate())


def checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        known = pc.starts_with(batch["app_id"], "app-")
        if not pc.all(known).as_py():
            strange = batch.filter(pc.invert(known)).to_pylist()[0]
            raise ValueError(f"click {strange['id']} is on {strange['app_id']!r}, which is no app")
        yield batch


clicks = (
    still.readStream.format(FaultySource(click_source(given["seed"]), faults))
    .load()
    .uid("clicks")
    .select("id", "app_id")
    .mapInArrow(checked, "id long, app_id string")
)
counts = clicks.groupBy("app_id").count().uid("count")
shown = FileSink(f"{out}/clicks", "parquet", clicks.node.schema)
writers = [
    clicks.writeStream.format(FaultySink(shown, faults)).uid("show"),
    clicks.writeStream.format(NaiveSink(f"{out}/naive")).uid("naive"),
    counts.writeStream.format("parquet").option("path", f"{out}/counts").outputMode("update")
    .uid("write-counts"),
]  # fmt: skip
if given["version"] == 2:
    newest = clicks.groupBy("app_id").agg(fn.max("id").alias("newest")).uid("newest")
    writers.append(newest.writeStream.format("noop").outputMode("update").uid("drop-newest"))

still.start("page-views", *writers, **given["options"])
