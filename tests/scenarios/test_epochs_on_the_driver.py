"""A sink that commits at the coordinator: every epoch is handed over, in order, without gaps."""

import threading
from collections import Counter

import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.connectors.staged import StagedSink
from stillframe.coordinator.history import CheckpointCompleted
from stillframe.errors import JobFailed
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan


class Epochs:
    """What the handler was given: the ids of each epoch, and how often it was called with it."""

    def __init__(self, page_views):
        self.directory = str(page_views.home / "staged")
        self.ids = {}
        self.calls = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.waiting = threading.Event()
        self.raises = None

    def handle(self, epoch, files):
        self.waiting.set()
        assert self.go_on.wait(90)
        if self.raises is not None:
            raise self.raises
        self.calls.append(epoch)
        self.ids[epoch] = [i for file in files for i in pq.read_table(file)["id"].to_pylist()]

    def plan(self, source, parallelism=2):
        read = Node(Read(source), source.schema, given_uid="clicks")
        sink = StagedSink(self.directory, self.handle, source.schema)
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


def test_a_handler_that_raises_fails_the_job_at_once(page_views, epochs):
    epochs.raises = ValueError("no such table")

    running = page_views.start(epochs.plan(ClickSource(records=1_000)))

    with pytest.raises(JobFailed, match="no such table"):
        running.query.awaitTermination(90)
    assert len(running.attempts()) == 1


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
