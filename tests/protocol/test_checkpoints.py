"""The life of checkpoints, told as what happens and what the coordinator must do."""

from dataclasses import replace
from random import Random

import pytest

from stillframe.protocol.checkpoints import (
    FINAL_RETRY_SECONDS,
    Abort,
    Acknowledged,
    AnnounceComplete,
    BreakAttempt,
    Checkpoints,
    CheckpointSettings,
    Finish,
    NoteCommitted,
    StoreCheckpoint,
    Trigger,
)

EVERY_SECOND = CheckpointSettings(interval_seconds=1.0, timeout_seconds=10.0)
ONLY_AT_THE_END = CheckpointSettings(interval_seconds=None, timeout_seconds=10.0)
NOWHERE = CheckpointSettings(interval_seconds=None, timeout_seconds=10.0, enabled=False)


def job(settings=EVERY_SECOND, subtasks="ab", committing="", first_id=1):
    return Checkpoints(settings, subtasks, committing, first_id)


def running(settings=EVERY_SECOND, subtasks="ab", committing="", now=0.0):
    checkpoints = job(settings, subtasks, committing)
    assert checkpoints.on_running(now) == []
    return checkpoints


def acknowledge(checkpoints, checkpoint_id, subtasks="ab"):
    """Every subtask acknowledges; what the last one sets off."""
    for subtask in subtasks:
        answer, instructions = checkpoints.on_acknowledged(checkpoint_id, subtask, subtask.upper())
        assert answer is Acknowledged.COUNTED
    return instructions


def complete(checkpoints, checkpoint_id, now, coordinator_commits=False, subtasks="ab"):
    [store] = acknowledge(checkpoints, checkpoint_id, subtasks)
    assert isinstance(store, StoreCheckpoint)
    return checkpoints.on_stored(checkpoint_id, coordinator_commits, now)


def drain(checkpoints, now, subtasks="ab"):
    return [each for subtask in subtasks for each in checkpoints.on_drained(subtask, now)]


def test_nothing_is_triggered_before_every_subtask_runs():
    checkpoints = job()

    assert checkpoints.on_time(5.0) == []
    assert checkpoints.wake_at_seconds() is None


def test_the_first_checkpoint_comes_one_interval_after_the_start():
    checkpoints = running(now=5.0)

    assert checkpoints.wake_at_seconds() == 6.0
    assert checkpoints.on_time(5.9) == []
    assert checkpoints.on_time(6.0) == [Trigger(1)]
    assert checkpoints.in_progress == 1


def test_a_checkpoint_is_stored_when_the_last_subtask_acknowledges_and_announced_when_stored():
    checkpoints = running()
    checkpoints.on_time(1.0)

    assert checkpoints.on_acknowledged(1, "a", "A") == (Acknowledged.COUNTED, [])
    assert checkpoints.on_acknowledged(1, "b", "B") == (
        Acknowledged.COUNTED,
        [StoreCheckpoint(1, 1.0, {"a": "A", "b": "B"})],
    )
    assert checkpoints.on_stored(1, False, 1.2) == [AnnounceComplete(1), NoteCommitted(1)]
    assert checkpoints.in_progress == 0


def test_intervals_are_counted_from_trigger_to_trigger():
    checkpoints = running()
    checkpoints.on_time(1.0)
    complete(checkpoints, 1, now=1.7)

    assert checkpoints.wake_at_seconds() == 2.0
    assert checkpoints.on_time(2.0) == [Trigger(2)]


def test_one_that_is_overdue_starts_as_soon_as_the_one_before_is_complete():
    checkpoints = running()
    checkpoints.on_time(1.0)

    assert checkpoints.on_time(2.5) == [], "one at a time"
    assert complete(checkpoints, 1, now=3.0) == [AnnounceComplete(1), NoteCommitted(1), Trigger(2)]


def test_the_pause_keeps_an_overdue_checkpoint_waiting():
    settings = CheckpointSettings(interval_seconds=1.0, timeout_seconds=10.0, min_pause_seconds=0.5)
    checkpoints = running(settings)
    checkpoints.on_time(1.0)

    assert complete(checkpoints, 1, now=3.0) == [AnnounceComplete(1), NoteCommitted(1)]
    assert checkpoints.wake_at_seconds() == 3.5
    assert checkpoints.on_time(3.4) == []
    assert checkpoints.on_time(3.5) == [Trigger(2)]


