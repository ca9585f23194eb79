"""Builds the subtasks of one slot from the plan: channels, operators with their state, sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from stillframe.api.sinks import SinkContext
from stillframe.api.sources import BlockingReader, Source, SourceContext, SourceReader, Split
from stillframe.clock import Clock
from stillframe.config import CheckpointMode
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    Connect,
    Filter,
    LoopHead,
    MapInArrow,
    Project,
    Read,
    Union,
    WithWatermark,
    Write,
)
from stillframe.graph.plan import Edge, Plan, PlannedOperator, SubtaskRef, Task
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.key_groups import key_group_range
from stillframe.protocol.manifests import KeyedState
from stillframe.protocol.restore import StartingChannels, StartingState, SubtaskState
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import (
    Exchange,
    InputChannel,
    LocalChannel,
    OutputChannel,
    ReplayingInput,
)
from stillframe.runtime.connecting import Connecting
from stillframe.runtime.inner_task import ChannelPlace, InnerSubtask
from stillframe.runtime.operators import (
    Aggregating,
    Background,
    Filtering,
    Mapping,
    Passing,
    Projecting,
    Reading,
    RunningOperator,
    Writing,
)
from stillframe.runtime.outputs import Combiner, EdgeOutput
from stillframe.runtime.reading import SplitAfterSplitReader, ThreadedReader, splits_of
from stillframe.runtime.restoring import read_copy, restored_batches
from stillframe.runtime.source_task import SourceSubtask
from stillframe.runtime.spilling import FeedbackInput
from stillframe.runtime.task import ChannelLog, Subtask, TaskEvents
from stillframe.runtime.watermarking import Watermarking
from stillframe.runtime.windowing import Windowing, window_tables, windowed_partials
from stillframe.state.aggregates import AggregateTable
from stillframe.state.channel_log import Overtaken, write_channel_log
from stillframe.state.partials import PartialAggregates
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.paths import state_path
from stillframe.storage.store import Store


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the subtasks of a slot are built into."""

    plan: Plan
    slot: SlotIndex
    attempt: Attempt
    state: StartingState
    store: Store | None
    network: Exchange
    channel_buffer_bytes: int
    clock: Clock
    wake: Callable[[], None]
    feed: Iterator[pa.RecordBatch] | None
    events: TaskEvents
    mode: CheckpointMode
    channels: StartingChannels = field(default_factory=dict)
    idle_timeout_seconds: float | None = None
    """When a source that has nothing stops holding event time back; None: never."""


def assemble(around: Surroundings) -> dict[SubtaskRef, Subtask]:
    """Every subtask that runs in this slot, downstream ones first: they make room for the rest."""
    index = SubtaskIndex(around.slot)
    here = [task for task in around.plan.tasks if index < task.parallelism]
    channels = _Channels(around)
    with ExitStack() as opened:  # closes what was opened if the rest cannot be
        built = [_subtask(around, channels, task, index, opened) for task in here]
        opened.pop_all()
    return {subtask.ref: subtask for subtask in reversed(built)}


class _Channels:
    """Both ends of the slot's channels; a channel within the slot is made once."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._local: dict[int, LocalChannel] = {}

    def output(self, edge: Edge, source: SubtaskIndex, target: SubtaskIndex) -> OutputChannel:
        channel_id = edge.channel_id(source, target)
        if source == target:
            return self._local_channel(channel_id)
        return self._around.network.output(SlotIndex(target), channel_id)

    def input(self, edge: Edge, source: SubtaskIndex, target: SubtaskIndex) -> InputChannel:
        channel_id = edge.channel_id(source, target)
        if source == target:
            return self._local_channel(channel_id)
        return self._around.network.input(SlotIndex(source), channel_id)

    def _local_channel(self, channel_id: int) -> LocalChannel:
        return self._local.setdefault(channel_id, LocalChannel(self._around.channel_buffer_bytes))


def _subtask(
    around: Surroundings,
    channels: _Channels,
    task: Task,
    index: SubtaskIndex,
    opened: ExitStack,
) -> Subtask:
    plan = around.plan
    operators: list[RunningOperator] = []
    for planned in task.operators:
        operators.append(_operator(around, planned, task, index))
        opened.callback(operators[-1].close)
    outputs = {
        edge.index: EdgeOutput(
            edge,
            index,
            [channels.output(edge, index, target) for target in edge.targets_of(index)],
            plan.max_parallelism,
            _combiner(edge),
        )
        for edge in plan.edges
        if edge.source_task == task.index
    }
    chain = Chain(task.operators, operators, outputs)
    ref = SubtaskRef(task.index, index)
    about = (ref, task.name, chain, around.clock, around.events)
    channel_log = _channel_log(around, task.operators[0].uid, index)
    if isinstance(operators[0], Reading):
        return SourceSubtask(
            *about, operators[0], around.mode, channel_log, around.idle_timeout_seconds
        )
    edges = [plan.edges[edge] for edge in task.input_edges]
    return InnerSubtask(
        *about,
        [channel for edge in edges for channel in _inputs(around, channels, edge, index)],
        around.mode,
        channel_log,
        [place for edge in edges for place in _places(edge, index)],
        _had_finished(around, task, index),
        _restored_time_us(around, task, index),
    )


def _inputs(
    around: Surroundings, channels: _Channels, edge: Edge, index: SubtaskIndex
) -> Iterator[InputChannel]:
    restored = restored_batches(around.store, around.plan, edge, index, around.channels)
    for source in edge.sources_of(index):
        channel = channels.input(edge, source, index)
        if restored.get(source):
            channel = ReplayingInput(channel, restored[source])
        yield FeedbackInput(channel) if edge.is_feedback else channel


def _places(edge: Edge, index: SubtaskIndex) -> Iterator[ChannelPlace]:
    for source in edge.sources_of(index):
        yield ChannelPlace((edge.name, source), edge.input, edge.is_feedback, edge.loops)


def _had_finished(around: Surroundings, task: Task, index: SubtaskIndex) -> bool:
    states = [around.state.get((planned.uid, index)) for planned in task.operators]
    return any(state.finished for state in states if state is not None)


def _restored_time_us(around: Surroundings, task: Task, index: SubtaskIndex) -> int | None:
    """How far the task's inputs had come, as far as its operators remember it."""
    states = [
        around.state.get((planned.uid, index), SubtaskState())
        for planned in task.operators
        if not isinstance(planned.operator, WithWatermark)
    ]
    return min((s.watermark_us for s in states if s.watermark_us is not None), default=None)


