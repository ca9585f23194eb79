"""A slot gives everything back when it ends, because Spark's workers are reused."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.sources import BlockingReader, Source, Split
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.control import ControlServer, SlotJoined
from stillframe.errors import StillframeError
from stillframe.graph.launch import SlotLaunch
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    EndSlot,
    Failed,
    Progress,
    Running,
    StartSlot,
    TriggerCheckpoint,
)
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.slot import run_slot
from stillframe.secrets import Secret
from stillframe.storage.around import StoreAround
from stillframe.storage.local import LocalStore
from stillframe.storage.paths import number_of_file
from stillframe.wire import Address

SCHEMA = pa.schema([("id", pa.int64())])
SECRET = b"s" * 32
LIMIT_SECONDS = 20
CLOSED = []


@dataclass(frozen=True)
class Endless(Source):
    """Read in a thread of its own, for ever."""

    @property
    def schema(self):
        return SCHEMA

    def splits(self, parallelism):
        return [Split("only", {})]

    def open(self, splits, context):
        return EndlessReader()

    def describe(self):
        return "endless"


class EndlessReader(BlockingReader):
    def read(self):
        while True:
            yield Split("only", {}), pa.record_batch([[1]], schema=SCHEMA)

    def close(self):
        CLOSED.append(self)


class SlotByHand:
    """A coordinator on this thread and one slot on another."""

    def __init__(self, sink, attempt=1, between=lambda read: [read], store_address=None):
        read = Node(Read(Endless()), SCHEMA, given_uid="read")
        written = [
            Node(Write(sink), node.schema, (node,), given_uid=f"write-{number}")
            for number, node in enumerate(between(read))
        ]
        plan = build_plan("views", written, 1)
        self.events = queue.Queue()
        self.before = set(threading.enumerate())
        self.server = ControlServer("127.0.0.1", SECRET, "views", 1, 1, self.events.put)
        coordinator = Address("127.0.0.1", self.server.port)
        self.subtasks = list(plan.subtasks())
        self.launch = SlotLaunch(plan, attempt, coordinator, SECRET, store_address, 1 << 20)
        self.raised = None
        self.thread = threading.Thread(target=self.run)
        CLOSED.clear()
        self.thread.start()

    def run(self):
        try:
            run_slot(self.launch, 0, "127.0.0.1", 1, feed=None)
        except StillframeError as error:
            self.raised = error

    def next(self, kind):
        """The next report, or event, of this kind."""
        while True:
            event = self.events.get(timeout=LIMIT_SECONDS)
            for said in (event, getattr(event, "report", None)):
                if isinstance(said, kind):
                    return said

    def start(self):
        joined = self.next(SlotJoined)
        items = ({"id": "only", "position": {}},)
        self.server.send(
            0, StartSlot({0: joined.data_address}, {("read", 0): SubtaskState(items=items)})
        )

    def threads_left(self):
        """Those of the slot that still run after it has returned."""
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()
        self.server.close()
        return [t.name for t in set(threading.enumerate()) - self.before if t.is_alive()]


def test_a_slot_that_is_told_to_end_returns_and_leaves_nothing_behind():
    slot = SlotByHand(DiscardSink())
    slot.start()
    slot.next(Running)
    slot.server.broadcast(EndSlot())

    assert slot.threads_left() == []
    assert slot.raised is None
    assert len(CLOSED) == 1


def test_a_slot_that_loses_its_coordinator_ends_and_leaves_nothing_behind():
    slot = SlotByHand(DiscardSink())
    slot.start()
    slot.next(Running)
    slot.server.close()

    assert slot.threads_left() == []
    assert "coordinator" in str(slot.raised)
    assert len(CLOSED) == 1


def test_a_slot_that_cannot_be_built_says_why_and_leaves_nothing_behind(tmp_path):
    taken = Path(tmp_path) / "taken"
    taken.write_text("not a directory")
    slot = SlotByHand(FileSink(str(taken), "json", SCHEMA))
    slot.start()

    assert str(taken) in slot.next(Failed).reason
    assert slot.threads_left() == []
    assert len(CLOSED) == 1, "its source was open already"


def test_what_a_slot_raises_for_spark_to_write_down_has_no_secret_in_it(monkeypatch):
    password = Secret("xylophone-77")

    def refused(*about):
        raise StillframeError(f"no login with {password.reveal()}")

    monkeypatch.setattr("stillframe.runtime.slot.open_store", refused)
    slot = SlotByHand(DiscardSink(), store_address="s3://bucket/views")

    assert slot.threads_left() == []
    raised = "".join(traceback.format_exception(slot.raised))
    assert "no login with" in raised
    assert "xylophone-77" not in raised


class StandingStore(StoreAround):
    """Files of the first checkpoint stand still, half written, until they are let go."""

    stand = threading.Semaphore(0)
    goes_on = threading.Event()

    def write(self, path, chunks):
        return super().write(path, self.slowly(chunks) if number_of_file(path) == 1 else chunks)

    def slowly(self, chunks):
        for chunk in chunks:
            yield chunk
            self.stand.release()
            assert self.goes_on.wait(10 * LIMIT_SECONDS)


def two_counts(read):
    call = AggregateCall("count", None, "count", pa.int64())
    schema = pa.schema([*SCHEMA, ("count", pa.int64())])
    return [
        Node(Aggregate(("id",), (call,)), schema, (read,), given_uid=f"count-{number}")
        for number in range(2)
    ]


def test_uploads_of_a_checkpoint_that_was_given_up_do_not_keep_the_next_one_waiting(
    tmp_path, monkeypatch
):
    standing = StandingStore(LocalStore(tmp_path))
    monkeypatch.setattr("stillframe.runtime.slot.open_store", lambda *about: standing)
    slot = SlotByHand(DiscardSink(), between=two_counts, store_address=str(tmp_path))
    slot.start()
    slot.next(Running)
    while slot.next(Progress).records_out < 100:
        pass  # both have something to write when it has been counted
    slot.server.broadcast(TriggerCheckpoint(1, 0))
    for _ in range(2):
        assert standing.stand.acquire(timeout=LIMIT_SECONDS)
    slot.server.broadcast(AbortCheckpoint(1))
    slot.server.broadcast(TriggerCheckpoint(2, 0))

    try:
        deadline, missing = time.monotonic() + LIMIT_SECONDS, set(slot.subtasks)
        while missing:
            assert time.monotonic() < deadline, f"{missing} did not acknowledge"
            said = slot.next((Acknowledged, Progress))
            if isinstance(said, Acknowledged) and said.checkpoint_id == 2:
                missing.remove((said.task, said.subtask))
    finally:
        standing.goes_on.set()
        slot.server.broadcast(EndSlot())
        assert slot.threads_left() == []
    left = [number_of_file(str(each.relative_to(tmp_path))) for each in tmp_path.rglob("*")]
    assert 2 in left
    assert 1 not in left, "what was written of the first is deleted"


def test_a_slot_that_is_refused_leaves_nothing_behind():
    slot = SlotByHand(DiscardSink(), attempt=2)

    assert slot.threads_left() == []
    assert "attempt 2" in str(slot.raised)
