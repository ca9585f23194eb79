"""A whole job with a cycle, two slots of it, built from its plan and stepped in any order."""

from collections import Counter
from random import Random

import pyarrow as pa
import pytest

from stillframe.api.functions import TwoInputFunction
from stillframe.api.sinks import Committer, Sink, SinkWriter
from stillframe.coordinator.plan_descriptions import describe_operators
from stillframe.graph.logical import CloseLoop, Connect, LoopHead, MapInArrow, Node, Read, Write
from stillframe.graph.plan import Forward, build_plan
from stillframe.protocol.restore import starting_state
from stillframe.runtime.assembly import assemble
from stillframe.runtime.building import Surroundings
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.task import TaskEvents
from stillframe.testing.clock import ManualClock
from stillframe.testing.sources import ScriptedSource

SCHEMA = pa.schema([("key", pa.int64()), ("rounds", pa.int64())])
SLOTS = 2


def batch(*rows):
    return pa.record_batch([[key for key, _ in rows], [left for _, left in rows]], schema=SCHEMA)


class OneRoundLess(TwoInputFunction):
    """What enters from outside, in the middle of the cycle, goes round like the rest."""

    def process_first(self, records):
        rows = records.to_pylist()
        return [batch(*((row["key"], row["rounds"] - 1) for row in rows))]

    def process_second(self, records):
        return [records]


def still_going(batches):
    for each in batches:
        yield each.filter(pa.array([left > 0 for left in each["rounds"].to_pylist()]))


def gone_round(batches):
    for each in batches:
        yield each.filter(pa.array([left <= 0 for left in each["rounds"].to_pylist()]))


class Collected(Sink, SinkWriter, Committer):
    """Keeps the keys of what is written."""

    def __init__(self):
        self.keys = []

    def open_writer(self, context):
        return self

    def open_committer(self, context):
        return self

    def describe(self):
        return "collected"

    def write(self, records):
        self.keys += records["key"].to_pylist()

    def rotate(self, checkpoint_id):
        return lambda: []

    def commit(self, epoch, prepared):
        raise AssertionError("there are no checkpoints")

    def sweep(self, job, uid, older_than, keep):
        raise AssertionError("there are no attempts")

    def close(self):
        pass


class Wires:
    """Every channel between the slots, as a queue with both ends at hand."""

    def __init__(self):
        self.channels = {}

    def output(self, peer, channel_id):
        return self.channels.setdefault(channel_id, LocalChannel(200))

    input = output


class Drains(TaskEvents):
    """Counts the subtasks that have come to their end; nothing else may happen."""

    def __init__(self):
        self.drained_subtasks = Counter()

    def drained(self, subtask):
        self.drained_subtasks[subtask] += 1

    def unexpected(self, *said):
        raise AssertionError(f"there are no checkpoints: {said}")

    snapshot_started = channels_recorded = acknowledged = declined = unexpected
    snapshot_unwanted = open_savepoint = commit_wanted = committed = caught_up = unexpected


def plan_of(sink, entering, outside):
    def read(name, rows):
        scripts = tuple(tuple(batch(row) for row in rows[i::SLOTS]) for i in range(SLOTS))
        return Node(Read(ScriptedSource(SCHEMA, scripts, name)), SCHEMA, (), name)

    head = Node(LoopHead(), SCHEMA, (read("entering", entering),), "head")
    body_inputs = (head, read("outside", outside))
    body = Node(Connect(OneRoundLess, "one round less", ("key",)), SCHEMA, body_inputs, "body")
    back = Node(MapInArrow(still_going, "still going"), SCHEMA, (body,), "back")
    out = Node(MapInArrow(gone_round, "gone round"), SCHEMA, (body,), "out")
    closed = Node(CloseLoop(head), SCHEMA, (out, back))
    return build_plan("cycle", [Node(Write(sink), SCHEMA, (closed,), "write")], SLOTS)


def slots_of(plan, clock, events):
    sources = {
        planned.uid: [
            {"id": split.id, "position": split.position}
            for split in planned.operator.source.splits(SLOTS)
        ]
        for _, planned in plan.operators()
        if isinstance(planned.operator, Read)
    }
    state = starting_state(describe_operators(plan), 128, None, sources)
    wires = Wires()
    return [
        assemble(
            Surroundings(
                plan=plan,
                slot=slot,
                attempt=1,
                state=state,
                store=None,
                network=wires,
                channel_buffer_bytes=200,
                clock=clock,
                wake=lambda: None,
                feed=None,
                events=events,
                mode="exactly-once",
            )
        )
        for slot in range(SLOTS)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_every_record_leaves_the_cycle_once_and_then_it_ends(seed):
    """One head must not end while a record can still enter elsewhere and reach it."""
    random = Random(seed)
    entering = [(key, random.choice([1, 3, 12])) for key in range(random.randint(0, 12))]
    outside = [(100 + key, random.choice([0, 3, 12])) for key in range(random.randint(0, 12))]
    sink, clock, events = Collected(), ManualClock(), Drains()
    plan = plan_of(sink, entering, outside)
    [back] = [edge for edge in plan.edges if edge.is_feedback]
    assert back.partitioning == Forward()
    subtasks = [each for slot in slots_of(plan, clock, events) for each in slot.values()]

    for _ in range(100):
        weights = [random.choice([1, 10, 100]) for _ in subtasks]
        for subtask in random.choices(subtasks, weights, k=2_000):  # unfair, but not for ever
            subtask.step()
            clock.advance(0.001)
        if len(events.drained_subtasks) == len(subtasks):
            break

    assert set(events.drained_subtasks.values()) == {1}
    assert len(events.drained_subtasks) == len(subtasks), "the cycle goes on for ever"
    assert Counter(sink.keys) == Counter(key for key, _ in [*entering, *outside])
