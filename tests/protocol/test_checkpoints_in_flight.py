"""Several checkpoints in flight, and how many may fail: the stories, and any schedule."""

import math
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


def running(max_concurrent=2, committing="", subtasks="ab", **changes):
    settings = {"interval_seconds": 1.0, "timeout_seconds": 10.0, **changes}
    checkpoints = Checkpoints(
        CheckpointSettings(max_concurrent=max_concurrent, **settings), subtasks, committing, 1
    )
    assert checkpoints.on_running(0.0) == []
    return checkpoints


def acknowledge(checkpoints, checkpoint_id, subtasks="ab"):
    """What the acknowledgements of these subtasks set off."""
    set_off = []
    for subtask in subtasks:
        answer, instructions = checkpoints.on_acknowledged(checkpoint_id, subtask, "state")
        assert answer is Acknowledged.COUNTED
        set_off += instructions
    return set_off


def stored(checkpoint_id, triggered_at_seconds):
    return StoreCheckpoint(checkpoint_id, triggered_at_seconds, {"a": "state", "b": "state"})


def complete(checkpoints, checkpoint_id, now, coordinator_commits=False):
    [store] = acknowledge(checkpoints, checkpoint_id)
    assert store.checkpoint_id == checkpoint_id
    return checkpoints.on_stored(checkpoint_id, coordinator_commits, now)


def drain(checkpoints, now):
    return [each for subtask in "ab" for each in checkpoints.on_drained(subtask, now)]


# --- triggers ---


def test_the_next_checkpoint_starts_an_interval_after_the_last_while_that_is_pending():
    checkpoints = running()

    assert checkpoints.on_time(1.0) == [Trigger(1)]
    assert checkpoints.wake_at_seconds() == 2.0
    assert checkpoints.on_time(1.9) == []
    assert checkpoints.on_time(2.0) == [Trigger(2)]
    assert checkpoints.in_progress == 2


def test_when_as_many_are_pending_as_may_be_the_next_waits_for_room():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    assert checkpoints.on_time(3.0) == []
    assert checkpoints.wake_at_seconds() == 11.0, "when the first has taken too long"
    assert complete(checkpoints, 1, 3.5) == [AnnounceComplete(1), NoteCommitted(1), Trigger(3)]


def test_a_complete_checkpoint_takes_up_room_until_it_is_committed_everywhere():
    checkpoints = running(committing="a")
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    assert complete(checkpoints, 1, 3.5) == [AnnounceComplete(1)]
    assert checkpoints.on_time(4.0) == []
    assert checkpoints.on_committed(1, "a", 4.5) == [NoteCommitted(1), Trigger(3)]


def test_a_requested_checkpoint_starts_at_once_while_another_is_pending():
    checkpoints = running()
    checkpoints.on_time(1.0)

    assert checkpoints.request(1.1) == [Trigger(2)]
    assert checkpoints.request(1.2) == [], "no room: it follows"
    assert checkpoints.on_declined(2, "no", 1.3) == [Abort(2, "no"), Trigger(3)]


def test_with_a_pause_between_them_checkpoints_do_not_overlap():
    checkpoints = running(max_concurrent=3, min_pause_seconds=0.5)
    checkpoints.on_time(1.0)

    assert checkpoints.on_time(2.5) == []
    assert checkpoints.request(2.6) == []
    assert complete(checkpoints, 1, 3.0) == [AnnounceComplete(1), NoteCommitted(1), Trigger(2)]


# --- acknowledgements, completion, abort ---


def test_an_older_checkpoint_may_complete_while_a_newer_one_is_pending():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    assert acknowledge(checkpoints, 2, "a") == []

    assert complete(checkpoints, 1, 2.1) == [AnnounceComplete(1), NoteCommitted(1)]
    assert acknowledge(checkpoints, 2, "b") == [stored(2, 2.0)]
    assert checkpoints.on_stored(2, False, 2.2) == [AnnounceComplete(2), NoteCommitted(2)]


