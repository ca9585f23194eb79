"""Stillframe: latency at a fixed rate; records made by schedule, counted, each of them measured.

    python stillframe_latency.py '{"workload": "latency", "rate": 10000, "seconds": 20, …}'

Record n is due at start + n/rate and carries that time. What is measured of every record, behind
the count, is the time since it was *due*: a source that was held up does not hide it. The count is
a user's function of one key with a value state, which emits one row for each record; the last
operator looks at whole columns and writes what it saw into a file when the records have ended.

A slow channel: the records of the first of the sources go through a step that sleeps for half of
the time in which they come, so that what is sent to one channel of each count is always late.

With pages, or lookups, others look at the job meanwhile: see `looking_on.py`.
"""

import glob
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pyarrow as pa
import stillframe_session as ours

import stillframe

WARMUP_SECONDS = 5
SPARE_SECONDS = 2
WARMUP_RECORDS = 100_000
SLOW_SHARE = 0.5


class Count(stillframe.KeyProcessor):
    """The running count of an app, told with every record."""

    def open(self, states):
        self.count = states.value("count", "n long")

    def process(self, key, rows):
        kept = self.count.get()
        n = 0 if kept is None else kept.n
        for row in rows:
            n += 1
            yield key.app_id, row.created, n
        self.count.update((n,))


class Slow(stillframe.StreamFunction):
    """Lets records of the first subtask wait for a part of the time in which they come."""

    def __init__(self, seconds_per_record):
        self.seconds_per_record = seconds_per_record

    def open(self, states):
        self.is_slow = states.subtask == 0

    def process(self, batch):
        if self.is_slow:
            time.sleep(batch.num_rows * self.seconds_per_record)
        yield batch


class Measure(stillframe.StreamFunction):
    """Takes the age of each record; tells them all, and the last count of each app, at the end."""

    def __init__(self, directory, samples_max):
        self.directory = directory
        self.samples_max = samples_max

    def open(self, states):
        self.subtask = states.subtask
        self.first_us = time.time_ns() // 1000 + WARMUP_SECONDS * 1_000_000
        self.ages_us = np.zeros(self.samples_max, np.int64)
        self.samples = 0
        self.counts = {}

    def process(self, batch):
        now_us = time.time_ns() // 1000
        created_us = batch["created"].view(pa.int64()).to_numpy()
        self.counts.update(zip(batch["app_id"].to_pylist(), batch["n"].to_pylist(), strict=True))
        ages_us = now_us - created_us[created_us >= self.first_us]
        self.ages_us[self.samples : self.samples + len(ages_us)] = ages_us
        self.samples += len(ages_us)
        yield batch

    def finish(self):
        place = os.path.join(self.directory, f"measured-{self.subtask}")
        np.save(f"{place}.npy", self.ages_us[: self.samples])
        with open(f"{place}.json", "w") as file:
            json.dump(sum(self.counts.values()), file)
        return ()


def stream(still, job, rate, records):
    """The job up to its sink."""
    parallelism, keys = job["parallelism"], job.get("keys") or 1000
    made = (
        still.readStream.format("rate")
        .options(rowsPerSecond=rate, rows=records, numPartitions=parallelism, catchUp=True)
        .load()
        .selectExpr(
            f"concat('app-', cast(pmod(value * 2654435761, {keys}) AS string)) AS app_id",
            "timestamp AS created",
        )
    )
    if job.get("slow_channel"):
        per_record = SLOW_SHARE / (rate / parallelism)
        made = made.process(partial(Slow, per_record), "app_id string, created timestamp")
    row = "app_id string, created timestamp, n long"
    counted = made.groupBy("app_id").process(Count, row).uid("count")
    return counted.process(partial(Measure, job["directory"], records), row)


def run_query(still, job, name, rate, records):
    """Run a job to its end; what it told, the age of each record, and how many it counted."""
    measured = stream(still, job, rate, records)
    options = ours.job_options(job, job["directory"] + "/checkpoints")
    writer = measured.writeStream.outputMode("append").format("noop").options(**options)
    watch = ours.Watch()
    query = writer.queryName(name).start()
    query.add_listener(watch)
    query.awaitTermination()
    watch.seconds()  # it has been told of the end
    ages_us, counted = [], 0
    for place in glob.glob(os.path.join(job["directory"], "measured-*.npy")):
        ages_us.append(np.load(place))
        os.remove(place)
    for place in glob.glob(os.path.join(job["directory"], "measured-*.json")):
        with open(place) as file:
            counted += json.load(file)
        os.remove(place)
    return watch, np.concatenate(ages_us), counted


@contextmanager
def looked_at(job, name):
    """By as many as the job says; they must have been told something."""
    if not (job.get("pages") or job.get("lookups")):
        yield
        return
    eyes = {"job": name, "pages": job.get("pages") or 0, "lookups": bool(job.get("lookups"))}
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "looking_on.py")
    command = [sys.executable, program, json.dumps(eyes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as looking:
        try:
            yield
        finally:
            looking.terminate()
            said, _ = looking.communicate()
    if not json.loads(said)["told"]:
        raise SystemExit("those who looked at the job were told nothing")


def latencies(ages_ms):
    p50, p99, p999 = np.percentile(ages_ms, [50, 99, 99.9])
    return {
        "p50": round(p50, 3),
        "p99": round(p99, 3),
        "p999": round(p999, 3),
        "max": round(float(ages_ms.max()), 3),
        "samples": len(ages_ms),
    }


def main():
    job = ours.params_given()
    if job["workload"] != "latency":
        ours.refuse(f"stillframe_latency has no workload {job['workload']!r}")
    spark = ours.open_session(job["parallelism"])
    still = stillframe.on(spark)
    warm_records = job.get("warmup_records") or WARMUP_RECORDS
    called_s = time.monotonic()
    warm, _, _ = run_query(still, job, "warm-up", warm_records, warm_records)
    # What falls due while the job starts is worked off before the measurement begins.
    seconds = job["seconds"] + WARMUP_SECONDS + (warm.running_at - called_s) + SPARE_SECONDS
    records = int(job["rate"] * seconds)
    called_s = time.monotonic()
    with looked_at(job, "latency"):
        watch, ages_us, counted = run_query(still, job, "latency", job["rate"], records)
    spark.stop()
    if counted != records:
        raise SystemExit(f"counted {counted} of {records} records")
    if len(ages_us) < 0.9 * job["rate"] * job["seconds"]:
        raise SystemExit(f"only {len(ages_us)} records were made in time: is the machine busy?")
    ours.tell(
        job,
        startup_s=round(watch.running_at - called_s, 3),
        records=records,
        seconds=round(watch.seconds(), 3),
        records_per_second=round(records / watch.seconds()),
        counted=counted,
        checkpoints=ours.checkpoint_figures(watch.completed, 0),
        latency_ms=latencies(ages_us / 1000),
        cpu_s=round(watch.cpu_seconds, 2),
    )


if __name__ == "__main__":
    main()
