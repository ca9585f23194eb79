"""Which columns of a source a job reads, and which of them it only groups by; which fields of JSON.

The others need not be fetched or made; those it groups by need not be written out for each record.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from stillframe.graph.expressions import (
    Call,
    Column,
    Expression,
    Literal,
    Named,
    all_parts,
    names_in,
    parts_of,
)
from stillframe.graph.logical import (
    Aggregate,
    DropDuplicates,
    Filter,
    MapInArrow,
    Node,
    Project,
    Selective,
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


def with_fields_read(node: Node, project: Project, nodes: Sequence[Node]) -> Project:
    """The node's projection, in which each `from_json` knows which fields of its struct some
    operator looks at."""
    return Project(
        tuple(
            Named(column.name, _telling_fields(column, node, nodes)) for column in project.columns
        )
    )


def with_columns_wanted(node: Node, mapped: MapInArrow, nodes: Sequence[Node]) -> MapInArrow:
    """The node's operator, which makes the columns that some operator looks at."""
    if not isinstance(mapped.function, Selective):
        return mapped
    return MapInArrow(mapped.function.emitting(_wanted_of(node, nodes)), mapped.name)


def _telling_fields(column: Named, node: Node, nodes: Sequence[Node]) -> Expression:
    made = column.expression
    if not isinstance(made, Call) or made.function != "from_json":
        return made
    fields = _fields_read(node, column.name, nodes)
    if fields is None:
        return made
    told = Literal(pa.scalar(sorted(fields), pa.list_(pa.int32())))
    return Call(made.function, (*made.arguments, told), made.type)


def _fields_read(node: Node, column: str, nodes: Sequence[Node]) -> set[int] | None:
    """Those of a struct that this node emits, by their places; None: it is needed as a whole."""
    read: set[int] = set()
    for reader in nodes:
        if any(upstream is node for upstream in reader.inputs):
            fields = _fields_read_by(reader, node, column, nodes)
            if fields is None:
                return None
            read |= fields
    return read


def _fields_read_by(
    reader: Node, node: Node, column: str, nodes: Sequence[Node]
) -> set[int] | None:
    match reader.operator:
        case Project(columns):
            found = [
                _fields_read(reader, each.name, nodes)
                if _is_column(each.expression, column)
                else _fields_in(each.expression, column)
                for each in columns
            ]
        case Filter(condition):
            found = [_fields_in(condition, column), _fields_read(reader, column, nodes)]
        case WithWatermark(time) if time != column:
            found = [_fields_read(reader, column, nodes)]
        case _:
            found = [None] if column in _wanted_by(reader, node, nodes, True) else []
    return None if None in found else {field for each in found for field in each or ()}


def _fields_in(expression: Expression, column: str) -> set[int] | None:
    fields: set[int] = set()
    if _is_column(expression, column):
        return None
    for part in all_parts(expression):
        if any(_is_column(each, column) for each in parts_of(part)):
            if not isinstance(part, Call) or part.function != "struct_field":
                return None
            (place,) = (each for each in part.arguments if isinstance(each, Literal))
            fields.add(place.value.as_py())
    return fields


def _is_column(expression: Expression, name: str) -> bool:
    return isinstance(expression, Column) and expression.name == name


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
            return {name for column in columns for name in names_in(column.expression)}
        case Filter(condition):
            return {*names_in(condition), *further()}
        case WithWatermark(time):
            return {time, *further()}
        case Union():
            return further()
        case DropDuplicates(keys, time):
            return {*keys, *([time] if time else ()), *further()}
        case Aggregate():
            return _wanted_by_aggregate(reader, reader.operator, nodes, with_keys)
        case MapInArrow(Selective() as function):
            return function.reads(_wanted_of(reader, nodes))
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
