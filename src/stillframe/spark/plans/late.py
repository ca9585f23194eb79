"""`with_late`: the rows that came too late for the windows of an aggregation, as a stream.

Theory of operation: what an aggregate reads is a projection of the stream that was grouped, and
what comes too late is noticed in the aggregate. So the projection is made to carry all columns of
the grouped stream along, under names that are free, and behind the aggregate's late rows another
one gives them their names back. Rows of which somebody wants to see the late ones are not combined
on their way to the aggregate.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pyarrow as pa

from stillframe.errors import BuildError
from stillframe.graph.expressions import Column, Named
from stillframe.graph.finality import can_close
from stillframe.graph.logical import WINDOW, Aggregate, Late, Node, Project, replaced, walk
from stillframe.spark.expressions.windows import without_notes
from stillframe.spark.stream import Stream, frame_of_columns


def with_late(stream: Stream) -> tuple[Stream, Stream]:
    """The same stream, and what of the grouped stream came too late for it."""
    grouped, aggregate = _grouping_of(stream)
    before, names = _carrying(aggregate.inputs[0], grouped.node)
    settings = (aggregate.given_uid, aggregate.parallelism)
    watched = Node(aggregate.operator, aggregate.schema, (before,), *settings)
    late = Node(Late(), before.schema, (watched,))
    named = [
        Named(field.name, Column(names[field.name], field.type)) for field in grouped.node.schema
    ]
    rows = Node(Project(tuple(named)), grouped.node.schema, (late,))
    frame = frame_of_columns(stream.still.spark, without_notes(grouped.frame))
    return _over(stream, aggregate, watched), Stream(stream.still, rows, frame)


def _grouping_of(stream: Stream) -> tuple[Stream, Node]:
    """The stream that was grouped, and the aggregate that was made of it."""
    aggregates = [node for node in walk([stream.node]) if isinstance(node.operator, Aggregate)]
    if stream.grouped is None or not aggregates:
        raise BuildError(
            "with_late() is for a stream of windows, and this one is not aggregated, or was"
            " combined with another since: call it right after groupBy(window(...)).agg(...)"
        )
    aggregate = aggregates[-1]
    if not can_close(aggregate):
        raise BuildError(
            "nothing comes too late for this aggregation, which no event time closes: say"
            " withWatermark(...) before and groupBy(window(...)) over its column, or leave"
            " with_late() out"
        )
    return stream.grouped, aggregate


def _carrying(before: Node, grouped: Node) -> tuple[Node, dict[str, str]]:
    """What the aggregate reads and all columns of what was grouped; what those are called there."""
    if before is grouped:
        return before, {name: name for name in grouped.schema.names}
    assert isinstance(before.operator, Project), before.operator
    columns = list(before.operator.columns)
    there = {named.expression: named.name for named in columns}
    names: dict[str, str] = {}
    for field in grouped.schema:
        column = Column(field.name, field.type)
        if column not in there:
            there[column] = _free_name(field.name, there.values())
            columns.append(Named(there[column], column))
        names[field.name] = there[column]
    schema = pa.schema([(named.name, named.expression.type) for named in columns])
    return Node(Project(tuple(columns)), schema, (grouped,)), names


def _free_name(wanted: str, taken: Iterable[str]) -> str:
    others = {WINDOW, *taken}
    if wanted not in others:
        return wanted
    return next(name for n in count(2) if (name := f"{wanted}_{n}") not in others)


def _over(stream: Stream, old: Node, new: Node) -> Stream:
    node = replaced(stream.node, old, new)
    return Stream(
        stream.still,
        node,
        stream.frame,
        principal=new if stream.principal is old else node,
        grouped=stream.grouped,
        is_settled=True,
    )
