"""What a source has to give: the rows of each split, read once from its beginning."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from stillframe.api.sources import (
    EndOfData,
    NothingYet,
    Source,
    SourceContext,
    SourceReader,
    Split,
)
from stillframe.ids import SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.runtime.building import opened_reader
from stillframe.runtime.reading import AheadReader
from stillframe.testing.clock import ManualClock
from stillframe.testing.conformance.promises import Broken, named

Rows = Counter[Hashable]

POLLS = "poll answers records, NothingYet or EndOfData at once: a barrier waits for it"
READS = "a reader reads what it was given, whatever has happened to the one before it"
ENDS = "a split that has been read to its end stays so: EndOfData is answered again"
TYPED = "every batch has the columns that the source's schema declares"

_POLL_SECONDS_MAX = 1.0
_QUIET_SECONDS = 2.0
"""After which there is nothing more to come, if nobody says how much there is."""


class Polling:
    """Polls readers as a slot's loop does, in virtual time, and says what is wrong at once."""

    def __init__(self, source: Source) -> None:
        self._schema = source.schema
        self._woken = threading.Event()
        self.clock = ManualClock()

    def context(self, subtask: int, parallelism: int) -> SourceContext:
        return SourceContext(SubtaskIndex(subtask), parallelism, self.clock)

    def wake(self) -> None:
        self._woken.set()

    def next(self, reader: SourceReader, seconds_max: float) -> list[Hashable] | None:
        """The next rows; none at the end, None if nothing comes for so long."""
        deadline = time.monotonic() + seconds_max
        while True:
            self._woken.clear()
            began = time.monotonic()
            polled = reader.poll()
            took = time.monotonic() - began
            if took > _POLL_SECONDS_MAX:
                raise Broken(POLLS, f"it took {took:.1f} s", is_plain=True)
            match polled:
                case EndOfData():
                    return []
                case pa.RecordBatch():
                    if polled.num_rows:
                        return self._rows(polled)
                case NothingYet(retry_seconds):
                    if time.monotonic() > deadline:
                        return None
                    self.clock.advance(max(0.001, retry_seconds))
                    if isinstance(reader, AheadReader):  # which has a thread of its own
                        self._woken.wait(0.002)
                case _:
                    raise Broken(POLLS, f"it answered {polled!r:.100}", is_plain=True)

    def _rows(self, batch: pa.RecordBatch) -> list[Hashable]:
        if not batch.schema.equals(self._schema):
            seen = f"it is {_types(self._schema)}, and a batch has {_types(batch.schema)}"
            raise Broken(TYPED, seen, is_plain=True)
        return rows_of(batch)


def rows_of(batch: pa.RecordBatch) -> list[Hashable]:
    columns = [column.to_pylist() for column in batch.columns]
    return [tuple(map(_hashable, row)) for row in zip(*columns, strict=True)]


def _hashable(value: Any) -> Hashable:
    return value if isinstance(value, str | int | float | bytes | None) else repr(value)


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


class Truth:
    """The rows of the splits that a source has, as far as `rows_max` for each."""

    def __init__(self, source: Source, rows_max: int) -> None:
        self._source = source
        self._rows_max = rows_max
        self._by_split: dict[str, Rows] = {}
        self._begins_at: dict[str, JsonObject] = {}
        self.is_cut = False
        """Whether a split has more rows than were read: those are not looked at."""

    def learn(self, splits: Iterable[Split]) -> None:
        for split in splits:
            if self._begins_at.get(split.id) != split.position:
                self._begins_at[split.id] = dict(split.position)
                self._by_split[split.id] = self._read(split)

    def of(self, ids: Iterable[str]) -> Rows:
        return sum((self._by_split[each] for each in ids), Counter())

    def _read(self, split: Split) -> Rows:
        if not self._source.rewindable:  # what is read once is gone
            self.is_cut = True
            return Counter()
        polling, rows = Polling(self._source), Counter[Hashable]()
        context = polling.context(0, 1)
        reader = opened_reader(polling.wake, self._source, [split], context)
        try:
            if self._source.discovery_interval_seconds is not None:
                reader.no_more_splits(until_now=True)
            while new := polling.next(reader, _QUIET_SECONDS):
                rows.update(new)
                if rows.total() >= self._rows_max:
                    self.is_cut = True
                    break
        finally:
            reader.close()
        return rows

    def missing(self, ids: Iterable[str], counted: Rows) -> Rows:
        return self.of(ids) - counted

    def repeated(self, ids: Iterable[str], counted: Rows) -> Rows:
        truth = self.of(ids)
        more = counted - truth
        return Counter({row: n for row, n in more.items() if row in truth or not self.is_cut})


def some(rows: Rows) -> str:
    """The first few of them, in words."""
    listed: Sequence[Hashable] = list(rows)
    return f"{rows.total()} row(s), such as {named(listed[:2])}"
