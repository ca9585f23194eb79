"""A driver with small jobs on plain processes, and a client that asks it over HTTP."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from served_jobs import TOKEN, WAIT_SECONDS_MAX, ServingDriver
from waiting import wait_until

from stillframe.coordinator.query import Query
from stillframe.rest.server import RestServer


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


class Driver(ServingDriver):
    """One with a client that asks it."""

    def __init__(self, home: Path, request_seconds_max: float = 10.0) -> None:
        super().__init__(home, request_seconds_max)
        self.client = Client(self.server)


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
    wait_until(lambda: query.summary.attempts == 2 and bool(query.slot_pids))
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


@pytest.fixture(scope="module", params=["fs", "rocksdb"])
def counting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, Query, list[int]]]:
    """A job that runs, with two checkpoints between which nothing has changed."""
    made = Driver(tmp_path_factory.mktemp(request.param))
    query = made.start(stateBackend=request.param, checkpointsRetained="3")
    wait_until(lambda: query.summary.records_in == 200)  # all there is to read for now
    checkpoints = [query.checkpoint(), query.checkpoint()]
    yield made, query, [number for number in checkpoints if number is not None]
    assert query.isActive
    made.close()
