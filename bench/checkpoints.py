"""What checkpoints cost a whole job, on each state backend.

    python bench/checkpoints.py [--records N] [--rounds N] [--only NAME] [--backends fs,…]

Two slots (plain processes) count clicks by app (1,000 string keys) or by user (1,000,000 int64
keys), once without checkpoints and once with one every second, one after the other in every round.
Figures are medians over the rounds: records per second, what is left of the speed with checkpoints,
the synchronous part (of all subtasks of all checkpoints: median, 99th percentile, worst), how long
a checkpoint takes, and how many bytes one writes of how many it holds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import CheckpointCompleted, JobEnded, SlotsRunning
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.testing.processes import ProcessDeployment

SLOTS = 2
KEYS = {"strings": "app_id", "integers": "user_id"}


@dataclass
class Watch:
    """Times a query from its slots' start to its end, and gathers its checkpoints."""

    completed: list[CheckpointCompleted] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: object) -> None:
        match event:
            case SlotsRunning():
                self.began = time.monotonic()
            case CheckpointCompleted():
                self.completed.append(event)
            case JobEnded():
                self.ended = time.monotonic()
                self.done.set()


def counted(key: str, records: int, options: dict[str, str]) -> tuple[float, Watch]:
    """Records per second, and what was seen."""
    source = ClickSource(records=records)
    counts = pa.schema([source.schema.field(key), ("count", pa.int64())])
    count = AggregateCall("count", None, "count", pa.int64())
    clicks = Node(Read(source), source.schema)
    by_key = Node(Aggregate((key,), (count,)), counts, (clicks,))
    plan = build_plan("clicks", [Node(Write(DiscardSink()), counts, (by_key,))], SLOTS)
    config = job_config(options)
    job = Job(plan, config, ProcessDeployment(), DriverAddress("127.0.0.1"), SystemClock())
    query, watch = Query(job), Watch()
    query.add_listener(watch)
    job.start()
    query.awaitTermination()
    assert watch.done.wait(10)
    return records / (watch.ended - watch.began), watch


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(name: str, backend: str, records: int, rounds: int) -> None:
    with_checkpoints, without, watches = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            options = {"stateBackend": backend}
            without.append(counted(KEYS[name], records, options)[0])
            options |= {"checkpointLocation": directory, "checkpointInterval": "1 second"}
            rate, watch = counted(KEYS[name], records, options)
            with_checkpoints.append(rate)
            watches.append(watch)
    # The last one of a run comes when all records have been read; a short run has no other.
    completed = [each for watch in watches for each in watch.completed[:-1] or watch.completed]
    sync = [timings.sync_ms for each in completed for timings in each.timings]
    durations = [each.duration_ms for each in completed]
    written = [sum(timings.bytes_written for timings in each.timings) for each in completed]
    share = statistics.median(a / b for a, b in zip(with_checkpoints, without, strict=True))
    print(
        f"{name:9s} {backend:8s} {statistics.median(with_checkpoints) / 1e6:6.2f} M records/s,"
        f" {share:.3f} of that without checkpoints | {len(completed)} checkpoints:"
        f" sync p50 {percentile(sync, 0.5):.2f}, p99 {percentile(sync, 0.99):.2f},"
        f" max {max(sync):.2f} ms; whole p50 {percentile(durations, 0.5):.0f},"
        f" max {max(durations):.0f} ms; writes {statistics.median(written) / 1e6:.2f} of"
        f" {statistics.median(each.state_bytes for each in completed) / 1e6:.2f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(KEYS))
    parser.add_argument("--backends", default="fs,rocksdb")
    options = parser.parse_args()
    for name in [options.only] if options.only else KEYS:
        for backend in options.backends.split(","):
            measure(name, backend, options.records, options.rounds)


if __name__ == "__main__":
    main()
