"""Builds the subtasks of one slot from the plan: channels, operators with their state, sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.sinks import SinkContext
from stillframe.api.sources import BlockingReader, Source, SourceContext, SourceReader, Split
from stillframe.clock import Clock
from stillframe.config import CheckpointMode, StateSettings
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    Connect,
    DropDuplicates,
    Enrich,
    Filter,
    Join,
    Late,
    Lookup,
    LoopHead,
    MapInArrow,
    Process,
    ProcessStream,
    Project,
    Read,
    Transform,
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
from stillframe.runtime.deduplicating import Deduplicating, seen_keys
from stillframe.runtime.disk import AggregatingOnDisk, DiskRoom, rows_of_databases
from stillframe.runtime.enriching import Enriching, newest_rows
from stillframe.runtime.inner_task import ChannelPlace, InnerSubtask
from stillframe.runtime.joining import Joining
from stillframe.runtime.kept_states import KeptStates, StatesOnDisk, StatesOnHeap
from stillframe.runtime.keyed_functions import FunctionOperator, Processing
from stillframe.runtime.lookups import LookingUp
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
from stillframe.runtime.reading import (
    SplitAfterSplitReader,
    ThreadedReader,
    splits_of,
    times_of_splits,
)
from stillframe.runtime.restoring import read_copy, read_file, read_share, restored_batches
from stillframe.runtime.source_task import SourceSubtask
from stillframe.runtime.spilling import FeedbackInput
from stillframe.runtime.stream_processing import RestoredRows, StreamProcessing
from stillframe.runtime.task import ChannelLog, Subtask, TaskEvents
from stillframe.runtime.transforming import Transforming
from stillframe.runtime.watermarking import Watermarking
from stillframe.runtime.windowing import Windowing, window_tables, windowed_partials
from stillframe.state.aggregates import AggregateTable
from stillframe.state.channel_log import Overtaken, write_channel_log
from stillframe.state.disk import Disk
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.evolution import fitted_columns
from stillframe.state.heap import HeapBackend
from stillframe.state.partials import PartialAggregates
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.inline import InlineStore
from stillframe.storage.paths import CHANNELS, state_path
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
    ahead_seconds_max: float = math.inf
    """How far ahead of the clock a record may pull event time."""
    settings: StateSettings = StateSettings()  # noqa: RUF009 - frozen
    room: DiskRoom | None = None
    """Where databases work; None: all state is on the heap."""


def assemble(around: Surroundings) -> dict[SubtaskRef, Subtask]:
    """Every subtask that runs in this slot, downstream ones first: they make room for the rest."""
    if around.store is not None and around.settings.backend == "memory":
        limit = around.settings.memory_bytes_max
        around = replace(around, store=InlineStore(around.store, limit))
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
    store, attempt = around.store, around.attempt  # all the rest need not be kept for long
    if store is None:
        return None

    def write(checkpoint_id: CheckpointId, overtaken: Sequence[Overtaken]) -> Background:
        path = state_path(checkpoint_id, uid, index, attempt, CHANNELS)
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
            emits_all = planned.operator.emits_all
            return Windowing(*place, tables, around.store, state.watermark_us, emits_all=emits_all)
        case Aggregate(keys, calls, emits_all=emits_all):
            what = (planned.input_schema, keys, calls, around.plan.max_parallelism)
            return _aggregating(around, planned, what, emits_all, state, task, index)
        case DropDuplicates():
            rows = _restored_rows(around, state.keyed, task, index)
            seen = seen_keys(
                planned.input_schema, planned.operator, around.plan.max_parallelism, state, rows
            )
            place = (planned.uid, index, around.attempt)
            return Deduplicating(*place, seen, around.store, state.watermark_us)
        case Lookup():
            return LookingUp(planned.operator, planned.schema)
        case Enrich():
            return _enriching(around, planned, planned.operator, state, task, index)
        case WithWatermark():
            return Watermarking(
                planned.uid,
                index,
                planned.operator,
                around.clock,
                state.watermark_us,
                _split_times(around, planned, task, index),
                around.idle_timeout_seconds,
                around.ahead_seconds_max,
            )
        case Join():
            return _joining(around, planned, planned.operator, state, task, index)
        case Transform():
            return _transforming(around, planned, planned.operator, state, task, index)
        case ProcessStream():
            return _stream_function(around, planned, planned.operator, state, task, index)
        case Connect() | Process():
            return _function(around, planned, planned.operator, state, task, index)
        case LoopHead() | Late():
            return Passing()
        case Write(sink):
            context = SinkContext(around.plan.job, around.attempt, planned.uid, index)
            return Writing(planned.uid, index, sink, sink.open_writer(context), state.commits)
        case Union() | CloseLoop():
            raise AssertionError(f"{planned.operator} is an edge, not an operator")


def _aggregating(
    around: Surroundings,
    planned: PlannedOperator,
    what: tuple[pa.Schema, Sequence[str], Sequence[AggregateCall], int],
    emits_all: bool,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> RunningOperator:
    place = (planned.uid, index, around.attempt)
    if around.room is None:
        table = AggregateTable(*what)
        for _, batch in _restored_states(around, state, task, index):
            table.restore(fitted_columns(batch, table.snapshot_schema, planned.uid))
        return Aggregating(*place, table, around.store, emits_all=emits_all)
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    directory, snapshots = around.room.open_database(*place, owned, around.store, state.disks)
    disk = Disk.open(directory, around.room.memory)
    paged = PagedAggregates(*what, disk, owned, around.room.buffer_bytes_max)
    for batch in _restored_rows(around, state.keyed, task, index):
        paged.restore(fitted_columns(batch, paged.snapshot_schema, planned.uid))
    return AggregatingOnDisk(paged, snapshots, emits_all=emits_all)


def _split_times(
    around: Surroundings, planned: PlannedOperator, task: Task, index: SubtaskIndex
) -> dict[str, int]:
    """How far the splits had come that the task's source goes on with, as this operator saw it."""
    head = task.operators[0]
    if not isinstance(head.operator, Read):
        return {}
    return times_of_splits(around.state.get((head.uid, index), SubtaskState()).items, planned.uid)


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


