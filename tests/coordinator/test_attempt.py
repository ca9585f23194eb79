"""One attempt as a state machine: what it is told, and what it makes of it, without a thread."""

import pytest
from letters import Letters

from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import SlotJoined, SlotLost, SlotReported, StacksDumped
from stillframe.coordinator.history import Hanging, History, SlotsRunning, Waiting
from stillframe.coordinator.job_parts import JobParts, Watched
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptRested,
    AttemptStopped,
    SlotsEnded,
    StopWanted,
)
from stillframe.coordinator.ports import CommitsPort, SlotsPort
from stillframe.coordinator.rescaling import RescaleWanted
from stillframe.coordinator.sinks import DriverSinks
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol import messages
from stillframe.protocol.messages import Failed, Progress, Running, StartSlot, StillThere
from stillframe.stacks import Places
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
        self.plan = plan
        self.clock = ManualClock()
        self.ports = Ports()
        ledger = Ledger(None, "views", 2, self.clock)
        ledger.begin_attempt(None)
        self.history = History(clock=self.clock)
        self.oom_kills = 0
        self.watched = Watched()
        parts = JobParts(
            plan,
            JobConfig(),
            self.clock,
            self.history,
            DriverSinks(plan),
            ledger,
            oom_kills=lambda: self.oom_kills,
            watched=self.watched,
        )
        self.running = RunningAttempt(parts, self.ports, self.ports, Letters(), None, {})

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


def test_an_attempt_whose_slots_are_not_all_there_rests_at_once_for_another_parallelism():
    attempt = Attempt()
    wanted = RescaleWanted(1, attempt.plan, lambda outcome: None)
    attempt.tell(joined(0), wanted)

    assert attempt.running.outcome == AttemptRested(wanted, attempt.clock.monotonic_seconds())


def test_slots_are_told_at_once_at_whose_channels_somebody_looks_and_that_nobody_does():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotReported(0, Running()), SlotReported(1, Running()))
    attempt.after(0.1)
    before = len(attempt.ports.sent)

    def told():
        return [order for _, order in attempt.ports.sent[before:]]

    attempt.watched.note(2, attempt.clock.monotonic_seconds())
    attempt.after(0.1)
    assert told() == [StillThere((2,))]
    for _ in range(4):  # somebody looks on
        attempt.watched.note(2, attempt.clock.monotonic_seconds())
        attempt.after(4.0)
    assert {order.watched for order in told()} == {(2,)}
    attempt.after(6.1)
    assert told()[-1] == StillThere(())


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

    attempt.tell(SlotReported(1, Failed("slot 0 is gone", "lost slot")))
    assert attempt.running.outcome is None
    attempt.tell(SlotReported(0, Failed("function f raised", "permanent")))

    assert attempt.running.outcome == AttemptBroke("function f raised", "permanent")


def test_without_a_better_reason_the_loss_itself_is_told_after_a_moment():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1))
    attempt.tell(SlotLost(0, "reset"))

    assert attempt.after(0.4) is None
    assert attempt.after(0.2) == AttemptBroke("slot 0 (pid 4710) was lost: reset", "lost slot")


@pytest.mark.parametrize("is_loss_first", [True, False])
def test_when_every_slot_has_been_heard_of_nobody_is_waited_for(is_loss_first):
    attempt = Attempt()
    attempt.tell(joined(0), joined(1))
    news = [SlotLost(0, "reset"), SlotReported(1, Failed("slot 0 is gone", "lost slot"))]
    attempt.tell(*(news if is_loss_first else reversed(news)))

    assert attempt.running.outcome == AttemptBroke("slot 0 (pid 4710) was lost: reset", "lost slot")


def test_when_all_slots_are_lost_nobody_is_waited_for():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotLost(0, "reset"), SlotLost(1, "reset too"))

    assert attempt.running.outcome == AttemptBroke(
        "slot 1 (pid 4711) was lost: reset too", "lost slot"
    )


def test_a_slot_that_joins_and_is_lost_while_the_attempt_is_breaking_does_no_harm():
    attempt = Attempt()
    attempt.tell(joined(0), SlotLost(0, "killed"), joined(1), SlotLost(1, "killed too"))

    assert attempt.after(1.0) == AttemptBroke("slot 1 was lost: killed too", "lost slot")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_slot_that_joins_when_the_attempt_is_breaking_or_over_may_report(is_over):
    attempt = Attempt()
    attempt.tell(joined(0), StopWanted() if is_over else SlotLost(0, "killed"))

    attempt.tell(joined(1), SlotReported(1, Progress(3, 0, oom_kills=1)))

    assert attempt.history.records_of_attempt().records_in == 3


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