def test_a_checkpoint_that_takes_too_long_is_aborted_and_says_who_is_missing():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_acknowledged(1, "a", "A")

    assert checkpoints.wake_at_seconds() == 11.0
    assert checkpoints.on_time(10.9) == []
    aborted, following = checkpoints.on_time(11.0)
    assert aborted == Abort(
        1, "it took longer than 10 s and 1 of 2 subtasks had not acknowledged it: b"
    )
    assert following == Trigger(2)


def test_a_checkpoint_that_is_being_stored_does_not_time_out():
    checkpoints = running()
    checkpoints.on_time(1.0)
    acknowledge(checkpoints, 1)

    assert checkpoints.wake_at_seconds() is None
    assert checkpoints.on_time(100.0) == []
    assert checkpoints.on_stored(1, False, 100.0)[0] == AnnounceComplete(1)


def test_one_subtask_that_declines_aborts_the_checkpoint():
    checkpoints = running()
    checkpoints.on_time(1.0)

    assert checkpoints.on_declined(1, "its disk is full", 1.1) == [Abort(1, "its disk is full")]
    assert checkpoints.on_time(2.0) == [Trigger(2)], "an id is used once"


def test_what_is_declined_late_or_twice_changes_nothing():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_declined(1, "first", 1.1)

    assert checkpoints.on_declined(1, "second", 1.2) == []
    checkpoints.on_time(2.0)
    assert checkpoints.on_declined(1, "third", 2.1) == []
    assert checkpoints.in_progress == 1


def test_a_checkpoint_that_everybody_acknowledged_can_no_longer_be_declined():
    checkpoints = running()
    checkpoints.on_time(1.0)
    acknowledge(checkpoints, 1)

    assert checkpoints.on_declined(1, "too late", 1.1) == []
    assert checkpoints.on_stored(1, False, 1.2) == [AnnounceComplete(1), NoteCommitted(1)]


def test_an_acknowledgement_counts_once_and_only_while_its_checkpoint_is_pending():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_acknowledged(1, "a", "A")

    assert checkpoints.on_acknowledged(1, "a", "again") == (Acknowledged.DUPLICATE, [])
    _, [store] = checkpoints.on_acknowledged(1, "b", "B")
    assert store.acknowledged == {"a": "A", "b": "B"}
    checkpoints.on_stored(1, False, 1.1)
    assert checkpoints.on_acknowledged(1, "b", "B") == (Acknowledged.TOO_LATE, [])
    assert checkpoints.on_acknowledged(7, "b", "B") == (Acknowledged.TOO_LATE, [])


def test_an_acknowledgement_of_an_aborted_checkpoint_does_not_count_for_the_next():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_acknowledged(1, "a", "A")
    checkpoints.on_declined(1, "no", 1.5)
    checkpoints.on_time(2.0)

    assert checkpoints.on_acknowledged(1, "b", "B") == (Acknowledged.TOO_LATE, [])
    assert checkpoints.on_acknowledged(2, "b", "B") == (Acknowledged.COUNTED, [])


def test_metadata_that_cannot_be_written_aborts_the_checkpoint_and_the_next_one_follows():
    checkpoints = running()
    checkpoints.on_time(1.0)
    acknowledge(checkpoints, 1)

    assert checkpoints.on_store_failed(1, "disk full", 1.2) == [Abort(1, "disk full")]
    assert checkpoints.on_time(2.0) == [Trigger(2)]


def test_a_requested_checkpoint_starts_at_once_whatever_the_interval_and_the_pause():
    settings = CheckpointSettings(
        interval_seconds=60.0, timeout_seconds=10.0, min_pause_seconds=30.0
    )
    checkpoints = running(settings)

    assert checkpoints.request(1.0) == [Trigger(1)]
    complete(checkpoints, 1, now=1.1)
    assert checkpoints.request(1.2) == [Trigger(2)]


def test_a_checkpoint_requested_during_another_follows_it_at_once():
    checkpoints = running(ONLY_AT_THE_END)
    checkpoints.request(1.0)

    assert checkpoints.request(1.5) == []
    assert complete(checkpoints, 1, now=2.0) == [AnnounceComplete(1), NoteCommitted(1), Trigger(2)]
    once = complete(checkpoints, 2, now=3.0)
    assert once == [AnnounceComplete(2), NoteCommitted(2)], "it was asked for once"


