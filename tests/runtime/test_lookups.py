"""A join with a table, against a model that compares every record with every row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.graph.expressions import Call, Column
from stillframe.graph.logical import Lookup
from stillframe.runtime import lookups
from stillframe.runtime.lookups import LookingUp

INPUT = pa.schema([("n", pa.int64()), ("k", pa.int64()), ("s", pa.string())])
TABLE = pa.schema([("tk", pa.int64()), ("ts", pa.string()), ("v", pa.int64())])
BOTH = pa.schema([*INPUT, *TABLE])
LESS = Call("less", (Column("n", pa.int64()), Column("v", pa.int64())), pa.bool_())


def batch_of(schema: pa.Schema, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * len(schema)
    arrays = [pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def looking_up(
    rows: list[tuple[Any, ...]], how: Any, on: tuple[tuple[str, str], ...], condition: Any = None
) -> LookingUp:
    table = pa.Table.from_batches([batch_of(TABLE, rows[:2]), batch_of(TABLE, rows[2:])])
    keys, table_keys = (tuple(k for k, _ in on), tuple(k for _, k in on))
    schema = INPUT if how in ("semi", "anti") else BOTH
    return LookingUp(Lookup(table, how, keys, table_keys, condition), schema)


def joined(operator: LookingUp, records: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    batches = list(operator.process(batch_of(INPUT, records)))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def expected(
    records: list[tuple[Any, ...]],
    rows: list[tuple[Any, ...]],
    how: str,
    on: tuple[tuple[str, str], ...],
    has_condition: bool,
) -> list[tuple[Any, ...]]:
    found = []
    for record in records:
        left = dict(zip(INPUT.names, record, strict=True))
        matches = []
        for row in rows:
            right = dict(zip(TABLE.names, row, strict=True))
            equal = all(left[a] is not None and left[a] == right[b] for a, b in on)
            met = not has_condition or (
                None not in (left["n"], right["v"]) and left["n"] < right["v"]
            )
            if equal and met:
                matches.append(row)
        if how in ("inner", "left"):
            found += [(*record, *row) for row in matches]
        if how == "left" and not matches:
            found.append((*record, None, None, None))
        if how in ("semi", "anti") and bool(matches) == (how == "semi"):
            found.append(record)
    return found


KEY = st.one_of(st.none(), st.integers(0, 4))
TEXT = st.one_of(st.none(), st.sampled_from(["x", "y"]))


@settings(max_examples=tries(300), deadline=None)
@given(
    st.lists(st.tuples(KEY, KEY, TEXT), max_size=12),
    st.lists(st.tuples(KEY, TEXT, KEY), max_size=12),
    st.sampled_from(["inner", "left", "semi", "anti"]),
    st.sampled_from([(), (("k", "tk"),), (("s", "ts"),), (("k", "tk"), ("s", "ts"))]),
    st.booleans(),
    st.sampled_from([1, 3, 100]),
)
def test_a_batch_is_joined_as_record_by_record(
    records: list[Any], rows: list[Any], how: str, on: Any, has_condition: bool, pairs_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lookups, "PAIRS_MAX", pairs_max)
        operator = looking_up(rows, how, on, LESS if has_condition else None)
        found = joined(operator, records)
    assert found == expected(records, rows, how, on, has_condition)


def test_records_keep_their_order_and_unmatched_ones_their_place() -> None:
    operator = looking_up([(1, "a", 0), (1, "b", 0)], "left", (("k", "tk"),))
    found = joined(operator, [(0, 9, None), (1, 1, None), (2, 9, None)])
    assert [(row[0], row[4]) for row in found] == [(0, None), (1, "a"), (1, "b"), (2, None)]


def test_a_column_that_comes_in_encoded_goes_out_plain() -> None:
    operator = looking_up([(1, "x", 0)], "inner", (("s", "ts"),))
    batch = batch_of(INPUT, [(0, 1, "x"), (1, 1, "y"), (2, 1, "x")])
    encoded = pa.RecordBatch.from_arrays(
        [batch.column(0), batch.column(1), batch.column(2).dictionary_encode()], INPUT.names
    )
    (made,) = operator.process(encoded)
    assert made.schema == BOTH
    assert made.column("n").to_pylist() == [0, 2]


def test_many_matches_come_in_parts() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lookups, "PAIRS_MAX", 100)
        operator = looking_up([(1, "x", n) for n in range(30)], "inner", (("k", "tk"),))
        batches = list(operator.process(batch_of(INPUT, [(n, 1, None) for n in range(50)])))
    assert sum(batch.num_rows for batch in batches) == 1_500
    assert max(batch.num_rows for batch in batches) <= 100