def test_one_that_completes_subsumes_the_older_ones_that_are_pending():
    checkpoints = running(max_concurrent=3)
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    acknowledge(checkpoints, 1, "a")
    checkpoints.on_time(3.0)

    assert complete(checkpoints, 2, 3.1) == [
        AnnounceComplete(2),
        Abort(1, "checkpoint 2 completed first"),
        NoteCommitted(2),
    ]
    assert checkpoints.on_acknowledged(1, "b", "B") == (Acknowledged.TOO_LATE, [])
    assert checkpoints.on_declined(1, "no", 3.2) == []
    assert complete(checkpoints, 3, 3.3) == [AnnounceComplete(3), NoteCommitted(3)]


def test_while_one_is_being_stored_another_may_be_acknowledged_and_is_stored_after_it():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    assert acknowledge(checkpoints, 1) == [stored(1, 1.0)]
    assert acknowledge(checkpoints, 2) == []
    assert checkpoints.wake_at_seconds() is None, "neither can time out any more"
    assert checkpoints.on_declined(2, "too late", 2.0) == []
    assert checkpoints.on_stored(1, False, 2.1) == [
        AnnounceComplete(1),
        NoteCommitted(1),
        stored(2, 2.0),
    ]


def test_an_older_one_acknowledged_while_a_newer_one_is_being_stored_is_subsumed_by_it():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    acknowledge(checkpoints, 2)

    assert acknowledge(checkpoints, 1) == []
    assert checkpoints.on_stored(2, False, 2.1)[:2] == [
        AnnounceComplete(2),
        Abort(1, "checkpoint 2 completed first"),
    ]


def test_an_older_one_is_stored_if_the_newer_one_could_not_be():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    acknowledge(checkpoints, 2)
    acknowledge(checkpoints, 1)

    assert checkpoints.on_store_failed(2, "disk full", 2.1) == [
        Abort(2, "disk full"),
        stored(1, 1.0),
    ]


def test_a_duplicate_is_told_from_an_acknowledgement_of_another_checkpoint():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    acknowledge(checkpoints, 1, "a")

    assert checkpoints.on_acknowledged(1, "a", "again") == (Acknowledged.DUPLICATE, [])
    assert checkpoints.on_acknowledged(2, "a", "A") == (Acknowledged.COUNTED, [])
    assert checkpoints.on_acknowledged(3, "a", "A") == (Acknowledged.TOO_LATE, [])


def test_each_checkpoint_has_its_own_timeout():
    checkpoints = running(interval_seconds=4.0)
    checkpoints.on_time(4.0)
    checkpoints.on_time(8.0)
    reason = "it took longer than 10 s and 2 of 2 subtasks had not acknowledged it: a; b"

    assert checkpoints.wake_at_seconds() == 14.0
    assert checkpoints.on_time(14.0) == [Abort(1, reason), Trigger(3)]
    assert checkpoints.on_time(18.0) == [Abort(2, reason), Trigger(4)]


def test_two_that_have_taken_too_long_are_aborted_together_oldest_first():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    first, second, following = checkpoints.on_time(20.0)
    assert (first.checkpoint_id, second.checkpoint_id) == (1, 2)
    assert following == Trigger(3)


def test_a_newer_one_that_is_declined_leaves_the_older_one_alone():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    assert checkpoints.on_declined(2, "no", 2.1) == [Abort(2, "no")]
    assert complete(checkpoints, 1, 2.2) == [AnnounceComplete(1), NoteCommitted(1)]


# --- commits ---


def test_a_commit_speaks_for_all_checkpoints_up_to_its_own():
    checkpoints = running(max_concurrent=3, committing="ab")
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    complete(checkpoints, 1, 2.1)
    complete(checkpoints, 2, 2.2)

    assert checkpoints.on_committed(2, "b", 2.3) == []
    assert checkpoints.on_committed(1, "a", 2.4) == [NoteCommitted(1)]
    assert checkpoints.on_committed(2, "a", 2.5) == [NoteCommitted(2)]


