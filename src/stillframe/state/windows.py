"""Aggregates per window of event time and per key, kept in panes.

Theory of operation
-------------------
A *pane* is the largest span that every window is made of: of windows of ten minutes every two, two
minutes. A record belongs to one pane, however many windows overlap there, and each pane has a
table of running aggregates (`aggregates`) of its own. A window is the merge of its panes, made
when somebody wants to see it. When event time has passed the last window that a pane belongs to,
its table is dropped.

Most keys come in many panes. So keys are kept once, with a number each, and the tables of panes
know only numbers: a key is compared once for a batch, and panes are merged without looking at keys.
Numbers that no pane uses any more are taken back, all at once, when they are most of all numbers.

Windows that overlap share most of their panes, so they are merged by one `_Sliding`, which adds a
pane at its end and takes one away at its beginning. What has been accumulated cannot be taken back
out of a minimum, so it keeps two stacks: all that came since the last turn in one merge, and before
that, for each pane, the merge of it and those after it up to the turn. A window is one entry of
each. When the older stack is used up it is made anew from the younger: every pane is merged three
times in all, however many there are in a window.

Rules of this file
------------------
1. Loops go over panes and windows, never over records or keys.
2. A row is late if no window that contains its pane is open; a window is open until event time has
   come to its end. A row that is late for some of its windows counts in the others.
3. Times are Python integers or int64 in microseconds since 1970 in UTC, and may be negative.
4. Called by the loop thread only; frozen panes are read by one background thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import WINDOW, Window
from stillframe.errors import BuildError
from stillframe.key_groups import (
    NO_COLUMNS_HASH,
    Flags,
    Positions,
    Words,
    fixed_width_values,
    hash_columns,
    key_groups_of,
)
from stillframe.state.accumulators import Touched, accumulators_of, key_fields_of
from stillframe.state.aggregates import (
    AggregateTable,
    FrozenTable,
    Layout,
    by_key_group,
    canonical,
    key_index,
    plain,
)
from stillframe.state.columns import Array
from stillframe.state.key_index import FrozenKeyIndex
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.state.reached import BEGINNING_US, GroupSpan, Reached

PANE = "__pane"
"""The column that says to which pane a row belongs, by when that begins."""

_END_US = 2**63 - 1
_KEY = "__key"
"""The column with the numbers of keys."""
_RECORDS = "__records"
"""The column that says how many records a row is made of, where no aggregate says it."""
_PANE_FIELD = pa.field(PANE, pa.int64())
_TIMESTAMP = pa.timestamp("us", "UTC")
_BOUNDS = [pa.field("start", _TIMESTAMP), pa.field("end", _TIMESTAMP)]
_EMITTED_ROWS_MAX = 32_768
"""Small windows that close together are emitted together, up to so many rows."""
_NUMBERS_MIN = 16_384
"""With fewer numbers than this it is not worth looking for unused ones."""
_NUMBERS_PER_KEY_MAX = 4
_SCANNED_PER_NUMBER_MAX = 8
"""So many keys of a pane are looked at for each that is asked for."""


# --- which pane, which windows


class Panes:
    """The arithmetic of one kind of window."""

    def __init__(self, window: Window) -> None:
        if not 0 < window.slide_us <= window.size_us:
            raise BuildError(
                f"a window of {window.size_us} µs every {window.slide_us} µs cannot be: both are"
                " positive and it is no shorter than the time to the next"
            )
        self.size_us = window.size_us
        self.slide_us = window.slide_us
        self.width_us = math.gcd(window.size_us, window.slide_us)
        self.is_tumbling = window.size_us == window.slide_us
        self._start_us = window.start_us

    def starts_of(self, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When the pane of each time begins."""
        shift = self._start_us % self.width_us
        starts: npt.NDArray[np.int64] = (times_us - shift) // self.width_us
        starts *= self.width_us
        starts += shift
        return starts

    def first_end(self, pane: int) -> int:
        """When the oldest window that contains the pane ends."""
        return self.end_from(pane + self.width_us)

    def last_end(self, pane: int) -> int:
        """When the newest window that contains the pane ends."""
        return self.end_until(pane + self.size_us)

    def open_from(self, time_us: int) -> int:
        """Panes that begin before belong to no window that ends after this time."""
        return self.end_until(time_us) - self.size_us + self.slide_us

    def end_from(self, time_us: int) -> int:
        """The first end of a window at this time or later."""
        return self.end_until(time_us + self.slide_us - 1)

    def end_until(self, time_us: int) -> int:
        """The last end of a window at this time or earlier."""
        first = self._start_us + self.size_us
        return (time_us - first) // self.slide_us * self.slide_us + first


