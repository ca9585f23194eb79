"""Clicks to a Delta table by Spark's own writer, in `foreachBatch`: python FILE JARS HOME RECORDS.

The first driver dies when the writer is done with an epoch and before it has said so; the second
fails there once more.
"""

import json
import os
import signal
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import stillframe

jars, home, records = sys.argv[1:]
place = f"{home}/table"
settings = {
    "spark.jars": ",".join(map(str, Path(jars).glob("*.jar"))),
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
}
spark = SparkSession.builder.master("local[4]").config(map=settings).getOrCreate()
written = []


@stillframe.exactly_once
def write(rows, epoch, mark):
    rows.write.format("delta").mode("append").options(**mark.delta_options).save(place)
    written.append(epoch)
    if len(written) == 2 and not os.path.exists(f"{home}/died"):
        Path(home, "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if not os.path.exists(f"{home}/failed") and os.path.exists(f"{home}/died"):
        Path(home, "failed").touch()
        raise ConnectionError("it died before it said that it was done")


still = stillframe.on(spark)
clicks = still.readStream.format("clicks").options(records=records, recordsPerSecond=2_000).load()
query = (
    clicks.writeStream.queryName("clicks")
    .foreachBatch(write)
    .options(checkpointLocation=f"{home}/chk", checkpointInterval="500 ms")
    .options(restartAttempts=10, restartDelay="20 ms", requireGuarantee="exactly-once")
    .start()
)
query.awaitTermination()
found = spark.read.format("delta").load(place)
told = {
    "guarantee": query.guarantee().word,
    "epochs": written,
    "rows": found.count(),
    "different": found.select("id").distinct().count(),
    "left": sorted(each.name for each in Path(home, "chk").rglob("staged/**/*") if each.is_file()),
}
Path(home, "told").write_text(json.dumps(told))
spark.stop()
