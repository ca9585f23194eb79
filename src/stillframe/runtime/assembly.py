"""Builds the subtasks of one slot from the plan: their channels, and chains of operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from stillframe.errors import UserCodeError
from stillframe.evaluator.beside import Evaluator
from stillframe.graph.logical import (
    WithWatermark,
)
from stillframe.graph.plan import Edge, Plan, SubtaskRef, Task
from stillframe.ids import CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.aggregating_by_spark import bound
from stillframe.runtime.building import Site, Surroundings, build_operator
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import (
    InputChannel,
    LocalChannel,
    OutputChannel,
    ReplayingInput,
)
from stillframe.runtime.inner_task import InnerSubtask
from stillframe.runtime.inputs import ChannelPlace
from stillframe.runtime.operators import Background, RunningOperator
from stillframe.runtime.outputs import Combiner, EdgeOutput
from stillframe.runtime.restoring import restored_batches
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.source_task import SourceSubtask
from stillframe.runtime.spilling import FeedbackInput
from stillframe.runtime.task import ChannelLog, Subtask
from stillframe.runtime.windowing import windowed_partials
from stillframe.state.channel_log import Overtaken, write_channel_log
from stillframe.state.partials import PartialAggregates
from stillframe.storage.inline import InlineStore
from stillframe.storage.paths import CHANNELS, state_path
from stillframe.storage.store import Store
from stillframe.user_code import add_to_blame

InputWrapper = Callable[[SubtaskIndex, SubtaskIndex, InputChannel], InputChannel]
input_wrapper: InputWrapper | None = None
"""Of a channel, by its two subtasks; set by `stillframe.testing.faults` in the slots of a job that
is started with faults, and asked when channels are made."""


def assemble(around: Surroundings) -> dict[SubtaskRef, Subtask]:
    """Every subtask that runs in this slot, downstream ones first: they make room for the rest."""
    if around.store is not None and around.settings.backend == "memory":
        limit = around.settings.memory_bytes_max
        around = replace(around, store=InlineStore(around.store, limit))
    index = SubtaskIndex(around.slot)
    here = [task for task in around.plan.tasks if index < task.parallelism]
    channels = _Channels(around)
    with ExitStack() as opened:  # closes what was opened if the rest cannot be
        built = [_timed(around, channels, task, index, opened) for task in here]
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


def _timed(
    around: Surroundings,
    channels: _Channels,
    task: Task,
    index: SubtaskIndex,
    opened: ExitStack,
) -> Subtask:
    began = time.perf_counter()
    made = _subtask(around, channels, task, index, opened)
    made.restore_seconds = time.perf_counter() - began
    return made


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
        try:
            operators.append(build_operator(Site(around, planned, task, index)))
        except UserCodeError as error:
            add_to_blame(error, operator=planned.uid)
            raise
        opened.callback(operators[-1].close)
    outputs = {
        edge.index: EdgeOutput(
            edge,
            index,
            [channels.output(edge, index, target) for target in edge.targets_of(index)],
            plan.max_parallelism,
            _combiner(edge, around.evaluator),
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
        stream_of=_stream_of(around.plan, edges, index) if around.rests else None,
    )


def _inputs(
    around: Surroundings, channels: _Channels, edge: Edge, index: SubtaskIndex
) -> Iterator[InputChannel]:
    restored = restored_batches(around.store, around.plan, edge, index, around.channels)
    for source in edge.sources_of(index):
        channel = channels.input(edge, source, index)
        if input_wrapper is not None:
            channel = input_wrapper(source, index, channel)
        if restored.get(source):
            channel = ReplayingInput(channel, restored[source])
        yield FeedbackInput(channel) if edge.is_feedback else channel


def _places(edge: Edge, index: SubtaskIndex) -> Iterator[ChannelPlace]:
    for source in edge.sources_of(index):
        yield ChannelPlace((edge.name, source), edge.input, edge.is_feedback, edge.loops)


def _stream_of(plan: Plan, edges: Sequence[Edge], index: SubtaskIndex) -> dict[int, int]:
    """Each input with event time is a stream: those that have read all there is are waited for, as
    Spark does. The others are of the first one, as they have nothing to say."""
    timed = plan.timed_edges()
    inputs = [edge for edge in edges if edge.index in timed and not edge.is_feedback]
    number = {edge.index: place for place, edge in enumerate(inputs)}
    streams = [number.get(edge.index, 0) for edge in edges for _ in edge.sources_of(index)]
    return dict(enumerate(streams))


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


def _channel_log(around: Surroundings, uid: OperatorUid, index: SubtaskIndex) -> ChannelLog:
    own, attempt = around.store, around.attempt  # all the rest need not be kept for long

    def write(
        checkpoint_id: CheckpointId, overtaken: Sequence[Overtaken], savepoint: Store | None
    ) -> Background:
        store = savepoint or own
        assert store is not None, "records under way have nowhere to be kept"
        path = state_path(checkpoint_id, uid, index, attempt, CHANNELS)
        return lambda: write_channel_log(store, path, overtaken)

    return write


def _combiner(edge: Edge, evaluator: Evaluator | None) -> Combiner | None:
    if edge.combines is None:
        return None
    aggregate = bound(edge.combines, evaluator)
    if aggregate.window is not None:
        return windowed_partials(edge.schema, aggregate)
    return PartialAggregates(edge.schema, aggregate.keys, aggregate.calls)