def test_a_checkpoint_requested_before_the_start_begins_with_it():
    checkpoints = job(ONLY_AT_THE_END)

    assert checkpoints.request(0.5) == []
    assert checkpoints.on_running(1.0) == [Trigger(1)]


def test_without_an_interval_nothing_is_triggered_until_the_records_end():
    checkpoints = running(ONLY_AT_THE_END)

    assert checkpoints.wake_at_seconds() is None
    assert checkpoints.on_time(1000.0) == []
    assert drain(checkpoints, 1000.0) == [Trigger(1)]


def test_when_the_last_subtask_is_drained_the_last_checkpoint_starts_at_once_and_ends_the_job():
    checkpoints = running()

    assert checkpoints.on_drained("a", 0.2) == []
    assert checkpoints.on_drained("b", 0.3) == [Trigger(1)]
    assert complete(checkpoints, 1, now=0.4) == [AnnounceComplete(1), NoteCommitted(1), Finish()]
    assert checkpoints.on_time(100.0) == []
    assert checkpoints.request(100.0) == []
    assert checkpoints.wake_at_seconds() is None


def test_a_subtask_that_says_twice_that_it_is_drained_counts_once():
    checkpoints = running()

    assert drain(checkpoints, 0.2, "aa") == []
    assert drain(checkpoints, 0.3, "b") == [Trigger(1)]
    assert drain(checkpoints, 0.4, "b") == []


def test_subtasks_that_are_drained_before_all_run_get_their_last_checkpoint_with_the_start():
    checkpoints = job()

    assert drain(checkpoints, 0.1) == []
    assert checkpoints.on_running(0.2) == [Trigger(1)]


def test_records_that_end_during_a_checkpoint_get_one_of_their_own_right_after_it():
    checkpoints = running()
    checkpoints.on_time(1.0)

    assert drain(checkpoints, 1.1) == []
    assert complete(checkpoints, 1, now=1.2) == [AnnounceComplete(1), NoteCommitted(1), Trigger(2)]
    assert complete(checkpoints, 2, now=1.3) == [AnnounceComplete(2), NoteCommitted(2), Finish()]


def test_records_that_end_during_a_checkpoint_that_fails_get_theirs_without_a_pause():
    settings = CheckpointSettings(
        interval_seconds=60.0, timeout_seconds=10.0, min_pause_seconds=30.0
    )
    checkpoints = running(settings)
    checkpoints.request(1.0)
    drain(checkpoints, 1.1)

    assert checkpoints.on_declined(1, "no", 1.2) == [Abort(1, "no"), Trigger(2)]


def test_a_last_checkpoint_that_fails_is_tried_again():
    checkpoints = running(ONLY_AT_THE_END)
    drain(checkpoints, 5.0)

    assert checkpoints.on_declined(1, "disk full", 5.1) == [Abort(1, "disk full")]
    assert checkpoints.wake_at_seconds() == 5.0 + FINAL_RETRY_SECONDS
    assert checkpoints.on_time(5.0 + FINAL_RETRY_SECONDS) == [Trigger(2)]
    assert complete(checkpoints, 2, now=7.0) == [AnnounceComplete(2), NoteCommitted(2), Finish()]


def test_a_last_checkpoint_that_fails_is_tried_again_soon_even_if_the_interval_is_long():
    settings = CheckpointSettings(interval_seconds=600.0, timeout_seconds=10.0)
    checkpoints = running(settings)
    drain(checkpoints, 5.0)
    checkpoints.on_declined(1, "disk full", 5.1)

    assert checkpoints.on_time(5.0 + FINAL_RETRY_SECONDS) == [Trigger(2)]


def test_without_a_place_for_checkpoints_the_job_ends_when_it_is_drained():
    checkpoints = running(NOWHERE)

    assert checkpoints.request(0.5) == []
    assert drain(checkpoints, 1.0) == [Finish()]
    assert checkpoints.on_time(2.0) == []


def test_the_job_ends_only_when_every_sink_has_committed_the_last_checkpoint():
    checkpoints = running(committing="ab")
    drain(checkpoints, 0.5)

    assert complete(checkpoints, 1, now=0.6) == [AnnounceComplete(1)]
    assert checkpoints.on_committed(1, "a", 2.0) == []
    assert checkpoints.on_committed(1, "a", 2.0) == []
    assert checkpoints.on_committed(1, "b", 2.0) == [NoteCommitted(1), Finish()]
    assert checkpoints.on_committed(1, "b", 2.0) == []


