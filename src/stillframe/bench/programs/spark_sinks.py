"""Spark's JDBC writer: page views from Parquet to a table of PostgreSQL or MySQL.

`DataFrame.write.jdbc` in mode append, from as many partitions as the job beside it has slots: rows
go as inserts in batches of 1,000, each partition in a transaction of its own. With the variant
`rewritten` the driver makes one statement of many rows of them, which neither does by itself.

JDBC's drivers are not in Spark's wheel: their jars are fetched by Maven and named in `jars`.
"""

from __future__ import annotations

import glob
import os
import time

STARTED_S = time.time()

import pyspark  # noqa: E402
import spark_session as ours  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402

_REWRITING = {
    "postgres_sink": "reWriteBatchedInserts=true",
    "mysql_sink": "rewriteBatchedStatements=true",
}
# Without encryption, MySQL's driver asks the server for the key that hides a password.
_ALWAYS = {"postgres_sink": "", "mysql_sink": "allowPublicKeyRetrieval=true"}
_DRIVERS = {"postgres_sink": "org.postgresql.Driver", "mysql_sink": "com.mysql.cj.jdbc.Driver"}


def address(params: ours.Params) -> str:
    workload = params["workload"]
    rewriting = _REWRITING[workload] if params["variant"] == "rewritten" else ""
    settings = "&".join(filter(None, (_ALWAYS[workload], rewriting)))
    return f"jdbc:{params['server']['url']}{'?' if settings else ''}{settings}"


def properties(params: ours.Params) -> dict[str, str]:
    server = params["server"]
    driver = _DRIVERS[params["workload"]]
    return {"user": server["user"], "password": server["password"], "driver": driver}


def write(frame: DataFrame, params: ours.Params) -> None:
    frame.write.jdbc(
        address(params), params["output"], mode="append", properties=properties(params)
    )


def number_there(spark: SparkSession, params: ours.Params) -> int:
    asked = f"(select count(*) as number from {params['output']}) counted"
    found = spark.read.jdbc(address(params), asked, properties=properties(params)).first()
    assert found is not None
    return int(found[0])


def main() -> None:
    params = ours.params_given()
    home = os.environ["STILLFRAME_BENCH_HOME"]
    jars = glob.glob(os.path.join(home, "spark-jdbc-jars", "*.jar"))
    if not jars:
        ours.refuse("JDBC's drivers are not in Spark's wheel, and their jars are not installed.")
    spark = ours.session(params, {"spark.jars": ",".join(jars)})
    startup_s = time.time() - STARTED_S
    files = sorted(glob.glob(os.path.join(params["input"], "*.parquet")))
    write(spark.read.parquet(files[0]), params)
    before = number_there(spark, params)
    rows = spark.read.parquet(params["input"]).coalesce(params["parallelism"])
    before_s, began_s = ours.cpu_seconds(), time.time()
    write(rows, params)
    seconds = time.time() - began_s
    cpu_s = ours.cpu_seconds_since(before_s)
    written = number_there(spark, params) - before
    if written != rows.count():
        raise SystemExit(f"{written} rows were written of {rows.count()}")
    ours.report(
        {
            "engine": "spark",
            "version": pyspark.__version__,
            "variant": params["variant"],
            "workload": params["workload"],
            "startup_s": startup_s,
            "records": written,
            "seconds": seconds,
            "records_per_second": written / seconds,
            "counted": written,
            "checkpoints": None,
            "latency_ms": None,
            "java": ours.java_version(spark),
            "cpu_seconds": cpu_s,
            "settings": {"partitions": params["parallelism"], "batchsize": 1000},
        }
    )
    spark.stop()


if __name__ == "__main__":
    main()
