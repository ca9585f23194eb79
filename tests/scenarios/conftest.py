"""The page-view job on plain processes: clicks pass through to one sink, counts go to another.

Scenarios wait for events, never for time; every wait has a limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event, SlotsRunning
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.launch import Deployment
from stillframe.graph.logical import Aggregate, MapInArrow, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.runtime.unfit_states import unfit_states
from stillframe.testing.processes import ProcessDeployment
from stillframe.testing.sources import Gate, Item, ScriptedSource, Wait

WAIT_SECONDS_MAX = 120.0
SCHEMA = pa.schema([("id", pa.int64()), ("app_id", pa.string())])
COUNTS_SCHEMA = pa.schema([("app_id", pa.string()), ("count", pa.int64())])


class RunningQuery:
    """A started job and everything it has told."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.query = Query(job)
        self.told: list[Event] = []
        self._news = threading.Condition()
        self.query.add_listener(self._on_event)
        job.start()

    def _on_event(self, event: Event) -> None:
        with self._news:
            self.told.append(event)
            self._news.notify_all()

    def wait(self, kind: type[Event], number: int = 1, **fields: Any) -> Any:
        """The event of this kind and with these fields that came as the so-manieth."""

        def found() -> list[Event]:
            return [
                event
                for event in self.told
                if isinstance(event, kind)
                and all(getattr(event, name) == value for name, value in fields.items())
            ]

        with self._news:
            came = self._news.wait_for(
                lambda: len(found()) >= number or not self.job.is_alive(), WAIT_SECONDS_MAX
            )
            story = "\n".join(str(event) for event in self.told)
            assert came, f"no {kind.__name__} {fields} within {WAIT_SECONDS_MAX} s:\n{story}"
            assert len(found()) >= number, f"the job ended without {kind.__name__}:\n{story}"
            return found()[number - 1]

    def next_checkpoint(self) -> CheckpointCompleted:
        """One that was triggered after this call."""
        seen = len([event for event in self.told if isinstance(event, CheckpointCompleted)])
        completed: CheckpointCompleted = self.wait(CheckpointCompleted, number=seen + 2)
        return completed

    def wait_for_records(self, records: int) -> None:
        """Until the sources have read this many in the running attempt."""
        wait_until(lambda: self.job.history.records_of_attempt().records_in >= records)

    def kill(self, slot: int, attempt: int = 1) -> None:
        running: SlotsRunning = self.wait(SlotsRunning, attempt=attempt)
        os.kill(running.pids[slot], signal.SIGKILL)

    def kill_any(self, random: Random) -> None:
        """One of the slots that run now, if any do, at a drawn moment."""
        threading.Event().wait(random.random() * 0.3)
        if pids := self.query.slot_pids:
            with suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)

    def finish(self) -> None:
        """Wait for a good end."""
        assert self.query.awaitTermination(WAIT_SECONDS_MAX), "\n".join(map(str, self.told))
        assert self.query.summary.outcome == "finished"

    def attempts(self) -> list[AttemptStarted]:
        return [event for event in self.told if isinstance(event, AttemptStarted)]


