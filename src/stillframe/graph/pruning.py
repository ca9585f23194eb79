"""Which columns of a source a job reads: the others need not be fetched or made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stillframe.graph.expressions import Call, Column, Expression, RowFunction
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


def _wanted_of(node: Node, nodes: Sequence[Node]) -> set[str]:
    """The columns of what this node emits that its readers look at."""
    wanted: set[str] = set()
    for reader in nodes:
        if any(upstream is node for upstream in reader.inputs):
            wanted |= _wanted_by(reader, node, nodes)
    return wanted


def _wanted_by(reader: Node, node: Node, nodes: Sequence[Node]) -> set[str]:
    match reader.operator:
        case Project(columns):
            return {name for column in columns for name in _names_in(column.expression)}
        case Filter(condition):
            return {*_names_in(condition), *_wanted_of(reader, nodes)}
        case WithWatermark(time):
            return {time, *_wanted_of(reader, nodes)}
        case Union():
            return _wanted_of(reader, nodes)
        case DropDuplicates(keys, time):
            return {*keys, *([time] if time else ()), *_wanted_of(reader, nodes)}
        case Aggregate(keys, calls, window):
            times = {window.time} if window is not None else set()
            if isinstance(window, SessionWindow) and isinstance(window.gap, str):
                times.add(window.gap)
            wanted = {*keys, *times, *(call.input for call in calls if call.input is not None)}
            for late in late_readers(reader, nodes):
                wanted |= _wanted_of(late, nodes)
            return wanted
        case _:  # a user's function or a sink gets every column
            return set(node.schema.names)


def _names_in(expression: Expression) -> Iterator[str]:
    match expression:
        case Column(name):
            yield name
        case Call(arguments=arguments) | RowFunction(arguments=arguments):
            for argument in arguments:
                yield from _names_in(argument)
