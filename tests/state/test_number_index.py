"""Rows for numbers, by a place for each or by hashing, against a dictionary."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.key_groups import hash_columns
from stillframe.state.key_index import KeyIndex
from stillframe.state.number_index import NumberIndex

FAR = 10_000_000
"""A number that is too high to have a place among few."""
BATCHES = st.lists(st.lists(st.integers(0, 30) | st.sampled_from([20_000, FAR]), max_size=12))


def index() -> NumberIndex:
    return NumberIndex(lambda: KeyIndex([pa.int64()]))


def column(numbers: list[int]) -> pa.Array:
    return pa.array(numbers, pa.int64())


@settings(deadline=None)
@given(BATCHES)
def test_each_number_has_one_row_and_keeps_it(batches: list[list[int]]) -> None:
    rows, known = index(), dict[int, int]()
    for numbers in batches:
        found = rows.rows_of([column(numbers)]).tolist()
        for number, row in zip(numbers, found, strict=True):
            assert known.setdefault(number, row) == row
        assert sorted(known.values()) == list(range(len(known)))
        asked = column([*range(40), 20_000, FAR])
        found = rows.find([asked], hash_columns([asked])).tolist()
        assert found == [known.get(number, -1) for number in asked.to_pylist()]
    frozen = rows.freeze()
    assert len(rows) == len(known)
    numbers = sorted(known, key=lambda number: known[number])
    assert frozen.columns[0].take(np.arange(len(rows))).to_pylist() == numbers
    assert frozen.hashes.tolist() == hash_columns([column(numbers)]).tolist()


def test_numbers_far_between_are_hashed_and_not_given_a_place_each() -> None:
    near, far = index(), index()
    near.rows_of([column(list(range(1_000)))])
    far.rows_of([column([FAR * number for number in range(1_000)])])
    assert near.nbytes < 64 << 10
    assert far.nbytes < 1 << 20


def test_rows_stay_what_they_were_when_numbers_begin_to_be_hashed() -> None:
    rows = index()
    numbers = list(range(9_000, 0, -3))
    before = rows.rows_of([column(numbers)]).tolist()
    rows.rows_of([column([FAR])])
    assert rows.rows_of([column(numbers)]).tolist() == before == list(range(3_000))


def test_a_frozen_index_does_not_see_what_comes_later() -> None:
    rows = index()
    rows.rows_of([column([5, 3])])
    frozen = rows.freeze()
    rows.rows_of([column([4, FAR])])
    assert frozen.columns[0].take(np.arange(2)).to_pylist() == [5, 3]
    assert len(frozen.hashes) == 2
