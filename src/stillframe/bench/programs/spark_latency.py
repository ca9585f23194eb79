"""Spark Structured Streaming: how old a record is when its count is out, at a fixed rate.

Variant "sql": micro-batches as soon as possible (the default trigger), to the no-op sink. All the
records of a batch are out when the batch's sink has committed (the end of `addBatch`), and which
records a batch had is in its progress, so the age of every record is known without touching the
plan: end of `addBatch` of its batch minus the time it was due.

Variant "realtime": `trigger(realTime=...)`. Every record makes a row of its own at the sink, where
`AgeWriter` takes now - created; `last` carries the record's own time through the count.

Both read `ScheduledSource`, because Spark's `rate` source hands out whole seconds at once and is
refused by real-time mode. The two Java files are compiled here, against the jars of PySpark.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import time
from typing import Any

STARTED_S = time.time()

import numpy as np  # noqa: E402
import pyspark  # noqa: E402
import spark_session as ours  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402

WARM_UP_JOB_S = 10
WARM_UP_S = 5
# Between the start of the query and the first due record: its first batch is planned meanwhile.
LEAD_S = 2
# The shortest batch, and so checkpoint interval, that real-time mode allows by default.
REAL_TIME_BATCH = "5 seconds"
REAL_TIME_BATCH_UNCHECKED = "5 minutes"


def compiled(directory: str) -> str:
    """The directory of the classes of the two Java files beside this one."""
    javac = shutil.which("javac") or os.path.join(os.environ.get("JAVA_HOME", ""), "bin", "javac")
    if not os.path.exists(javac):
        ours.refuse("The scheduled source is Java, and no Java compiler is to be found.")
    jars = os.path.join(os.path.dirname(pyspark.__file__), "jars", "*")
    sources = glob.glob(os.path.join(os.path.dirname(__file__), "spark", "*.java"))
    classes = os.path.join(directory, "classes")
    command = [javac, "-nowarn", "-cp", jars, "-d", classes, *sources]
    subprocess.run(command, check=True, capture_output=True)
    return classes


def scheduled(spark: SparkSession, params: ours.Params, start_us: int) -> DataFrame:
    source = spark.readStream.format("ScheduledSource")
    source = source.option("startUs", start_us).option("rate", params["rate"])
    return source.option("partitions", params["parallelism"]).load()


def percentiles(ages_ms: Any) -> dict[str, float | int]:
    p50, p99, p999 = np.percentile(ages_ms, [50, 99, 99.9], method="higher")
    return {
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "p999": round(float(p999), 3),
        "max": round(float(ages_ms.max()), 3),
        "samples": len(ages_ms),
    }


def run_micro_batches(
    spark: SparkSession, params: ours.Params, name: str, seconds: int
) -> tuple[list[ours.Progress], int, str]:
    """Run until that long after the first record was due; gives the batches and the start."""
    start_us = int((time.time() + LEAD_S) * 1e6)
    checkpoint = os.path.join(params["directory"], name)
    counts = scheduled(spark, params, start_us).groupBy("app").count()
    writer = counts.writeStream.format("noop").outputMode("update")
    query = writer.option("checkpointLocation", checkpoint).start()
    query.awaitTermination(LEAD_S + seconds)
    while query.isActive and due_in(ours.progress_of(query)) < seconds * params["rate"]:
        time.sleep(0.05)
    if query.exception() is not None:
        raise RuntimeError(f"The query ended early: {query.exception()}.")
    done = ours.progress_of(query)
    query.stop()
    return done, start_us, checkpoint


def due_in(done: list[ours.Progress]) -> int:
    return sum(_offsets(done[-1], "endOffset")) if done else 0


def _offsets(progress: ours.Progress, which: str) -> list[int]:
    """How many records each partition had given out; none before the first batch."""
    offsets = progress["sources"][0][which]
    return list(offsets) if offsets is not None else []


def ages_of(done: list[ours.Progress], start_us: int, params: ours.Params) -> Any:
    """Age in ms of every record that was due after the warm-up and inside the measured time."""
    partitions, rate = params["parallelism"], params["rate"]
    first, last = WARM_UP_S * 1e6, (WARM_UP_S + params["seconds"]) * 1e6
    ages = []
    for batch in done:
        out_us = _out_s(batch) * 1e6 - start_us
        ends = _offsets(batch, "endOffset")
        starts = _offsets(batch, "startOffset") or [0] * partitions
        for partition, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            due_us = (np.arange(begin, end) * partitions + partition) * (1e6 / rate)
            inside = due_us[(due_us >= first) & (due_us < last)]
            ages.append((out_us - inside) / 1e3)
    return np.concatenate(ages)


def _out_s(batch: ours.Progress) -> float:
    """When the sink had committed: the end of the batch without the log that follows it."""
    took = batch["durationMs"]
    started_s = ours.seconds_since_epoch(batch)
    return started_s + float(took["triggerExecution"] - took.get("commitOffsets", 0)) / 1e3


def measure_micro_batch(spark: SparkSession, params: ours.Params) -> dict[str, Any]:
    run_micro_batches(spark, params, "warm-up", WARM_UP_JOB_S)
    seconds = WARM_UP_S + int(params["seconds"])
    done, start_us, checkpoint = run_micro_batches(spark, params, "measured", seconds)
    records = ours.rows_of(done)
    counted = ours.counted_in_state(spark, ours.Measured(done, checkpoint))
    if counted != records:
        raise RuntimeError(f"Spark counted {counted} of the {records} records that it read.")
    ages_ms = ages_of(done, start_us, params)
    wanted = int(params["seconds"] * params["rate"])
    if len(ages_ms) != wanted:
        raise RuntimeError(f"{len(ages_ms)} of the {wanted} records came out of the query.")
    return {
        "records": records,
        "counted": counted,
        "seconds": seconds,
        "records_per_second": records / ours.seconds_of(done),
        "latency_ms": percentiles(ages_ms),
        "checkpoints": ours.checkpoints_of(done, params["parallelism"]),
        "batch_seconds_p50": ours.batch_seconds_p50(done),
    }


def run_real_time(spark: SparkSession, params: ours.Params, name: str, seconds: int) -> Any:
    """Run until that long after the first record was due; gives the class with the ages."""
    jvm: Any = spark.sparkContext._jvm
    start_us = int((time.time() + LEAD_S) * 1e6)
    until_us = start_us + int(seconds * 1e6)
    jvm.AgeWriter.measure(start_us + WARM_UP_S * 1_000_000, until_us)
    records = scheduled(spark, params, start_us)
    counts = records.groupBy("app").agg({"*": "count", "created_us": "last"})
    counts = counts.select("app", "count(1)", "last(created_us)")
    writer = counts.writeStream.outputMode("update")
    writer = writer.option("checkpointLocation", os.path.join(params["directory"], name))
    # PySpark's overloads leave this keyword out.
    writer = writer.trigger(realTime=trigger_of(params))  # type: ignore[call-overload]
    writer._jwrite.foreach(jvm.AgeWriter())
    query = writer.start()
    wanted = int(params["seconds"] * params["rate"])
    give_up_s = time.time() + LEAD_S + 4 * seconds + 30
    query.awaitTermination(LEAD_S + seconds)
    while query.isActive and jvm.AgeWriter.taken() < wanted and time.time() < give_up_s:
        time.sleep(0.2)
    if query.exception() is not None:
        raise RuntimeError(f"The query ended early: {query.exception()}.")
    query.stop()
    return jvm.AgeWriter


def measure_real_time(spark: SparkSession, params: ours.Params) -> dict[str, Any]:
    run_real_time(spark, {**params, "seconds": WARM_UP_JOB_S - WARM_UP_S}, "warm-up", WARM_UP_JOB_S)
    seconds = WARM_UP_S + int(params["seconds"])
    ages = run_real_time(spark, params, "measured", seconds)
    wanted = int(params["seconds"] * params["rate"])
    if ages.taken() != wanted:
        raise RuntimeError(f"{ages.taken()} of the {wanted} records came out of the query.")
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    latency = {name: ages.percentileMs(share) for name, share in shares.items()}
    return {
        "records": wanted,
        "counted": ages.taken(),
        "seconds": params["seconds"],
        "records_per_second": None,  # The rate was given; only the ages are measured.
        "latency_ms": {**latency, "samples": ages.taken()},
        "checkpoints": None,
    }


def trigger_of(params: ours.Params) -> str:
    if params["variant"] != "realtime":
        return "as soon as possible"
    checked = params["checkpoint_interval_ms"] is not None
    return REAL_TIME_BATCH if checked else REAL_TIME_BATCH_UNCHECKED


def main() -> None:
    params = ours.params_given()
    if params["workload"] != "latency" or params["variant"] not in ("", "sql", "realtime"):
        ours.refuse("This program does latency in the variants sql and realtime only.")
    if params["slow_channel"]:
        ours.refuse("Spark's channels are files or streams of its own: none can be slowed here.")
    real_time = params["variant"] == "realtime"
    if not real_time:
        ours.refuse_without_checkpoints(params)
    params["backend"] = "rocksdb"
    tuned = {"spark.driver.extraClassPath": compiled(params["directory"])}
    # Real-time mode runs the readers and the counters side by side: it needs a slot for each.
    slots = params["parallelism"] * (2 if real_time else 1)
    spark = ours.session(params, tuned, slots)
    startup_s = time.time() - STARTED_S
    measured = (measure_real_time if real_time else measure_micro_batch)(spark, params)
    result = {
        "engine": "spark",
        "version": pyspark.__version__,
        "variant": params["variant"],
        "workload": "latency",
        "startup_s": startup_s,
        "java": ours.java_version(spark),
        "settings": {
            "trigger": trigger_of(params),
            "slots": slots,
            **ours.state_settings("rocksdb"),
        },
        **measured,
    }
    ours.report(result)
    spark.stop()


if __name__ == "__main__":
    main()
