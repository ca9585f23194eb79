"""A slot gives everything back when it ends, because Spark's workers are reused."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stillframe.api.sources import BlockingReader, Source, Split
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.control import ControlServer, SlotJoined
from stillframe.errors import StillframeError
from stillframe.graph.launch import SlotLaunch
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.messages import EndSlot, Failed, Running, StartSlot
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.slot import run_slot
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

    def __init__(self, sink, attempt=1):
        read = Node(Read(Endless()), SCHEMA, given_uid="read")
        plan = build_plan("views", [Node(Write(sink), SCHEMA, (read,), given_uid="write")], 1)
        self.events = queue.Queue()
        self.before = set(threading.enumerate())
        self.server = ControlServer("127.0.0.1", SECRET, "views", 1, 1, self.events.put)
        coordinator = Address("127.0.0.1", self.server.port)
        self.launch = SlotLaunch(plan, attempt, coordinator, SECRET, None, 1 << 20)
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


def test_a_slot_that_is_refused_leaves_nothing_behind():
    slot = SlotByHand(DiscardSink(), attempt=2)

    assert slot.threads_left() == []
    assert "attempt 2" in str(slot.raised)
