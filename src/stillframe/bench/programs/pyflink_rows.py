"""PyFlink: a user's Python function for every row, and one with state for every row of a key.

    python pyflink_rows.py '{"workload": "rows", "variant": "process", "seconds": 20, …}'

A Python `map` makes the site of each url; keyed by site a `KeyedProcessFunction` then reads its
value state, adds one, writes it and yields (site, count), for every single row; a sink of Flink's
discards it. Variant "process" runs the functions in Python worker processes of their own, "thread"
embeds them in the JVM's process. Urls are made by an SQL expression in the JVM, so that no Python
runs but the user's two functions.

All jobs run on one Flink cluster in the JVM that PyFlink starts: a warm-up, another half as long as
the measured one that says how many rows that must have, and the measured one. Flink's own execution
graph tells when their tasks ran and what their checkpoints took.
"""

import time

STARTED_S = time.time()

import glob  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import sysconfig  # noqa: E402
import uuid  # noqa: E402

# Workers are started through a shell script: they must find this environment, not another one.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
os.environ["PYTHONPATH"] = sysconfig.get_paths()["purelib"]
# Otherwise a job on a local cluster gets its functions run by threads of this very process.
os.environ["_python_worker_execution_mode"] = "process"  # noqa: SIM112

import numpy as np  # noqa: E402
from pyflink.common import Configuration, Types, WatermarkStrategy  # noqa: E402
from pyflink.datastream import (  # noqa: E402
    KeyedProcessFunction,
    RuntimeContext,
    StreamExecutionEnvironment,
)
from pyflink.datastream.connectors.base import Sink  # noqa: E402
from pyflink.datastream.connectors.number_seq import NumberSequenceSource  # noqa: E402
from pyflink.datastream.state import ValueStateDescriptor  # noqa: E402
from pyflink.java_gateway import get_gateway  # noqa: E402
from pyflink.table import StreamTableEnvironment  # noqa: E402
from pyflink.version import __version__  # noqa: E402

UNSUPPORTED = 3
WARMUP_RECORDS_MIN = 10_000
TUNED = {
    "process": {
        "python.execution-mode": "process",
        "python.fn-execution.bundle.size": "100000",
        "python.fn-execution.bundle.time": "1000",
        "python.fn-execution.arrow.batch.size": "10000",
        "python.state.cache-size": "10000",
    },
    "thread": {"python.execution-mode": "thread"},
}
MULTIPLIER = 2_654_435_761
"""Spreads the numbers of records over the keys."""
URLS = f"""
SELECT CONCAT('https://app-', CAST(MOD(f0 * {MULTIPLIER}, {{keys}}) AS STRING),
              '.example.org/p/', CAST(MOD(f0, 1000) AS STRING),
              '?u=', CAST(MOD(f0 * {MULTIPLIER}, 1000000) AS STRING))
FROM numbers
"""


def site_of(row):
    return row[0].split("/")[2]


class CountEveryRow(KeyedProcessFunction):
    def __init__(self, directory):
        self.directory = directory

    def open(self, runtime_context: RuntimeContext):
        self.count = runtime_context.get_state(ValueStateDescriptor("count", Types.LONG()))
        self.rows = self.sum = 0

    def process_element(self, site, ctx):
        n = (self.count.value() or 0) + 1
        self.count.update(n)
        self.rows += 1
        self.sum += n
        yield site, n

    def close(self):
        # In thread mode a function cannot ask which subtask it is.
        with open(os.path.join(self.directory, f"counted-{uuid.uuid4().hex}"), "w") as file:
            json.dump([self.rows, self.sum], file)


def main():
    params = json.loads(sys.argv[1])
    if params.get("workload") != "rows" or params.get("variant") not in TUNED:
        refuse(f"pyflink has no {params.get('workload')} {params.get('variant')}")
    if params.get("source") == "parquet":
        refuse("pyflink_rows has no Parquet reader: the one of Flink is not part of its wheel")
    if params.get("mode") == "stop-the-world":
        refuse("flink has no stop-the-world checkpoints")
    cluster = Cluster(params)
    warm_up = cluster.run(
        params, "warm-up", max(WARMUP_RECORDS_MIN, params.get("warmup_records") or 0)
    )
    trial = cluster.run(params, "trial", records_in(params["seconds"] / 2, warm_up))
    measured = cluster.run(params, "measured", records_in(params["seconds"], trial))
    tell(params, cluster, warm_up, measured)
    sys.stdout.flush()
    cluster.close()


