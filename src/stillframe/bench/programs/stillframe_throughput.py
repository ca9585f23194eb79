"""Stillframe: page views counted by app or by user, and the same with more tasks and channels.

    python stillframe_throughput.py '{"workload": "strings", "seconds": 20, …}'

`groupBy(key).count()` to the sink `noop`, exactly once, through the public API on local Spark. The
generator is the source `clicks`, whose apps are made even; Parquet is read by the source `parquet`.

With `channels` there are several such sources whose union is counted: each sends to every subtask
of the count, so `channels` is how many channels come into one.

What was counted is read back from the last checkpoint and must be what the sources say was read.
"""

import time

STARTED_S = time.monotonic()

import glob  # noqa: E402
import os  # noqa: E402
from functools import reduce  # noqa: E402

import stillframe_session as ours  # noqa: E402

import stillframe  # noqa: E402

KEYS = {"strings": "app_id", "integers": "user_id", "growth": "app_id"}
COLUMNS = "app_id string, user_id long, url string"
PARTITIONS_PER_SUBTASK = 2
WARMUP_RECORDS_MIN = 10_000


def main():
    params = ours.params_given()
    if params["workload"] not in KEYS:
        ours.refuse(f"stillframe_throughput has no workload {params['workload']!r}")
    refuse_channels(params)
    spark = ours.open_session(params["parallelism"])
    still = stillframe.on(spark)
    warm_up = count(still, params, "warm-up", max(params["warmup_records"], WARMUP_RECORDS_MIN))
    speed = warm_up["records"] / warm_up["watch"].seconds()
    measured = count(
        still, params, "measured", max(WARMUP_RECORDS_MIN, int(speed * params["seconds"]))
    )
    tell(spark, params, warm_up, measured)


def refuse_channels(params):
    channels, parallelism = params.get("channels"), params["parallelism"]
    if channels is not None and (channels < parallelism or channels % parallelism):
        ours.refuse(
            f"{channels} channels into each task cannot be had with parallelism {parallelism}:"
            " they are a multiple of it"
        )


def count(still, params, name, records):
    """Run the job to its end; `records` is for the generator."""
    began = time.monotonic()
    key = KEYS[params["workload"]]
    checkpoints_at = os.path.join(params["directory"], "checkpoints")
    counts = views(still, params, name, records).groupBy(key).count().uid("count")
    writer = counts.writeStream.outputMode("update").format("noop").queryName(name)
    watch = ours.Watch()
    query = writer.options(**ours.job_options(params, checkpoints_at)).start()
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


def views(still, params, name, records):
    if params["source"] == "parquet":
        return files(still, params["input"], only_first=name == "warm-up")
    sources = (params.get("channels") or params["parallelism"]) // params["parallelism"]
    made = [clicks(still, params, share(records, sources, n), n) for n in range(sources)]
    return reduce(lambda left, right: left.union(right), made)


def files(still, directory, only_first):
    path = sorted(glob.glob(os.path.join(directory, "*.parquet")))[0] if only_first else directory
    return still.readStream.schema(COLUMNS).parquet(path)


def clicks(still, params, records, seed):
    source = still.readStream.format("clicks").option("records", records).option("skew", 1)
    source = source.option("partitions", PARTITIONS_PER_SUBTASK * params["parallelism"])
    return source.option("apps", apps_of(params)).option("seed", seed).load()


def apps_of(params):
    return params["keys"] if KEYS[params["workload"]] == "app_id" else 1000


def share(records, sources, n):
    return records // sources + (n < records % sources)


def counted(still, checkpoint):
    """The sum of all counts in the last checkpoint."""
    state = still.spark.read.format("stillframe").option("operator", "count").load(checkpoint)
    return state.selectExpr("sum(value.`count(1)`)").first()[0]


def tell(spark, params, warm_up, measured):
    for job in (warm_up, measured):
        if job["counted"] != job["records"]:
            raise SystemExit(f"{job['counted']} records were counted of {job['records']} read")
    watch = measured["watch"]
    seconds = watch.seconds()
    is_checkpointed = params["checkpoint_interval_ms"] is not None
    # The last comes when everything is read, whether asked for or not: it has nothing to hold up.
    completed = watch.completed[:-1] if is_checkpointed else []
    ours.tell(
        params,
        startup_s=round(warm_up["watch"].running_at - STARTED_S, 2),
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
        checkpoints=ours.checkpoint_figures(completed, measured["failed"]),
        spark=spark.version,
    )


if __name__ == "__main__":
    main()
