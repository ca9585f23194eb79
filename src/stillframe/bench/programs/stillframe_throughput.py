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

from functools import reduce  # noqa: E402

import stillframe_session as ours  # noqa: E402

KEYS = {"strings": "app_id", "integers": "user_id", "growth": "app_id"}
PARTITIONS_PER_SUBTASK = 2


def main():
    params = ours.params_given()
    if params["workload"] not in KEYS:
        ours.refuse(f"stillframe_throughput has no workload {params['workload']!r}")
    refuse_channels(params)
    ours.run_twice(params, STARTED_S, counts, counted, "update")


def refuse_channels(params):
    channels, parallelism = params.get("channels"), params["parallelism"]
    if channels is not None and (channels < parallelism or channels % parallelism):
        ours.refuse(
            f"{channels} channels into each task cannot be had with parallelism {parallelism}:"
            " they are a multiple of it"
        )


def counts(still, params, name, records):
    key = KEYS[params["workload"]]
    return views(still, params, name, records).groupBy(key).count().uid("count")


def views(still, params, name, records):
    if params["source"] == "parquet":
        return ours.page_view_files(still, params, name)
    sources = (params.get("channels") or params["parallelism"]) // params["parallelism"]
    made = [clicks(still, params, share(records, sources, n), n) for n in range(sources)]
    return reduce(lambda left, right: left.union(right), made)


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


if __name__ == "__main__":
    main()
