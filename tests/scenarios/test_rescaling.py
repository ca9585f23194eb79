"""Another parallelism for a running job on plain processes: exact output, whatever goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import (
    AttemptFailed,
    CheckpointCompleted,
    CheckpointFailed,
    SlotsRunning,
)
from stillframe.coordinator.replanned import Rescaled
from stillframe.errors import StartRefused, StillframeError
from stillframe.graph.launch import RunningSlots
from stillframe.testing.processes import ProcessDeployment
from stillframe.testing.sinks import GatedSink

BACKENDS = ["fs", "memory", "rocksdb"]


def start(page_views, source, parallelism=2, around_clicks=lambda sink: sink, **options):
    """The job and the way to plan it anew."""
    plan = partial(page_views.plan, source, around_clicks=around_clicks)
    return page_views.start(plan(parallelism), plan, **options)


class Asking(threading.Thread):
    """Somebody who waits for a rescale while the test goes on."""

    def __init__(self, query, parallelism):
        super().__init__(daemon=True)
        self._query, self._parallelism = query, parallelism
        self.answer = None
        self.start()

    def run(self):
        try:
            self.answer = self._query.rescale(self._parallelism, timeout=90)
        except StillframeError as error:
            self.answer = str(error)

    def heard(self):
        self.join(100)
        assert self.answer is not None, "nobody answered"
        return self.answer


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_load_from_2_to_4_and_to_1_slot_every_record_comes_out_once(page_views, backend):
    source = ClickSource(records=24_000, records_per_second=2_500, partitions=5)
    running = start(page_views, source, stateBackend=backend)
    running.next_checkpoint()

    up = running.query.rescale(4)
    assert (up.before, up.after, len(running.query.slot_pids)) == (2, 4, 4)
    assert up.downtime_seconds > 0
    running.next_checkpoint()
    down = running.query.rescale(1)
    assert (down.before, down.after, len(running.query.slot_pids)) == (4, 1, 1)
    assert running.query.parallelism == 1
    running.finish()

    page_views.check_exactly_once(source)
    assert running.query.summary.records_in == 24_000, "not one record was read twice"
    assert running.query.summary.restarts == 0
    assert [event for event in running.told if isinstance(event, Rescaled)] == [up, down]


def test_what_sinks_have_prepared_is_visible_before_the_new_slots_start(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = start(page_views, source, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    assert page_views.clicks_visible() == 0

    running.query.rescale(3)

    assert page_views.clicks_visible() == 2_000
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_one_rescale_right_after_the_other_rests_before_a_record_was_read(page_views):
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=3)
    running = start(page_views, source, checkpointInterval="1 hour")
    running.wait_for_records(1_000)

    for parallelism in (4, 3, 1, 2):
        running.query.rescale(parallelism)
    running.finish()

    page_views.check_exactly_once(source)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointMode": "stop-the-world"},
        {"checkpointMode": "at-least-once"},
        {"unalignedCheckpoints": "true"},
        {"maxConcurrentCheckpoints": "3", "checkpointInterval": "20 ms"},
        {"checkpointMinPause": "1 hour"},
    ],
    ids=lambda options: next(iter(options)) + "=" + next(iter(options.values())),
)
def test_it_is_exact_in_every_mode(page_views, options):
    """Also at least once: nothing comes behind the barriers that could be counted twice."""
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=3)
    running = start(page_views, source, **options)
    running.wait_for_records(2_000)

    running.query.rescale(3)
    running.finish()

    page_views.check_exactly_once(source)


def test_the_guarantee_is_that_of_the_channels_there_are_now(page_views):
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=3)
    running = start(page_views, source, parallelism=1, checkpointMode="at-least-once")
    running.wait_for_records(1_000)
    words = [running.query.guarantee().word]

    running.query.rescale(2)
    words.append(running.query.guarantee().word)
    running.finish()

    assert words == ["exactly-once", "at-least-once"]


def test_a_slot_killed_right_after_a_rescale_loses_and_doubles_nothing(page_views):
    source = ClickSource(records=18_000, records_per_second=6_000, partitions=3)
    running = start(page_views, source)
    running.wait_for_records(2_000)

    running.query.rescale(3)
    running.kill(slot=2, attempt=2)
    again = running.wait(SlotsRunning, attempt=3)
    running.finish()

    assert len(again.pids) == 3, "the parallelism is the job's, not the attempt's"
    assert running.query.summary.restarts == 1
    page_views.check_exactly_once(source)


def test_a_slot_killed_while_the_job_comes_to_rest_leaves_it_as_it_was(page_views, until):
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    gated = partial(GatedSink, commit=commit, reached=reached)
    running = start(page_views, source, around_clicks=gated, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    asking = Asking(running.query, 4)
    until(lambda: reached.is_open)

    running.kill(slot=0)
    commit.open()

    assert "not rescaled to parallelism 4: attempt 1 of the job ended before" in asking.heard()
    assert len(running.wait(SlotsRunning, attempt=2).pids) == 2
    assert running.query.rescale(3).after == 3, "it can be tried again"
    half.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_if_the_last_checkpoint_fails_the_sources_go_on_and_so_do_checkpoints(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    gated = partial(GatedSink, prepare=prepare, reached=reached)
    running = start(
        page_views,
        source,
        around_clicks=gated,
        checkpointInterval="1 hour",
        checkpointTimeout="2 seconds",
    )
    running.wait_for_records(2_000)

    with pytest.raises(StillframeError, match=r"not rescaled .* checkpoint 1, .* it took longer"):
        running.query.rescale(4)

    assert running.wait(CheckpointFailed).checkpoint_id == 1
    prepare.open()
    half.open()
    running.finish()
    page_views.check_exactly_once(source)
    assert len(running.attempts()) == 1


def test_a_savepoint_asked_for_meanwhile_is_taken_afterwards(page_views, until):
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    gated = partial(GatedSink, commit=commit, reached=reached)
    running = start(page_views, source, around_clicks=gated, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    asking = Asking(running.query, 3)
    until(lambda: reached.is_open)
    taken = []
    saving = threading.Thread(
        target=lambda: taken.append(running.query.savepoint(str(page_views.home / "savepoint")))
    )
    saving.start()
    until(lambda: running.job._mailbox.empty())
    commit.open()

    assert asking.heard().after == 3
    saving.join(90)
    assert taken
    half.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_one_rescale_at_a_time(page_views, until):
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    gated = partial(GatedSink, commit=commit, reached=reached)
    running = start(page_views, source, around_clicks=gated, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    asking = Asking(running.query, 3)
    until(lambda: reached.is_open)

    with pytest.raises(StillframeError, match="is being rescaled to parallelism 3: wait"):
        running.query.rescale(4)

    commit.open()
    assert asking.heard().after == 3
    half.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_a_stop_while_the_job_comes_to_rest_stops_it(page_views, until):
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    gated = partial(GatedSink, commit=commit, reached=reached)
    running = start(page_views, source, around_clicks=gated, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    asking = Asking(running.query, 3)
    until(lambda: reached.is_open)
    running.job.request_stop()
    commit.open()

    assert "ended before" in asking.heard()
    running.job.join(90)
    assert running.query.summary.outcome == "stopped"
    half.open()
    start(page_views, source).finish()
    page_views.check_exactly_once(source)


def test_a_new_attempt_that_breaks_before_it_runs_is_tried_again_with_the_new_parallelism(
    page_views,
):
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=3)
    running = start(page_views, source)
    running.wait_for_records(2_000)
    launch = page_views.deployment.launch

    def refuse_once(*arguments):
        page_views.deployment.launch = launch
        slots = launch(*arguments)
        slots.cancel()
        return slots

    page_views.deployment.launch = refuse_once
    rescaled = running.query.rescale(3)
    running.finish()

    assert rescaled.after == 3
    assert running.wait(AttemptFailed).attempt == 2
    assert running.wait(SlotsRunning, attempt=3).pids[2:]
    page_views.check_exactly_once(source)


def test_a_driver_that_starts_again_goes_on_with_the_parallelism_it_is_given(page_views):
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=3)
    first = start(page_views, source)
    first.wait_for_records(1_000)
    first.query.rescale(3)
    first.query.stop()

    again = start(page_views, source)
    again.finish()

    assert len(again.wait(SlotsRunning).pids) == 2
    page_views.check_exactly_once(source)


def test_a_plan_that_the_checkpoint_does_not_fit_is_taken_back(page_views):
    """Whoever makes plans made one of another job; the old one goes on."""
    source = page_views.halves(page_views.gate("second-half"))
    plan = page_views.plan(source)
    running = page_views.start(
        plan, lambda n: replace(page_views.plan(source, n), max_parallelism=64)
    )
    running.wait_for_records(2_000)

    with pytest.raises(StillframeError, match="does not fit this job: it has 128 key groups"):
        running.query.rescale(3)

    assert len(running.wait(SlotsRunning, attempt=2).pids) == 2
    assert running.query.parallelism == 2
    page_views.gate("second-half").open()
    running.finish()
    page_views.check_exactly_once(source)


def test_kills_at_any_moment_of_many_rescales_lose_and_double_nothing(page_views):
    source = ClickSource(records=40_000, records_per_second=4_000, partitions=4)
    running = start(page_views, source, checkpointInterval="100 ms", restartAttempts="100")
    random = Random(7)
    for parallelism in (4, 1, 3, 2, 1, 4):
        asking = Asking(running.query, parallelism)
        if pids := running.query.slot_pids:
            threading.Event().wait(random.random() * 0.5)  # it comes from outside, at any moment
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)
        asking.heard()
    running.finish()

    page_views.check_exactly_once(source)


# --- refused before anything stops


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [
        (0, "at least 1 slot, not 0"),
        (-3, "at least 1 slot, not -3"),
        (129, "parallelism 129 is more than maxParallelism 128"),
    ],
)
def test_a_parallelism_that_no_job_can_have_is_refused_and_nothing_stops(
    page_views, parallelism, reason
):
    running = start(page_views, page_views.halves(page_views.gate("never")))
    running.wait_for_records(2_000)

    with pytest.raises(StartRefused, match=reason):
        running.query.rescale(parallelism)

    assert len(running.attempts()) == 1
    running.next_checkpoint()


def test_the_parallelism_it_has_is_answered_at_once(page_views):
    running = start(page_views, page_views.halves(page_views.gate("never")))

    assert running.query.rescale(2) == Rescaled(2, 2, 0.0)


def test_a_plan_that_cannot_be_made_is_refused_and_another_may_be_asked_for(page_views):
    def replan(parallelism):
        if parallelism > 3:
            raise StartRefused("Spark has 3")
        return page_views.plan(source, parallelism)

    source = page_views.halves(page_views.gate("second-half"))
    running = page_views.start(page_views.plan(source), replan)
    running.wait_for_records(2_000)

    with pytest.raises(StartRefused, match="Spark has 3"):
        running.query.rescale(4)

    assert len(running.attempts()) == 1
    assert running.query.rescale(3).after == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"checkpointMode": "at-most-once"}, "would skip what has been read"),
        ({"checkpointLocation": None, "checkpointInterval": None}, "takes no checkpoints"),
    ],
)
def test_what_would_lose_records_is_refused(page_views, options, reason):
    source = page_views.halves(page_views.gate("never"))
    running = start(page_views, source, **options)
    running.wait(SlotsRunning)

    with pytest.raises(StartRefused, match=reason):
        running.query.rescale(3)


def test_a_job_that_nobody_can_plan_anew_says_so(page_views):
    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))
    running.wait(SlotsRunning)

    with pytest.raises(StartRefused, match="start it again with the other parallelism"):
        running.query.rescale(3)


def test_a_job_that_has_ended_is_not_rescaled(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    running = start(page_views, page_views.halves(gate))
    running.finish()

    with pytest.raises(StillframeError, match="does not run: start it with the parallelism"):
        running.query.rescale(3)


def test_a_job_that_ends_meanwhile_finishes_and_says_so(page_views, until):
    """Its records have ended: the checkpoint that is under way is its last one."""
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)
    gated = partial(GatedSink, commit=commit, reached=reached)
    running = start(page_views, source, around_clicks=gated, checkpointInterval="1 hour")
    running.wait(CheckpointCompleted)
    asking = Asking(running.query, 3)
    heard = asking.heard()
    commit.open()
    running.finish()

    assert "it is about to end" in heard
    page_views.check_exactly_once(source)


class ShrunkCluster(ProcessDeployment):
    """Has room for a number of slots; how one that does not fit fares is up to the test."""

    def __init__(self, room, *, refuses):
        self.room = room
        self._refuses = refuses
        self.asked = threading.Event()

    def launch(self, launch, on_ended):
        if launch.plan.slots <= self.room:
            return super().launch(launch, on_ended)
        self.asked.set()
        if self._refuses:
            on_ended("there are too few slots")
        return Waiting(on_ended)


class Waiting(RunningSlots):
    def __init__(self, on_ended):
        self._on_ended = on_ended

    def cancel(self):
        self._on_ended("cancelled")


@pytest.mark.parametrize("refuses", [False, True], ids=["waits for slots", "waits to restart"])
def test_a_job_that_has_lost_a_worker_for_good_is_rescaled_to_what_is_left(page_views, refuses):
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=4)
    cluster = page_views.deployment = ShrunkCluster(2, refuses=refuses)
    running = start(page_views, source, restartDelay="100 seconds" if refuses else "20 ms")
    running.next_checkpoint()
    cluster.room = 1
    running.kill(slot=0)
    running.wait(AttemptFailed)
    if not refuses:
        assert cluster.asked.wait(60), "the job wants its two slots back"

    rescaled = running.query.rescale(1, timeout=60)

    assert (rescaled.before, rescaled.after, len(running.query.slot_pids)) == (2, 1, 1)
    running.finish()
    page_views.check_exactly_once(source)
