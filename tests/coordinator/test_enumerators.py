"""Enumerators seen from the driver: asked in the background, cut off from orders at the trigger."""

import re
import threading
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from letters import Letters

from stillframe.api.sources import Discovered, Source, Split, SplitEnumerator
from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import SlotJoined, SlotReported
from stillframe.coordinator.enumerators import (
    DiscoveryFailed,
    DiscoveryThreads,
    Enumerators,
    SplitsDiscovered,
)
from stillframe.coordinator.history import History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import AttemptBroke
from stillframe.coordinator.ports import CommitsPort, DiscoveriesPort, SlotsPort
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import job_shape
from stillframe.errors import DataError, StorageError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.ids import NO_CHECKPOINT
from stillframe.protocol.fit import fitted, mismatches
from stillframe.protocol.manifests import Manifest, OperatorSnapshot
from stillframe.protocol.messages import AssignSplits, Running
from stillframe.protocol.restore import SubtaskState
from stillframe.testing.clock import ManualClock

SCHEMA = pa.schema([("id", pa.int64())])
LIMIT_SECONDS = 20


@dataclass(frozen=True, eq=False)
class Listed(Source):
    """Its enumerator answers, or raises, what it is told to, one after the other."""

    answers: list[object] = field(default_factory=list)
    opened_with: list[object] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    is_followed: bool = True

    @property
    def schema(self):
        return SCHEMA

    @property
    def discovery_interval_seconds(self):
        return 2.0 if self.is_followed else None

    def splits(self, parallelism):
        return []

    def open(self, splits, context):
        raise AssertionError("nothing is read here")

    def open_enumerator(self, state):
        self.opened_with.append(state)
        return ListedEnumerator(self)

    def describe(self):
        return "listed"


class ListedEnumerator(SplitEnumerator):
    def __init__(self, source):
        self._source = source

    def on_checkpoint_complete(self, checkpoint_id, state, splits):
        self._source.told.append((checkpoint_id, state, splits))

    def discover(self):
        self._source.asked.set()
        answer = self._source.answers.pop(0)
        if isinstance(answer, threading.Event):
            answer.wait(LIMIT_SECONDS)
            answer = self._source.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self._source.closed.set()


def discovered(*names, is_last=False):
    splits = [Split(name, {"next": 0}) for name in names]
    return Discovered(splits, {"found": list(names)}, is_last)


def items(*names):
    return tuple({"id": name, "position": {"next": 0}} for name in names)


def plan_of(source, slots=2):
    read = Node(Read(source), SCHEMA, given_uid="files")
    return build_plan("views", [Node(Write(DiscardSink()), SCHEMA, (read,))], slots)


def manifest(enumerators, checkpoint_id=7, snapshots=()):
    return Manifest(
        "views",
        1,
        checkpoint_id,
        1,
        "checkpoint",
        0,
        0,
        128,
        (),
        snapshots,
        enumerators=enumerators,
    )


def completed(checkpoint_id, *found):
    """A checkpoint whose enumerator had found these, of which subtask 1 still reads the last."""
    return manifest(
        {"files": {"state": {"found": list(found)}, "is_last": False}},
        checkpoint_id,
        (OperatorSnapshot("files", 0), OperatorSnapshot("files", 1, items=items(found[-1]))),
    )


class Ports(SlotsPort, CommitsPort, DiscoveriesPort):
    def __init__(self):
        self.sent = []
        self.asked = []
        self.told = []

    def send(self, slot, order):
        self.sent.append((slot, order))

    def broadcast(self, order):
        self.sent.append((None, order))

    def submit(self, manifest):
        raise AssertionError("no sink commits at the coordinator")

    def ask(self, uid):
        self.asked.append(uid)

    def tell_complete(self, uid, completed):
        self.told.append((uid, completed.checkpoint_id))


# --- what an attempt makes of what is found ---


def parts_of(plan):
    clock = ManualClock()
    ledger = Ledger(None, "views", 2, clock)
    ledger.begin_attempt(None)
    return JobParts(plan, JobConfig(), clock, History(), DriverSinks(plan), ledger)


