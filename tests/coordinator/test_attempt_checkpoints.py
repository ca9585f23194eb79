"""How an attempt carries out what is decided about its checkpoints, several of them in flight."""

from dataclasses import replace

import pytest
from letters import Letters

from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import SlotJoined, SlotReported
from stillframe.coordinator.history import CheckpointFailed, History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.ledger_mail import LedgerFailed
from stillframe.coordinator.located import locate
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptStopped,
    CheckpointWanted,
    StopWanted,
)
from stillframe.coordinator.ports import CommitsPort, SlotsPort
from stillframe.coordinator.savepoints import SavepointFailed, SavepointTaken, SavepointWanted
from stillframe.coordinator.sinks import DriverSinks, EpochCommitted
from stillframe.errors import Fenced, StillframeError, StorageError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.manifests import OperatorSnapshot, PendingCommit, SubtaskTimings
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    Committed,
    CompleteCheckpoint,
    Declined,
    Failed,
    Running,
    StillThere,
    TriggerCheckpoint,
)
from stillframe.storage.paths import state_path
from stillframe.storage.store import open_store
from stillframe.testing.clock import ManualClock

CLICKS = ClickSource(records=10)
CONFIG = JobConfig(checkpoint_interval_seconds=1.0, max_concurrent_checkpoints=2)


class CommittingHere(DiscardSink):
    commits_at_coordinator = True


class Ports(SlotsPort, CommitsPort):
    def __init__(self):
        self.said, self.to_commit = [], []

    def send(self, slot, order):
        """What slots are told one by one is no matter here."""

    def broadcast(self, order):
        self.said.append(order)

    def submit(self, manifest):
        self.to_commit.append(manifest)

    def told(self, kind):
        return [order.checkpoint_id for order in self.said if isinstance(order, kind)]


class Attempt:
    """One slot that runs; its subtasks acknowledge when told to. The store answers at once."""

    answers = True

    def __init__(self, store, config=CONFIG, sink=None, after=None):
        read = Node(Read(CLICKS), CLICKS.schema, given_uid="read")
        sink = sink or DiscardSink()
        self.plan = build_plan("views", [Node(Write(sink), CLICKS.schema, (read,), "write")], 1)
        self.clock, self.ports = ManualClock(), Ports()
        self.history = History(clock=self.clock)
        self.ledger = after.ledger if after else Ledger(store, "views", 2, self.clock)
        self.ledger.begin_attempt(None)
        parts = JobParts(
            self.plan, config, self.clock, self.history, DriverSinks(self.plan), self.ledger
        )
        self.letters = Letters()
        self.running = RunningAttempt(parts, self.ports, self.ports, self.letters, None, {})
        self.tell(SlotJoined(0, 4710, ("host", 0)), SlotReported(0, Running()))

    def tell(self, *mail):
        for each in mail:
            self.running.handle(each)
            if self.answers:
                self.carry_out()

    def carry_out(self):
        """What is to be written and deleted."""
        self.letters.carry_out(self.running.handle)

    def after(self, seconds):
        self.clock.advance(seconds)
        self.running.on_time()

    def acknowledge(self, checkpoint_id, *commits):
        timings = SubtaskTimings(0.0, 0.0, 0.0, 0.0, 0, 0, 0, task="task", subtask=0)
        prepared = tuple(PendingCommit(number, {"of": number}) for number in commits)
        written = OperatorSnapshot("write", 0, commits=prepared)
        for ref in self.plan.subtasks():
            report = Acknowledged(ref.task, ref.subtask, checkpoint_id, (written,), timings)
            self.tell(SlotReported(0, report))

    def commit(self, checkpoint_id):
        for ref in self.plan.subtasks():
            self.tell(SlotReported(0, Committed(ref.task, ref.subtask, checkpoint_id)))

    def ask(self):
        numbers = []
        self.tell(CheckpointWanted(numbers.append))
        return numbers[-1]


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def test_each_checkpoint_says_when_it_was_triggered(store):
    attempt = Attempt(store)
    attempt.after(1.0)
    first_ms = attempt.clock.wall_ms()
    attempt.after(1.0)
    assert attempt.ports.told(TriggerCheckpoint) == [1, 2]

    attempt.after(0.5)
    attempt.acknowledge(1)
    attempt.acknowledge(2)

    assert attempt.ports.told(CompleteCheckpoint) == [1, 2]
    told = attempt.history.completed()
    assert [each.triggered_at_ms for each in told] == [first_ms, first_ms + 1000]
    assert [each.duration_ms for each in told] == pytest.approx([1500.0, 500.0])


