"""Rows of a state with a column for each value: what may come and go, and what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import StartRefused
from stillframe.key_groups import hash_columns
from stillframe.runtime.kept_columns import KeptColumns, columns_of_aggregates, columns_of_rows
from stillframe.state.aggregates import AggregateTable
from stillframe.state.joins import JoinRows
from stillframe.state.key_places import keyed_by

KEPT = pa.schema([("app", pa.string()), ("count(1)", pa.int64())])


def test_columns_of_these_names_are_taken_with_the_types_they_are_kept_with():
    narrow = pa.record_batch({"app": ["a"], "count(1)": pa.array([3], pa.int32())})

    assert KeptColumns(KEPT, "top").fitted(narrow).schema.equals(KEPT)
    same = pa.record_batch({"app": ["a"], "count(1)": [3]})
    assert KeptColumns(KEPT, "top").fitted(same) is same


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
        KeptColumns(KEPT, "top").fitted(batch)

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
        fitted = KeptColumns(kept, "top").fitted(batch)
        assert hash_columns([keys]).tolist() == hash_columns([fitted.column(0)]).tolist()
    else:
        for rows in (batch, batch.slice(0, 0)):  # the driver says it of none
            with pytest.raises(StartRefused, match="group and aggregate as before"):
                KeptColumns(kept, "top").fitted(rows)


def test_a_value_that_is_a_text_by_now_is_refused_of_no_rows_too():
    batch = pa.record_batch(
        {"app": pa.array([], pa.string()), "count(1)": pa.array([], pa.string())}
    )

    with pytest.raises(StartRefused, match="the state of operator 'top'"):
        KeptColumns(KEPT, "top").fitted(batch)


# --- columns that come and go

CLICKS = pa.schema([("app", pa.string()), ("n", pa.int64())])
CALLS = {
    name: AggregateCall(function, None if function == "count" else "n", name, type_)
    for name, function, type_ in (
        ("count(1)", "count", pa.int64()),
        ("sum(n)", "sum", pa.int64()),
        ("avg(n)", "avg", pa.float64()),
        ("min(n)", "min", pa.int64()),
        ("var_pop(n)", "var_pop", pa.float64()),
        ("first(n)", "first", pa.int64()),
        ("collect_list(n)", "collect_list", pa.list_(pa.int64())),
    )
}
CALLS["first(n)"] = AggregateCall("first", "n", "first(n)", pa.int64(), (False, False))


def table(*names: str) -> AggregateTable:
    return AggregateTable(CLICKS, ["app"], [CALLS[name] for name in names], 128)


def kept(*names: str, **given) -> KeptColumns:
    values = columns_of_aggregates(CLICKS, [CALLS[name] for name in names])
    return KeptColumns(table(*names).snapshot_schema, "top", values=values, given=given)


def rows_of(*names: str) -> pa.RecordBatch:
    made = table(*names)
    made.update(pa.record_batch({"app": ["a", "a", "b"], "n": [1, 2, 5]}, schema=CLICKS))
    return made.freeze().rows()


def results(rows: pa.RecordBatch, *names: str) -> list[dict]:
    """After one more click, 9 of app a."""
    made = table(*names)
    made.restore(rows)
    made.update(pa.record_batch({"app": ["a"], "n": [9]}, schema=CLICKS))
    return made.results().to_pylist()


@pytest.mark.parametrize("added", sorted(CALLS.keys() - {"sum(n)"}))
def test_an_aggregate_that_was_added_begins_as_if_no_value_had_come(added):
    fitted = kept("sum(n)", added).fitted(rows_of("sum(n)"))

    a, b = results(fitted, "sum(n)", added)
    assert (a["sum(n)"], b["sum(n)"]) == (12, 5)
    [fresh] = results(table(added).freeze().rows(), added)
    assert a[added] == fresh[added], "only what came since"
    assert b[added] == {"collect_list(n)": [], "count(1)": 0}.get(added)


def test_one_that_was_taken_out_is_left_behind_and_the_order_does_not_matter():
    found = rows_of("avg(n)", "count(1)", "sum(n)")
    now = kept("sum(n)", "count(1)")

    change = now.change_from(found.schema)
    assert change.dropped == ("avg(n).sum", "avg(n).non_null_count")
    assert results(now.fitted(found), "sum(n)", "count(1)") == [
        {"app": "a", "sum(n)": 12, "count(1)": 3},
        {"app": "b", "sum(n)": 5, "count(1)": 1},
    ]


def test_a_new_aggregate_begins_with_what_a_person_gives():
    now = kept("count(1)", "sum(n)", **{"sum(n)": 100})

    assert now.change_from(rows_of("count(1)").schema).in_words(now.given) == (
        "sum(n) is new and begins with 100 for what was kept before"
    )
    a, b = results(now.fitted(rows_of("count(1)")), "count(1)", "sum(n)")
    assert (a["sum(n)"], b["sum(n)"]) == (109, 100)


@pytest.mark.parametrize(("name", "value"), [("sum(n)", "many"), ("avg(n)", 1.5)])
def test_a_default_that_cannot_be_kept_is_refused_with_its_value(name, value):
    with pytest.raises(StartRefused, match=r"cannot begin with .*stateDefaults") as refused:
        kept("count(1)", name, **{name: value}).fitted(rows_of("count(1)"))
    assert repr(value) in str(refused.value)


def test_what_may_be_a_new_name_of_what_is_gone_is_refused_until_a_person_says_so():
    found = rows_of("count(1)", "sum(n)")

    with pytest.raises(StartRefused, match=r"min\(n\) is new and sum\(n\) is gone"):
        kept("count(1)", "min(n)").fitted(found)
    fitted = kept("count(1)", "min(n)", **{"min(n)": None}).fitted(found)
    assert [row["min(n)"] for row in results(fitted, "count(1)", "min(n)")] == [9, None]


def test_rows_of_a_join_get_a_column_of_nulls_or_of_the_default_and_keep_their_keys():
    before = JoinRows(CLICKS, ["app"], None, 128).snapshot_schema
    found = pa.RecordBatch.from_pylist([{"app": "a", "n": 1, "matched": True}], schema=before)
    wider = CLICKS.append(pa.field("country", pa.string()))
    schema = JoinRows(wider, ["app"], None, 128).snapshot_schema
    values = columns_of_rows(wider, ["app"])

    for given, value in (({}, None), ({"country": "unknown"}, "unknown")):
        now = KeptColumns(schema, "it", "join", values, given)
        assert now.fitted(found).to_pylist() == [
            {"app": "a", "n": 1, "country": value, "matched": True}
        ]
    other = JoinRows(wider, ["country"], None, 128).snapshot_schema
    with pytest.raises(StartRefused, match="it is kept by app in the snapshot and by country"):
        KeptColumns(other, "it", "join", columns_of_rows(wider, ["country"])).fitted(found)
