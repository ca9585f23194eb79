"""Aggregates that have no form of ours: Spark's own code computes them, a batch at a time.

Theory of operation: each row keeps what Spark has accumulated, in Spark's own form, as a Python
object that nobody changes: None before the first record, a dict of Spark's buffers after. A batch
goes to Spark once, which makes such buffers of its records, and a second time together with the
buffers that the touched rows have already, which Spark merges. What a snapshot has is one column of
structs. It has Spark's version in its name, because another version may not read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import Positions
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.folding import Accumulator, Touched


class AggregateBySpark(Protocol):
    """What Spark makes of rows that have the number of a group; in any order of groups."""

    @property
    def buffers(self) -> pa.DataType: ...

    @property
    def version(self) -> str: ...

    def partial(self, groups: Positions, columns: Sequence[pa.Array]) -> tuple[Positions, pa.Array]:
        """Of records; the last column says which of them count. Every group has its buffers."""
        ...

    def merged(self, groups: Positions, buffers: pa.Array) -> tuple[Positions, pa.Array]: ...

    def final(self, groups: Positions, buffers: pa.Array) -> tuple[Positions, pa.Array]: ...


class BySpark(Accumulator):
    """Reads structs of what the aggregate reads, and of whether the record counts."""

    columns = (ColumnSpec(np.object_, None),)

    def __init__(self, call: AggregateCall, input_type: pa.DataType) -> None:
        super().__init__(call)
        self._spark: AggregateBySpark
        [self._spark] = call.parameters
        self._input_type = input_type

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        if not len(column):
            return
        groups, buffers = self._spark.partial(touched.groups, column.flatten())
        self._take_in(arrays[0], touched.distinct.take(groups), buffers)

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        there = np.asarray(columns[0].is_valid())
        self._take_in(arrays[0], touched.rows[there], columns[0].filter(pa.array(there)))

    def _take_in(self, held: Array, rows: Positions, buffers: pa.Array) -> None:
        touched, places = np.unique(rows, return_inverse=True)
        before = held.take(touched)
        known = np.flatnonzero(_is_there(before))
        if len(known) or len(touched) < len(rows):
            both = pa.concat_arrays([self._array(before[known]), buffers])
            groups, buffers = self._spark.merged(np.concatenate([known, places]), both)
            rows = touched.take(groups)
        held[rows] = _objects(buffers)

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        one, other = parts[0].reshape(-1), others[0].reshape(-1)
        is_in_one, is_in_other = _is_there(one), _is_there(other)
        made = np.where(is_in_one, one, other)
        both = np.flatnonzero(is_in_one & is_in_other)
        if len(both):
            groups = np.concatenate([both, both])
            buffers = pa.concat_arrays([self._array(one[both]), self._array(other[both])])
            groups, buffers = self._spark.merged(groups, buffers)
            made[groups] = _objects(buffers)
        return [made.reshape(parts[0].shape)]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        held = parts[0]
        if not len(held):
            return pa.array([], self.call.type)
        if not _is_there(held).all():
            held = np.where(_is_there(held), held, self._nothing())
        groups, values = self._spark.final(np.arange(len(held)), self._array(held))
        return values.take(pa.array(np.argsort(groups))).cast(self.call.type)

    def _nothing(self) -> Array:
        """What Spark has accumulated of no record."""
        *values, _ = self._input_type
        columns = [pa.nulls(1, each.type) for each in values]
        groups, buffers = self._spark.partial(np.zeros(1, np.int64), [*columns, pa.array([False])])
        assert len(groups) == 1
        return _objects(buffers)

    def snapshot_fields(self) -> list[pa.Field]:
        name = f"{self.call.name}.of Spark {self._spark.version}"
        return [pa.field(name, self._spark.buffers)]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        return [self._array(parts[0])]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [_objects(columns[0])]

    def _array(self, held: Array) -> pa.Array:
        return pa.array(held.tolist(), self._spark.buffers)


def _is_there(held: Array) -> Array:
    return np.fromiter((each is not None for each in held.tolist()), np.bool_, len(held))


def _objects(buffers: pa.Array) -> Array:
    return np.fromiter(buffers.to_pylist(), np.object_, len(buffers))
