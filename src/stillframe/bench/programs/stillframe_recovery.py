"""Stillframe: from the SIGKILL of a slot to the first correct output, with so much state.

    python stillframe_recovery.py '{"workload": "recovery", "state_bytes": 100000000, …}'

Every key has a value state of 1,000 incompressible bytes and a count. One source makes each key
once, as fast as it goes; another visits the keys in turn at a fixed rate, and each visit adds one
to the count and is told with it. Visit v is number v // keys of its key, so each row of the output
is known to be right or wrong by itself. When all keys are there and a checkpoint has completed
since, a slot is killed in the middle between two checkpoints.

Measured, from the kill: the first output of the restored job, when each of its subtasks had given
some, and when the visits that fell due meanwhile had been made good; one wrong row, and the program
fails. The parts of it: until the coordinator knew (`noticed`), until the next attempt began
(`waited`, with the delay of the restart strategy, which is Flink's and 1 s by default), until the
slots' processes were there (`started`), until they had restored the state and all ran (`restored`),
and until each subtask had given output (`replayed`).
"""

import glob
import os
import signal
import time
from functools import partial

import pyarrow as pa
import stillframe_session as ours

import stillframe

PAYLOAD_BYTES = 1000
VISITS_PER_SECOND = 5_000
FILL_SECONDS_MAX = 900.0
RECOVERY_SECONDS_MAX = 180.0
MADE_GOOD_SECONDS = 0.5
"""A row this young says that what fell due during the recovery has been worked off."""
LOOK_SECONDS = 0.01
SETTINGS = {"spark.python.daemon.module": "stillframe.spark.daemon"}
"""As README says under 'Recovery time'."""
NAME = "recovery"
ROW = "visit long, created timestamp, n long"


class Visited(stillframe.KeyProcessor):
    """Keeps some bytes for each key, and counts how often it was visited."""

    def open(self, states):
        self.kept = states.value("kept", "payload binary, n long")

    def process(self, key, rows):
        kept = self.kept.get()
        payload, n = (os.urandom(PAYLOAD_BYTES), 0) if kept is None else kept
        for row in rows:
            if row.visit is not None:
                n += 1
            yield row.visit, row.created, n
        self.kept.update((payload, n))


class Check(stillframe.StreamFunction):
    """Checks each visit, and notes in files when there was the first and when none was late."""

    def __init__(self, directory, keys):
        self.directory = directory
        self.keys = keys

    def open(self, states):
        self.prefix = os.path.join(self.directory, f"{os.getpid()}-{states.subtask}")
        self.filled = 0
        self.is_first = self.is_late = True

    def process(self, batch):
        visits = batch.filter(batch["visit"].is_valid())
        self.note_filled(batch.num_rows - visits.num_rows)
        if visits.num_rows:
            self.check(visits)
        yield batch

    def note_filled(self, rows):
        if rows:
            self.filled += rows
            note(f"{self.prefix}-filled", self.filled)

    def check(self, visits):
        numbers = visits["visit"].to_numpy()
        right = numbers // self.keys + 1 == visits["n"].to_numpy()
        now_s = time.time()
        if not right.all():
            note(f"{self.prefix}-wrong", int((~right).sum()))
        elif self.is_first:
            self.is_first = False
            note(f"{self.prefix}-first", now_s)
        newest_s = visits["created"].view(pa.int64())[-1].as_py() / 1e6
        if self.is_late and now_s - newest_s < MADE_GOOD_SECONDS:
            self.is_late = False
            note(f"{self.prefix}-late", now_s)


def note(path, value):
    with open(f"{path}.new", "w") as file:
        file.write(str(value))
    os.replace(f"{path}.new", path)


def noted(directory, what, pids):
    """What the subtasks of these processes have noted."""
    found = []
    for pid in pids:
        for path in glob.glob(os.path.join(directory, f"{pid}-*-{what}")):
            with open(path) as file:
                found.append(float(file.read()))
    return found


