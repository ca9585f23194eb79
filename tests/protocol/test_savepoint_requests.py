"""Savepoints among the checkpoints of an attempt: they fail alone and commit nothing."""

import pytest

from stillframe.protocol.checkpoints import (
    Abort,
    Acknowledged,
    AnnounceComplete,
    BreakAttempt,
    Checkpoints,
    CheckpointSettings,
    EndSources,
    Finish,
    LetGo,
    NoteCommitted,
    Stop,
    StoreCheckpoint,
    StoreSavepoint,
    Trigger,
    TriggerSavepoint,
)

HOURLY = CheckpointSettings(interval_seconds=3600.0, timeout_seconds=10.0)
NOWHERE = CheckpointSettings(interval_seconds=None, timeout_seconds=10.0, enabled=False)


def running(settings=HOURLY, committing=""):
    checkpoints = Checkpoints(settings, "ab", committing, 1)
    assert checkpoints.on_running(0.0) == []
    return checkpoints


def acknowledge(checkpoints, checkpoint_id):
    for subtask in "ab":
        answer, instructions = checkpoints.on_acknowledged(checkpoint_id, subtask, subtask.upper())
        assert answer is Acknowledged.COUNTED
    return instructions


def drain(checkpoints, now):
    return [each for subtask in "ab" for each in checkpoints.on_drained(subtask, now)]


def test_nothing_is_announced_of_a_savepoint_and_a_checkpoint_commits_what_was_prepared_for_it():
    checkpoints = running(committing="b")

    assert checkpoints.request_savepoint("go on", 1.0) == [TriggerSavepoint(1, holds=False)]
    assert acknowledge(checkpoints, 1) == [StoreSavepoint(1, {"a": "A", "b": "B"})]
    assert checkpoints.on_savepoint_stored(1, 1.5) == [LetGo(1), Trigger(2)]
    [store] = acknowledge(checkpoints, 2)
    assert isinstance(store, StoreCheckpoint)
    assert checkpoints.on_stored(2, False, 1.6) == [AnnounceComplete(2)]
    assert checkpoints.on_committed(2, "b", 1.7) == [NoteCommitted(2)]


def test_without_a_place_for_checkpoints_a_savepoint_is_taken_all_the_same():
    checkpoints = running(NOWHERE)

    assert checkpoints.request_savepoint("go on", 1.0) == [TriggerSavepoint(1, holds=False)]
    acknowledge(checkpoints, 1)
    assert checkpoints.on_savepoint_stored(1, 1.5) == [LetGo(1)]


def test_it_waits_for_room_in_flight_and_checkpoints_wait_for_it():
    checkpoints = running()
    assert checkpoints.request(1.0) == [Trigger(1)]

    assert checkpoints.request_savepoint("go on", 1.1) == []
    acknowledge(checkpoints, 1)
    assert checkpoints.on_stored(1, False, 1.2) == [
        AnnounceComplete(1),
        NoteCommitted(1),
        TriggerSavepoint(2, holds=False),
    ]
    assert checkpoints.request(1.3) == []


def test_a_newer_checkpoint_that_completes_does_not_take_the_savepoints_place():
    checkpoints = running(CheckpointSettings(3600.0, 10.0, max_concurrent=2))
    checkpoints.request_savepoint("go on", 1.0)
    assert checkpoints.request(1.1) == [Trigger(2)]

    acknowledge(checkpoints, 2)
    done = checkpoints.on_stored(2, False, 1.2)

    assert done == [AnnounceComplete(2), NoteCommitted(2)]
    assert acknowledge(checkpoints, 1) == [StoreSavepoint(1, {"a": "A", "b": "B"})]


def test_one_that_fails_does_not_count_as_a_failed_checkpoint():
    checkpoints = running(CheckpointSettings(3600.0, 10.0, tolerable_failures=0))
    checkpoints.request_savepoint("go on", 1.0)

    assert checkpoints.on_declined(1, "disk full", 1.1) == [Abort(1, "disk full")]
    assert checkpoints.request(1.2) == [Trigger(2)], "the job runs on"
    broken = checkpoints.on_declined(2, "disk full", 1.3)
    assert [type(each) for each in broken] == [Abort, BreakAttempt]


def test_one_that_nobody_acknowledges_in_time_is_given_up():
    checkpoints = running()
    checkpoints.request_savepoint("go on", 1.0)

    [abort] = checkpoints.on_time(11.0)

    assert isinstance(abort, Abort)
    assert checkpoints.request_savepoint("go on", 12.0) == [TriggerSavepoint(2, False)]