def test_one_commit_may_settle_several_checkpoints_which_are_noted_in_order():
    checkpoints = running(max_concurrent=3, committing="a")
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    complete(checkpoints, 1, 2.1)
    complete(checkpoints, 2, 2.2)

    assert checkpoints.on_committed(2, "a", 2.3) == [NoteCommitted(1), NoteCommitted(2)]
    assert checkpoints.on_committed(2, "a", 2.4) == []


def test_each_complete_checkpoint_has_its_own_deadline_for_commits():
    checkpoints = running(max_concurrent=3, committing="a", interval_seconds=None)
    checkpoints.request(1.0)
    checkpoints.request(2.0)
    complete(checkpoints, 1, 3.0)
    complete(checkpoints, 2, 5.0)

    assert checkpoints.wake_at_seconds() == 13.0
    checkpoints.on_committed(1, "a", 6.0)
    assert checkpoints.wake_at_seconds() == 15.0
    [broken] = checkpoints.on_time(15.0)
    assert "1 of 1 subtasks with sinks have not committed checkpoint 2" in broken.reason


def test_none_is_stored_while_the_coordinator_commits_the_one_before():
    checkpoints = running(max_concurrent=3)
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)
    assert complete(checkpoints, 1, 2.1, coordinator_commits=True) == [AnnounceComplete(1)]

    assert acknowledge(checkpoints, 2) == []
    assert checkpoints.on_time(3.0) == [Trigger(3)]
    assert checkpoints.on_time(9.0) == []
    assert checkpoints.on_coordinator_committed(1, 9.5) == [
        NoteCommitted(1),
        Trigger(4),
        stored(2, 2.0),
    ]


# --- the end of the job ---


def test_the_last_checkpoint_starts_at_once_while_others_are_pending_and_subsumes_them():
    checkpoints = running(committing="a")
    checkpoints.on_time(1.0)

    assert drain(checkpoints, 1.5) == [Trigger(2)]
    assert complete(checkpoints, 2, 1.6) == [
        AnnounceComplete(2),
        Abort(1, "checkpoint 2 completed first"),
    ]
    assert checkpoints.on_committed(2, "a", 1.7) == [NoteCommitted(2), Finish()]


def test_an_ordinary_checkpoint_may_complete_while_the_last_one_is_pending():
    checkpoints = running()
    checkpoints.on_time(1.0)
    drain(checkpoints, 1.5)

    assert complete(checkpoints, 1, 1.6) == [AnnounceComplete(1), NoteCommitted(1)]
    assert complete(checkpoints, 2, 1.7) == [AnnounceComplete(2), NoteCommitted(2), Finish()]


def test_the_last_checkpoint_waits_for_room():
    checkpoints = running()
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    assert drain(checkpoints, 2.5) == []
    assert checkpoints.on_declined(1, "no", 2.6) == [Abort(1, "no"), Trigger(3)]


def test_nothing_is_triggered_while_the_last_checkpoint_is_pending_or_complete():
    checkpoints = running(max_concurrent=3, committing="a")
    drain(checkpoints, 0.5)

    assert checkpoints.on_time(5.0) == []
    assert checkpoints.request(5.1) == []
    complete(checkpoints, 1, 5.2)
    assert checkpoints.on_time(6.0) == []
    assert checkpoints.on_committed(1, "a", 6.1) == [NoteCommitted(1), Finish()]


def test_the_job_ends_when_the_commits_of_the_last_checkpoint_and_of_those_before_are_in():
    checkpoints = running(max_concurrent=3, committing="a")
    checkpoints.on_time(1.0)
    complete(checkpoints, 1, 1.1)
    drain(checkpoints, 1.2)
    complete(checkpoints, 2, 1.3)

    assert checkpoints.on_committed(1, "a", 1.4) == [NoteCommitted(1)]
    assert checkpoints.on_committed(2, "a", 1.5) == [NoteCommitted(2), Finish()]


