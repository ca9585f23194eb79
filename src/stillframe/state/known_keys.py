"""What was found out of keys before, for batches that are too small for columns to pay.

Theory of operation: looking up a column takes some fifty calls of Arrow and NumPy, whether it has
a dozen rows or a thousand; at a low rate, where a batch has a dozen rows, that was a third of an
operator's time. So what was answered for a key is remembered by the key itself, as a Python object,
and a small batch whose keys are all known takes one look each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.key_groups import is_binary, is_text

FEW_ROWS = 256
"""Batches of more rows are looked up as columns. Strings of 20 bytes, 1,000 different ones, in
µs for a batch in an index: 17 known and 244 as columns for 128 rows, 61 and 310 for 512, 486 and
636 for 4,096; numbers: 13 and 22, 45 and 25, 353 and 57."""
KNOWN_BYTES_MAX = 4 * 1024 * 1024
"""All are forgotten when they would take more."""
_KEY_BYTES = 150
"""What one takes beside its bytes, about."""

Numbers = npt.NDArray[Any]
Find = Callable[[Sequence[pa.Array]], Numbers]


class KnownKeys:
    """Asks `find` for the number of each key; it must always answer the same for one key."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[Any, int] = {}
        self.nbytes = 0
        """About, and never too little: a key that comes with new ones is counted once more."""

    def numbers_of(self, columns: Sequence[pa.Array]) -> Numbers:
        if not columns or len(columns[0]) > FEW_ROWS or not all(map(_is_plain, columns)):
            return self._find(columns)
        keys = _keys_in(columns)
        known = list(map(self._known.get, keys))
        if None not in known:
            return np.array(known, dtype=np.int64)
        found = self._find(columns)
        self._remember(keys, found, sum(column.nbytes for column in columns))
        return found

    def _remember(self, keys: Sequence[Any], found: Numbers, size_bytes: int) -> None:
        size_bytes += _KEY_BYTES * len(keys)
        if self.nbytes + size_bytes > KNOWN_BYTES_MAX:
            self._known.clear()
            self.nbytes = 0
        if size_bytes <= KNOWN_BYTES_MAX:
            self._known.update(zip(keys, found.tolist(), strict=True))
            self.nbytes += size_bytes


def _is_plain(column: pa.Array) -> bool:
    """Whether keys are equal exactly if their Python objects are.

    That is not so of floats (0.0 and -0.0, NaN), and times in nanoseconds have no such objects.
    """
    kind = column.type
    return bool(pt.is_integer(kind) or is_text(kind) or is_binary(kind))


def _keys_in(columns: Sequence[pa.Array]) -> Sequence[Any]:
    if len(columns) == 1:
        keys: list[Any] = columns[0].to_pylist()
        return keys
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