def panes_of(times: pa.Array, window: Window) -> npt.NDArray[np.int64]:
    """When the pane of each time begins; of a null, whatever it may be."""
    return Panes(window).starts_of(microseconds(times))


def microseconds(times: pa.Array) -> npt.NDArray[np.int64]:
    """Event times as numbers; of a null, whatever it may be."""
    if not pt.is_timestamp(times.type):
        raise BuildError(f"windows are made of timestamps, not of {times.type}: cast the column")
    if times.type.unit == "ns":
        # By floor, which Arrow's cast does not do: a nanosecond before 1970 is before 1970.
        nanoseconds: npt.NDArray[np.int64] = fixed_width_values(times) // 1_000
        return nanoseconds
    values: npt.NDArray[np.int64] = fixed_width_values(
        times.cast(pa.timestamp("us", times.type.tz))
    )
    return values


def with_panes(batch: pa.RecordBatch, window: Window) -> pa.RecordBatch:
    """The batch and the column of its panes; without the records that have no event time.

    As in Spark, where a null is in no window.
    """
    batch = _with_times(batch, window)
    return batch.append_column(_PANE_FIELD, pa.array(panes_of(batch.column(window.time), window)))


def _without_panes(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select([name for name in batch.schema.names if name != PANE])


def _with_times(batch: pa.RecordBatch, window: Window) -> pa.RecordBatch:
    times = batch.column(window.time)
    return batch.filter(times.is_valid()) if times.null_count else batch


def output_schema(
    input_schema: pa.Schema, keys: Sequence[str], calls: Sequence[AggregateCall]
) -> pa.Schema:
    """The columns that windowed aggregates emit: the window, the keys, the aggregates."""
    layout = Layout(key_fields_of(input_schema, keys), accumulators_of(input_schema, calls))
    return _with_window(layout.result_schema)


def _with_window(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(WINDOW, pa.struct(_BOUNDS)), *schema])


# --- before the exchange


def counting_records(calls: Sequence[AggregateCall]) -> tuple[AggregateCall, ...]:
    """The same calls, among them one that counts records: those that come too late are counted."""
    if _place_of_count(calls) is not None:
        return tuple(calls)
    return (*calls, AggregateCall("count", None, _RECORDS, pa.int64()))


def _place_of_count(calls: Sequence[AggregateCall]) -> int | None:
    kinds = [(call.function, call.input) for call in calls]
    return kinds.index(("count", None)) if ("count", None) in kinds else None


