"""Another parallelism for a job, without one: who asks, and an attempt that comes to rest."""

import pytest
from letters import Letters

from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import SlotJoined, SlotReported
from stillframe.coordinator.history import History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import (
    AttemptRested,
    AttemptStopped,
    CheckpointWanted,
    StopWanted,
)
from stillframe.coordinator.ports import CommitsPort, SlotsPort
from stillframe.coordinator.replanned import Refreshed, Rescaled
from stillframe.coordinator.rescaling import RescaleFailed, RescaleWanted, Scale
from stillframe.coordinator.savepoints import SavepointWanted
from stillframe.coordinator.sinks import DriverSinks
from stillframe.errors import StillframeError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    Committed,
    Declined,
    Running,
    TriggerCheckpoint,
)
from stillframe.storage.store import open_store
from stillframe.testing.clock import ManualClock

CONFIG = JobConfig(checkpoint_location="/chk")


def plan(slots):
    source = ClickSource()
    read = Node(Read(source), source.schema)
    return build_plan("views", [Node(Write(DiscardSink()), source.schema, (read,))], slots)


class Asked:
    """A job with two slots, and what those have heard who asked."""

    def __init__(self, replan=plan):
        self.clock = ManualClock()
        self.history = History()
        self.scale = Scale(2, replan, CONFIG, self.clock, self.history)
        self.heard = []

    def ask(self, parallelism):
        return self.scale.ask(parallelism, self.heard.append)


def test_the_downtime_is_from_the_hold_to_the_moment_all_slots_run():
    asked = Asked()
    wanted = asked.ask(3)
    assert wanted.plan.slots == 3

    held_at = asked.clock.monotonic_seconds()
    asked.clock.advance(1.5)
    asked.scale.change(plan(2), held_at)
    assert asked.scale.parallelism == 2
    asked.scale.on_running()

    assert asked.heard == [Rescaled(2, 3, 1.5)] == asked.history.events()
    assert asked.scale.parallelism == 3


def test_new_rows_of_tables_leave_the_parallelism_as_it_is():
    asked = Asked()
    wanted = asked.scale.refresh(asked.heard.append)
    assert (wanted.plan.slots, wanted.refreshes) == (2, True)
    with pytest.raises(StillframeError, match="goes on with new rows of its tables: wait"):
        asked.ask(3)

    held_at = asked.clock.monotonic_seconds()
    asked.clock.advance(0.5)
    asked.scale.change(plan(2), held_at)
    asked.scale.on_running()

    assert asked.heard == [Refreshed(0.5)] == asked.history.events()
    assert asked.scale.parallelism == 2
    assert asked.ask(3) is not None


def test_whoever_asked_is_answered_once():
    asked = Asked()
    wanted = asked.ask(3)
    wanted.on_outcome(RescaleFailed("no"))
    wanted.on_outcome(RescaleFailed("no again"))
    asked.scale.on_ended("it is over")

    assert asked.heard == [RescaleFailed("no")]


def test_who_asks_next_does_not_hear_what_comes_too_late():
    asked = Asked()
    first = asked.ask(3)
    first.on_outcome(RescaleFailed("no"))
    heard = []
    asked.scale.ask(4, heard.append)
    first.on_outcome(RescaleFailed("no again"))

    assert heard == []


def test_a_slot_that_starts_otherwise_is_nobodys_rescale():
    asked = Asked()
    asked.ask(3)
    asked.scale.on_running()  # of an attempt before it rests

    assert asked.heard == []
    assert asked.scale.parallelism == 2


def test_the_second_is_refused_until_the_first_is_answered():
    asked = Asked()
    first = asked.ask(3)
    with pytest.raises(StillframeError, match="being rescaled to parallelism 3"):
        asked.ask(4)

    first.on_outcome(RescaleFailed("no"))
    assert asked.ask(4) is not None


def test_a_plan_that_cannot_be_made_leaves_nothing_behind():
    def refuse(parallelism):
        raise StillframeError("no such plan")

    asked = Asked(refuse)
    for _ in range(2):
        with pytest.raises(StillframeError, match="no such plan"):
            asked.ask(3)


def test_a_plan_that_is_taken_back_is_told_and_the_one_before_answered():
    asked = Asked()
    asked.ask(3)
    before = plan(2)
    asked.scale.change(before, 0.0)

    assert asked.scale.take_back("it does not fit") is before
    assert asked.heard == [RescaleFailed("it does not fit")]
    assert asked.scale.take_back("again") is None


def test_a_job_that_ends_answers_who_still_waits():
    asked = Asked()
    asked.ask(3)
    asked.scale.on_ended("job 'views' has finished")

    assert asked.heard == [RescaleFailed("job 'views' has finished")]


# --- an attempt that comes to rest


class Ports(SlotsPort, CommitsPort):
    def __init__(self):
        self.said = []

    def send(self, slot, order):
        """What slots are told one by one is no matter here."""

    def broadcast(self, order):
        self.said.append(order)

    def submit(self, manifest):
        raise AssertionError("nothing commits here")


