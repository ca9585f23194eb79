"""Aggregates per session and key: spans of event time that last while records keep coming.

Theory of operation
-------------------
A record is a span (`spans`), from its event time to its gap later. Spans of one key that overlap
or meet are one session: from the first beginning to the last end, with the aggregates of all. A
batch is joined to the open sessions in three steps. First its own
records: those of a key that all have a moment in common are one span, and only the rest are sorted.
Then the open sessions of the same keys that are not over before the batch's first record of the
key are looked up. Last, both are sorted by key and time and joined as far as they touch. The
records are folded into the sessions they belong to; a session that was joined to another is merged
into it.

A session is a row of columns: the number of its key, beginning, end, and what has been accumulated.
Keys are kept once. Each knows its newest session and each session the next older one of its key, so
a look-up goes back only as far as a batch is behind the newest. A session that has closed leaves
its row behind. When most rows are such, the open sessions and their keys are moved to new columns.

Event time closes sessions by their ends. So that not all have to be looked at whenever it moves,
those that end next are known: up to a *horizon*, which is moved when it has been passed.

Rules of this file
------------------
1. Loops go over columns, over rows of output by the batch, and over how many sessions of one key
   are open where a batch is looked up; never over records or keys.
2. A record is late if its own span ends at or before the watermark, whatever session it would have
   been a part of: Spark's rule. A span in the middle of what has been emitted may still be open,
   and becomes a session of its own.
3. Open sessions of one key do not touch, so whichever begins later also ends later.
4. Times are int64 in microseconds since 1970 in UTC, and may be negative.
5. Called by the loop thread only; frozen sessions are read by one background thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import SessionWindow
from stillframe.key_groups import (
    Flags,
    Positions,
    fixed_width_values,
    key_groups_of,
)
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.aggregates import Layout, by_key_group, canonical, key_index, numbers_of
from stillframe.state.columns import Array, ChangingColumns, ColumnSpec, FrozenColumns
from stillframe.state.folding import Touched
from stillframe.state.key_index import FrozenKeyIndex, fixed_width_array
from stillframe.state.key_places import keyed_by
from stillframe.state.panes import counting_records
from stillframe.state.partials import (
    Groups,
    PartialAggregates,
    is_partial,
    numbered_by,
    seem_to_repeat,
)
from stillframe.state.reached import BEGINNING_US, END_US, GroupSpan, Reached
from stillframe.state.spans import (
    END,
    SPAN_FIELDS,
    START,
    Spans,
    Times,
    joined,
    joined_in_batch,
    refuse_unless_possible,
    with_spans,
)
from stillframe.state.window_rows import output_schema
from stillframe.state.windows import Added

_SPAN_COLUMNS = [ColumnSpec(np.int64, -1), ColumnSpec(np.int64, 0), ColumnSpec(np.int64, 0)]
"""The number of the key, -1 where the session has closed; beginning; end."""
_NUMBER, _START, _END = range(3)
_NONE = -1
_EMITTED_ROWS_MAX = 32_768
_ROWS_MIN = 16_384
"""With fewer rows than this it is not worth moving the open sessions."""
_ROWS_PER_SESSION_MAX = 4
_NEXT_MIN = 4_096
"""So many of those that end next are known, or one of so many, whichever is more:"""
_NEXT_FRACTION = 64


# --- before the exchange


class SessionPartials:
    """As `PartialAggregates`, per session of a batch: keys, beginning, end, then the rest.

    Which records are late is for the receiver to say, of each by itself. So those that may be are
    not joined with others here, and nothing is joined before it is known which may be.
    """

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        window: SessionWindow,
    ) -> None:
        refuse_unless_possible(input_schema, window)
        self._window = window
        self._keys = tuple(keys)
        self._watermark_us: int | None = None
        schema = pa.schema([*input_schema, *SPAN_FIELDS])
        self._partials = PartialAggregates(schema, (*keys, START, END), counting_records(calls))

    def on_watermark(self, time_us: int) -> None:
        """The receiver has not come further in time than this."""
        self._watermark_us = time_us

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The partial aggregates of the batch if they are few, else the records; keys first."""
        batch = with_spans(batch, self._window)
        keys = [batch.column(key) for key in self._keys]
        if self._watermark_us is None or not seem_to_repeat(keys, batch.num_rows):
            return batch.select(self._partials.columns_read)
        keys = [canonical(key) for key in keys]
        parts, spans = self._sessions(batch, keys, self._watermark_us)
        if 2 * len(spans) > batch.num_rows:
            return batch.select(self._partials.columns_read)
        return self._partials.made_of(batch, _SessionsOfBatch(keys, parts, spans))

    def _sessions(
        self, batch: pa.RecordBatch, keys: Sequence[pa.Array], watermark_us: int
    ) -> tuple[Positions, Spans]:
        by_key = numbered_by(keys, batch.num_rows)
        numbers, count = by_key.numbers, by_key.count
        starts, ends = (fixed_width_values(batch.column(name)) for name in (START, END))
        late = np.flatnonzero(ends <= watermark_us)
        if len(late):
            # As if each had a key of its own. A key that has late records only is used no more.
            numbers = numbers.copy()
            numbers[late] = count + np.arange(len(late))
            used, numbers = np.unique(numbers, return_inverse=True)
            count = len(used)
        return joined_in_batch(Spans(numbers, starts, ends), count)


