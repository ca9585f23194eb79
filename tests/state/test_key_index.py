"""Keys get dense row numbers, the same one each time, whatever their hashes do."""

from __future__ import annotations

import math
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.key_groups import NULL_HASH, hash_columns
from stillframe.state.key_index import KeyIndex

INTEGERS = st.none() | st.integers(-5, 40) | st.integers(-(2**63), 2**63 - 1)
TEXTS = st.none() | st.text("ab\0", max_size=18) | st.text(max_size=5)


def weak_hash(columns):
    """Everything collides, in the last place of the table, so that probing has to wrap around."""
    length = len(columns[0].hashes())
    return np.full(length, 2**64 - 1, dtype=np.uint64)


def assert_rows_are_stable_and_dense(index: KeyIndex, batches: list[list[tuple]], types: list):
    """Rows are not numbered in order of appearance, but each key has one, and they are dense."""
    row_of: dict = {}
    for batch in batches:
        columns = [pa.array([key[i] for key in batch], type_) for i, type_ in enumerate(types)]
        for key, row in zip(batch, index.rows_of(columns).tolist(), strict=True):
            assert row_of.setdefault(key, row) == row
    assert sorted(row_of.values()) == list(range(len(index)))
    frozen = index.freeze()
    stored = [column.take(np.arange(len(index))).to_pylist() for column in frozen.columns]
    assert {key: row for row, key in enumerate(zip(*stored, strict=True))} == row_of


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(INTEGERS), min_size=1), min_size=1, max_size=4))
def test_integers_keep_their_rows(batches):
    assert_rows_are_stable_and_dense(KeyIndex([pa.int64()]), batches, [pa.int64()])


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(TEXTS), min_size=1), min_size=1, max_size=4))
def test_strings_keep_their_rows(batches):
    assert_rows_are_stable_and_dense(KeyIndex([pa.string()]), batches, [pa.string()])


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(TEXTS, INTEGERS), min_size=1), min_size=1, max_size=4))
def test_composites_keep_their_rows(batches):
    types = [pa.string(), pa.int64()]
    assert_rows_are_stable_and_dense(KeyIndex(types), batches, types)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(TEXTS, INTEGERS), min_size=1), min_size=1, max_size=4))
def test_keys_whose_hashes_collide_are_told_apart(batches):
    types = [pa.string(), pa.int64()]
    assert_rows_are_stable_and_dense(KeyIndex(types, weak_hash), batches, types)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(TEXTS), min_size=1), min_size=1, max_size=3))
def test_strings_whose_hashes_collide_are_told_apart(batches):
    assert_rows_are_stable_and_dense(KeyIndex([pa.string()], weak_hash), batches, [pa.string()])


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(INTEGERS), min_size=1), min_size=1, max_size=3))
def test_integers_whose_hashes_collide_are_told_apart(batches):
    assert_rows_are_stable_and_dense(KeyIndex([pa.int64()], weak_hash), batches, [pa.int64()])


