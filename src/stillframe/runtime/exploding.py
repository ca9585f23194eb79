"""Several rows of one: `explode(...)`, as Spark's Generate makes them, and Spark's Expand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.graph.expressions import Expression, Named
from stillframe.runtime.expressions import evaluate, project
from stillframe.runtime.row_functions import Batches

_ROWS_MAX = 1 << 16
"""Of one batch that comes out, but for what one row gives alone."""


@dataclass(frozen=True, slots=True)
class Exploding:
    """For `MapInArrow`: each row's own columns beside each element of an array of its, or beside
    the key and the value of each entry of a map.

    Columns that come in behind the row's own, for the expression to read, do not come out.
    """

    expression: Expression
    with_position: bool
    """`posexplode`: a column with the element's place comes first."""
    is_outer: bool
    """Whether a row without elements, or without the array, comes out once, with nulls."""
    schema: pa.Schema
    inlines: bool = False
    """`inline`: the fields of an element, which is a struct, are columns."""

    def __call__(self, batches: Batches) -> Batches:
        for batch in batches:
            arrays = _as_lists(evaluate(self.expression, batch))
            lengths = np.asarray(pc.fill_null(pc.list_value_length(arrays), 0), np.int64)
            rows = np.maximum(lengths, 1) if self.is_outer else lengths
            for start, stop in _pieces(rows):
                yield self._exploded(
                    batch.slice(start, stop - start),
                    arrays.slice(start, stop - start),
                    lengths[start:stop],
                    rows[start:stop],
                )

    def _exploded(
        self,
        batch: pa.RecordBatch,
        arrays: pa.Array,
        lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
        rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> pa.RecordBatch:
        parents = np.repeat(np.arange(len(rows)), rows)
        places = np.arange(len(parents)) - np.repeat(np.cumsum(rows) - rows, rows)
        is_void = np.repeat(lengths == 0, rows)
        # Where a void row stands, no element is taken: the others move up.
        taken = pa.array(np.cumsum(~is_void) - 1, mask=is_void)
        elements = arrays.flatten().take(taken)
        made = [elements]
        if self.inlines or pa.types.is_map(self.expression.type):
            fields = range(elements.type.num_fields)
            made = [pc.struct_field(elements, [place]) for place in fields]
        if self.with_position:
            made.insert(0, pa.array(places.astype(np.int32), mask=is_void))
        own_columns = batch.columns[: len(self.schema) - len(made)]
        own = [column.take(pa.array(parents)) for column in own_columns]
        columns = [
            column.cast(field.type)
            for column, field in zip([*own, *made], self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _as_lists(arrays: pa.Array) -> pa.Array:
    """A map is a list of its entries."""
    if not pa.types.is_map(arrays.type):
        return arrays
    entries = pa.StructArray.from_arrays([arrays.keys, arrays.items], ["key", "value"])
    offsets = np.asarray(arrays.offsets)
    lists = pa.ListArray.from_arrays(pa.array(offsets), entries)
    if not arrays.null_count:
        return lists
    return pc.if_else(arrays.is_valid(), lists, pa.scalar(None, lists.type))


@dataclass(frozen=True, slots=True)
class Expanding:
    """For `MapInArrow`: each row several times over, with columns that are computed of it."""

    rows: tuple[tuple[Named, ...], ...]
    schema: pa.Schema

    def __call__(self, batches: Batches) -> Batches:
        for batch in batches:
            for columns in self.rows:
                yield project(columns, batch, self.schema)


def _pieces(
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Iterator[tuple[int, int]]:
    """Slices of the batch of which not too much comes out at once."""
    ends = np.cumsum(rows)
    start, before = 0, 0
    while start < len(rows):
        stop = max(int(np.searchsorted(ends, before + _ROWS_MAX, "right")), start + 1)
        yield start, stop
        start, before = stop, int(ends[stop - 1])
