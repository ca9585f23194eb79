"""What is told of checkpoints: listeners and statistics hear of the same things, in their words."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.checkpoint_news import CheckpointNews
from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    History,
    SavepointCompleted,
)
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.sinks import DriverSinks
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.manifests import (
    FileHandle,
    KeyedState,
    Manifest,
    OperatorSnapshot,
    SubtaskTimings,
)
from stillframe.storage.store import open_store
from stillframe.testing.clock import ManualClock

CLICKS = ClickSource(records=10)
TIMINGS = SubtaskTimings(1.0, 2.0, 3.0, 4.0, 50, 60, 0, task="read", subtask=0)
COUNTS = KeyedState("counts", FileHandle("shared/1/counts", 60, 7), (0,), 3, "")
COUNTED = OperatorSnapshot("read", 0, keyed=(COUNTS,))


@dataclass
class Newsroom:
    """One attempt with one task of one subtask, and all who hear of its checkpoints."""

    parts: JobParts
    clock: ManualClock
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts.history.add_listener(self.events.append)
        self.news = CheckpointNews(self.parts)

    def acknowledge(self, checkpoint_id):
        self.news.on_acknowledged(checkpoint_id, self.parts.plan.tasks[0], TIMINGS)

    def statistics(self):
        return self.parts.recorder.history(self.parts.now()).statistics()

    def manifest(self, checkpoint_id, triggered_at):
        about = ("views", self.parts.ledger.attempt, checkpoint_id, 1, "checkpoint")
        now_ms = self.clock.wall_ms()
        return Manifest(*about, triggered_at.wall_ms, now_ms, 8, (), (COUNTED,), (TIMINGS,))


@pytest.fixture
def room(tmp_path):
    read = Node(Read(CLICKS), CLICKS.schema, given_uid="read")
    plan = build_plan("views", [Node(Write(DiscardSink()), CLICKS.schema, (read,), "write")], 1)
    clock = ManualClock()
    ledger = Ledger(open_store(str(tmp_path)), "views", 2, clock)
    ledger.begin_attempt(None)
    return Newsroom(JobParts(plan, JobConfig(), clock, History(), DriverSinks(plan), ledger), clock)


def test_a_completed_checkpoint_is_told_with_what_it_cost_and_where_it_is(room):
    triggered_at = room.news.on_triggered(1, "CHECKPOINT")
    room.clock.advance(0.25)
    room.acknowledge(1)
    room.clock.advance(0.25)
    completed = CompletedCheckpoint(1, 1, room.parts.ledger.attempt, 7, 100)
    manifest = room.manifest(1, triggered_at)
    room.news.on_completed(manifest, completed, triggered_at.monotonic_seconds)
    room.news.on_committed(1)

    told, committed = room.events
    assert isinstance(told, CheckpointCompleted)
    assert (told.checkpoint_id, told.duration_ms, told.state_bytes) == (1, 500.0, 60 + 100)
    assert told.timings == (TIMINGS,)
    assert committed == CheckpointCommitted(1)
    kept = room.statistics().latest_completed
    assert (kept.end_to_end_ms, kept.state_bytes) == (told.duration_ms, told.state_bytes)
    assert [part.end_to_end_ms for part in kept.subtasks] == [250.0]
    assert kept.path.startswith(room.parts.ledger.store_address)


def test_a_checkpoint_that_is_given_up_is_told_with_the_reason(room):
    room.news.on_triggered(1, "CHECKPOINT")
    room.news.on_aborted(1, "it took too long")

    assert room.events == [CheckpointFailed(1, "it took too long")]
    assert room.statistics().latest_failed.failure == "it took too long"


def test_a_savepoint_is_told_with_its_address(room):
    triggered_at = room.news.on_triggered(1, "SYNC_SAVEPOINT")
    room.acknowledge(1)
    room.news.on_savepoint_completed(room.manifest(1, triggered_at), "/elsewhere")

    assert room.events == [SavepointCompleted(1, "/elsewhere", 60)]
    kept = room.statistics().latest_savepoint
    assert (kept.path, kept.triggered_as) == ("/elsewhere", "SYNC_SAVEPOINT")