def _channel_log(around: Surroundings, uid: OperatorUid, index: SubtaskIndex) -> ChannelLog | None:
    store = around.store
    if store is None:
        return None

    def write(checkpoint_id: CheckpointId, overtaken: Sequence[Overtaken]) -> Background:
        path = state_path(checkpoint_id, uid, index, around.attempt, "channels")
        return lambda: write_channel_log(store, path, overtaken)

    return write


def _combiner(edge: Edge) -> Combiner | None:
    if edge.combines is None:
        return None
    if edge.combines.window is not None:
        return windowed_partials(edge.schema, edge.combines)
    return PartialAggregates(edge.schema, edge.combines.keys, edge.combines.calls)


def _operator(
    around: Surroundings, planned: PlannedOperator, task: Task, index: SubtaskIndex
) -> RunningOperator:
    state = around.state.get((planned.uid, index), SubtaskState())
    match planned.operator:
        case Read():
            reader = _reader(around, planned.operator, state, task, index)
            awaits_splits = planned.operator.source.discovery_interval_seconds is not None
            return Reading(planned.uid, index, reader, awaits_splits=awaits_splits)
        case Project(columns):
            return Projecting(columns, planned.schema)
        case Filter(condition):
            return Filtering(condition)
        case MapInArrow():
            return Mapping(planned.operator, planned.schema)
        case Aggregate(window=window) if window is not None:
            rows = _restored_rows(around, state.keyed, task, index)
            tables = window_tables(
                planned.input_schema, planned.operator, around.plan.max_parallelism, state, rows
            )
            place = (planned.uid, index, around.attempt)
            return Windowing(*place, tables, around.store, state.watermark_us)
        case Aggregate(keys, calls):
            table = AggregateTable(planned.input_schema, keys, calls, around.plan.max_parallelism)
            for batch in _restored_rows(around, state.keyed, task, index):
                table.restore(batch)
            return Aggregating(planned.uid, index, around.attempt, table, around.store)
        case WithWatermark():
            restored_us = state.watermark_us
            return Watermarking(planned.uid, index, planned.operator, restored_us)
        case Connect():
            return _connecting(around, planned, planned.operator, state, task, index)
        case LoopHead():
            return Passing()
        case Write(sink):
            context = SinkContext(around.plan.job, around.attempt, planned.uid, index)
            return Writing(planned.uid, index, sink, sink.open_writer(context), state.commits)
        case Union() | CloseLoop():
            raise AssertionError(f"{planned.operator} is an edge, not an operator")


def _reader(
    around: Surroundings, read: Read, state: SubtaskState, task: Task, index: SubtaskIndex
) -> SourceReader:
    splits = splits_of(state.items)
    context = SourceContext(index, task.parallelism, around.clock, around.feed, read.columns)
    if read.source.discovery_interval_seconds is not None:
        return _reader_of_more(around, read.source, splits, context)
    reader = read.source.open(splits, context)
    if isinstance(reader, BlockingReader):
        return ThreadedReader(splits, reader, around.wake)
    return reader


def _reader_of_more(
    around: Surroundings, source: Source, splits: Sequence[Split], context: SourceContext
) -> SourceReader:
    """A reader that splits can be added to; those of the snapshot are the first."""
    reader = source.open((), context)
    if isinstance(reader, BlockingReader):
        reader.close()
        reader = SplitAfterSplitReader(partial(_open_split, source, context), around.wake)
    reader.add_splits(splits)
    return reader


def _open_split(source: Source, context: SourceContext, split: Split) -> BlockingReader:
    reader = source.open([split], context)
    assert isinstance(reader, BlockingReader), f"{source.describe()} blocks only sometimes"
    return reader


def _connecting(
    around: Surroundings,
    planned: PlannedOperator,
    operator: Connect,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> Connecting:
    connecting = Connecting(
        planned.uid,
        index,
        around.attempt,
        operator,
        planned.input_schema,
        planned.schema,
        around.store,
        around.plan.max_parallelism,
    )
    for batch in _restored_rows(around, state.keyed, task, index):
        connecting.restore(batch)
    for copy in state.broadcast:
        for batch in read_copy(around.store, copy):
            connecting.restore(batch)
    return connecting


def _restored_rows(
    around: Surroundings, keyed_states: Sequence[KeyedState], task: Task, index: SubtaskIndex
) -> Iterator[pa.RecordBatch]:
    """The rows of these files whose key groups this subtask owns."""
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    for keyed in keyed_states:
        assert around.store is not None, "there is state to restore but nowhere to read it from"
        file = keyed.file
        buffer = around.store.read_verified(file.path, file.length_bytes, file.crc32)
        yield from read_keyed_snapshot(buffer, keyed.key_groups, owned)
