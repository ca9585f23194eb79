"""Event time in simulated jobs: a function of the user's, whose timers say when it speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from stillframe.api.functions import KeyedFunction
from stillframe.api.timers import Timers
from stillframe.graph.logical import MapInArrow, Node, Process
from stillframe.testing.simulation.outside import Records
from stillframe.testing.simulation.timed import (
    COUNTED_SCHEMA,
    SECOND_US,
    WINDOWED_SCHEMA,
    Results,
    Timed,
    moment_of,
    seconds,
    summed,
    times,
    windows_of,
)


@dataclass(frozen=True, slots=True)
class Alarms(Timed):
    """Counts the records of each key and moment, and says so some seconds later.

    Perhaps that is added up by windows, before which no alarm may be late.
    """

    name = "timers"
    schema = WINDOWED_SCHEMA
    places = 2

    after: int
    outer: int | None = None

    def built(self, node: Node, uid: str) -> Node:
        making = Process(partial(CountUntil, self.after * SECOND_US), "count-until", ("key",))
        node = Node(making, COUNTED_SCHEMA, (node,), f"alarms-{uid}")
        if self.outer is not None:
            return summed(node, uid, self.outer)
        return Node(MapInArrow(_time_first, "alarm"), WINDOWED_SCHEMA, (node,), f"alarm-{uid}")

    def expected(self, records: Records) -> Results:
        alarms = ((moment_of(n) + self.after, n, key) for n, key in records.tolist())
        size = self.outer or 1
        return windows_of(alarms, size, size)


def _time_first(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch([seconds(batch.column("at")), *batch.columns[:3]], WINDOWED_SCHEMA)


class CountUntil(KeyedFunction):
    """Counts by key and event time until a while later, by which all such records have come."""

    def __init__(self, after_us: int) -> None:
        self._after_us = after_us
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}

    def open(self, timers: Timers) -> None:
        self._timers = timers

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        alarms = batch.column("at").cast(pa.int64()).to_numpy() + self._after_us
        self._timers.register(batch, times(alarms))
        ids, keys = (batch.column(name).to_numpy().tolist() for name in ("id", "key"))
        self._count(zip(keys, alarms.tolist(), [1] * len(ids), ids, strict=True))
        return ()

    def on_event_timers(self, fired: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        keys = fired.column("key").to_numpy().tolist()
        alarms = fired.column("time").cast(pa.int64()).to_numpy().tolist()
        # A timer of which nothing is known should not have been there: it is seen in the output.
        rows = [
            (key, at, *self._counts.pop((key, at), (0, 0)))
            for key, at in zip(keys, alarms, strict=True)
        ]
        yield _counted(rows)

    def snapshot(self) -> pa.RecordBatch:
        return _counted([(*place, *counts) for place, counts in self._counts.items()])

    def restore(self, batch: pa.RecordBatch) -> None:
        keys, counts, totals, ats = (
            column.cast(pa.int64()).to_numpy().tolist() for column in batch.columns
        )
        self._count(zip(keys, ats, counts, totals, strict=True))

    def _count(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        for key, at, count, total in rows:
            before = self._counts.get((key, at), (0, 0))
            self._counts[key, at] = (before[0] + count, before[1] + total)


def _counted(rows: list[tuple[int, int, int, int]]) -> pa.RecordBatch:
    keys, ats, counts, totals = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    columns = [*map(pa.array, (keys, counts, totals)), times(ats)]
    return pa.record_batch(columns, COUNTED_SCHEMA)
