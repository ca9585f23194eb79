"""The hash of keys, which must never change, and the ranges of key groups."""

from __future__ import annotations

import datetime
import decimal
import math
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.errors import BuildError
from stillframe.key_groups import (
    LONG_KEY_BYTES,
    hash_batch,
    hash_columns,
    hash_row,
    key_group_range,
    key_groups_of,
    subtask_of_key_group,
)

UTC = datetime.UTC
DECIMAL = pa.decimal128(38, 2)

GOLDEN = [
    (0, pa.int64(), 0xE220A8397B1DCDAF),
    (1, pa.int8(), 0x910A2DEC89025CC1),
    (-1, pa.int32(), 0xE4D971771B652C20),
    (2**63 - 1, pa.int64(), 0x2A67D7552E039EA7),
    (True, pa.bool_(), 0x910A2DEC89025CC1),
    (0.0, pa.float64(), 0xE220A8397B1DCDAF),
    (1.5, pa.float64(), 0xD6DAB18E1392608A),
    (1.5, pa.float32(), 0xD6DAB18E1392608A),
    (math.nan, pa.float64(), 0xC72971D82E15BB46),
    ("", pa.string(), 0x7A5C297A7EEDCFA3),
    ("app-1", pa.string(), 0xFE11784D57259C85),
    ("exactly8", pa.string(), 0x6208AE7468EE6A67),
    ("häuser, 房子", pa.string(), 0x8D6153B0CB75C9CE),
    (b"\x00\xff", pa.binary(), 0x8196929E54DAA671),
    (datetime.date(2026, 1, 2), pa.date32(), 0x91EED16D69CEFB4E),
    (datetime.datetime(2026, 1, 2, tzinfo=UTC), pa.timestamp("us", "UTC"), 0xD73045F05434F6AB),
    (decimal.Decimal("-12.34"), DECIMAL, 0x8951191C8C2F95F9),
    (None, pa.string(), 0x6E756C6C5F6B6579),
]
GOLDEN_COMPOSITE = 0xA64B8E75DF8B9EF3


@pytest.mark.parametrize(("value", "type_", "hash_"), GOLDEN)
def test_the_hash_of_a_value_is_the_same_as_in_every_release(value, type_, hash_):
    assert hash_row([value], [type_]) == hash_
    for length in (1, 40):  # few rows and many go different ways
        assert hash_columns([pa.array([value] * length, type_)]).tolist() == [hash_] * length


def test_the_hash_of_a_composite_key_is_the_same_as_in_every_release():
    types = [pa.string(), pa.int64(), pa.float64()]
    values = ["app-1", 42, None]
    columns = [pa.array([value], type_) for value, type_ in zip(values, types, strict=True)]
    assert hash_row(values, types) == GOLDEN_COMPOSITE
    assert hash_columns(columns).tolist() == [GOLDEN_COMPOSITE]


def test_the_hash_is_the_same_in_another_process_with_another_hash_seed():
    program = (
        "import pyarrow as pa; from stillframe.key_groups import hash_columns;"
        "print(hash_columns([pa.array(['app-1', 'app-2'])]).tolist())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {str(hash_columns([pa.array(["app-1", "app-2"])]).tolist())}


# --- the same value, whatever it is wrapped in

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.lists(st.none() | st.text(max_size=40), min_size=1, max_size=60)


@settings(deadline=None)
@given(st.lists(st.none() | INT64, min_size=1, max_size=60))
def test_rows_and_columns_of_integers_hash_the_same(values):
    assert hash_columns([pa.array(values, pa.int64())]).tolist() == [
        hash_row([value], [pa.int64()]) for value in values
    ]


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(), min_size=1, max_size=60))
def test_rows_and_columns_of_doubles_hash_the_same(values):
    assert hash_columns([pa.array(values, pa.float64())]).tolist() == [
        hash_row([value], [pa.float64()]) for value in values
    ]


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(width=32), min_size=1, max_size=60))
def test_rows_and_columns_of_floats_hash_the_same(values):
    assert hash_columns([pa.array(values, pa.float32())]).tolist() == [
        hash_row([value], [pa.float32()]) for value in values
    ]


@settings(deadline=None)
@given(TEXTS, st.data())
def test_strings_hash_the_same_in_every_encoding(values, data):
    expected = [hash_row([value], [pa.string()]) for value in values]
    plain = pa.array(values, pa.string())
    start = data.draw(st.integers(0, len(values) - 1))
    for column in (
        plain,
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.cast(pa.binary()),
        plain.dictionary_encode(),
        plain.dictionary_encode(null_encoding="encode"),
    ):
        assert hash_columns([column]).tolist() == expected
        assert hash_columns([column.slice(start)]).tolist() == expected[start:]


@settings(deadline=None)
@given(st.lists(st.tuples(st.none() | st.text(max_size=20), st.none() | INT64), min_size=1))
def test_rows_and_columns_of_composites_hash_the_same(rows):
    types = [pa.string(), pa.int64()]
    columns = [pa.array([row[i] for row in rows], type_) for i, type_ in enumerate(types)]
    assert hash_columns(columns).tolist() == [hash_row(row, types) for row in rows]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.string_view(), pa.binary()])
def test_strings_that_repeat_in_a_long_column_hash_as_their_rows_do(type_):
    values = [None if i % 7 == 0 else f"app-{i % 13}" for i in range(3_000)]
    assert hash_columns([pa.array(values, pa.string()).cast(type_)]).tolist() == [
        hash_row([value], [pa.string()]) for value in values
    ]


