"""Variance and standard deviation: how many numbers there were, their mean, and how far they are
from it, squared and summed. Two such are put together without a look at the numbers again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stillframe.key_groups import Positions, fixed_width_values
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.folding import Accumulator, Touched, non_null
from stillframe.state.key_index import fixed_width_array

MOMENTS = ("var_pop", "var_samp", "stddev_pop", "stddev_samp")
_PARTS = ("count", "mean", "squares")


class Moments(Accumulator):
    columns = (
        ColumnSpec(np.float64, 0.0),
        ColumnSpec(np.float64, 0.0),
        ColumnSpec(np.float64, 0.0),
    )

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        groups, values = non_null(touched.groups, column)
        ones, zeros = np.ones(len(values)), np.zeros(len(values))
        self._take_in(arrays, touched, groups, [ones, values.astype(np.float64), zeros])

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        others = [fixed_width_values(column) for column in columns]
        self._take_in(arrays, touched, touched.groups, others)

    def _take_in(
        self, arrays: Sequence[Array], touched: Touched, groups: Positions, others: Sequence[Array]
    ) -> None:
        """Several of them may belong to one row."""
        count, mean, squares = others
        size = len(touched.distinct)
        counts = np.bincount(groups, count, size)
        means = np.bincount(groups, count * mean, size) / np.maximum(counts, 1)
        apart = mean - means.take(groups)
        of_rows = [counts, means, np.bincount(groups, squares + count * apart * apart, size)]
        before = [array.take(touched.distinct) for array in arrays]
        for array, after in zip(arrays, self.combined(before, of_rows), strict=True):
            array[touched.distinct] = after

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        count, mean, squares = parts
        other_count, other_mean, other_squares = others
        together = count + other_count
        share = other_count / np.maximum(together, 1)
        apart = np.where(count * other_count > 0, other_mean - mean, 0.0)
        return [
            together,
            np.where(count > 0, mean + apart * share, other_mean),
            squares + other_squares + apart * apart * count * share,
        ]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        count, _, squares = parts
        is_sample = self.call.function.endswith("_samp")
        least = 1 if is_sample else 0
        variance = squares / np.maximum(count - least, 1)
        values = np.sqrt(variance) if self.call.function.startswith("stddev") else variance
        # As in Spark, a sample of one has none.
        return fixed_width_array(values, count > least, pa.float64())

    def snapshot_fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.call.name}.{part}", pa.float64()) for part in _PARTS]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        return [fixed_width_array(part, None, pa.float64()) for part in parts]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [fixed_width_values(column) for column in columns]
