"""What a job remembers: its checkpoints and its failures, also those of drivers that are gone."""

import contextlib
import operator
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.coordinator.history import (
    CheckpointCompleted,
    CheckpointFailed,
    SlotsRunning,
)
from stillframe.coordinator.kept_history import read_history
from stillframe.errors import JobFailed, StillframeError
from stillframe.playground.naive import NaiveSink
from stillframe.playground.numbers import NumbersSeen
from stillframe.protocol.checkpointing import Spent
from stillframe.storage.store import open_store
from stillframe.testing.functions import DyingOf
from stillframe.testing.sinks import GatedSink


def kept_by(page_views):
    return read_history(open_store(page_views.location).below("page-views"))


def without_memories(statistics):
    """Without what only the driver knows: single barriers, commits, and what it has summed up."""
    known = (replace(each.with_arrivals(0), commit_ms=None) for each in statistics.history)
    return replace(statistics, history=tuple(known), spent=Spent())


def rows_of(directory):
    """What the playground's naive sink shows, as its board counts it."""
    seen = NumbersSeen()
    files = sorted(directory.glob("[!.]*.parquet"))
    seen.add(pq.read_table(path, columns=["id"]).column(0).to_numpy() for path in files)
    return seen.against({}, {})


def test_every_subtask_tells_what_its_part_of_a_checkpoint_cost(page_views):
    gate = page_views.gate("second-half")
    running = page_views.start(
        page_views.plan(page_views.halves(gate)), checkpointInterval="1 hour"
    )
    running.wait_for_records(2_000)
    number = running.query.checkpoint()

    statistics = running.query.checkpoint_statistics
    told = statistics.checkpoint(number)
    assert told.status == "COMPLETED"
    assert sorted((part.vertex, part.index) for part in told.subtasks) == sorted(
        (task.vertex, index) for task in told.tasks for index in range(task.parallelism)
    )
    [event] = running.query.checkpoints
    assert told.state_bytes == event.state_bytes
    assert told.triggered_at_ms == event.triggered_at_ms
    for part in told.subtasks:
        assert told.triggered_at_ms <= part.acknowledged_at_ms
        assert 0 < part.end_to_end_ms <= told.end_to_end_ms
    assert any(part.bytes_written > 0 for part in told.subtasks)
    assert Path(told.path, "_metadata").exists()
    assert statistics.to_json()["counts"]["completed"] == 1


def test_a_slot_that_is_killed_is_a_failure_with_its_place_and_its_recovery(page_views, until):
    first, second = page_views.gate("first"), page_views.gate("second")
    source = page_views.three_parts(first, second)
    shown = page_views.home / "clicks"
    naive = NaiveSink(str(shown), show_seconds=0)  # all that is read is shown
    plan = page_views.plan(source, around_clicks=lambda sink: naive)
    running = page_views.start(plan, checkpointInterval="1 hour")
    running.wait_for_records(1_000)
    running.query.checkpoint()
    completed = running.wait(CheckpointCompleted)
    first.open()
    running.wait_for_records(2_000)
    until(lambda: rows_of(shown).rows == 2_000)
    running.kill(slot=1)
    running.wait(SlotsRunning, attempt=2)
    until(lambda: running.query.attempts[0]["phases"]["caught_up"] is not None)
    second.open()
    running.finish()

    after, before = kept_by(page_views).attempts_json()
    assert after == running.query.attempts[0]
    moments = list(after["phases"].values())
    assert None not in moments
    assert moments == sorted(moments)
    assert (after["replayed"], before["replayed"]) == (1_000, 0), "half of what had been read"
    assert rows_of(shown).doubled == after["replayed"], "as the playground's board counts it"
    assert (before["ended"]["kind"], after["ended"]["outcome"]) == ("lost slot", "finished")

    [failure] = running.query.failures
    assert "slot 1" in failure.reason
    assert (failure.attempt, failure.where) == (1, "slot 1")
    assert not failure.is_permanent
    assert failure.restart_delay_seconds == pytest.approx(0.02)
    assert failure.recovered_by.attempt == 2
    assert failure.recovered_from.checkpoint_id >= completed.checkpoint_id
    assert kept_by(page_views).failures == [failure]


