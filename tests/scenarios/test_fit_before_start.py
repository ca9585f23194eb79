"""Whether a job fits the snapshot it begins with: told before anything runs, all of it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stillframe import KeyProcessor, KeyStates
from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.history import SlotsRunning
from stillframe.errors import JobFailed, StartRefused
from stillframe.graph.logical import Aggregate, Node, Read, Transform, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.runtime.key_processing import KeyProgram

SAID = pa.schema([("app_id", pa.string())])


class Before(KeyProcessor):
    def open(self, states: KeyStates) -> None:
        self.kept = states.value("kept", "n int")
        self.changed = states.value("changed", "n string")
        self.wider = states.value("wider", "n int")

    def process(self, key: Any, rows: Any) -> Any:
        for row in rows:
            self.kept.update((row.id,))
            self.changed.update((str(row.id),))
            self.wider.update((row.id,))
        yield (key.app_id,)


class Evolved(Before):
    """What older rows can be made to fit."""

    def open(self, states: KeyStates) -> None:
        self.kept = states.value("kept", "n int, more string")
        self.changed = states.value("changed", "n string")
        self.wider = states.value("wider", "n long")

    def process(self, key: Any, rows: Any) -> Any:
        yield (key.app_id,)


class Broken(Before):
    """A state of another kind, and one whose type has changed."""

    def open(self, states: KeyStates) -> None:
        self.kept = states.list("kept", "n int")
        self.changed = states.value("changed", "n double")
        self.wider = states.value("wider", "n long")


class NotHere(Before):
    def open(self, states: KeyStates) -> None:
        raise OSError("there is no such device here")


def plan_of(
    source, program=Before, calls=("count",), keys=("app_id",), max_parallelism=128
) -> Plan:
    read = Node(Read(source), source.schema, given_uid="clicks")
    made = tuple(
        AggregateCall(name, None if name == "count" else "id", name, pa.int64()) for name in calls
    )
    counts = pa.schema(
        [source.schema.field(key) for key in keys] + [(n, pa.int64()) for n in calls]
    )
    counted = Node(Aggregate(keys, made), counts, (read,), given_uid="count")
    transform = Transform(KeyProgram(program, "Program", SAID), "Program", ("app_id",))
    told = Node(transform, SAID, (read,), given_uid="program")
    sinks = [
        Node(Write(DiscardSink()), counts, (counted,), given_uid="write-counts"),
        Node(Write(DiscardSink()), SAID, (told,), given_uid="write-told"),
    ]
    return build_plan("page-views", sinks, 2, max_parallelism)


@pytest.fixture(params=["fs", "rocksdb"])
def stopped(page_views, request):
    """Starts the job again, with another plan, after it has been stopped with a checkpoint."""
    source = page_views.halves(page_views.gate("never"))
    options = {"stateBackend": request.param, "checkpointInterval": "1 hour"}
    first = page_views.start(plan_of(source), **options)
    first.wait_for_records(2_000)
    first.query.checkpoint()
    first.query.stop()
    return lambda **changed: page_views.start(plan_of(source, **changed), **options)


def files(page_views) -> dict[Path, bytes]:
    job = Path(page_views.location) / "page-views"
    return {f: f.read_bytes() for place in ("log/*", "chk-*/*") for f in job.glob(place)}


def refusal_of(running) -> list[str]:
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)
    assert isinstance(raised.value.__cause__, StartRefused)
    return str(raised.value).splitlines()


def test_all_that_does_not_fit_is_told_in_one_answer_and_nothing_has_run(page_views, stopped):
    before = files(page_views)

    running = stopped(program=Broken, calls=("count", "sum"), keys=("id",), max_parallelism=64)
    first, *lines = refusal_of(running)

    assert "does not fit this job, for 4 reasons:" in first
    told = "\n".join(lines)
    assert "- it has 128 key groups and the job 64" in told
    assert "- operator count: the state of operator 'count' has the columns app_id string" in told
    assert "- operator program: state 'kept' is a value in the checkpoint" in told
    assert "- operator program: state 'changed' has the schema" in told
    assert running.attempts() == []
    assert files(page_views) == before


def test_state_that_can_be_made_to_fit_is_no_mismatch(stopped):
    running = stopped(program=Evolved)

    running.wait(SlotsRunning)


def test_a_program_that_cannot_be_opened_on_the_driver_is_left_to_the_slots(stopped):
    [sentence] = refusal_of_failure(stopped(program=NotHere))

    assert "there is no such device here" in sentence
    assert "does not fit" not in sentence


def refusal_of_failure(running) -> list[str]:
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)
    assert running.attempts(), "the slots were asked"
    return str(raised.value).splitlines()
