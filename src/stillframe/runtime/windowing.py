"""Windowed aggregates as an operator: panes as state, watermarks that close windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa

from stillframe.graph.logical import Aggregate
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import KeyedState, OperatorSnapshot
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.operators import Background, KeyedOperator
from stillframe.state import windows
from stillframe.state.windows import BEGINNING_US, WindowedPartials, WindowTables
from stillframe.storage.store import Store

_Written = tuple[tuple[KeyedState, ...], int | None]
"""The files of a snapshot, and how far event time had come."""


class Windowing(KeyedOperator):
    """Aggregates per window and key, and how far event time has come."""

    STATE = "windows"

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        tables: WindowTables,
        store: Store | None,
        watermark_us: int | None = None,
    ) -> None:
        super().__init__(uid, subtask, attempt, tables, store)
        self.watermark_us = None if watermark_us == BEGINNING_US else watermark_us
        self.late_rows = 0
        """Rows that came after all their windows had closed; of combined ones, combined rows."""
        self._tables = tables

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        added = self._tables.add(batch, self.watermark_us)
        self.late_rows += added.late_rows
        return added.outputs

    def on_watermark(self, time_us: int) -> Iterable[pa.RecordBatch]:
        if self.watermark_us is not None and time_us <= self.watermark_us:
            return ()
        self.watermark_us = time_us
        return self._tables.close(time_us)

    def snapshot(self, checkpoint_id: CheckpointId) -> Background:
        # A subtask that knows nothing yet says so: the others' time must not become its own.
        watermark_us = BEGINNING_US if self.watermark_us is None else self.watermark_us
        write = super().snapshot(checkpoint_id)
        return lambda: (write(), watermark_us)

    def described(self, checkpoint_id: CheckpointId, written: _Written) -> OperatorSnapshot:
        keyed, watermark_us = written
        return replace(super().described(checkpoint_id, keyed), watermark_us=watermark_us)


def windowed_partials(input_schema: pa.Schema, aggregate: Aggregate) -> WindowedPartials:
    """What combines batches on their way to this aggregate, which has a window."""
    assert aggregate.window is not None
    return WindowedPartials(input_schema, aggregate.keys, aggregate.calls, aggregate.window)


def output_schema(input_schema: pa.Schema, aggregate: Aggregate) -> pa.Schema:
    """What this aggregate, which has a window, emits."""
    return windows.output_schema(input_schema, aggregate.keys, aggregate.calls)


def window_tables(
    input_schema: pa.Schema,
    aggregate: Aggregate,
    max_parallelism: int,
    state: SubtaskState,
    rows: Iterable[pa.RecordBatch],
) -> WindowTables:
    """The state of this aggregate, which has a window, as it was: `rows` are those of `state`."""
    assert aggregate.window is not None
    tables = WindowTables(
        input_schema,
        aggregate.keys,
        aggregate.calls,
        aggregate.window,
        max_parallelism,
        emits_closed=aggregate.emits_closed,
    )
    for batch in rows:
        tables.restore(batch)
    further = ((each.first, each.stop, each.watermark_us) for each in state.reached)
    tables.resume(state.watermark_us, further)
    return tables