def test_a_savepoint_with_which_the_job_stops_is_there_when_all_before_it_is_committed():
    """Somebody who finds it starts from it: what it holds must be out, and nothing else."""
    checkpoints = running(committing="b")

    assert checkpoints.request_savepoint("stop", 1.0) == [TriggerSavepoint(1, holds=True)]
    assert acknowledge(checkpoints, 1) == [], "it is not stored yet"
    assert checkpoints.wake_at_seconds() <= 1.5
    assert checkpoints.on_time(1.5) == [Trigger(2)], "and the job is held"
    acknowledge(checkpoints, 2)
    assert checkpoints.on_stored(2, True, 1.6) == [AnnounceComplete(2)]
    assert checkpoints.on_committed(2, "b", 1.7) == []
    assert checkpoints.on_coordinator_committed(2, 1.8) == [
        NoteCommitted(2),
        StoreSavepoint(1, {"a": "A", "b": "B"}),
    ]
    assert checkpoints.request(1.9) == [], "nothing follows the last checkpoint"
    assert checkpoints.on_savepoint_stored(1, 2.0) == [Stop()]


def test_a_last_checkpoint_of_a_stop_that_fails_is_tried_again():
    checkpoints = running()
    checkpoints.request_savepoint("stop", 1.0)
    acknowledge(checkpoints, 1)
    checkpoints.on_time(1.5)

    assert checkpoints.on_declined(2, "disk full", 1.6) == [Abort(2, "disk full")]
    assert checkpoints.on_time(2.5) == [Trigger(3)]
    acknowledge(checkpoints, 3)
    assert isinstance(checkpoints.on_stored(3, False, 2.6)[-1], StoreSavepoint)
    assert checkpoints.on_savepoint_stored(1, 2.7) == [Stop()]


def test_a_stop_whose_savepoint_cannot_be_stored_in_the_end_lets_the_job_go_on():
    checkpoints = running()
    checkpoints.request_savepoint("stop", 1.0)
    acknowledge(checkpoints, 1)
    checkpoints.on_time(1.5)
    acknowledge(checkpoints, 2)
    checkpoints.on_stored(2, False, 1.6)

    assert checkpoints.on_store_failed(1, "disk full", 1.7) == [Abort(1, "disk full")]
    assert checkpoints.on_time(100.0) == [], "as hourly as before"
    assert checkpoints.request(101.0) == [Trigger(3)]
    acknowledge(checkpoints, 3)
    assert checkpoints.on_stored(3, False, 102.0) == [AnnounceComplete(3), NoteCommitted(3)]
    assert checkpoints.request_savepoint("stop", 103.0) == [TriggerSavepoint(4, holds=True)]


def test_a_job_without_an_interval_takes_no_checkpoint_unasked_after_a_stop_that_failed():
    checkpoints = running(CheckpointSettings(interval_seconds=None, timeout_seconds=10.0))
    checkpoints.request_savepoint("stop", 1.0)
    acknowledge(checkpoints, 1)
    checkpoints.on_time(1.5)
    acknowledge(checkpoints, 2)
    checkpoints.on_stored(2, False, 1.6)
    checkpoints.on_store_failed(1, "disk full", 1.7)

    assert checkpoints.wake_at_seconds() is None


def test_no_second_savepoint_and_no_rest_come_between_a_savepoint_and_the_end():
    checkpoints = running(CheckpointSettings(3600.0, 10.0, max_concurrent=3))
    checkpoints.request_savepoint("stop", 1.0)
    acknowledge(checkpoints, 1)

    assert not checkpoints.can_rest
    with pytest.raises(AssertionError, match="one savepoint at a time"):
        checkpoints.request_savepoint("go on", 1.2)


def test_what_is_in_flight_when_the_job_is_held_ends_before_the_last_checkpoint():
    checkpoints = running(CheckpointSettings(3600.0, 10.0, max_concurrent=2), committing="b")
    assert checkpoints.request(0.5) == [Trigger(1)]
    assert checkpoints.request_savepoint("stop", 1.0) == [TriggerSavepoint(2, holds=True)]
    acknowledge(checkpoints, 1)
    assert checkpoints.on_stored(1, False, 1.1) == [AnnounceComplete(1)]
    acknowledge(checkpoints, 2)

    assert checkpoints.on_time(1.2) == [Trigger(3)]
    acknowledge(checkpoints, 3)
    assert checkpoints.on_stored(3, False, 1.3) == [AnnounceComplete(3)]
    assert checkpoints.on_committed(3, "b", 1.4) == [
        NoteCommitted(1),
        NoteCommitted(3),
        StoreSavepoint(2, {"a": "A", "b": "B"}),
    ]


