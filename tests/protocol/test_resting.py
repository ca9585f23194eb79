"""A job asked to rest: one last checkpoint with its sources held, or nothing has changed."""

from dataclasses import replace

import pytest

from stillframe.protocol.checkpoints import (
    FINAL_RETRY_SECONDS,
    Abort,
    Acknowledged,
    AnnounceComplete,
    BreakAttempt,
    Checkpoints,
    CheckpointSettings,
    EndSources,
    Finish,
    NoteCommitted,
    Stop,
    StoreCheckpoint,
    Trigger,
    TriggerSavepoint,
)

HOURLY = CheckpointSettings(interval_seconds=3600.0, timeout_seconds=10.0)
REST = Trigger(1, holds=True)


def running(settings=HOURLY, committing=""):
    checkpoints = Checkpoints(settings, "ab", committing, 1)
    assert checkpoints.on_running(0.0) == []
    return checkpoints


def acknowledge(checkpoints, checkpoint_id):
    for subtask in "ab":
        answer, instructions = checkpoints.on_acknowledged(checkpoint_id, subtask, subtask.upper())
        assert answer is Acknowledged.COUNTED
    return instructions


def test_it_stops_when_its_last_checkpoint_is_committed_everywhere_and_not_before():
    checkpoints = running(committing="ab")

    assert checkpoints.request_rest(1.0) == [REST]
    assert checkpoints.resting_with == 1
    [store] = acknowledge(checkpoints, 1)
    assert isinstance(store, StoreCheckpoint)
    assert checkpoints.on_stored(1, True, 1.1) == [AnnounceComplete(1)]
    assert checkpoints.on_committed(1, "a", 1.2) == []
    assert checkpoints.on_coordinator_committed(1, 1.3) == []
    assert checkpoints.on_committed(1, "b", 1.4) == [NoteCommitted(1), Stop()]


def test_nothing_is_triggered_while_it_comes_to_rest():
    checkpoints = running(CheckpointSettings(1.0, 10.0, max_concurrent=3), committing="a")

    checkpoints.request_rest(0.5)
    assert checkpoints.request(0.6) == []
    assert checkpoints.on_time(2.0) == []
    acknowledge(checkpoints, 1)
    assert checkpoints.on_stored(1, False, 3.0) == [AnnounceComplete(1)]
    assert checkpoints.on_time(9.0) == []


def test_it_waits_for_what_is_in_flight_and_then_holds_what_was_asked_for_meanwhile():
    checkpoints = running()
    assert checkpoints.request(1.0) == [Trigger(1)]

    assert checkpoints.request_rest(1.1) == []
    assert checkpoints.request(1.2) == []
    acknowledge(checkpoints, 1)
    rest = Trigger(2, holds=True)
    assert checkpoints.on_stored(1, False, 1.3) == [AnnounceComplete(1), NoteCommitted(1), rest]


def test_asked_before_its_slots_run_it_rests_as_soon_as_they_do():
    checkpoints = Checkpoints(HOURLY, "ab", "", 1)

    assert checkpoints.request_rest(0.0) == []
    assert checkpoints.on_running(1.0) == [REST]


@pytest.mark.parametrize(
    "fail",
    [
        lambda checkpoints: checkpoints.on_declined(1, "disk full", 2.0),
        lambda checkpoints: checkpoints.on_time(11.0),
    ],
    ids=["declined", "expired"],
)
def test_if_its_checkpoint_fails_it_goes_on_as_if_nobody_had_asked(fail):
    checkpoints = running()
    checkpoints.request_rest(1.0)

    [abort] = fail(checkpoints)
    assert isinstance(abort, Abort)
    assert checkpoints.resting_with is None
    assert checkpoints.can_rest
    assert checkpoints.request(12.0) == [Trigger(2)]
    acknowledge(checkpoints, 2)
    assert checkpoints.on_stored(2, False, 12.1) == [AnnounceComplete(2), NoteCommitted(2)]
    assert checkpoints.on_time(3613.0) == [Trigger(3)]


def test_its_failed_checkpoint_counts_like_any_other():
    checkpoints = running(CheckpointSettings(3600.0, 10.0, tolerable_failures=0))
    checkpoints.request_rest(1.0)

    aborted, broken = checkpoints.on_declined(1, "disk full", 2.0)
    assert isinstance(aborted, Abort)
    assert isinstance(broken, BreakAttempt)


def test_records_that_end_while_it_comes_to_rest_end_in_the_next_attempt():
    """What ended behind the barrier is not in the checkpoint, so this attempt must not finish."""
    checkpoints = running()
    checkpoints.request_rest(1.0)
    for subtask in "ab":
        assert checkpoints.on_drained(subtask, 1.1) == []
    acknowledge(checkpoints, 1)

    assert checkpoints.on_stored(1, False, 1.2) == [AnnounceComplete(1), NoteCommitted(1), Stop()]


