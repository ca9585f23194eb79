"""How rows of a snapshot are made to fit what an operator keeps now.

What an operator keeps follows from the plan. So the driver, which compares before the start, and
the slots, which take the rows back, go by the same rules and say the same.

A state of a user's program is not in here: the program declares it when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from stillframe.json_values import JsonValue
from stillframe.protocol.columns import Changed
from stillframe.protocol.manifests import Redistribution
from stillframe.runtime.deduplicating import Deduplicating
from stillframe.runtime.enriching import Enriching, newest_rows
from stillframe.runtime.joining import LEFT, RIGHT
from stillframe.runtime.kept_columns import (
    KeptColumns,
    ValueColumns,
    columns_of_aggregates,
    columns_of_rows,
)
from stillframe.runtime.keyed_functions import FunctionOperator
from stillframe.runtime.operators import Aggregating
from stillframe.runtime.windowing import Windowing, empty_windows
from stillframe.state.aggregates import AggregateTable
from stillframe.state.duplicates import SeenKeys
from stillframe.state.evolution import refuse_other_keys
from stillframe.state.joins import JoinRows
from stillframe.state.pages import Fit
from stillframe.state.snapshots import kind_of, schema_text
from stillframe.state.timers import TimerTable


@dataclass(frozen=True, slots=True)
class Kept:
    """A state as an operator keeps it now."""

    schema: pa.Schema
    fit: Fit
    how: Redistribution | None = None
    """Of a state without keys: who is given what of it."""
    has_more: bool = False
    """Whether the user's function adds columns of its own, wherever it likes."""
    columns: KeptColumns | None = None
    """Of a state with a column for each value."""

    def change_from(self, found: pa.Schema) -> Changed:
        """Which columns come and go of a state that has these; raises if it does not fit."""
        if self.columns is not None:
            return self.columns.change_from(found)
        self.fit(pa.RecordBatch.from_pylist([], schema=found))
        return Changed()

    def is_as_described(self, columns: str, kind: str) -> bool:
        """Whether what a snapshot says of its state is enough to know that it fits."""
        if self.has_more:
            return {schema_text(pa.schema([each])) for each in self.schema} <= {
                *columns.split(", ")
            }
        return columns == schema_text(self.schema) and kind in ("", kind_of(self.schema))


def kept_states(
    plan: Plan, task: Task, planned: PlannedOperator, given: Mapping[str, JsonValue]
) -> dict[str, Kept]:
    """What the operator keeps, by the name of the state.

    `given`: what columns begin with that a snapshot does not have."""
    max_parallelism = plan.max_parallelism
    match planned.operator:
        case Aggregate() as aggregate:
            states = Aggregating.STATE, Windowing.STATE
            return dict.fromkeys(states, _aggregates(planned, aggregate, max_parallelism, given))
        case DropDuplicates(keys=keys, time=time, keep_us=keep_us):
            seen = SeenKeys(planned.input_schema, keys, max_parallelism, time, keep_us)
            return {Deduplicating.STATE: _by_place(planned, seen.snapshot_schema, "deduplicate")}
        case Enrich() as enrich:
            schemas = planned.input_schema, planned.schema
            newest = newest_rows(enrich, *schemas, max_parallelism, ())
            found_by = [*enrich.newest_keys, *([enrich.newest_time] if enrich.newest_time else [])]
            values = columns_of_rows(newest.schema, found_by)
            return {Enriching.STATE: _by_name(planned, newest.schema, "look up", values, given)}
        case Join(left=left, right=right):
            edges = (plan.edges[edge] for edge in task.input_edges)
            second = next(edge.schema for edge in edges if edge.input == 1)

            def rows(side: JoinSide, schema: pa.Schema) -> Kept:
                kept = JoinRows(schema, side.keys, side.time, max_parallelism)
                found_by = [*side.keys, *([side.time] if side.time else [])]
                values = columns_of_rows(schema, found_by)
                return _by_name(planned, kept.snapshot_schema, "join", values, given)

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
    return _by_name(planned, schema, as_before, (), {})


def _by_name(
    planned: PlannedOperator,
    schema: pa.Schema,
    as_before: str,
    values: Sequence[ValueColumns],
    given: Mapping[str, JsonValue],
) -> Kept:
    columns = KeptColumns(schema, planned.uid, as_before, values, given)
    return Kept(schema, columns.fitted, columns=columns)


def _aggregates(
    planned: PlannedOperator,
    aggregate: Aggregate,
    max_parallelism: int,
    given: Mapping[str, JsonValue],
) -> Kept:
    if aggregate.window is not None:
        schema = empty_windows(planned.input_schema, aggregate, max_parallelism).snapshot_schema
    else:
        what = (planned.input_schema, aggregate.keys, aggregate.calls, max_parallelism)
        schema = AggregateTable(*what).snapshot_schema
    values = columns_of_aggregates(planned.input_schema, aggregate.calls)
    return _by_name(planned, schema, "group and aggregate", values, given)


def _of_function(planned: PlannedOperator, key_schema: pa.Schema) -> dict[str, Kept]:
    def with_these_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
        refuse_other_keys(batch.schema, key_schema, planned.uid)
        return batch

    timers = TimerTable(key_schema, 1).snapshot_schema
    return {
        FunctionOperator.STATE: Kept(key_schema, with_these_keys, has_more=True),
        FunctionOperator.TIMERS: _by_place(planned, timers, "key"),
    }
