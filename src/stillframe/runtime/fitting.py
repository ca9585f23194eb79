"""How rows of a snapshot are made to fit what an operator keeps now.

What an operator keeps follows from the plan. So the driver, which compares before the start, and
the slots, which take the rows back, go by the same rules and say the same.

A state of a user's program is not in here: the program declares it when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from stillframe.graph.logical import (
    Aggregate,
    Connect,
    DropDuplicates,
    Enrich,
    Join,
    JoinSide,
    Process,
)
from stillframe.graph.plan import Plan, PlannedOperator, Task
from stillframe.protocol.manifests import Redistribution
from stillframe.runtime.deduplicating import Deduplicating
from stillframe.runtime.enriching import Enriching, newest_rows
from stillframe.runtime.joining import LEFT, RIGHT
from stillframe.runtime.keyed_functions import FunctionOperator
from stillframe.runtime.operators import Aggregating
from stillframe.runtime.windowing import Windowing, empty_windows
from stillframe.state.aggregates import AggregateTable
from stillframe.state.duplicates import SeenKeys
from stillframe.state.evolution import fitted_columns, refuse_other_keys
from stillframe.state.joins import JoinRows
from stillframe.state.snapshots import kind_of, schema_text
from stillframe.state.timers import TimerTable

Fit = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Makes rows fit, or raises `StartRefused`."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A state as an operator keeps it now."""

    schema: pa.Schema
    fit: Fit
    how: Redistribution | None = None
    """Of a state without keys: who is given what of it."""
    has_more: bool = False
    """Whether the user's function adds columns of its own, wherever it likes."""

    def is_as_described(self, columns: str, kind: str) -> bool:
        """Whether what a snapshot says of its state is enough to know that it fits."""
        if self.has_more:
            return {schema_text(pa.schema([each])) for each in self.schema} <= {
                *columns.split(", ")
            }
        return columns == schema_text(self.schema) and kind in ("", kind_of(self.schema))


def kept_states(plan: Plan, task: Task, planned: PlannedOperator) -> dict[str, Kept]:
    """What the operator keeps, by the name of the state."""
    max_parallelism = plan.max_parallelism
    match planned.operator:
        case Aggregate() as aggregate:
            states = Aggregating.STATE, Windowing.STATE
            return dict.fromkeys(states, _aggregates(planned, aggregate, max_parallelism))
        case DropDuplicates(keys=keys, time=time, keep_us=keep_us):
            seen = SeenKeys(planned.input_schema, keys, max_parallelism, time, keep_us)
            return {Deduplicating.STATE: _by_place(planned, seen.snapshot_schema, "deduplicate")}
        case Enrich() as enrich:
            schemas = planned.input_schema, planned.schema
            newest = newest_rows(enrich, *schemas, max_parallelism, ())
            return {Enriching.STATE: _by_place(planned, newest.schema, "look up")}
        case Join(left=left, right=right):
            edges = (plan.edges[edge] for edge in task.input_edges)
            second = next(edge.schema for edge in edges if edge.input == 1)

            def rows(side: JoinSide, schema: pa.Schema) -> Kept:
                kept = JoinRows(schema, side.keys, side.time, max_parallelism)
                return _by_place(planned, kept.snapshot_schema, "join")

            return {LEFT: rows(left, planned.input_schema), RIGHT: rows(right, second)}
        case Connect(keys=None):
            nothing_known = pa.schema([])
            return {FunctionOperator.STATE: Kept(nothing_known, as_it_is, "copied", has_more=True)}
        case Connect(keys=keys) | Process(keys=keys):
            assert keys is not None
            return _of_function(planned, pa.schema(map(planned.input_schema.field, keys)))
        case _:
            return {}


def as_it_is(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _by_place(planned: PlannedOperator, schema: pa.Schema, as_before: str) -> Kept:
    return Kept(schema, lambda batch: fitted_columns(batch, schema, planned.uid, as_before))


def _aggregates(planned: PlannedOperator, aggregate: Aggregate, max_parallelism: int) -> Kept:
    if aggregate.window is not None:
        schema = empty_windows(planned.input_schema, aggregate, max_parallelism).snapshot_schema
    else:
        what = (planned.input_schema, aggregate.keys, aggregate.calls, max_parallelism)
        schema = AggregateTable(*what).snapshot_schema
    return _by_place(planned, schema, "group and aggregate")


def _of_function(planned: PlannedOperator, key_schema: pa.Schema) -> dict[str, Kept]:
    def with_these_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
        refuse_other_keys(batch.schema, key_schema, planned.uid)
        return batch

    timers = TimerTable(key_schema, 1).snapshot_schema
    return {
        FunctionOperator.STATE: Kept(key_schema, with_these_keys, has_more=True),
        FunctionOperator.TIMERS: _by_place(planned, timers, "key"),
    }
