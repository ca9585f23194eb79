"""Maps that are exploded; arrays are compared with Spark's own in tests/spark."""

import pyarrow as pa
import pytest

from stillframe.graph.expressions import Column
from stillframe.runtime.exploding import Exploding

MAP = pa.map_(pa.string(), pa.int64())
MAPS = [[("a", 1), ("b", None)], None, [], [("c", 3)]]
OWN = [pa.field("id", pa.int64()), pa.field("m", MAP)]
ENTRY = [pa.field("key", pa.string()), pa.field("value", pa.int64())]


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("is_outer", [False, True])
def test_each_entry_of_a_map_is_a_row_and_a_row_without_any_is_one_if_asked_for(start, is_outer):
    schema = pa.schema([*OWN, pa.field("pos", pa.int32()), *ENTRY])
    explode = Exploding(Column("m", MAP), ("id", "m"), True, is_outer, schema)
    batch = pa.record_batch([pa.array(range(4)), pa.array(MAPS, MAP)], schema=pa.schema(OWN))
    rows = [row for made in explode(iter([batch.slice(start)])) for row in made.to_pylist()]
    expected = [
        (number, place, *entry)
        for number, entries in enumerate(MAPS)
        for place, entry in enumerate(entries or [])
    ]
    if is_outer:
        expected = sorted([*expected, (1, None, None, None), (2, None, None, None)])
    names = ("id", "pos", "key", "value")
    assert [tuple(row[name] for name in names) for row in rows] == [
        row for row in expected if row[0] >= start
    ]


@pytest.mark.parametrize("is_outer", [False, True])
def test_fields_of_structs_are_columns_and_what_was_only_read_does_not_come_out(is_outer):
    structs = pa.list_(pa.struct([("a", pa.int64()), ("b", pa.string())]))
    rows = [[{"a": 1, "b": "x"}, None], [], None, [{"a": None, "b": "y"}]]
    schema = pa.schema([("id", pa.int64()), ("a", pa.int64()), ("b", pa.string())])
    inline = Exploding(Column("hidden", structs), ("id",), False, is_outer, schema, inlines=True)
    batch = pa.record_batch([pa.array(range(4)), pa.array(rows, structs)], ["id", "hidden"])
    made = [tuple(row.values()) for part in inline(iter([batch])) for row in part.to_pylist()]
    void = [(1, None, None), (2, None, None)] if is_outer else []
    assert made == [(0, 1, "x"), (0, None, None), *void, (3, None, "y")]


@pytest.mark.parametrize("is_outer", [False, True])
def test_a_column_that_nobody_looks_at_is_null_and_the_rows_are_the_same(is_outer):
    schema = pa.schema([*OWN, pa.field("pos", pa.int32()), *ENTRY])
    explode = Exploding(Column("m", MAP), ("id", "m"), True, is_outer, schema)
    batch = pa.record_batch([pa.array(range(4)), pa.array(MAPS, MAP)], schema=pa.schema(OWN))
    [whole], [part] = (
        list(function(iter([batch])))
        for function in (explode, explode.emitting({"m", "pos", "key", "value"}))
    )
    assert part.column("id").null_count == part.num_rows
    assert part.select([1, 2, 3, 4]).equals(whole.select([1, 2, 3, 4]))


def test_so_many_rows_come_out_at_once_as_do_not_take_much_memory():
    lists = pa.array([list(range(1_000))] * 600, pa.list_(pa.int64()))
    schema = pa.schema([("text", pa.string()), ("number", pa.int64())])
    batch = pa.record_batch({"text": pa.array(["x" * 1_000] * 600), "numbers": lists})
    explode = Exploding(Column("numbers", lists.type), ("text",), False, False, schema)
    sizes = [
        [made.num_rows for made in function(iter([batch]))]
        for function in (explode, explode.emitting({"number"}))
    ]
    assert sizes == [[65_000] * 9 + [15_000], [524_000, 76_000]]
