"""A job for spark-submit whose machines share nothing but a bucket: clicks in JSON out of it, the
clicks as Parquet into it, and page views per app through foreachBatch. Prints one JSON line per
event and the verdict last.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from obstore.store import S3Store
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession
from telling import say, tell_of

import stillframe

FILES, ROWS, APPS = 60, 2_000, 50


def slowly(batches):
    """Holds the stream back, so that there is time to kill something."""
    for batch in batches:
        time.sleep(0.15)
        yield batch


def looked_around(tasks):
    """Of the files that the tasks make, one each, how many this one sees; and whether it may write
    where the driver does."""
    context = BarrierTaskContext.get()
    home = tempfile.gettempdir()
    with open(os.path.join(home, f"task-{context.partitionId()}"), "w"):
        pass
    context.barrier()
    yield len([name for name in os.listdir(home) if name.startswith("task-")]), writes_to(shared)


def writes_to(directory):
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


bucket, endpoint, shared = sys.argv[1:]
store = S3Store(
    bucket,
    config={
        "endpoint": endpoint,
        "access_key_id": "an-access-key",
        "secret_access_key": "a-secret",
        "region": "us-east-1",
    },
    client_options={"allow_http": True},
)
for number in range(FILES):
    rows = (
        json.dumps({"id": id, "app_id": f"app-{id % APPS}"})
        for id in range(number * ROWS, (number + 1) * ROWS)
    )
    obstore.put(store, f"in/{number}.json", "\n".join(rows).encode())

spark = (
    SparkSession.builder.appName("page views")
    .config("spark.hadoop.fs.s3a.endpoint", endpoint)
    .config("spark.hadoop.fs.s3a.access.key", "an-access-key")
    .config("spark.hadoop.fs.s3a.secret.key", "a-secret")
    .config("spark.hadoop.fs.s3a.endpoint.region", "us-east-1")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
say(kind="SessionStarted")
still = stillframe.on(spark)

schema = "id long, app_id string"
clicks = still.readStream.schema(schema).json(f"s3://{bucket}/in").mapInArrow(slowly, schema)
views = clicks.groupBy("app_id").count()
counts = {}


def keep(frame, epoch):
    counts.update({row["app_id"]: row["count"] for row in frame.collect()})


query = still.start(
    "page-views",
    clicks.writeStream.format("parquet").option("path", f"s3://{bucket}/out").uid("clicks"),
    views.writeStream.foreachBatch(keep)
    .uid("views")
    .outputMode("update")
    .trigger(availableNow=True),
    checkpointLocation=f"s3://{bucket}/checkpoints",
    checkpointInterval="1 second",
)
tell_of(query)
query.awaitTermination()

names = [each["path"] for batch in obstore.list(store, "out") for each in batch]
shown = [name for name in names if "/_" not in name]
ids = Counter()
for name in shown:
    file = pa.BufferReader(obstore.get(store, name).bytes().to_bytes())
    ids.update(pq.read_table(file)["id"].to_pylist())
around = spark.sparkContext.parallelize(range(4), 4).barrier().mapPartitions(looked_around)
seen = around.collect()
say(
    kind="Verdict",
    restarts=query.summary.restarts,
    is_exact=ids == Counter(range(FILES * ROWS)),
    counts_are_exact=counts == {f"app-{app}": FILES * ROWS // APPS for app in range(APPS)},
    left=[name for name in names if "/_stillframe/staging" in name],
    files_seen=[files for files, _ in seen],
    writes_to_the_driver_s=any(writes for _, writes in seen),
)
spark.stop()