class WindowedPartials:
    """As `PartialAggregates`, per pane: the columns are the keys, then the pane, then the rest."""

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        window: Window,
    ) -> None:
        self._window = window
        self._panes = Panes(window)
        self._key_count = len(keys)
        calls = counting_records(calls)
        self._of_one_pane = PartialAggregates(input_schema, keys, calls)
        schema = input_schema.append(_PANE_FIELD)
        self._of_several = PartialAggregates(schema, (*keys, PANE), calls)

    def on_watermark(self, time_us: int) -> None:
        """Whether a record is late follows from its pane, which the receiver knows."""

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The partial aggregates of the batch if they are few, else the records; keys first."""
        batch = _with_times(batch, self._window)
        starts = self._panes.starts_of(microseconds(batch.column(self._window.time)))
        first, last = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
        if first == last:
            return self._with_pane(self._of_one_pane.combine(batch), first)
        return self._combine_several(batch, starts, first, last)

    def _with_pane(self, combined: pa.RecordBatch, pane: int) -> pa.RecordBatch:
        panes = pa.array(np.full(combined.num_rows, pane))
        metadata = combined.schema.metadata
        combined = combined.add_column(self._key_count, _PANE_FIELD, panes)
        return combined.replace_schema_metadata(metadata)

    def _combine_several(
        self, batch: pa.RecordBatch, starts: npt.NDArray[np.int64], first: int, last: int
    ) -> pa.RecordBatch:
        count = (last - first) // self._panes.width_us + 1
        if count > batch.num_rows:
            return self._of_several.combine(batch.append_column(_PANE_FIELD, pa.array(starts)))
        # As a dictionary: its indices are numbers of panes already.
        indices = (starts - first) // self._panes.width_us
        names = pa.array(first + np.arange(count) * self._panes.width_us)
        panes = pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), names)
        combined = self._of_several.combine(batch.append_column(pa.field(PANE, panes.type), panes))
        if is_partial(combined):
            return combined
        return combined.set_column(self._key_count, _PANE_FIELD, plain(panes))


# --- windows that slide


class _Once(Touched):
    """Rows of which none comes twice."""

    def __init__(self, rows: Positions) -> None:
        self.rows = rows
        self.distinct = rows

    @property
    def groups(self) -> Positions:
        return np.arange(len(self.rows))


@dataclass(frozen=True, slots=True)
class _Pane:
    start_us: int
    numbers: Positions
    """Of its keys."""
    parts: list[Array]


class _Sliding:
    """The merge of the panes between a beginning and an end that both only move forward.

    Keys are numbers, given by the caller. Within, each has a *place* in the columns; those of the
    older stack come first, the keys of its newest pane before all others, so that each entry of
    the stack is no longer than the keys it has.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._panes: deque[_Pane] = deque()
        self._older: list[tuple[int, list[Array]]] = []
        """Of the panes of the older stack, from the last one back: each merged with those after,
        and how many keys they have."""
        self._younger: list[Array] = []
        self._in_younger: Flags = np.zeros(0, dtype=np.bool_)
        self._place_of: Positions = np.zeros(0, dtype=np.int64)
        self._number_of: Positions = np.zeros(0, dtype=np.int64)
        self._turn()

    def append(self, pane: _Pane) -> None:
        """Move the end past this pane, which is younger than all before."""
        self._panes.append(pane)
        places = self._places(pane.numbers)
        self._younger = self._extended(self._younger, len(self._number_of))
        self._merge(self._younger, places, pane.parts)
        self._in_younger[places] = True

    def drop_before(self, start_us: int) -> None:
        """Move the beginning to this time."""
        while self._panes and self._panes[0].start_us < start_us:
            if not self._older:
                self._turn()
            self._panes.popleft()
            self._older.pop()

    def merged(self) -> tuple[Positions, list[Array]]:
        """The numbers of the keys that any pane has, and what has been accumulated of each."""
        parts = [array.copy() for array in self._younger]
        here = self._in_younger.copy()
        if self._older:
            count, older = self._older[-1]
            self._merge(parts, np.arange(count), older)
            here[:count] = True
        if here.all():
            return self._number_of, parts
        return self._number_of[here], [array[here] for array in parts]

    def _turn(self) -> None:
        """Make the older stack of what is in the younger, which is empty then."""
        count = len(self._place_of)
        newest = np.full(count, -1, dtype=np.int64)
        for index, pane in enumerate(self._panes):
            newest[pane.numbers] = index
        order = np.argsort(-newest, kind="stable")
        self._number_of = order[: int(np.count_nonzero(newest >= 0))]
        self._place_of = np.full(count, -1, dtype=np.int64)
        self._place_of[self._number_of] = np.arange(len(self._number_of))
        self._older = self._merged_from_the_last(newest)
        self._younger = self._extended([], len(self._number_of))
        self._in_younger = np.zeros(len(self._number_of), dtype=np.bool_)

    def _merged_from_the_last(self, newest: Positions) -> list[tuple[int, list[Array]]]:
        stack: list[tuple[int, list[Array]]] = []
        merged: list[Array] = []
        for index in range(len(self._panes) - 1, -1, -1):
            pane = self._panes[index]
            count = int(np.count_nonzero(newest >= index))
            merged = self._extended(merged, count, copy=True)
            self._merge(merged, self._place_of[pane.numbers], pane.parts)
            stack.append((count, merged))
        return stack

    def _places(self, numbers: Positions) -> Positions:
        if len(numbers) and (highest := int(numbers.max())) >= len(self._place_of):
            more = np.full(highest + 1 - len(self._place_of), -1, dtype=np.int64)
            self._place_of = np.concatenate([self._place_of, more])
        new = numbers[self._place_of[numbers] < 0]
        if len(new):
            self._place_of[new] = np.arange(len(new)) + len(self._number_of)
            self._number_of = np.concatenate([self._number_of, new])
            absent = np.zeros(len(new), dtype=np.bool_)
            self._in_younger = np.concatenate([self._in_younger, absent])
        return self._place_of[numbers]

    def _extended(self, parts: list[Array], count: int, copy: bool = False) -> list[Array]:
        specs = self._layout.columns
        parts = parts or [np.zeros(0, dtype=spec.dtype) for spec in specs]
        if not copy and all(len(array) == count for array in parts):
            return parts
        return [
            np.concatenate([array, np.full(count - len(array), spec.initial, spec.dtype)])
            for array, spec in zip(parts, specs, strict=True)
        ]

    def _merge(self, into: list[Array], places: Positions, parts: Sequence[Array]) -> None:
        touched = _Once(places)
        with np.errstate(all="ignore"):  # infinities and NaN are values
            for accumulator, where in self._layout.each_in_memory():
                columns = accumulator.to_snapshot(parts[where])
                accumulator.merge(into[where], touched, columns)


