"""Windowed aggregates as an operator: panes as state, watermarks that close windows."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from stillframe.graph.logical import Aggregate
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import KeyedState, OperatorSnapshot
from stillframe.protocol.restore import SubtaskState
from stillframe.protocol.sharing import Sharing
from stillframe.runtime.operators import Background, StatefulOperator, described_file
from stillframe.state import windows
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.state.windows import BEGINNING_US, WindowedPartials, WindowTables
from stillframe.storage.paths import state_path
from stillframe.storage.store import Store

_Written = tuple[tuple[KeyedState, ...], int | None]
"""The files of a snapshot, and how far event time had come."""


class Windowing(StatefulOperator):
    """Aggregates per window and key; what has not changed is not written again."""

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
        self.watermark_us = None if watermark_us == BEGINNING_US else watermark_us
        self.late_rows = 0
        """Rows that came after all their windows had closed; of combined ones, combined rows."""
        self._uid = uid
        self._subtask = subtask
        self._attempt = attempt
        self._tables = tables
        self._store = store
        self._sharing: Sharing[tuple[KeyedState, ...]] = Sharing()

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
        held = self._sharing.on_snapshot(checkpoint_id, self._tables.version)
        write = self._write(checkpoint_id) if held is None else lambda: held
        return lambda: (write(), watermark_us)

    def _write(self, checkpoint_id: CheckpointId) -> Background:
        assert self._store is not None, "a snapshot was asked for without a place to keep it"
        store = self._store
        path = state_path(checkpoint_id, self._uid, self._subtask, self._attempt, self.STATE)
        frozen = self._tables.freeze()

        def write() -> tuple[KeyedState, ...]:
            try:
                if not len(frozen):
                    return ()
                return (described_file(self.STATE, write_keyed_snapshot(store, path, frozen)),)
            finally:
                frozen.release()

        return write

    def described(self, checkpoint_id: CheckpointId, written: _Written) -> OperatorSnapshot:
        keyed, watermark_us = written
        self._sharing.on_written(checkpoint_id, keyed)
        return OperatorSnapshot(self._uid, self._subtask, keyed=keyed, watermark_us=watermark_us)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._sharing.on_completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._sharing.on_aborted(checkpoint_id)


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