def test_a_function_that_raises_is_a_permanent_failure_of_its_task(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(page_views.plan(source, function=operator.itemgetter("app_id")))
    with pytest.raises(JobFailed):
        running.query.awaitTermination(90)

    [failure] = running.query.failures
    assert failure.is_permanent
    assert failure.is_given_up
    assert "tidy" in failure.task
    assert failure.subtask in (0, 1)
    assert "function tidy raised TypeError" in failure.reason
    assert kept_by(page_views).failures == [failure]
    assert [each.outcome for each in kept_by(page_views).ended] == ["failed"]


def test_a_checkpoint_that_was_under_way_when_a_slot_died_has_failed_and_says_why(
    page_views, until
):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    half = page_views.gate("second-half")
    plan = page_views.plan(
        page_views.halves(half),
        around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached),
    )
    running = page_views.start(plan)
    until(lambda: reached.is_open)
    [under_way] = running.query.checkpoint_statistics.history
    assert under_way.status == "IN_PROGRESS"
    running.kill(slot=0)
    prepare.open()
    half.open()
    running.finish()

    aborted = running.query.checkpoint_statistics.checkpoint(under_way.checkpoint_id)
    assert aborted.status == "FAILED"
    assert "the attempt failed: slot 0" in aborted.failure
    assert len(aborted.subtasks) < aborted.subtasks_total
    told = without_memories(running.query.checkpoint_statistics)
    assert kept_by(page_views).statistics() == told


def test_savepoints_are_in_the_history_with_where_they_are(page_views):
    gate = page_views.gate("second-half")
    running = page_views.start(
        page_views.plan(page_views.halves(gate)), checkpointInterval="1 hour"
    )
    running.wait_for_records(2_000)
    first = running.query.savepoint(str(page_views.home / "first"))
    running.query.stop(savepoint=str(page_views.home / "second"))

    savepoints = [each for each in kept_by(page_views).checkpoints if each.is_savepoint]
    assert [each.checkpoint_type for each in savepoints] == ["SAVEPOINT", "SYNC_SAVEPOINT"]
    assert savepoints[0].path == first
    assert running.query.checkpoint_statistics.latest_savepoint.path.endswith("second")


def test_a_savepoint_that_failed_is_in_the_history_and_one_that_never_began_is_not(
    page_views, small_disk
):
    gate = page_views.gate("second-half")
    running = page_views.start(
        page_views.plan(page_views.halves(gate)), checkpointInterval="1 hour"
    )
    running.wait_for_records(2_000)
    with contextlib.suppress(OSError), (small_disk / "full").open("wb", buffering=0) as full:
        while full.write(b"x" * 4096):
            pass
    with pytest.raises(StillframeError, match="not empty"):
        running.query.savepoint(str(small_disk))
    (small_disk / "savepoint").mkdir()
    with pytest.raises(StillframeError, match="failed"):
        running.query.savepoint(str(small_disk / "savepoint"))

    failed = running.query.checkpoint_statistics.latest_failed
    assert failed.checkpoint_type == "SAVEPOINT"
    assert "no space left" in failed.failure
    assert running.query.checkpoint_statistics.counts.failed == 1


