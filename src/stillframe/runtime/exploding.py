"""Several rows of one: `explode(...)`, as Spark's Generate makes them, and Spark's Expand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.graph.expressions import Expression, Named, names_in
from stillframe.runtime.expressions import evaluate, project
from stillframe.runtime.row_functions import Batches

_ROWS_MIN, _ROWS_MAX = 1 << 16, 1 << 19
"""Of one batch that comes out, but for what one row gives alone. The more of them an aggregate's
sender sees at once, the fewer rows it sends; between the two, memory decides."""
_BYTES_MAX = 8 << 20
_Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exploding:
    """For `MapInArrow`: each row's own columns beside each element of an array of its, or beside
    the key and the value of each entry of a map.
    """

    expression: Expression
    own: tuple[str | None, ...]
    """The columns that come in and go out again, which are the first; None: nobody looks at what is
    in its place, which is null."""
    with_position: bool
    """`posexplode`: a column with the element's place comes first."""
    is_outer: bool
    """Whether a row without elements, or without the array, comes out once, with nulls."""
    schema: pa.Schema
    inlines: bool = False
    """`inline`: the fields of an element, which is a struct, are columns."""

    def reads(self, wanted: Collection[str]) -> set[str]:
        own = self.emitting(wanted).own
        return {name for name in own if name is not None} | names_in(self.expression)

    def emitting(self, wanted: Collection[str]) -> Exploding:
        names = zip(self.own, self.schema.names, strict=False)
        return replace(self, own=tuple(name if made in wanted else None for name, made in names))

    def __call__(self, batches: Batches) -> Batches:
        for batch in batches:
            arrays = _as_lists(evaluate(self.expression, batch))
            lengths = np.asarray(pc.fill_null(pc.list_value_length(arrays), 0), np.int64)
            rows = np.maximum(lengths, 1) if self.is_outer else lengths
            own = batch.select([name for name in self.own if name is not None])
            for start, stop in _pieces(rows, _rows_at_once(own, arrays, rows)):
                yield self._exploded(
                    own.slice(start, stop - start),
                    arrays.slice(start, stop - start),
                    lengths[start:stop],
                    rows[start:stop],
                )

    def _exploded(
        self, own: pa.RecordBatch, arrays: pa.Array, lengths: _Lengths, rows: _Lengths
    ) -> pa.RecordBatch:
        elements = arrays.flatten()
        is_void = np.repeat(lengths == 0, rows) if self.is_outer else np.zeros(0, np.bool_)
        if is_void.any():
            # Where a void row stands, no element is taken: the others move up.
            elements = elements.take(pa.array(np.cumsum(~is_void) - 1, mask=is_void))
        made = [elements]
        if self.inlines or pa.types.is_map(self.expression.type):
            fields = range(elements.type.num_fields)
            made = [pc.struct_field(elements, [place]) for place in fields]
        if self.with_position:
            places = np.arange(len(elements)) - np.repeat(np.cumsum(rows) - rows, rows)
            made.insert(
                0, pa.array(places.astype(np.int32), mask=is_void if len(is_void) else None)
            )
        columns = [*self._repeated(own, rows), *made]
        return pa.RecordBatch.from_arrays(
            [
                column if column.type == field.type else column.cast(field.type)
                for column, field in zip(columns, self.schema, strict=True)
            ],
            schema=self.schema,
        )

    def _repeated(self, own: pa.RecordBatch, rows: _Lengths) -> Iterator[pa.Array]:
        """Each row's own columns as often as it comes out."""
        if own.num_columns:
            parents = pa.array(np.repeat(np.arange(len(rows)), rows))
        for name, field in zip(self.own, self.schema, strict=False):
            if name is None:
                yield pa.nulls(int(rows.sum()), field.type)
            else:
                yield own.column(name).take(parents)


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


def _rows_at_once(own: pa.RecordBatch, arrays: pa.Array, rows: _Lengths) -> int:
    """How many rows may come out in one batch."""
    coming = max(1, int(rows.sum()))
    row_bytes = own.nbytes / max(1, len(rows)) + arrays.nbytes / coming
    return int(min(max(_BYTES_MAX / max(row_bytes, 1.0), _ROWS_MIN), _ROWS_MAX))


def _pieces(rows: _Lengths, rows_max: int) -> Iterator[tuple[int, int]]:
    """Slices of the batch of which not too much comes out at once."""
    ends = np.cumsum(rows)
    start, before = 0, 0
    while start < len(rows):
        stop = max(int(np.searchsorted(ends, before + rows_max, "right")), start + 1)
        yield start, stop
        start, before = stop, int(ends[stop - 1])
