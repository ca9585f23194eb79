"""Builds one operator of one subtask, with the state it starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.sinks import SinkContext, Staging
from stillframe.api.sources import BlockingReader, Source, SourceContext, SourceReader, Split
from stillframe.clock import Clock
from stillframe.config import CheckpointMode, StateSettings
from stillframe.evaluator.beside import Evaluator
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
from stillframe.graph.plan import Plan, PlannedOperator, Task
from stillframe.ids import Attempt, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.key_groups import key_group_range
from stillframe.protocol.manifests import KeyedState
from stillframe.protocol.restore import StartingChannels, StartingState, SubtaskState
from stillframe.runtime.aggregating_by_spark import bound
from stillframe.runtime.channels import Exchange
from stillframe.runtime.connecting import Connecting
from stillframe.runtime.deduplicating import Deduplicating, seen_keys
from stillframe.runtime.disk import AggregatingOnDisk, DiskRoom, rows_of_databases
from stillframe.runtime.enriching import Enriching, newest_rows
from stillframe.runtime.fitting import as_it_is, kept_states
from stillframe.runtime.joining import Joining
from stillframe.runtime.kept_states import KeptStates, StatesOnDisk, StatesOnHeap
from stillframe.runtime.keyed_functions import FunctionOperator, Processing
from stillframe.runtime.lookups import LookingUp
from stillframe.runtime.operators import (
    Aggregating,
    Filtering,
    Mapping,
    Passing,
    Projecting,
    RunningOperator,
)
from stillframe.runtime.reading import (
    SplitAfterSplitReader,
    ThreadedReader,
    splits_of,
    times_of_splits,
)
from stillframe.runtime.restoring import read_copy, read_file, read_share
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.stream_processing import RestoredRows, StreamProcessing
from stillframe.runtime.task import TaskEvents
from stillframe.runtime.transforming import Transforming
from stillframe.runtime.watermarking import Watermarking
from stillframe.runtime.windowing import Windowing, window_tables
from stillframe.runtime.writing import Writing
from stillframe.state.aggregates import AggregateTable
from stillframe.state.disk import Disk
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.heap import HeapBackend
from stillframe.state.pages import Fit
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import Store
from stillframe.user_code import calling


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
    rests: bool = False
    """Whether the job stops when it has read what there is, and goes on from there."""
    ahead_seconds_max: float = math.inf
    """How far ahead of the clock a record may pull event time."""
    settings: StateSettings = StateSettings()  # noqa: RUF009 - frozen
    room: DiskRoom | None = None
    """Where databases work; None: all state is on the heap."""
    incarnation: str = ""
    staging: Staging | None = None
    """Where sinks may keep what they have prepared; None: nothing is kept."""
    accepts_missing: frozenset[str] = frozenset()
    state_defaults: JsonObject = field(default_factory=dict)
    """What columns of a state begin with that the snapshot does not have."""
    evaluator: Evaluator | None = None
    """Spark's, beside the slot; None: no expression of the plan needs it."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where one operator of one subtask is built."""

    around: Surroundings
    planned: PlannedOperator
    task: Task
    index: SubtaskIndex

    @property
    def state(self) -> SubtaskState:
        """What it starts from."""
        return self.around.state.get((self.planned.uid, self.index), SubtaskState())

    @property
    def place(self) -> tuple[OperatorUid, SubtaskIndex, Attempt]:
        """What its files are named by."""
        return self.planned.uid, self.index, self.around.attempt

    @property
    def max_parallelism(self) -> int:
        return self.around.plan.max_parallelism

    @property
    def owned(self) -> range:
        """Its key groups."""
        return key_group_range(self.index, self.task.parallelism, self.max_parallelism)

    def restored_rows(
        self, keyed_states: Sequence[KeyedState] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of these files, or of all there are, whose key groups it owns; they fit."""
        for keyed in self.state.keyed if keyed_states is None else keyed_states:
            buffer = read_file(self.around.store, keyed.file)
            fit = self.fit_of(keyed.name)
            yield from map(fit, read_keyed_snapshot(buffer, keyed.key_groups, self.owned))

    def restored_states(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of all keyed states, and their names, whatever they were kept in; without those
        of databases, where there is one that goes on with them."""
        for keyed in self.state.keyed:
            for batch in self.restored_rows([keyed]):
                yield keyed.name, batch
        if self.around.room is None:
            stored = rows_of_databases(self.around.store, self.state.disks, self.owned)
            for name, group in groupby(stored, itemgetter(0)):
                fit = self.fit_of(name)
                yield from ((name, fit(batch)) for _, batch in group)

    def fit_of(self, name: str) -> Fit:
        given = self.around.state_defaults
        kept = kept_states(self.around.plan, self.task, self.planned, given).get(name)
        return as_it_is if kept is None else kept.fit

    def own_time_us(self) -> int | None:
        """How far event time had come for all key groups that are here now.

        Further than for the whole operator, where all of them were: what a function has seen of
        time does not go back only because a barrier overtook more on the way to another subtask.
        """
        state = self.state
        if sum(each.stop - each.first for each in state.reached) < len(self.owned):
            return state.watermark_us
        return min((each.watermark_us for each in state.reached), default=state.watermark_us)


def build_operator(site: Site) -> RunningOperator:
    around, planned, index, state = site.around, site.planned, site.index, site.state
    match planned.operator:
        case Read():
            source = planned.operator.source
            name = source.describe()
            with calling(f"source {name}", operator=planned.uid):
                reader = _reader(site, planned.operator)
            return Reading(
                planned.uid,
                index,
                reader,
                name=name,
                awaits_splits=source.discovery_interval_seconds is not None,
                was_ended=state.ended,
                goes_back=source.goes_back,
            )
        case Project(columns):
            return Projecting(columns, planned.schema, around.evaluator)
        case Filter(condition):
            return Filtering(condition, around.evaluator)
        case MapInArrow():
            return Mapping(planned.operator, planned.schema)
        case Aggregate(window=window) if window is not None:
            return _windowing(site, planned.operator)
        case Aggregate():
            return _aggregating(site, planned.operator)
        case DropDuplicates():
            return _deduplicating(site, planned.operator)
        case Lookup():
            return LookingUp(planned.operator, planned.schema, around.evaluator)
        case Enrich():
            return _enriching(site, planned.operator)
        case WithWatermark():
            return Watermarking(
                planned.uid,
                index,
                planned.operator,
                around.clock,
                state.watermark_us,
                _split_times(site),
                around.idle_timeout_seconds,
                around.ahead_seconds_max,
            )
        case Join():
            return _joining(site, planned.operator)
        case Transform():
            return _transforming(site, planned.operator)
        case ProcessStream():
            return _stream_function(site, planned.operator)
        case Connect() | Process():
            return _function(site, planned.operator)
        case LoopHead() | Late():
            return Passing()
        case Write(sink):
            context = SinkContext(
                around.plan.job,
                around.attempt,
                planned.uid,
                index,
                around.incarnation,
                around.staging,
                around.accepts_missing,
            )
            with calling(f"sink {sink.describe()}", operator=planned.uid):
                writer = sink.open_writer(context)
            return Writing(context, sink, writer, state.commits)
        case Union() | CloseLoop():
            raise AssertionError(f"{planned.operator} is an edge, not an operator")


# --- sources


def _reader(site: Site, read: Read) -> SourceReader:
    around, splits = site.around, splits_of(site.state.items)
    context = SourceContext(
        site.index,
        site.task.parallelism,
        around.clock,
        around.feed,
        read.columns,
        read.grouped_by,
    )
    return opened_reader(around.wake, read.source, splits, context)


def opened_reader(
    wake: Callable[[], None], source: Source, splits: Sequence[Split], context: SourceContext
) -> SourceReader:
    """A reader that can be polled, whatever kind the source has."""
    if source.discovery_interval_seconds is not None:
        return _reader_of_more(wake, source, splits, context)
    reader = source.open(splits, context)
    if not isinstance(reader, BlockingReader):
        return reader
    threaded = ThreadedReader(splits, reader, wake, source.describe())
    if reader.takes_splits:
        threaded.no_more_splits(until_now=False)
    return threaded


def _reader_of_more(
    wake: Callable[[], None], source: Source, splits: Sequence[Split], context: SourceContext
) -> SourceReader:
    """A reader that splits can be added to; those of the snapshot are the first."""
    reader, name = source.open((), context), source.describe()
    if isinstance(reader, BlockingReader) and reader.takes_splits:
        reader = ThreadedReader((), reader, wake, name)
    elif isinstance(reader, BlockingReader):
        reader.close()
        reader = SplitAfterSplitReader(partial(_open_split, source, context), wake, name)
    reader.add_splits(splits)
    return reader


def _open_split(source: Source, context: SourceContext, split: Split) -> BlockingReader:
    reader = source.open([split], context)
    assert isinstance(reader, BlockingReader), f"{source.describe()} blocks only sometimes"
    return reader


def _split_times(site: Site) -> dict[str, int]:
    """How far the splits had come that the task's source goes on with, as this operator saw it."""
    head = site.task.operators[0]
    if not isinstance(head.operator, Read):
        return {}
    return times_of_splits(
        Site(site.around, head, site.task, site.index).state.items, site.planned.uid
    )


# --- aggregates


def _windowing(site: Site, operator: Aggregate) -> Windowing:
    tables = window_tables(
        site.planned.input_schema,
        bound(operator, site.around.evaluator),
        site.max_parallelism,
        site.state,
        site.restored_rows(),
    )
    watermark_us = site.state.watermark_us
    return Windowing(
        *site.place, tables, site.around.store, watermark_us, emits_all=operator.emits_all
    )


def _aggregating(site: Site, operator: Aggregate) -> RunningOperator:
    emits_all, store = operator.emits_all, site.around.store
    calls = bound(operator, site.around.evaluator).calls
    what = (site.planned.input_schema, operator.keys, calls, site.max_parallelism)
    if site.around.room is not None:
        return _aggregating_on_disk(site, site.around.room, what, emits_all=emits_all)
    table = AggregateTable(*what)
    for _, batch in site.restored_states():
        table.restore(batch)
    return Aggregating(*site.place, table, store, emits_all=emits_all)


def _aggregating_on_disk(
    site: Site,
    room: DiskRoom,
    what: tuple[pa.Schema, Sequence[str], Sequence[AggregateCall], int],
    *,
    emits_all: bool,
) -> AggregatingOnDisk:
    directory, snapshots = room.open_database(
        *site.place, site.owned, site.around.store, site.state.disks
    )
    disk = Disk.open(directory, room.memory)
    try:
        fit = site.fit_of(PagedAggregates.TABLE)
        table = PagedAggregates(*what, disk, site.owned, room.buffer_bytes_max, fit)
        for _, batch in site.restored_states():
            table.restore(batch)
    except BaseException:
        disk.close()
        raise
    return AggregatingOnDisk(table, snapshots, emits_all=emits_all)


# --- by key


def _deduplicating(site: Site, operator: DropDuplicates) -> Deduplicating:
    seen = seen_keys(
        site.planned.input_schema,
        operator,
        site.max_parallelism,
        site.state,
        site.restored_rows(),
    )
    return Deduplicating(*site.place, seen, site.around.store, site.state.watermark_us)


def _enriching(site: Site, operator: Enrich) -> Enriching:
    planned = site.planned
    newest = newest_rows(
        operator, planned.input_schema, planned.schema, site.max_parallelism, site.restored_rows()
    )
    return Enriching(*site.place, operator, newest, planned.schema, site.around.store)


def _joining(site: Site, operator: Join) -> Joining:
    edges = [site.around.plan.edges[edge] for edge in site.task.input_edges]
    second = next(edge.schema for edge in edges if edge.input == 1)
    joining = Joining(
        *site.place,
        operator,
        (site.planned.input_schema, second),
        site.planned.schema,
        site.around.store,
        site.max_parallelism,
        site.state,
        site.around.evaluator,
    )
    keyed_states = site.state.keyed
    for name in {keyed.name for keyed in keyed_states}:
        files = [keyed for keyed in keyed_states if keyed.name == name]
        joining.restore(name, site.restored_rows(files))
    return joining


# --- the user's functions


def _function(site: Site, operator: Connect | Process) -> FunctionOperator[Any]:
    kind: type[FunctionOperator[Any]] = Processing if isinstance(operator, Process) else Connecting
    function = kind(
        *site.place,
        operator,
        site.planned.input_schema,
        site.planned.schema,
        site.around.store,
        site.max_parallelism,
        site.around.clock,
        site.own_time_us(),
    )
    for keyed in site.state.keyed:
        take = function.restore_timers if keyed.name == function.TIMERS else function.restore
        for batch in site.restored_rows([keyed]):
            take(batch)
    for copy in site.state.broadcast:
        for batch in read_copy(site.around.store, copy):
            function.restore(batch)
    return function


def _stream_function(site: Site, operator: ProcessStream) -> StreamProcessing:
    store, state = site.around.store, site.state
    restored: dict[str, RestoredRows] = {}
    whole = ((copy, read_copy(store, copy)) for copy in state.broadcast)
    shares = ((dealt.state, read_share(store, dealt)) for dealt in state.dealt)
    for found, batches in [*whole, *shares]:
        rows = restored.setdefault(found.name, RestoredRows(found.redistribution, []))
        rows.batches.extend(batches)
    return StreamProcessing(
        site.planned.uid,
        site.index,
        site.task.parallelism,
        site.around.attempt,
        operator,
        site.planned.schema,
        store,
        {name: rows for name, rows in restored.items() if rows.batches},
    )


def _transforming(site: Site, operator: Transform) -> Transforming:
    kept = _kept_states(site, operator)
    try:
        transforming = Transforming(
            operator,
            site.planned.input_schema,
            site.planned.schema,
            kept,
            site.max_parallelism,
            site.around.clock,
            site.own_time_us(),
        )
        # Every snapshot of it notes a time: without one, no checkpoint knows of this operator.
        if site.state.watermark_us is None:
            transforming.start(site.owned)
        for name, batch in site.restored_states():
            transforming.restore(name, batch)
    except BaseException:
        kept.backend.close()
        raise
    return transforming


def _kept_states(site: Site, operator: Transform) -> KeptStates:
    schema = site.planned.input_schema
    keys = (pa.schema([schema.field(key) for key in operator.keys]), site.max_parallelism)
    room, store = site.around.room, site.around.store
    if room is None:
        return StatesOnHeap(*site.place, store, HeapBackend(*keys))
    directory, snapshots = room.open_database(*site.place, site.owned, store, site.state.disks)
    backend = DiskBackend(*keys, directory, room.memory, room.buffer_bytes_max)
    return StatesOnDisk(*site.place, store, backend, snapshots)
