"""A sink that commits at the coordinator: every epoch is handed over, in order, without gaps."""

import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.connectors.staged import StagedSink
from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted, Waiting
from stillframe.errors import JobFailed, StillframeError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan


class Epochs:
    """What the handler was given: the ids of each epoch, and how often it was called with it."""

    def __init__(self, page_views):
        self.directory = str(page_views.home / "staged")
        self.ids = {}
        self.calls = []
        self.begun = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.waiting = threading.Event()
        self.raises = None

    def handle(self, epoch, mark, files):
        self.begun += 1
        self.waiting.set()
        assert self.go_on.wait(90)
        if self.raises is not None:
            raise self.raises
        self.calls.append(epoch)
        self.ids[epoch] = [i for file in files for i in pq.read_table(file)["id"].to_pylist()]

    def plan(self, source, parallelism=2, handler=None):
        read = Node(Read(source), source.schema, given_uid="clicks")
        sink = StagedSink(self.directory, handler or self.handle, source.schema)
        write = Node(Write(sink), source.schema, (read,), given_uid="epochs")
        return build_plan("page-views", [write], parallelism)

    def check(self, records):
        assert sorted(self.ids) == list(range(len(self.ids))), "epochs are dense"
        assert self.calls == sorted(self.calls), "and come in order"
        assert Counter(i for ids in self.ids.values() for i in ids) == Counter(range(records))


@pytest.fixture
def epochs(page_views):
    made = Epochs(page_views)
    yield made
    made.go_on.set()


def test_epochs_survive_a_killed_slot(page_views, epochs):
    source = ClickSource(records=20_000, records_per_second=10_000)

    running = page_views.start(epochs.plan(source))
    running.wait(CheckpointCompleted, number=2)
    running.kill(slot=1)
    running.finish()

    epochs.check(20_000)
    assert len(running.attempts()) == 2


def test_a_slot_killed_while_the_driver_commits_changes_nothing(page_views, epochs):
    source = ClickSource(records=20_000, records_per_second=10_000)
    epochs.go_on.clear()

    running = page_views.start(epochs.plan(source))
    assert epochs.waiting.wait(90)
    running.kill(slot=0)
    epochs.go_on.set()
    running.finish()

    epochs.check(20_000)
    assert len(epochs.calls) == len(set(epochs.calls))


def test_a_job_goes_on_with_the_next_epoch_at_another_parallelism(page_views, epochs):
    source = ClickSource(records=16_000, records_per_second=8_000, partitions=3)
    for parallelism in (2, 3):
        running = page_views.start(epochs.plan(source, parallelism))
        running.wait(CheckpointCompleted, number=2)
        running.query.stop()

    page_views.start(epochs.plan(source, 1)).finish()

    epochs.check(16_000)


def test_a_handler_that_raises_the_same_error_again_and_again_ends_the_job(page_views, epochs):
    epochs.raises = ValueError("no such table")

    running = page_views.start(epochs.plan(ClickSource(records=1_000)), restartSameErrorMax="3")

    with pytest.raises(JobFailed, match=r"no such table .*the same error 4 times"):
        running.query.awaitTermination(90)
    assert len(running.query.failures) == 4
    for failure in running.query.failures:
        assert failure.blame.code.startswith("sink ")
        assert f"{__file__}:" in failure.blame.line
    assert failure.is_given_up


def test_a_handler_that_raises_for_a_while_is_called_again_with_the_same_epoch(page_views, epochs):
    epochs.raises = ConnectionError("refused")
    patience = {"restartAttempts": "1000", "restartSameErrorMax": "infinite"}
    running = page_views.start(epochs.plan(ClickSource(records=1_000)), **patience)
    running.wait(AttemptFailed, number=3)

    epochs.raises = None

    running.finish()
    epochs.check(1_000)


def test_a_handler_that_ends_its_thread_does_not_end_the_commits_without_a_word(page_views, epochs):
    epochs.raises = SystemExit(3)

    running = page_views.start(epochs.plan(ClickSource(records=1_000)))

    with pytest.raises(JobFailed, match="SystemExit: 3"):
        running.query.awaitTermination(90)


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_a_handler_that_ends_the_job_does_not_wait_for_itself(page_views, epochs, end):
    """The job ends when the epoch has been handed over, which then counts as committed."""
    begun, started, returned_after = threading.Event(), [], []

    def handle(epoch, mark, files):
        epochs.handle(epoch, mark, files)
        began = time.monotonic()
        if epoch == 1:
            assert begun.wait(90)
            getattr(started[0].query, end)()
            returned_after.append(time.monotonic() - began)

    source = ClickSource(records=40_000, records_per_second=10_000)
    started.append(page_views.start(epochs.plan(source, handler=handle)))
    begun.set()

    assert started[0].query.awaitTermination(90)
    assert started[0].query.summary.outcome == {"stop": "stopped", "cancel": "cancelled"}[end]
    assert returned_after[0] < 5
    assert epochs.calls == [0, 1]