def wait_until(condition: Callable[[], bool]) -> None:
    """Also for drivers that tests start: they import this file without what tests share."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.01)


class PageViews:
    """Builds, starts and checks the job; all its files are below one directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.location = str(home / "chk")
        self.deployment: Deployment = ProcessDeployment()
        self.started: list[RunningQuery] = []

    # --- what it reads ---

    def gate(self, name: str) -> Gate:
        return Gate(str(self.home / name))

    def batch(self, first: int, rows: int = 100) -> pa.RecordBatch:
        ids = range(first, first + rows)
        return pa.record_batch([list(ids), [f"app-{i % 17}" for i in ids]], schema=SCHEMA)

    def batches(self, first: int, count: int, rows: int = 100) -> list[Item]:
        return [self.batch(first + i * rows, rows) for i in range(count)]

    def halves(self, gate: Gate, splits: int = 2) -> ScriptedSource:
        """Per split 1,000 records, a pause until the gate is open, 1,000 more."""
        scripts = [
            (*self.batches(s * 10_000, 10), Wait(gate), *self.batches(s * 10_000 + 1_000, 10))
            for s in range(splits)
        ]
        return ScriptedSource(SCHEMA, tuple(scripts))

    def three_parts(self, first: Gate, second: Gate, splits: int = 2) -> ScriptedSource:
        """Per split 500 records, a pause, 500 more, another pause, 1,000 more."""
        scripts = [
            (
                *self.batches(s * 10_000, 5),
                Wait(first),
                *self.batches(s * 10_000 + 500, 5),
                Wait(second),
                *self.batches(s * 10_000 + 1_000, 10),
            )
            for s in range(splits)
        ]
        return ScriptedSource(SCHEMA, tuple(scripts))

    # --- the job ---

    def plan(
        self,
        source: Source,
        parallelism: int = 2,
        around_clicks: Callable[[Sink], Sink] = lambda sink: sink,
        function: Callable[..., Any] = iter,
    ) -> Plan:
        read = Node(Read(source), source.schema, given_uid="clicks")
        mapped = Node(MapInArrow(function, "tidy"), source.schema, (read,))
        clicks = around_clicks(FileSink(str(self.home / "clicks"), "parquet", source.schema))
        write = Node(Write(clicks), source.schema, (mapped,), given_uid="write-clicks")
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS_SCHEMA, (read,), given_uid="count")
        counts = FileSink(str(self.home / "counts"), "parquet", COUNTS_SCHEMA)
        write_counts = Node(Write(counts), COUNTS_SCHEMA, (counted,), given_uid="write-counts")
        return build_plan("page-views", [write, write_counts], parallelism)

    def start(
        self,
        plan: Plan,
        replan: Callable[[int], Plan] | None = None,
        *,
        available_now: bool = False,
        **options: str | None,
    ) -> RunningQuery:
        """Start the job with these options; None takes one of the usual ones away."""
        usual = {
            "checkpointLocation": self.location,
            "checkpointInterval": "200 ms",
            "restartDelay": "20 ms",
            "restartAttempts": "10",
        }
        given: dict[str, str | None] = {**usual, **options}
        settings = {name: value for name, value in given.items() if value is not None}
        job = Job(
            plan,
            replace(job_config(settings), available_now=available_now),
            self.deployment,
            DriverAddress("127.0.0.1"),
            SystemClock(),
            replan,
            unfit_states=unfit_states,
        )
        running = RunningQuery(job)
        self.started.append(running)
        return running

    def stop_all(self) -> None:
        for running in self.started:
            if running.job.is_alive():
                running.query.stop()

    # --- what came out ---

    def check_exactly_once(self, source: Source) -> None:
        """Every click is there once, every app's last count is right, no count was told twice."""
        truth = _records_of(source)
        clicks = pq.read_table(self.home / "clicks")
        assert Counter(clicks["id"].to_pylist()) == Counter(truth["id"].to_pylist())
        counts = pq.read_table(self.home / "counts").to_pylist()
        last: dict[str, int] = {}
        for row in counts:
            last[row["app_id"]] = max(row["count"], last.get(row["app_id"], 0))
        assert last == dict(Counter(truth["app_id"].to_pylist()))
        told = Counter((row["app_id"], row["count"]) for row in counts)
        assert max(told.values()) == 1, "a count was told twice"

    def clicks_visible(self) -> int:
        return pq.read_table(self.home / "clicks").num_rows if self.published("clicks") else 0

    def published(self, sink: str) -> Sequence[Path]:
        return list((self.home / sink).glob("*.parquet"))


def _records_of(source: Source) -> pa.Table:
    if isinstance(source, ClickSource):
        assert source.records is not None
        share = -(-source.records // source.partitions)
        parts = [clicks_table(source, p, 0, share) for p in range(source.partitions)]
        table = pa.Table.from_batches(parts)
        return table.filter(pa.compute.less(table["id"], source.records))
    assert isinstance(source, ScriptedSource)
    batches = [
        item for script in source.scripts for item in script if isinstance(item, pa.RecordBatch)
    ]
    return pa.Table.from_batches(batches)


@pytest.fixture
def page_views(tmp_path: Path) -> Iterator[PageViews]:
    views = PageViews(tmp_path)
    yield views
    views.stop_all()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few hundred kilobytes."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
