"""Functions with faults in them, for scenarios."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.functions import KeyedFunction
from stillframe.api.timers import Timers
from stillframe.testing.sources import Gate


class GatedAlarm(KeyedFunction):
    """Says each key when event time has passed the time in its record.

    From a time on it does not before the gate is open: it registers those timers again at once, so
    that the burst they belong to does not end.
    """

    def __init__(self, time: str, gated_us: int, gate: Gate) -> None:
        self._time = time
        self._gated = pa.scalar(gated_us).cast(pa.timestamp("us", "UTC"))
        self._gate = gate

    def open(self, timers: Timers) -> None:
        self._timers = timers

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        self._timers.register(batch, batch.column(self._time))
        return ()

    def on_event_timers(self, fired: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        if not self._gate.is_open:
            is_gated = pc.greater_equal(fired.column("time"), self._gated)
            gated = fired.filter(is_gated)
            self._timers.register(gated, gated.column("time"))
            fired = fired.filter(pc.invert(is_gated))
        yield fired
