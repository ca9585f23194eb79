"""Maps keys that are numbers already to dense row numbers.

Theory of operation
-------------------
Who has numbered all keys of an operator (`windows`) looks up numbers, thousands at a time and in
many small tables. Where most numbers below the highest are in a table, a column with a place for
each finds them at once; hashing takes several times as long. Where few are, such a column would be
mostly empty: then the numbers are hashed as other keys are (`key_index`). Rows stay what they were.

Rules of this file
------------------
1. Numbers are not negative and not null.
2. A number's row never changes, so what is frozen is a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.key_groups import Positions, Words, fixed_width_values, hash_columns
from stillframe.state.columns import AppendOnly, arranged, with_capacity
from stillframe.state.key_index import ArrangedKeys, FrozenKeyIndex, KeyIndex

_PLACES_MIN = 16_384
"""So many places are always worth having."""
_PLACES_PER_NUMBER_MAX = 16


class NumberIndex:
    """As `KeyIndex`, of one column of numbers."""

    def __init__(self, make_hashed: Callable[[], KeyIndex]) -> None:
        """`make_hashed` makes an empty index for when numbers are few and far between."""
        self._make_hashed = make_hashed
        self._hashed: KeyIndex | None = None
        self._places: npt.NDArray[np.int32] = np.zeros(1, dtype=np.int32)
        """Of each number its row plus one; 0: it has none."""
        self._numbers = AppendOnly(np.int64)

    def __len__(self) -> int:
        return len(self._numbers if self._hashed is None else self._hashed)

    @property
    def nbytes(self) -> int:
        if self._hashed is not None:
            return self._hashed.nbytes
        return self._places.nbytes + self._numbers.nbytes

    def rows_of(self, columns: Sequence[pa.Array], hashes: Words | None = None) -> Positions:
        """The row of each number; those not seen before get the next ones, in no order."""
        numbers = fixed_width_values(columns[0])
        self._make_room(numbers)
        if self._hashed is not None:
            return self._hashed.rows_of(columns, hashes)
        found = self._places.take(numbers)
        new = numbers[found == 0]
        if len(new):
            self._insert(new)
            found = self._places.take(numbers)
        return found.astype(np.int64) - 1

    def find(self, columns: Sequence[pa.Array], hashes: Words) -> Positions:
        """The row of each number, -1 for those that are not here."""
        if self._hashed is not None:
            return self._hashed.find(columns, hashes)
        numbers = fixed_width_values(columns[0])
        rows = self._places.take(numbers, mode="clip").astype(np.int64) - 1
        rows[numbers >= len(self._places)] = -1
        return rows

    def freeze(self) -> FrozenKeyIndex | FrozenNumbers:
        """By reference; numbers that come later do not show in it."""
        if self._hashed is not None:
            return self._hashed.freeze()
        return FrozenNumbers(self._numbers.rows)

    def _insert(self, numbers: Positions) -> None:
        tickets = np.arange(1, len(numbers) + 1, dtype=np.int32)
        self._places[numbers[::-1]] = tickets[::-1]  # of several writes to one place the last stays
        first = numbers[self._places.take(numbers) == tickets]
        self._places[first] = np.arange(1, len(first) + 1) + len(self._numbers)
        self._numbers.append(first)

    def _make_room(self, numbers: Positions) -> None:
        if self._hashed is not None:
            return
        needed = int(numbers.max(initial=0)) + 1
        if needed <= len(self._places):
            return
        if needed <= max(_PLACES_MIN, _PLACES_PER_NUMBER_MAX * (len(self) + len(numbers))):
            self._places = with_capacity(self._places, len(self._places), needed)
            return
        self._hashed = self._make_hashed()
        self._hashed.append([pa.array(self._numbers.rows)])
        self._places, self._numbers = self._places[:0], AppendOnly(np.int64)


class FrozenNumbers:
    """As `FrozenKeyIndex`."""

    def __init__(self, numbers: Positions) -> None:
        self._numbers = numbers
        self.columns = [_FrozenColumn(numbers)]

    @cached_property
    def hashes(self) -> Words:
        return hash_columns([pa.array(self._numbers)])


class _FrozenColumn:
    def __init__(self, numbers: Positions) -> None:
        self._numbers = numbers

    def take(self, rows: Positions) -> pa.Array:
        return pa.array(self._numbers.take(rows))

    def arranged(self, places: Positions) -> ArrangedKeys:
        numbers = arranged(self._numbers, places)
        return lambda start, stop: pa.array(numbers[start:stop])