def test_a_subsumed_checkpoint_is_aborted_everywhere_and_what_it_wrote_is_deleted(store):
    attempt = Attempt(store)
    attempt.after(1.0)
    attempt.after(1.0)
    attempt.acknowledge(2)

    assert attempt.ports.told(CompleteCheckpoint) == [2]
    assert attempt.ports.told(AbortCheckpoint) == [1]
    events = attempt.history.events()
    assert CheckpointFailed(1, "checkpoint 2 completed first") in events
    assert [kept.checkpoint_id for kept in attempt.ledger.record.checkpoints] == [2]


def test_a_newer_checkpoint_that_completes_answers_a_request_for_an_older_one(store):
    attempt = Attempt(store)
    assert (attempt.ask(), attempt.ask()) == (1, 2)

    attempt.acknowledge(2)

    assert attempt.running.unanswered_requests() == []


def test_a_newer_checkpoint_that_fails_leaves_a_request_for_an_older_one_open(store):
    attempt = Attempt(store)
    attempt.ask()
    [open_request] = attempt.running.unanswered_requests()
    attempt.ask()

    attempt.tell(SlotReported(0, Declined(2, "disk full")))

    assert attempt.running.unanswered_requests() == [open_request]


def test_a_request_for_which_there_is_no_room_is_told_the_number_it_will_have(store):
    attempt = Attempt(store)
    assert [attempt.ask() for _ in range(4)] == [1, 2, 3, 3]

    attempt.tell(SlotReported(0, Declined(1, "disk full")))

    assert attempt.ports.told(TriggerCheckpoint) == [1, 2, 3]
    assert len(attempt.running.unanswered_requests()) == 3


def test_each_epoch_committed_here_holds_what_the_one_before_did_not(store):
    attempt = Attempt(store, sink=CommittingHere())
    attempt.after(1.0)
    attempt.after(1.0)
    attempt.acknowledge(1, 1)
    attempt.acknowledge(2, 1, 2)
    assert attempt.ports.told(CompleteCheckpoint) == [1], "the first is not committed yet"

    attempt.tell(EpochCommitted(0))

    assert attempt.ports.told(CompleteCheckpoint) == [1, 2]
    assert [
        [commit.checkpoint_id for commit in made.snapshots_of("write")[0].commits]
        for made in attempt.ports.to_commit
    ] == [[1], [2]]


def stopping(store, address):
    """All that the savepoint holds is about to be committed; what is told of it."""
    attempt, told = Attempt(store), []
    attempt.tell(SavepointWanted(str(address), "stop", told.append))
    attempt.acknowledge(1)
    attempt.after(0.0)
    attempt.acknowledge(2)
    assert told == []
    return attempt, told


def test_a_savepoint_with_which_the_job_stops_is_there_when_it_is_committed_and_not_before(
    store, tmp_path
):
    attempt, told = stopping(store, tmp_path / "savepoint")
    with pytest.raises(StillframeError):
        locate(str(tmp_path / "savepoint"))

    attempt.commit(2)

    assert told == [SavepointTaken(str(tmp_path / "savepoint"))]
    assert locate(str(tmp_path / "savepoint")).manifest.checkpoint_id == 1
    assert attempt.running.outcome == AttemptStopped()


def test_a_driver_that_has_lost_its_job_leaves_no_savepoint_with_which_it_stopped(store, tmp_path):
    """The other one goes on and commits what a job from that savepoint would say again."""
    attempt, told = stopping(store, tmp_path / "savepoint")
    other = Ledger(store, "views", 2, attempt.clock)
    other.read()
    other.begin_attempt(None)

    with pytest.raises(Fenced):
        attempt.commit(2)
    attempt.carry_out()

    [failed] = told
    assert isinstance(failed, SavepointFailed)
    assert "was not taken" in failed.reason
    assert store.list("savepoint") == []