def test_a_last_checkpoint_that_fails_is_tried_again_no_sooner_because_an_older_one_ends():
    checkpoints = running()
    checkpoints.on_time(1.0)
    drain(checkpoints, 1.5)
    checkpoints.on_declined(2, "no", 1.6)

    assert complete(checkpoints, 1, 1.7) == [AnnounceComplete(1), NoteCommitted(1)]
    assert checkpoints.wake_at_seconds() == 1.5 + FINAL_RETRY_SECONDS
    assert checkpoints.on_time(1.5 + FINAL_RETRY_SECONDS) == [Trigger(3)]


# --- failures ---


def decline_next(checkpoints, now):
    [trigger] = checkpoints.request(now)
    return checkpoints.on_declined(trigger.checkpoint_id, "disk full", now)


def test_one_failure_more_in_a_row_than_is_tolerated_breaks_the_attempt():
    checkpoints = running(interval_seconds=None, tolerable_failures=2)

    assert decline_next(checkpoints, 1.0) == [Abort(1, "disk full")]
    assert decline_next(checkpoints, 2.0) == [Abort(2, "disk full")]
    assert decline_next(checkpoints, 3.0) == [
        Abort(3, "disk full"),
        BreakAttempt(
            "checkpoint 3 failed: disk full; this is failure 3 in a row, and"
            " tolerableFailedCheckpoints is 2"
        ),
    ]


def test_where_no_failure_is_tolerated_the_first_breaks_the_attempt():
    checkpoints = running(interval_seconds=None, tolerable_failures=0)

    aborted, broken = decline_next(checkpoints, 1.0)
    assert isinstance(aborted, Abort)
    assert isinstance(broken, BreakAttempt)


def test_a_completed_checkpoint_begins_the_count_anew():
    checkpoints = running(interval_seconds=None, tolerable_failures=1)
    decline_next(checkpoints, 1.0)
    checkpoints.request(2.0)
    complete(checkpoints, 2, 2.1)

    assert decline_next(checkpoints, 3.0) == [Abort(3, "disk full")]
    assert isinstance(decline_next(checkpoints, 4.0)[-1], BreakAttempt)


def test_timeouts_and_failures_to_store_count_too():
    checkpoints = running(max_concurrent=1, interval_seconds=None, tolerable_failures=1)
    checkpoints.request(1.0)
    acknowledge(checkpoints, 1)
    assert checkpoints.on_store_failed(1, "disk full", 1.1) == [Abort(1, "disk full")]
    checkpoints.request(2.0)

    aborted, broken = checkpoints.on_time(12.0)
    assert aborted.checkpoint_id == 2
    assert broken.reason.startswith("checkpoint 2 failed: it took longer than 10 s")


def test_two_that_take_too_long_together_count_as_two():
    checkpoints = running(tolerable_failures=1)
    checkpoints.on_time(1.0)
    checkpoints.on_time(2.0)

    first, second, broken = checkpoints.on_time(20.0)
    assert (first.checkpoint_id, second.checkpoint_id) == (1, 2)
    assert isinstance(broken, BreakAttempt)


def test_a_checkpoint_that_is_subsumed_has_not_failed():
    checkpoints = running(interval_seconds=None, tolerable_failures=0)
    checkpoints.request(1.0)
    checkpoints.request(2.0)

    assert complete(checkpoints, 2, 2.1) == [
        AnnounceComplete(2),
        Abort(1, "checkpoint 2 completed first"),
        NoteCommitted(2),
    ]


# --- any schedule ---