# --- the state


class _LookedUp:
    """Numbers of keys that are looked for in one pane after the other."""

    def __init__(self, asked: Positions, count: int) -> None:
        """`count` is that of all numbers there are."""
        self._asked = pa.array(asked)
        self._count = count

    def is_to_be_scanned(self, table: AggregateTable) -> bool:
        """Whether to look at all that a pane has is quicker than to hash what is asked for."""
        return len(table) <= _SCANNED_PER_NUMBER_MAX * len(self._asked)

    def found_in(self, table: AggregateTable) -> tuple[Positions, list[Array]]:
        """Which of them a pane has, by their places, and what it has accumulated of them."""
        return table.held_of([self._asked], self._hashes)

    def found_among(self, numbers: Positions, parts: list[Array]) -> tuple[Positions, list[Array]]:
        """The same, of a pane that has these numbers; good until the pane changes."""
        places = self._place_of[numbers]
        here = places >= 0
        if here.all():
            return places, parts
        return places[here], [array[here] for array in parts]

    @cached_property
    def _hashes(self) -> Words:
        return hash_columns([self._asked])

    @cached_property
    def _place_of(self) -> Positions:
        place_of = np.full(self._count, -1, dtype=np.int64)
        place_of[fixed_width_values(self._asked)] = np.arange(len(self._asked))
        return place_of


class _Wanted:
    """Which keys were touched between two times, asked for windows that follow each other."""

    def __init__(self, places: dict[int, Positions]) -> None:
        """`places` are those of the keys, for each pane that was touched."""
        self._panes = sorted(places)
        self._places = places
        self._last: tuple[int, int] | None = None
        self._flags: Flags = np.zeros(0, dtype=np.bool_)

    def between(self, start_us: int, end_us: int, count: int) -> Flags:
        """Of `count` keys, those of the panes between; good until the next call."""
        span = bisect_left(self._panes, start_us), bisect_left(self._panes, end_us)
        if span != self._last:  # most windows have the same of the touched panes as the one before
            self._last = span
            self._flags = np.zeros(count, dtype=np.bool_)
            for pane in self._panes[span[0] : span[1]]:
                self._flags[self._places[pane]] = True
        return self._flags


class _Keys:
    """A few of all keys, which are taken many times."""

    def __init__(self, keys: FrozenKeyIndex, numbers: Positions) -> None:
        self.columns = [_TakenColumn(column.take(numbers)) for column in keys.columns]
        self.hashes = keys.hashes[numbers]


class _TakenColumn:
    def __init__(self, column: pa.Array) -> None:
        self._column = column

    def take(self, rows: Positions) -> pa.Array:
        return self._column.take(pa.array(rows))


