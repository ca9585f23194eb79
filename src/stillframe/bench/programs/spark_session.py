"""What the Spark programs have in common: the tuned session, the reading of progress, the result.

It is imported from the directory of the programs (`python spark_rows.py` puts that directory first
on the path) and needs nothing but PySpark.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, NoReturn

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

_STATE = "spark.sql.streaming.stateStore"
_PROVIDERS = "org.apache.spark.sql.execution.streaming.state"

WARM_UP_BATCHES_MIN = 2
MEASURED_BATCHES_MIN = 3

Params = dict[str, Any]
Progress = dict[str, Any]


def params_given() -> Params:
    params: Params = json.loads(sys.argv[1])
    return params


def refuse(sentence: str) -> NoReturn:
    """End as the harness expects of a combination that cannot be done."""
    print(sentence, file=sys.stderr)
    sys.exit(3)


def refuse_without_checkpoints(params: Params) -> None:
    if params["checkpoint_interval_ms"] is None:
        refuse("Spark Structured Streaming checkpoints every micro-batch; it cannot be off.")


def state_settings(backend: str) -> dict[str, str]:
    """The state store, tuned as the page 'State store' of Spark's guide advises."""
    if backend == "heap":
        return {f"{_STATE}.providerClass": f"{_PROVIDERS}.HDFSBackedStateStoreProvider"}
    return {
        f"{_STATE}.providerClass": f"{_PROVIDERS}.RocksDBStateStoreProvider",
        # A log of the changes at every batch instead of a snapshot of the whole.
        f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
        # Counting the rows costs a read before every write.
        f"{_STATE}.rocksdb.trackTotalNumberOfRows": "false",
        # The default of 8 MB does not hold the state of a million keys.
        f"{_STATE}.rocksdb.blockCacheSizeMB": "256",
    }