def test_a_stop_whose_savepoint_fails_lets_the_sources_go_on():
    checkpoints = running()
    checkpoints.request_savepoint("stop", 1.0)

    assert checkpoints.on_declined(1, "disk full", 1.1) == [Abort(1, "disk full")]
    assert checkpoints.request(1.2) == [Trigger(2)]
    acknowledge(checkpoints, 2)
    assert checkpoints.on_stored(2, False, 1.3) == [AnnounceComplete(2), NoteCommitted(2)]


def test_a_job_that_drains_ends_its_sources_first():
    checkpoints = running()
    assert checkpoints.request(0.5) == [Trigger(1)]

    assert checkpoints.request_savepoint("drain", 1.0) == [EndSources()]
    acknowledge(checkpoints, 1)
    checkpoints.on_stored(1, False, 1.2)
    assert drain(checkpoints, 2.0) == [TriggerSavepoint(2, holds=True)]
    acknowledge(checkpoints, 2)
    assert checkpoints.on_time(2.1) == [Trigger(3)]
    acknowledge(checkpoints, 3)
    assert isinstance(checkpoints.on_stored(3, False, 2.2)[-1], StoreSavepoint)
    assert checkpoints.on_savepoint_stored(2, 2.3) == [Finish()]


def test_no_checkpoint_is_taken_while_a_job_drains():
    """A job that went on from one would have told its windows before their time."""
    checkpoints = running(CheckpointSettings(1.0, 10.0, max_concurrent=3))
    checkpoints.request_savepoint("drain", 0.5)

    assert checkpoints.request(0.6) == []
    assert checkpoints.on_time(5.0) == []
    assert checkpoints.on_drained("a", 6.0) == []
    assert checkpoints.on_drained("b", 7.0) == [TriggerSavepoint(1, holds=True)]
    acknowledge(checkpoints, 1)
    assert checkpoints.on_time(7.1) == [Trigger(2)], "which answers whoever asked meanwhile"


def test_a_drained_job_ends_also_if_its_savepoint_fails():
    checkpoints = running()
    checkpoints.request_savepoint("drain", 1.0)
    drain(checkpoints, 2.0)

    assert checkpoints.on_declined(1, "disk full", 2.1) == [Abort(1, "disk full"), Trigger(2)]


def test_a_drained_job_ends_also_if_its_savepoint_cannot_be_stored_in_the_end():
    checkpoints = running()
    checkpoints.request_savepoint("drain", 1.0)
    drain(checkpoints, 2.0)
    acknowledge(checkpoints, 1)
    checkpoints.on_time(2.1)
    acknowledge(checkpoints, 2)
    checkpoints.on_stored(2, False, 2.2)

    assert checkpoints.on_store_failed(1, "disk full", 2.3) == [Abort(1, "disk full"), Finish()]


@pytest.mark.parametrize(("then", "end"), [("stop", Stop()), ("drain", Finish())])
def test_without_checkpoints_the_job_ends_when_the_savepoint_is_there(then, end):
    checkpoints = running(NOWHERE)
    checkpoints.request_savepoint(then, 1.0)
    if then == "drain":
        assert drain(checkpoints, 1.5) == [TriggerSavepoint(1, holds=True)]

    assert acknowledge(checkpoints, 1) == [StoreSavepoint(1, {"a": "A", "b": "B"})]
    assert checkpoints.on_savepoint_stored(1, 2.0) == [end]


def test_a_job_whose_records_end_while_it_stops_is_finished():
    checkpoints = running()
    checkpoints.request_savepoint("stop", 1.0)

    assert drain(checkpoints, 1.1) == [], "the last checkpoint waits for the savepoint"
    acknowledge(checkpoints, 1)
    assert checkpoints.on_time(1.5) == [Trigger(2)]
    acknowledge(checkpoints, 2)
    assert isinstance(checkpoints.on_stored(2, False, 1.6)[-1], StoreSavepoint)
    assert checkpoints.on_savepoint_stored(1, 1.7) == [Finish()]
