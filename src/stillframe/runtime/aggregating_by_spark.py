"""Aggregates of Spark's, bound to the evaluator of the slot in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import DataError
from stillframe.evaluator.beside import Evaluator
from stillframe.evaluator.crossing import RowRefused
from stillframe.graph.expressions import SparkAggregate, SparkProjection
from stillframe.graph.logical import Aggregate
from stillframe.key_groups import Positions, fixed_width_values


def bound(aggregate: Aggregate, evaluator: Evaluator | None) -> Aggregate:
    """With those of its calls that Spark computes ready to be computed here."""
    return replace(aggregate, calls=tuple(_bound(each, evaluator) for each in aggregate.calls))


def _bound(call: AggregateCall, evaluator: Evaluator | None) -> AggregateCall:
    match call.parameters:
        case (SparkAggregate() as given,):
            assert evaluator is not None, f"there is no evaluator of Spark's for {given.sql}"
            return replace(call, parameters=(_Here(given, evaluator),))
        case _:
            return call


@dataclass(frozen=True)
class _Here:
    """See `state.by_spark.AggregateBySpark`."""

    _given: SparkAggregate
    _evaluator: Evaluator

    @property
    def buffers(self) -> pa.DataType:
        return self._given.buffers

    @property
    def version(self) -> str:
        return self._given.version

    def partial(self, groups: Positions, columns: Sequence[pa.Array]) -> tuple[Positions, pa.Array]:
        found, made = self._crossed(self._given.partial, groups, columns)
        return found, self._struct(made)

    def merged(self, groups: Positions, buffers: pa.Array) -> tuple[Positions, pa.Array]:
        found, made = self._crossed(self._given.merge, groups, buffers.flatten())
        return found, self._struct(made)

    def final(self, groups: Positions, buffers: pa.Array) -> tuple[Positions, pa.Array]:
        found, [values] = self._crossed(self._given.final, groups, buffers.flatten())
        return found, values

    def _struct(self, columns: Sequence[pa.Array]) -> pa.Array:
        fields = list(self._given.buffers)
        typed = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(columns, fields, strict=True)
        ]
        return pa.StructArray.from_arrays(typed, fields=fields)

    def _crossed(
        self, crossing: SparkProjection, groups: Positions, columns: Sequence[pa.Array]
    ) -> tuple[Positions, list[pa.Array]]:
        numbers = pa.array(groups.astype(np.int64, copy=False))
        try:
            found, *made = self._evaluator.columns(crossing, [numbers, *columns], len(groups))
        except RowRefused as refused:
            raise DataError(
                f"{self._given.sql} cannot be computed: {refused}; filter out such records, or"
                " guard what it reads with when(...)"
            ) from refused
        return fixed_width_values(found).astype(np.int64, copy=False), made
