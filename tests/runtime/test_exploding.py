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
    explode = Exploding(Column("m", MAP), True, is_outer, schema)
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