def test_too_many_failed_checkpoints_break_the_attempt_and_another_one_may_follow(store):
    attempt = Attempt(store, replace(CONFIG, tolerable_failed_checkpoints=1))
    attempt.after(1.0)
    attempt.after(1.0)

    attempt.tell(SlotReported(0, Declined(1, "disk full")))
    assert attempt.running.outcome is None
    attempt.tell(SlotReported(0, Declined(2, "disk still full")))

    assert attempt.running.outcome == AttemptBroke(
        "checkpoint 2 failed: disk still full; this is failure 2 in a row, and"
        " tolerableFailedCheckpoints is 1",
        "other",
    )


def test_what_a_slot_of_the_attempt_before_wrote_late_is_deleted_with_the_first_checkpoint(store):
    attempt = Attempt(store, after=Attempt(store))
    late = state_path(1, "write", 0, attempt.ledger.attempt - 1, "rows")
    own = state_path(1, "write", 0, attempt.ledger.attempt, "rows")
    for path in (late, own):
        store.write(path, [b"rows"])

    def there():
        return [path for path in (late, own) if path.split("/")[1] in store.list("shared")]

    assert there() == [late, own]
    attempt.after(1.0)
    attempt.acknowledge(1)

    assert there() == [own]


# --- a store that takes its time ---


def unanswered(store, sink=None):
    """An attempt whose store answers only when a test says so."""
    attempt = Attempt(store, sink=sink)
    attempt.answers = False
    return attempt


def write_next(attempt):
    """The store carries out the next letter that writes, and says what became of it."""
    attempt.letters.carry_out_next(attempt.letters.writes, attempt.running.handle)


def test_a_checkpoint_is_announced_when_its_entry_is_in_the_log_and_not_before(store):
    attempt = unanswered(store)
    attempt.after(1.0)
    attempt.acknowledge(1)
    assert attempt.ports.told(CompleteCheckpoint) == []
    assert store.list("") == ["log"], "the job's thread has written nothing"

    write_next(attempt)

    assert attempt.ports.told(CompleteCheckpoint) == [1]


def test_slots_hear_from_the_driver_while_the_store_does_not_answer(store):
    attempt = unanswered(store)
    attempt.after(1.0)
    attempt.acknowledge(1)
    before = len(attempt.ports.said)
    attempt.after(601.0)

    assert StillThere() in attempt.ports.said[before:]
    assert attempt.ports.told(AbortCheckpoint) == [], "no timeout ends what is being stored"


def test_checkpoints_are_announced_while_nothing_can_be_deleted(store):
    attempt = unanswered(store)
    for number in range(1, 6):
        attempt.after(1.0)
        attempt.acknowledge(number)
        while attempt.letters.writes:
            write_next(attempt)
        attempt.commit(number)

    assert attempt.ports.told(CompleteCheckpoint) == [1, 2, 3, 4, 5]
    attempt.carry_out()
    assert [name for name in store.list("") if name.startswith("chk")] == ["chk-4-1", "chk-5-1"]


def test_that_an_epoch_is_committed_is_in_the_log_before_the_next_checkpoint(store):
    attempt = unanswered(store, CommittingHere())
    attempt.after(1.0)
    attempt.acknowledge(1)
    write_next(attempt)
    attempt.after(1.0)
    attempt.acknowledge(2)
    attempt.tell(EpochCommitted(0))
    write_next(attempt)
    assert attempt.ledger.record.committed_epoch_by_sink == {"write": 0}
    assert attempt.ledger.record.newest.checkpoint_id == 1

    attempt.carry_out()

    assert attempt.ledger.record.newest.checkpoint_id == 2
    assert [made.epoch for made in attempt.ports.to_commit] == [0, 1]


