"""A driver with small jobs on plain processes, and a client that asks it over HTTP.

The jobs count what they have read and then stand still, so that they cost little while tests ask.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

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


@dataclass(frozen=True)
class Said:
    """An answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> str:
        """The one sentence."""
        (sentence,) = self.json["errors"]
        return str(sentence)


class Client:
    """Asks one server; a new connection each time."""

    def __init__(self, server: RestServer) -> None:
        self.server = server

    def ask(
        self, method: str, path: str, body: Any = None, token: str | None = None, **headers: str
    ) -> Said:
        """`body`: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return Said(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """What a question that has an answer is answered with."""
        said = self.ask("GET", path)
        assert said.status == 200, said.text
        return said.json

    def change(self, method: str, path: str, body: Any = None) -> Said:
        """With the token."""
        return self.ask(method, path, body, token=TOKEN)

    def outcome(self, path: str) -> Any:
        """What became of an operation, when it is known."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while (told := self.get(path))["status"]["id"] == "IN_PROGRESS":
            assert time.monotonic() < deadline, f"{path} is still under way"
            threading.Event().wait(0.02)
        assert told["status"] == {"id": "COMPLETED"}
        return told["operation"]


class Driver:
    """Starts jobs and serves them; all files are below one directory."""

    def __init__(self, home: Path, request_seconds_max: float = 10.0) -> None:
        self.home = home
        self.location = str(home / "chk")
        self.server = RestServer("127.0.0.1", 0, TOKEN, request_seconds_max=request_seconds_max)
        self.client = Client(self.server)
        self.jobs: list[Job] = []

    def plan(self, name: str, parallelism: int = 2, fault: Item | None = None) -> Plan:
        ids = range(100)
        batch = pa.record_batch([list(ids), [f"app-{i % 7}" for i in ids]], schema=CLICKS)
        until = Wait(Gate(str(self.home / f"{name}-goes-on")))
        script = (batch, until, batch) if fault is None else (batch, fault, until, batch)
        source = ScriptedSource(CLICKS, (script, (batch, until, batch)))
        read = Node(Read(source), CLICKS, given_uid="clicks")
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS, (read,), given_uid="count")
        write = Node(Write(DiscardSink()), COUNTS, (counted,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)

    def start(
        self, name: str = "counts", fault: Item | None = None, **options: str | None
    ) -> Query:
        """Returns when its slots run."""
        query, begin = self.prepare(name, fault, **options)
        running = threading.Event()

        def note(event: Event) -> None:
            if isinstance(event, SlotsRunning):
                running.set()

        query.add_listener(note)
        begin()
        assert running.wait(WAIT_SECONDS_MAX), [str(event) for event in query.events]
        return query

    def prepare(
        self, name: str, fault: Item | None = None, **options: str | None
    ) -> tuple[Query, Callable[[], None]]:
        """A query that the server knows, and how its job begins."""
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
        Gate(str(self.home / f"{query.name}-goes-on")).open()
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


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """One of a test's own, to which anything may be done."""
    made = Driver(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Query]]:
    """A job that has failed once, recovered and taken a checkpoint and a savepoint; for questions
    that change nothing."""
    home = tmp_path_factory.mktemp("quiet")
    made = Driver(home)
    query = made.start(fault=made.die_once())
    _until(lambda: query.summary.attempts == 2 and bool(query.slot_pids))
    query.checkpoint()
    query.savepoint(str(home / "savepoint"))
    yield made, query
    made.close()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One whose job was stopped."""
    made = Driver(tmp_path_factory.mktemp("ended"))
    made.start().stop()
    yield made
    made.close()


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[Driver]:
    """One that waits a second for a request, and no longer."""
    made = Driver(tmp_path, request_seconds_max=1.0)
    yield made
    made.close()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    return _until


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.01)