def session(params: Params, more: dict[str, str] | None = None, slots: int = 0) -> SparkSession:
    """A local session with as many slots and shuffle partitions as the job has parallelism."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    parallelism = int(params["parallelism"])
    directory = params["directory"]
    settings = {
        "spark.sql.shuffle.partitions": str(parallelism),
        "spark.default.parallelism": str(parallelism),
        "spark.driver.memory": "4g",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.local.dir": os.path.join(directory, "local"),
        "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        **state_settings(params["backend"]),
        **(more or {}),
    }
    builder = SparkSession.builder.master(f"local[{slots or parallelism}]").appName("bench")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def progress_of(query: StreamingQuery) -> list[Progress]:
    """The batches that had input, oldest first, as plain values."""
    every = [json.loads(p.json) for p in query.recentProgress]
    return [p for p in every if p["numInputRows"] > 0]


def await_batches(query: StreamingQuery, batches: int) -> list[Progress]:
    """Let the query finish that many batches, stop it, and give exactly those back.

    The source has no end, so a further batch may be half done at the stop: the state is checked
    at the last of the batches given back, not at whatever came after it.
    """
    while len(progress_of(query)) < batches:
        if not query.isActive:
            raise RuntimeError(f"The query ended early: {query.exception()}.")
        time.sleep(0.05)
    done = progress_of(query)[:batches]
    query.stop()
    return done


def seconds_since_epoch(progress: Progress) -> float:
    return datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()


def seconds_of(done: list[Progress]) -> float:
    """From the trigger of the first batch to the end of the last, commits included."""
    last = done[-1]
    return (
        seconds_since_epoch(last)
        + last["durationMs"]["triggerExecution"] / 1e3
        - seconds_since_epoch(done[0])
    )


def rows_of(done: list[Progress]) -> int:
    return sum(int(p["numInputRows"]) for p in done)


def counted_in_state(spark: SparkSession, measured: Measured, state: str | None = None) -> int:
    """The sum of all the counts in the state as it was committed by the last batch."""
    reader = spark.read.format("statestore").option("batchId", measured.done[-1]["batchId"])
    if state is not None:
        reader = reader.option("stateVarName", state)
    total = reader.load(measured.checkpoint).selectExpr("sum(value.count)").first()
    assert total is not None
    return int(total[0])


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def checkpoints_of(done: list[Progress], parallelism: int) -> dict[str, Any]:
    """A checkpoint of Spark is the end of a batch: its logs written and its state committed.

    The commit time of the state is reported as the sum over the tasks, which run side by side.
    """
    took = [
        float(
            p["durationMs"].get("walCommit", 0)
            + p["durationMs"].get("commitOffsets", 0)
            + sum(o["commitTimeMs"] for o in p["stateOperators"]) / parallelism
        )
        for p in done
    ]
    return {
        "completed": len(done),
        "failed": 0,
        "p50_ms": round(median(took), 1),
        "p99_ms": round(percentile(took, 0.99), 1),
        "max_ms": round(max(took), 1),
        "bytes_p50": None,
    }


def batch_seconds_p50(done: list[Progress]) -> float:
    return round(median(p["durationMs"]["triggerExecution"] / 1e3 for p in done), 3)


def cpu_seconds() -> float | None:
    """Processor time so far of this process and of everything it started, or None off Linux."""
    if not os.path.exists("/proc/self/stat"):
        return None
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                pid, rest = file.read().split(" (", 1)
        except OSError:
            continue
        fields = rest.rsplit(")", 1)[1].split()
        parents[int(pid)] = int(fields[1])
        ticks[int(pid)] = sum(int(f) for f in fields[11:15])
    ours, todo = 0, [os.getpid()]
    while todo:
        pid_now = todo.pop()
        ours += ticks.get(pid_now, 0)
        todo.extend(p for p, parent in parents.items() if parent == pid_now)
    return ours / os.sysconf("SC_CLK_TCK")


def java_version(spark: SparkSession) -> str:
    jvm: Any = spark.sparkContext._jvm
    return str(jvm.java.lang.System.getProperty("java.version"))


@dataclass(frozen=True)
class Measured:
    """The batches of a job that was measured."""

    done: list[Progress]
    checkpoint: str
    cpu_s: float | None = None
    """None where it cannot be told."""


def rate_batches(spark: SparkSession, params: Params, rows_per_batch: int) -> DataFrame:
    """Batches of so many numbers, as fast as they are taken."""
    source = spark.readStream.format("rate-micro-batch")
    source = source.option("rowsPerBatch", rows_per_batch)
    return source.option("numPartitions", params["parallelism"]).load()


def start(counts: DataFrame, checkpoint: str, bounded: bool = False) -> StreamingQuery:
    writer = counts.writeStream.format("noop").outputMode("update")
    writer = writer.option("checkpointLocation", checkpoint)
    if bounded:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def measure_generated(params: Params, rows: int, counts: DataFrame) -> Measured:
    """The warm-up, and then as many batches as fill the time at the warm-up's last speed."""
    directory = params["directory"]
    batches = max(WARM_UP_BATCHES_MIN, math.ceil(params["warmup_records"] / rows))
    warm = await_batches(start(counts, os.path.join(directory, "warm-up")), batches)
    batches = max(MEASURED_BATCHES_MIN, math.ceil(params["seconds"] / seconds_of(warm[-1:])))
    before_s = cpu_seconds()
    checkpoint = os.path.join(directory, "measured")
    done = await_batches(start(counts, checkpoint), batches)
    return Measured(done, checkpoint, cpu_seconds_since(before_s))


def cpu_seconds_since(before_s: float | None) -> float | None:
    now_s = cpu_seconds()
    return None if before_s is None or now_s is None else now_s - before_s


def report_measured(
    spark: SparkSession,
    params: Params,
    startup_s: float,
    measured: Measured,
    counted: int,
    settings: dict[str, Any],
) -> None:
    """Everything must have been counted, or there is no result."""
    done = measured.done
    records, seconds = rows_of(done), seconds_of(done)
    if counted != records:
        raise RuntimeError(f"Spark counted {counted} of the {records} records that it read.")
    result = {
        "engine": "spark",
        "version": pyspark.__version__,
        "variant": params["variant"],
        "workload": params["workload"],
        "startup_s": startup_s,
        "records": records,
        "seconds": seconds,
        "records_per_second": records / seconds,
        "counted": counted,
        "checkpoints": checkpoints_of(done, params["parallelism"]),
        "batch_seconds_p50": batch_seconds_p50(done),
        "latency_ms": None,
        "java": java_version(spark),
        "settings": {
            "rows per batch": done[0]["numInputRows"],
            "shuffle partitions": params["parallelism"],
            **settings,
        },
    }
    if measured.cpu_s is not None:
        result["cpu_seconds"] = measured.cpu_s
    report(result)


def report(result: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(result), flush=True)