def test_strings_of_very_different_lengths_hash_as_their_rows_do():
    values = ["", "x" * 100_000, *("y" * length for length in range(60)), "é" * 33]
    assert hash_columns([pa.array(values)]).tolist() == [
        hash_row([value], [pa.string()]) for value in values
    ]


def test_very_long_keys_hash_as_their_rows_do_and_each_byte_of_them_counts():
    longest = "x" * LONG_KEY_BYTES
    values = [longest, longest + "x", longest + "y", "y" + longest, longest + "xx", None, "x"]
    hashes = [hash_row([value], [pa.string()]) for value in values]
    assert len(set(hashes)) == len(values)
    assert hash_columns([pa.array(values)]).tolist() == hashes
    assert hash_columns([pa.array(values * 40).dictionary_encode()]).tolist() == hashes * 40


def test_the_hash_of_a_very_long_key_is_the_same_as_in_every_release():
    assert hash_row(["x" * LONG_KEY_BYTES], [pa.string()]) == 0xFEFAD9826A2B499B
    assert hash_row(["x" * (LONG_KEY_BYTES + 1)], [pa.string()]) == 0x004F1956C8AC5842


def test_a_key_of_300_megabytes_is_hashed_within_seconds():
    column = pa.array([b"x" * 300_000_000], pa.binary())
    began = time.process_time()
    hash_columns([column])
    assert time.process_time() - began < 5


def test_integers_of_every_width_hash_as_their_value():
    wide = hash_columns([pa.array([-7, 0, 100], pa.int64())]).tolist()
    for narrow in (pa.int8(), pa.int16(), pa.int32()):
        assert hash_columns([pa.array([-7, 0, 100], narrow)]).tolist() == wide


def test_minus_zero_is_zero_and_there_is_one_nan():
    odd_nan = np.array([0x7FF8000000000001], dtype=np.uint64).view(np.float64)[0]
    zero, minus_zero, nan, other_nan = hash_columns([pa.array([0.0, -0.0, math.nan, odd_nan])])
    assert zero == minus_zero
    assert nan == other_nan


def test_bytes_that_differ_only_in_trailing_zeros_hash_differently():
    assert len(set(hash_columns([pa.array([b"", b"\0", b"\0\0", b"\0" * 8, b"\0" * 9])]))) == 5


def test_the_order_of_the_columns_matters():
    one, two = pa.array([1]), pa.array([2])
    assert hash_columns([one, two]).tolist() != hash_columns([two, one]).tolist()


def test_timestamps_hash_as_the_integers_they_are_stored_as():
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    type_ = pa.timestamp("us", "UTC")
    micros = pa.scalar(moment, type_).cast(pa.int64()).as_py()
    assert hash_row([moment], [type_]) == hash_row([micros], [pa.int64()])
    assert hash_columns([pa.array([moment], type_)])[0] == hash_row([micros], [pa.int64()])


@pytest.mark.parametrize("type_", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())])])
def test_a_type_that_cannot_be_a_key_is_refused_by_name(type_):
    with pytest.raises(BuildError, match=str(type_).split("<")[0]):
        hash_columns([pa.array([None], type_)])
    with pytest.raises(BuildError, match=str(type_).split("<")[0]):
        hash_row([None], [type_])


def test_without_keys_all_records_have_one_hash():
    batch = pa.record_batch({"v": [1, 2, 3]})
    assert hash_batch(batch, []).tolist() == [hash_row([], [])] * 3
    assert hash_batch(batch, ["v"]).tolist() == hash_columns([pa.array([1, 2, 3])]).tolist()


def test_an_empty_column_has_no_hashes():
    for type_ in (pa.int64(), pa.string(), pa.string_view(), DECIMAL, pa.bool_()):
        assert len(hash_columns([pa.array([], type_)])) == 0


def test_keys_spread_evenly_over_key_groups():
    for column in (pa.array(range(100_000)), pa.array([f"app-{i}" for i in range(100_000)])):
        sizes = np.bincount(key_groups_of(hash_columns([column]), 128), minlength=128)
        assert sizes.min() > 600
        assert sizes.max() < 970


# --- key groups and subtasks


def owners(parallelism: int, max_parallelism: int) -> list[list[int]]:
    return [list(key_group_range(s, parallelism, max_parallelism)) for s in range(parallelism)]


def test_ranges_and_owners_agree_for_all_small_numbers():
    for max_parallelism in range(1, 40):
        for parallelism in range(1, 45):
            ranges = owners(parallelism, max_parallelism)
            assert [group for part in ranges for group in part] == list(range(max_parallelism))
            for subtask, part in enumerate(ranges):
                for group in part:
                    assert subtask_of_key_group(group, parallelism, max_parallelism) == subtask


@settings(deadline=None)
@given(st.integers(1, 32768), st.integers(1, 500))
def test_ranges_and_owners_agree(max_parallelism, parallelism):
    groups = np.arange(max_parallelism)
    subtasks = subtask_of_key_group(groups, parallelism, max_parallelism)
    for subtask in range(parallelism):
        owned = key_group_range(subtask, parallelism, max_parallelism)
        assert groups[subtasks == subtask].tolist() == list(owned)


def test_a_key_group_is_the_hash_modulo_the_maximum_parallelism():
    hashes = np.array([0, 127, 128, 2**64 - 1], dtype=np.uint64)
    assert key_groups_of(hashes, 128).tolist() == [0, 127, 0, 127]
    assert key_groups_of(hashes, 100).tolist() == [0, 27, 28, (2**64 - 1) % 100]
    assert key_groups_of(hashes, 128).dtype == np.int32
