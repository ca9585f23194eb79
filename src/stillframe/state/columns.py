"""Columns that grow: append-only ones for keys, and changing ones that can be frozen.

Theory of operation: the working layout of a column is one contiguous numpy array, so that a whole
batch is looked up, added and read in single numpy calls; a list of chunks would
cost a Python loop over the chunks per batch. Freezing takes references only. A frozen view shares
the array with the living column, divided in thought into chunks of 65,536 rows: before the first
change to a chunk after the freeze, its old contents are copied aside for the view. When a column
outgrows its array, the old array is left to the views as it is, which preserves all of it at once.

Rules of this file:
- one thread (the loop) changes columns; any one thread may read a frozen view. The lock is held
  for one chunk at a time: both sides may copy the same chunk at the same moment;
- an append-only column needs none of this: rows that exist never change.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stillframe.key_groups import Positions

Array = npt.NDArray[Any]

CHUNK_ROWS_LOG2 = 16
CHUNK_ROWS = 1 << CHUNK_ROWS_LOG2
_FIRST_CAPACITY = 1024


def with_capacity(array: Array, used: int, needed: int) -> Array:
    """The array itself if `needed` fit; otherwise a copy of what is used, with room to double."""
    if needed <= len(array):
        return array
    # zeros, not empty: the pages beyond `used` are then not touched until they are needed.
    grown = np.zeros(max(needed, 2 * len(array), _FIRST_CAPACITY), dtype=array.dtype)
    grown[:used] = array[:used]
    return grown


def arranged(values: Array, places: Positions) -> Array:
    """Each value at its place; the places are all different and leave no gap.

    Where places are those of key groups, in which rows keep their order, the values are read one
    after the other, and each group's are written so. To `take` them in the order of key groups
    reads a line of the cache for every single one, beside a loop that needs the cache itself.
    """
    moved = np.empty_like(values)
    moved[places] = values
    return moved


def runs(starts: Positions, lengths: Positions) -> Positions:
    """The positions of several runs, one run after the other."""
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return shift + np.arange(len(shift))


class AppendOnly:
    """A growing array whose rows never change; a frozen view of it is the array and a length."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: Array = np.zeros(0, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Array:
        """All rows so far; later appends never show in it."""
        return self._array[: self._length]

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def rows_and_padding(self, padding_rows: int) -> Array:
        """All rows so far and at least so many more, whatever they hold."""
        self._array = with_capacity(self._array, self._length, self._length + padding_rows)
        return self._array

    def append(self, values: Array) -> None:
        end = self._length + len(values)
        self._array = with_capacity(self._array, self._length, end)
        self._array[self._length : end] = values
        self._length = end


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A changing column: its type, and what a new row holds."""

    dtype: npt.DTypeLike
    initial: Any


class ChangingColumns:
    """Columns with the same rows, changed in place by one thread, frozen as a whole."""

    def __init__(self, specs: Sequence[ColumnSpec]) -> None:
        self._specs = tuple(specs)
        self.arrays: list[Array] = [np.zeros(0, dtype=spec.dtype) for spec in specs]
        self._length = 0
        self._lock = threading.Lock()
        self._views: list[FrozenColumns] = []
        """Those that still share a chunk with the living arrays."""

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def extend_to(self, length: int) -> None:
        """Make the rows up to `length` exist, with their initial values."""
        if length <= self._length:
            return
        if any(length > len(array) for array in self.arrays):
            self._grow(length)
        for spec, array in zip(self._specs, self.arrays, strict=True):
            array[self._length : length] = spec.initial
        self._length = length

    def before_change(self, rows: Positions) -> None:
        """Copy aside what frozen views still share; to be called before these rows are changed."""
        if not self._views:
            return
        touched = np.zeros((self._length >> CHUNK_ROWS_LOG2) + 1, dtype=np.bool_)
        touched[rows >> CHUNK_ROWS_LOG2] = True
        for chunk in np.flatnonzero(touched).tolist():
            self._copy_aside(chunk)
        self._views = [view for view in self._views if view.shares_chunks()]

    def freeze(self) -> FrozenColumns:
        view = FrozenColumns(tuple(self.arrays), self._length, self._lock)
        self._views.append(view)
        return view

    def _grow(self, length: int) -> None:
        with self._lock:
            self.arrays = [with_capacity(array, self._length, length) for array in self.arrays]
            for view in self._views:
                view.keep_shared_arrays()
            self._views = []

    def _copy_aside(self, chunk: int) -> None:
        with self._lock:
            sharing = [view for view in self._views if view.shares(chunk)]
            if not sharing:
                return
            start = chunk << CHUNK_ROWS_LOG2
            copies = tuple(array[start : start + CHUNK_ROWS].copy() for array in self.arrays)
            for view in sharing:
                view.keep(chunk, copies)


class FrozenColumns:
    """The columns as they were; read by any one thread while the living ones go on changing."""

    def __init__(self, arrays: tuple[Array, ...], length: int, lock: threading.Lock) -> None:
        self._arrays = arrays
        self._length = length
        self._lock = lock
        self._kept: list[tuple[Array, ...] | None] = [None] * -(-length >> CHUNK_ROWS_LOG2)
        self._chunks_shared = len(self._kept)

    def __len__(self) -> int:
        return self._length

    @property
    def chunk_count(self) -> int:
        return len(self._kept)

    def chunk(self, chunk: int) -> tuple[Array, ...]:
        """The rows of one chunk, of every column; never changed afterwards."""
        start = chunk << CHUNK_ROWS_LOG2
        rows = min(CHUNK_ROWS, self._length - start)
        with self._lock:
            kept = self._kept[chunk]
            if kept is None:
                kept = tuple(array[start : start + rows] for array in self._arrays)
                if self._chunks_shared:
                    kept = tuple(part.copy() for part in kept)
                    self._keep(chunk, kept)
        return tuple(part[:rows] for part in kept)

    def whole(self) -> list[Array]:
        """All rows of every column."""
        whole = [np.empty(self._length, dtype=array.dtype) for array in self._arrays]
        start = 0
        for chunk in range(self.chunk_count):
            parts = self.chunk(chunk)
            for column, part in zip(whole, parts, strict=True):
                column[start : start + len(part)] = part
            start += len(parts[0]) if parts else 0
        return whole

    def arranged(self, places: Positions) -> list[Array]:
        """As `whole`, with each row at its place."""
        moved = [np.empty(self._length, dtype=array.dtype) for array in self._arrays]
        for chunk in range(self.chunk_count):
            start = chunk << CHUNK_ROWS_LOG2
            for column, part in zip(moved, self.chunk(chunk), strict=True):
                column[places[start : start + len(part)]] = part
        return moved

    def release(self) -> None:
        """Give the memory back; nothing is copied for this view any more. May be called twice."""
        with self._lock:
            self._arrays = ()
            self._kept = []
            self._length = 0
            self._chunks_shared = 0

    # --- called by ChangingColumns, which holds the lock where it matters

    def shares_chunks(self) -> bool:
        return self._chunks_shared > 0

    def shares(self, chunk: int) -> bool:
        return bool(self._chunks_shared) and chunk < len(self._kept) and self._kept[chunk] is None

    def keep(self, chunk: int, copies: tuple[Array, ...]) -> None:
        self._keep(chunk, copies)

    def keep_shared_arrays(self) -> None:
        """The living columns have moved to other arrays: what was shared is this view's alone."""
        self._chunks_shared = 0

    def _keep(self, chunk: int, copies: tuple[Array, ...]) -> None:
        self._kept[chunk] = copies
        self._chunks_shared -= 1