def test_commits_of_an_older_checkpoint_do_not_end_the_job():
    checkpoints = running(committing="a")
    checkpoints.on_time(1.0)
    drain(checkpoints, 1.1)
    complete(checkpoints, 1, now=1.2)

    assert checkpoints.on_committed(1, "a", 2.0) == [NoteCommitted(1), Trigger(2)]
    complete(checkpoints, 2, now=2.1)
    assert checkpoints.on_committed(1, "a", 2.2) == []
    assert checkpoints.on_committed(2, "a", 2.3) == [NoteCommitted(2), Finish()]


def test_the_next_checkpoint_waits_until_the_one_before_is_committed_everywhere():
    checkpoints = running(committing="ab")
    checkpoints.on_time(1.0)
    complete(checkpoints, 1, now=1.1)

    assert checkpoints.on_time(5.0) == []
    assert checkpoints.on_committed(1, "a", 6.0) == []
    assert checkpoints.on_committed(1, "b", 7.0) == [NoteCommitted(1), Trigger(2)]


def test_a_slot_that_does_not_commit_in_time_breaks_the_attempt():
    checkpoints = running(committing="ab")
    checkpoints.on_time(1.0)
    complete(checkpoints, 1, now=1.1)
    checkpoints.on_committed(1, "a", 2.0)
    deadline = checkpoints.wake_at_seconds()

    assert checkpoints.on_time(deadline - 0.1) == []
    (broken,) = checkpoints.on_time(deadline)
    assert isinstance(broken, BreakAttempt)
    assert "1 of 2 subtasks with sinks have not committed checkpoint 1" in broken.reason


def test_who_has_not_committed_is_named_and_not_said_to_wait_for_a_barrier():
    def in_words(subtask, checkpoint_id):
        return subtask if checkpoint_id is None else f"{subtask}: its barrier has not come"

    checkpoints = Checkpoints(EVERY_SECOND, "ab", "ab", 1, in_words=in_words)
    checkpoints.on_running(0.0)
    checkpoints.on_time(1.0)
    complete(checkpoints, 1, now=1.1)

    (broken,) = checkpoints.on_time(checkpoints.wake_at_seconds())
    assert broken.reason.endswith("within 10 s: a; b")


def test_the_coordinators_own_commits_hold_up_the_next_checkpoint():
    checkpoints = running()
    checkpoints.on_time(1.0)

    assert complete(checkpoints, 1, now=1.1, coordinator_commits=True) == [AnnounceComplete(1)]
    assert checkpoints.wake_at_seconds() is None
    assert checkpoints.on_time(5.0) == []
    assert checkpoints.request(5.5) == []
    assert checkpoints.on_coordinator_committed(1, 6.0) == [NoteCommitted(1), Trigger(2)]


def test_the_job_ends_only_when_the_coordinator_has_committed_too():
    checkpoints = running(committing="a")
    drain(checkpoints, 0.5)
    complete(checkpoints, 1, now=0.6, coordinator_commits=True)

    assert checkpoints.on_committed(1, "a", 2.0) == []
    assert checkpoints.on_coordinator_committed(1, 1.0) == [NoteCommitted(1), Finish()]


def test_records_that_end_while_the_coordinator_commits_wait_for_it():
    checkpoints = running()
    checkpoints.on_time(1.0)
    complete(checkpoints, 1, now=1.1, coordinator_commits=True)

    assert drain(checkpoints, 1.2) == []
    assert checkpoints.on_coordinator_committed(1, 1.3) == [NoteCommitted(1), Trigger(2)]


def test_ids_go_on_from_where_the_attempt_before_stopped():
    checkpoints = job(first_id=8)
    checkpoints.on_running(0.0)

    assert checkpoints.on_time(1.0) == [Trigger(8)]
    assert checkpoints.next_id == 9


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_uses_ids_once_completes_once_and_ends(seed):
    """Play one random schedule: messages lost, late, doubled and declined, then let it heal."""
    _Schedule(Random(seed)).play()


