"""Aggregates per window of event time and per key, kept in panes.

Theory of operation
-------------------
Each pane (`panes`) has a table of running aggregates (`aggregates`) of its own. A window is the
merge of its panes, made when it closes (`sliding`) or changes (`changed_windows`) or all are asked
for, and emitted by `window_rows`.
When event time has passed the last window that a pane belongs to, its table is dropped.

Most keys come in many panes. So keys are kept once, with a number each, and the tables of panes
know only numbers: a key is compared once for a batch, and panes are merged without looking at keys.
Numbers that no pane uses any more are taken back, all at once, when they are most of all numbers.

Rules of this file
------------------
1. Loops go over panes and windows, never over records or keys.
2. A row is late if no window that contains its pane is open; a window is open until event time has
   come to its end. A row that is late for some of its windows counts in the others.
3. Called by the loop thread only; frozen panes are read by one background thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import Window
from stillframe.key_groups import (
    Flags,
    Positions,
    fixed_width_values,
    key_groups_of,
)
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.aggregates import (
    AggregateTable,
    FrozenTable,
    Layout,
    by_key_group,
    key_index,
    numbers_of,
)
from stillframe.state.changed_windows import ChangedWindows, LookedUp
from stillframe.state.columns import Array
from stillframe.state.key_index import FrozenKeyIndex
from stillframe.state.number_index import NumberIndex
from stillframe.state.panes import (
    PANE,
    PANE_FIELD,
    Panes,
    place_of_count,
    with_panes,
    without_panes,
)
from stillframe.state.partials import is_partial
from stillframe.state.reached import BEGINNING_US, END_US, GroupSpan, Reached
from stillframe.state.sliding import Closing, PaneParts
from stillframe.state.snapshots import with_kind
from stillframe.state.window_rows import (
    WindowRows,
    WindowValues,
    concatenated,
    in_fewer_batches,
    numbers_in,
    with_window,
)

_KEY = "__key"
"""The column with the numbers of keys."""
_NUMBERS_MIN = 16_384
"""With fewer numbers than this it is not worth looking for unused ones."""
_NUMBERS_PER_KEY_MAX = 4


@dataclass(frozen=True, slots=True)
class Added:
    """What follows from a batch."""

    outputs: list[pa.RecordBatch]
    late_rows: int
    """Records that no open window takes, also those that are combined into fewer rows."""
    late: pa.RecordBatch | None = None
    """Those records as they came, if they came as they were made; None: there are none."""


class WindowTables:
    """The windowed aggregates of one subtask."""

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        window: Window,
        max_parallelism: int,
        *,
        emits_closed: bool,
        emits_all: bool = False,
    ) -> None:
        """Windows are emitted as they change, or when they close, or whenever all are asked for."""
        self._keys = tuple(keys)
        self._calls = tuple(calls)
        self._max_parallelism = max_parallelism
        self._emits_closed = emits_closed
        self._emits_updates = not (emits_closed or emits_all)
        self._window = window
        self._panes = Panes(window)
        self._tables: dict[int, AggregateTable] = {}
        self._known_numbers: dict[int, Positions] = {}
        """Of the keys of panes, as they were when somebody asked; a key never leaves its pane."""
        self._keys_expected = 0
        self._version = 0
        self._closed_us = BEGINNING_US
        """Windows that end until then are closed."""
        self._reached: Reached | None = None
        """By key group, where some had come further than `_closed_us` before a restore."""
        key_fields = key_fields_of(input_schema, keys)
        layout = Layout(key_fields, accumulators_of(input_schema, calls))
        self._snapshot_schema = with_kind(
            layout.snapshot_schema.insert(len(self._keys), PANE_FIELD), str(self._panes)
        )
        place = place_of_count(calls)
        in_snapshot = layout.in_snapshot[place].start if place is not None else None
        self._records_at = 1 + (len(layout.snapshot_schema) if in_snapshot is None else in_snapshot)
        """Where partial aggregates say how many records they are made of."""
        self._output_schema = with_window(layout.result_schema)
        self._inputs = list(dict.fromkeys(call.input for call in calls if call.input is not None))
        inputs = [input_schema.field(name) for name in self._inputs]
        self._numbered_schema = pa.schema([pa.field(_KEY, pa.int64()), *inputs])
        self._key_types = [field.type for field in key_fields]
        self._index = key_index(self._key_types, None)
        self._numbers_max = _NUMBERS_MIN
        self._closing = Closing(self._layout())
        self._rows = WindowRows(self._layout(), self._panes.size_us, self._output_schema)

    def __len__(self) -> int:
        """How many rows there are: keys, in each pane that has them."""
        return sum(map(len, self._tables.values()))

    @property
    def pane_count(self) -> int:
        return len(self._tables)

    @property
    def state_bytes(self) -> int:
        return self._index.nbytes + sum(table.state_bytes for table in self._tables.values())

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._snapshot_schema

    @property
    def output_schema(self) -> pa.Schema:
        return self._output_schema

    # --- records

    def add(self, batch: pa.RecordBatch, watermark_us: int | None) -> Added:
        """Fold in a batch of records or of partial aggregates, which have a column of panes.

        The new values of each key and open window it touched, unless windows are emitted when
        they close.
        """
        now_us = BEGINNING_US if watermark_us is None else watermark_us
        partial = is_partial(batch)
        if not partial and PANE not in batch.schema.names:
            batch = with_panes(batch, self._window)
        panes, rows = self._numbered(batch) if partial else self._numbered_records(batch)
        is_late = self._is_late(panes, rows, now_us)
        late_rows, late = 0, None
        if is_late is not None:
            late_rows = self._records_in(batch, is_late)
            late = None if partial else without_panes(batch.filter(pa.array(is_late)))
            panes, rows = panes[~is_late], rows.filter(pa.array(~is_late))
        parts = dict(self._by_pane(panes, rows))
        self._version += bool(parts)
        if self._emits_updates and self._panes.is_tumbling:
            return Added(self._tumbling_updates(parts, partial), late_rows, late)
        for pane, part in parts.items():
            self._table(pane).take_in(part, partial=partial)
            self._closing.on_change(pane)
        outputs = self._sliding_updates(parts, now_us) if self._emits_updates else []
        return Added(outputs, late_rows, late)

    def _numbered_records(self, batch: pa.RecordBatch) -> tuple[Array, pa.RecordBatch]:
        keys = [batch.column(key) for key in self._keys]
        numbers = numbers_of(self._index, keys, batch.num_rows)
        columns = [pa.array(numbers), *(batch.column(name) for name in self._inputs)]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._numbered_schema)
        return fixed_width_values(batch.column(PANE)), rows

    def _numbered(self, rows: pa.RecordBatch) -> tuple[Array, pa.RecordBatch]:
        """The panes of rows like those of a snapshot, and the rows with numbers for keys."""
        count = len(self._keys)
        numbers = pa.array(numbers_of(self._index, rows.columns[:count], rows.num_rows))
        # Without the column of `counting_records`, which is no aggregate of ours.
        values = slice(count + 1, len(self._snapshot_schema))
        names = [_KEY, *rows.schema.names[values]]
        numbered = pa.RecordBatch.from_arrays([numbers, *rows.columns[values]], names=names)
        return fixed_width_values(rows.column(count)), numbered

    def _records_in(self, batch: pa.RecordBatch, chosen: Flags) -> int:
        """How many records these rows of a batch are, or are made of."""
        if not is_partial(batch):
            return int(np.count_nonzero(chosen))
        return int(fixed_width_values(batch.column(self._records_at))[chosen].sum())

    def _by_pane(self, panes: Array, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each pane, in the order of panes."""
        if not batch.num_rows:
            return
        first, last = int(panes.min()), int(panes.max())
        if first == last:
            yield first, batch
            return
        numbers = (panes - first) // self._panes.width_us
        if (last - first) // self._panes.width_us < 1 << 16:
            numbers = numbers.astype(np.uint16)  # such numbers are sorted by radix
        order = np.argsort(numbers, kind="stable")
        panes = panes.take(order)
        batch = batch.take(pa.array(order))
        begins = np.append(0, np.flatnonzero(np.diff(panes)) + 1)
        ends = np.append(begins[1:], len(panes))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield int(panes[begin]), batch.slice(begin, end - begin)

    def _table(self, pane: int) -> AggregateTable:
        table = self._tables.get(pane)
        if table is None:
            table = self._tables[pane] = self._new_table()
        return table

    def _new_table(self) -> AggregateTable:
        of_numbers = (self._numbered_schema, [_KEY], self._calls)
        expected = self._keys_expected
        index = NumberIndex(lambda: key_index([pa.int64()], expected))
        return AggregateTable(*of_numbers, self._max_parallelism, index=index)

    def _layout(self) -> Layout:
        # New accumulators: what one remembers of its values must not reach another's.
        fields = key_fields_of(self._numbered_schema, [_KEY])
        return Layout(fields, accumulators_of(self._numbered_schema, self._calls))

    # --- output as windows change

    def _tumbling_updates(
        self, parts: dict[int, pa.RecordBatch], partial: bool
    ) -> list[pa.RecordBatch]:
        """Each window is a pane: the table has its values at hand when it takes the rows in."""
        size_us, keys = self._panes.size_us, self._index.freeze()
        emitted = []
        for pane, part in parts.items():
            table = self._table(pane)
            rows = table.merge(part) if partial else table.update(part)
            emitted.append(self._rows.of_results(pane + size_us, rows, keys, self._reached))
        return list(in_fewer_batches(emitted))

    def _sliding_updates(
        self, parts: dict[int, pa.RecordBatch], now_us: int
    ) -> list[pa.RecordBatch]:
        """Of each open window that has a touched pane, the keys that were touched in it."""
        numbers = {pane: numbers_in(rows) for pane, rows in parts.items()}
        panes, size_us = sorted(self._tables), self._panes.size_us
        changed = ChangedWindows(self._layout(), size_us, panes, self._held).values(
            self._ends(sorted(numbers), now_us, END_US), numbers, len(self._index)
        )
        return list(self._rows.of_changed(changed, self._index.freeze(), self._reached))

    def _held(self, pane: int, looked_up: LookedUp) -> tuple[Positions, list[Array]]:
        table = self._tables[pane]
        if looked_up.is_to_be_scanned(table):
            return looked_up.found_among(self._numbers_in_pane(pane), table.parts())
        return looked_up.found_in(table)

    def _numbers_in_pane(self, pane: int) -> Positions:
        """Of its keys; most panes have got none since they were asked last."""
        table, known = self._tables[pane], self._known_numbers.get(pane)
        if known is None or len(known) != len(table):
            known = self._known_numbers[pane] = numbers_in(table.keys())
        return known

    # --- windows that close

    def close(self, watermark_us: int) -> Iterable[pa.RecordBatch]:
        """Event time has come this far: the windows it has passed, oldest first.

        What is answered has to be gone through before anything else is asked.
        """
        since_us, self._closed_us = self._closed_us, max(self._closed_us, watermark_us)
        if self._reached is not None and self._reached.is_passed_by(since_us):
            self._reached = None
        if self._emits_closed:
            return self._emit_closed(since_us, watermark_us)
        self._drop(sorted(self._tables), watermark_us)
        self._take_numbers_back_if_many()
        return ()

    def _emit_closed(self, since_us: int, until_us: int) -> Iterator[pa.RecordBatch]:
        closed = self._closed(since_us, until_us)
        yield from self._rows.batches(closed, self._index.freeze(), self._reached)
        self._take_numbers_back_if_many()  # not before the last batch is made, which goes by them

    def everything(self) -> Iterable[pa.RecordBatch]:
        """All windows as they are now; to be gone through before anything else is asked."""
        panes = sorted(self._tables)
        self._closing = Closing(self._layout())
        ends = self._ends(panes, BEGINNING_US, END_US)
        windows = (self._values_of_window(panes, end_us) for end_us in ends)
        return self._rows.batches(windows, self._index.freeze(), self._reached)

    def _closed(self, since_us: int, until_us: int) -> Iterator[WindowValues]:
        panes = sorted(self._tables)
        dropped = 0
        for end_us in self._ends(panes, since_us, until_us):
            yield self._values_of_window(panes, end_us)
            while dropped < len(panes) and self._panes.last_end(panes[dropped]) <= end_us:
                self._drop_one(panes[dropped])
                dropped += 1
        self._drop(panes[dropped:], until_us)

    def _values_of_window(self, panes: Sequence[int], end_us: int) -> WindowValues:
        start_us = end_us - self._panes.size_us
        if self._panes.is_tumbling:
            return WindowValues(end_us, *self._values_in(start_us))
        if self._closing.is_outdated:
            self._closing = Closing(self._layout())
        begin = bisect_left(panes, max(start_us, self._closing.next_us))
        for pane in panes[begin : bisect_left(panes, end_us)]:
            self._closing.append(PaneParts(pane, *self._values_in(pane)))
        return WindowValues(end_us, *self._closing.values_from(start_us))

    def _values_in(self, pane: int) -> tuple[Positions, list[Array]]:
        table = self._tables[pane]
        return numbers_in(table.keys()), table.parts()

    def _ends(self, panes: Sequence[int], since_us: int, until_us: int) -> Iterator[int]:
        """When the windows end that contain any of these panes, after `since_us`, ascending."""
        slide_us, last_due_us = self._panes.slide_us, self._panes.end_until(until_us)
        for pane in panes:
            if since_us >= last_due_us:
                return
            first = max(self._panes.first_end(pane), self._panes.end_from(since_us + 1))
            last = min(self._panes.last_end(pane), last_due_us)
            yield from range(first, last + 1, slide_us)
            since_us = max(since_us, last)

    def _drop(self, panes: Sequence[int], passed_us: int) -> None:
        """Free the panes, which are sorted, that belong to no later window."""
        for pane in panes:
            if self._panes.last_end(pane) > passed_us:
                break
            self._drop_one(pane)

    def _drop_one(self, pane: int) -> None:
        self._known_numbers.pop(pane, None)
        self._keys_expected = len(self._tables.pop(pane))
        self._version += 1

    # --- numbers of keys

    def _take_numbers_back_if_many(self) -> None:
        if len(self._index) > self._numbers_max:
            self._take_numbers_back()

    def _take_numbers_back(self) -> None:
        """Give the keys that some pane has new numbers, if they are few among all."""
        used = np.zeros(len(self._index), dtype=np.bool_)
        for table in self._tables.values():
            used[numbers_in(table.keys())] = True
        numbers = np.flatnonzero(used)
        self._numbers_max = max(_NUMBERS_MIN, _NUMBERS_PER_KEY_MAX * len(numbers))
        if len(self._index) <= self._numbers_max:
            return
        keys = self._index.freeze()
        self._index = key_index(self._key_types, None)
        self._index.rows_of([key.take(numbers) for key in keys.columns], keys.hashes[numbers])
        renumbered = np.cumsum(used) - 1
        self._known_numbers = {}
        for pane, table in self._tables.items():
            rows = table.freeze().rows()
            new = pa.array(renumbered[numbers_in(rows)])
            self._tables[pane] = self._new_table()
            self._tables[pane].restore(rows.set_column(0, _KEY, new))
        self._closing = Closing(self._layout())

    # --- snapshots

    def freeze(self) -> FrozenWindows:
        """All panes as they are now, by reference: the synchronous part of a snapshot."""
        frozen = {pane: table.freeze() for pane, table in self._tables.items()}
        return FrozenWindows(
            frozen, self._index.freeze(), self._snapshot_schema, self._max_parallelism
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any other, each key and pane once in all calls."""
        for pane, rows in self._by_pane(*self._numbered(batch)):
            self._table(pane).restore(rows)

    def resume(self, watermark_us: int | None, further: Iterable[GroupSpan] = ()) -> None:
        """Windows that event time had passed before a restore are closed, and stay so.

        `further` are key groups for which it had come further.
        """
        self._closed_us = BEGINNING_US if watermark_us is None else watermark_us
        self._reached = Reached.beyond(watermark_us, self._max_parallelism, further)

    @property
    def reached(self) -> Reached | None:
        """Key groups for which event time had come further before a restore."""
        return self._reached

    def _is_late(self, panes: Array, rows: pa.RecordBatch, now_us: int) -> Flags | None:
        """Which rows no open window takes; None: there are none."""
        is_late: Flags = panes < min(max(self._panes.open_from(now_us), BEGINNING_US), END_US)
        if self._reached is not None and not self._reached.is_passed_by(now_us):
            is_late |= self._was_late(panes, rows)
        return is_late if is_late.any() else None

    def _was_late(self, panes: Array, rows: pa.RecordBatch) -> Flags:
        """Which rows were late for their key groups already before a restore."""
        assert self._reached is not None
        starts, where = np.unique(panes, return_inverse=True)
        ends = np.array([min(self._panes.last_end(pane), END_US) for pane in starts.tolist()])
        hashes = self._index.freeze().hashes[numbers_in(rows)]
        was_late: Flags = ends[where] <= self._reached.times_of(hashes)
        return was_late


class FrozenWindows:
    """All panes as they were at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        tables: dict[int, FrozenTable],
        keys: FrozenKeyIndex,
        snapshot_schema: pa.Schema,
        max_parallelism: int,
    ) -> None:
        self._tables = tables
        self._keys = keys
        self._snapshot_schema = snapshot_schema
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._snapshot_schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, of all panes, in ascending order."""
        if not len(self):
            return
        rows = concatenated([table.rows() for table in self._tables.values()])
        panes = np.repeat(list(self._tables), [len(table) for table in self._tables.values()])
        numbers = numbers_in(rows)
        groups = key_groups_of(self._keys.hashes[numbers], self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            places = order[bounds[group] : bounds[group + 1]]
            keys = [key.take(numbers[places]) for key in self._keys.columns]
            values = rows.take(pa.array(places)).columns[1:]
            columns = [*keys, pa.array(panes[places]), *values]
            yield group, pa.RecordBatch.from_arrays(columns, schema=self._snapshot_schema)

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        for table in self._tables.values():
            table.release()
        self._tables = {}
