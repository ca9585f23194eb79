"""Which columns of a source a job reads, and which of them it only groups by.

The others need not be fetched or made; those it groups by need not be written out for each record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from stillframe.graph.expressions import Column, Expression, all_parts
from stillframe.graph.logical import (
    Aggregate,
    DropDuplicates,
    Filter,
    Node,
    Project,
    SessionWindow,
    Union,
    WithWatermark,
    late_readers,
)


def columns_read(source: Node, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Those of the source's columns that some operator looks at, in their order; at least one.

    `nodes` are all operators of the job.
    """
    wanted = _wanted_of(source, nodes)
    names = tuple(name for name in source.schema.names if name in wanted)
    # A batch without columns would not know how many records it has.
    return names or tuple(source.schema.names[:1])


def columns_grouped_by(source: Node, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Those of them of which nobody asks more than which records are alike."""
    wanted = _wanted_of(source, nodes)
    looked_at = _wanted_of(source, nodes, with_keys=False)
    return tuple(name for name in source.schema.names if name in wanted - looked_at)


def _wanted_of(node: Node, nodes: Sequence[Node], *, with_keys: bool = True) -> set[str]:
    """The columns of what this node emits that its readers look at.

    Without keys: but for those that aggregates only group by.
    """
    wanted: set[str] = set()
    for reader in nodes:
        if any(upstream is node for upstream in reader.inputs):
            wanted |= _wanted_by(reader, node, nodes, with_keys)
    return wanted


def _wanted_by(reader: Node, node: Node, nodes: Sequence[Node], with_keys: bool) -> set[str]:
    further = partial(_wanted_of, reader, nodes, with_keys=with_keys)
    match reader.operator:
        case Project(columns):
            return {name for column in columns for name in _names_in(column.expression)}
        case Filter(condition):
            return {*_names_in(condition), *further()}
        case WithWatermark(time):
            return {time, *further()}
        case Union():
            return further()
        case DropDuplicates(keys, time):
            return {*keys, *([time] if time else ()), *further()}
        case Aggregate():
            return _wanted_by_aggregate(reader, reader.operator, nodes, with_keys)
        case _:  # a user's function or a sink gets every column
            return set(node.schema.names)


def _wanted_by_aggregate(
    reader: Node, aggregate: Aggregate, nodes: Sequence[Node], with_keys: bool
) -> set[str]:
    window, late = aggregate.window, late_readers(reader, nodes)
    wanted = {call.input for call in aggregate.calls if call.input is not None}
    if window is not None:
        wanted.add(window.time)
    if isinstance(window, SessionWindow) and isinstance(window.gap, str):
        wanted.add(window.gap)
    if with_keys or late:  # whoever reads late records gets them as they came
        wanted |= set(aggregate.keys)
    for each in late:
        wanted |= _wanted_of(each, nodes)
    return wanted


def _names_in(expression: Expression) -> Iterator[str]:
    return (part.name for part in all_parts(expression) if isinstance(part, Column))
