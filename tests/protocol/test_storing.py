"""What is being stored: nothing ends it but the answer, also if the attempt is over before that."""

import pytest

from stillframe.protocol.checkpoints import (
    Abort,
    Acknowledged,
    AnnounceComplete,
    BreakAttempt,
    Checkpoints,
    CheckpointSettings,
    Finish,
    NoteCommitted,
    Stop,
    StoreCheckpoint,
    StoreSavepoint,
    Trigger,
    TriggerSavepoint,
)

TWO_AT_ONCE = CheckpointSettings(interval_seconds=1.0, timeout_seconds=10.0, max_concurrent=2)
ASKED_FOR = CheckpointSettings(interval_seconds=None, timeout_seconds=10.0)


def acknowledge(checkpoints, checkpoint_id, subtasks="ab"):
    for subtask in subtasks:
        answer, instructions = checkpoints.on_acknowledged(checkpoint_id, subtask, subtask.upper())
        assert answer is Acknowledged.COUNTED
    return instructions


def storing(settings=TWO_AT_ONCE):
    """Checkpoint 1 is being stored, since the first second."""
    checkpoints = Checkpoints(settings, "ab", "", 1)
    checkpoints.on_running(0.0)
    assert checkpoints.request(1.0) == [Trigger(1)]
    [store] = acknowledge(checkpoints, 1)
    assert isinstance(store, StoreCheckpoint)
    return checkpoints


def stopping():
    """The savepoint with which the job stops, number 1, is being stored."""
    checkpoints = Checkpoints(ASKED_FOR, "ab", "", 1)
    checkpoints.on_running(0.0)
    assert checkpoints.request_savepoint("stop", 1.0) == [TriggerSavepoint(1, holds=True)]
    acknowledge(checkpoints, 1)
    assert checkpoints.on_time(1.0) == [Trigger(2)]
    acknowledge(checkpoints, 2)
    announced, noted, store = checkpoints.on_stored(2, False, 1.5)
    assert (announced, noted) == (AnnounceComplete(2), NoteCommitted(2))
    assert isinstance(store, StoreSavepoint)
    return checkpoints


def test_no_timeout_ends_what_is_being_stored():
    checkpoints = storing(ASKED_FOR)

    assert checkpoints.wake_at_seconds() is None
    assert checkpoints.on_time(1000.0) == []
    assert checkpoints.on_stored(1, False, 1001.0) == [AnnounceComplete(1), NoteCommitted(1)]


def test_a_subtask_that_declines_too_late_does_not_end_what_is_being_stored():
    checkpoints = storing(ASKED_FOR)

    assert checkpoints.on_declined(1, "disk full", 2.0) == []
    assert checkpoints.on_stored(1, False, 3.0) == [AnnounceComplete(1), NoteCommitted(1)]


def test_a_newer_checkpoint_that_times_out_meanwhile_fails_alone():
    checkpoints = storing()
    assert checkpoints.on_time(2.0) == [Trigger(2)]

    [aborted, triggered] = checkpoints.on_time(12.0)
    assert (aborted.checkpoint_id, triggered) == (2, Trigger(3))
    assert AnnounceComplete(1) in checkpoints.on_stored(1, False, 12.5)


def test_a_newer_checkpoint_that_is_acknowledged_meanwhile_is_stored_behind_it():
    checkpoints = storing()
    assert checkpoints.on_time(2.0) == [Trigger(2)]
    assert acknowledge(checkpoints, 2) == []

    [announced, noted, *_, store] = checkpoints.on_stored(1, False, 3.0)
    assert (announced, noted) == (AnnounceComplete(1), NoteCommitted(1))
    assert isinstance(store, StoreCheckpoint)
    assert store.checkpoint_id == 2


def test_too_many_failures_break_the_attempt_and_what_was_stored_meanwhile_counts():
    settings = CheckpointSettings(1.0, 10.0, max_concurrent=2, tolerable_failures=0)
    checkpoints = storing(settings)
    checkpoints.on_time(2.0)

    [_, broken] = checkpoints.on_time(12.0)
    assert isinstance(broken, BreakAttempt)
    checkpoints.on_over()
    assert checkpoints.on_stored(1, False, 12.5) == []


def test_what_came_to_exist_after_the_attempt_is_left_to_the_next_one_to_announce_and_commit():
    checkpoints = storing()
    checkpoints.on_time(2.0)
    checkpoints.on_over()

    assert checkpoints.on_stored(1, True, 3.0) == [], "an older or newer one is nobody's any more"


def test_what_could_not_be_stored_is_given_up_also_after_the_attempt_and_nothing_follows():
    checkpoints = storing()
    checkpoints.on_over()

    assert checkpoints.on_store_failed(1, "disk full", 3.0) == [Abort(1, "disk full")]


def test_a_savepoint_with_which_the_job_stops_ends_it_also_if_the_attempt_broke_meanwhile():
    checkpoints = stopping()
    checkpoints.on_over()

    assert checkpoints.on_savepoint_stored(1, 3.0) == [Stop()]


def test_a_job_whose_records_had_ended_is_finished_by_such_a_savepoint():
    checkpoints = stopping()
    for subtask in "ab":
        assert checkpoints.on_drained(subtask, 2.0) == []
    checkpoints.on_over()

    assert checkpoints.on_savepoint_stored(1, 3.0) == [Finish()]


def test_if_such_a_savepoint_could_not_be_stored_the_job_goes_on_with_the_next_attempt():
    checkpoints = stopping()
    checkpoints.on_over()

    assert checkpoints.on_store_failed(1, "disk full", 3.0) == [Abort(1, "disk full")]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_savepoint_with_which_the_job_goes_on_ends_nothing(is_over):
    checkpoints = Checkpoints(ASKED_FOR, "ab", "", 1)
    checkpoints.on_running(0.0)
    checkpoints.request_savepoint("go on", 1.0)
    acknowledge(checkpoints, 1)
    if is_over:
        checkpoints.on_over()

    instructions = checkpoints.on_savepoint_stored(1, 2.0)

    assert not any(isinstance(each, Stop | Finish) for each in instructions)
    assert (instructions == []) == is_over
