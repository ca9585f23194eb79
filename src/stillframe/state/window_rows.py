"""The rows that windows emit: the window, the keys, the aggregates.

Theory of operation
-------------------
Until a window is emitted its keys are numbers and its aggregates what has been accumulated. Here
the keys are taken by their numbers, and the results are made. Where windows are small, and many
close together, a batch for each would cost more than what is in it: so as many as have room are
emitted in one. Windows that have changed come many at a time (`changed_windows`), most of them with
the same keys.

Rules of this file
------------------
1. All rows of a window that closes are in one batch.
2. What was emitted for a key group before a restore is not emitted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import WINDOW
from stillframe.key_groups import Positions, fixed_width_values
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.aggregates import Layout
from stillframe.state.changed_windows import Changed
from stillframe.state.columns import Array
from stillframe.state.key_index import FrozenKeyIndex
from stillframe.state.reached import BEGINNING_US, END_US, Reached

_TIMESTAMP = pa.timestamp("us", "UTC")
_BOUNDS = [pa.field("start", _TIMESTAMP), pa.field("end", _TIMESTAMP)]
_EMITTED_ROWS_MAX = 32_768
"""Small windows that close together are emitted together, up to so many rows."""


def output_schema(
    input_schema: pa.Schema, keys: Sequence[str], calls: Sequence[AggregateCall]
) -> pa.Schema:
    """The columns that windowed aggregates emit: the window, the keys, the aggregates."""
    layout = Layout(key_fields_of(input_schema, keys), accumulators_of(input_schema, calls))
    return with_window(layout.result_schema)


def with_window(schema: pa.Schema) -> pa.Schema:
    """These columns behind that of the window."""
    return pa.schema([pa.field(WINDOW, pa.struct(_BOUNDS)), *schema])


@dataclass(frozen=True, slots=True)
class WindowValues:
    """What has been accumulated of some keys in one window."""

    end_us: int
    numbers: Positions
    """Of its keys."""
    parts: list[Array]


class WindowRows:
    """Makes the rows of the windows of one size."""

    def __init__(self, layout: Layout, size_us: int, schema: pa.Schema) -> None:
        """`layout` is that of numbered keys, `schema` that of the rows."""
        self._layout = layout
        self._size_us = size_us
        self._schema = schema

    def batches(
        self, windows: Iterable[WindowValues], keys: FrozenKeyIndex, reached: Reached | None
    ) -> Iterator[pa.RecordBatch]:
        """The windows as they are emitted, as many in a batch as have room in it.

        `keys` are those that the windows' numbers stand for; `reached` says for which of them
        which windows were emitted before a restore.
        """
        waiting: list[WindowValues] = []
        rows = 0
        for window in windows:
            if waiting and rows + len(window.numbers) > _EMITTED_ROWS_MAX:
                yield self._of_windows(waiting, keys, reached)
                waiting, rows = [], 0
            waiting.append(window)
            rows += len(window.numbers)
        if rows:
            yield self._of_windows(waiting, keys, reached)

    def _of_windows(
        self, windows: Sequence[WindowValues], keys: FrozenKeyIndex, reached: Reached | None
    ) -> pa.RecordBatch:
        numbers = np.concatenate([window.numbers for window in windows])
        ends_us = _repeated(
            [window.end_us for window in windows], [len(window.numbers) for window in windows]
        )
        parts = [np.concatenate(arrays) for arrays in zip(*(w.parts for w in windows), strict=True)]
        if reached is not None:
            # Some keys' values of these windows were emitted before a restore.
            new = reached.times_of(keys.hashes[numbers]) < ends_us
            numbers, ends_us, parts = numbers[new], ends_us[new], [array[new] for array in parts]
        return self._batch(ends_us, [column.take(numbers) for column in keys.columns], parts)

    def of_changed(
        self, changed: Iterable[Changed], keys: FrozenKeyIndex, reached: Reached | None
    ) -> Iterator[pa.RecordBatch]:
        """Windows as they have become."""
        asked, columns = None, list[pa.Array]()
        for windows in changed:
            if windows.asked is not asked:  # many in a row ask for the same keys
                asked, columns = windows.asked, [key.take(windows.asked) for key in keys.columns]
            ends_us = _repeated(windows.ends_us, [len(each) for each in windows.places])
            batch = self._batch(ends_us, _keys_of(windows, columns), windows.parts)
            if reached is not None:
                numbers = windows.asked[np.concatenate(windows.places)]
                batch = batch.filter(pa.array(reached.times_of(keys.hashes[numbers]) < ends_us))
            yield batch

    def _batch(
        self, ends_us: npt.NDArray[np.int64], keys: Sequence[pa.Array], parts: Sequence[Array]
    ) -> pa.RecordBatch:
        results = (each.result(parts[where]) for each, where in self._layout.each_in_memory())
        window = _window_column(ends_us, self._size_us)
        return pa.RecordBatch.from_arrays([window, *keys, *results], schema=self._schema)

    def of_results(
        self, end_us: int, rows: pa.RecordBatch, keys: FrozenKeyIndex, reached: Reached | None
    ) -> pa.RecordBatch:
        """The rows of one window, whose results are there already, beside numbers for keys."""
        numbers = numbers_in(rows)
        if reached is not None:
            # Some keys' values of this window were emitted before a restore.
            rows = rows.filter(pa.array(reached.times_of(keys.hashes[numbers]) < end_us))
            numbers = numbers_in(rows)
        columns = [column.take(numbers) for column in keys.columns]
        ends_us = np.full(rows.num_rows, min(end_us, END_US))
        window = _window_column(ends_us, self._size_us)
        return pa.RecordBatch.from_arrays(
            [window, *columns, *rows.columns[1:]], schema=self._schema
        )


def _window_column(ends_us: npt.NDArray[np.int64], size_us: int) -> pa.Array:
    starts_us = np.maximum(ends_us, BEGINNING_US + size_us) - size_us
    columns = [pa.array(times).view(_TIMESTAMP) for times in (starts_us, ends_us)]
    return pa.StructArray.from_arrays(columns, fields=_BOUNDS)


def _repeated(ends_us: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.repeat([min(end_us, END_US) for end_us in ends_us], counts)


def _keys_of(changed: Changed, asked: Sequence[pa.Array]) -> list[pa.Array]:
    """The key columns of the windows. Most have the same keys, which are taken once then."""
    return [_concatenated_at(column, changed.places) for column in asked]


def _concatenated_at(column: pa.Array, places: Sequence[Positions]) -> pa.Array:
    taken: dict[int, pa.Array] = {}
    for each in places:
        if id(each) not in taken:
            # Places are sorted: as many as there are keys are all of them.
            is_all = len(each) == len(column)
            taken[id(each)] = column if is_all else column.take(pa.array(each))
    return pa.concat_arrays([taken[id(each)] for each in places])


def numbers_in(rows: pa.RecordBatch) -> Positions:
    """The numbers of keys, which are the first column."""
    return fixed_width_values(rows.column(0))


def in_fewer_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches; none is empty."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if waiting and rows + batch.num_rows > _EMITTED_ROWS_MAX:
            yield concatenated(waiting)
            waiting, rows = [], 0
        if batch.num_rows:
            waiting.append(batch)
            rows += batch.num_rows
    if waiting:
        yield concatenated(waiting)


def concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows in one batch; there is at least one batch."""
    if len(batches) == 1:
        return batches[0]
    [joined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
