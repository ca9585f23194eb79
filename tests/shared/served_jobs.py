"""A driver with small jobs on plain processes, served over HTTP, for tests that ask it.

The jobs count what they have read and then stand still, so that they cost little while tests ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.history import Event, SlotsRunning
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.rest.server import RestServer
from stillframe.testing.processes import ProcessDeployment
from stillframe.testing.sources import Die, Gate, Item, ScriptedSource, Wait

WAIT_SECONDS_MAX = 120.0
TOKEN = "a-token-for-these-tests"
CLICKS = pa.schema([("id", pa.int64()), ("app_id", pa.string())])
COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])


class ServingDriver:
    """Starts jobs in this process and serves them; all files are below one directory."""

    def __init__(self, home: Path, request_seconds_max: float = 10.0) -> None:
        self.home = home
        self.location = str(home / "chk")
        self.server = RestServer("127.0.0.1", 0, TOKEN, request_seconds_max=request_seconds_max)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.jobs: list[Job] = []

    def plan(self, name: str, parallelism: int = 2, fault: Item | None = None) -> Plan:
        ids = range(100)
        batch = pa.record_batch([list(ids), [f"app-{i % 7}" for i in ids]], schema=CLICKS)
        until = Wait(self._goes_on(name))
        script = (batch, until, batch) if fault is None else (batch, fault, until, batch)
        source = ScriptedSource(CLICKS, (script, (batch, until, batch)))
        read = Node(Read(source), CLICKS, given_uid="clicks")
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS, (read,), given_uid="count")
        write = Node(Write(DiscardSink()), COUNTS, (counted,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)

    def start(
        self,
        name: str = "counts",
        fault: Item | None = None,
        **options: str | None,
    ) -> Query:
        """Returns when its slots run; if there is a fault, after it."""
        query, begin = self.prepare(name, fault, **options)
        awaited = 1 if fault is None else 2
        running = threading.Event()

        def note(event: Event) -> None:
            # A fault may come before all slots of the first attempt do.
            if isinstance(event, SlotsRunning) and event.attempt >= awaited:
                running.set()

        query.add_listener(note)
        begin()
        assert running.wait(WAIT_SECONDS_MAX), [str(event) for event in query.events]
        return query

    def prepare(
        self, name: str, fault: Item | None = None, **options: str | None
    ) -> tuple[Query, Callable[[], None]]:
        """A query that the server knows, and how its job begins; None takes an option away."""
        usual: dict[str, str | None] = {
            "checkpointLocation": self.location,
            "checkpointInterval": "1 hour",
            "restartDelay": "20 ms",
            "restartAttempts": "10",
        }
        given = {key: value for key, value in (usual | options).items() if value is not None}
        job = Job(
            self.plan(name, fault=fault),
            job_config(given),
            ProcessDeployment(),
            DriverAddress("127.0.0.1"),
            SystemClock(),
            lambda parallelism: self.plan(name, parallelism, fault),
        )
        self.jobs.append(job)
        query = Query(job)
        self.server.add(query)
        return query, job.start

    def let_finish(self, query: Query) -> None:
        self._goes_on(query.name).open()
        query.awaitTermination(WAIT_SECONDS_MAX)

    def die_once(self) -> Die:
        return Die(Gate(str(self.home / "died")))

    def close(self) -> None:
        for job in self.jobs:
            if job.is_alive():
                job.request_stop()
                job.join(WAIT_SECONDS_MAX)
        self.server.withdraw(WAIT_SECONDS_MAX)
        self.server.close()

    def _goes_on(self, name: str) -> Gate:
        return Gate(str(self.home / f"{name}-goes-on"))