def test_the_next_driver_remembers_what_the_last_one_did(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    plan = page_views.plan(source)
    first = page_views.start(plan)
    first.wait(CheckpointCompleted)
    first.kill(slot=0)
    first.wait(SlotsRunning, attempt=2)
    first.next_checkpoint()
    first.query.stop()
    before = first.query.checkpoint_statistics

    second = page_views.start(plan)
    second.wait(CheckpointCompleted)
    gate.open()
    second.finish()

    after = second.query.checkpoint_statistics
    for old in before.history:
        assert after.checkpoint(old.checkpoint_id).triggered_at_ms == old.triggered_at_ms
    assert after.counts.completed == before.counts.completed + len(second.query.checkpoints)
    assert after.restored.checkpoint_id == second.attempts()[0].restored_from
    [failure] = second.query.failures
    assert failure.attempt == 1
    assert kept_by(page_views).statistics() == without_memories(after)


def test_checkpoints_that_are_not_retained_are_remembered_as_discarded(page_views):
    gate = page_views.gate("second-half")
    running = page_views.start(page_views.plan(page_views.halves(gate)))
    running.wait(CheckpointCompleted, number=4)
    gate.open()
    running.finish()

    for statistics in (running.query.checkpoint_statistics, kept_by(page_views).statistics()):
        discarded = [each.is_discarded for each in statistics.completed]
        assert discarded == [False, False] + [True] * (len(discarded) - 2)
        assert len(discarded) >= 4


def test_a_failed_checkpoint_costs_a_record_and_says_why(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    half = page_views.gate("second-half")
    plan = page_views.plan(
        page_views.halves(half),
        around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached),
    )
    running = page_views.start(plan, checkpointTimeout="500 ms")
    failed = running.wait(CheckpointFailed)
    prepare.open()
    half.open()
    running.finish()

    told = kept_by(page_views).statistics().checkpoint(failed.checkpoint_id)
    assert (told.status, told.failure) == ("FAILED", failed.reason)


DRIVER = """
import sys
from pathlib import Path

sys.path.insert(0, {conftest!r})
from conftest import PageViews

views = PageViews(Path({home!r}))
gates = views.gate("first"), views.gate("second")
running = views.start(views.plan(views.three_parts(*gates)), checkpointInterval="1 hour")
running.wait_for_records(1_000)
running.query.checkpoint()
gates[0].open()
running.wait_for_records(2_000)
print("ready", flush=True)
running.query.awaitTermination()
"""


def test_a_driver_that_was_killed_is_told_of_by_the_next_with_all_it_had_done(page_views, until):
    script = DRIVER.format(conftest=str(Path(__file__).parent), home=str(page_views.home))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "ready\n"
        os.kill(driver.pid, signal.SIGKILL)
    until(lambda: len(list(page_views.home.glob("chk/page-views/history/read/*.json"))) == 2)
    kept = kept_by(page_views)
    assert kept.statistics().counts.completed >= 1
    assert kept.failures == [], "nobody has said that anything was wrong"

    first_gate, second_gate = page_views.gate("first"), page_views.gate("second")
    source = page_views.three_parts(first_gate, second_gate)
    second = page_views.start(page_views.plan(source))
    second.wait(SlotsRunning, attempt=2)
    until(lambda: second.query.attempts[0]["phases"]["caught_up"] is not None)
    second_gate.open()
    second.finish()
    after, before = kept_by(page_views).attempts_json()
    moments = list(after["phases"].values())
    assert None not in moments
    assert moments == sorted(moments)
    assert (after["replayed"], before["replayed"]) == (1_000, 0), "half of what had been read"
    assert not list(page_views.home.glob("chk/page-views/history/read/*")), "nobody needs it now"

    page_views.check_exactly_once(source)
    [lost] = second.query.failures
    assert (lost.kind, lost.attempt) == ("driver lost", 1)
    assert f":{driver.pid}:" in lost.reason
    assert lost.recovered_from.checkpoint_id == second.attempts()[0].restored_from
    earlier = {each.checkpoint_id for each in kept.checkpoints}
    assert earlier <= {each.checkpoint_id for each in second.query.checkpoint_statistics.history}
    assert kept_by(page_views).failures == [lost]


def test_a_job_without_a_place_for_checkpoints_still_knows_its_failures(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(
        page_views.plan(source, function=operator.itemgetter("app_id")),
        checkpointLocation=None,
        checkpointInterval=None,
    )
    with pytest.raises(JobFailed):
        running.query.awaitTermination(90)

    [failure] = running.query.failures
    assert failure.is_permanent
    assert running.query.checkpoint_statistics.history == ()


def test_a_function_that_kills_its_process_on_a_record_is_not_retried_for_ever(page_views):
    """No error can say so: whether the record was to blame shows only when it comes again."""
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(
        page_views.plan(source, function=DyingOf("id", 10_500)),
        checkpointInterval="1 hour",
        restartStrategy="exponential-delay",
        restartInitialBackoff="1 ms",
        restartDelay=None,
        restartAttempts=None,
        restartSameCrashMax="2",
    )
    with pytest.raises(JobFailed, match="has died 3 times without a completed") as raised:
        running.query.awaitTermination(90)

    assert "raise restartSameCrashMax to try longer" in str(raised.value)
    failures = running.query.failures
    assert [each.attempt for each in failures] == [1, 2, 3]
    assert [each.is_given_up for each in failures] == [False, False, True]
    assert len({each.slot for each in failures}) == 1


def test_a_slot_that_dies_now_and_then_between_checkpoints_is_not_given_up(page_views):
    gate = page_views.gate("second-half")
    running = page_views.start(page_views.plan(page_views.halves(gate)), restartSameCrashMax="1")
    for attempt in (1, 2, 3):
        running.wait(SlotsRunning, attempt=attempt)
        running.next_checkpoint()
        running.kill(slot=0, attempt=attempt)
    gate.open()
    running.finish()

    assert [each.slot for each in running.query.failures] == [0, 0, 0]


def test_a_driver_that_was_replaced_leaves_the_history_to_its_successor(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    slow = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached)
    )
    first = page_views.start(slow)
    until(lambda: reached.is_open)
    until(lambda: kept_by(page_views).begun)
    second = page_views.start(page_views.plan(source), leaseTimeout="0 s")
    second.wait(CheckpointCompleted)
    prepare.open()
    with pytest.raises(JobFailed, match="only one driver"):
        first.query.awaitTermination(90)
    half.open()
    second.finish()

    assert "only one driver" in first.query.failures[-1].reason, "it knows, but writes nothing"
    assert first.query.checkpoint_statistics.counts.in_progress == 0
    kept = kept_by(page_views)
    assert {each.attempt for each in kept.ended} == {2}
    [replaced] = kept.failures
    assert (replaced.attempt, replaced.kind) == (1, "driver lost")
    assert {each.attempt for each in kept.statistics().completed} == {2}
