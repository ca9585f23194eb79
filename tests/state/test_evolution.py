"""State of another program, or written by hand: taken where it fits, refused with both schemas."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.errors import StartRefused
from stillframe.key_groups import hash_columns
from stillframe.state.backends import Declared, Kind
from stillframe.state.evolution import fitted_columns, fitted_to
from stillframe.state.key_places import keyed_by
from stillframe.state.rows import RowType

KEPT = pa.schema([("app", pa.string()), ("count(1)", pa.int64())])


def test_columns_of_these_names_are_taken_with_the_types_they_are_kept_with():
    narrow = pa.record_batch({"app": ["a"], "count(1)": pa.array([3], pa.int32())})

    assert fitted_columns(narrow, KEPT, "top").schema.equals(KEPT)
    same = pa.record_batch({"app": ["a"], "count(1)": [3]})
    assert fitted_columns(same, KEPT, "top") is same


@pytest.mark.parametrize(
    "columns",
    [
        {"count(1)": [3], "app": ["a"]},
        {"app": ["a"], "sum(x)": [3]},
        {"app": ["a"]},
        {"app": ["a"], "count(1)": ["many"]},
    ],
)
def test_columns_that_another_aggregation_kept_are_refused_with_both_schemas(columns):
    batch = pa.record_batch(columns)
    there = ", ".join(f"{field.name} {field.type}" for field in batch.schema)

    with pytest.raises(StartRefused, match="the state of operator 'top'") as refused:
        fitted_columns(batch, KEPT, "top")

    assert there in str(refused.value)
    assert "app string, count(1) int64" in str(refused.value)


KEYED = keyed_by(KEPT, [0])


@pytest.mark.parametrize(
    ("was", "is_now", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.float32(), pa.float64(), True),
        (pa.string(), pa.large_string(), True),
        (pa.int64(), pa.int32(), False),
        (pa.int64(), pa.string(), False),
        (pa.int64(), pa.float64(), False),
        (pa.date32(), pa.timestamp("us"), False),
    ],
    ids=str,
)
def test_a_key_becomes_another_type_only_where_it_hashes_to_the_same_key_group(was, is_now, fits):
    keys = pa.array([1, 2, 3], pa.int32()).cast(was)
    batch = pa.record_batch({"app": keys, "count(1)": [3, 4, 5]})
    kept = KEYED.set(0, pa.field("app", is_now))

    if fits:
        fitted = fitted_columns(batch, kept, "top")
        assert hash_columns([keys]).tolist() == hash_columns([fitted.column(0)]).tolist()
    else:
        for rows in (batch, batch.slice(0, 0)):  # the driver says it of none
            with pytest.raises(StartRefused, match="group and aggregate as before"):
                fitted_columns(rows, kept, "top")


def test_a_value_that_is_a_text_by_now_is_refused_of_no_rows_too():
    batch = pa.record_batch(
        {"app": pa.array([], pa.string()), "count(1)": pa.array([], pa.string())}
    )

    with pytest.raises(StartRefused, match="the state of operator 'top'"):
        fitted_columns(batch, KEPT, "top")


def test_the_same_keys_in_another_order_are_refused_because_they_hash_otherwise():
    declared = Declared("seen", Kind.VALUE, RowType(pa.schema([("n", pa.int64())])))
    keys = pa.schema([("a", pa.string()), ("b", pa.string())])
    turned = pa.schema([("b", pa.string()), ("a", pa.string())])
    schema = declared.snapshot_schema(keys)
    batch = pa.RecordBatch.from_pylist([{"a": "x", "b": "y", "__value": {"n": 1}}], schema)

    assert fitted_to(declared, batch, keys) is batch
    with pytest.raises(StartRefused, match="group by the same keys in the same order"):
        fitted_to(declared, batch, turned)