class _SessionsOfBatch(Groups):
    """The records of a batch by session."""

    def __init__(self, keys: Sequence[pa.Array], parts: Positions, spans: Spans) -> None:
        self.rows = parts
        self.count = len(spans)
        self.distinct = np.arange(self.count)
        self._keys = keys
        self._spans = spans

    def keys(self) -> list[pa.Array]:
        spans = [pa.array(self._spans.starts), pa.array(self._spans.ends)]
        return [*self.first_of(self._keys), *spans]


# --- the state


class SessionTable:
    """The sessions of one subtask that are open."""

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        window: SessionWindow,
        max_parallelism: int,
    ) -> None:
        refuse_unless_possible(input_schema, window)
        self._input_schema = input_schema
        self._window = window
        self._keys = tuple(keys)
        self._key_fields = key_fields_of(input_schema, keys)
        self._calls = tuple(calls)
        self._max_parallelism = max_parallelism
        self._version = 0
        self._reached: Reached | None = None
        """By key group, where some had come further in time than others before a restore."""
        self._scratch: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._clear()
        inputs = [call.input for call in calls if call.input is not None]
        self._read = list(dict.fromkeys([*keys, START, END, *inputs]))
        fields = list(self._layout.snapshot_schema)
        fields[len(keys) : len(keys)] = SPAN_FIELDS
        self._snapshot_schema = keyed_by(pa.schema(fields), range(len(keys)))
        self._output_schema = output_schema(input_schema, keys, calls)
        self._records_at = self._place_of_record_count()

    def _place_of_record_count(self) -> int:
        """Where partial aggregates say how many records they are made of."""
        calls = counting_records(self._calls)
        counted = Layout(self._key_fields, accumulators_of(self._input_schema, calls))
        [place, *_] = [i for i, c in enumerate(calls) if (c.function, c.input) == ("count", None)]
        in_snapshot: int = counted.in_snapshot[place].start
        return len(SPAN_FIELDS) + in_snapshot

    def _clear(self) -> None:
        # New accumulators: how far from 0 closed sessions were is of no interest.
        accumulators = accumulators_of(self._input_schema, self._calls)
        self._layout = Layout(self._key_fields, accumulators)
        self._index = key_index([field.type for field in self._key_fields], None)
        self._columns = ChangingColumns([*_SPAN_COLUMNS, *self._layout.columns])
        self._newest = _Links()
        """By key, the row of its newest session; it may have closed."""
        self._older = _Links()
        """By row, that of the next older session of its key; it may have closed."""
        self._next = _Next()
        self._open_count = 0

    def __len__(self) -> int:
        """How many sessions are open."""
        return self._open_count

    @property
    def state_bytes(self) -> int:
        """Roughly what is occupied; Python strings of min and max are not counted."""
        links = self._newest.nbytes + self._older.nbytes + self._next.nbytes
        columns = self._columns.nbytes + self._layout.held_bytes
        return self._index.nbytes + columns + self._scratch.nbytes + links

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
        """Fold in a batch of records or of partial aggregates; nothing is emitted before it ends.

        Partial aggregates have columns of spans.
        """
        partial = is_partial(batch)
        if not partial and START not in batch.schema.names:
            batch = with_spans(batch, self._window)
        rows = batch if partial else batch.select(self._read)
        numbers = self._numbers_of(rows)
        is_late = self._is_late(numbers, rows, watermark_us)
        if is_late is None:
            self._fold(numbers, rows)
            return Added([], 0)
        self._fold(numbers[~is_late], rows.filter(pa.array(~is_late)))
        if partial:
            counts = fixed_width_values(rows.column(self._records_at))
            return Added([], int(counts[is_late].sum()))
        late = _without_spans(batch.filter(pa.array(is_late)))
        return Added([], late.num_rows, late)

    def _is_late(
        self, numbers: Positions, rows: pa.RecordBatch, watermark_us: int | None
    ) -> Flags | None:
        """Which rows come too late; None: there are none."""
        _, ends = _spans_in(rows, len(self._keys))
        is_late: Flags = ends <= (BEGINNING_US if watermark_us is None else watermark_us)
        if self._reached is not None:
            is_late |= ends <= self._reached.times_of(self._index.freeze().hashes[numbers])
        return is_late if is_late.any() else None

    def _numbers_of(self, batch: pa.RecordBatch) -> Positions:
        return numbers_of(self._index, batch.columns[: len(self._keys)], batch.num_rows)

    def _fold(self, numbers: Positions, batch: pa.RecordBatch, is_restored: bool = False) -> None:
        if not batch.num_rows:
            return
        starts, ends = _spans_in(batch, len(self._keys))
        rows = self._rows_of(Spans(numbers, starts, ends))
        touched = Touched(rows, self._scratch_for(len(self._columns)))
        self._version += 1
        merges = is_restored or is_partial(batch)
        arrays = self._columns.arrays[len(_SPAN_COLUMNS) :]
        with np.errstate(all="ignore"):  # infinities and NaN are values
            for (accumulator, memory), snapshot in zip(
                self._layout.each_in_memory(), self._layout.in_snapshot, strict=True
            ):
                if merges:
                    columns = batch.columns[len(SPAN_FIELDS) :][snapshot]
                    accumulator.merge(arrays[memory], touched, columns)
                else:
                    accumulator.fold(arrays[memory], touched, accumulator.input_of(batch))

    def _rows_of(self, records: Spans) -> Positions:
        """The row of the session that each record is in now; it may be folded into."""
        keys = Touched(records.keys, self._scratch_for(len(self._index)))
        dense = Spans(keys.groups, records.starts, records.ends)
        part_of_record, parts = joined_in_batch(dense, len(keys.distinct))
        sessions = Spans(keys.distinct.take(parts.keys), parts.starts, parts.ends)
        return self._rows_of_sessions(sessions).take(part_of_record)

    def _rows_of_sessions(self, coming: Spans) -> Positions:
        """Join these sessions, of which no two touch, with those that are open."""
        numbers, places = np.unique(coming.keys, return_inverse=True)
        near, rest = self._open_near(numbers, _lowest(places, coming.starts, len(numbers)))
        both = Spans(places, coming.starts, coming.ends).followed_by(
            self._spans_at(near, np.searchsorted(numbers, self._array(_NUMBER)[near]))
        )
        parts, merged = joined(both, len(numbers))
        of_near = parts[len(coming) :]
        rows = np.full(len(merged), _NONE, dtype=np.int64)
        rows[of_near] = near
        is_absorbed = rows[of_near] != near
        absorbed = near[is_absorbed]
        rows[rows == _NONE] = self._new_rows(int(np.count_nonzero(rows == _NONE)))
        self._columns.before_change(np.concatenate([rows, absorbed]))
        self._absorb(absorbed, rows[of_near[is_absorbed]])
        self._put(rows, Spans(numbers[merged.keys], merged.starts, merged.ends))
        self._link(rows, merged.keys, numbers, rest)
        return rows[parts[: len(coming)]]

    def _open_near(self, numbers: Positions, lowest: Times) -> tuple[Positions, Positions]:
        """The open sessions of these keys that end at their times or later.

        And for each key the newest of its older ones.
        """
        number_of, ends = self._array(_NUMBER), self._array(_END)
        self._newest.extend_to(len(self._index))
        rest = self._newest.rows[numbers]
        found = []
        waiting = np.flatnonzero(rest != _NONE)
        while len(waiting):
            rows = rest[waiting]
            is_near = (number_of[rows] != _NONE) & (ends[rows] >= lowest[waiting])
            waiting, rows = waiting[is_near], rows[is_near]
            found.append(rows)
            rest[waiting] = self._older.rows[rows]
            waiting = waiting[rest[waiting] != _NONE]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64), rest

    def _absorb(self, absorbed: Positions, into: Positions) -> None:
        """Merge what has been accumulated in some rows into others, and close the former."""
        if not len(absorbed):
            return
        touched = Touched(into, self._scratch_for(len(self._columns)))
        arrays = self._columns.arrays[len(_SPAN_COLUMNS) :]
        with np.errstate(all="ignore"):
            for accumulator, memory in self._layout.each_in_memory():
                parts = [array.take(absorbed) for array in arrays[memory]]
                accumulator.merge(arrays[memory], touched, accumulator.to_snapshot(parts))
        self._forget(absorbed)

    def _put(self, rows: Positions, sessions: Spans) -> None:
        for column, values in (
            (_NUMBER, sessions.keys),
            (_START, sessions.starts),
            (_END, sessions.ends),
        ):
            self._array(column)[rows] = values
        self._next.on_change(rows, sessions.ends)

    def _link(
        self, rows: Positions, places: Positions, numbers: Positions, rest: Positions
    ) -> None:
        """Rows are by key and beginning, `places` those of their keys in `numbers` and `rest`."""
        is_oldest = np.ones(len(rows), dtype=np.bool_)
        is_oldest[1:] = places[1:] != places[:-1]
        is_newest = np.append(is_oldest[1:], True)
        older = np.empty(len(rows), dtype=np.int64)
        older[1:] = rows[:-1]
        older[is_oldest] = rest
        self._older.extend_to(len(self._columns))
        self._older.rows[rows] = older
        self._newest.rows[numbers] = rows[is_newest]

    def _new_rows(self, count: int) -> Positions:
        begin = len(self._columns)
        self._columns.extend_to(begin + count)
        self._open_count += count
        return np.arange(begin, begin + count)

    def _forget(self, rows: Positions) -> None:
        self._array(_NUMBER)[rows] = _NONE
        self._open_count -= len(rows)

    def _array(self, column: int) -> Array:
        return self._columns.arrays[column]

    def _spans_at(self, rows: Positions, keys: Positions) -> Spans:
        return Spans(keys, self._array(_START)[rows], self._array(_END)[rows])

    def _scratch_for(self, count: int) -> npt.NDArray[np.int32]:
        if len(self._scratch) < count:
            self._scratch = np.zeros(2 * count, dtype=np.int32)
        return self._scratch

    # --- sessions that close

    def close(self, watermark_us: int) -> Iterator[pa.RecordBatch]:
        """Event time has come this far: the sessions it has passed, in the order of their ends.

        What is answered has to be gone through before anything else is asked.
        """
        if self._reached is not None and self._reached.is_passed_by(watermark_us):
            self._reached = None
        rows = self._next.due(watermark_us, self._numbers_in_rows(), self._array(_END))
        if not len(rows):
            return
        yield from self._emitted(rows)
        self._columns.before_change(rows)
        self._forget(rows)
        self._version += 1
        if len(self._columns) > max(_ROWS_MIN, _ROWS_PER_SESSION_MAX * self._open_count):
            self._move()

    def _results(self, rows: Positions) -> pa.RecordBatch:
        spans = self._spans_at(rows, self._array(_NUMBER)[rows])
        columns = [self._bounds(spans)]
        columns += [key.take(spans.keys) for key in self._index.freeze().columns]
        arrays = self._columns.arrays[len(_SPAN_COLUMNS) :]
        for accumulator, memory in self._layout.each_in_memory():
            columns.append(accumulator.result([array.take(rows) for array in arrays[memory]]))
        return pa.RecordBatch.from_arrays(columns, schema=self._output_schema)

    def _bounds(self, spans: Spans) -> pa.Array:
        fields = list(self._output_schema.field(0).type)
        times = [pa.array(times).view(fields[0].type) for times in (spans.starts, spans.ends)]
        return pa.StructArray.from_arrays(times, fields=fields)

    def everything(self) -> Iterator[pa.RecordBatch]:
        """All open sessions as they are now; to be gone through before anything else is asked."""
        return self._emitted(np.flatnonzero(self._numbers_in_rows() != _NONE))

    def _emitted(self, rows: Positions) -> Iterator[pa.RecordBatch]:
        """These sessions, in the order of their ends."""
        rows = rows[np.argsort(self._array(_END)[rows], kind="stable")]
        for begin in range(0, len(rows), _EMITTED_ROWS_MAX):
            yield self._results(rows[begin : begin + _EMITTED_ROWS_MAX])

    def _numbers_in_rows(self) -> Positions:
        numbers: Positions = self._array(_NUMBER)[: len(self._columns)]
        return numbers

    def _move(self) -> None:
        """Leave closed sessions, and the keys that only they had, behind."""
        frozen = self.freeze()
        self._clear()
        if len(frozen):
            self.restore(frozen.rows())
        frozen.release()

    # --- snapshots

    def freeze(self) -> FrozenSessions:
        """All open sessions as they are now, by reference: the synchronous part of a snapshot."""
        return FrozenSessions(
            self._index.freeze(),
            self._columns.freeze(),
            self._layout,
            self._snapshot_schema,
            self._max_parallelism,
            self._open_count,
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any other."""
        self._fold(self._numbers_of(batch), batch, is_restored=True)

    def resume(self, watermark_us: int | None, further: Iterable[GroupSpan] = ()) -> None:
        """What was late before a restore stays so.

        `further` are key groups for which event time had come further.
        """
        self._reached = Reached.beyond(watermark_us, self._max_parallelism, further)

    @property
    def reached(self) -> Reached | None:
        """Key groups for which event time had come further before a restore."""
        return self._reached


def _spans_in(batch: pa.RecordBatch, key_count: int) -> tuple[Times, Times]:
    """By place: an aggregate may have any name."""
    starts, ends = batch.columns[key_count : key_count + len(SPAN_FIELDS)]
    return fixed_width_values(starts), fixed_width_values(ends)


def _without_spans(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select([name for name in batch.schema.names if name not in (START, END)])


def _lowest(places: Positions, values: Times, count: int) -> Times:
    lowest = np.full(count, END_US)
    np.minimum.at(lowest, places, values)
    return lowest


class _Links:
    """Row numbers, by row or by key; none at first."""

    def __init__(self) -> None:
        self.rows: Positions = np.full(0, _NONE, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def extend_to(self, count: int) -> None:
        if count > len(self.rows):
            more = np.full(max(count, 2 * len(self.rows)) - len(self.rows), _NONE, dtype=np.int64)
            self.rows = np.concatenate([self.rows, more])


class _Next:
    """Which sessions end next: all that do so until the horizon."""

    def __init__(self) -> None:
        self._horizon_us = BEGINNING_US
        self._rows: Positions = np.zeros(0, dtype=np.int64)
        """Those of the sessions, and of some that have closed or were put off."""
        self._is_in: Flags = np.zeros(0, dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._is_in.nbytes

    def on_change(self, rows: Positions, ends: Times) -> None:
        """These sessions, each once, end then."""
        soon = rows[ends <= self._horizon_us]
        if not len(soon):
            return
        self._extend_to(int(soon.max()) + 1)
        self._add(soon[~self._is_in[soon]])

    def due(self, until_us: int, numbers: Positions, ends: Times) -> Positions:
        """The rows of the open sessions that end until then; they are taken for closed now."""
        if until_us > self._horizon_us:
            self._look_ahead(until_us, numbers, ends)
        rows = self._rows
        ends_us = ends[rows]
        is_open = numbers[rows] != _NONE
        is_due = is_open & (ends_us <= until_us)
        is_kept = is_open & ~is_due & (ends_us <= self._horizon_us)
        self._is_in[rows[~is_kept]] = False
        self._rows = rows[is_kept]
        due: Positions = rows[is_due]
        return due

    def _look_ahead(self, until_us: int, numbers: Positions, ends: Times) -> None:
        rows = np.flatnonzero(numbers != _NONE)
        ends_us = ends[rows]
        count = max(_NEXT_MIN, len(rows) // _NEXT_FRACTION)
        self._horizon_us = until_us
        if len(rows):
            last = ends_us.max() if len(rows) <= count else np.partition(ends_us, count)[count]
            self._horizon_us = max(until_us, int(last))
        self._rows = np.zeros(0, dtype=np.int64)
        self._is_in = np.zeros(len(numbers), dtype=np.bool_)
        self._add(rows[ends_us <= self._horizon_us])

    def _add(self, rows: Positions) -> None:
        self._is_in[rows] = True
        self._rows = np.concatenate([self._rows, rows])

    def _extend_to(self, count: int) -> None:
        if count > len(self._is_in):
            more = np.zeros(max(count, 2 * len(self._is_in)) - len(self._is_in), dtype=np.bool_)
            self._is_in = np.concatenate([self._is_in, more])


class FrozenSessions:
    """The open sessions as they were at the barrier. Read by one thread, then released."""

    def __init__(
        self,
        index: FrozenKeyIndex,
        columns: FrozenColumns,
        layout: Layout,
        snapshot_schema: pa.Schema,
        max_parallelism: int,
        open_count: int,
    ) -> None:
        self._index = index
        self._columns = columns
        self._layout = layout
        self._snapshot_schema = snapshot_schema
        self._max_parallelism = max_parallelism
        self._open_count = open_count

    def __len__(self) -> int:
        return self._open_count

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._snapshot_schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The sessions of each key group that has any, in ascending order of key groups."""
        columns = self._open_columns()
        groups = key_groups_of(self._index.hashes[columns[_NUMBER]], self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = order[bounds[group] : bounds[group + 1]]
            yield group, self._batch([column.take(rows) for column in columns])

    def rows(self) -> pa.RecordBatch:
        """All at once, in no order."""
        return self._batch(self._open_columns())

    def release(self) -> None:
        """Give the memory back; later changes copy nothing for this view. May be called twice."""
        self._columns.release()

    def _open_columns(self) -> list[Array]:
        columns = self._columns.whole()
        rows = np.flatnonzero(columns[_NUMBER] != _NONE)
        return [column.take(rows) for column in columns]

    def _batch(self, parts: Sequence[Array]) -> pa.RecordBatch:
        columns = [key.take(parts[_NUMBER]) for key in self._index.columns]
        for part in (parts[_START], parts[_END]):
            columns.append(fixed_width_array(part, None, pa.int64()))
        accumulated = parts[len(_SPAN_COLUMNS) :]
        for accumulator, memory in self._layout.each_in_memory():
            columns.extend(accumulator.to_snapshot(accumulated[memory]))
        return pa.RecordBatch.from_arrays(columns, schema=self._snapshot_schema)
