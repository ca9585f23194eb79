"""Functions with faults in them, for scenarios."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


class StandingAt(KeyedFunction):
    """Passes records on; the subtask that gets one value of a column stands still, and its slot
    with it, until the gate is open. That it stands there is told by opening `reached`."""

    def __init__(self, column: str, value: int, gate: Gate, reached: Gate) -> None:
        self._column = column
        self._value = value
        self._gate = gate
        self._reached = reached

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        if self._value in batch.column(self._column).to_pylist():
            self._reached.open()
            self._gate.await_open()
        yield batch


@dataclass(frozen=True, slots=True)
class DyingOf:
    """For `mapInArrow`: its process is killed by one value of a column, whenever it comes."""

    column: str
    value: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.value in batch.column(self.column).to_pylist():
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch
