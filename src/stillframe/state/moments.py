"""Variance, skewness, covariance and their like: how many numbers there were, their means, and
powers of how far they are from these, summed. Two such are put together without a look at the
numbers again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from stillframe.key_groups import Positions, fixed_width_values
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.folding import Accumulator, Touched, non_null
from stillframe.state.key_index import fixed_width_array

_Final = Callable[[Sequence[Array]], tuple[Array, Array]]
"""Of what has been accumulated the values, and where there are any."""


class _Moments(Accumulator):
    """A count, then means, then sums about the means; all are doubles."""

    parts: tuple[str, ...]
    """What they are called in snapshots."""
    mean_count: int
    finals: dict[str, _Final]

    @abstractmethod
    def about(self, parts: Sequence[Array], means: Sequence[Array]) -> list[Array]:
        """The sums, about other means than their own."""

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:  # type: ignore[override]
        return tuple(ColumnSpec(np.float64, 0.0) for _ in self.parts)

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        others = self.from_snapshot(columns)
        some = others[0] > 0
        self._take_in(arrays, touched, touched.groups[some], [other[some] for other in others])

    def fold_numbers(
        self, arrays: Sequence[Array], touched: Touched, groups: Positions, numbers: list[Array]
    ) -> None:
        count = len(groups)
        sums = [np.zeros(count) for _ in self.parts[1 + self.mean_count :]]
        means = [each.astype(np.float64) for each in numbers]
        self._take_in(arrays, touched, groups, [np.ones(count), *means, *sums])

    def _take_in(
        self, arrays: Sequence[Array], touched: Touched, groups: Positions, others: Sequence[Array]
    ) -> None:
        """Several of them may belong to one row; each is of one number or more."""
        size = len(touched.distinct)
        count = others[0]
        counts = np.bincount(groups, count, size)
        means = []
        for mean in self._means(others):
            # Seen from one of the numbers: where all are the same, nothing is rounded.
            near = np.zeros(size)
            near[groups] = mean
            further = np.bincount(groups, count * (mean - near.take(groups)), size)
            means.append(near + further / np.maximum(counts, 1))
        sums = self.about(others, [mean.take(groups) for mean in means])
        of_rows = [counts, *means, *(np.bincount(groups, each, size) for each in sums)]
        before = [array.take(touched.distinct) for array in arrays]
        for array, after in zip(arrays, self.combined(before, of_rows), strict=True):
            array[touched.distinct] = after

    def _means(self, parts: Sequence[Array]) -> Sequence[Array]:
        return parts[1 : 1 + self.mean_count]

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        count, other_count = parts[0], others[0]
        together = count + other_count
        share = other_count / np.maximum(together, 1)
        means = []
        for mean, other in zip(self._means(parts), self._means(others), strict=True):
            apart = np.where(count * other_count > 0, other - mean, 0.0)
            means.append(np.where(count > 0, mean + apart * share, other))
        sums = zip(self.about(parts, means), self.about(others, means), strict=True)
        return [together, *means, *(one + other for one, other in sums)]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        with np.errstate(all="ignore"):
            values, valid = self.finals[self.call.function](parts)
        return fixed_width_array(values, valid, pa.float64())

    def snapshot_fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.call.name}.{part}", pa.float64()) for part in self.parts]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        return [fixed_width_array(part, None, pa.float64()) for part in parts]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [fixed_width_values(column) for column in columns]


class Moments(_Moments):
    """Of one column: variance, standard deviation."""

    parts: tuple[str, ...] = ("count", "mean", "squares")
    mean_count = 1

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        groups, values = non_null(touched.groups, column)
        self.fold_numbers(arrays, touched, groups, [values])

    def about(self, parts: Sequence[Array], means: Sequence[Array]) -> list[Array]:
        count, mean, squares = parts
        apart = mean - means[0]
        return [squares + count * apart * apart]

    # As in Spark, a sample of one has no variance.
    finals = {  # noqa: RUF012
        "var_pop": lambda p: (p[2] / np.maximum(p[0], 1), p[0] > 0),
        "var_samp": lambda p: (p[2] / np.maximum(p[0] - 1, 1), p[0] > 1),
        "stddev_pop": lambda p: (np.sqrt(p[2] / np.maximum(p[0], 1)), p[0] > 0),
        "stddev_samp": lambda p: (np.sqrt(p[2] / np.maximum(p[0] - 1, 1)), p[0] > 1),
        "squares": lambda p: (p[2], p[0] > 0),
    }


class HigherMoments(Moments):
    """Skewness and kurtosis. Where all numbers are the same there is none."""

    parts = ("count", "mean", "squares", "cubes", "fourths")

    def about(self, parts: Sequence[Array], means: Sequence[Array]) -> list[Array]:
        count, mean, squares, cubes, fourths = parts
        apart = mean - means[0]
        square = apart * apart
        return [
            squares + count * square,
            cubes + 3 * apart * squares + count * apart * square,
            fourths + 4 * apart * cubes + 6 * square * squares + count * square * square,
        ]

    finals = {  # noqa: RUF012
        "skewness": lambda p: (np.sqrt(p[0]) * p[3] / np.sqrt(p[2] * p[2] * p[2]), _varied(p)),
        "kurtosis": lambda p: (p[0] * p[4] / (p[2] * p[2]) - 3.0, _varied(p)),
    }


def _varied(parts: Sequence[Array]) -> Array:
    varied: Array = (parts[0] > 0) & (parts[2] != 0)
    return varied


class PairMoments(_Moments):
    """Of two columns: covariance, correlation and regression, which is of the first by the second.

    A record in which one of them is null does not count.
    """

    parts = ("count", "mean1", "mean2", "squares1", "squares2", "products")
    mean_count = 2

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        one, other = column.flatten()
        groups, numbers = touched.groups, [fixed_width_values(each) for each in (one, other)]
        valid = np.asarray(one.is_valid()) & np.asarray(other.is_valid())
        if not valid.all():
            groups, numbers = groups[valid], [each[valid] for each in numbers]
        self.fold_numbers(arrays, touched, groups, numbers)

    def about(self, parts: Sequence[Array], means: Sequence[Array]) -> list[Array]:
        count, mean1, mean2, squares1, squares2, products = parts
        apart1, apart2 = mean1 - means[0], mean2 - means[1]
        return [
            squares1 + count * apart1 * apart1,
            squares2 + count * apart2 * apart2,
            products + count * apart1 * apart2,
        ]

    finals = {  # noqa: RUF012
        "covar_pop": lambda p: (p[5] / np.maximum(p[0], 1), p[0] > 0),
        "covar_samp": lambda p: (p[5] / np.maximum(p[0] - 1, 1), p[0] > 1),
        "corr": lambda p: (p[5] / np.sqrt(p[3] * p[4]), (p[0] > 1) & (p[3] * p[4] != 0)),
        "regr_r2": lambda p: (_determination(p), p[4] != 0),
        "regr_sxy": lambda p: (p[5], p[0] > 0),
        "regr_slope": lambda p: (p[5] / p[4], p[4] != 0),
        "regr_intercept": lambda p: (p[1] - p[5] / p[4] * p[2], p[4] != 0),
    }


def _determination(parts: Sequence[Array]) -> Array:
    correlation = parts[5] / np.sqrt(parts[3] * parts[4])
    return np.where(parts[3] == 0, 1.0, correlation * correlation)


MOMENTS = {
    function: kind for kind in (Moments, HigherMoments, PairMoments) for function in kind.finals
}
