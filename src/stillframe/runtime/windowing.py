"""Windowed aggregates as an operator: panes as state, watermarks that close windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import pyarrow as pa

from stillframe.graph.logical import Aggregate, SessionWindow
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.operators import TimedOperator, TimedState
from stillframe.runtime.outputs import Combiner
from stillframe.state import window_rows
from stillframe.state.panes import WindowedPartials
from stillframe.state.reached import BEGINNING_US
from stillframe.state.sessions import SessionPartials, SessionTable
from stillframe.state.windows import Added, WindowTables
from stillframe.storage.store import Store


class KeptWindows(TimedState, Protocol):
    """Windows that are open, of whichever kind."""

    def add(self, batch: pa.RecordBatch, watermark_us: int | None) -> Added: ...

    def close(self, watermark_us: int) -> Iterable[pa.RecordBatch]: ...

    def everything(self) -> Iterable[pa.RecordBatch]: ...


class Windowing(TimedOperator):
    """Aggregates per window and key, and how far event time has come."""

    STATE = "windows"

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        tables: KeptWindows,
        store: Store | None,
        watermark_us: int | None = None,
        *,
        emits_all: bool = False,
    ) -> None:
        super().__init__(uid, subtask, attempt, tables, store, watermark_us)
        self._tables = tables
        self._emits_all = emits_all
        self._late: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        added = self._tables.add(batch, None if self._emits_all else self.watermark_us)
        if not self.keeps_late:
            self.late_rows += added.late_rows
        elif added.late is not None:
            self._late.append(added.late)
        return added.outputs

    def take_late(self) -> Iterable[pa.RecordBatch]:
        taken, self._late = self._late, []
        return taken

    def on_watermark(self, time_us: int) -> Iterable[pa.RecordBatch]:
        if self.watermark_us is not None and time_us <= self.watermark_us:
            return ()
        self.watermark_us = time_us
        return () if self._emits_all else self._tables.close(time_us)

    def time_after(self, time_us: int) -> int:
        """The last moment of a window that is still open: its row comes with that event time."""
        if time_us == END_OF_TIME_US:
            return time_us
        return max(time_us - 1, BEGINNING_US + 1)

    def on_barrier(self) -> Iterable[pa.RecordBatch]:
        return self._tables.everything() if self._emits_all else ()


def windowed_partials(input_schema: pa.Schema, aggregate: Aggregate) -> Combiner:
    """What combines batches on their way to this aggregate, which has a window."""
    window = aggregate.window
    assert window is not None
    if isinstance(window, SessionWindow):
        return SessionPartials(input_schema, aggregate.keys, aggregate.calls, window)
    return WindowedPartials(input_schema, aggregate.keys, aggregate.calls, window)


def output_schema(input_schema: pa.Schema, aggregate: Aggregate) -> pa.Schema:
    """What this aggregate, which has a window, emits."""
    return window_rows.output_schema(input_schema, aggregate.keys, aggregate.calls)


def window_tables(
    input_schema: pa.Schema,
    aggregate: Aggregate,
    max_parallelism: int,
    state: SubtaskState,
    rows: Iterable[pa.RecordBatch],
) -> KeptWindows:
    """The state of this aggregate, which has a window, as it was: `rows` are those of `state`."""
    tables = empty_windows(input_schema, aggregate, max_parallelism)
    for batch in rows:
        tables.restore(batch)
    if aggregate.emits_all:
        return tables  # event time closes nothing
    further = ((each.first, each.stop, each.watermark_us) for each in state.reached)
    tables.resume(state.watermark_us, further)
    return tables


def empty_windows(
    input_schema: pa.Schema, aggregate: Aggregate, max_parallelism: int
) -> WindowTables | SessionTable:
    """The state of this aggregate, which has a window, before its first row."""
    window = aggregate.window
    assert window is not None
    grouping = (input_schema, aggregate.keys, aggregate.calls)
    if isinstance(window, SessionWindow):
        return SessionTable(*grouping, window, max_parallelism)
    return WindowTables(
        *grouping,
        window,
        max_parallelism,
        emits_closed=aggregate.emits_closed,
        emits_all=aggregate.emits_all,
    )