class Attempt:
    """Two slots that run, without checkpoints."""

    def __init__(self):
        self.ports = Ports()
        self.parts = parts_of(plan_of(Listed()))
        ports = self.ports
        self.running = RunningAttempt(self.parts, ports, ports, Letters(), None, {}, ports)
        self.number = self.parts.ledger.attempt

    def start(self):
        for slot in (0, 1):
            self.running.handle(SlotJoined(slot, 4710 + slot, ("host", slot)))
        for slot in (0, 1):
            assert self.ports.asked == [], "a slot that does not run yet would lose its splits"
            self.running.handle(SlotReported(slot, Running()))

    def assigned(self):
        return [
            (slot, order.splits, order.is_last)
            for slot, order in self.ports.sent
            if isinstance(order, AssignSplits)
        ]


def test_what_is_discovered_goes_to_the_slots_one_by_one():
    attempt = Attempt()
    attempt.start()
    assert attempt.ports.asked == ["files"]
    attempt.running.handle(SplitsDiscovered(attempt.number, "files", discovered("a", "b", "c")))

    assert attempt.assigned() == [(0, items("a", "c"), False), (1, items("b"), False)]


def test_the_enumerator_is_asked_again_when_its_interval_has_passed():
    attempt = Attempt()
    attempt.start()
    attempt.running.handle(SplitsDiscovered(attempt.number, "files", discovered()))
    assert attempt.running.wake_at_seconds() <= attempt.parts.clock.monotonic_seconds() + 2.0
    attempt.parts.clock.advance(2.0)
    attempt.running.on_time()

    assert attempt.ports.asked == ["files", "files"]


def test_what_an_enumerator_of_an_older_attempt_says_is_not_heard():
    attempt = Attempt()
    attempt.start()
    attempt.running.handle(SplitsDiscovered(attempt.number - 1, "files", discovered("a")))
    attempt.running.handle(DiscoveryFailed(attempt.number - 1, "it was long ago", True))

    assert attempt.assigned() == []
    assert attempt.running.outcome is None


@pytest.mark.parametrize("cause", ["permanent", "other"])
def test_an_enumerator_that_fails_breaks_the_attempt(cause):
    attempt = Attempt()
    attempt.start()
    attempt.running.handle(DiscoveryFailed(attempt.number, "no such directory", cause))

    assert attempt.running.outcome == AttemptBroke("no such directory", cause)


def test_a_checkpoint_keeps_what_was_found_when_it_was_triggered():
    ports = Ports()
    enumerators = Enumerators(plan_of(Listed()), None, {}, ports, ports)
    enumerators.on_running()
    enumerators.on_triggered(1)
    enumerators.on_discovered("files", discovered("a"), 0.0)
    enumerators.on_triggered(2)

    assert enumerators.at_trigger(1) == {"files": {"state": None, "is_last": False}}
    assert enumerators.at_trigger(2) == {"files": {"state": {"found": ["a"]}, "is_last": False}}


def test_what_readers_were_restored_with_is_not_assigned_again():
    ports = Ports()
    state = {("files", 0): SubtaskState(items=items("a")), ("files", 1): SubtaskState()}
    enumerators = Enumerators(plan_of(Listed()), None, state, ports, ports)
    enumerators.on_running()
    enumerators.on_discovered("files", discovered("a", "b"), 0.0)

    assert ports.sent == [(1, AssignSplits("files", 1, items("b"), False))]


def test_a_job_that_no_longer_looks_for_splits_is_not_started_from_one_that_did():
    plan = plan_of(Listed(is_followed=False))
    restored = manifest({"files": {"state": {"found": ["a"]}, "is_last": False}})

    [mismatch] = mismatches(job_shape(plan), fitted(job_shape(plan), restored))

    assert re.search(r"of source files.*follow its path", str(mismatch))


# --- the threads that ask ---


class Asked:
    def __init__(self, *answers, restored=None):
        self.source = Listed(list(answers))
        self.events = []
        self.news = threading.Condition()
        self.threads = DiscoveryThreads(plan_of(self.source), restored, 3, self.hear)

    def hear(self, event):
        with self.news:
            self.events.append(event)
            self.news.notify_all()

    def ask(self):
        heard = len(self.events)
        self.threads.ask("files")
        self.await_events(heard + 1)
        return self.events[-1]

    def await_events(self, number):
        with self.news:
            assert self.news.wait_for(lambda: len(self.events) >= number, LIMIT_SECONDS)


@pytest.fixture
def asked():
    made = []

    def make(*answers, restored=None):
        made.append(Asked(*answers, restored=restored))
        return made[-1]

    yield make
    for each in made:
        each.threads.close()


