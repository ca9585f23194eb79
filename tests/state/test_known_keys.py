"""Small batches of keys that were seen before, and what has to be looked up all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stillframe.key_groups import hash_columns
from stillframe.state.known_keys import FEW_ROWS, KNOWN_BYTES_MAX, KnownKeys, Numbers


class Finder:
    """Numbers keys by their hash, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.known = KnownKeys(self.find)

    def find(self, columns: Sequence[pa.Array]) -> Numbers:
        self.asked += 1
        return hash_columns(columns).view(np.int64)

    def agrees_on(self, *columns: pa.Array) -> bool:
        return self.known.numbers_of(columns).tolist() == self.find(columns).tolist()


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None, "", "a\0", "ä", "a"]),
        pa.array([b"a", None, b"", b"a\0"]),
        pa.array([0, None, -1, 2**63 - 1, -(2**63)]),
        pa.array([2**64 - 1, 1], pa.uint64()),
        pa.array([0.0, -0.0, float("nan"), None]),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array([True, False, None]),
        pa.array([1, 2], pa.timestamp("ns")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_key_has_the_number_it_had_the_first_time(column: pa.Array) -> None:
    finder = Finder()

    assert finder.agrees_on(column)
    assert finder.agrees_on(column)
    assert finder.agrees_on(column.slice(1))
    assert finder.agrees_on(column, column)


def test_keys_that_are_all_known_are_not_looked_up() -> None:
    finder = Finder()
    finder.known.numbers_of([pa.array(["a", "b"]), pa.array([1, None])])
    finder.known.numbers_of([pa.array(["b", "a", "b"]), pa.array([None, 1, None])])
    assert finder.asked == 1

    finder.known.numbers_of([pa.array(["a", "b"]), pa.array([1, 1])])  # b was never with 1
    assert finder.asked == 2


def test_many_rows_are_looked_up_as_columns_and_not_remembered() -> None:
    finder = Finder()
    for _ in range(2):
        finder.known.numbers_of([pa.array(["a"] * (FEW_ROWS + 1))])

    assert finder.asked == 2
    assert finder.known.nbytes == 0


@pytest.mark.parametrize(
    ("batches", "size_bytes"), [(5000, 80), (60, 100_000), (1, KNOWN_BYTES_MAX + 1)]
)
def test_what_is_remembered_stays_within_its_bound(batches: int, size_bytes: int) -> None:
    finder = Finder()
    for n in range(batches):
        keys: list[Any] = [f"{n}-{place}".ljust(size_bytes // 8 + 1) for place in range(8)]
        assert finder.agrees_on(pa.array(keys))
        assert finder.known.nbytes <= KNOWN_BYTES_MAX