class Watch(ours.Watch):
    """Also when each attempt began, ran and failed."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __call__(self, event):
        self.events.append((type(event).__name__, time.time(), event))
        super().__call__(event)

    def last(self, kind, since_s=0.0):
        """When it happened last, and what was told."""
        for name, at_s, event in reversed(self.events):
            if name == kind and at_s >= since_s:
                return at_s, event
        return None


def main():
    params = ours.params_given()
    if params["workload"] != "recovery" or params["checkpoint_interval_ms"] is None:
        ours.refuse("stillframe_recovery does workload recovery, with checkpoints")
    if params["parallelism"] < 2:
        ours.refuse("stillframe_recovery kills one slot of several")
    keys = max(1, params["state_bytes"] // PAYLOAD_BYTES)
    spark = ours.open_session(params["parallelism"], SETTINGS)
    watch = Watch()
    query = start(stillframe.on(spark), params, keys, watch)
    called_s = time.monotonic()
    parallelism = params["parallelism"]
    await_until(lambda: watch.last("SlotsRunning"), FILL_SECONDS_MAX, query)
    pids = watch.last("SlotsRunning")[1].pids
    filled = lambda: sum(noted(params["directory"], "filled", pids)) == keys  # noqa: E731
    await_until(filled, FILL_SECONDS_MAX, query)
    on_time = lambda: len(noted(params["directory"], "late", pids)) == parallelism  # noqa: E731
    await_until(on_time, FILL_SECONDS_MAX, query)
    filled_s = time.time()
    begun = lambda: completed_since(watch, filled_s)  # noqa: E731
    await_until(begun, FILL_SECONDS_MAX, query)
    time.sleep(params["checkpoint_interval_ms"] / 2000)
    killed_s = time.time()
    os.kill(pids[1], signal.SIGKILL)
    recovery = recovered(watch, query, params, killed_s)
    state_bytes = watch.last("CheckpointCompleted")[1].state_bytes
    query.stop()
    seconds = watch.seconds()
    spark.stop()
    ours.tell(
        params,
        startup_s=round(watch.running_at - called_s, 3),
        records=None,
        seconds=round(seconds, 3),
        records_per_second=None,
        counted=keys,
        checkpoints=ours.checkpoint_figures(watch.completed, 0),
        state_bytes=state_bytes,
        recovery_s=recovery["first_output_s"],
        recovery=recovery,
    )


def completed_since(watch, since_s):
    """Whether a checkpoint that began after this moment has completed."""
    last = watch.last("CheckpointCompleted")
    return last is not None and last[1].triggered_at_ms / 1000 > since_s


def start(still, params, keys, watch):
    options = ours.job_options(params, os.path.join(params["directory"], "checkpoints"))
    filling = still.readStream.format("clicks").option("records", keys).load()
    filling = filling.selectExpr(
        "id", "cast(null AS long) AS visit", "cast(null AS timestamp) AS created"
    )
    visiting = still.readStream.format("rate").options(
        rowsPerSecond=VISITS_PER_SECOND, numPartitions=params["parallelism"], catchUp=True
    )
    visiting = visiting.load().selectExpr(
        f"value % {keys} AS id", "value AS visit", "timestamp AS created"
    )
    stream = filling.union(visiting).groupBy("id").process(Visited, ROW).uid("visited")
    stream = stream.process(partial(Check, params["directory"], keys), ROW)
    writer = stream.writeStream.outputMode("append").format("noop")
    query = writer.queryName(NAME).options(**options).start()
    query.add_listener(watch)
    return query


def recovered(watch, query, params, killed_s):
    directory, parallelism = params["directory"], params["parallelism"]
    await_until(lambda: watch.last("SlotsRunning", killed_s), RECOVERY_SECONDS_MAX, query)
    running_s, event = watch.last("SlotsRunning", killed_s)
    both = lambda: len(noted(directory, "first", event.pids)) == parallelism  # noqa: E731
    await_until(both, RECOVERY_SECONDS_MAX, query)
    made_good = lambda: len(noted(directory, "late", event.pids)) == parallelism  # noqa: E731
    await_until(made_good, RECOVERY_SECONDS_MAX, query)
    wrong = glob.glob(os.path.join(directory, "*-wrong"))
    if wrong:
        raise SystemExit(f"the output had wrong counts: {wrong}")
    first_s = noted(directory, "first", event.pids)
    noticed_s = watch.last("AttemptFailed", killed_s)[0]
    waited_s, attempt = watch.last("AttemptStarted", killed_s)
    if attempt.restored_from is None:
        raise SystemExit("the job started over and not from a checkpoint")
    started_s = max(map(process_started_s, event.pids))
    running_s = min(running_s, max(first_s))  # the driver hears of it later than they run
    moments = [killed_s, noticed_s, waited_s, started_s, running_s, max(first_s)]
    names = ["noticed_s", "waited_s", "started_s", "restored_s", "replayed_s"]
    return {
        "first_output_s": round(min(first_s) - killed_s, 3),
        "output_of_all_s": round(max(first_s) - killed_s, 3),
        "made_good_s": round(max(noted(directory, "late", event.pids)) - killed_s, 3),
        "parts": {
            name: round(after - before, 3)
            for name, before, after in zip(names, moments, moments[1:], strict=False)
        },
        "restart_delay_s": watch.last("AttemptFailed", killed_s)[1].restart_seconds,
    }


def process_started_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        booted_s = time.time() - float(file.read().split()[0])
    return booted_s + ticks / os.sysconf("SC_CLK_TCK")


def await_until(is_so, seconds_max, query):
    deadline = time.monotonic() + seconds_max
    while not is_so():
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline:
            raise SystemExit(f"waited for {seconds_max:g} s in vain")
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
