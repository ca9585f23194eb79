"""What happens between two attempts, before the first and after the last."""

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted
from stillframe.errors import StillframeError
from stillframe.graph.launch import Deployment
from stillframe.testing.processes import ProcessDeployment
from stillframe.testing.sinks import GatedSink


def test_a_requested_checkpoint_whose_attempt_dies_is_taken_by_the_next(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    source = page_views.halves(page_views.gate("never"))
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached)
    )
    running = page_views.start(plan, checkpointInterval="1 hour")
    answers = []

    def ask():
        with contextlib.suppress(StillframeError):
            answers.append(running.query.checkpoint(timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: reached.is_open)
    running.kill(slot=0)
    prepare.open()
    asking.join(90)

    assert answers == [2]


class LaunchFails(Deployment):
    def launch(self, launch, on_ended):
        raise StillframeError("the cluster is gone")


def test_an_attempt_that_cannot_be_launched_leaves_no_thread_behind(page_views):
    page_views.deployment = LaunchFails()
    before = set(threading.enumerate())

    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))
    running.job.join(90)

    assert "the cluster is gone" in str(running.query.exception())
    left = [t.name for t in set(threading.enumerate()) - before if t.is_alive()]
    assert left == []


class KillsOneEarly(Deployment):
    def launch(self, launch, on_ended):
        running = ProcessDeployment().launch(launch, on_ended)
        os.kill(running.pids[0], signal.SIGKILL)
        return running


def test_a_slot_that_dies_before_it_reports_is_the_reason_given(page_views):
    page_views.deployment = KillsOneEarly()

    plan = page_views.plan(page_views.halves(page_views.gate("never")))
    running = page_views.start(plan, restartAttempts="0")
    running.job.join(90)

    # It is named either way: by what became of its process, or of its connection if it had one.
    assert re.search("slot 0 (ended with exit code -9|.* was lost)", str(running.query.exception()))


def test_a_finished_job_can_be_taken_back_to_a_checkpoint(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)
    gate.open()
    running.finish()
    older = running.query.checkpoints[-2].checkpoint_id

    again = page_views.start(page_views.plan(source), restoreFrom=str(older))
    again.job.join(90)

    assert [each.restored_from for each in again.attempts()] == [older]


def test_a_disk_that_is_full_during_a_restart_is_waited_for(page_views, small_disk):
    page_views.location = str(small_disk / "chk")
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source), restartDelay="200 ms")
    running.wait(CheckpointCompleted)
    ballast = Path(small_disk) / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    running.kill(slot=0)
    running.job.join(1)
    ballast.unlink()
    gate.open()
    running.wait(AttemptStarted, attempt=2)
    running.finish()

    page_views.check_exactly_once(source)
