"""One night of a job on plain processes: everything outside fails at some time, nobody looks.

Users come as lines of JSON, three of which are no records. A function asks a service about each,
which is away for ten seconds and then hangs once. Each user is said when event time has passed the
time of its record, and the place to which that is written is away for half a minute. In the middle
of a burst of such timers the job is stopped with a savepoint, and goes on from it with another
backend and another parallelism. The rest of the burst could fire behind the savepoint's barrier,
before the last checkpoint is taken: nothing of it may come out with that.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
)
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.json_lines import JsonLinesSource
from stillframe.graph.expressions import Call, Column
from stillframe.graph.logical import Filter, MapInArrow, Node, Process, Read, WithWatermark, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import Attempt, Epoch, OperatorUid
from stillframe.runtime.row_functions import RowMap
from stillframe.testing.functions import GatedAlarm
from stillframe.testing.sinks import GatedSink
from stillframe.testing.sources import Gate

SCHEMA = pa.schema([("user", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
FIRED = pa.schema([("user", pa.int64()), ("time", pa.timestamp("us", "UTC"))])
USERS, FILES = 20_000, 4
NIGHT_SECONDS_MAX = 300.0
BROKEN = [b'{"user": 1, "at": "20', b"null", b'{"user": 2, "at": "\xff\xfe"}']
"""A line that was torn, one that is no object, and one whose text is none."""


@dataclass(frozen=True)
class Away:
    """Something outside that cannot be reached for a while, from the first try on."""

    name: str
    tried: Gate
    seconds: float

    def ask(self) -> None:
        if not self.tried.is_open:
            self.tried.open()
        if time.time() - os.path.getmtime(self.tried.path) < self.seconds:
            raise ConnectionError(f"the {self.name} does not answer")


@dataclass(frozen=True)
class AskService:
    """The function of a user: calls a service about some users."""

    service: Away
    hung: Gate

    def __call__(self, row: Any) -> Any:
        if row.user == 7_000:
            self.service.ask()
            if not self.hung.is_open:
                self.hung.open()
                threading.Event().wait()
        return row


@dataclass(frozen=True)
class AwaySink(Sink):
    """Where nothing can be committed while the store is away."""

    sink: Sink
    store: Away

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return self.sink.open_writer(context)

    def open_committer(self, context: CommitterContext) -> Committer:
        return _AwayCommitter(self.sink.open_committer(context), self.store)

    def describe(self) -> str:
        return self.sink.describe()


class _AwayCommitter(Committer):
    def __init__(self, committer: Committer, store: Away) -> None:
        self._committer = committer
        self._store = store

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        self._store.ask()
        self._committer.commit(epoch, prepared)

    def forget(self, committables: Sequence[Committable]) -> None:
        self._committer.forget(committables)

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        self._committer.sweep(job, uid, older_than, keep)

    def close(self) -> None:
        self._committer.close()


@dataclass(frozen=True)
class BehindTheBarrier(Gate):
    """Open, but for the time from the savepoint's first timers until somebody opens it."""

    savepoint: str

    @property
    def is_open(self) -> bool:
        return os.path.exists(self.path) or not timers_in(self.savepoint)


def timers_in(savepoint: str) -> list[Path]:
    """What the subtasks of the alarm have written into it: their barriers have passed."""
    return list(Path(savepoint).glob("shared/*/alarms-*"))


def write_input(page_views: Any) -> str:
    """Each user at the microsecond of its number, in four files; the broken lines among them."""
    home = page_views.home / "users"
    home.mkdir()
    for file in range(FILES):
        lines = [
            json.dumps({"user": user, "at": f"1970-01-01T00:00:00.{user:06}Z"}).encode()
            for user in range(file, USERS, FILES)
        ]
        for broken in BROKEN if file == 0 else []:
            lines.insert(len(lines) // 2, broken)
        (home / f"part-{file}.json").write_bytes(b"\n".join(lines) + b"\n")
    return str(home)


def plan_of(page_views: Any, home: str, burst: Gate, prepared: Gate, parallelism: int) -> Plan:
    service = Away("service", page_views.gate("service"), seconds=10.0)
    store = Away("store", page_views.gate("store"), seconds=30.0)
    ask = RowMap(AskService(service, page_views.gate("hung")), SCHEMA)
    is_record = Call("is_not_null", (Column("user", pa.int64()),), pa.bool_())
    alarm = partial(GatedAlarm, "at", USERS // 2, burst)
    read = Node(Read(JsonLinesSource(home, SCHEMA)), SCHEMA, given_uid="users")
    records = Node(Filter(is_record), SCHEMA, (read,))
    asked = Node(MapInArrow(ask, "AskService"), SCHEMA, (records,))
    timed = Node(WithWatermark("at", 0), SCHEMA, (asked,), given_uid="time")
    alarms = Node(Process(alarm, "alarm", ("user",)), FIRED, (timed,), given_uid="alarms")
    files = GatedSink(FileSink(str(page_views.home / "fired"), "parquet", FIRED), prepared)
    sink = AwaySink(files, store)
    write = Node(Write(sink), FIRED, (alarms,), given_uid="fired")
    return build_plan("night", [write], parallelism)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_of_troubles_ends_with_exact_output_and_every_trouble_told(page_views, until):
    savepoint = str(page_views.home / "savepoint")
    burst = page_views.gate("burst")
    prepared = BehindTheBarrier(str(page_views.home / "prepared"), savepoint)
    home = write_input(page_views)
    options = {"restartDelay": None, "restartAttempts": None, "stuckTimeout": "5 seconds"}
    night = page_views.start(plan_of(page_views, home, burst, prepared, 2), **options)

    until_some_have_fired(page_views, night)
    stopping = threading.Thread(target=lambda: night.query.stop(savepoint=savepoint))
    stopping.start()
    until(lambda: len(timers_in(savepoint)) == 2)
    burst.open()  # behind the savepoint's barrier the rest is free to fire
    prepared.open()
    stopping.join(120)
    at_the_stop = fired(page_views)
    page_views.location = str(page_views.home / "elsewhere")
    morning = page_views.start(
        plan_of(page_views, home, burst, prepared, 3),
        stateBackend="rocksdb",
        restoreFrom=savepoint,
        **options,
    )
    morning.finish()

    assert set(at_the_stop) <= set(range(USERS // 2)), "the rest of the burst had not fired"
    assert fired(page_views) == Counter(range(USERS))
    reasons = [failure.reason for failure in night.query.failures]
    for trouble in (
        r"function AskService raised ConnectionError: the service does not answer",
        r"function AskService .*test_night\.py",
        r"sink parquet .* raised ConnectionError: the store does not answer",
    ):
        assert any(re.search(trouble, reason) for reason in reasons), f"{trouble}: {reasons}"
    assert night.query.summary.records_malformed >= len(BROKEN)


def fired(page_views: Any) -> Counter[int]:
    files = sorted((page_views.home / "fired").glob("*.parquet"))
    return Counter(user for file in files for user in pq.read_table(file)["user"].to_pylist())


def until_some_have_fired(page_views: Any, night: Any) -> None:
    deadline = time.monotonic() + NIGHT_SECONDS_MAX
    while not fired(page_views):
        assert night.query.isActive, night.query.exception()
        assert time.monotonic() < deadline, "\n".join(map(str, night.told))
        threading.Event().wait(0.05)
