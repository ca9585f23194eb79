"""Spans of event time: which records make them, and which of them are one when they touch.

A record is the span from its event time to its gap later. Spans of one key that overlap, or of
which one begins where the other ends, are joined: Spark's rule.

Times are int64 in microseconds since 1970 in UTC, and may be negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from stillframe.api.windows import SessionWindow
from stillframe.errors import BuildError
from stillframe.key_groups import Flags, Positions, fixed_width_values
from stillframe.state.panes import microseconds
from stillframe.state.reached import BEGINNING_US, END_US

START, END = "__start", "__end"
"""The columns that say which span a row is: when it begins and when it ends."""
SPAN_FIELDS = (pa.field(START, pa.int64()), pa.field(END, pa.int64()))

Times = npt.NDArray[np.int64]

_TOGETHER_MAX = 2**62
"""So many pairs of keys and times have room in an int64."""


def with_spans(batch: pa.RecordBatch, window: SessionWindow) -> pa.RecordBatch:
    """The batch and the columns of its spans; without the records that are in no session.

    As in Spark: those without event time, and those whose gap is null or not positive.
    """
    times = batch.column(window.time)
    keep = times.is_valid() if times.null_count else None
    if isinstance(window.gap, str):
        lasts = pc.greater(batch.column(window.gap), 0).fill_null(False)
        keep = lasts if keep is None else pc.and_(keep, lasts)
    if keep is not None:
        batch = batch.filter(keep)
    starts = microseconds(batch.column(window.time))
    columns = [pa.array(starts), pa.array(_ends(starts, _gaps(batch, window)))]
    for field, column in zip(SPAN_FIELDS, columns, strict=True):
        batch = batch.append_column(field, column)
    return batch


def _gaps(batch: pa.RecordBatch, window: SessionWindow) -> Times | int:
    if isinstance(window.gap, str):
        gaps: Times = fixed_width_values(batch.column(window.gap))
        return gaps
    return window.gap


def _ends(starts: Times, gaps: Times | int) -> Times:
    ends: Times = starts + gaps
    ends[ends < starts] = END_US  # a gap is positive, so the sum has gone round
    return ends


def refuse_unless_possible(input_schema: pa.Schema, window: SessionWindow) -> None:
    """Raises if there can be no such sessions of such records."""
    if isinstance(window.gap, int):
        if window.gap <= 0:
            raise BuildError(f"a session with a gap of {window.gap} µs cannot be: make it positive")
    elif not pt.is_int64(kind := input_schema.field(window.gap).type):
        raise BuildError(f"the gap of a session is an int64 of microseconds, not {kind}: cast it")


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of several keys."""

    keys: Positions
    starts: Times
    ends: Times

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, places: Positions | Flags) -> Spans:
        return Spans(self.keys[places], self.starts[places], self.ends[places])

    def followed_by(self, others: Spans) -> Spans:
        return Spans(
            np.concatenate([self.keys, others.keys]),
            np.concatenate([self.starts, others.starts]),
            np.concatenate([self.ends, others.ends]),
        )


def joined(spans: Spans, key_count: int) -> tuple[Positions, Spans]:
    """For each span, which of the joined ones it is a part of; and those, by key and beginning.

    Keys are numbers below `key_count`.
    """
    if not len(spans):
        return np.zeros(0, dtype=np.int64), spans
    begins = _Offsets(spans.starts, key_count)
    order = np.argsort(begins.after(spans.keys, begins.of))
    ordered = spans.at(order)
    reach = _highest_so_far(ordered, key_count)
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = ordered.keys[1:] != ordered.keys[:-1]
    is_first[1:] |= ordered.starts[1:] > reach[:-1]
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(order)) - 1
    parts = np.empty(len(order), dtype=np.int64)
    parts[order] = np.cumsum(is_first) - 1
    return parts, Spans(ordered.keys[first], ordered.starts[first], reach[last])


def _highest_so_far(ordered: Spans, key_count: int) -> Times:
    """Of each span and those before it with the same key, the last end."""
    ends = _Offsets(ordered.ends, key_count)
    highest = np.maximum.accumulate(ends.after(ordered.keys, ends.of))
    return ends.back(highest - ends.after(ordered.keys, 0))


class _Offsets:
    """Numbers in the order of the times, small enough to stand behind a key in one int64."""

    def __init__(self, times: Times, key_count: int) -> None:
        self._low = int(times.min())
        self._size = int(times.max()) - self._low + 1
        self._names: Times | None = None
        if self._size * key_count < _TOGETHER_MAX:
            self.of = times - self._low
        else:
            self._names, self.of = np.unique(times, return_inverse=True)
            self._size = len(self._names)

    def after(self, keys: Positions, offsets: Times | int) -> Times:
        together: Times = keys * self._size + offsets
        return together

    def back(self, offsets: Times) -> Times:
        return offsets + self._low if self._names is None else self._names[offsets]


def joined_in_batch(records: Spans, key_count: int) -> tuple[Positions, Spans]:
    """As `joined`, in no order, and quicker where the records of a key are near each other."""
    common = _Common(records, key_count)
    if not common.is_apart.any():
        return records.keys, Spans(np.arange(key_count), common.first, common.last_end)
    whole = np.flatnonzero(~common.is_apart)
    parts = (np.cumsum(~common.is_apart) - 1).take(records.keys)
    apart = np.flatnonzero(common.is_apart.take(records.keys))
    parts_apart, spans_apart = joined(records.at(apart), key_count)
    parts[apart] = parts_apart + len(whole)
    spans = Spans(whole, common.first[whole], common.last_end[whole])
    return parts, spans.followed_by(spans_apart)


class _Common:
    """Of each key, whether all its spans have a moment in common."""

    def __init__(self, records: Spans, key_count: int) -> None:
        self.first = np.full(key_count, END_US)
        self.last_end = np.full(key_count, BEGINNING_US)
        last, first_end = self.last_end.copy(), self.first.copy()
        np.minimum.at(self.first, records.keys, records.starts)
        np.maximum.at(last, records.keys, records.starts)
        np.minimum.at(first_end, records.keys, records.ends)
        np.maximum.at(self.last_end, records.keys, records.ends)
        self.is_apart: Flags = last > first_end