@pytest.mark.parametrize(
    "wait",
    [
        lambda query, place: query.stop(savepoint=place),
        lambda query, place: query.savepoint(place),
        lambda query, place: query.checkpoint(),
        lambda query, place: query.processAllAvailable(),
        lambda query, place: query.rescale(1),
        lambda query, place: query.awaitTermination(),
    ],
    ids=["stop with a savepoint", "savepoint", "checkpoint", "process all", "rescale", "await"],
)
def test_what_would_wait_for_the_epoch_that_is_handed_over_is_refused(page_views, epochs, wait):
    begun, started, refusals = threading.Event(), [], []

    def handle(epoch, mark, files):
        assert begun.wait(90)
        try:
            wait(started[0].query, str(page_views.home / "savepoint"))
        except StillframeError as error:
            refusals.append(str(error))

    source = ClickSource(records=1_000)
    started.append(
        page_views.start(epochs.plan(source, handler=handle), lambda n: epochs.plan(source, n))
    )
    begun.set()
    started[0].finish()

    assert refusals
    assert "would wait for the epoch" in refusals[0]
    assert "call it from another thread" in refusals[0]


def test_a_handler_that_takes_long_is_told_with_its_stack_until_it_returns(page_views, epochs):
    epochs.go_on.clear()
    running = page_views.start(epochs.plan(ClickSource(records=1_000)))

    told = str(running.wait(Waiting))
    assert told.startswith("sink staged has had epoch 0 for ")
    assert "assert self.go_on.wait(90)" in told
    assert "has had epoch 0" in running.query.status["message"]
    epochs.go_on.set()
    running.finish()

    assert "epoch" not in running.query.status["message"]


STUCK = {"stuckTimeout": "1 second", "leaseTimeout": "2 seconds"}


def test_a_handler_that_hangs_ends_the_job_and_is_not_called_a_second_time_beside_itself(
    page_views, epochs, until
):
    epochs.go_on.clear()
    running = page_views.start(epochs.plan(ClickSource(records=1_000)), **STUCK)
    with pytest.raises(
        JobFailed, match=r"sink staged has had epoch 0 .*raise stuckTimeout"
    ) as told:
        running.query.awaitTermination(90)
    assert "assert self.go_on.wait(90)" in "\n".join(told.value.__notes__)
    [failure] = running.query.failures
    assert failure.is_given_up
    assert failure.blame.line.startswith(f"{__file__}:")

    refused = page_views.start(epochs.plan(ClickSource(records=1_000)), **STUCK)
    with pytest.raises(JobFailed, match="it is this process: if the job has ended because its"):
        refused.query.awaitTermination(90)
    epochs.go_on.set()
    until(lambda: epochs.calls == [0])  # it returns after all, and nobody listens
    until(lambda: not list(Path(page_views.location).glob("page-views/lease/*")))
    page_views.start(epochs.plan(ClickSource(records=1_000))).finish()

    epochs.check(1_000)
    assert len(epochs.calls) == len(set(epochs.calls)), "what it did at last it does not do again"


def test_a_handler_that_hangs_when_it_is_called_again_after_a_restart_is_told_and_ends_the_job(
    page_views, epochs
):
    def handle(epoch, mark, files):
        if len(running.query.failures) == 0:
            raise ConnectionError("refused")
        epochs.handle(epoch, mark, files)

    epochs.go_on.clear()
    running = page_views.start(epochs.plan(ClickSource(records=1_000), handler=handle), **STUCK)

    assert str(running.wait(Waiting)).startswith("sink staged has had epoch 0 for ")
    with pytest.raises(JobFailed, match="has not returned"):
        running.query.awaitTermination(90)
    assert [each.is_given_up for each in running.query.failures] == [False, True]


def test_a_slot_that_dies_while_a_handler_hangs_does_not_make_the_job_call_it_again(
    page_views, epochs
):
    epochs.go_on.clear()
    patient = {**STUCK, "stuckTimeout": "20 seconds"}
    running = page_views.start(epochs.plan(ClickSource(records=1_000)), **patient)
    assert epochs.waiting.wait(90)
    running.kill(slot=0)

    with pytest.raises(JobFailed, match=r"sink staged has had epoch 0 .* has not returned"):
        running.query.awaitTermination(90)
    assert epochs.begun == 1


def test_a_rescale_waits_for_the_epoch_that_is_handed_over_and_repeats_none(page_views, epochs):
    source = ClickSource(records=12_000, records_per_second=6_000, partitions=3)
    running = page_views.start(epochs.plan(source), lambda n: epochs.plan(source, n))
    running.wait(CheckpointCompleted, number=2)
    epochs.waiting.clear()
    epochs.go_on.clear()
    assert epochs.waiting.wait(90)
    asking = threading.Thread(target=lambda: running.query.rescale(3))
    asking.start()
    epochs.go_on.set()
    asking.join(90)
    running.finish()

    assert running.query.parallelism == 3
    assert running.query.summary.records_in == 12_000
    assert epochs.calls == sorted(set(epochs.calls)), "no epoch came twice"
    epochs.check(12_000)
