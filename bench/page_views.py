"""Page views through the whole engine: records per second and checkpoints, beside a bare loop.

    python bench/page_views.py [--records N] [--rounds N] [--only NAME] [--spark]

Two slots, a checkpoint every second to a local directory, results discarded:

    strings    clicks counted by app, 1,000 string keys
    integers   clicks counted by user, 1,000,000 int64 keys

Slots are plain processes, or with --spark a barrier stage of local Spark, built through the public
API. 'bare' is the same generator and a count per batch in numpy and pyarrow, in one process and
without engine, exchange, state or checkpoints; it is measured in every round. Figures are medians
over the rounds; the processor time is that of both slots for one record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.history import CheckpointCompleted, JobEnded, SlotsRunning
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.runtime.memory import keep_freed_memory
from stillframe.testing.processes import ProcessDeployment

SLOTS = 2
KEYS = {"strings": "app_id", "integers": "user_id"}
USERS = 1_000_000
BARE_SHARE = 10
"""The bare loop makes this fraction of the records: it has nothing to start."""


@dataclass(frozen=True)
class Run:
    records_per_second: float
    cpu_ns_per_record: float
    checkpoint_ms: list[float]


class Watch:
    """Times a query from its slots' start to its end, and the processor time of the slots."""

    def __init__(self) -> None:
        self._running_at = self._ended_at = self._cpu_seconds = 0.0
        self._checkpoint_ms: list[float] = []
        self._pids: tuple[int, ...] = ()
        self._done = threading.Event()

    def __call__(self, event: object) -> None:
        match event:
            case SlotsRunning():
                self._running_at, self._pids = time.monotonic(), event.pids
            case CheckpointCompleted():
                self._checkpoint_ms.append(event.duration_ms)
                self._cpu_seconds = sum(map(cpu_seconds, self._pids))
            case JobEnded():
                self._ended_at = time.monotonic()
                self._done.set()

    def result(self, records: int) -> Run:
        assert self._done.wait(10)
        assert self._running_at, "the slots ran before anybody listened"
        elapsed = self._ended_at - self._running_at
        return Run(records / elapsed, self._cpu_seconds / records * 1e9, self._checkpoint_ms)


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processors so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def on_processes(key: str, records: int, directory: str) -> Run:
    source = ClickSource(records=records)
    read = Node(Read(source), source.schema)
    counts = pa.schema([source.schema.field(key), ("count", pa.int64())])
    count = AggregateCall("count", None, "count", pa.int64())
    counted = Node(Aggregate((key,), (count,)), counts, (read,))
    plan = build_plan("page-views", [Node(Write(DiscardSink()), counts, (counted,))], SLOTS)
    config = job_config({"checkpointLocation": directory, "checkpointInterval": "1 second"})
    job = Job(plan, config, ProcessDeployment(), DriverAddress("127.0.0.1"), SystemClock())
    query, watch = Query(job), Watch()
    query.add_listener(watch)
    job.start()
    query.awaitTermination()
    return watch.result(records)


def on_spark(key: str, records: int, directory: str) -> Run:
    from pyspark.sql import SparkSession

    import stillframe

    builder = SparkSession.builder.master(f"local[{SLOTS + 2}]").appName("page-views")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    clicks = stillframe.on(spark).readStream.format("clicks").option("records", records).load()
    writer = clicks.groupBy(key).count().writeStream.outputMode("update").format("noop")
    watch = Watch()
    query = (
        writer.queryName("page-views")
        .option("parallelism", SLOTS)
        .option("checkpointLocation", directory)
        .option("checkpointInterval", "1 second")
        .start()
    )
    query.add_listener(watch)
    query.awaitTermination()
    return watch.result(records)


def bare(key: str, records: int) -> float:
    """Records per second of the generator and a count, and nothing else."""
    source = ClickSource(records=records)
    count = count_apps if key == "app_id" else count_users
    keep_freed_memory()  # as in a slot
    totals, rows_of = np.zeros(USERS, dtype=np.int64), {}
    began = time.monotonic()
    for start in range(0, records, source.batch_rows):
        stop = min(start + source.batch_rows, records)
        count(clicks_table(source, 0, start, stop, (key,)).column(key), totals, rows_of)
    assert totals.sum() == records
    return records / (time.monotonic() - began)


def count_apps(column: pa.Array, totals: np.ndarray, rows_of: dict[str, int]) -> None:
    encoded = column.dictionary_encode()
    rows = [rows_of.setdefault(app, len(rows_of)) for app in encoded.dictionary.to_pylist()]
    totals[rows] += np.bincount(encoded.indices.to_numpy(), minlength=len(rows))


def count_users(column: pa.Array, totals: np.ndarray, rows_of: dict[str, int]) -> None:
    np.add.at(totals, column.to_numpy(), 1)


def measure(name: str, key: str, records: int, rounds: int, run: Callable) -> None:
    runs, bares = [], []
    for _ in range(rounds):
        bares.append(bare(key, records // BARE_SHARE))
        with tempfile.TemporaryDirectory() as directory:
            runs.append(run(key, records, directory))
    rate = statistics.median(each.records_per_second for each in runs)
    cpu_ns = statistics.median(each.cpu_ns_per_record for each in runs)
    checkpoints = [ms for each in runs for ms in each.checkpoint_ms]
    bare_rate = statistics.median(bares)
    spread = ", ".join(f"{each.records_per_second / 1e6:.1f}" for each in runs)
    print(
        f"{name:9s} {run.__name__:12s} {rate / 1e6:6.2f} M records/s ({spread}),"
        f" {cpu_ns:5.0f} ns of processor each | {len(checkpoints)} checkpoints,"
        f" p50 {statistics.median(checkpoints):.0f} ms, max {max(checkpoints):.0f} ms |"
        f" {rate / bare_rate:.2f} x bare ({bare_rate / 1e6:.1f} M/s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(KEYS))
    parser.add_argument("--spark", action="store_true", help="on local Spark, by the public API")
    options = parser.parse_args()
    run = on_spark if options.spark else on_processes
    for name in [options.only] if options.only else KEYS:
        measure(name, KEYS[name], options.records, options.rounds, run)


if __name__ == "__main__":
    main()
