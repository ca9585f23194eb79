"""Stillframe: how long a checkpoint takes with so much state, and where the time goes.

    python stillframe_state.py '{"workload": "state", "state_bytes": 100000000, …}'

Every key has a value state of 1,000 incompressible bytes. One source makes each key once, as fast
as it goes; another comes by all keys again and again and gives them new bytes: one in a hundred of
them each second where checkpoints are incremental, one in ten otherwise. When all keys are there,
checkpoints are asked for one after the other, one each second at most; the first of them, which
holds all that was filled in, is not counted.

At the end the keys in the last checkpoint are counted.
"""

import time

STARTED_S = time.monotonic()

import glob  # noqa: E402
import os  # noqa: E402
from functools import partial  # noqa: E402
from statistics import median  # noqa: E402

import pyarrow.compute as pc  # noqa: E402
import stillframe_session as ours  # noqa: E402

import stillframe  # noqa: E402

PAYLOAD_BYTES = 1000
SHARE_CHANGED = {True: 0.01, False: 0.1}
"""Of the keys, each second, by whether checkpoints are incremental."""
CHECKPOINTS_MIN = 3
FILL_SECONDS_MAX = 600.0
LOOK_SECONDS = 0.1
NAME = "state"


class Payload(stillframe.KeyProcessor):
    """Gives a key new bytes whenever it comes, and tells whether it was filled in by that."""

    def open(self, states):
        self.payload = states.value("payload", "bytes binary")

    def process(self, key, rows):
        filled = 0
        for row in rows:
            self.payload.update((os.urandom(PAYLOAD_BYTES),))
            filled += row.filled
        yield (filled,)


class Tally(stillframe.StreamFunction):
    """Keeps a file that tells how many keys were filled in."""

    def __init__(self, directory):
        self.directory = directory

    def open(self, states):
        self.path = os.path.join(self.directory, f"filled-{states.subtask}")
        self.filled = 0

    def process(self, batch):
        more = pc.sum(batch["filled"]).as_py()
        if more:
            self.filled += more
            with open(f"{self.path}.new", "w") as file:
                file.write(str(self.filled))
            os.replace(f"{self.path}.new", self.path)
        yield batch


def main():
    params = ours.params_given()
    if params["workload"] != "state":
        ours.refuse(f"stillframe_state has no workload {params['workload']!r}")
    keys = max(1, params["state_bytes"] // PAYLOAD_BYTES)
    spark = ours.open_session(params["parallelism"])
    still = stillframe.on(spark)
    watch = ours.Watch()
    query = start(still, params, keys, watch)
    fill(query, params["directory"], keys)
    filled_s = time.monotonic() - watch.running_at
    query.checkpoint()  # the one that holds everything
    first = len(watch.completed)
    take_checkpoints(query, watch, first, params["seconds"])
    query.stop()
    at = os.path.join(params["directory"], "checkpoints", NAME)
    state = spark.read.format("stillframe").option("operator", "payload").load(at)
    held = state.count()
    if held != keys:
        raise SystemExit(f"the last checkpoint holds {held} keys of {keys}")
    tell(params, watch, query, first, filled_s, held)


def start(still, params, keys, watch):
    # Asked for one by one, so that none waits for the one before it.
    options = ours.job_options(
        {**params, "checkpoint_interval_ms": None}, os.path.join(params["directory"], "checkpoints")
    )
    each_second = max(1, int(keys * SHARE_CHANGED[params["incremental"]]))
    filling = clicks(still, records=keys).selectExpr("id", "1L as filled")
    updating = clicks(still, recordsPerSecond=each_second)
    updating = updating.selectExpr(f"id % {keys} as id", "0L as filled")
    stream = filling.union(updating).groupBy("id").process(Payload, "filled long").uid("payload")
    stream = stream.process(partial(Tally, params["directory"]), "filled long")
    writer = stream.writeStream.outputMode("append").format("noop")
    query = writer.queryName(NAME).options(**options).start()
    query.add_listener(watch)
    return query


def clicks(still, **options):
    return still.readStream.format("clicks").options(**options).load()


def fill(query, directory, keys):
    """Until each key has come by."""
    deadline = time.monotonic() + FILL_SECONDS_MAX
    while filled(directory) < keys:
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline:
            raise SystemExit(f"{keys} keys were not filled in within {FILL_SECONDS_MAX:g} s")
        time.sleep(LOOK_SECONDS)


def filled(directory):
    total = 0
    for path in glob.glob(os.path.join(directory, "filled-?")):
        with open(path) as file:
            total += int(file.read())
    return total


def take_checkpoints(query, watch, first, seconds):
    ends = time.monotonic() + seconds
    while len(watch.completed) - first < CHECKPOINTS_MIN or time.monotonic() < ends:
        next_at = time.monotonic() + 1.0
        query.checkpoint()
        time.sleep(max(0.0, next_at - time.monotonic()))


def tell(params, watch, query, first, filled_s, held):
    completed = watch.completed[first:]
    ours.tell(
        params,
        startup_s=round(watch.running_at - STARTED_S, 2),
        records=query.summary.records_in,
        seconds=params["seconds"],
        records_per_second=None,
        counted=held,
        filled_s=round(filled_s, 2),
        state_bytes=completed[-1].state_bytes,
        checkpoints=ours.checkpoint_figures(completed, query.summary.checkpoints_failed),
        parts_ms={
            part: round(greatest(completed, f"{part}_ms"), 2)
            for part in ("start_delay", "alignment", "sync", "async")
        },
    )


def greatest(completed, part):
    """The median over checkpoints of what the slowest of the subtasks needed."""
    return median(max(getattr(each, part) for each in one.timings) for one in completed)


if __name__ == "__main__":
    main()
