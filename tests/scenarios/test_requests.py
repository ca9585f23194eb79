"""What a person asks of a running job."""

import threading
from collections import Counter
from pathlib import Path

from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted
from stillframe.graph.launch import Deployment, RunningSlots
from stillframe.protocol.manifests import decode_manifest
from stillframe.runtime.stored_states import batches_of, state_parts
from stillframe.storage.store import open_store
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


def held_by(page_views, number):
    """What a checkpoint holds: how many records its sources are behind, and the counts in it."""
    location = f"{page_views.location}/page-views"
    (file,) = Path(location).glob(f"chk-{number}-*/_metadata")
    manifest = decode_manifest(file.read_bytes(), str(file))
    batches_read = [
        item["position"]["next"]
        for snapshot in manifest.snapshots_of("clicks")
        for item in snapshot.items
    ]
    store = open_store(location)
    counts = {}
    for parts in state_parts(store, manifest, "count").values():
        for part in parts:
            for _, batch in batches_of(store, part, manifest.max_parallelism):
                counts.update(zip(*(c.to_pylist() for c in batch.columns), strict=True))
    return batches_read, counts


def test_a_requested_checkpoint_holds_what_was_read_before_the_request(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    first, half = page_views.gate("first"), page_views.gate("second-half")
    source = page_views.three_parts(first, half)
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached)
    )
    running = page_views.start(plan, checkpointsRetained="100")
    until(lambda: reached.is_open)  # the barriers of checkpoint 1 have passed
    first.open()
    running.wait_for_records(2_000)  # and all of these were read before the request
    answers = []
    asking = threading.Thread(target=lambda: answers.append(running.query.checkpoint(timeout=60)))
    asking.start()
    until(lambda: running.job._mailbox.empty())
    prepare.open()
    asking.join(90)

    assert answers[0] >= 2
    batches_read, counts = held_by(page_views, answers[0])
    assert sorted(batches_read) == [11, 11], "of each split ten batches and the gate between them"
    assert sum(counts.values()) == 2_000
    assert counts == Counter(f"app-{i % 17}" for s in (0, 10_000) for i in range(s, s + 1_000))


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
    batches_read, counts = held_by(page_views, 1)
    assert sum(counts.values()) == 100 * sum(batches_read), "what was read is counted, and no more"
