"""One subtask, stepped by hand: no threads, no sockets, no files."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.api.sinks import Committer, Sink, SinkWriter
from stillframe.api.sources import SourceContext
from stillframe.errors import StorageError
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import Edge, PlannedOperator, Rebalance, SubtaskRef
from stillframe.protocol.manifests import OperatorSnapshot, PendingCommit
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import Barrier, CancelBarrier, EndOfRecords
from stillframe.runtime.operators import Reading, StatefulOperator, Writing
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.task import InnerSubtask, SourceSubtask, TaskEvents, take_turn
from stillframe.testing.clock import ManualClock
from stillframe.testing.sources import Gate, ScriptedSource, Wait

SCHEMA = pa.schema([("id", pa.int64())])
REF = SubtaskRef(0, 0)


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def barrier(checkpoint_id, clock):
    return Barrier(checkpoint_id, clock.wall_ms())


class Recorded(TaskEvents):
    """Keeps what the subtask says, in order; background work is done when the test says so."""

    def __init__(self):
        self.said = []
        self.started = {}
        self.commits = []

    def snapshot_started(self, subtask, started):
        self.said.append(("started", started.checkpoint_id))
        self.started[started.checkpoint_id] = started

    def acknowledged(self, subtask, checkpoint_id, operators, timings):
        self.said.append(("acknowledged", checkpoint_id, tuple(operators), timings))

    def declined(self, subtask, checkpoint_id, reason):
        self.said.append(("declined", checkpoint_id, reason))

    def snapshot_unwanted(self, operators):
        self.said.append(("unwanted", tuple(op.uid for op in operators)))

    def commit_wanted(self, subtask, sink, epoch, commit):
        self.said.append(("commit", epoch, commit.committables))
        self.commits.append((sink, commit.checkpoint_id))

    def committed(self, subtask, checkpoint_id):
        self.said.append(("committed", checkpoint_id))

    def drained(self, subtask):
        self.said.append(("drained",))

    def write(self, subtask, checkpoint_id):
        """The background part of this checkpoint runs to its end."""
        results = []
        for background in self.started[checkpoint_id].writes:
            try:
                results.append(background())
            except Exception as error:
                results.append(error)
        subtask.on_written(checkpoint_id, results)

    def take(self):
        said, self.said = self.said, []
        return said


class Summing(StatefulOperator):
    """Remembers the sum of all ids; its snapshot can be made to fail."""

    def __init__(self):
        self.sum = 0
        self.broken = None
        self.on_snapshot = lambda: None

    def process(self, records):
        self.sum += sum(records["id"].to_pylist())
        return (records,)

    def snapshot(self, checkpoint_id):
        frozen, broken = self.sum, self.broken
        self.on_snapshot()

        def write():
            if broken is not None:
                raise broken
            return frozen

        return write

    def described(self, checkpoint_id, written):
        return OperatorSnapshot("sum", 0, items=({"sum": written},))


class ListSink(Sink, SinkWriter):
    """Each epoch is one committable: the ids in it."""

    def __init__(self, fails=False):
        self.epoch = []
        self.fails = fails

    def open_writer(self, context):
        return self

    def open_committer(self):
        return NoCommitter()

    def describe(self):
        return "list"

    def write(self, records):
        self.epoch += records["id"].to_pylist()

    def rotate(self, checkpoint_id):
        ended, self.epoch = self.epoch, []

        def prepare():
            if self.fails:
                raise StorageError("the sink's disk is full")
            return [{"ids": ended}] if ended else []

        return prepare

    def close(self):
        pass


class NoCommitter(Committer):
    def commit(self, epoch, committables):
        raise AssertionError("the slot commits")

    def sweep(self, job, uid, older_than, keep):
        raise AssertionError("the driver sweeps")


class CoordinatorSink(ListSink):
    commits_at_coordinator = True


def planned(operator, chained=(), edges=()):
    return PlannedOperator("uid", operator, SCHEMA, SCHEMA, chained, edges)


def edge_to(channels):
    return EdgeOutput(Edge(0, 0, 1, Rebalance(), SCHEMA, 1, len(channels), 0), channels, 128)


class Source:
    """A source subtask with one output channel."""

    def __init__(self, *items, buffer_bytes=1 << 20):
        self.clock = ManualClock()
        self.events = Recorded()
        self.out = LocalChannel(buffer_bytes)
        source = ScriptedSource(SCHEMA, (items,))
        reader = source.open(source.splits(1), SourceContext(0, 1, self.clock))
        reading = Reading("clicks", 0, reader)
        chain = Chain([planned(Read(source), edges=(0,))], [reading], {0: edge_to([self.out])})
        self.subtask = SourceSubtask(REF, "read", chain, self.clock, self.events, reading)


class Inner:
    """A summing subtask with its input channels, one output channel and maybe a sink."""

    def __init__(self, channels=None, sink=None, buffer_bytes=1 << 20, restored=()):
        self.clock = ManualClock()
        self.events = Recorded()
        self.inputs = channels or [LocalChannel(1 << 20) for _ in range(2)]
        self.out = LocalChannel(buffer_bytes)
        self.summing = Summing()
        operators, places = (
            [self.summing],
            [planned(None, chained=(1,) if sink else (), edges=(0,))],
        )
        if sink is not None:
            operators.append(Writing("write", 0, sink, sink, restored))
            places.append(planned(Write(sink)))
        chain = Chain(places, operators, {0: edge_to([self.out])})
        self.subtask = InnerSubtask(REF, "sum", chain, self.clock, self.events, self.inputs)

    def run(self):
        while self.subtask.step():
            pass

    def barriers(self, checkpoint_id):
        for channel in self.inputs:
            channel.send(barrier(checkpoint_id, self.clock))
        self.run()


def drained_elements(channel):
    taken = []
    while not channel.is_empty():
        element = channel.take()
        taken.append(element["id"].to_pylist() if isinstance(element, pa.RecordBatch) else element)
    return taken


# --- sources ---------------------------------------------------------------------------------


def test_a_sources_barrier_goes_out_between_what_it_read_before_and_after():
    source = Source(batch(1), batch(2))
    source.subtask.step()
    source.subtask.on_trigger(barrier(1, source.clock))
    source.subtask.step()

    assert drained_elements(source.out) == [[1], barrier(1, source.clock), [2]]


def test_a_sources_snapshot_holds_the_position_at_its_barrier_however_late_it_is_written():
    source = Source(batch(1), batch(2))
    source.subtask.step()
    source.subtask.on_trigger(barrier(1, source.clock))
    source.subtask.step()
    source.events.write(source.subtask, 1)

    _, (_, checkpoint_id, [snapshot], _) = source.events.take()
    assert checkpoint_id == 1
    assert snapshot.items == ({"id": "script-0", "position": {"next": 1}},)


def test_a_source_is_not_read_while_its_output_has_no_room():
    source = Source(batch(1), batch(2), buffer_bytes=1)

    assert source.subtask.step()
    assert not source.subtask.step()
    assert source.subtask.counters.records_read == 1
    source.out.take()
    assert source.subtask.step()


def test_a_source_reads_no_faster_than_its_slot_works_off():
    source = Source(*(batch(i) for i in range(40)))
    inner = Inner(channels=[source.out])
    waiting = []

    while take_turn([inner.subtask, source.subtask]):
        read, taken = source.subtask.counters.records_read, inner.subtask.counters.records_in
        waiting.append(read - taken)

    assert max(waiting) == 1, "a barrier would wait behind all of them"
    assert inner.summing.sum == sum(range(40))


def test_a_barrier_goes_out_even_when_there_is_no_room_for_records():
    source = Source(batch(1), batch(2), buffer_bytes=1)
    source.subtask.step()

    source.subtask.on_trigger(barrier(1, source.clock))

    assert drained_elements(source.out) == [[1], barrier(1, source.clock)]


def test_a_source_that_has_nothing_yet_says_when_to_ask_again(tmp_path):
    gate = Gate(str(tmp_path / "gate"))
    source = Source(Wait(gate), batch(1))

    assert not source.subtask.step()
    assert 0 < source.subtask.idle_seconds_max() < 1
    gate.open()
    assert source.subtask.step()


def test_a_source_at_its_end_says_so_once_and_still_answers_checkpoints():
    source = Source(batch(1))
    while source.subtask.step():
        pass
    assert not source.subtask.step()
    assert source.events.take() == [("drained",)]

    source.subtask.on_trigger(barrier(1, source.clock))
    source.events.write(source.subtask, 1)

    assert [each[0] for each in source.events.take()] == ["started", "acknowledged"]
    assert drained_elements(source.out) == [[1], EndOfRecords(), barrier(1, source.clock)]


def test_how_long_the_trigger_took_to_arrive_is_measured():
    source = Source(batch(1))
    triggered = barrier(1, source.clock)
    source.clock.advance(0.25)
    source.subtask.on_trigger(triggered)
    source.clock.advance(0.5)
    source.events.write(source.subtask, 1)

    timings = source.events.take()[-1][3]
    assert (timings.start_delay_ms, timings.alignment_ms) == (250, 0)
    assert (timings.sync_ms, timings.async_ms) == (0, 500)


# --- inner subtasks --------------------------------------------------------------------------


def test_only_the_channel_that_is_early_is_held():
    inner = Inner()
    early, late = inner.inputs
    early.send(barrier(1, inner.clock))
    early.send(batch(100))
    late.send(batch(1))
    late.send(batch(2))
    inner.run()

    assert inner.summing.sum == 3
    assert not early.is_empty(), "what follows the barrier waits"
    late.send(barrier(1, inner.clock))
    inner.run()
    assert inner.summing.sum == 103


def test_the_snapshot_is_taken_before_the_barrier_goes_on_and_holds_nothing_that_follows():
    inner = Inner()
    sent_before = []
    inner.summing.on_snapshot = lambda: sent_before.extend(drained_elements(inner.out))
    inner.inputs[0].send(batch(1))
    for channel in inner.inputs:
        channel.send(barrier(1, inner.clock))
        channel.send(batch(100))
    inner.run()
    inner.events.write(inner.subtask, 1)

    assert sent_before == [[1]]
    assert drained_elements(inner.out) == [barrier(1, inner.clock), [100], [100]]
    _, (_, _, [snapshot], _) = inner.events.take()
    assert snapshot.items == ({"sum": 1},)


def test_how_long_the_barriers_waited_for_each_other_is_measured():
    inner = Inner()
    first = barrier(1, inner.clock)
    inner.clock.advance(0.1)
    inner.inputs[0].send(first)
    inner.run()
    inner.clock.advance(0.4)
    inner.inputs[1].send(first)
    inner.run()
    inner.events.write(inner.subtask, 1)

    timings = inner.events.take()[-1][3]
    assert (timings.start_delay_ms, timings.alignment_ms) == (100, 400)


def test_channels_are_read_in_turn():
    inner = Inner()
    for channel, first in zip(inner.inputs, (1, 10), strict=True):
        for ids in range(first, first + 3):
            channel.send(batch(ids))
    inner.run()

    assert drained_elements(inner.out) == [[1], [10], [2], [11], [3], [12]]


def test_an_inner_subtask_takes_nothing_while_its_output_has_no_room():
    inner = Inner(buffer_bytes=1)
    inner.inputs[0].send(batch(1))
    inner.inputs[0].send(batch(2))
    inner.run()

    assert inner.summing.sum == 1
    inner.out.take()
    inner.run()
    assert inner.summing.sum == 3


def test_a_subtask_is_drained_once_when_all_its_inputs_are():
    inner = Inner()
    inner.inputs[0].send(EndOfRecords())
    inner.run()
    assert inner.events.take() == []
    inner.inputs[1].send(batch(1))
    inner.inputs[1].send(EndOfRecords())
    inner.run()

    assert inner.events.take() == [("drained",)]
    assert drained_elements(inner.out) == [[1], EndOfRecords()]


def test_a_drained_subtask_still_aligns():
    inner = Inner()
    for channel in inner.inputs:
        channel.send(EndOfRecords())
    inner.barriers(1)

    assert inner.events.take() == [("drained",), ("started", 1)]


def test_an_abort_releases_what_was_held_and_the_late_barrier_is_ignored():
    inner = Inner()
    early, late = inner.inputs
    early.send(barrier(1, inner.clock))
    early.send(batch(5))
    inner.run()

    inner.subtask.on_abort(1)
    inner.run()
    assert inner.summing.sum == 5
    late.send(barrier(1, inner.clock))
    inner.run()
    assert ("started", 1) not in inner.events.take()
    inner.barriers(2)
    assert ("started", 2) in inner.events.take()


def test_a_barrier_that_was_cancelled_upstream_is_not_waited_for():
    inner = Inner()
    inner.inputs[0].send(barrier(1, inner.clock))
    inner.inputs[1].send(CancelBarrier(1))
    inner.inputs[0].send(batch(5))
    inner.run()

    assert inner.summing.sum == 5
    assert inner.events.take()[0][:2] == ("declined", 1)


def test_a_state_that_cannot_be_written_declines_this_checkpoint_only():
    inner = Inner()
    inner.summing.broken = StorageError("no space left")
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    assert inner.events.take()[1:] == [("unwanted", ()), ("declined", 1, "no space left")]

    inner.summing.broken = None
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)
    assert inner.events.take()[-1][:2] == ("acknowledged", 2)


def test_what_is_written_for_an_aborted_checkpoint_is_given_back_and_not_acknowledged():
    inner = Inner()
    inner.barriers(1)
    inner.subtask.on_abort(1)
    inner.events.write(inner.subtask, 1)

    assert inner.events.take()[1:] == [("unwanted", ("sum",))]


# --- sinks -----------------------------------------------------------------------------------


def acknowledged_commits(events):
    """What the last acknowledgement says is still to be committed."""
    said = [each for each in events.take() if each[0] == "acknowledged"]
    return [commit for operator in said[-1][2] for commit in operator.commits]


def test_a_sink_commits_when_its_checkpoint_is_complete_and_reports_it_when_done():
    inner = Inner(sink=ListSink())
    inner.inputs[0].send(batch(1, 2))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    assert acknowledged_commits(inner.events) == [PendingCommit(1, {"ids": [1, 2]})]

    inner.subtask.on_complete(1, 0)
    assert inner.events.take() == [("commit", 0, ({"ids": [1, 2]},))]
    inner.subtask.on_committed(*inner.events.commits[0])
    assert inner.events.take() == [("committed", 1)]
    assert inner.subtask.records_written == 2


def test_an_aborted_checkpoints_records_are_in_the_next_one():
    inner = Inner(sink=ListSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.subtask.on_abort(1)
    inner.events.write(inner.subtask, 1)
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)

    assert acknowledged_commits(inner.events) == [
        PendingCommit(1, {"ids": [1]}),
        PendingCommit(2, {"ids": [2]}),
    ]
    inner.subtask.on_complete(2, 0)
    assert inner.events.take() == [("commit", 0, ({"ids": [1]}, {"ids": [2]}))]


def test_an_epoch_still_being_prepared_is_waited_for_by_the_checkpoint_after_an_aborted_one():
    """Found by the simulator: the later snapshot was written first, and the earlier epoch lost."""
    inner = Inner(sink=ListSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.subtask.on_abort(1)
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.take()

    inner.events.write(inner.subtask, 2)
    assert inner.events.take() == [], "the epoch of checkpoint 1 is not prepared yet"
    inner.events.write(inner.subtask, 1)

    assert acknowledged_commits(inner.events) == [
        PendingCommit(1, {"ids": [1]}),
        PendingCommit(2, {"ids": [2]}),
    ]


def test_records_of_a_checkpoint_declined_for_its_state_are_in_the_next_one():
    inner = Inner(sink=ListSink())
    inner.summing.broken = StorageError("no space left")
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    inner.summing.broken = None
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)

    assert acknowledged_commits(inner.events) == [PendingCommit(1, {"ids": [1]})]


def test_a_sink_that_cannot_prepare_ends_the_attempt():
    inner = Inner(sink=ListSink(fails=True))
    inner.inputs[0].send(batch(1))
    inner.barriers(1)

    with pytest.raises(StorageError, match="the sink's disk is full"):
        inner.events.write(inner.subtask, 1)


def test_a_restored_sink_commits_what_its_checkpoint_held():
    inner = Inner(sink=ListSink(), restored=[PendingCommit(4, {"ids": [9]})])

    inner.subtask.on_complete(4, 3)

    assert inner.events.take() == [("commit", 3, ({"ids": [9]},))]


def test_what_commits_at_the_coordinator_is_forgotten_here_when_the_checkpoint_is_complete():
    inner = Inner(sink=CoordinatorSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    inner.events.take()

    inner.subtask.on_complete(1, 0)
    assert inner.events.take() == []
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)
    assert acknowledged_commits(inner.events) == [PendingCommit(2, {"ids": [2]})]
