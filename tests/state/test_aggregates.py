"""Running aggregates, against a model in plain Python with Spark's meanings."""

from __future__ import annotations

import datetime
import functools
import math
import statistics
import threading
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError, DataError
from stillframe.key_groups import hash_columns, hash_row, key_group_range, key_groups_of
from stillframe.state import columns as columns_module
from stillframe.state.accumulators import unsupported
from stillframe.state.aggregates import AggregateTable

MAX_PARALLELISM = 8
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("number", pa.int32()),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("t", pa.timestamp("us", "UTC")),
        ("d", pa.date32()),
        ("m", pa.decimal128(12, 2)),
        ("w", pa.decimal128(28, 3)),
        ("y", pa.binary()),
    ]
)


def call(function: str, column: str | None, type_: pa.DataType | None = None) -> AggregateCall:
    if type_ is None:
        type_ = SCHEMA.field(column).type
    return AggregateCall(function, column, f"{function}({column or 1})", type_)


CALLS = [
    call("count", None, pa.int64()),
    call("count", "i", pa.int64()),
    call("sum", "i", pa.int64()),
    call("avg", "i", pa.float64()),
    call("sum", "f", pa.float64()),
    *(call(function, column) for function in ("min", "max") for column in "ifsbtdmwy"),
    call("sum", "m", pa.decimal128(22, 2)),
    call("avg", "m", pa.decimal128(16, 6)),
    call("sum", "w", pa.decimal128(38, 3)),
    call("avg", "w", pa.decimal128(32, 7)),
    *(
        call(f"{kind}_{of}", "i", pa.float64())
        for kind in ("var", "stddev")
        for of in ("pop", "samp")
    ),
]
EXACT = Context(prec=60, rounding=ROUND_HALF_UP)


# --- the model


def decimal_of(number: int, exponent: int) -> Decimal:
    return EXACT.scaleb(Decimal(number), exponent)


def spark_order(value: object) -> tuple[bool, object]:
    nan = isinstance(value, float) and math.isnan(value)
    return (nan, 0 if nan else value)


def modelled(function: str, column: str | None, records: list[dict]) -> object:
    if column is None:
        return len(records)
    values = [record[column] for record in records if record[column] is not None]
    if function == "count":
        return len(values)
    if not values:
        return None
    if function == "sum":
        return functools.reduce(EXACT.add, values) if column in "mw" else sum(values)
    if function == "avg" and column in "mw":
        unit = Decimal(1).scaleb(-6 if column == "m" else -7)
        return EXACT.quantize(
            EXACT.divide(functools.reduce(EXACT.add, values), Decimal(len(values))), unit
        )
    if function == "avg":
        return sum(map(float, values)) / len(values)
    if function.endswith("_samp") and len(values) == 1:
        return None
    if function.startswith(("var", "stddev")):
        kinds = (statistics.variance, statistics.pvariance)
        variance = float(kinds[function.endswith("_pop")](map(Fraction, values)))
        return math.sqrt(variance) if function.startswith("stddev") else variance
    return (min if function == "min" else max)(values, key=spark_order)


@dataclass
class Model:
    keys: list[str]
    records: dict[tuple, list[dict]] = field(default_factory=dict)

    def update(self, batch: list[dict]) -> set[tuple]:
        touched = {tuple(record[key] for key in self.keys) for record in batch}
        for record in batch:
            self.records.setdefault(tuple(record[key] for key in self.keys), []).append(record)
        return touched

    def values(self, keys: set[tuple]) -> dict[tuple, list]:
        return {
            key: [modelled(c.function, c.input, self.records[key]) for c in CALLS] for key in keys
        }

    def all_values(self) -> dict[tuple, list]:
        return self.values(set(self.records))


def assert_same(actual: dict[tuple, list], expected: dict[tuple, list]) -> None:
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert comparable(actual[key]) == comparable(values), key


def comparable(values: list) -> list:
    """NaN equals NaN, and sums of floats may differ in the last digits."""
    return [f"{value:.9g}" if isinstance(value, float) else value for value in values]


def by_key(batch: pa.RecordBatch, key_count: int) -> dict[tuple, list]:
    rows = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    values = {row[:key_count]: list(row[key_count:]) for row in rows}
    assert len(values) == batch.num_rows, "a key came twice"
    return values


