"""approx_count_distinct: Spark's own sketch of Spark's own hashes, so that the number is the same.

Theory of operation: HyperLogLog++. A value's hash of 64 bits chooses by its first bits one of 2**p
registers, which keeps the longest run of zeros that the other bits have begun with. How many
registers are still zero, and how high the others are, tells how many values there may have been;
what that is known to be off by at each estimate is in tables, which come with the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.folding import Accumulator, Touched
from stillframe.state.xxhash import xxhash64

_SEED = 42
_NEAREST = 6
_ROWS_AT_ONCE = 4_096
_WITH_TABLES_MAX = 18
_ZEROS = 2.0 ** -np.arange(65)


class ApproximateCount(Accumulator):
    def __init__(self, call: AggregateCall, _: pa.DataType) -> None:
        super().__init__(call)
        self._bits, self._threshold, estimates, biases = call.parameters
        self._size = 1 << self._bits
        self._estimates, self._biases = np.array(estimates), np.array(biases)
        empty = np.zeros(self._size, np.uint8)
        self.columns = (ColumnSpec(np.dtype((np.void, self._size)), np.void(empty.tobytes())),)

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        rows = touched.rows
        if column.null_count:
            rows, column = rows[np.asarray(column.is_valid())], column.drop_null()
        if not len(rows):
            return
        hashes = xxhash64(column, _SEED)
        register = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        rest = hashes << np.uint64(self._bits) | np.uint64(1 << self._bits - 1)
        np.maximum.at(
            self._registers(arrays[0]).reshape(-1),
            rows * self._size + register,
            (_leading_zeros(rest) + 1).astype(np.uint8),
        )

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        [others] = self.from_snapshot(columns)
        np.maximum.at(self._registers(arrays[0]), touched.rows, self._registers(others))

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        higher = np.maximum(self._registers(parts[0]), self._registers(others[0]))
        return [higher.reshape(-1).view(self.columns[0].dtype).reshape(parts[0].shape)]

    def _registers(self, column: Array) -> Array:
        return np.ascontiguousarray(column).view(np.uint8).reshape(-1, self._size)

    def result(self, parts: Sequence[Array]) -> pa.Array:
        registers = self._registers(parts[0])
        begins = range(0, len(registers), _ROWS_AT_ONCE)
        made = [self._estimated(registers[begin : begin + _ROWS_AT_ONCE]) for begin in begins]
        return pa.array(np.concatenate([np.zeros(0, np.int64), *made]))

    def _estimated(self, registers: Array) -> Array:
        size = self._size
        alpha = {4: 0.673, 5: 0.697, 6: 0.709}.get(self._bits, 0.7213 / (1.0 + 1.079 / size))
        raw = alpha * size * size / _ZEROS.take(registers).sum(axis=1)
        empty = np.count_nonzero(registers == 0, axis=1)
        linear = size * np.log(size / np.maximum(empty, 1))
        has_tables = self._bits <= _WITH_TABLES_MAX
        is_small = (linear <= self._threshold) & has_tables | (raw <= 2.5 * size)
        counted = np.where((empty > 0) & is_small, linear, raw)
        biased = np.flatnonzero(~((empty > 0) & is_small) & (raw < 5.0 * size) & has_tables)
        counted[biased] -= self._bias(raw[biased])
        rounded: Array = np.floor(counted + 0.5).astype(np.int64)
        return rounded

    def _bias(self, raw: Array) -> Array:
        """The mean of what the nearest estimates are off by."""
        count = len(self._estimates)
        low = np.maximum(np.searchsorted(self._estimates, raw) - _NEAREST + 1, 0)
        high = np.minimum(low + _NEAREST, count)
        while True:
            nearer = np.abs(raw - self._estimates[np.minimum(high, count - 1)]) < np.abs(
                raw - self._estimates[low]
            )
            moved = (high < count) & nearer
            if not moved.any():
                break
            low, high = low + moved, high + moved
        sums = np.append(0.0, np.cumsum(self._biases))
        biases: Array = (sums[high] - sums[low]) / (high - low)
        return biases

    def snapshot_fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.call.name}.registers", pa.binary())]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        data = pa.py_buffer(self._registers(parts[0]).tobytes())
        made = pa.Array.from_buffers(pa.binary(self._size), len(parts[0]), [None, data])
        return [made.cast(pa.binary())]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        made = columns[0].cast(pa.binary(self._size))
        dtype, start = self.columns[0].dtype, made.offset * self._size
        return [np.frombuffer(made.buffers()[1], dtype, len(made), start)]


def _leading_zeros(words: Array) -> Array:
    """Of each word of 64 bits; none is 0."""
    zeros = np.zeros(len(words), np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        is_small = words >> np.uint64(64 - shift) == 0
        zeros[is_small] += shift
        words = np.where(is_small, words << np.uint64(shift), words)
    return zeros
