"""Which states of a snapshot a plan cannot go on with, found out on the driver before the start.

Theory of operation
-------------------
The metadata of a snapshot says of each state which columns it has and of which kind it is. What an
operator keeps now follows from the plan; what a user's program keeps it declares when it is opened,
so it is opened here once, without rows, as Spark does with a `StatefulProcessor`. Where both say
the same nothing is read. Where they differ the schema is read from one file of the state, and the
rules of `state/evolution`, by which the state will be restored, say whether the rows can be made to
fit.

Rules of this file
------------------
1. What cannot be told here (a program that cannot be opened on the driver, an operator that is not
   looked at, metadata of an older Stillframe) is not a mismatch: it is found out in the slots.
2. A file that is damaged is for those to tell who restore it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from stillframe.clock import SystemClock
from stillframe.errors import StartRefused, StillframeError
from stillframe.graph.logical import Aggregate, DropDuplicates, Enrich, Join, JoinSide, Transform
from stillframe.graph.plan import Plan, PlannedOperator, Task
from stillframe.protocol.fit import Mismatch
from stillframe.protocol.manifests import DiskState, KeyedState, Manifest
from stillframe.runtime.deduplicating import Deduplicating
from stillframe.runtime.enriching import Enriching, newest_rows
from stillframe.runtime.joining import LEFT, RIGHT
from stillframe.runtime.operators import Aggregating
from stillframe.runtime.stored_states import StatePart, schema_of
from stillframe.runtime.transforming import KeyedStates
from stillframe.runtime.windowing import Windowing, empty_windows
from stillframe.state.aggregates import AggregateTable
from stillframe.state.backends import Declared
from stillframe.state.duplicates import SeenKeys
from stillframe.state.evolution import fitted_columns, fitted_to
from stillframe.state.heap import HeapBackend
from stillframe.state.joins import JoinRows
from stillframe.state.snapshots import kind_of, schema_text
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A state as an operator keeps it now."""

    schema: pa.Schema
    fit: Callable[[pa.RecordBatch], object]
    """Makes rows fit, or raises `StartRefused`."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A state as a snapshot has it."""

    columns: str
    kind: str
    part: StatePart


def unfit_states(plan: Plan, manifest: Manifest, store: Store) -> list[Mismatch]:
    """One mismatch for each state that the plan cannot go on with."""
    return [
        mismatch
        for task, planned in plan.operators()
        if (stored := _stored(manifest, planned))
        for mismatch in _unfit(planned, stored, _kept(plan, task, planned), store)
    ]


def _unfit(
    planned: PlannedOperator,
    stored: Mapping[str, _Stored],
    kept_now: Mapping[str, _Kept],
    store: Store,
) -> Iterator[Mismatch]:
    for name, kept in kept_now.items():
        if name not in stored:
            continue
        found = stored[name]
        same_kind = found.kind in ("", kind_of(kept.schema))
        if found.columns == schema_text(kept.schema) and same_kind:
            continue
        try:
            schema = schema_of(store, found.part)
            kept.fit(pa.RecordBatch.from_pylist([], schema=schema))
        except StartRefused as error:
            what, _, remedy = str(error).rpartition(": ")
            yield Mismatch(f"operator {planned.uid}: {what}", remedy, planned.uid)
        except (StillframeError, KeyError, pa.ArrowException) as error:
            log.debug("the schema of %s of %s cannot be read here: %s", name, planned.uid, error)


# --- what the snapshot has


def _stored(manifest: Manifest, planned: PlannedOperator) -> dict[str, _Stored]:
    """By name, of the first subtask that has it: all subtasks declare the same."""
    found: dict[str, _Stored] = {}
    for snapshot in manifest.snapshots_of(planned.uid):

        def part(name: str, stored: KeyedState | DiskState) -> StatePart:
            return StatePart(planned.uid, snapshot.subtask, name, stored)  # noqa: B023 - used now

        for keyed in snapshot.keyed:
            named = _Stored(keyed.schema, keyed.kind, part(keyed.name, keyed))
            found.setdefault(keyed.name, named)
        if snapshot.disk is not None:
            for table in snapshot.disk.tables:
                named = _Stored(table.schema, table.kind, part(table.name, snapshot.disk))
                found.setdefault(table.name, named)
    return found


# --- what the plan keeps


def _kept(plan: Plan, task: Task, planned: PlannedOperator) -> dict[str, _Kept]:
    """The states of which it can be told, by name."""
    max_parallelism = plan.max_parallelism
    match planned.operator:
        case Aggregate() as aggregate:
            states = Aggregating.STATE, Windowing.STATE
            return dict.fromkeys(states, _aggregates(planned, aggregate, max_parallelism))
        case Transform() as transform:
            return _declared(planned, transform, max_parallelism)
        case DropDuplicates(keys=keys, time=time, keep_us=keep_us):
            seen = SeenKeys(planned.input_schema, keys, max_parallelism, time, keep_us).freeze()
            return {Deduplicating.STATE: _by_place(planned, seen.snapshot_schema, "deduplicate")}
        case Enrich() as enrich:
            schemas = planned.input_schema, planned.schema
            newest = newest_rows(enrich, *schemas, max_parallelism, ()).freeze()
            return {Enriching.STATE: _by_place(planned, newest.snapshot_schema, "look up")}
        case Join(left=left, right=right):
            edges = (plan.edges[edge] for edge in task.input_edges)
            second = next(edge.schema for edge in edges if edge.input == 1)

            def rows(side: JoinSide, schema: pa.Schema) -> _Kept:
                kept = JoinRows(schema, side.keys, side.time, max_parallelism)
                return _by_place(planned, kept.snapshot_schema, "join")

            return {LEFT: rows(left, planned.input_schema), RIGHT: rows(right, second)}
        case _:
            return {}


def _by_place(planned: PlannedOperator, schema: pa.Schema, as_before: str) -> _Kept:
    return _Kept(schema, lambda batch: fitted_columns(batch, schema, planned.uid, as_before))


def _aggregates(planned: PlannedOperator, aggregate: Aggregate, max_parallelism: int) -> _Kept:
    if aggregate.window is not None:
        schema = empty_windows(planned.input_schema, aggregate, max_parallelism).snapshot_schema
    else:
        what = (planned.input_schema, aggregate.keys, aggregate.calls, max_parallelism)
        schema = AggregateTable(*what).snapshot_schema
    return _Kept(schema, lambda batch: fitted_columns(batch, schema, planned.uid))


def _declared(
    planned: PlannedOperator, transform: Transform, max_parallelism: int
) -> dict[str, _Kept]:
    """The states of a user's program, which is opened for that and closed again."""
    key_schema = pa.schema([planned.input_schema.field(key) for key in transform.keys])
    backend = HeapBackend(key_schema, max_parallelism)
    try:
        program = transform.make()
        try:
            program.open(KeyedStates(transform, backend, SystemClock()))
            declared = [table.declared for table in backend.tables]
        finally:
            with contextlib.suppress(Exception):
                program.close()
    except Exception as error:  # the user's, and no reason not to start
        log.debug("the states of %s cannot be told on the driver: %s", planned.uid, error)
        return {}
    return {
        each.name: _Kept(each.snapshot_schema(key_schema), _fit_to(each, key_schema))
        for each in declared
        if not each.name.startswith("$")
    }


def _fit_to(declared: Declared, key_schema: pa.Schema) -> Callable[[pa.RecordBatch], object]:
    return lambda batch: fitted_to(declared, batch, key_schema)
