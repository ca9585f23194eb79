"""That a checkpoint is complete reaches everybody: queues are acknowledged, functions are told."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pyarrow.parquet as pq
import pytest
from disk_queue import QueueSource
from user_code_kinds import Raises, plan_of, said

from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted, SlotsRunning
from stillframe.graph.logical import Read
from stillframe.testing.sources import Wait

# --- a queue that is acknowledged only by completed checkpoints ---


def check_each_is_there_once(page_views, source):
    truth = range(source.queues * source.messages)
    ids = Counter(pq.read_table(page_views.home / "clicks")["id"].to_pylist())
    assert ids == Counter(truth)


@pytest.fixture(params=[True, False], ids=["blocking reader", "polled reader"])
def source(page_views, request):
    filled = QueueSource(str(page_views.home / "queues"), 3, 1_000, request.param)
    filled.fill()
    return filled


def test_after_kills_nothing_was_acknowledged_too_early_and_at_the_end_all_is(
    page_views, source, until
):
    running = page_views.start(page_views.plan(source), checkpointInterval="50 ms")
    for attempt in (1, 2, 3):
        running.wait(SlotsRunning, attempt=attempt)
        seen = page_views.clicks_visible()
        until(lambda seen=seen: page_views.clicks_visible() > seen)
        running.kill(slot=attempt % 2, attempt=attempt)
    running.finish()

    check_each_is_there_once(page_views, source)
    assert source.left() == []


def test_a_rescale_and_several_checkpoints_in_flight_acknowledge_what_is_complete(
    page_views, source, until
):
    plan = partial(page_views.plan, source)
    options = {"checkpointInterval": "20 ms", "maxConcurrentCheckpoints": "3"}
    running = page_views.start(plan(2), plan, **options)
    for parallelism in (3, 1):
        seen = page_views.clicks_visible()
        until(lambda seen=seen: page_views.clicks_visible() > seen)
        running.query.rescale(parallelism)
    running.kill(slot=0, attempt=len(running.attempts()))
    running.finish()

    check_each_is_there_once(page_views, source)
    assert source.left() == []


# --- the user's functions ---

FUNCTIONS = ["KeyProcessor", "StatefulProcessor", "KeyedFunction", "StreamFunction"]


@dataclass(frozen=True)
class Listens:
    """Writes down what a function hears; goes on as any other trouble does, without any."""

    home: str

    def __call__(self, ids):
        """No trouble at records."""

    def hears(self, what, checkpoint_id):
        with open(os.path.join(self.home, f"heard-{os.getpid()}"), "a") as heard:
            heard.write(f"{what} {checkpoint_id}\n")


@dataclass(frozen=True)
class RaisesWhenTold(Raises):
    """Raises when it is told of a checkpoint, and not at a record."""

    def __call__(self, ids):
        """No trouble at records."""

    def hears(self, what, checkpoint_id):
        if what == "complete":
            super().__call__([437])


def waiting(plan, gate):
    """The same job, whose source waits in the middle."""

    def with_gate(planned):
        if not isinstance(planned.operator, Read):
            return planned
        source = planned.operator.source
        scripts = tuple((*script[:2], Wait(gate), *script[2:]) for script in source.scripts)
        operator = replace(planned.operator, source=replace(source, scripts=scripts))
        return replace(planned, operator=operator)

    tasks = [replace(task, operators=tuple(map(with_gate, task.operators))) for task in plan.tasks]
    return replace(plan, tasks=tuple(tasks))


def heard_by(home, pid):
    """What the subtask in this process heard, in order."""
    lines = (home / f"heard-{pid}").read_text().splitlines()
    return [(what, int(number)) for what, number in map(str.split, lines)]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_hears_of_each_checkpoint_that_it_was_part_of_and_of_no_other(
    page_views, kind, until
):
    gate = page_views.gate("second half")
    plan = waiting(plan_of(kind, page_views.home, Listens(str(page_views.home))), gate)
    running = page_views.start(plan, checkpointInterval="30 ms")
    first = running.wait(SlotsRunning, attempt=1).pids
    running.wait(CheckpointCompleted, number=3)
    running.kill(slot=0)
    second = running.wait(SlotsRunning, attempt=2).pids
    running.next_checkpoint()
    gate.open()
    running.finish()

    restored = running.attempts()[1].restored_from
    completed = {
        each.checkpoint_id for each in running.told if isinstance(each, CheckpointCompleted)
    }
    for pid in (*first, *second):
        heard = heard_by(page_views.home, pid)
        told = [number for what, number in heard if what == "complete"]
        assert told == sorted(set(told))
        assert set(told) <= completed
        if pid in second:
            assert heard[0] == ("complete", restored)
            told = told[1:]
            assert told[-1] == max(completed), "the last is told before the end"
        for number in told:
            assert heard.index(("snapshot", number)) < heard.index(("complete", number))
    assert said(page_views.home) == Counter(range(1_000))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_a_function_raises_when_it_is_told_is_an_error_of_the_users_code(page_views, kind):
    once = page_views.gate("once")
    trouble = RaisesWhenTold(ConnectionError, once)
    running = page_views.start(plan_of(kind, page_views.home, trouble))
    failed = running.wait(AttemptFailed)
    running.finish()

    assert "raised ConnectionError" in failed.reason
    assert failed.blame.operator == "code"
    assert "test_completion.py" in failed.blame.traceback
    assert said(page_views.home) == Counter(range(1_000))
