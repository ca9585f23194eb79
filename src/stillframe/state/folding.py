"""What an aggregate is to a table of them: columns, and how a batch is folded into these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import Positions, fixed_width_values, validity
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.key_index import fixed_width_array


class Touched:
    """The rows of a table that a batch touches."""

    def __init__(self, rows: Positions, scratch: npt.NDArray[np.int32]) -> None:
        """`scratch` has a place for every row of the table; what it holds does not matter."""
        self.rows = rows
        """The row of each record."""
        self._scratch = scratch
        order = np.arange(len(rows), dtype=np.int32)
        scratch[rows[::-1]] = order[::-1]  # of several writes to one row the last stays
        self.first_records: Positions = np.flatnonzero(scratch.take(rows) == order)
        """The record in which each touched row appears first."""
        self.distinct: Positions = rows.take(self.first_records)
        """Each touched row once, in the order of first appearance."""
        self._groups: Positions | None = None

    @property
    def groups(self) -> Positions:
        """For each record, the place of its row in `distinct`."""
        if self._groups is None:
            self._scratch[self.distinct] = np.arange(len(self.distinct), dtype=np.int32)
            self._groups = self._scratch.take(self.rows).astype(np.int64)
        return self._groups


class Accumulator(ABC):
    """One aggregate call: its columns, how a batch is folded in, and what comes out."""

    columns: tuple[ColumnSpec, ...]

    def __init__(self, call: AggregateCall) -> None:
        self.call = call

    @property
    def held_bytes(self) -> int:
        """What is held outside of the columns, as far as it is counted."""
        return 0

    @abstractmethod
    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        """Take a batch's values into the columns."""

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        """Take what other records have accumulated, as `to_snapshot` gives it, into the columns.

        Where the aggregate is one value, that is the aggregate of such values.
        """
        self.fold(arrays, touched, columns[0])

    @abstractmethod
    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        """Row by row what two have accumulated together; neither is changed.

        The former is of earlier records than the latter, as far as anybody knows.
        """

    def input_of(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The column this aggregate reads; None if it reads none."""
        return None if self.call.input is None else batch.column(self.call.input)

    @abstractmethod
    def result(self, parts: Sequence[Array]) -> pa.Array:
        """The aggregate's value for rows whose columns are given."""

    def snapshot_fields(self) -> list[pa.Field]:
        return [pa.field(self.call.name, self.call.type)]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        return [self.result(parts)]

    def empty(self, count: int) -> list[pa.Array]:
        """What a snapshot has of so many rows of which no value has come yet."""
        return self.to_snapshot([np.full(count, s.initial, dtype=s.dtype) for s in self.columns])

    @abstractmethod
    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        """The columns' values, the reverse of `to_snapshot`."""


class ValueOrNull(Accumulator):
    """Keeps one value per row and whether there has been a non-null one."""

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        return [self.both(parts[0], others[0]), parts[1] | others[1]]

    @abstractmethod
    def both(self, values: Array, others: Array) -> Array:
        """The aggregate of both; where there has been no value, one is what a row begins with."""

    def result(self, parts: Sequence[Array]) -> pa.Array:
        values, seen = parts
        return fixed_width_array(values, seen, self.call.type)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        seen = np.asarray(columns[0].is_valid())
        return [np.where(seen, fixed_width_values(columns[0]), self.columns[0].initial), seen]

    def mark_seen(self, seen: Array, touched: Touched, rows: Positions) -> None:
        """These rows, which are all touched ones where there are no nulls, have had a value."""
        rows = touched.distinct if rows is touched.rows else rows
        if not seen.take(rows).all():
            seen[rows] = True


def non_null(places: Positions, column: pa.Array | None) -> tuple[Positions, Array]:
    """The values that are not null, and where each belongs."""
    assert column is not None
    values, valid = fixed_width_values(column), validity(column)
    return (places, values) if valid is None else (places[valid], values[valid])
