"""One attempt as a state machine: what it is told, and what it makes of it, without a thread."""

import pytest

from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import SlotJoined, SlotLost, SlotReported
from stillframe.coordinator.history import History, SlotsRunning
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import AttemptBroke, AttemptStopped, SlotsEnded, StopWanted
from stillframe.coordinator.ports import CommitsPort, SlotsPort
from stillframe.coordinator.sinks import DriverSinks
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.messages import Failed, Running, StartSlot
from stillframe.testing.clock import ManualClock


class Ports(SlotsPort, CommitsPort):
    def __init__(self):
        self.sent = []

    def send(self, slot, order):
        self.sent.append((slot, order))

    def broadcast(self, order):
        self.sent.append((None, order))

    def submit(self, manifest):
        raise AssertionError("no sink commits at the coordinator")


class Attempt:
    """Two slots, no checkpoints."""

    def __init__(self):
        source = ClickSource(records=10)
        read = Node(Read(source), source.schema)
        plan = build_plan("views", [Node(Write(DiscardSink()), source.schema, (read,))], 2)
        self.clock = ManualClock()
        self.ports = Ports()
        ledger = Ledger(None, "views", 2, self.clock)
        ledger.begin_attempt(None)
        self.history = History()
        parts = JobParts(plan, JobConfig(), self.clock, self.history, DriverSinks(plan), ledger)
        self.running = RunningAttempt(parts, self.ports, self.ports, None, {})

    def tell(self, *mail):
        for each in mail:
            self.running.handle(each)

    def after(self, seconds):
        self.clock.advance(seconds)
        self.running.on_time()
        return self.running.outcome


def joined(slot):
    return SlotJoined(slot, 4710 + slot, ("host", slot))


def test_slots_are_started_when_the_last_of_them_has_joined():
    attempt = Attempt()

    attempt.tell(joined(0))
    assert not [order for _, order in attempt.ports.sent if isinstance(order, StartSlot)]
    attempt.tell(joined(1))
    assert [slot for slot, order in attempt.ports.sent if isinstance(order, StartSlot)] == [0, 1]


def test_a_slot_that_says_twice_that_it_is_running_is_heard_once():
    attempt = Attempt()
    told = []
    attempt.history.add_listener(told.append)
    attempt.tell(joined(0), joined(1), SlotReported(0, Running()), SlotReported(1, Running()))

    attempt.tell(SlotReported(0, Running()))

    assert told == [SlotsRunning(1, (4710, 4711))]


def test_a_slot_that_complains_of_a_peer_is_not_believed_before_the_peers_own_reason():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1))

    attempt.tell(SlotReported(1, Failed("slot 0 is gone", "bystander")))
    assert attempt.running.outcome is None
    attempt.tell(SlotReported(0, Failed("function f raised", "permanent")))

    assert attempt.running.outcome == AttemptBroke("function f raised", "permanent")


def test_without_a_better_reason_the_loss_itself_is_told_after_a_moment():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1))
    attempt.tell(SlotLost(0, "reset"))

    assert attempt.after(0.4) is None
    assert attempt.after(0.2) == AttemptBroke("slot 0 (pid 4710) was lost: reset", "bystander")


@pytest.mark.parametrize("is_loss_first", [True, False])
def test_when_every_slot_has_been_heard_of_nobody_is_waited_for(is_loss_first):
    attempt = Attempt()
    attempt.tell(joined(0), joined(1))
    news = [SlotLost(0, "reset"), SlotReported(1, Failed("slot 0 is gone", "bystander"))]
    attempt.tell(*(news if is_loss_first else reversed(news)))

    assert attempt.running.outcome == AttemptBroke("slot 0 (pid 4710) was lost: reset", "bystander")


def test_when_all_slots_are_lost_nobody_is_waited_for():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotLost(0, "reset"), SlotLost(1, "reset too"))

    assert attempt.running.outcome == AttemptBroke(
        "slot 1 (pid 4711) was lost: reset too", "bystander"
    )


def test_a_slot_that_joins_and_is_lost_while_the_attempt_is_breaking_does_no_harm():
    attempt = Attempt()
    attempt.tell(joined(0), SlotLost(0, "killed"), joined(1), SlotLost(1, "killed too"))

    assert attempt.after(1.0) == AttemptBroke("slot 1 was lost: killed too", "bystander")


def test_news_of_another_attempts_slots_changes_nothing():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotsEnded(99, "long ago"))

    assert attempt.after(1.0) is None


def test_slots_that_do_not_come_up_in_time_break_the_attempt():
    attempt = Attempt()
    attempt.tell(joined(1))

    broken = attempt.after(121.0)
    assert isinstance(broken, AttemptBroke)
    assert "slots [0, 1] did not come up" in broken.reason


def test_a_stop_ends_an_attempt_that_is_breaking():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotLost(0, "killed"), StopWanted())

    assert attempt.running.outcome == AttemptStopped()