@dataclass(frozen=True, slots=True)
class _Values:
    """What has been accumulated of some keys in one window."""

    end_us: int
    numbers: Positions
    """Of its keys."""
    parts: list[Array]


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
        self._snapshot_schema = layout.snapshot_schema.insert(len(self._keys), _PANE_FIELD)
        place = _place_of_count(calls)
        in_snapshot = layout.in_snapshot[place].start if place is not None else None
        self._records_at = 1 + (len(layout.snapshot_schema) if in_snapshot is None else in_snapshot)
        """Where partial aggregates say how many records they are made of."""
        self._output_schema = _with_window(layout.result_schema)
        self._inputs = list(dict.fromkeys(call.input for call in calls if call.input is not None))
        inputs = [input_schema.field(name) for name in self._inputs]
        self._numbered_schema = pa.schema([pa.field(_KEY, pa.int64()), *inputs])
        self._key_types = [field.type for field in key_fields]
        self._index = key_index(self._key_types, None)
        self._numbers_max = _NUMBERS_MIN
        self._closing = _Closing(self._layout())
        self._results = self._layout()

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
            late = None if partial else _without_panes(batch.filter(pa.array(is_late)))
            panes, rows = panes[~is_late], rows.filter(pa.array(~is_late))
        touched: dict[int, pa.RecordBatch] = {}
        for pane, part in self._by_pane(panes, rows):
            table = self._table(pane)
            touched[pane] = table.merge(part) if partial else table.update(part)
            self._closing.on_change(pane)
        self._version += bool(touched)
        return Added(self._updates(touched, now_us), late_rows, late)

    def _numbered_records(self, batch: pa.RecordBatch) -> tuple[Array, pa.RecordBatch]:
        numbers = self._numbers_of([batch.column(key) for key in self._keys], batch.num_rows)
        columns = [pa.array(numbers), *(batch.column(name) for name in self._inputs)]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._numbered_schema)
        return fixed_width_values(batch.column(PANE)), rows

    def _numbered(self, rows: pa.RecordBatch) -> tuple[Array, pa.RecordBatch]:
        """The panes of rows like those of a snapshot, and the rows with numbers for keys."""
        count = len(self._keys)
        numbers = pa.array(self._numbers_of(rows.columns[:count], rows.num_rows))
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

    def _numbers_of(self, keys: Sequence[pa.Array], count: int) -> Positions:
        if not keys:
            return self._index.rows_of([], np.full(count, NO_COLUMNS_HASH, dtype=np.uint64))
        return self._index.rows_of([canonical(key) for key in keys])

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
        return AggregateTable(*of_numbers, self._max_parallelism, self._keys_expected)

    def _layout(self) -> Layout:
        # New accumulators: what one remembers of its values must not reach another's.
        fields = key_fields_of(self._numbered_schema, [_KEY])
        return Layout(fields, accumulators_of(self._numbered_schema, self._calls))

    # --- output as windows change

    def _updates(self, touched: dict[int, pa.RecordBatch], now_us: int) -> list[pa.RecordBatch]:
        if not self._emits_updates or not touched:
            return []
        if not self._panes.is_tumbling:
            return self._sliding_updates(touched, now_us)
        size_us = self._panes.size_us
        return list(_joined(self._of_window(pane + size_us, touched[pane]) for pane in touched))

    def _sliding_updates(
        self, touched: dict[int, pa.RecordBatch], now_us: int
    ) -> list[pa.RecordBatch]:
        """Of each open window that has a touched pane, the keys that were touched in it."""
        numbers = {pane: _numbers_in(rows) for pane, rows in touched.items()}
        asked = np.unique(np.concatenate(list(numbers.values())))
        values = self._sliding_values(asked, numbers, now_us)
        return list(self._emitted(values, _Keys(self._index.freeze(), asked)))

    def _sliding_values(
        self, asked: Positions, numbers: dict[int, Positions], now_us: int
    ) -> Iterator[_Values]:
        """The same, with places among `asked` for keys, which has all the numbers once, sorted."""
        wanted = _Wanted({pane: np.searchsorted(asked, each) for pane, each in numbers.items()})
        looked_up = _LookedUp(asked, len(self._index))
        sliding = _Sliding(self._layout())
        panes, following = sorted(self._tables), 0
        for end_us in self._ends(sorted(numbers), now_us, _END_US):
            start_us = end_us - self._panes.size_us
            following = max(following, bisect_left(panes, start_us))
            while following < len(panes) and panes[following] < end_us:
                sliding.append(_Pane(panes[following], *self._held(panes[following], looked_up)))
                following += 1
            sliding.drop_before(start_us)
            found, parts = sliding.merged()
            here = wanted.between(start_us, end_us, len(asked))[found]
            if not here.all():
                found, parts = found[here], [array[here] for array in parts]
            yield _Values(end_us, found, parts)

    def _held(self, pane: int, looked_up: _LookedUp) -> tuple[Positions, list[Array]]:
        table = self._tables[pane]
        if looked_up.is_to_be_scanned(table):
            return looked_up.found_among(self._numbers_in_pane(pane), table.parts())
        return looked_up.found_in(table)

    def _numbers_in_pane(self, pane: int) -> Positions:
        """Of its keys; most panes have got none since they were asked last."""
        table, known = self._tables[pane], self._known_numbers.get(pane)
        if known is None or len(known) != len(table):
            known = self._known_numbers[pane] = _numbers_in(table.keys())
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
        yield from self._emitted(self._closed(since_us, until_us))
        self._take_numbers_back_if_many()  # not before the last batch is made, which goes by them

    def everything(self) -> Iterable[pa.RecordBatch]:
        """All windows as they are now; to be gone through before anything else is asked."""
        panes = sorted(self._tables)
        self._closing = _Closing(self._layout())
        ends = self._ends(panes, BEGINNING_US, _END_US)
        return self._emitted(self._values_of_window(panes, end_us) for end_us in ends)

    def _closed(self, since_us: int, until_us: int) -> Iterator[_Values]:
        panes = sorted(self._tables)
        dropped = 0
        for end_us in self._ends(panes, since_us, until_us):
            yield self._values_of_window(panes, end_us)
            while dropped < len(panes) and self._panes.last_end(panes[dropped]) <= end_us:
                self._drop_one(panes[dropped])
                dropped += 1
        self._drop(panes[dropped:], until_us)

    def _values_of_window(self, panes: Sequence[int], end_us: int) -> _Values:
        start_us = end_us - self._panes.size_us
        if self._panes.is_tumbling:
            table = self._tables[start_us]
            return _Values(end_us, _numbers_in(table.keys()), table.parts())
        if self._closing.is_outdated:
            self._closing = _Closing(self._layout())
        begin = bisect_left(panes, max(start_us, self._closing.next_us))
        for pane in panes[begin : bisect_left(panes, end_us)]:
            self._closing.append(pane, self._tables[pane])
        return _Values(end_us, *self._closing.values_from(start_us))

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

    def _emitted(
        self, windows: Iterable[_Values], keys: _Keys | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The windows as they are emitted, as many in a batch as have room in it.

        `keys` are those that the windows' numbers stand for; None: they are the table's.
        """
        waiting: list[_Values] = []
        rows = 0
        for window in windows:
            if waiting and rows + len(window.numbers) > _EMITTED_ROWS_MAX:
                yield self._of_windows(waiting, keys or self._index.freeze())
                waiting, rows = [], 0
            waiting.append(window)
            rows += len(window.numbers)
        if rows:
            yield self._of_windows(waiting, keys or self._index.freeze())

    def _of_windows(
        self, windows: Sequence[_Values], keys: _Keys | FrozenKeyIndex
    ) -> pa.RecordBatch:
        numbers = np.concatenate([window.numbers for window in windows])
        ends_us = np.repeat(
            [min(window.end_us, _END_US) for window in windows],
            [len(window.numbers) for window in windows],
        )
        parts = [np.concatenate(arrays) for arrays in zip(*(w.parts for w in windows), strict=True)]
        if self._reached is not None:
            # Some keys' values of these windows were emitted before a restore.
            new = self._reached.times_of(keys.hashes[numbers]) < ends_us
            numbers, ends_us, parts = numbers[new], ends_us[new], [array[new] for array in parts]
        return pa.RecordBatch.from_arrays(
            [
                _window_column(ends_us, self._panes.size_us),
                *(column.take(numbers) for column in keys.columns),
                *(each.result(parts[where]) for each, where in self._results.each_in_memory()),
            ],
            schema=self._output_schema,
        )

    def _of_window(self, end_us: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with numbers for keys, as they are emitted."""
        keys = self._index.freeze()
        numbers = _numbers_in(rows)
        if self._reached is not None:
            # Some keys' values of this window were emitted before a restore.
            rows = rows.filter(pa.array(self._reached.times_of(keys.hashes[numbers]) < end_us))
            numbers = _numbers_in(rows)
        columns = [column.take(numbers) for column in keys.columns]
        ends_us = np.full(rows.num_rows, min(end_us, _END_US))
        window = _window_column(ends_us, self._panes.size_us)
        return pa.RecordBatch.from_arrays(
            [window, *columns, *rows.columns[1:]], schema=self._output_schema
        )

    # --- numbers of keys

    def _take_numbers_back_if_many(self) -> None:
        if len(self._index) > self._numbers_max:
            self._take_numbers_back()

    def _take_numbers_back(self) -> None:
        """Give the keys that some pane has new numbers, if they are few among all."""
        used = np.zeros(len(self._index), dtype=np.bool_)
        for table in self._tables.values():
            used[_numbers_in(table.keys())] = True
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
            new = pa.array(renumbered[_numbers_in(rows)])
            self._tables[pane] = self._new_table()
            self._tables[pane].restore(rows.set_column(0, _KEY, new))
        self._closing = _Closing(self._layout())

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
        is_late: Flags = panes < min(max(self._panes.open_from(now_us), BEGINNING_US), _END_US)
        if self._reached is not None and not self._reached.is_passed_by(now_us):
            is_late |= self._was_late(panes, rows)
        return is_late if is_late.any() else None

    def _was_late(self, panes: Array, rows: pa.RecordBatch) -> Flags:
        """Which rows were late for their key groups already before a restore."""
        assert self._reached is not None
        starts, where = np.unique(panes, return_inverse=True)
        ends = np.array([min(self._panes.last_end(pane), _END_US) for pane in starts.tolist()])
        hashes = self._index.freeze().hashes[_numbers_in(rows)]
        was_late: Flags = ends[where] <= self._reached.times_of(hashes)
        return was_late


class _Closing:
    """The newest window that was closed, on its way to the next."""

    def __init__(self, layout: Layout) -> None:
        self._sliding = _Sliding(layout)
        self.is_outdated = False
        """Whether a pane has changed that is in already."""
        self.next_us = BEGINNING_US
        """Panes before are in already, or were left behind."""

    def on_change(self, pane: int) -> None:
        self.is_outdated |= pane < self.next_us

    def append(self, pane: int, table: AggregateTable) -> None:
        self._sliding.append(_Pane(pane, _numbers_in(table.keys()), table.parts()))
        self.next_us = pane + 1

    def values_from(self, start_us: int) -> tuple[Positions, list[Array]]:
        self._sliding.drop_before(start_us)
        return self._sliding.merged()


def _numbers_in(rows: pa.RecordBatch) -> Positions:
    return fixed_width_values(rows.column(0))


def _window_column(ends_us: npt.NDArray[np.int64], size_us: int) -> pa.Array:
    starts_us = np.maximum(ends_us, BEGINNING_US + size_us) - size_us
    columns = [pa.array(times).view(_TIMESTAMP) for times in (starts_us, ends_us)]
    return pa.StructArray.from_arrays(columns, fields=_BOUNDS)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches; none is empty."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if waiting and rows + batch.num_rows > _EMITTED_ROWS_MAX:
            yield _concatenated(waiting)
            waiting, rows = [], 0
        if batch.num_rows:
            waiting.append(batch)
            rows += batch.num_rows
    if waiting:
        yield _concatenated(waiting)


def _concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    [joined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


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
        rows = _concatenated([table.rows() for table in self._tables.values()])
        panes = np.repeat(list(self._tables), [len(table) for table in self._tables.values()])
        numbers = _numbers_in(rows)
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