def records_in(seconds, before):
    return max(WARMUP_RECORDS_MIN, int(before["records"] / before["seconds"] * seconds))


def refuse(why):
    print(why, file=sys.stderr)
    raise SystemExit(UNSUPPORTED)


class Cluster:
    """Flink in the JVM behind PyFlink: one job manager, and one task manager for all subtasks."""

    def __init__(self, params):
        self.settings = settings(params)
        self.jvm = get_gateway().jvm
        minicluster = self.jvm.org.apache.flink.runtime.minicluster
        builder = getattr(minicluster, "MiniClusterConfiguration$Builder")()
        builder.setConfiguration(self.configuration(params)._j_configuration)
        builder.setNumTaskManagers(1).setNumSlotsPerTaskManager(params["parallelism"])
        self.cluster = minicluster.MiniCluster(builder.withRandomPorts().build())
        self.cluster.start()

    def configuration(self, params):
        places = {
            "io.tmp.dirs": place(params, "tmp"),
            "execution.checkpointing.dir": "file://" + place(params, "checkpoints"),
            "execution.checkpointing.storage": "filesystem",
            "restart-strategy.type": "none",
            "web.checkpoints.history": "10000",
            "python.executable": sys.executable,
            "python.client.executable": sys.executable,
        }
        configuration = Configuration()
        for name, value in {**self.settings, **places}.items():
            configuration.set_string(name, value)
        return configuration

    def run(self, params, name, records):
        """Run the job to its end."""
        directory = place(params, name)
        env = build(self.configuration(params), params, records, directory)
        cpu_s = cpu_seconds()
        graph = env._generate_stream_graph(True, name).getJobGraph()
        job = self.cluster.submitJob(graph).get().getJobID()
        result = self.cluster.requestJobResult(job).get()
        cpu_s = cpu_seconds() - cpu_s
        if not result.isSuccess():
            failure = result.getSerializedThrowable().get()
            raise SystemExit(f"the job failed: {failure.getFullStringifiedStackTrace()}")
        graph = self.cluster.getExecutionGraph(job).get()
        running_ms = self.running_ms(graph)
        finished = self.jvm.org.apache.flink.api.common.JobStatus.FINISHED
        finished_ms = graph.getStatusTimestamp(finished)
        return {
            "records": records,
            # To see the check fail: expect one more than there is.
            "counted": checked(
                directory, records + bool(params.get("expect_one_more")), params["keys"]
            ),
            "running_s": running_ms / 1000,
            "seconds": (finished_ms - running_ms) / 1000,
            "cpu_seconds": cpu_s,
            "checkpoints": checkpoint_figures(graph.getCheckpointStatsSnapshot()),
            "begun": graph.getCheckpointStatsSnapshot().getHistory().getCheckpoints().size(),
        }

    def running_ms(self, graph):
        """When the last of the tasks was running."""
        running = self.jvm.org.apache.flink.runtime.execution.ExecutionState.RUNNING
        vertices = graph.getAllVertices().values()
        tasks = [task for vertex in vertices for task in vertex.getTaskVertices()]
        return max(task.getStateTimestamp(running) for task in tasks)

    def close(self):
        self.cluster.close()


def settings(params):
    """The tuning, in the keys of Flink's documentation; the harness has the last word."""
    rocksdb = params["backend"] == "rocksdb"
    told = {
        "parallelism.default": str(params["parallelism"]),
        "pipeline.object-reuse": "true",
        "pipeline.auto-watermark-interval": "0 ms",
        "taskmanager.memory.managed.size": "1 gb",
        "state.backend.type": "rocksdb" if rocksdb else "hashmap",
        "execution.checkpointing.mode": "EXACTLY_ONCE",
        "execution.checkpointing.incremental": str(rocksdb and params["incremental"]).lower(),
        "execution.checkpointing.unaligned.enabled": str(params["mode"] == "unaligned").lower(),
        # Bundles hold so many rows that sources end long before the functions have seen the last of
        # them: without this, Flink's default, there would be no checkpoints meanwhile.
        "execution.checkpointing.checkpoints-after-tasks-finish": "true",
        **TUNED[params["variant"]],
    }
    if params["checkpoint_interval_ms"] is not None:
        told["execution.checkpointing.interval"] = f"{params['checkpoint_interval_ms']} ms"
    return told | params.get("settings", {})


