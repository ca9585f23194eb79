"""Slots die; every record still comes out once and every count is right."""

import os
import signal
import uuid
from pathlib import Path

import pytest
from greedy_functions import GreedyAt

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCompleted,
    SlotsRunning,
)
from stillframe.graph.launch import Deployment
from stillframe.testing.processes import ProcessDeployment
from stillframe.testing.sinks import GatedSink
from stillframe.testing.sources import Die, ScriptedSource, Wait


def test_without_a_failure_every_record_comes_out_once(page_views):
    source = ClickSource(records=20_000, records_per_second=20_000)

    running = page_views.start(page_views.plan(source))
    running.finish()

    page_views.check_exactly_once(source)
    summary = running.query.summary
    assert (summary.attempts, summary.restarts, summary.records_in) == (1, 0, 20_000)
    assert summary.checkpoints_completed >= 1


def test_a_slot_killed_while_records_flow_loses_and_doubles_nothing(page_views):
    source = ClickSource(records=30_000, records_per_second=15_000)

    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)
    running.kill(slot=1)
    running.finish()

    page_views.check_exactly_once(source)
    assert [each.attempt for each in running.attempts()] == [1, 2]
    failed = running.wait(AttemptFailed)
    assert failed.reason.startswith("slot 1 (pid ")


def test_a_kill_between_batches_that_were_combined_on_their_way_loses_and_doubles_nothing(
    page_views,
):
    gate = page_views.gate("second-half")
    halves = [
        (
            *page_views.batches(first, 3, rows=5_000),
            Wait(gate),
            *page_views.batches(first + 15_000, 3, rows=5_000),
        )
        for first in (0, 100_000)
    ]
    source = ScriptedSource(page_views.batch(0).schema, tuple(halves))

    running = page_views.start(page_views.plan(source))
    running.wait_for_records(30_000)
    running.next_checkpoint()
    running.kill(slot=0)
    running.wait(AttemptStarted, attempt=2)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)


def test_a_recovery_reads_on_from_the_checkpoint_and_not_from_the_beginning(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)

    running = page_views.start(page_views.plan(source))
    running.wait_for_records(2_000)
    checkpoint = running.next_checkpoint()
    running.kill(slot=0)
    second = running.wait(AttemptStarted, attempt=2)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert second.restored_from is not None
    assert second.restored_from >= checkpoint.checkpoint_id
    assert second.positions == ("script-0 at next=10", "script-1 at next=10")
    assert running.job.history.records_of_attempt().records_in == 2_000, (
        "only the second half was read"
    )


def test_a_slot_killed_before_any_checkpoint_starts_the_job_from_the_beginning(page_views):
    died = page_views.gate("died")
    script = (*page_views.batches(0, 5), Die(died), *page_views.batches(500, 5))
    source = ScriptedSource(script[0].schema, (script, tuple(page_views.batches(10_000, 5))))

    running = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    running.finish()

    page_views.check_exactly_once(source)
    assert died.is_open
    assert [each.restored_from for each in running.attempts()] == [None, None]


def test_a_slot_killed_while_its_snapshot_is_written_loses_and_doubles_nothing(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    prepare.open()
    halves = page_views.gate("second-half")
    source = page_views.halves(halves)
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached)
    )

    running = page_views.start(plan)
    running.wait(CheckpointCompleted)
    prepare.close()
    until(lambda: reached.is_open)
    running.kill(slot=0)
    prepare.open()
    halves.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert running.attempts()[1].restored_from is not None


def test_records_flow_on_while_a_snapshot_is_being_written(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    halves = page_views.gate("second-half")
    source = page_views.halves(halves)
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached)
    )

    running = page_views.start(plan)
    until(lambda: reached.is_open)
    halves.open()
    running.wait_for_records(4_000)
    assert running.query.summary.checkpoints_completed == 0
    assert page_views.clicks_visible() == 0, "nothing is seen before its checkpoint is complete"
    prepare.open()
    running.finish()

    page_views.check_exactly_once(source)


def test_slots_killed_between_completion_and_commit_commit_after_the_restart(page_views, until):
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    halves = page_views.gate("second-half")
    source = page_views.halves(halves)
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, commit=commit, reached=reached)
    )

    running = page_views.start(plan, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    running.job.request_checkpoint(lambda number: None)
    running.wait(CheckpointCompleted)
    until(lambda: reached.is_open)
    assert page_views.clicks_visible() == 0
    running.kill(slot=0)
    running.kill(slot=1)
    running.wait(AttemptStarted, attempt=2)
    commit.open()
    until(lambda: page_views.clicks_visible() == 2_000)
    halves.open()
    running.finish()

    page_views.check_exactly_once(source)


def test_a_slot_killed_as_soon_as_the_second_attempt_runs_loses_and_doubles_nothing(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)

    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)
    running.kill(slot=0)
    running.kill(slot=1, attempt=2)
    running.wait(SlotsRunning, attempt=3)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert len(running.attempts()) == 3


class KillsOneEarly(Deployment):
    """Kills slot 0 of one attempt before it can have reported to the coordinator."""

    def __init__(self, attempt):
        self.attempt = attempt

    def launch(self, launch, on_ended):
        running = ProcessDeployment().launch(launch, on_ended)
        if launch.attempt == self.attempt:
            os.kill(running.pids[0], signal.SIGKILL)
        return running


def test_a_slot_killed_before_the_second_attempt_runs_loses_and_doubles_nothing(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    page_views.deployment = KillsOneEarly(attempt=2)

    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)
    running.kill(slot=0)
    running.wait(SlotsRunning, attempt=3)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)


def test_two_slots_killed_in_quick_succession_are_one_failure(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)

    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)
    running.kill(slot=0)
    running.kill(slot=1)
    running.wait(SlotsRunning, attempt=2)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert len(running.attempts()) == 2


def test_a_job_that_is_killed_too_often_gives_up_and_says_what_to_raise(page_views):
    source = page_views.halves(page_views.gate("never"))
    page_views.deployment = KillsOneEarly(attempt=1)

    running = page_views.start(page_views.plan(source), restartAttempts="0")
    running.job.join(90)

    failure = str(running.query.exception())
    assert failure.startswith("job 'page-views' failed: slot ")
    assert "restartAttempts" in failure


@pytest.fixture
def little_memory():
    """A cgroup that may have 500 MB."""
    first = Path("/sys/fs/cgroup/memory")  # of the first version of cgroups
    limit = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
    cgroup = (first if first.is_dir() else first.parent) / f"stillframe-{uuid.uuid4()}"
    try:
        cgroup.mkdir()
        (cgroup / limit).write_text("500000000")
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of its own can be made here ({error})")
    yield cgroup
    cgroup.rmdir()


def test_a_slot_that_the_system_kills_for_want_of_memory_is_told_as_such(page_views, little_memory):
    source = ClickSource(records=2_000)
    greedy = GreedyAt(500, str(little_memory), page_views.gate("killed"))

    running = page_views.start(page_views.plan(source, function=greedy))
    running.finish()

    assert "the system has killed it for want of memory" in running.wait(AttemptFailed).reason
    page_views.check_exactly_once(source)