def batch_of(records: list[dict]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(records, schema=SCHEMA)


def table_of(keys: list[str]) -> AggregateTable:
    return AggregateTable(SCHEMA, keys, CALLS, MAX_PARALLELISM)


def values_of_frozen(frozen, keys: list[str]) -> dict[tuple, list]:
    """The values of a snapshot, seen through a table that was restored from it."""
    restored = table_of(keys)
    for _, batch in frozen.batches_by_key_group():
        restored.restore(batch)
    return values_of_table(restored, len(keys))


def values_of_table(table: AggregateTable, key_count: int) -> dict[tuple, list]:
    rows = np.arange(len(table))
    columns = [key.take(rows) for key in table._index.freeze().columns]
    for accumulator, where in table._layout.each_in_memory():
        columns.append(accumulator.result([a[: len(table)] for a in table._columns.arrays[where]]))
    return by_key(pa.RecordBatch.from_arrays(columns, schema=table.result_schema), key_count)


# --- random jobs

RECORD = st.fixed_dictionaries(
    {
        "name": st.none() | st.sampled_from(["", "a", "b", "a much longer name", "é"]),
        "number": st.none() | st.integers(-2, 2),
        "i": st.none() | st.integers(-(2**40), 2**40),
        "f": st.none() | st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]),
        "s": st.none() | st.text("ab房é", max_size=3),
        "b": st.none() | st.booleans(),
        "t": st.none() | st.datetimes(timezones=st.just(datetime.UTC)),
        "d": st.none() | st.dates(),
        "m": st.none() | st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: decimal_of(n, -2)),
        "w": st.none() | st.integers(-(10**28) + 1, 10**28 - 1).map(lambda n: decimal_of(n, -3)),
        "y": st.none() | st.binary(max_size=3),
    }
)
STEPS = st.lists(
    st.lists(RECORD, min_size=0, max_size=12) | st.sampled_from(["freeze", "release"]),
    min_size=1,
    max_size=10,
)
KEYS = st.sampled_from([["name"], ["number"], ["name", "number"], ["number", "b"], []])


@pytest.fixture
def small_chunks(monkeypatch):
    """Two rows per chunk, so that a few keys already spread over several."""
    monkeypatch.setattr(columns_module, "CHUNK_ROWS_LOG2", 1)
    monkeypatch.setattr(columns_module, "CHUNK_ROWS", 2)
    monkeypatch.setattr(columns_module, "_FIRST_CAPACITY", 3)


@pytest.mark.usefixtures("small_chunks")
@settings(deadline=None, max_examples=tries(150))
@given(STEPS, KEYS)
def test_updates_give_the_models_values_and_never_show_in_an_earlier_frozen_view(steps, keys):
    table, model, views = table_of(keys), Model(keys), []
    for step in steps:
        if step == "freeze":
            views.append((table.freeze(), model.all_values()))
        elif step == "release" and views:
            views.pop(0)[0].release()
        elif isinstance(step, list):
            touched = model.update(step)
            assert_same(by_key(table.update(batch_of(step)), len(keys)), model.values(touched))
    for frozen, expected in views:
        assert_same(values_of_frozen(frozen, keys), expected)
    assert len(table) == len(model.records)


@settings(deadline=None, max_examples=40)
@given(st.lists(RECORD, max_size=40), st.lists(RECORD, max_size=10), KEYS, st.integers(1, 9))
def test_tables_restored_by_key_group_range_go_on_as_if_nothing_had_happened(
    before, after, keys, parallelism
):
    table, model = table_of(keys), Model(keys)
    table.update(batch_of(before))
    model.update(before)
    batches = dict(table.freeze().batches_by_key_group())
    assert list(batches) == sorted(batches)
    seen: dict[tuple, list] = {}
    for subtask in range(parallelism):
        owned = key_group_range(subtask, parallelism, MAX_PARALLELISM)
        restored = table_of(keys)
        for group in owned:
            if group in batches:
                assert batches[group].num_rows > 0
                restored.restore(batches[group])
        types = [SCHEMA.field(key).type for key in keys]
        mine = [
            record
            for record in after
            if hash_row([record[key] for key in keys], types) % MAX_PARALLELISM in owned
        ]
        restored.update(batch_of(mine))
        seen |= values_of_table(restored, len(keys))
    model.update(after)
    assert_same(seen, model.all_values())


# --- single meanings


def single(calls: list[AggregateCall], type_: pa.DataType, *batches: list) -> list:
    schema = pa.schema([("k", pa.int64()), ("v", type_)])
    table = AggregateTable(schema, ["k"], calls, MAX_PARALLELISM)
    for values in batches:
        columns = [pa.array([1] * len(values), pa.int64()), pa.array(values, type_)]
        result = table.update(pa.RecordBatch.from_arrays(columns, schema=schema))
    return [column[0].as_py() for column in result.columns[1:]]