def build(configuration, params, records, directory):
    env = StreamExecutionEnvironment.get_execution_environment(configuration)
    tables = StreamTableEnvironment.create(env)
    numbers = env.from_source(
        NumberSequenceSource(0, records - 1),
        WatermarkStrategy.no_watermarks(),
        "numbers",
        Types.LONG(),
    )
    tables.create_temporary_view("numbers", numbers)
    urls = tables.to_data_stream(tables.sql_query(URLS.format(keys=params["keys"])))
    (
        urls.map(site_of, output_type=Types.STRING())
        .key_by(lambda site: site, key_type=Types.STRING())
        .process(CountEveryRow(directory), output_type=Types.TUPLE([Types.STRING(), Types.LONG()]))
        .sink_to(discarding_sink())
    )
    return env


def discarding_sink():
    sinks = get_gateway().jvm.org.apache.flink.streaming.api.functions.sink.v2
    return Sink(sinks.DiscardingSink())


def checked(directory, records, keys):
    """How many rows were counted; both sums are right only if each was, once, in its state."""
    told = []
    for path in glob.glob(os.path.join(directory, "counted-*")):
        with open(path) as file:
            told.append(json.load(file))
    rows, total = sum(each[0] for each in told), sum(each[1] for each in told)
    counts = np.bincount(np.arange(records) * MULTIPLIER % keys, minlength=keys)
    expected = int((counts * (counts + 1) // 2).sum())
    if rows != records or total != expected:
        raise SystemExit(
            f"{rows} rows were counted of {records} made, and the running counts sum up to"
            f" {total}, not to {expected}"
        )
    return rows


def checkpoint_figures(snapshot):
    """Flink's own figures of its checkpoints."""
    history = list(snapshot.getHistory().getCheckpoints())
    completed = [each for each in history if each.getStatus().name() == "COMPLETED"]
    failed = sum(each.getStatus().name() == "FAILED" for each in history)
    if not completed:
        return None
    durations_ms = sorted(each.getEndToEndDuration() for each in completed)
    sizes = sorted(each.getCheckpointedSize() for each in completed)
    return {
        "completed": len(completed),
        "failed": failed,
        # Flink counts as failed, too, what it did not begin: not all tasks ran yet, or any more.
        "not_begun": snapshot.getCounts().getNumberOfFailedCheckpoints() - failed,
        "p50_ms": durations_ms[len(durations_ms) // 2],
        "p99_ms": durations_ms[int(len(durations_ms) * 0.99)],
        "max_ms": durations_ms[-1],
        "bytes_p50": sizes[len(sizes) // 2],
    }


def cpu_seconds():
    """Of this process and all that it has started."""
    children = {}
    spent = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        pid = int(path.split("/")[2])
        children.setdefault(int(fields[1]), []).append(pid)
        spent[pid] = sum(map(int, fields[11:15]))
    ticks, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        ticks += spent.get(pid, 0)
        pids += children.get(pid, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def place(params, name):
    path = os.path.join(os.path.abspath(params["directory"]), name)
    os.makedirs(path, exist_ok=True)
    return path


def tell(params, cluster, warm_up, measured):
    result = {
        "engine": "pyflink",
        "version": __version__,
        "java": cluster.jvm.System.getProperty("java.version"),
        "variant": params["variant"],
        "workload": "rows",
        "startup_s": round(warm_up["running_s"] - STARTED_S, 3),
        "records": measured["records"],
        "seconds": measured["seconds"],
        "records_per_second": round(measured["records"] / measured["seconds"]),
        "counted": measured["counted"],
        "cpu_seconds": round(measured["cpu_seconds"], 2),
        "warm_up": {"records": warm_up["records"], "seconds": warm_up["seconds"]},
        "checkpoints": measured["checkpoints"],
        "checkpoints_begun": measured["begun"],
        "latency_ms": None,
        "settings": cluster.settings,
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