def test_answers_come_as_mail_one_for_each_question(asked):
    files = asked(discovered("a"), discovered("b", is_last=True))

    assert files.ask() == SplitsDiscovered(3, "files", discovered("a"))
    assert files.ask() == SplitsDiscovered(3, "files", discovered("b", is_last=True))
    assert files.source.opened_with == [None]


def test_an_enumerator_goes_on_from_what_the_restored_checkpoint_kept(asked):
    restored = manifest({"files": {"state": {"found": ["a"]}, "is_last": False}})
    files = asked(discovered("b"), restored=restored)
    files.ask()

    assert files.source.opened_with == [{"found": ["a"]}]


@pytest.mark.parametrize(
    ("error", "cause", "says"),
    [
        (StorageError("the disk is away"), "other", "the disk is away"),
        (DataError("no such column"), "permanent", "no such column"),
        (KeyError("x"), "other", "the enumerator of source listed raised KeyError: 'x'"),
        (StopIteration(), "other", "the enumerator of source listed raised StopIteration"),
        (TypeError("x"), "permanent", "the enumerator of source listed raised TypeError: x"),
    ],
)
def test_what_an_enumerator_raises_is_told_with_whether_it_would_happen_again(
    asked, error, cause, says
):
    files = asked(error)

    failed = files.ask()
    assert isinstance(failed, DiscoveryFailed)
    assert failed.reason.startswith(says)
    assert failed.cause == cause
    assert files.source.closed.wait(LIMIT_SECONDS)


def test_one_that_is_being_asked_does_not_delay_the_end_and_is_not_heard_any_more(asked):
    gate = threading.Event()
    files = asked(gate, discovered("a"))
    files.threads.ask("files")
    assert files.source.asked.wait(LIMIT_SECONDS)
    files.threads.close()
    gate.set()

    assert files.source.closed.wait(LIMIT_SECONDS)
    assert files.events == []


# --- what it is told ---


def told(*checkpoints):
    return [
        (number, {"found": list(found)}, [at_start(found[-1])]) for number, *found in checkpoints
    ]


def at_start(name):
    return Split(name, {"next": 0})


def test_a_completed_checkpoint_is_told_to_every_enumerator():
    ports = Ports()
    enumerators = Enumerators(plan_of(Listed()), None, {}, ports, ports)
    enumerators.on_completed(completed(8, "a"))

    assert ports.told == [("files", 8)]


def test_an_enumerator_is_told_what_it_had_found_and_what_is_still_read(asked):
    files = asked(discovered("a", "b"), discovered("c"))
    files.ask()
    files.threads.tell_complete("files", completed(8, "a", "b"))
    files.ask()

    assert files.source.told == told((8, "a", "b"))


def test_the_restored_checkpoint_is_told_first_and_a_savepoint_never(asked):
    files = asked(discovered("b"), restored=completed(7, "a"))
    files.ask()
    assert files.source.told == told((7, "a"))

    savepoint = asked(discovered("b"), restored=completed(NO_CHECKPOINT, "a"))
    savepoint.ask()
    assert savepoint.source.told == []


def test_of_checkpoints_that_complete_while_it_is_asked_the_newest_is_told(asked):
    gate = threading.Event()
    files = asked(gate, discovered("a"), discovered("b"))
    files.threads.ask("files")
    assert files.source.asked.wait(LIMIT_SECONDS)
    files.threads.tell_complete("files", completed(8, "a"))
    files.threads.tell_complete("files", completed(9, "b"))
    gate.set()
    files.threads.ask("files")
    files.await_events(2)

    assert files.source.told == told((9, "b"))


def test_what_was_complete_is_told_before_the_end(asked):
    files = asked(discovered("a"))
    files.ask()
    files.threads.tell_complete("files", completed(8, "a"))
    files.threads.close()

    assert files.source.closed.wait(LIMIT_SECONDS)
    assert files.source.told == told((8, "a"))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Discovered([Split(7, {})], {}), "a split has the id 7: give it a text"),
        (Discovered([Split("a", {"at": {1}})], {}), "position of split 'a' is not JSON"),
        (Discovered([], {1: 2}), "the state of its enumerator reads back from JSON as another"),
    ],
)
def test_a_split_or_a_state_that_cannot_be_kept_ends_the_job_with_a_sentence(asked, found, says):
    failed = asked(found).ask()

    assert isinstance(failed, DiscoveryFailed)
    assert failed.reason.startswith("source listed: ")
    assert says in failed.reason
    assert failed.cause == "permanent"