def of_v(function: str, type_: pa.DataType) -> AggregateCall:
    return AggregateCall(function, "v", f"{function}(v)", type_)


def test_a_sum_that_leaves_64_bits_is_an_error_in_one_sentence():
    total = [of_v("sum", pa.int64())]
    with pytest.raises(DataError, match=r"sum\(v\) has left the range of a 64-bit integer"):
        single(total, pa.int64(), [2**63 - 1], [1])
    with pytest.raises(DataError, match="64-bit"):
        single(total, pa.int64(), [2**62, 2**62])
    with pytest.raises(DataError, match="64-bit"):
        single(total, pa.int64(), [-(2**63), -1])


def test_a_restored_sum_that_leaves_64_bits_is_an_error_too():
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
    tables = [AggregateTable(schema, ["k"], [of_v("sum", pa.int64())], 8) for _ in range(2)]
    tables[0].update(pa.record_batch({"k": [1], "v": [2**63 - 1]}))
    for _, batch in tables[0].freeze().batches_by_key_group():
        tables[1].restore(batch)
    with pytest.raises(DataError, match="64-bit"):
        tables[1].update(pa.record_batch({"k": [1], "v": [1]}))


def test_a_sum_at_the_edge_of_64_bits_is_exact():
    total = [of_v("sum", pa.int64())]
    assert single(total, pa.int64(), [2**63 - 1, -5, 5]) == [2**63 - 1]
    assert single(total, pa.int64(), [-(2**63)]) == [-(2**63)]
    assert single(total, pa.int64(), [2**62, 2**62, -(2**62)]) == [2**62]


def test_narrow_integers_are_summed_as_64_bit_ones():
    assert single([of_v("sum", pa.int64())], pa.int8(), [127] * 1_000) == [127_000]


def test_nan_is_larger_than_everything_else():
    extremes = [of_v("min", pa.float64()), of_v("max", pa.float64())]
    assert single(extremes, pa.float64(), [math.inf, 1.0])[1] == math.inf
    smallest, largest = single(extremes, pa.float64(), [math.nan, 1.0], [2.0])
    assert smallest == 1.0
    assert math.isnan(largest)
    assert all(map(math.isnan, single(extremes, pa.float64(), [math.nan])))


def test_a_group_without_values_has_null_for_all_but_counts():
    calls = [of_v("count", pa.int64()), of_v("sum", pa.int64()), of_v("avg", pa.float64())]
    assert single(calls, pa.int64(), [None, None]) == [0, None, None]
    assert single([of_v("min", pa.string())], pa.string(), [None], [None]) == [None]


def test_float_keys_are_emitted_as_spark_makes_them():
    schema = pa.schema([("k", pa.float64())])
    table = AggregateTable(schema, ["k"], [AggregateCall("count", None, "n", pa.int64())], 8)
    result = table.update(pa.record_batch({"k": [-0.0, 0.0, math.nan, math.nan, None]}))
    zero, nan, null = result.column(0).to_pylist()
    assert math.copysign(1, zero) == 1
    assert math.isnan(nan)
    assert null is None
    assert result.column(1).to_pylist() == [2, 2, 1]


def test_dictionary_encoded_keys_come_out_plain():
    schema = pa.schema([("k", pa.string())])
    table = AggregateTable(schema, ["k"], [AggregateCall("count", None, "n", pa.int64())], 8)
    encoded = pa.array(["b", "a", None, "b"]).dictionary_encode()
    result = table.update(pa.RecordBatch.from_arrays([encoded], ["k"]))
    assert result.schema.types == [pa.string(), pa.int64()]
    assert result.to_pylist() == [{"k": "b", "n": 2}, {"k": "a", "n": 1}, {"k": None, "n": 1}]


def test_keys_of_every_type_come_back_from_a_snapshot():
    values = {
        pa.bool_(): [True, False, None],
        pa.int8(): [-1, 5, None],
        pa.float32(): [1.5, -2.0, None],
        pa.date32(): [datetime.date(2026, 1, 2), None],
        pa.timestamp("us", "UTC"): [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), None],
        pa.timestamp("ms"): [datetime.datetime(2026, 1, 2), None],
        pa.string(): ["", "a", None],
        pa.large_string(): ["x" * 50, None],
        pa.binary(): [b"", b"\0\xff", None],
        pa.decimal128(10, 2): [Decimal("1.25"), Decimal("-3.00"), None],
    }
    count = [AggregateCall("count", None, "n", pa.int64())]
    for type_, keys in values.items():
        schema = pa.schema([("k", type_)])
        table = AggregateTable(schema, ["k"], count, MAX_PARALLELISM)
        table.update(pa.RecordBatch.from_arrays([pa.array(keys, type_)], schema=schema))
        batches = [batch for _, batch in table.freeze().batches_by_key_group()]
        restored = [key for batch in batches for key in batch.column("k").to_pylist()]
        assert len(restored) == len(keys)
        assert set(restored) == set(keys), type_