class _Schedule:
    """A coordinator and its subtasks, with everything on the way between them in one bag."""

    def __init__(self, random):
        self.random = random
        self.subtasks = range(random.randint(1, 4))
        self.committing = {s for s in self.subtasks if random.random() < 0.5}
        self.coordinator_commits = random.random() < 0.3
        self.settings = CheckpointSettings(
            interval_seconds=random.choice([None, 1.0, 3.0]),
            timeout_seconds=5.0,
            min_pause_seconds=random.choice([0.0, 0.5, 4.0]),
        )
        self.checkpoints = Checkpoints(self.settings, self.subtasks, self.committing, 1)
        self.now = 0.0
        self.on_the_way = [("running",)]
        self.triggered, self.completed, self.aborted = [], [], []
        self.triggered_after_the_records = set()
        self.undrained = set(self.subtasks)
        self.pending = self.storing = None
        self.commits_running = False
        self.commits_reported = set()
        self.finished = False
        self.healed = False

    def play(self):
        for _ in range(self.random.randint(20, 120)):
            self.step()
        self.healed = True
        self.on_the_way += [("drained", s) for s in self.undrained]
        for _ in range(2000):
            if self.finished:
                break
            self.step()
        assert self.finished, "the healed job does not end"

    def step(self):
        if self.finished:
            return
        if self.on_the_way and self.random.random() < 0.8:
            place = self.random.randrange(len(self.on_the_way))
            self.deliver(self.on_the_way.pop(place))
        elif not self.healed and self.random.random() < 0.1:
            self.carry_out(self.checkpoints.request(self.now))
        elif not self.healed and self.undrained and self.random.random() < 0.1:
            self.on_the_way.append(("drained", self.random.choice(sorted(self.undrained))))
        else:
            self.let_time_pass()
        self.check_that_something_will_happen()

    def deliver(self, mail):
        checkpoints, now = self.checkpoints, self.now
        if self.random.random() < 0.1:
            self.on_the_way.append(mail) if mail[0] in ("ack", "drained", "commit") else None
        match mail:
            case ("running",):
                self.carry_out(checkpoints.on_running(now))
            case ("ack", checkpoint_id, subtask):
                answer, instructions = checkpoints.on_acknowledged(checkpoint_id, subtask, "state")
                if checkpoint_id != self.pending:
                    assert answer is Acknowledged.TOO_LATE
                self.carry_out(instructions)
            case ("decline", checkpoint_id):
                self.carry_out(checkpoints.on_declined(checkpoint_id, "declined", now))
            case ("stored", checkpoint_id):
                self.pending = self.storing = None
                self.completed.append(checkpoint_id)
                self.commits_running = self.coordinator_commits
                if self.coordinator_commits:
                    self.on_the_way.append(("epoch", checkpoint_id))
                self.carry_out(checkpoints.on_stored(checkpoint_id, self.coordinator_commits, now))
            case ("store failed", checkpoint_id):
                self.carry_out(checkpoints.on_store_failed(checkpoint_id, "disk full", now))
            case ("commit", checkpoint_id, subtask):
                self.commits_reported.add((checkpoint_id, subtask))
                self.carry_out(checkpoints.on_committed(checkpoint_id, subtask, now))
            case ("epoch", _):
                self.commits_running = False
                self.carry_out(checkpoints.on_coordinator_committed(mail[1], now))
            case ("drained", subtask):
                self.undrained.discard(subtask)
                self.carry_out(checkpoints.on_drained(subtask, now))

    def let_time_pass(self):
        wake_at = self.checkpoints.wake_at_seconds()
        step = self.random.choice([0.1, 1.0])
        if wake_at is not None:
            step = max(0.0, wake_at - self.now) if self.random.random() < 0.5 else step
        self.now += step
        self.carry_out(self.checkpoints.on_time(self.now))

    def carry_out(self, instructions):
        for instruction in instructions:
            assert not self.finished, "the job has ended"
            match instruction:
                case Trigger(checkpoint_id):
                    self.on_triggered(checkpoint_id)
                case StoreCheckpoint(checkpoint_id, _, acknowledged):
                    assert checkpoint_id == self.pending
                    assert self.storing is None
                    assert set(acknowledged) == set(self.subtasks)
                    self.storing = checkpoint_id
                    fails = not self.healed and self.random.random() < 0.2
                    self.on_the_way.append(("store failed" if fails else "stored", checkpoint_id))
                case AnnounceComplete(checkpoint_id):
                    assert self.completed[-1] == checkpoint_id
                    assert len(set(self.completed)) == len(self.completed)
                    assert checkpoint_id not in self.aborted
                    self.on_the_way += [("commit", checkpoint_id, s) for s in self.committing]
                case Abort(checkpoint_id):
                    assert checkpoint_id == self.pending
                    assert checkpoint_id not in self.completed
                    self.aborted.append(checkpoint_id)
                    self.pending = self.storing = None
                case BreakAttempt():
                    assert self.has_uncommitted(), "nothing is missing"
                    self.finished = True
                case Finish():
                    self.check_the_end()
                    self.finished = True

    def on_triggered(self, checkpoint_id):
        assert self.pending is None, "one at a time"
        assert not self.commits_running, "the coordinator is still committing"
        assert not self.has_uncommitted(), "a slot is still committing"
        assert checkpoint_id == len(self.triggered) + 1
        self.triggered.append(checkpoint_id)
        self.pending = checkpoint_id
        if not self.undrained:
            self.triggered_after_the_records.add(checkpoint_id)
        for subtask in self.subtasks:
            fate = 1.0 if self.healed else self.random.random()
            if fate < 0.05:
                self.on_the_way.append(("decline", checkpoint_id))
            if fate < 0.02 or fate > 0.1:
                self.on_the_way.append(("ack", checkpoint_id, subtask))

    def has_uncommitted(self):
        last = self.completed[-1:]
        return any((n, s) not in self.commits_reported for n in last for s in self.committing)

    def check_the_end(self):
        assert not self.undrained
        last = self.completed[-1]
        assert last in self.triggered_after_the_records, "records are in no checkpoint"
        assert {(last, s) for s in self.committing} <= self.commits_reported
        assert not self.commits_running

    def check_that_something_will_happen(self):
        """No stall: what is over leaves either mail, a time to wake at, or nothing to do."""
        if self.finished or self.on_the_way:
            return
        nothing_to_do = self.settings.interval_seconds is None and self.undrained
        assert self.checkpoints.wake_at_seconds() is not None or nothing_to_do, "it stalls"


