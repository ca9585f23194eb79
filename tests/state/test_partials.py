"""Partial aggregates: merged, they make what the records themselves would have made."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import DataError
from stillframe.state import partials
from stillframe.state.aggregates import AggregateTable
from stillframe.state.partials import PartialAggregates, is_partial

ROWS = 5_000
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("number", pa.int32()),
        ("real", pa.float64()),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("t", pa.timestamp("us", "UTC")),
        ("unread", pa.string()),
    ]
)
COUNT = AggregateCall("count", None, "count", pa.int64())


def call(function: str, column: str, type_: pa.DataType | None = None) -> AggregateCall:
    made = type_ or SCHEMA.field(column).type
    return AggregateCall(function, column, f"{function}({column})", made)


CALLS = [
    COUNT,
    call("count", "i", pa.int64()),
    call("sum", "i"),
    call("sum", "f"),
    call("avg", "i", pa.float64()),
    call("avg", "f"),
    *(call(function, column) for function in ("min", "max") for column in "ifsbt"),
]


def chosen(random: np.random.Generator, values: list, type_: pa.DataType) -> pa.Array:
    """These values in any order; the floats are such that sums of them are exact."""
    return pa.array(values, type_).take(pa.array(random.integers(0, len(values), ROWS)))


def batch_of(seed: int) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    text = ["", "a", "ä", "zebra", None]
    reals = [0.0, -0.0, 1.5, math.nan, math.inf, None]
    columns = [
        chosen(random, [f"app-{n}" for n in range(50)] + [None], pa.string()),
        chosen(random, [*range(-5, 5), None], pa.int32()),
        chosen(random, reals, pa.float64()),
        chosen(random, [*range(-1000, 1000), None], pa.int64()),
        chosen(random, [0.25, -7.5, 1024.0, math.nan if seed % 2 else 3.0, None], pa.float64()),
        chosen(random, text, pa.string()),
        chosen(random, [True, False, None], pa.bool_()),
        chosen(random, [0, 1, 1_767_225_600_000_000, None], pa.timestamp("us", "UTC")),
        pa.nulls(ROWS, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def values_of(batch: pa.RecordBatch) -> list[str]:
    """One line per row, in any order, in which NaN equals NaN and 0.0 is not -0.0."""
    columns = [column.to_pylist() for column in batch.columns]
    return sorted(map(repr, zip(*columns, strict=True)))


def snapshot_of(table: AggregateTable) -> list[str]:
    frozen = table.freeze()
    return [line for _, batch in frozen.batches_by_key_group() for line in values_of(batch)]


@pytest.mark.parametrize(
    "keys", [["name"], ["number"], ["real"], ["b"], ["name", "number"], ["s", "real", "b"], []]
)
def test_merged_partials_make_what_the_records_would_have_made(keys):
    direct = AggregateTable(SCHEMA, keys, CALLS, 128)
    merged = AggregateTable(SCHEMA, keys, CALLS, 128)
    partials = PartialAggregates(SCHEMA, keys, CALLS)

    for seed in range(6):
        batch = batch_of(seed).slice(seed)
        combined = partials.combine(batch)
        assert is_partial(combined)
        assert combined.num_rows < ROWS / 5
        assert values_of(merged.merge(combined)) == values_of(direct.update(batch))

    assert snapshot_of(merged) == snapshot_of(direct)


def test_partials_and_records_of_one_key_come_together():
    table = AggregateTable(SCHEMA, ["name"], CALLS, 128)
    expected = AggregateTable(SCHEMA, ["name"], CALLS, 128)
    batch = batch_of(1)

    table.merge(PartialAggregates(SCHEMA, ["name"], CALLS).combine(batch))
    table.update(batch)
    expected.update(batch)
    expected.update(batch)

    assert snapshot_of(table) == snapshot_of(expected)


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.large_string(), ["a", "b", None]),
        (pa.binary(), [b"\0", b"", None]),
        (pa.binary(2), [b"ab", b"cd", None]),
        (pa.uint64(), [2**64 - 1, 0, None]),
        (pa.float32(), [math.nan, 0.0, None]),
        (pa.date32(), [datetime.date(2026, 1, 1), None]),
        (pa.time64("us"), [datetime.time(12), None]),
        (pa.duration("ms"), [datetime.timedelta(1), None]),
        (pa.decimal128(10, 2), [Decimal("1.25"), None]),
    ],
)
def test_records_can_be_combined_by_keys_of_any_type(type_, values):
    schema = pa.schema([("key", type_)])
    batch = pa.record_batch([pa.array(values * 1_100, type_)], schema=schema)
    table = AggregateTable(schema, ["key"], [COUNT], 128)

    combined = PartialAggregates(schema, ["key"], [COUNT]).combine(batch)

    assert is_partial(combined)
    assert table.merge(combined).column("count").to_pylist() == [1_100] * len(values)


def test_an_encoded_key_touches_only_the_keys_of_its_own_records():
    schema = pa.schema([("key", pa.string())])
    dictionary = pa.array(["unused", "a", "b", "a"])  # a value named twice is one key all the same
    indices = pa.array([1, 2, 3] * 1_000 + [None], pa.int32())
    batch = pa.record_batch({"key": pa.DictionaryArray.from_arrays(indices, dictionary)})
    table = AggregateTable(schema, ["key"], [COUNT], 128)

    combined = PartialAggregates(schema, ["key"], [COUNT]).combine(batch)

    assert is_partial(combined)
    made = table.merge(combined).to_pydict()
    assert dict(zip(made["key"], made["count"], strict=True)) == {"a": 2_000, "b": 1_000, None: 1}


@pytest.mark.parametrize("last", [1, 2, None])
def test_an_encoded_key_is_told_by_its_values_and_not_by_their_places(last):
    schema = pa.schema([("key", pa.int32())])
    dictionary = pa.array([2, 0, 7], pa.int32())  # values of the type of their places
    indices = pa.array([0, 1] * 1_500 + [last], pa.int32())
    encoded = pa.DictionaryArray.from_arrays(indices, dictionary)
    batch = pa.record_batch({"key": encoded})
    table = AggregateTable(schema, ["key"], [COUNT], 128)

    combined = PartialAggregates(schema, ["key"], [COUNT]).combine(batch)

    assert is_partial(combined)
    made = table.merge(combined).to_pydict()
    assert dict(zip(made["key"], made["count"], strict=True)) == Counter(encoded.to_pylist())


def test_keys_that_hardly_repeat_are_sent_as_records_without_the_columns_nobody_reads():
    schema = pa.schema([("other", pa.string()), ("value", pa.int64()), ("key", pa.int64())])
    columns = [pa.nulls(ROWS, pa.string()), pa.nulls(ROWS, pa.int64()), pa.array(range(ROWS))]
    batch = pa.record_batch(columns, schema=schema)
    calls = [COUNT, AggregateCall("sum", "value", "sum", pa.int64())]

    sent = PartialAggregates(schema, ["key"], calls).combine(batch)

    assert not is_partial(sent)
    assert sent.schema.names == ["key", "value"]
    assert sent.num_rows == ROWS


def test_a_sample_that_repeats_more_than_the_rest_does_not_mislead():
    schema = pa.schema([("key", pa.int64())])
    batch = pa.record_batch([pa.array([7] * 1_024 + list(range(4_000)))], schema=schema)

    assert not is_partial(PartialAggregates(schema, ["key"], [COUNT]).combine(batch))


def test_a_small_batch_is_sent_as_records():
    batch = batch_of(1).slice(0, 2_047)

    assert not is_partial(PartialAggregates(SCHEMA, ["name"], CALLS).combine(batch))


def test_a_sum_that_leaves_64_bits_is_refused_before_it_is_sent():
    schema = pa.schema([("key", pa.int64()), ("value", pa.int64())])
    calls = [AggregateCall("sum", "value", "total", pa.int64())]
    batch = pa.record_batch([pa.array([1] * ROWS), pa.array([2**62] * ROWS)], schema=schema)

    with pytest.raises(DataError, match="total has left the range of a 64-bit integer"):
        PartialAggregates(schema, ["key"], calls).combine(batch)


def test_large_values_of_one_batch_are_no_burden_to_the_next():
    schema = pa.schema([("key", pa.int64()), ("value", pa.int64())])
    calls = [AggregateCall("sum", "value", "total", pa.int64())]
    values = pa.array([2**62, -(2**62)] * (ROWS // 2))
    batch = pa.record_batch([pa.array([1] * ROWS), values], schema=schema)
    partials = PartialAggregates(schema, ["key"], calls)

    for _ in range(3):
        assert partials.combine(batch).column("total").to_pylist() == [0]


@pytest.mark.parametrize(
    ("records", "keys", "is_combined"),
    [(65_536, 10_000, True), (65_536, 100_000, False), (4_096, 600, True), (4_096, 8_000, False)],
)
def test_a_batch_is_combined_if_it_seems_that_half_of_its_records_go(records, keys, is_combined):
    numbers = np.random.default_rng(records + keys).integers(0, keys, records)
    batch = pa.record_batch({"key": pa.array(numbers).cast(pa.string())})
    assert is_partial(PartialAggregates(batch.schema, ["key"], [COUNT]).combine(batch)) == (
        is_combined
    )


def short_strings(seed: int) -> list[str]:
    """Strings that are one word with their length, some of them apart only by that."""
    random = np.random.default_rng(seed)
    letters = ["\0", "\7", "a", "b", "ä", "7"]
    lengths = [range(6), range(9), [8], range(9)][seed % 4]
    ends = ["", "x"][seed % 3 > 0]
    made = {"".join(random.choice(letters, random.choice(lengths))) + ends for _ in range(3_000)}
    fitting = sorted(text for text in made if len(text.encode()) <= 8)
    return fitting[: random.integers(1, len(fitting))]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("places", [1 << 14, 1 << 6])
def test_short_strings_are_numbered_each_by_itself_wherever_they_meet(monkeypatch, seed, places):
    monkeypatch.setattr(partials, "_PLACES", places)
    monkeypatch.setattr(partials, "_PLACES_SHIFT", np.uint64(65 - places.bit_length()))
    random = np.random.default_rng(seed)
    known = pa.array(short_strings(seed))
    column = known.take(pa.array(random.integers(0, len(known), 9_000))).slice(seed, 8_000)

    numbered = partials.numbered_by([column], len(column))

    assert numbered.values.take(pa.array(numbered.numbers)).equals(column)
    assert len(set(numbered.values.to_pylist())) == numbered.count


@pytest.mark.parametrize("odd", ["nineletts", "eightle\7", "eightlet", None])
def test_a_string_that_is_too_long_or_missing_is_numbered_as_well(odd):
    column = pa.array(["a", "bc", odd, ""] * 1_000)

    numbered = partials.numbered_by([column], len(column))

    assert numbered.values.take(pa.array(numbered.numbers)).equals(column)
    assert numbered.count == 4


def test_strings_that_are_all_empty_are_one():
    numbered = partials.numbered_by([pa.array([""] * 3_000)], 3_000)

    assert numbered.count == 1
    assert numbered.values.to_pylist() == [""]
