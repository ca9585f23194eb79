"""Panes: the spans that windows of event time are made of, and which of them a record is in.

Theory of operation
-------------------
A *pane* is the largest span that every window is made of: of windows of ten minutes every two, two
minutes. A record belongs to one pane, however many windows overlap there. So its pane is all that
has to travel with it: which windows it counts in, and whether it is late, follows from the pane.

Before the exchange, what one batch adds is found per key and pane (`WindowedPartials`), as it is
without windows per key (`partials`). Most batches lie in one pane; then their keys are grouped as
if there were none, and the pane is added afterwards. Among few panes a pane is known by its place,
as in a dictionary, and only among many it is looked up as any other key.

Rules of this file
------------------
1. Times are Python integers or int64 in microseconds since 1970 in UTC, and may be negative.
2. A record without an event time is in no pane, as in Spark a null is in no window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import Window
from stillframe.errors import BuildError, DataError
from stillframe.key_groups import fixed_width_values
from stillframe.state.aggregates import plain
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.state.reached import BEGINNING_US, END_US

PANE = "__pane"
"""The column that says to which pane a row belongs, by when that begins."""
PANE_FIELD = pa.field(PANE, pa.int64())

_RECORDS = "__records"
"""The column that says how many records a row is made of, where no aggregate says it."""


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

    def __str__(self) -> str:
        """What rows by pane mean: whoever takes them back must say the same."""
        every = "" if self.is_tumbling else f" every {_span(self.slide_us)}"
        moved = f" moved by {_span(self._start_us)}" if self._start_us % self.slide_us else ""
        return f"windows of {_span(self.size_us)}{every}{moved}"

    def starts_of(self, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When the pane of each time begins."""
        shift = self._start_us % self.width_us
        starts: npt.NDArray[np.int64] = (times_us - shift) // self.width_us
        starts *= self.width_us
        starts += shift
        return starts

    def refuse_overflow(self, first: int, last: int) -> None:
        """Raise if windows of panes from the first to the last begin or end beyond all timestamps.

        A time at the very end of what can be said has a pane that wraps around: it shows as one.
        """
        far_us = self.size_us + self.slide_us
        if first < BEGINNING_US + far_us or last > END_US - far_us:
            raise DataError(
                "[ARITHMETIC_OVERFLOW] a record's event time is so far from 1970 (microseconds"
                f" around {first} or {last}) that its window of {self.size_us} µs cannot be said:"
                " correct it in the source, or filter it out"
            )

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


def _span(us: int) -> str:
    return f"{us} µs" if us % 1_000_000 else f"{us // 1_000_000} s"


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
    starts = panes_of(batch.column(window.time), window)
    if len(starts):
        Panes(window).refuse_overflow(int(starts.min()), int(starts.max()))
    return batch.append_column(PANE_FIELD, pa.array(starts))


def without_panes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as it was before `with_panes`, but for records that were left out."""
    return batch.select([name for name in batch.schema.names if name != PANE])


def _with_times(batch: pa.RecordBatch, window: Window) -> pa.RecordBatch:
    times = batch.column(window.time)
    return batch.filter(times.is_valid()) if times.null_count else batch


# --- before the exchange


def counting_records(calls: Sequence[AggregateCall]) -> tuple[AggregateCall, ...]:
    """The same calls, among them one that counts records: those that come too late are counted."""
    if place_of_count(calls) is not None:
        return tuple(calls)
    return (*calls, AggregateCall("count", None, _RECORDS, pa.int64()))


def place_of_count(calls: Sequence[AggregateCall]) -> int | None:
    """Which of the calls counts records; None: none does."""
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
        schema = input_schema.append(PANE_FIELD)
        self._of_several = PartialAggregates(schema, (*keys, PANE), calls)

    def on_watermark(self, time_us: int) -> None:
        """Whether a record is late follows from its pane, which the receiver knows."""

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The partial aggregates of the batch if they are few, else the records; keys first."""
        batch = _with_times(batch, self._window)
        starts = self._panes.starts_of(microseconds(batch.column(self._window.time)))
        first, last = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
        self._panes.refuse_overflow(first, last)
        if first == last:
            return self._with_pane(self._of_one_pane.combine(batch), first)
        return self._combine_several(batch, starts, first, last)

    def _with_pane(self, combined: pa.RecordBatch, pane: int) -> pa.RecordBatch:
        panes = pa.array(np.full(combined.num_rows, pane))
        metadata = combined.schema.metadata
        combined = combined.add_column(self._key_count, PANE_FIELD, panes)
        return combined.replace_schema_metadata(metadata)

    def _combine_several(
        self, batch: pa.RecordBatch, starts: npt.NDArray[np.int64], first: int, last: int
    ) -> pa.RecordBatch:
        count = (last - first) // self._panes.width_us + 1
        if count > batch.num_rows:
            return self._of_several.combine(batch.append_column(PANE_FIELD, pa.array(starts)))
        # As a dictionary: its indices are numbers of panes already.
        indices = (starts - first) // self._panes.width_us
        names = pa.array(first + np.arange(count) * self._panes.width_us)
        panes = pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), names)
        combined = self._of_several.combine(batch.append_column(pa.field(PANE, panes.type), panes))
        if is_partial(combined):
            return combined
        return combined.set_column(self._key_count, PANE_FIELD, plain(panes))
