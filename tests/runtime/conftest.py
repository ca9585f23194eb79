"""Subtasks stepped by hand: no threads, no sockets, no files; background work when a test says."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stillframe.api.sinks import SinkContext
from stillframe.api.sources import SourceContext
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import Edge, PlannedOperator, Rebalance, SubtaskRef
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import KeyedState, OperatorSnapshot
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import LocalChannel, OutputChannel
from stillframe.runtime.elements import Barrier, Element
from stillframe.runtime.inner_task import InnerSubtask
from stillframe.runtime.inputs import ChannelPlace
from stillframe.runtime.operators import StatefulOperator
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.source_task import SourceSubtask
from stillframe.runtime.task import TaskEvents, answer_or_error
from stillframe.runtime.writing import Writing
from stillframe.state.channel_log import Overtaken, WrittenLog, WrittenRun
from stillframe.storage.local import LocalStore
from stillframe.testing.clock import ManualClock
from stillframe.testing.sources import ScriptedSource

SCHEMA = pa.schema([("id", pa.int64())])
ROOM_BYTES = 1 << 20


def plainly(element: Element) -> Any:
    """A batch as the list of its ids, a marker as it is."""
    return element["id"].to_pylist() if isinstance(element, pa.RecordBatch) else element


class Recorded(TaskEvents):
    """Keeps what the subtask says, in order; background work is done when the test says so."""

    def __init__(self):
        self.said = []
        self.started = {}
        self.channel_writes = {}
        self.commits = []

    def snapshot_started(self, subtask, started):
        self.said.append(("started", started.checkpoint_id))
        self.started[started.checkpoint_id] = started

    def channels_recorded(self, subtask, checkpoint_id, write):
        self.said.append(("recorded", checkpoint_id))
        self.channel_writes[checkpoint_id] = write

    def acknowledged(self, subtask, checkpoint_id, operators, timings, channels):
        said = ("acknowledged", checkpoint_id, tuple(operators), timings, tuple(channels))
        self.said.append(said)

    def declined(self, subtask, checkpoint_id, reason):
        self.said.append(("declined", checkpoint_id, reason))

    def open_savepoint(self, address):
        return LocalStore(Path(address))

    def snapshot_unwanted(self, files, savepoint):
        if files:
            self.said.append(("unwanted", tuple(file.path for file in files)))

    def commit_wanted(self, subtask, sink, epoch, commit):
        committables = tuple(each.committable for each in commit.prepared)
        self.said.append(("commit", epoch, committables))
        self.commits.append((sink, commit.checkpoint_id))

    def committed(self, subtask, checkpoint_id):
        self.said.append(("committed", checkpoint_id))

    def caught_up(self, subtask):
        self.said.append(("caught up",))

    def drained(self, subtask):
        self.said.append(("drained",))

    def write(self, subtask, checkpoint_id):
        """The background part of this checkpoint runs to its end."""
        writes = self.started[checkpoint_id].writes
        subtask.on_written(checkpoint_id, [answer_or_error(write) for write in writes])

    def write_channels(self, subtask, checkpoint_id):
        """What was under way is written."""
        write = self.channel_writes.pop(checkpoint_id)
        subtask.on_channels_written(checkpoint_id, answer_or_error(write))

    def take(self):
        said, self.said = self.said, []
        return said

    def acknowledgement(self):
        """The only one since the last look: its number, its operators and its channels."""
        [said] = [each for each in self.take() if each[0] == "acknowledged"]
        return said[1], said[2], said[4]


class Logged:
    """Where records under way are kept: in memory, by checkpoint."""

    def __init__(self):
        self.kept = {}
        self.broken = None

    def __call__(self, checkpoint_id, overtaken: Sequence[Overtaken], savepoint=None):
        def write() -> WrittenLog:
            if self.broken is not None:
                raise self.broken
            self.kept[checkpoint_id] = {
                (each.edge, each.source, each.target): [
                    number for batch in each.batches for number in plainly(batch)
                ]
                for each in overtaken
            }
            runs = [WrittenRun(each, at * 10, 10, 1) for at, each in enumerate(overtaken)]
            return WrittenLog(f"shared/1/uid-0-channels-{checkpoint_id}", 99, 7, tuple(runs))

        return write


class Summing(StatefulOperator):
    """Remembers the sum of all ids; its snapshot can be made to fail."""

    def __init__(self):
        self.sum = 0
        self.got = []
        self.finished = 0
        self.last_words = ()
        self.broken = None
        self.files = ()
        self.on_snapshot = lambda: None

    def process(self, batch):
        self.got += batch["id"].to_pylist()
        self.sum = sum(self.got)
        return (batch,)

    def finish(self):
        self.finished += 1
        return self.last_words

    def snapshot(self, checkpoint_id, savepoint=None):
        frozen, broken = self.sum, self.broken
        self.on_snapshot()

        def write():
            if broken is not None:
                raise broken
            return frozen

        return write

    def described(self, checkpoint_id, written):
        keyed = tuple(KeyedState("sums", file, (0,), 1, "sum int64") for file in self.files)
        return OperatorSnapshot("sum", 0, keyed=keyed, items=({"sum": written},))


class Wire(OutputChannel):
    """A way to another slot: what was sent leaves when the test says so."""

    def __init__(self, buffer_bytes=ROOM_BYTES):
        self.buffer_bytes = buffer_bytes
        self.waiting: deque[Element] = deque()

    def has_room(self):
        waiting = (each for each in self.waiting if isinstance(each, pa.RecordBatch))
        return sum(each.nbytes for each in waiting) < self.buffer_bytes

    def send(self, element):
        self.waiting.append(element)

    def is_flushed(self):
        return not self.waiting

    def overtake(self, barrier):
        overtaken = [each for each in self.waiting if isinstance(each, pa.RecordBatch)]
        self.waiting.appendleft(barrier)
        return overtaken

    def hasten(self, checkpoint_id):
        place = self._place(checkpoint_id)
        if place is None:
            return None
        ahead = [*itertools.islice(self.waiting, place)]
        barrier = self.waiting[place]
        del self.waiting[place]
        self.waiting.appendleft(replace(barrier, alignment_timeout_ms=0))
        return [each for each in ahead if isinstance(each, pa.RecordBatch)]

    def holds(self, checkpoint_id):
        return self._place(checkpoint_id) is not None

    def leave(self, count=None):
        """So many elements leave, or all."""
        count = len(self.waiting) if count is None else count
        return [plainly(self.waiting.popleft()) for _ in range(count)]

    def _place(self, checkpoint_id):
        for place, each in enumerate(self.waiting):
            if isinstance(each, Barrier) and each.checkpoint_id == checkpoint_id:
                return place
        return None


def planned(operator, chained=(), edges=()):
    return PlannedOperator("uid", operator, SCHEMA, SCHEMA, chained, edges)


def edge_to(channels, index=0, loops=()):
    name = "out" if index == 0 else f"out-{index}"
    edge = Edge(index, name, 0, 1, Rebalance(), SCHEMA, 1, len(channels), 0, loops=loops)
    return EdgeOutput(edge, 0, channels, 128)


class Stepped:
    """A subtask and what it is connected to."""

    subtask: Any
    clock: ManualClock
    out: Any

    def run(self):
        """Step it until there is nothing to do."""
        for _ in range(10_000):
            if not self.subtask.step():
                return
        raise AssertionError("it does not come to rest")

    def barrier(self, checkpoint_id, alignment_timeout_ms=None, *, holds=False):
        now = self.clock.wall_ms()
        return Barrier(checkpoint_id, now, alignment_timeout_ms, holds=holds)

    def sent(self):
        """What waits in the output channel, which is empty afterwards."""
        taken = []
        while not self.out.is_empty():
            taken.append(plainly(self.out.take()))
        return taken


class Source(Stepped):
    """A source subtask with one output channel; it reads one script, or several side by side."""

    def __init__(
        self,
        *items,
        buffer_bytes=ROOM_BYTES,
        mode="exactly-once",
        out=None,
        scripts=None,
        splits=None,
        behind=(),
        reader=None,
        idle_timeout_seconds=None,
        awaits_splits=False,
        was_ended=False,
    ):
        self.clock = ManualClock()
        self.events = Recorded()
        self.log = Logged()
        self.out = out or LocalChannel(buffer_bytes)
        source = ScriptedSource(SCHEMA, scripts or (items,))
        splits = source.splits(1) if splits is None else splits
        reader = reader or source.open(splits, SourceContext(0, 1, self.clock))
        told = {"awaits_splits": awaits_splits, "was_ended": was_ended}
        reading = Reading("clicks", 0, reader, **told)
        behind = [make(self.clock) for make in behind]
        plan = [planned(Read(source), *([(1,)] if behind else [(), (0,)]))]
        for position in range(1, len(behind) + 1):
            is_last = position == len(behind)
            plan.append(planned(None, *([(), (0,)] if is_last else [(position + 1,)])))
        chain = Chain(plan, [reading, *behind], {0: edge_to([self.out])})
        about = (SubtaskRef(0, 0), "read", chain, self.clock, self.events)
        self.subtask = SourceSubtask(*about, reading, mode, self.log, idle_timeout_seconds)

    def trigger(self, checkpoint_id, alignment_timeout_ms=None, *, holds=False):
        self.subtask.on_trigger(self.barrier(checkpoint_id, alignment_timeout_ms, holds=holds))


class Inner(Stepped):
    """A summing subtask with its input channels, one output channel and maybe a sink."""

    def __init__(
        self,
        channels=None,
        sink=None,
        buffer_bytes=ROOM_BYTES,
        restored=(),
        mode="exactly-once",
        places=None,
        out=None,
        loops=(),
        has_finished=False,
        head=None,
        clock=None,
        restored_time_us=None,
        together_rows_max=1,
    ):
        """Unless told otherwise a step takes one batch, so that stories can stop in between."""
        self.clock = clock or ManualClock()
        self.events = Recorded()
        self.log = Logged()
        self.inputs = channels or [LocalChannel(ROOM_BYTES) for _ in range(2)]
        self.places = places or [ChannelPlace(("in", index)) for index in range(len(self.inputs))]
        self.out = out or LocalChannel(buffer_bytes)
        self.summing = Summing()
        operators = [head or self.summing]
        plan = [planned(None, chained=(1,) if sink else (), edges=(0,))]
        if sink is not None:
            context = SinkContext("job", Attempt(1), OperatorUid("write"), SubtaskIndex(0))
            operators.append(Writing(context, sink, sink, restored))
            plan.append(planned(Write(sink)))
        chain = Chain(plan, operators, {0: edge_to([self.out], loops=loops)})
        about = (SubtaskRef(0, 0), "sum", chain, self.clock, self.events)
        self.subtask = InnerSubtask(
            *about,
            self.inputs,
            mode,
            self.log,
            self.places,
            has_finished,
            restored_time_us,
            together_rows_max,
        )

    def barriers(self, checkpoint_id, alignment_timeout_ms=None):
        for channel in self.inputs:
            channel.send(self.barrier(checkpoint_id, alignment_timeout_ms))
        self.run()

    def written(self, checkpoint_id):
        """Both background parts run to their ends; what was under way, by sender or receiver."""
        self.events.write(self.subtask, checkpoint_id)
        if checkpoint_id in self.events.channel_writes:
            self.events.write_channels(self.subtask, checkpoint_id)
        acknowledged, [snapshot], _ = self.events.acknowledgement()
        assert acknowledged == checkpoint_id
        under_way = self.log.kept.get(checkpoint_id, {})
        return snapshot.items[0]["sum"], {
            (edge, source if edge == "in" else target): ids
            for (edge, source, target), ids in under_way.items()
        }


@pytest.fixture
def new_source() -> Callable[..., Source]:
    return Source


@pytest.fixture
def new_inner() -> Callable[..., Inner]:
    return Inner


@pytest.fixture
def new_wire() -> Callable[..., Wire]:
    return Wire