@pytest.mark.parametrize("seed", range(400))
def test_in_any_schedule_each_checkpoint_completes_or_is_aborted_and_the_job_ends(seed):
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
            interval_seconds=random.choice([None, 0.3, 1.0, 3.0]),
            timeout_seconds=5.0,
            min_pause_seconds=random.choice([0.0, 0.0, 0.0, 0.5]),
            max_concurrent=random.randint(1, 4),
            tolerable_failures=random.choice([math.inf, math.inf, 0, 3]),
        )
        self.checkpoints = Checkpoints(self.settings, self.subtasks, self.committing, 1)
        self.now = 0.0
        self.on_the_way = [("running",)]
        self.undrained = set(self.subtasks)
        self.pending = set()
        self.acknowledged = set()
        self.storing = None
        self.finals = set()
        self.triggered, self.completed, self.aborted, self.noted = [], [], [], []
        self.failures_in_a_row = 0
        self.commits_heard = dict.fromkeys(self.committing, 0)
        self.driver_commits = None
        self.end = None
        self.healed = False

    def play(self):
        for _ in range(self.random.randint(20, 150)):
            self.step()
        self.healed = True
        self.on_the_way += [("drained", subtask) for subtask in self.undrained]
        for _ in range(3000):
            if self.end is not None:
                break
            self.step()
        assert self.end is not None, "the healed job does not end"
        if self.end == "finished":
            assert sorted([*self.completed, *self.aborted]) == self.triggered
            assert self.noted == self.completed

    def step(self):
        if self.end is not None:
            return
        chance = self.random.random()
        if self.on_the_way and chance < 0.8:
            place = self.random.randrange(len(self.on_the_way))
            self.deliver(self.on_the_way.pop(place))
        elif not self.healed and chance < 0.83:
            self.carry_out(self.checkpoints.request(self.now))
        elif not self.healed and self.undrained and chance < 0.85:
            self.on_the_way.append(("drained", self.random.choice(sorted(self.undrained))))
        else:
            self.let_time_pass()
        self.check_what_holds_always()

    def deliver(self, mail):
        checkpoints, now = self.checkpoints, self.now
        if mail[0] in ("ack", "drained", "commit", "decline") and self.random.random() < 0.1:
            self.on_the_way.append(mail)
        match mail:
            case ("running",):
                self.carry_out(checkpoints.on_running(now))
            case ("ack", checkpoint_id, subtask):
                self.acknowledge(checkpoint_id, subtask)
            case ("decline", checkpoint_id):
                self.carry_out(checkpoints.on_declined(checkpoint_id, "declined", now))
            case ("stored", checkpoint_id):
                self.on_complete(checkpoint_id)
                self.carry_out(checkpoints.on_stored(checkpoint_id, self.coordinator_commits, now))
            case ("store failed", checkpoint_id):
                self.storing = None
                self.carry_out(checkpoints.on_store_failed(checkpoint_id, "disk full", now))
            case ("commit", checkpoint_id, subtask):
                heard = max(self.commits_heard[subtask], checkpoint_id)
                self.commits_heard[subtask] = heard
                self.carry_out(checkpoints.on_committed(checkpoint_id, subtask, now))
            case ("epoch", checkpoint_id):
                self.driver_commits = None
                self.carry_out(checkpoints.on_coordinator_committed(checkpoint_id, now))
            case ("drained", subtask):
                self.undrained.discard(subtask)
                self.carry_out(checkpoints.on_drained(subtask, now))

    def acknowledge(self, checkpoint_id, subtask):
        answer, instructions = self.checkpoints.on_acknowledged(checkpoint_id, subtask, "state")
        if checkpoint_id not in self.pending:
            assert answer is Acknowledged.TOO_LATE
        elif (checkpoint_id, subtask) in self.acknowledged:
            assert answer is Acknowledged.DUPLICATE
        else:
            assert answer is Acknowledged.COUNTED
        self.acknowledged.add((checkpoint_id, subtask))
        self.carry_out(instructions)

    def on_complete(self, checkpoint_id):
        assert checkpoint_id > max(self.completed, default=0), "completions ascend"
        self.storing = None
        self.pending.remove(checkpoint_id)
        self.completed.append(checkpoint_id)
        self.failures_in_a_row = 0
        if self.coordinator_commits:
            self.driver_commits = checkpoint_id
            self.on_the_way.append(("epoch", checkpoint_id))

    def let_time_pass(self):
        wake_at = self.checkpoints.wake_at_seconds()
        step = self.random.choice([0.1, 1.0])
        if wake_at is not None and self.random.random() < 0.5:
            step = max(0.0, wake_at - self.now)
        self.now += step
        self.carry_out(self.checkpoints.on_time(self.now))

    def carry_out(self, instructions):
        for instruction in instructions:
            assert self.end is None, "nothing follows the end"
            match instruction:
                case Trigger(checkpoint_id):
                    self.on_triggered(checkpoint_id)
                case StoreCheckpoint(checkpoint_id, _, acknowledged):
                    self.on_store(checkpoint_id, acknowledged)
                case AnnounceComplete(checkpoint_id):
                    assert self.completed[-1] == checkpoint_id
                    self.on_the_way += [("commit", checkpoint_id, s) for s in self.committing]
                case NoteCommitted(checkpoint_id):
                    self.on_noted(checkpoint_id)
                case Abort(checkpoint_id, reason):
                    self.on_aborted(checkpoint_id, reason)
                case BreakAttempt(reason):
                    self.check_the_break(reason)
                    self.end = "broken"
                case Finish():
                    assert self.noted[-1] in self.finals, "records are in no checkpoint"
                    assert not self.pending
                    self.end = "finished"

    def on_triggered(self, checkpoint_id):
        assert checkpoint_id == len(self.triggered) + 1
        assert not self.finals & {*self.pending, *self.completed}, "one last checkpoint at a time"
        self.triggered.append(checkpoint_id)
        self.pending.add(checkpoint_id)
        if not self.undrained:
            self.finals.add(checkpoint_id)
        for subtask in self.subtasks:
            fate = 1.0 if self.healed else self.random.random()
            if fate < 0.05:
                self.on_the_way.append(("decline", checkpoint_id))
            if fate < 0.02 or fate > 0.1:
                self.on_the_way.append(("ack", checkpoint_id, subtask))

    def on_store(self, checkpoint_id, acknowledged):
        assert checkpoint_id in self.pending
        assert self.storing is None, "one is stored at a time"
        assert self.driver_commits is None, "the driver still commits"
        assert set(acknowledged) == set(self.subtasks)
        self.storing = checkpoint_id
        fails = not self.healed and self.random.random() < 0.2
        self.on_the_way.append(("store failed" if fails else "stored", checkpoint_id))

    def on_aborted(self, checkpoint_id, reason):
        self.pending.remove(checkpoint_id)
        assert checkpoint_id != self.storing
        self.aborted.append(checkpoint_id)
        if "completed first" in reason:
            assert checkpoint_id < self.completed[-1]
        else:
            self.failures_in_a_row += 1

    def on_noted(self, checkpoint_id):
        self.noted.append(checkpoint_id)
        assert self.noted == self.completed[: len(self.noted)]
        assert all(heard >= checkpoint_id for heard in self.commits_heard.values())
        assert self.driver_commits is None or self.driver_commits > checkpoint_id

    def check_the_break(self, reason):
        if "in a row" in reason:
            assert self.failures_in_a_row > self.settings.tolerable_failures
        else:
            waited_for = self.completed[len(self.noted)]
            assert any(heard < waited_for for heard in self.commits_heard.values())

    def check_what_holds_always(self):
        assert self.checkpoints.in_progress == len(self.pending)
        in_flight = len(self.pending) + len(self.completed) - len(self.noted)
        assert in_flight <= self.settings.in_flight_max
        if self.end is None:
            assert self.failures_in_a_row <= self.settings.tolerable_failures
            may_sleep = self.settings.interval_seconds is None and self.undrained
            is_awake = self.on_the_way or self.checkpoints.wake_at_seconds() is not None
            assert is_awake or may_sleep, "it stalls"