def hanging_for(seconds):
    line = "/home/ann/job.py:12 in tidy"
    hanging = messages.Hanging(seconds, "function tidy", line, "stack", "map tidy", 1, "map-1", "k")
    return SlotReported(1, Progress(0, 0, hanging=hanging))


def test_a_call_that_hangs_is_told_once_and_shown_until_it_returns():
    attempt = Attempt()
    told = []
    attempt.tell(joined(0), joined(1))
    attempt.history.add_listener(told.append)

    attempt.tell(hanging_for(10), hanging_for(11))
    assert [type(event) for event in told] == [Hanging]
    assert "has not returned for 11 s, in slot 1, task map tidy (1)" in str(
        attempt.history.present()[0]
    )
    attempt.tell(SlotReported(1, Progress(0, 0)))

    assert attempt.history.present() == []
    assert attempt.running.outcome is None


def test_a_call_that_hangs_for_too_long_breaks_the_attempt_as_the_same_error_each_time():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), hanging_for(299))
    assert attempt.running.outcome is None

    attempt.tell(hanging_for(300))

    broke = attempt.running.outcome
    assert broke.reason.startswith("function tidy (/home/ann/job.py:12 in tidy) has not returned")
    assert (broke.at.slot, broke.at.task) == (1, "map tidy")
    assert broke.sign.what == "Hang in map-1 at /home/ann/job.py:12 in tidy"


def test_a_slot_that_sends_nothing_is_told_and_what_its_interpreter_stands_in():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotReported(0, Running()), SlotReported(1, Running()))
    attempt.after(3)
    attempt.tell(SlotReported(0, Progress(0, 0)))
    attempt.after(3)
    assert attempt.history.present() == [Waiting("slot 1 (pid 4711) has sent nothing for 6 s")]
    text = (
        "Thread 0x00000010 (most recent call first):\n"
        '  File "/home/ann/job.py", line 12 in tidy\n'
        '  File "/ours/runtime/chain.py", line 5 in process\n'
    )

    attempt.tell(StacksDumped(1, text, 16, Places("/ours/", ("/usr/lib/",))))
    attempt.tell(SlotLost(1, "it has sent nothing for 50 s (heartbeatTimeout)", is_silent=True))

    broke = attempt.running.outcome
    assert broke.reason.startswith("function tidy (/home/ann/job.py:12 in tidy) has not returned")
    assert "slot 1 (pid 4711) was lost: it has sent nothing for 50 s" in broke.reason
    assert broke.sign.what == "Hang in function tidy at /home/ann/job.py:12 in tidy"


def test_a_slot_on_the_drivers_machine_that_was_killed_for_want_of_memory_is_told_as_such():
    attempt = Attempt()
    attempt.tell(*(SlotJoined(slot, 4710 + slot, ("127.0.0.1", slot)) for slot in (0, 1)))
    attempt.oom_kills = 1

    attempt.tell(SlotLost(0, "it closed its connection"))

    assert attempt.after(1).reason.startswith(
        "slot 0 (pid 4710) was lost: the system has killed it for want of memory"
    )


def test_of_a_slot_elsewhere_its_peer_on_the_same_machine_tells_it():
    attempt = Attempt()
    attempt.tell(joined(0), joined(1), SlotReported(1, Progress(0, 0, oom_kills=7)))

    attempt.tell(SlotLost(0, "it closed its connection"))
    attempt.tell(SlotReported(1, Progress(0, 0, oom_kills=8)))
    attempt.tell(SlotReported(1, Failed("slot 0 is gone", "lost slot")))

    assert "(pid 4710) was lost: the system has killed it" in attempt.running.outcome.reason


def test_a_slot_that_dies_while_nothing_was_killed_for_memory_is_only_lost():
    attempt = Attempt()
    attempt.oom_kills = None
    attempt.tell(joined(0), joined(1), SlotReported(1, Progress(0, 0, oom_kills=7)))

    attempt.tell(SlotLost(0, "reset"), SlotReported(1, Progress(0, 0, oom_kills=7)))

    assert attempt.after(1).reason == "slot 0 (pid 4710) was lost: reset"