class Attempt:
    """One slot that runs and is asked to rest; its subtasks acknowledge when told to."""

    def __init__(self, store, **options):
        self.plan = plan(1)
        self.clock, self.ports = ManualClock(), Ports()
        ledger = Ledger(store, "views", 2, self.clock)
        ledger.begin_attempt(None)
        config = JobConfig(**options)
        parts = JobParts(self.plan, config, self.clock, History(), DriverSinks(self.plan), ledger)
        self.letters = Letters()
        self.running = RunningAttempt(parts, self.ports, self.ports, self.letters, None, {})
        self.tell(SlotJoined(0, 4710, ("host", 0)), SlotReported(0, Running()))
        self.heard = []
        self.wanted = RescaleWanted(3, plan(3), self.heard.append)
        self.clock.advance(1.0)
        self.tell(self.wanted)

    def tell(self, *mail):
        for each in mail:
            self.running.handle(each)
            self.letters.carry_out(self.running.handle)

    def acknowledge(self):
        timings = SubtaskTimings(0.0, 0.0, 0.0, 0.0, 0, 0, 0, task="task", subtask=0)
        for ref in self.plan.subtasks():
            report = Acknowledged(ref.task, ref.subtask, 1, (), timings)
            self.tell(SlotReported(0, report))

    def commit(self):
        for ref in self.plan.subtasks():
            self.tell(SlotReported(0, Committed(ref.task, ref.subtask, 1)))

    def savepoint(self, directory):
        self.tell(SavepointWanted(str(directory), "go on", self.heard.append))


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "chk"))


def test_its_sources_are_held_and_its_barriers_overtake_nothing(store):
    attempt = Attempt(store, unaligned_checkpoints=True)

    [order] = [each for each in attempt.ports.said if isinstance(each, TriggerCheckpoint)]
    assert order.holds
    assert order.alignment_timeout_ms is None
    assert order.savepoint is None


def test_it_rests_when_all_is_committed_and_knows_since_when_its_sources_are_held(store):
    attempt = Attempt(store)
    held_at = attempt.clock.monotonic_seconds()
    attempt.clock.advance(2.0)
    attempt.acknowledge()
    assert attempt.running.outcome is None

    attempt.commit()

    assert attempt.running.outcome == AttemptRested(attempt.wanted, held_at)
    assert attempt.running.unanswered_requests() == []
    assert attempt.heard == [], "it is answered when the others run"


def test_a_stop_that_comes_when_it_has_come_to_rest_stops_the_job(store):
    attempt = Attempt(store)
    attempt.acknowledge()
    attempt.commit()
    attempt.tell(StopWanted())

    assert isinstance(attempt.running.outcome, AttemptStopped)
    attempt.running.give_up()
    [failed] = attempt.heard
    assert "ended before" in failed.reason


def test_what_is_asked_for_at_rest_is_for_the_next_attempt(store, tmp_path):
    attempt = Attempt(store)
    attempt.acknowledge()
    attempt.savepoint(tmp_path / "savepoint")
    attempt.commit()
    attempt.tell(attempt.wanted)

    savepoint, rescale = attempt.running.unanswered_requests()
    assert isinstance(savepoint, SavepointWanted)
    assert rescale is attempt.wanted


def test_a_savepoint_that_waited_for_it_is_taken_if_the_job_goes_on(store, tmp_path):
    attempt = Attempt(store)
    attempt.savepoint(tmp_path / "savepoint")
    attempt.tell(SlotReported(0, Declined(1, "disk full")))

    [failed] = attempt.heard
    assert "checkpoint 1, from which it would have gone on, failed: disk full" in failed.reason
    assert AbortCheckpoint(1) in attempt.ports.said, "the sources go on"
    last = attempt.ports.said[-1]
    assert isinstance(last, TriggerCheckpoint)
    assert last.savepoint == str(tmp_path / "savepoint")


def test_a_savepoint_that_waited_is_triggered_after_the_checkpoint_with_the_lower_number(
    store, tmp_path
):
    """A source takes an order with a lower number than the last one for one that came twice."""
    attempt = Attempt(store, max_concurrent_checkpoints=3, checkpoint_interval_seconds=5.0)
    attempt.savepoint(tmp_path / "savepoint")
    attempt.tell(CheckpointWanted(lambda number: None))
    attempt.clock.advance(601.0)  # longer than a checkpoint may take
    attempt.running.on_time()
    attempt.letters.carry_out(attempt.running.handle)

    orders = [each for each in attempt.ports.said if isinstance(each, TriggerCheckpoint)]
    assert [each.checkpoint_id for each in orders] == [1, 2, 3]
    assert [each.savepoint is not None for each in orders] == [False, False, True]


def test_the_same_request_twice_is_one(store):
    attempt = Attempt(store)
    attempt.tell(attempt.wanted)
    assert attempt.heard == []

    attempt.tell(RescaleWanted(4, plan(4), attempt.heard.append))
    [failed] = attempt.heard
    assert "it is about to end" in failed.reason
