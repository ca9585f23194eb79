"""What Stillframe's programs have in common: the session, the options, the watch, the result.

It is imported from the directory of the programs (`python stillframe_state.py` puts that directory
first on the path) and uses Stillframe as anybody would.
"""

import glob
import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median

from pyspark.sql import SparkSession

import stillframe

BACKENDS = {"heap": "fs", "rocksdb": "rocksdb"}
CANNOT_DO = 3
COLUMNS = "app_id string, user_id long, url string"
WARMUP_RECORDS_MIN = 10_000
_END_SECONDS_MAX = 30.0


def params_given():
    return json.loads(sys.argv[1])


def refuse(sentence):
    """End as the harness expects of a combination that cannot be done."""
    print(sentence, file=sys.stderr)
    sys.exit(CANNOT_DO)


def open_session(parallelism, settings=None):
    """Local Spark, with two cores more than slots for the Spark jobs beside them."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        SparkSession.builder.master(f"local[{parallelism + 2}]")
        .appName("stillframe-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config(map=settings or {})
        .getOrCreate()
    )


def job_options(params, checkpoints_at):
    """Without an interval a bounded job still takes one checkpoint, its last; it is read below."""
    interval_ms = params["checkpoint_interval_ms"]
    options = {
        "parallelism": params["parallelism"],
        "stateBackend": BACKENDS[params["backend"]],
        "incrementalCheckpoints": params["incremental"],
        "checkpointLocation": checkpoints_at,
        "checkpointInterval": "1 day" if interval_ms is None else f"{interval_ms} ms",
    }
    if params["mode"] == "unaligned":
        options["unalignedCheckpoints"] = True
    if params["mode"] == "stop-the-world":
        options["checkpointMode"] = "stop-the-world"
    if params.get("metrics_interval") is not None:
        options["metricsInterval"] = params["metrics_interval"]
    return {name: str(value) for name, value in options.items()}


class Watch:
    """Times a job from the moment all its slots run to its end, and gathers its checkpoints."""

    def __init__(self):
        self.running_at = self.ended_at = self.cpu_seconds = 0.0
        self.completed = []
        self._pids = ()
        self._cpu_seconds_before = 0.0
        self._done = threading.Event()

    def __call__(self, event):
        # By name: the classes of events are not among Stillframe's public names.
        match type(event).__name__:
            case "SlotsRunning":
                self.running_at, self._pids = time.monotonic(), event.pids
                # The processes may have served the job before.
                self._cpu_seconds_before = sum(map(cpu_seconds_of, self._pids))
            case "CheckpointCompleted":
                self.completed.append(event)
                used = sum(map(cpu_seconds_of, self._pids))
                self.cpu_seconds = used - self._cpu_seconds_before
            case "JobEnded":
                self.ended_at = time.monotonic()
                self._done.set()

    def seconds(self):
        assert self._done.wait(_END_SECONDS_MAX), "the job told nobody that it ended"
        assert self.running_at, "the slots ran before anybody listened"
        return self.ended_at - self.running_at


def cpu_seconds_of(pid):
    """What a slot has used of the processors so far, with Spark's evaluator beside it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        started = [int(child) for each in threads for child in each.read_text().split()]
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_seconds_of, started))


def checkpoint_figures(completed, failed):
    durations = sorted(each.duration_ms for each in completed)
    if not durations:
        return None
    written = [sum(part.bytes_written for part in each.timings) for each in completed]
    return {
        "completed": len(durations),
        "failed": failed,
        "p50_ms": round(median(durations), 1),
        "p99_ms": round(durations[min(len(durations) - 1, int(0.99 * len(durations)))], 1),
        "max_ms": round(durations[-1], 1),
        "bytes_p50": int(median(written)),
    }


def run_twice(params, started_s, build, counted, output_mode, sink=None):
    """Run the job for warming up, then the one that is measured, and tell what it did.

    `build` makes the stream of a job, of its name and how many records to generate; `counted` says
    what the last checkpoint of a job holds; `sink` are the options of another sink than `noop`.
    """
    spark = open_session(params["parallelism"])
    still = stillframe.on(spark)

    def run(name, records):
        stream = build(still, params, name, max(WARMUP_RECORDS_MIN, int(records)))
        return _ran(still, params, name, stream, counted, output_mode, sink or {"format": "noop"})

    warm_up = run("warm-up", params["warmup_records"])
    speed = warm_up["records"] / warm_up["watch"].seconds()
    measured = run("measured", speed * params["seconds"])
    _tell_speed(spark, params, started_s, warm_up, measured)


def _ran(still, params, name, stream, counted, output_mode, sink):
    began = time.monotonic()
    checkpoints_at = os.path.join(params["directory"], "checkpoints")
    writer = stream.writeStream.outputMode(output_mode).format(sink["format"]).queryName(name)
    writer = writer.options(**{option: sink[option] for option in sink if option != "format"})
    if params.get("source") in ("parquet", "files", "kafka"):
        writer = writer.trigger(availableNow=True)
    watch = Watch()
    query = writer.options(**job_options(params, checkpoints_at)).start()
    query.add_listener(watch)
    query.awaitTermination()
    watch.seconds()
    return {
        "records": query.summary.records_in,
        "watch": watch,
        "began": began,
        "failed": query.summary.checkpoints_failed,
        "counted": counted(still, os.path.join(checkpoints_at, name)),
    }


def _tell_speed(spark, params, started_s, warm_up, measured):
    for job in (warm_up, measured):
        if job["counted"] != job["records"]:
            raise SystemExit(f"{job['counted']} records were counted of {job['records']} read")
    watch = measured["watch"]
    seconds = watch.seconds()
    is_checkpointed = params["checkpoint_interval_ms"] is not None
    # The last comes when everything is read, whether asked for or not: it has nothing to hold up.
    completed = watch.completed[:-1] if is_checkpointed else []
    tell(
        params,
        startup_s=round(warm_up["watch"].running_at - started_s, 2),
        restart_s=round(watch.running_at - measured["began"], 2),
        records=measured["records"],
        seconds=round(seconds, 3),
        records_per_second=round(measured["records"] / seconds),
        counted=measured["counted"],
        cpu_seconds=round(watch.cpu_seconds, 2),
        warm_up={
            "records": warm_up["records"],
            "seconds": round(warm_up["watch"].seconds(), 3),
        },
        checkpoints=checkpoint_figures(completed, measured["failed"]),
        spark=spark.version,
    )


def added_to(number_there):
    """Counts what a job has added to what is there."""
    seen = [0]

    def number(still, checkpoint):
        before, seen[0] = seen[0], number_there()
        return seen[0] - before

    return number


def page_view_files(still, params, name):
    """The Parquet files; for warming up the first of them."""
    directory = params["input"]
    files = sorted(glob.glob(os.path.join(directory, "*.parquet")))
    return still.readStream.schema(COLUMNS).parquet(files[0] if name == "warm-up" else directory)


def tell(params, **figures):
    result = {
        "engine": "stillframe",
        "version": stillframe.__version__,
        "variant": params["variant"],
        "workload": params["workload"],
        "latency_ms": None,
        **figures,
    }
    print("RESULT " + json.dumps(result), flush=True)