def test_what_came_to_exist_after_the_attempt_broke_counts_and_is_not_announced(store):
    attempt = unanswered(store, CommittingHere())
    attempt.ask()
    attempt.acknowledge(1, 1)
    attempt.tell(SlotReported(0, Failed("the slot is at its end", "other")))
    assert isinstance(attempt.running.outcome, AttemptBroke)

    attempt.carry_out()

    assert attempt.ledger.record.newest.checkpoint_id == 1
    assert attempt.ports.told(CompleteCheckpoint) == attempt.ports.to_commit == []
    assert [each.checkpoint_id for each in attempt.history.completed()] == [1]
    assert attempt.running.unanswered_requests() == [], "it holds what was asked for"
    assert isinstance(attempt.running.outcome, AttemptBroke)


def test_what_could_not_be_stored_after_the_attempt_broke_is_deleted_and_told(store, tmp_path):
    attempt = unanswered(store)
    attempt.after(1.0)
    attempt.acknowledge(1)
    attempt.tell(SlotReported(0, Failed("the slot is at its end", "other")))
    (tmp_path / "chk-1-1").write_text("a file where a directory should be")

    attempt.carry_out()

    [failed] = [each for each in attempt.history.events() if isinstance(each, CheckpointFailed)]
    assert failed.checkpoint_id == 1
    assert attempt.ledger.record.newest is None


def test_the_savepoint_with_which_the_job_stops_ends_it_though_the_attempt_broke_meanwhile(
    store, tmp_path
):
    attempt, told = stopping(store, tmp_path / "savepoint")
    attempt.answers = False
    attempt.commit(2)
    attempt.tell(SlotReported(0, Failed("the slot is at its end", "other")))
    assert isinstance(attempt.running.outcome, AttemptBroke)

    attempt.carry_out()

    assert told == [SavepointTaken(str(tmp_path / "savepoint"))]
    assert attempt.running.outcome == AttemptStopped()


def test_a_job_that_is_cancelled_while_its_last_savepoint_is_stored_is_cancelled(store, tmp_path):
    attempt, told = stopping(store, tmp_path / "savepoint")
    attempt.answers = False
    attempt.commit(2)
    attempt.tell(StopWanted(cancels=True))
    attempt.carry_out()

    assert told == [SavepointTaken(str(tmp_path / "savepoint"))]
    assert attempt.running.outcome == AttemptStopped(is_cancelled=True)


def test_a_savepoint_that_fails_is_told_when_its_directory_is_empty_again(store, tmp_path):
    attempt, told = unanswered(store), []
    place = tmp_path / "savepoint"
    attempt.tell(SavepointWanted(str(place), "go on", told.append))
    write_next(attempt)
    (place / "op-0").mkdir(parents=True)
    attempt.tell(SlotReported(0, Declined(1, "disk full")))
    assert told == []

    attempt.carry_out()

    assert [type(each) for each in told] == [SavepointFailed]
    assert list(place.iterdir()) == []


def test_whoever_asked_for_a_savepoint_hears_that_it_failed_also_if_nothing_can_be_deleted(
    store, tmp_path
):
    attempt, told = unanswered(store), []
    attempt.tell(SavepointWanted(str(tmp_path / "savepoint"), "go on", told.append))
    write_next(attempt)
    attempt.tell(SlotReported(0, Failed("the slot is at its end", "other")))
    attempt.running.give_up()
    assert told == []

    attempt.running.on_port_closed()

    [failed] = told
    assert "was not taken" in failed.reason


def test_a_store_that_cannot_note_an_epoch_breaks_the_attempt(store):
    attempt = unanswered(store, CommittingHere())
    attempt.tell(LedgerFailed(StorageError("disk full")))

    assert attempt.running.outcome == AttemptBroke("disk full", "other")


def test_a_driver_that_was_overtaken_says_so_whenever_it_hears_of_it(store):
    attempt = unanswered(store)
    with pytest.raises(Fenced, match="another"):
        attempt.tell(LedgerFailed(Fenced("another driver")))
    attempt.tell(StopWanted())
    with pytest.raises(Fenced, match="another"):
        attempt.tell(LedgerFailed(Fenced("another driver")))
