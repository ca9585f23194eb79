"""Builds the subtasks of one slot from the plan: channels, operators with their state, sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import pyarrow as pa

from stillframe.api.sinks import SinkContext
from stillframe.api.sources import BlockingReader, SourceContext, SourceReader, Split
from stillframe.clock import Clock
from stillframe.config import CheckpointMode
from stillframe.graph.logical import Aggregate, Filter, MapInArrow, Project, Read, Write
from stillframe.graph.plan import Edge, Plan, PlannedOperator, SubtaskRef, Task
from stillframe.ids import Attempt, SlotIndex, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.key_groups import key_group_range
from stillframe.protocol.restore import StartingState, SubtaskState
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import Exchange, InputChannel, LocalChannel, OutputChannel
from stillframe.runtime.operators import (
    Aggregating,
    Filtering,
    Mapping,
    Projecting,
    Reading,
    RunningOperator,
    Writing,
)
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.reading import ThreadedReader
from stillframe.runtime.task import InnerSubtask, SourceSubtask, Subtask, TaskEvents
from stillframe.state.aggregates import AggregateTable
from stillframe.state.partials import PartialAggregates
from stillframe.state.snapshots import read_keyed_snapshot
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
            [channels.output(edge, index, target) for target in edge.targets()],
            plan.max_parallelism,
            _combiner(edge),
        )
        for edge in plan.edges
        if edge.source_task == task.index
    }
    chain = Chain(task.operators, operators, outputs)
    ref = SubtaskRef(task.index, index)
    if isinstance(operators[0], Reading):
        return SourceSubtask(ref, task.name, chain, around.clock, around.events, operators[0])
    inputs = [
        channels.input(plan.edges[edge], source, index)
        for edge in task.input_edges
        for source in plan.edges[edge].sources()
    ]
    return InnerSubtask(ref, task.name, chain, around.clock, around.events, inputs, around.mode)


def _combiner(edge: Edge) -> PartialAggregates | None:
    if edge.combines is None:
        return None
    return PartialAggregates(edge.schema, edge.combines.keys, edge.combines.calls)


def _operator(
    around: Surroundings, planned: PlannedOperator, task: Task, index: SubtaskIndex
) -> RunningOperator:
    state = around.state.get((planned.uid, index), SubtaskState())
    match planned.operator:
        case Read():
            reader = _reader(around, planned.operator, state, task, index)
            return Reading(planned.uid, index, reader)
        case Project(columns):
            return Projecting(columns, planned.schema)
        case Filter(condition):
            return Filtering(condition)
        case MapInArrow():
            return Mapping(planned.operator, planned.schema)
        case Aggregate(keys, calls):
            table = AggregateTable(planned.input_schema, keys, calls, around.plan.max_parallelism)
            _restore(around, table, state, task, index)
            return Aggregating(planned.uid, index, around.attempt, table, around.store)
        case Write(sink):
            context = SinkContext(around.plan.job, around.attempt, planned.uid, index)
            return Writing(planned.uid, index, sink, sink.open_writer(context), state.commits)


def _reader(
    around: Surroundings, read: Read, state: SubtaskState, task: Task, index: SubtaskIndex
) -> SourceReader:
    splits = [Split(str(item["id"]), cast(JsonObject, item["position"])) for item in state.items]
    context = SourceContext(index, task.parallelism, around.clock, around.feed, read.columns)
    reader = read.source.open(splits, context)
    if isinstance(reader, BlockingReader):
        return ThreadedReader(splits, reader, around.wake)
    return reader


def _restore(
    around: Surroundings,
    table: AggregateTable,
    state: SubtaskState,
    task: Task,
    index: SubtaskIndex,
) -> None:
    owned = key_group_range(index, task.parallelism, around.plan.max_parallelism)
    for keyed in state.keyed:
        assert around.store is not None, "there is state to restore but nowhere to read it from"
        file = keyed.file
        buffer = around.store.read_verified(file.path, file.length_bytes, file.crc32)
        for batch in read_keyed_snapshot(buffer, keyed.key_groups, owned):
            table.restore(batch)
