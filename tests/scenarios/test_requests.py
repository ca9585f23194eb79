"""What a person asks of a running job."""

import threading

from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted
from stillframe.graph.launch import Deployment, RunningSlots
from stillframe.testing.sinks import GatedSink


class NeverUp(Deployment, RunningSlots):
    """A busy cluster: the slots wait for their place for ever."""

    def __init__(self) -> None:
        self.launched = threading.Event()

    def launch(self, launch, on_ended):
        self.on_ended = on_ended
        self.launched.set()
        return self

    def cancel(self):
        self.on_ended("cancelled")


def test_a_job_that_is_stopped_before_its_slots_have_come_up_stops_at_once(page_views):
    page_views.deployment = NeverUp()
    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("half"))))
    assert page_views.deployment.launched.wait(90)

    running.job.request_stop()
    running.job.join(5)
    has_stopped = not running.job.is_alive()
    page_views.deployment.on_ended("gone")

    assert has_stopped


def test_a_requested_checkpoint_holds_what_was_read_before_the_request(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached)
    )
    running = page_views.start(plan)
    until(lambda: reached.is_open)  # the barriers of checkpoint 1 have passed
    answers = []
    asking = threading.Thread(target=lambda: answers.append(running.query.checkpoint(timeout=60)))
    asking.start()
    until(lambda: running.job._mailbox.empty())
    prepare.open()
    asking.join(90)

    assert answers[0] >= 2


def test_process_all_available_returns_when_the_records_can_be_seen(page_views, until):
    commit, reached = page_views.gate("commit"), page_views.gate("reached")
    source = page_views.halves(page_views.gate("never"))
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, commit=commit, reached=reached)
    )
    running = page_views.start(plan, checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    seen = []

    def ask():
        running.query.processAllAvailable()
        seen.append(page_views.clicks_visible())

    asking = threading.Thread(target=ask)
    asking.start()
    running.wait(CheckpointCompleted)
    until(lambda: reached.is_open)
    asking.join(1)
    commit.open()
    asking.join(90)

    assert seen == [2_000]


def test_a_checkpoint_requested_between_two_attempts_is_taken_by_the_next(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(
        page_views.plan(source), checkpointInterval="1 hour", restartDelay="500 ms"
    )
    running.kill(slot=0)
    running.wait(AttemptFailed)

    assert running.query.checkpoint(timeout=60) == 1