def inverse_of_splitmix64(hash_: int) -> int:
    """The one integer with this hash, by undoing each step."""
    mask = 2**64 - 1

    def unshift(word: int, bits: int) -> int:
        result = word
        for _ in range(64 // bits + 1):
            result = word ^ (result >> bits)
        return result

    word = unshift(hash_, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
    word = unshift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return (unshift(word, 30) - 0x9E3779B97F4A7C15) & mask


def test_the_one_integer_that_hashes_like_null_is_not_null():
    twin = inverse_of_splitmix64(NULL_HASH)
    twin = twin - 2**64 if twin >= 2**63 else twin
    column = pa.array([twin, None, twin, None], pa.int64())
    assert len(set(hash_columns([column]).tolist())) == 1
    index = KeyIndex([pa.int64()])
    assert index.rows_of([column]).tolist() == [0, 1, 0, 1]
    assert index.rows_of([pa.array([None], pa.int64())]).tolist() == [1]
    assert index.rows_of([pa.array([twin], pa.int64())]).tolist() == [0]


def test_a_million_keys_keep_their_rows_while_the_table_grows():
    random = np.random.default_rng(1)
    numbers = random.permutation(1_000_000) * 7_919
    index = KeyIndex([pa.int64()])
    parts = np.array_split(numbers, 37)
    rows = np.concatenate([index.rows_of([pa.array(part)]) for part in parts])
    assert len(index) == 1_000_000
    assert np.array_equal(np.sort(rows), np.arange(1_000_000))
    again = random.permutation(1_000_000)
    assert np.array_equal(index.rows_of([pa.array(numbers[again])]), rows[again])


def test_many_strings_keep_their_rows_while_the_table_grows():
    names = [f"app-{number * 37}" for number in range(100_000)]
    index = KeyIndex([pa.string()])
    rows = [
        row
        for start in range(0, 100_000, 9_000)
        for row in index.rows_of([pa.array(names[start : start + 9_000])]).tolist()
    ]
    assert sorted(rows) == list(range(100_000))
    assert index.rows_of([pa.array(names[::-1])]).tolist() == rows[::-1]


def test_keys_of_megabytes_are_told_apart_by_any_byte_and_found_within_seconds():
    long = "x" * 10_000_000
    names = [long, long + "x", "y" + long[1:], long[:-1] + "y", "x", None]
    index = KeyIndex([pa.string()])
    began = time.process_time()
    rows = index.rows_of([pa.array(names)]).tolist()
    again = index.rows_of([pa.array(names[::-1])], hash_columns([pa.array(names[::-1])])).tolist()
    collided = KeyIndex([pa.string()], weak_hash).rows_of([pa.array(names * 2)]).tolist()
    assert time.process_time() - began < 10
    assert sorted(rows) == list(range(6))
    assert again == rows[::-1]
    assert sorted(collided[:6]) == list(range(6))
    assert collided[:6] == collided[6:]
    stored = index.freeze().columns[0].take(np.array(rows)).to_pylist()
    assert stored == names


def test_one_huge_batch_into_a_small_table():
    index = KeyIndex([pa.int64()])
    assert len(index.rows_of([pa.array([5])])) == 1
    index.rows_of([pa.array(np.arange(300_000))])
    assert len(index) == 300_000


@pytest.mark.parametrize("length", [10, 5_000])
def test_dictionary_encoded_keys_get_the_rows_of_plain_ones(length):
    names = pa.array([None if i % 7 == 0 else f"app-{i % 11}" for i in range(length)])
    index = KeyIndex([pa.string()])
    rows = index.rows_of([names]).tolist()
    for encoded in (
        names.dictionary_encode(),
        names.dictionary_encode(null_encoding="encode"),
        names.cast(pa.large_string()).dictionary_encode(),
    ):
        assert index.rows_of([encoded]).tolist() == rows
    assert len(index) == len(set(rows))


@pytest.mark.parametrize("type_", [pa.large_string(), pa.string_view(), pa.binary()])
def test_strings_of_other_layouts_are_keys_too(type_):
    names = pa.array([None if i % 7 == 0 else f"app-{i % 11}" for i in range(5_000)]).cast(type_)
    index = KeyIndex([type_])
    rows = index.rows_of([names])
    assert len(index) == 12
    assert index.freeze().columns[0].take(rows).equals(names)


def test_a_dictionary_entry_that_no_record_uses_is_not_a_key():
    dictionary = pa.array([f"app-{i}" for i in range(10)])
    column = pa.DictionaryArray.from_arrays(pa.array([3] * 20, pa.int32()), dictionary)
    index = KeyIndex([pa.string()])
    assert index.rows_of([column]).tolist() == [0] * 20
    assert index.freeze().columns[0].take(np.array([0])).to_pylist() == ["app-3"]


def test_repeated_entries_of_a_dictionary_are_one_key():
    dictionary = pa.array(["a", "b", "a"])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0], pa.int32()), dictionary)
    assert KeyIndex([pa.string()]).rows_of([column]).tolist() == [0, 1, 0, 0]


def test_a_frozen_view_does_not_see_later_keys():
    index = KeyIndex([pa.string(), pa.int32()])
    index.rows_of([pa.array(["a", None]), pa.array([None, 2], pa.int32())])
    frozen = index.freeze()
    index.rows_of([pa.array(["c"] * 5_000), pa.array(range(5_000), pa.int32())])
    assert len(frozen.hashes) == 2
    rows = np.arange(2)
    assert [column.take(rows).to_pylist() for column in frozen.columns] == [["a", None], [None, 2]]


def test_hashes_that_are_known_already_give_the_same_rows():
    names = pa.array([f"app-{i % 50}" for i in range(5_000)])
    index = KeyIndex([pa.string()])
    assert np.array_equal(index.rows_of([names]), index.rows_of([names], hash_columns([names])))


def test_minus_zero_and_zero_are_one_key_and_so_is_every_nan():
    index = KeyIndex([pa.float64()])
    assert index.rows_of([pa.array([0.0, math.nan, -0.0, -math.nan])]).tolist() == [0, 1, 0, 1]
