"""A snapshot's columns as they are shown in a DataFrame, and the way back."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError, DataError
from stillframe.state.aggregates import AggregateTable
from stillframe.state.backends import EXPIRES, EXPIRES_TYPE, Declared, Kind
from stillframe.state.key_places import key_places
from stillframe.state.rows import RowType
from stillframe.state.shapes import Shape, shape_of

KEYS = pa.schema([("app", pa.string()), ("day", pa.date32())])
ROW = RowType(pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string()))]))
USER_KEY = RowType(pa.schema([("page", pa.string())]))


def shape(kind: Kind, *, expires: bool = False) -> Shape:
    user_key = USER_KEY if kind is Kind.MAP else None
    return Shape(Declared("s", kind, ROW, user_key, expires).snapshot_schema(KEYS))


def rows(of: Shape) -> pa.RecordBatch:
    row = {"app": "a", "day": None, "__value": {"n": 1, "tags": ["x"]}, "__user_key": {"page": "p"}}
    row[EXPIRES] = 1_700_000_000_123
    made = [
        pa.array([row[f.name], row[f.name]], pa.int64() if f.type == EXPIRES_TYPE else f.type)
        for f in of.kept
    ]
    columns = [made[i].cast(field.type) for i, field in enumerate(of.kept)]
    return pa.RecordBatch.from_arrays(columns, schema=of.kept)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        (Kind.VALUE, ["key", "value", "expires", "key_group"]),
        (Kind.LIST, ["key", "list_element", "list_index", "expires", "key_group"]),
        (Kind.MAP, ["key", "user_map_key", "user_map_value", "expires", "key_group"]),
    ],
)
def test_a_handles_rows_are_shown_as_sparks_statestore_shows_them_and_come_back_the_same(
    kind, columns
):
    of = shape(kind, expires=True)
    batch = rows(of)

    shown = of.show(batch, 7)

    assert shown.schema.names == columns
    assert shown.column("key").to_pylist() == [{"app": "a", "day": None}] * 2
    assert shown.column("key_group").to_pylist() == [7, 7]
    again = shape_of(shown.schema, None)
    assert again.kept.equals(of.kept)
    assert again.kept.metadata == of.kept.metadata
    assert again.keep(shown).equals(batch)


def test_the_elements_of_a_list_are_numbered_in_their_order():
    of = shape(Kind.LIST)

    assert of.show(rows(of), 0).column("list_index").to_pylist() == [0, 1]


def aggregates() -> AggregateTable:
    schema = pa.schema([("app", pa.string()), ("x", pa.float64())])
    calls = [
        AggregateCall("avg", "x", "avg(x)", pa.float64()),
        AggregateCall("count", None, "count(1)", pa.int64()),
    ]
    table = AggregateTable(schema, ["app"], calls, 16)
    table.update(pa.record_batch({"app": ["a", "b", "a"], "x": [1.0, None, 2.0]}, schema=schema))
    return table


def test_aggregates_are_shown_with_all_they_keep_as_one_value():
    frozen = aggregates().freeze()
    of = Shape(frozen.snapshot_schema)

    shown = of.show(frozen.rows(), 3)

    assert of.kind == "columns"
    assert shown.schema.names == ["key", "value", "key_group"]
    assert shown.column("key").to_pylist() == [{"app": "a"}, {"app": "b"}]
    assert shown.column("value").to_pylist() == [
        {"avg(x).sum": 3.0, "avg(x).non_null_count": 2, "count(1)": 2},
        {"avg(x).sum": 0.0, "avg(x).non_null_count": 0, "count(1)": 1},
    ]


def test_what_replaces_aggregates_gets_their_order_and_types_back():
    frozen = aggregates().freeze()
    like = Shape(frozen.snapshot_schema)
    given = pa.record_batch(
        {
            "value": [{"count(1)": 5, "avg(x).non_null_count": 4, "avg(x).sum": 2.5}],
            "key": [{"app": "z"}],
            "other": [1],
        }
    ).cast(
        pa.schema(
            [
                ("value", pa.struct(
                    [("count(1)", pa.int32()), ("avg(x).non_null_count", pa.int16()),
                     ("avg(x).sum", pa.float32())]
                )),
                ("key", pa.struct([("app", pa.string())])),
                ("other", pa.int64()),
            ]
        )
    )  # fmt: skip

    kept = shape_of(given.schema, None, like).keep(given)

    assert kept.schema.equals(frozen.snapshot_schema)
    table = aggregates()
    table.restore(kept)
    assert {"app": "z", "avg(x)": 0.625, "count(1)": 5} in table.results().to_pylist()


def test_other_fields_than_those_of_the_aggregates_that_are_replaced_are_refused():
    like = Shape(aggregates().freeze().snapshot_schema)
    given = pa.schema(
        [
            ("key", pa.struct([("app", pa.string())])),
            ("value", pa.struct([("count(1)", pa.int64())])),
        ]
    )

    with pytest.raises(BuildError, match=r"has the fields count\(1\), and the state that it"):
        shape_of(given, None, like)


def test_a_key_that_is_no_struct_is_refused_with_what_it_is():
    with pytest.raises(BuildError, match="column 'key' is a string, and has to be a struct"):
        shape_of(pa.schema([("key", pa.string()), ("value", pa.struct([]))]), "value")


def test_a_value_that_is_missing_is_refused_with_what_there_is():
    with pytest.raises(BuildError, match="no column 'value' among key, n"):
        shape_of(pa.schema([("key", pa.struct([])), ("n", pa.int64())]), None)


def test_a_number_that_does_not_fit_is_refused():
    like = Shape(aggregates().freeze().snapshot_schema)
    value = {"count(1)": "many", "avg(x).non_null_count": 4, "avg(x).sum": 2.5}
    given = pa.record_batch({"key": [{"app": "z"}], "value": [value]})

    with pytest.raises(DataError, match=r"count\(1\) is a string and cannot become the int64"):
        shape_of(given.schema, None, like).keep(given)


def test_a_row_without_a_key_struct_is_refused():
    given = pa.record_batch(
        [
            pa.array([None], pa.struct([("app", pa.string())])),
            pa.array([{"n": 1}], pa.struct([("n", pa.int64())])),
        ],
        names=["key", "value"],
    )

    with pytest.raises(DataError, match="a row has no key"):
        shape_of(given.schema, "columns").keep(given)


def test_a_state_without_keys_is_shown_without_a_key():
    schema = pa.schema([("x", pa.int64())])
    call = AggregateCall("count", None, "count(1)", pa.int64())
    table = AggregateTable(schema, [], [call], 16)
    table.update(pa.record_batch({"x": [1, 2]}, schema=schema))
    frozen = table.freeze()

    shown = Shape(frozen.snapshot_schema).show(frozen.rows(), 0)

    assert key_places(frozen.snapshot_schema) == ()
    assert shown.schema.names == ["value", "key_group"]
    assert shown.column("value").to_pylist() == [{"count(1)": 2}]