@pytest.mark.parametrize("type_", [pa.int64(), pa.string()])
def test_each_key_group_of_a_large_table_has_its_own_rows_and_no_others(type_):
    """More rows than become columns at a time, and more than one chunk of them; null is a key."""
    numbers = [None, *range(100_000)]
    keys = pa.array(numbers, pa.int64()).cast(type_)
    schema = pa.schema([("k", type_), ("v", pa.int64())])
    calls = [AggregateCall("count", None, "n", pa.int64()), of_v("max", pa.int64())]
    table = AggregateTable(schema, ["k"], calls, MAX_PARALLELISM)
    table.update(pa.RecordBatch.from_arrays([keys, pa.array(numbers)], schema=schema))
    snapshot = list(table.freeze().batches_by_key_group())
    assert [group for group, _ in snapshot] == list(range(MAX_PARALLELISM))
    for group, batch in snapshot:
        hashes = hash_columns([batch.column("k")])
        assert set(key_groups_of(hashes, MAX_PARALLELISM).tolist()) == {group}
        assert batch.column("k").cast(pa.int64()).equals(batch.column("max(v)"))
        assert set(batch.column("n").to_pylist()) == {1}
    assert sum(batch.num_rows for _, batch in snapshot) == len(numbers)


def test_the_columns_of_a_snapshot_say_what_they_are():
    assert table_of(["name"]).snapshot_schema.names[:6] == [
        "name",
        "count(1)",
        "count(i)",
        "sum(i)",
        "avg(i).sum",
        "avg(i).non_null_count",
    ]


def test_what_cannot_be_aggregated_is_said_at_build_time():
    numbers = pa.map_(pa.string(), pa.int64())
    assert "sum of type string" in unsupported(of_v("sum", pa.int64()), pa.string())
    assert "min of type map" in unsupported(of_v("min", numbers), numbers)
    assert "not int32" in unsupported(of_v("sum", pa.int32()), pa.int32())
    assert "needs a column" in unsupported(AggregateCall("max", None, "m", pa.int64()), None)
    assert unsupported(of_v("avg", pa.float64()), pa.int16()) is None
    with pytest.raises(BuildError, match=r"'sum\(s\)' cannot be kept: sum of type string"):
        AggregateTable(SCHEMA, ["name"], [call("sum", "s", pa.int64())], 8)
    with pytest.raises(BuildError, match="'nobody'"):
        AggregateTable(SCHEMA, ["nobody"], CALLS, 8)


def test_the_version_changes_with_every_change_and_with_nothing_else():
    table = table_of(["name"])
    record = dict.fromkeys(SCHEMA.names)
    seen = [table.version]

    table.update(batch_of([record]))
    seen.append(table.version)
    table.update(batch_of([record]))
    seen.append(table.version)
    [(_, rows)] = table.freeze().batches_by_key_group()
    table.merge(rows)
    seen.append(table.version)
    other = table_of(["name"])
    other.restore(rows)

    assert len(set(seen)) == 4
    assert other.version != table_of(["name"]).version
    table.update(batch_of([]))
    table.freeze().release()
    assert table.version == seen[-1]


def test_a_view_read_by_another_thread_while_the_table_changes_is_as_it_was():
    """Counts of one batch are all equal in every consistent view; a torn one would mix two."""
    schema = pa.schema([("k", pa.int64())])
    keys = pa.record_batch({"k": np.arange(200_000)})
    table = AggregateTable(schema, ["k"], [AggregateCall("count", None, "n", pa.int64())], 8)
    table.update(keys)
    seen: list[tuple[int, set]] = []

    def read(view, expected: int) -> None:
        counts = {n for _, batch in view.batches_by_key_group() for n in batch["n"].to_pylist()}
        seen.append((expected, counts))
        view.release()

    readers = []
    for round_ in range(1, 9):
        reader = threading.Thread(target=read, args=(table.freeze(), round_))
        reader.start()
        readers.append(reader)
        table.update(keys)
    for reader in readers:
        reader.join(timeout=60)
    assert sorted(seen) == [(round_, {round_}) for round_ in range(1, 9)]