# --- What was restored


def restored(settings=EVERY_SECOND, committing="ab"):
    checkpoints = Checkpoints(settings, "ab", committing, first_id=5, restored=4)
    assert checkpoints.on_running(0.0) == []
    return checkpoints


def test_what_was_restored_is_committed_everywhere_before_the_first_checkpoint_begins():
    checkpoints = restored()

    assert checkpoints.on_time(1.0) == []
    assert checkpoints.on_committed(4, "a", 1.5) == []
    assert checkpoints.on_committed(4, "b", 2.0) == [NoteCommitted(4), Trigger(5)]


def test_with_room_for_more_in_flight_a_checkpoint_is_taken_but_not_stored_before_that():
    checkpoints = restored(replace(EVERY_SECOND, max_concurrent=2))
    assert checkpoints.on_time(1.0) == [Trigger(5)]

    assert acknowledge(checkpoints, 5) == []
    checkpoints.on_committed(4, "a", 2.0)
    noted, *more = checkpoints.on_committed(4, "b", 2.0)
    assert noted == NoteCommitted(4)
    assert [type(each) for each in more] == [Trigger, StoreCheckpoint]


def test_a_sink_may_have_committed_what_was_restored_before_the_last_slot_runs():
    checkpoints = Checkpoints(EVERY_SECOND, "ab", "ab", first_id=5, restored=4)
    assert checkpoints.on_committed(4, "a", 0.0) == []
    assert checkpoints.on_committed(4, "b", 0.0) == [NoteCommitted(4)]
    assert checkpoints.wake_at_seconds() is None

    assert checkpoints.on_running(0.0) == []
    assert checkpoints.on_time(1.0) == [Trigger(5)]


def test_what_was_restored_and_is_not_committed_in_time_breaks_the_attempt():
    checkpoints = restored()
    assert checkpoints.wake_at_seconds() == 10.0

    (broken,) = checkpoints.on_time(10.0)
    assert isinstance(broken, BreakAttempt)
    assert "have not committed checkpoint 4" in broken.reason


def test_where_no_slot_commits_nothing_is_waited_for():
    assert restored(committing="").on_time(1.0) == [Trigger(5)]