def test_records_that_have_ended_need_no_rest():
    checkpoints = running()
    checkpoints.on_drained("a", 1.0)
    assert checkpoints.can_rest
    assert checkpoints.on_drained("b", 1.0) == [Trigger(1)]

    assert not checkpoints.can_rest


def test_records_that_end_before_there_is_room_make_the_last_checkpoint_an_ordinary_one():
    checkpoints = running()
    checkpoints.request(1.0)
    checkpoints.request_rest(1.1)
    for subtask in "ab":
        checkpoints.on_drained(subtask, 1.2)
    acknowledge(checkpoints, 1)

    assert checkpoints.on_stored(1, False, 1.3)[-1] == Trigger(2, holds=False)


@pytest.mark.parametrize("then", ["stop", "drain"])
def test_a_job_that_stops_with_a_savepoint_does_not_rest(then):
    checkpoints = running()
    checkpoints.request_savepoint(then, 1.0)

    assert not checkpoints.can_rest


def test_a_savepoint_that_is_being_taken_is_not_cut_off():
    checkpoints = running(CheckpointSettings(3600.0, 10.0, max_concurrent=2))
    assert checkpoints.request_savepoint("go on", 1.0) == [TriggerSavepoint(1, False)]

    assert checkpoints.request_rest(1.1) == []
    acknowledge(checkpoints, 1)
    assert checkpoints.on_savepoint_stored(1, 1.2)[-1] == Trigger(2, holds=True)


def test_it_is_asked_once():
    checkpoints = running()
    checkpoints.request_rest(1.0)

    assert not checkpoints.can_rest


def test_without_a_place_for_checkpoints_there_is_nothing_to_go_on_from():
    nowhere = CheckpointSettings(interval_seconds=None, timeout_seconds=10.0, enabled=False)

    assert not running(nowhere).can_rest


# --- a job that stops when it has read what was there ---


def reading(settings=HOURLY, sources="a"):
    checkpoints = Checkpoints(settings, "ab", "", 1, stops_after=sources)
    assert checkpoints.on_running(0.0) == []
    return checkpoints


def rested(checkpoints, checkpoint_id, now):
    [store] = acknowledge(checkpoints, checkpoint_id)
    assert isinstance(store, StoreCheckpoint)
    return checkpoints.on_stored(checkpoint_id, False, now)


def test_when_all_sources_have_read_what_was_there_the_job_rests_at_once_and_stops():
    checkpoints = reading(sources="ab")

    assert checkpoints.on_caught_up("a", 1.0) == []
    assert checkpoints.on_caught_up("b", 2.0) == [REST]
    assert checkpoints.on_caught_up("b", 2.1) == [], "the message came twice"
    assert rested(checkpoints, 1, 2.2) == [AnnounceComplete(1), NoteCommitted(1), Stop()]


def test_a_source_that_ends_is_not_waited_for():
    checkpoints = reading(sources="ab")
    assert checkpoints.on_drained("a", 1.0) == []
    assert checkpoints.on_caught_up("b", 2.0) == [REST]

    checkpoints = reading(sources="ab")
    assert checkpoints.on_caught_up("b", 1.0) == []
    assert checkpoints.on_drained("a", 2.0) == [REST]


def test_where_every_source_has_ended_the_job_finishes_as_any_other():
    checkpoints = reading(sources="ab")

    checkpoints.on_drained("a", 1.0)
    assert checkpoints.on_drained("b", 1.0) == [Trigger(1)]
    assert rested(checkpoints, 1, 2.2) == [AnnounceComplete(1), NoteCommitted(1), Finish()]


def test_a_rest_that_fails_at_the_end_of_what_was_there_is_tried_again_after_a_while():
    checkpoints = reading()
    checkpoints.on_caught_up("a", 1.0)

    assert checkpoints.on_declined(1, "disk full", 1.1) == [Abort(1, "disk full")]
    assert checkpoints.wake_at_seconds() == 1.0 + FINAL_RETRY_SECONDS
    again = replace(REST, checkpoint_id=2)
    assert checkpoints.on_time(1.0 + FINAL_RETRY_SECONDS) == [again]


def test_what_was_there_may_be_read_before_all_run_or_while_a_checkpoint_is_in_flight():
    early = Checkpoints(HOURLY, "ab", "", 1, stops_after="a")
    assert early.on_caught_up("a", 0.0) == []
    assert early.on_running(1.0) == [REST]

    checkpoints = reading()
    checkpoints.request(1.0)
    assert checkpoints.on_caught_up("a", 1.1) == []
    assert rested(checkpoints, 1, 1.2) == [
        AnnounceComplete(1),
        NoteCommitted(1),
        replace(REST, checkpoint_id=2),
    ]


def test_a_job_that_keeps_nothing_ends_with_what_was_there():
    checkpoints = reading(CheckpointSettings(None, 10.0, enabled=False))

    assert checkpoints.on_caught_up("a", 1.0) == [EndSources()]
    assert checkpoints.on_drained("a", 1.2) == []
    assert checkpoints.on_drained("b", 1.2) == [Finish()]
