"""Stillframe: a user's Python function for every row, and one with state for every row of a key.

    python stillframe_rows.py '{"workload": "rows", "seconds": 20, …}'

`map_rows` makes the site of each url; a `KeyProcessor` by site then reads its value state, adds
one, writes it and yields (site, count), for every single row; the sink is `noop`. Exactly once,
through the public API on local Spark. Urls are made of the columns of the source `clicks` (its apps
even) by an expression of the engine, or read from Parquet files by the source `parquet`.

What was counted is read back from the last checkpoint and must be what the sources say was read.
"""

import time

STARTED_S = time.monotonic()

import glob  # noqa: E402
import os  # noqa: E402

import stillframe_session as ours  # noqa: E402

import stillframe  # noqa: E402

URL = "concat('https://', app_id, '.example.org/p/', id % 1000, '?u=', user_id) AS url"
COLUMNS = "app_id string, user_id long, url string"
PARTITIONS_PER_SUBTASK = 2
WARMUP_RECORDS_MIN = 10_000


def site_of(row):
    return (row.url.split("/")[2],)


class CountEveryRow(stillframe.KeyProcessor):
    def open(self, states):
        self.count = states.value("count", "n long")

    def process(self, key, rows):
        for row in rows:
            kept = self.count.get()
            n = 1 if kept is None else kept.n + 1
            self.count.update((n,))
            yield row.site, n


def main():
    params = ours.params_given()
    if params["workload"] != "rows":
        ours.refuse(f"stillframe_rows has no workload {params['workload']!r}")
    spark = ours.open_session(params["parallelism"])
    still = stillframe.on(spark)
    warm_up = count(still, params, "warm-up", max(params["warmup_records"], WARMUP_RECORDS_MIN))
    speed = warm_up["records"] / warm_up["watch"].seconds()
    measured = count(
        still, params, "measured", max(WARMUP_RECORDS_MIN, int(speed * params["seconds"]))
    )
    tell(spark, params, warm_up, measured)


def count(still, params, name, records):
    """Run the job to its end; `records` is for the generator."""
    began = time.monotonic()
    checkpoints_at = os.path.join(params["directory"], "checkpoints")
    sites = urls(still, params, name, records).map_rows(site_of, "site string")
    counts = sites.groupBy("site").process(CountEveryRow, "site string, n long").uid("count")
    writer = counts.writeStream.outputMode("append").format("noop").queryName(name)
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


def urls(still, params, name, records):
    if params["source"] == "parquet":
        return files(still, params["input"], only_first=name == "warm-up").select("url")
    source = still.readStream.format("clicks").option("records", records).option("skew", 1)
    source = source.option("partitions", PARTITIONS_PER_SUBTASK * params["parallelism"])
    return source.option("apps", params["keys"]).load().selectExpr(URL)


def files(still, directory, only_first):
    path = sorted(glob.glob(os.path.join(directory, "*.parquet")))[0] if only_first else directory
    return still.readStream.schema(COLUMNS).parquet(path)


def counted(still, checkpoint):
    """The sum of all counts in the last checkpoint."""
    state = still.spark.read.format("stillframe").option("operator", "count")
    return state.option("state", "count").load(checkpoint).selectExpr("sum(value.n)").first()[0]


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
