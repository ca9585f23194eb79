"""`limit` of a stream: its first rows, whichever come first, and no more of them ever."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from stillframe.api.stream_functions import StreamFunction, SubtaskStates

_PASSED = pa.schema([("rows", pa.int64())])


class Limiting(StreamFunction):
    """In one subtask; how many rows have passed is in every checkpoint."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max

    def open(self, states: SubtaskStates) -> None:
        self._passed = states.list("passed", _PASSED)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        passed = sum(row.rows for row in self._passed.get())
        taken = batch.slice(0, max(0, self._rows_max - passed))
        if taken.num_rows:
            self._passed.put([(passed + taken.num_rows,)])
            yield taken
