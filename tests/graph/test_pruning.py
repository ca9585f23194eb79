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
from stillframe.runtime.exploding import Exploding

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
    [operator] = [each for each in operators_of(*ends) if isinstance(each, Read)]
    return operator


def operators_of(*ends):
    sinks = [
        Node(Write(DiscardSink()), end.schema, (end,), given_uid=f"sink-{i}")
        for i, end in enumerate(ends)
    ]
    return [planned.operator for _, planned in build_plan("job", sinks, 2).operators()]


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


# --- Rows made of arrays -------------------------------------------------------------------------

PARTS = pa.list_(pa.string())
EXPLODED = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("part", pa.string())])


def exploded(upstream):
    """Two columns of clicks under other names beside the parts of a third."""
    parts = Call("split", (APP,), PARTS)
    function = Exploding(parts, ("id", "user_id"), False, False, EXPLODED)
    return Node(MapInArrow(function, "explode"), EXPLODED, (upstream,))


@pytest.mark.parametrize(
    ("end", "columns", "own"),
    [
        (lambda rows: counted(rows, ("part",)), ("app_id",), (None, None)),
        (lambda rows: counted(rows, ("b",)), ("app_id", "user_id"), (None, "user_id")),
        (lambda rows: rows, ("id", "app_id", "user_id"), ("id", "user_id")),
    ],
)
def test_what_nobody_looks_at_is_not_repeated_for_each_element(end, columns, own):
    ending = end(exploded(read()))
    [function] = [each.function for each in operators_of(ending) if isinstance(each, MapInArrow)]
    assert (columns_of(ending), function.own) == (columns, own)
    assert read_of(ending).grouped_by == (), "whoever repeats a column looks at it"


# --- Fields of JSON ------------------------------------------------------------------------------

VIEW = pa.struct([("app", pa.string()), ("user", pa.int64()), ("url", pa.string())])


def parsed(upstream):
    rules = Literal(pa.scalar("{}"))
    return projected(upstream, Call("from_json", (APP, rules), VIEW), USER)


def field(place, of="0"):
    ordinal = Literal(pa.scalar(place, pa.int32()))
    return Call("struct_field", (Column(of, VIEW), ordinal), VIEW.field(place).type)


def fields_told(*ends):
    """What `from_json` is told of who looks at it; None: nothing, so all of it is made."""
    [call] = [
        column.expression
        for operator in operators_of(*ends)
        if isinstance(operator, Project)
        for column in operator.columns
        if isinstance(column.expression, Call) and column.expression.function == "from_json"
    ]
    return call.arguments[2].value.as_py() if len(call.arguments) == 3 else None


def test_from_json_makes_the_fields_that_somebody_looks_at():
    assert fields_told(projected(parsed(read()), field(0), USER)) == [0]
    view = parsed(read())
    assert fields_told(projected(view, field(2)), projected(view, field(0))) == [0, 2]
    kept_rows = kept(view, field(1), field(1))
    assert fields_told(projected(kept_rows, field(0))) == [0, 1]
    passed_on = projected(view, Column("0", VIEW), Column("1", pa.int64()))
    assert fields_told(projected(passed_on, field(2))) == [2]
    assert fields_told(projected(view, Column("1", pa.int64()))) == []


def test_from_json_makes_all_fields_for_who_looks_at_the_struct():
    view = parsed(read())
    whole = Column("0", VIEW)
    assert fields_told(view) is None, "the sink writes it"
    assert fields_told(projected(view, field(0)), view) is None
    is_null = Call("is_null", (whole,), pa.bool_())
    assert fields_told(projected(view, field(0), is_null)) is None
    assert fields_told(projected(Node(Filter(is_null), view.schema, (view,)), field(0))) is None
    function = Node(MapInArrow(lambda batches: batches, "f"), view.schema, (view,))
    assert fields_told(projected(function, field(0))) is None
    assert fields_told(projected(counted(view, ("0",)), field(0))) is None
