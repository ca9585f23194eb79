"""Spark's `rate-micro-batch`: so many rows in each batch, of which all carry the same time.

Theory of operation. Spark makes one batch for each micro-batch, and there are none here. So the
batches keep a pace of their own, counted from the moment the reader was opened. What is in a batch
does not depend on it: a row follows from its value alone, in Spark as here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stillframe.api.sources import (
    EndOfData,
    NothingYet,
    Polled,
    Source,
    SourceContext,
    SourceReader,
    Split,
)
from stillframe.clock import Clock
from stillframe.config import parse_count, parse_count_or_zero, parse_duration_seconds
from stillframe.connectors.generate import (
    RATE_SCHEMA,
    Option,
    check_at_least,
    parsed_options,
    partition_of,
    partition_rows,
    split_id,
    whole_of,
)
from stillframe.errors import BuildError

_NAME = "rate-micro-batch"
_POLLED_ROWS_MAX = 65_536
_WAIT_SECONDS_MIN = 0.001


@dataclass(frozen=True, slots=True)
class RateMicroBatchSource(Source):
    """Row n has the value n and the time of batch n // `rows_per_batch`."""

    rows_per_batch: int
    partitions: int = 1
    start_ms: int = 0
    """The time of the rows in the first batch, since 1970."""
    advance_ms: int = 1000
    """How much later the time of each batch is than that of the one before."""
    interval_seconds: float = 1.0
    """How long after the one before a batch comes; 0: as fast as they are taken."""
    batches: int | None = None
    """None: it never ends."""

    def __post_init__(self) -> None:
        check_at_least(_NAME, "rowsPerBatch", self.rows_per_batch, 1)
        check_at_least(_NAME, "numPartitions", self.partitions, 1)
        check_at_least(_NAME, "startTimestamp", self.start_ms, 0)
        check_at_least(_NAME, "advanceMillisPerBatch", self.advance_ms, 0)
        check_at_least(_NAME, "batches", self.batches, 0)

    @property
    def is_unbounded(self) -> bool:
        return self.batches is None

    @property
    def schema(self) -> pa.Schema:
        return RATE_SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(split_id(each), {"next": 0}) for each in range(self.partitions)]

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        return _BatchReader(self, splits, context.clock)

    def rows_until(self, batch: float, partition: int) -> float:
        """How many rows of this partition are in the batches before this one."""
        if batch == math.inf:
            return math.inf
        return partition_rows(int(batch) * self.rows_per_batch, self.partitions, partition)

    def rows(self, partition: int, start: int, stop: int) -> pa.RecordBatch:
        """The rows `start` … `stop`-1 of one partition."""
        values = np.arange(start, stop, dtype=np.int64) * self.partitions + partition
        times_ms = self.start_ms + values // self.rows_per_batch * self.advance_ms
        times = pa.array(times_ms * 1000).view(RATE_SCHEMA.field("timestamp").type)
        return pa.RecordBatch.from_arrays([times, pa.array(values)], schema=RATE_SCHEMA)

    def describe(self) -> str:
        size = "unbounded" if self.batches is None else f"{self.batches} batches"
        return f"{_NAME} ({size} of {self.rows_per_batch} rows, {self.partitions} partitions)"


def rate_micro_batch_from_options(options: Mapping[str, str]) -> RateMicroBatchSource:
    """What `readStream.format("rate-micro-batch").option(…)` asks for."""
    known: dict[str, Option] = {
        "rowsPerBatch": ("rows_per_batch", parse_count),
        "numPartitions": ("partitions", parse_count),
        "startTimestamp": ("start_ms", parse_count_or_zero),
        "advanceMillisPerBatch": ("advance_ms", parse_count_or_zero),
        "batchInterval": ("interval_seconds", parse_duration_seconds),
        "batches": ("batches", parse_count_or_zero),
    }
    parsed = parsed_options(options, known, f"the source {_NAME}")
    if "rows_per_batch" not in parsed:
        raise BuildError(
            f"the source {_NAME} needs the option rowsPerBatch: say how many rows a batch has"
        )
    return RateMicroBatchSource(**parsed)


class _BatchReader(SourceReader):
    """Takes turns between its splits; none of them begins a batch before it is due."""

    def __init__(self, source: RateMicroBatchSource, splits: Sequence[Split], clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._opened_seconds = clock.monotonic_seconds()
        self._next = {partition_of(split): whole_of(split, "next") for split in splits}
        """Of each partition the index of its next row."""
        self._first = min(map(self._batch_of, self._next), default=0)
        """The batch that is due when the reader is opened."""
        last = math.inf if source.batches is None else source.batches
        self._ends = {each: source.rows_until(last, each) for each in self._next}
        self._open = frozenset(split_id(each) for each in self._next if not self._has_ended(each))
        self._polled: str | None = None

    def poll(self) -> Polled:
        if not self._open:
            return EndOfData()
        elapsed_seconds = self._clock.monotonic_seconds() - self._opened_seconds
        due = self._batches_due(elapsed_seconds)
        for partition, start in self._next.items():
            stop = min(self._source.rows_until(due, partition), self._ends[partition])
            if start < stop:
                return self._take(partition, start, int(min(stop, start + _POLLED_ROWS_MAX)))
        next_seconds = (due - self._first) * self._source.interval_seconds
        return NothingYet(max(next_seconds - elapsed_seconds, _WAIT_SECONDS_MIN))

    def _batches_due(self, elapsed_seconds: float) -> float:
        """The first batch that has to wait."""
        interval_seconds = self._source.interval_seconds
        if interval_seconds == 0:
            return math.inf
        return self._first + int(elapsed_seconds / interval_seconds) + 1

    def _take(self, partition: int, start: int, stop: int) -> pa.RecordBatch:
        batch = self._source.rows(partition, start, stop)
        del self._next[partition]  # the others come first the next time
        self._next[partition] = stop
        self._polled = split_id(partition)
        if self._has_ended(partition):
            self._open -= {self._polled}
        return batch

    def _has_ended(self, partition: int) -> bool:
        return self._next[partition] >= self._ends[partition]

    def _batch_of(self, partition: int) -> int:
        value = self._next[partition] * self._source.partitions + partition
        return value // self._source.rows_per_batch

    def open_splits(self) -> frozenset[str]:
        return self._open

    def polled_split(self) -> str | None:
        return self._polled

    def splits(self) -> list[Split]:
        return [Split(split_id(each), {"next": index}) for each, index in self._next.items()]

    def close(self) -> None:
        self._next = {}
