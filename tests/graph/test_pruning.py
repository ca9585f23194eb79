"""Which columns of a source a job reads, and which of them it only groups by."""

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.graph.expressions import Call, Column, Literal, Named, RowFunction
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    DropDuplicates,
    Filter,
    Late,
    LoopHead,
    MapInArrow,
    Node,
    Project,
    Read,
    Union,
    Write,
)
from stillframe.graph.plan import build_plan

CLICKS = ClickSource(records=10)
ALL = tuple(CLICKS.schema.names)
APP = Column("app_id", pa.string())
USER = Column("user_id", pa.int64())


def read():
    return Node(Read(CLICKS), CLICKS.schema)


def kept(upstream, *arguments):
    return Node(Filter(Call("=", arguments, pa.bool_())), upstream.schema, (upstream,))


def projected(upstream, *expressions):
    columns = tuple(Named(str(i), each) for i, each in enumerate(expressions))
    schema = pa.schema([(column.name, column.expression.type) for column in columns])
    return Node(Project(columns), schema, (upstream,))


def counted(upstream, keys, *inputs):
    calls = tuple(AggregateCall("max", name, f"max({name})", pa.int64()) for name in inputs)
    schema = pa.schema([*((key, upstream.schema.field(key).type) for key in keys)])
    return Node(Aggregate(keys, calls), schema, (upstream,))


def deduplicated(upstream):
    return Node(DropDuplicates(("app_id",), "at", 0), upstream.schema, (upstream,))


def columns_of(*ends):
    return read_of(*ends).columns


def read_of(*ends):
    sinks = [
        Node(Write(DiscardSink()), end.schema, (end,), given_uid=f"sink-{i}")
        for i, end in enumerate(ends)
    ]
    [operator] = [
        planned.operator
        for _, planned in build_plan("job", sinks, 2).operators()
        if isinstance(planned.operator, Read)
    ]
    return operator


def twice(value):
    return 2 * value


@pytest.mark.parametrize(
    ("end", "columns"),
    [
        (lambda clicks: clicks, ALL),
        (lambda clicks: counted(clicks, ("app_id",)), ("app_id",)),
        (lambda clicks: counted(clicks, ("app_id",), "id"), ("id", "app_id")),
        (lambda clicks: counted(clicks, ()), ("id",)),  # any: records are to be counted
        (lambda clicks: projected(clicks, USER, APP), ("app_id", "user_id")),
        (lambda clicks: projected(deduplicated(clicks), USER), ("app_id", "user_id", "at")),
        (
            lambda clicks: projected(clicks, RowFunction(twice, (USER,), pa.int64(), "twice")),
            ("user_id",),
        ),
        (
            lambda clicks: counted(kept(clicks, USER, Literal(pa.scalar(1))), ("app_id",)),
            ("app_id", "user_id"),
        ),
        (lambda clicks: kept(clicks, USER, USER), ALL),
        (lambda clicks: Node(MapInArrow(iter, "any"), CLICKS.schema, (clicks,)), ALL),
    ],
)
def test_a_source_is_asked_for_what_somebody_looks_at(end, columns):
    assert columns_of(end(read())) == columns


def test_what_any_of_several_readers_looks_at_is_asked_for():
    clicks = read()

    assert columns_of(projected(clicks, APP), counted(clicks, ("user_id",))) == (
        "app_id",
        "user_id",
    )


def test_what_is_asked_for_behind_a_union_is_asked_of_the_streams_in_it():
    clicks = read()
    both = Node(Union(), CLICKS.schema, (kept(clicks, USER, USER), clicks))

    assert columns_of(counted(Node(Union(), CLICKS.schema, (both, clicks)), ("app_id",))) == (
        "app_id",
        "user_id",
    )


def test_an_aggregate_is_given_what_is_wanted_of_its_late_records_too():
    counts = counted(read(), ("app_id",))
    late = Node(Late(), CLICKS.schema, (counts,))
    assert columns_of(counts, projected(late, USER)) == ("app_id", "user_id")
    assert columns_of(counts, late) == ALL


def test_a_cycle_gets_every_column_because_what_comes_back_has_them_all():
    head = Node(LoopHead(), CLICKS.schema, (read(),))
    closed = Node(CloseLoop(head), CLICKS.schema, (head, kept(head, USER, USER)))

    assert columns_of(projected(closed, APP)) == ALL


@pytest.mark.parametrize(
    ("end", "grouped_by"),
    [
        (lambda clicks: clicks, ()),
        (lambda clicks: counted(clicks, ("app_id",)), ("app_id",)),
        (lambda clicks: counted(clicks, ("app_id", "user_id"), "id"), ("app_id", "user_id")),
        (lambda clicks: counted(clicks, ("user_id",), "user_id"), ()),
        (lambda clicks: counted(clicks, ()), ()),
        (lambda clicks: counted(kept(clicks, USER, USER), ("app_id",)), ("app_id",)),
        (lambda clicks: counted(kept(clicks, APP, APP), ("app_id",)), ()),
        (lambda clicks: counted(deduplicated(clicks), ("app_id",)), ()),
        (lambda clicks: projected(clicks, APP), ()),
        (lambda clicks: Node(MapInArrow(iter, "any"), CLICKS.schema, (clicks,)), ()),
    ],
)
def test_a_column_is_only_grouped_by_if_nobody_looks_at_its_values(end, grouped_by):
    assert read_of(end(read())).grouped_by == grouped_by


def test_one_reader_that_looks_at_the_values_of_a_key_is_enough():
    clicks = read()

    assert read_of(counted(clicks, ("app_id",)), projected(clicks, APP)).grouped_by == ()


def test_who_reads_late_records_gets_their_keys_as_they_came():
    counts = counted(read(), ("app_id",))
    late = Node(Late(), CLICKS.schema, (counts,))

    assert read_of(counts, projected(late, USER)).grouped_by == ()
