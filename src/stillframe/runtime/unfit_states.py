"""Which states of a snapshot a plan cannot go on with, found out on the driver before the start.

Theory of operation
-------------------
The metadata of a snapshot says of each state which columns it has and of which kind it is. What an
operator keeps now follows from the plan (`fitting`). What a user's program keeps it declares when
it is opened, so it is opened here once, without rows, as Spark does with a `StatefulProcessor`.
Where both say the same nothing is read. Where they differ the schema is read from one file of the
state, and the rules of `state/evolution`, by which the state will be restored, say whether the rows
can be made to fit.

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
from functools import partial

import pyarrow as pa

from stillframe.clock import SystemClock
from stillframe.errors import StartRefused, StillframeError
from stillframe.graph.logical import ProcessStream, Transform
from stillframe.graph.plan import Plan, PlannedOperator, Task
from stillframe.json_values import JsonObject
from stillframe.protocol.columns import Changed
from stillframe.protocol.fit import Evolves, Mismatch, StateFinding
from stillframe.protocol.manifests import Manifest, Redistribution
from stillframe.runtime.fitting import Kept, kept_states
from stillframe.runtime.stored_states import StatePart, schema_of
from stillframe.runtime.stream_processing import declared_states, refuse_other_redistribution
from stillframe.runtime.transforming import KeyedStates
from stillframe.state.backends import Declared
from stillframe.state.evolution import fitted_to
from stillframe.state.heap import HeapBackend
from stillframe.state.pages import Fit
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")

_NO_KEYS = pa.schema([])


@dataclass(frozen=True, slots=True)
class _Stored:
    """A state as a snapshot has it."""

    columns: str
    kind: str
    part: StatePart
    how: Redistribution | None = None
    """None: by key."""


def unfit_states(
    plan: Plan, manifest: Manifest, store: Store, given: JsonObject
) -> list[StateFinding]:
    """What is said of each state that the plan cannot go on with, or in other columns only.

    `given`: what new columns begin with."""
    return [
        finding
        for task, planned in plan.operators()
        if (stored := _stored(manifest, planned))
        for finding in _unfit(planned, stored, _kept(plan, task, planned, given), store, given)
    ]


def _unfit(
    planned: PlannedOperator,
    stored: Mapping[str, _Stored],
    kept_now: Mapping[str, Kept],
    store: Store,
    given: JsonObject,
) -> Iterator[StateFinding]:
    for name, kept in kept_now.items():
        found = stored.get(name)
        if found is None:
            continue
        try:
            refuse_other_redistribution(name, found.how, kept.how)
            if kept.is_as_described(found.columns, found.kind):
                continue
            change = kept.change_from(schema_of(store, found.part))
            if change != Changed():
                yield Evolves(planned.uid, change.in_words(given))
        except StartRefused as error:
            yield _mismatch(planned, error)
        except (StillframeError, KeyError, pa.ArrowException) as error:
            log.debug("the schema of %s of %s cannot be read here: %s", name, planned.uid, error)


def _mismatch(planned: PlannedOperator, error: StartRefused) -> Mismatch:
    what, _, remedy = str(error).rpartition(": ")
    return Mismatch(f"operator {planned.uid}: {what}", remedy, planned.uid)


# --- what the snapshot has


def _stored(manifest: Manifest, planned: PlannedOperator) -> dict[str, _Stored]:
    """By name, of the first subtask that has it: all subtasks declare the same."""
    found: dict[str, _Stored] = {}
    for snapshot in manifest.snapshots_of(planned.uid):
        uid, subtask = planned.uid, snapshot.subtask
        for state in snapshot.keyed:
            part = StatePart(uid, subtask, state.name, state)
            found.setdefault(state.name, _Stored(state.schema, state.kind, part))
        for state in snapshot.broadcast:
            part, how = StatePart(uid, subtask, state.name, state), state.redistribution
            found.setdefault(state.name, _Stored(state.schema, state.kind, part, how))
        if snapshot.disk is not None:
            for table in snapshot.disk.tables:
                part = StatePart(uid, subtask, table.name, snapshot.disk)
                found.setdefault(table.name, _Stored(table.schema, table.kind, part))
    return found


# --- what the plan keeps


def _kept(plan: Plan, task: Task, planned: PlannedOperator, given: JsonObject) -> dict[str, Kept]:
    """The states of which it can be told, by name."""
    match planned.operator:
        case Transform() as transform:
            read = partial(_of_program, planned, transform, plan.max_parallelism)
            return _declared(planned, read)
        case ProcessStream() as process:
            return _declared(planned, partial(_of_stream_function, process))
        case _:
            return kept_states(plan, task, planned, given)


def _declared(planned: PlannedOperator, read: Callable[[], dict[str, Kept]]) -> dict[str, Kept]:
    """The states of a user's program, which is opened for that."""
    try:
        return read()
    except Exception as error:  # the user's, and no reason not to start
        log.debug("the states of %s cannot be told on the driver: %s", planned.uid, error)
        return {}


def _of_program(
    planned: PlannedOperator, transform: Transform, max_parallelism: int
) -> dict[str, Kept]:
    key_schema = pa.schema([planned.input_schema.field(key) for key in transform.keys])
    backend = HeapBackend(key_schema, max_parallelism)
    program = transform.make()
    try:
        program.open(KeyedStates(transform, backend, SystemClock()))
        declared = [table.declared for table in backend.tables]
    finally:
        with contextlib.suppress(Exception):
            program.close()
    return {
        each.name: Kept(each.snapshot_schema(key_schema), _fit_to(each, key_schema))
        for each in declared
        if not each.name.startswith("$")
    }


def _of_stream_function(process: ProcessStream) -> dict[str, Kept]:
    return {
        each.name: Kept(each.snapshot_schema(_NO_KEYS), _fit_to(each, _NO_KEYS), how)
        for each, how in declared_states(process)
    }


def _fit_to(declared: Declared, key_schema: pa.Schema) -> Fit:
    return lambda batch: fitted_to(declared, batch, key_schema)
