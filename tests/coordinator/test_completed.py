"""What is told of checkpoints: listeners and the kept history hear of the same things, once."""

from dataclasses import replace

import msgspec
import pytest

from stillframe.coordinator.completed import completed
from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointFailed,
    History,
    SavepointCompleted,
)
from stillframe.protocol.figures import Triggered
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.manifests import (
    FileHandle,
    KeyedState,
    Manifest,
    OperatorSnapshot,
    SubtaskTimings,
)
from stillframe.protocol.messages import Progress
from stillframe.protocol.snapshots import EventTimes
from stillframe.protocol.statistics import SlotPlace, TaskShape
from stillframe.testing.clock import ManualClock

TIMINGS = SubtaskTimings(1.0, 2.0, 3.0, 4.0, 50, 60, 0, task="read", subtask=0)
COUNTS = KeyedState("counts", FileHandle("shared/1/counts", 60, 7), (0,), 3, "")
COUNTED = OperatorSnapshot("read", 0, keyed=(COUNTS,))
TIMES = EventTimes("time", 1, 100, 100, 100.0)
TASKS = (TaskShape("v1", "read", 1),)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def history(clock):
    return History(clock=clock)


@pytest.fixture
def events(history):
    heard = []
    history.add_listener(heard.append)
    return heard


def trigger(history, triggered_as="CHECKPOINT"):
    history.note_triggered(Triggered(1, 1, triggered_as, TASKS, history.now()))


def test_what_subtasks_have_seen_is_told_by_task_and_by_watermark():
    parts = [
        replace(TIMINGS, records_read=4, event_times=(TIMES,)),
        replace(TIMINGS, subtask=1, records_read=5, event_times=(TIMES, replace_uid("other"))),
        replace(TIMINGS, task="again", event_times=(EventTimes("time", 2, 10, 400, 250.0),)),
    ]
    about = ("views", 1, 1, 1, "checkpoint", 0, 0, 8, (), (COUNTED,), (TIMINGS,))
    stored = CompletedCheckpoint(1, 1, 1, 7, 100)
    told = completed(Manifest(*about), stored, 1.0, Progress(10, 7), "/chk", parts)
    assert dict(told.records_read) == {"read": 9, "again": 0}
    assert told.event_times == (EventTimes("time", 4, 10, 400, 175.0), replace_uid("other"))


def replace_uid(uid):
    return msgspec.structs.replace(TIMES, uid=uid)


def test_a_completed_checkpoint_is_told_with_what_it_cost_and_where_it_is(history, events, clock):
    trigger(history)
    clock.advance(0.25)
    history.note_acknowledged(1, "v1", TIMINGS, SlotPlace(0, "here", 4_711))
    clock.advance(0.25)
    about = ("views", 1, 1, 1, "checkpoint", 0, clock.wall_ms(), 8, (), (COUNTED,), (TIMINGS,))
    stored = CompletedCheckpoint(1, 1, 1, 7, 100)
    history.tell(completed(Manifest(*about), stored, 500.0, Progress(10, 7), "/chk/views"))
    clock.advance(0.125)
    history.tell(CheckpointCommitted(1))

    told, committed = events
    assert (told.checkpoint_id, told.duration_ms, told.state_bytes) == (1, 500.0, 60 + 100)
    assert (told.records_in, told.operators[0].rows) == (10, 3)
    assert told.timings == (TIMINGS,)
    assert committed == CheckpointCommitted(1)
    kept = history.kept().statistics().latest_completed
    assert (kept.end_to_end_ms, kept.state_bytes) == (told.duration_ms, told.state_bytes)
    assert (kept.subtasks[0].end_to_end_ms, kept.subtasks[0].place.pid) == (250.0, 4_711)
    assert (kept.path, kept.commit_ms) == ("/chk/views/chk-1-1", 125.0)


def test_a_checkpoint_that_is_given_up_is_told_with_the_reason(history, events):
    trigger(history)
    history.tell(CheckpointFailed(1, "it took too long"))

    assert events == [CheckpointFailed(1, "it took too long")]
    assert history.kept().statistics().latest_failed.failure == "it took too long"


def test_a_savepoint_is_told_with_its_address(history, events):
    trigger(history, "SYNC_SAVEPOINT")
    history.note_acknowledged(1, "v1", TIMINGS)
    history.tell(SavepointCompleted(1, "/elsewhere", 60))

    assert events == [SavepointCompleted(1, "/elsewhere", 60)]
    kept = history.kept().statistics().latest_savepoint
    assert (kept.path, kept.triggered_as) == ("/elsewhere", "SYNC_SAVEPOINT")