def _joining(
    around: Surroundings,
    planned: PlannedOperator,
    operator: Join,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> Joining:
    edges = [around.plan.edges[edge] for edge in task.input_edges]
    second = next(edge.schema for edge in edges if edge.input == 1)
    joining = Joining(
        planned.uid,
        index,
        around.attempt,
        operator,
        (planned.input_schema, second),
        planned.schema,
        around.store,
        around.plan.max_parallelism,
        state,
    )
    for name in {keyed.name for keyed in state.keyed}:
        files = [keyed for keyed in state.keyed if keyed.name == name]
        joining.restore(name, _restored_rows(around, files, task, index))
    return joining


def _function(
    around: Surroundings,
    planned: PlannedOperator,
    operator: Connect | Process,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> FunctionOperator[Any]:
    kind: type[FunctionOperator[Any]] = Processing if isinstance(operator, Process) else Connecting
    function = kind(
        planned.uid,
        index,
        around.attempt,
        operator,
        planned.input_schema,
        planned.schema,
        around.store,
        around.plan.max_parallelism,
        around.clock,
        _own_time_us(around, state, task, index),
    )
    for keyed in state.keyed:
        take = function.restore_timers if keyed.name == function.TIMERS else function.restore
        for batch in _restored_rows(around, [keyed], task, index):
            take(batch)
    for copy in state.broadcast:
        for batch in read_copy(around.store, copy):
            function.restore(batch)
    return function


def _stream_function(
    around: Surroundings,
    planned: PlannedOperator,
    operator: ProcessStream,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> StreamProcessing:
    restored: dict[str, RestoredRows] = {}
    whole = ((copy, read_copy(around.store, copy)) for copy in state.broadcast)
    shares = ((dealt.state, read_share(around.store, dealt)) for dealt in state.dealt)
    for found, batches in [*whole, *shares]:
        rows = restored.setdefault(found.name, RestoredRows(found.redistribution, []))
        rows.batches.extend(batches)
    return StreamProcessing(
        planned.uid,
        index,
        task.parallelism,
        around.attempt,
        operator,
        planned.schema,
        around.store,
        {name: rows for name, rows in restored.items() if rows.batches},
    )


def _transforming(
    around: Surroundings,
    planned: PlannedOperator,
    operator: Transform,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> Transforming:
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    transforming = Transforming(
        operator,
        planned.input_schema,
        planned.schema,
        _kept_states(around, planned, operator, state, owned, index),
        around.plan.max_parallelism,
        around.clock,
        _own_time_us(around, state, task, index),
    )
    # Every snapshot of it notes a time: without one, no checkpoint knows of this operator.
    if state.watermark_us is None:
        transforming.start(owned)
    if around.room is not None:
        state = replace(state, disks=())  # they are in the database already
    for name, batch in _restored_states(around, state, task, index):
        transforming.restore(name, batch)
    return transforming


def _kept_states(
    around: Surroundings,
    planned: PlannedOperator,
    operator: Transform,
    state: SubtaskState,
    owned: range,
    index: SubtaskIndex,
) -> KeptStates:
    key_schema = pa.schema([planned.input_schema.field(key) for key in operator.keys])
    keys = (key_schema, around.plan.max_parallelism)
    place = (planned.uid, index, around.attempt)
    room = around.room
    if room is None:
        return StatesOnHeap(*place, around.store, HeapBackend(*keys))
    directory, snapshots = room.open_database(*place, owned, around.store, state.disks)
    backend = DiskBackend(*keys, directory, room.memory, room.buffer_bytes_max)
    return StatesOnDisk(*place, around.store, backend, snapshots)


def _enriching(
    around: Surroundings,
    planned: PlannedOperator,
    operator: Enrich,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> Enriching:
    rows = _restored_rows(around, state.keyed, task, index)
    newest = newest_rows(
        operator, planned.input_schema, planned.schema, around.plan.max_parallelism, rows
    )
    place = (planned.uid, index, around.attempt)
    return Enriching(*place, operator, newest, planned.schema, around.store)


def _own_time_us(
    around: Surroundings, state: SubtaskState, task: Task, index: SubtaskIndex
) -> int | None:
    """How far event time had come for all key groups that are here now.

    Further than for the whole operator, where all of them were: what a function has seen of time
    does not go back only because a barrier overtook more on the way to another subtask.
    """
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    if sum(each.stop - each.first for each in state.reached) < len(owned):
        return state.watermark_us
    return min((each.watermark_us for each in state.reached), default=state.watermark_us)


def _restored_states(
    around: Surroundings, state: SubtaskState, task: Task, index: SubtaskIndex
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of all keyed states whose key groups this subtask owns, for who keeps them on the
    heap, whatever they were kept in before."""
    for keyed in state.keyed:
        for batch in _restored_rows(around, [keyed], task, index):
            yield keyed.name, batch
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    yield from rows_of_databases(around.store, state.disks, owned)


def _restored_rows(
    around: Surroundings, keyed_states: Sequence[KeyedState], task: Task, index: SubtaskIndex
) -> Iterator[pa.RecordBatch]:
    """The rows of these files whose key groups this subtask owns."""
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    for keyed in keyed_states:
        buffer = read_file(around.store, keyed.file)
        yield from read_keyed_snapshot(buffer, keyed.key_groups, owned)
