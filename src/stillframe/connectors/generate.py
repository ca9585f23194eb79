"""Records out of thin air: page-view clicks for demos and proofs, and Spark's `rate` source.

Theory of operation. Every record is a pure function of the source's description, its partition
and its index in it, computed on whole columns. So a position is one number, a rewound reader
repeats itself exactly, and anybody can recount the input without having watched it pass by.

A rate is kept per partition, counted from the moment the reader was opened: a restored job goes
on at its pace, it neither rushes after the time it was down nor waits for it. A `rate` that catches
up is counted from the first start of the job instead: each row is due at the time it carries, and
what fell due while nobody read comes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
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
from stillframe.clock import Clock, SystemClock
from stillframe.config import (
    parse_count,
    parse_count_or_zero,
    parse_duration_seconds,
    parse_flag,
    refuse_unknown,
)
from stillframe.errors import BuildError
from stillframe.json_values import JsonObject

CLICK_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("app_id", pa.string()),
        ("user_id", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)
RATE_SCHEMA = pa.schema([("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])

_BATCH_ROWS = 65_536
_WAIT_SECONDS_MIN = 0.001
_TICK_SECONDS = 0.005
"""A rate-limited partition gathers this much before it emits, so that fast rates make no tiny
batches."""

_CLICKS_BEGIN_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
_CLICK_INTERVAL_US = 1_000
_USERS = np.uint64(1_000_000)
_APPS_OF_EIGHT_BYTES = 9_999
"""With as many apps, or fewer, all of their names have the same length."""


@dataclass(frozen=True, slots=True)
class ClickSource(Source):
    """Clicks on apps, some apps far more popular than others.

    `id` is dense: a bounded source makes each of 0 … records-1 exactly once. `at` is event time,
    one click a millisecond over all partitions, in order within each.
    """

    records: int | None = None
    """Over all partitions; None: it never ends."""
    records_per_second: float | None = None
    """Over all partitions; None: as fast as they are taken."""
    partitions: int = 4
    apps: int = 1000
    skew: int = 3
    """How uneven the apps are: 1 is even, and with 3 the first of 1,000 gets a tenth."""
    seed: int = 0
    batch_rows: int = _BATCH_ROWS

    def __post_init__(self) -> None:
        check_at_least("clicks", "records", self.records, 0)
        _check_rate("clicks", "recordsPerSecond", self.records_per_second)
        check_at_least("clicks", "partitions", self.partitions, 1)
        check_at_least("clicks", "apps", self.apps, 1)
        check_at_least("clicks", "skew", self.skew, 1)
        check_at_least("clicks", "batchRows", self.batch_rows, 1)

    @property
    def is_unbounded(self) -> bool:
        return self.records is None

    @property
    def schema(self) -> pa.Schema:
        return CLICK_SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(split_id(p), {"next": 0}) for p in range(self.partitions)]

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        rate = self.records_per_second
        cursors = [self._cursor(split, context.columns) for split in splits]
        pace = None if rate is None else _Pace(rate / self.partitions)
        return _GeneratingReader(cursors, self.batch_rows, pace, context.clock)

    def _cursor(self, split: Split, columns: tuple[str, ...] | None) -> _Cursor:
        partition = partition_of(split)
        end = partition_rows(self.records, self.partitions, partition)
        return _Cursor(split, end, partial(clicks_table, self, partition, columns=columns))

    def describe(self) -> str:
        size = "unbounded" if self.records is None else f"{self.records} records"
        return f"clicks ({size}, {self.partitions} partitions, seed {self.seed})"


def clicks_table(
    source: ClickSource,
    partition: int,
    start: int,
    stop: int,
    columns: tuple[str, ...] | None = None,
) -> pa.RecordBatch:
    """The clicks `start` … `stop`-1 of one partition, whoever has read what; by default whole."""
    clicks = _Clicks(source, np.arange(start, stop, dtype=np.int64) * source.partitions + partition)
    fields = CLICK_SCHEMA if columns is None else [CLICK_SCHEMA.field(name) for name in columns]
    arrays = [_MAKERS[field.name](clicks) for field in fields]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


class _Clicks:
    """Some clicks in the making."""

    def __init__(self, source: ClickSource, ids: npt.NDArray[np.int64]) -> None:
        self._source = source
        self._ids = ids
        self._bits = _mix(ids.view(np.uint64) + _seed_bits(source.seed))

    def id(self) -> pa.Array:
        return pa.array(self._ids)

    def app_id(self) -> pa.Array:
        return _app_names(self._app_indices(), self._source.apps)

    def _app_indices(self) -> npt.NDArray[np.int32]:
        # A power bends an even distribution; multiplied out, because ** takes ten times as long.
        even = (self._bits >> np.uint64(32)).astype(np.float64)
        even /= 2.0**32
        bent = even
        for _ in range(1, self._source.skew):
            bent = bent * even
        return (bent * self._source.apps).astype(np.int32)

    def user_id(self) -> pa.Array:
        users = ((self._bits & np.uint64(0xFFFF_FFFF)) * _USERS) >> np.uint64(32)
        return pa.array(users.view(np.int64))

    def at(self) -> pa.Array:
        jitter = (self._bits & np.uint64(0x3FF)) * np.uint64(_CLICK_INTERVAL_US)
        jitter_us = (jitter >> np.uint64(10)).view(np.int64)
        at = _CLICKS_BEGIN_US + self._ids * _CLICK_INTERVAL_US + jitter_us
        return pa.array(at).view(CLICK_SCHEMA.field("at").type)


_MAKERS: dict[str, Callable[[_Clicks], pa.Array]] = {
    "id": _Clicks.id,
    "app_id": _Clicks.app_id,
    "user_id": _Clicks.user_id,
    "at": _Clicks.at,
}


def clicks_from_options(options: Mapping[str, str]) -> ClickSource:
    """What `readStream.format("clicks").option(…)` asks for."""
    known: dict[str, Option] = {
        "records": ("records", parse_count_or_zero),
        "recordsPerSecond": ("records_per_second", _parse_rate),
        "partitions": ("partitions", parse_count),
        "apps": ("apps", parse_count),
        "skew": ("skew", parse_count),
        "seed": ("seed", parse_count_or_zero),
        "batchRows": ("batch_rows", parse_count),
    }
    return ClickSource(**parsed_options(options, known, "the source clicks"))


@dataclass(frozen=True, slots=True)
class RateSource(Source):
    """Spark's `rate`: so many rows a second, each with a time and the next value.

    The time of a row is the job's first start plus what the rate says, so that a replay gives
    the same rows; after a failure it runs behind the wall clock by the time the job was down,
    unless it catches up.
    """

    rows_per_second: int = 1
    partitions: int = 1
    rows: int | None = None
    """Over all partitions; None: it never ends."""
    start: int = 0
    """The first value."""
    catch_up: bool = False
    """Whether rows come at the time they carry, those of the past at once, as in Spark."""
    clock: Clock = field(default_factory=SystemClock, compare=False, repr=False)
    """Read once, on the driver, at the first start of the job."""
    ramp_up_seconds: int = 0
    """How long it takes until so many rows a second come: more with each second, as in Spark."""

    def __post_init__(self) -> None:
        check_at_least("rate", "rowsPerSecond", self.rows_per_second, 1)
        check_at_least("rate", "numPartitions", self.partitions, 1)
        check_at_least("rate", "rows", self.rows, 0)

    @property
    def is_unbounded(self) -> bool:
        return self.rows is None

    @property
    def schema(self) -> pa.Schema:
        return RATE_SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        position: JsonObject = {"next": 0, "base_ms": self.clock.wall_ms()}
        return [Split(split_id(p), position) for p in range(self.partitions)]

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        cursors = [self._cursor(split, context.clock) for split in splits]
        ramp = self._ramp if self.ramp_up_seconds else None
        pace = _Pace(self.rows_per_second / self.partitions, self.partitions, ramp)
        return _GeneratingReader(cursors, _BATCH_ROWS, pace, context.clock)

    @property
    def _ramp(self) -> _Ramp:
        return _Ramp(self.rows_per_second, self.ramp_up_seconds)

    def _cursor(self, split: Split, clock: Clock) -> _Cursor:
        partition = partition_of(split)
        base_ms = whole_of(split, "base_ms")
        end = partition_rows(self.rows, self.partitions, partition)
        cursor = _Cursor(split, end, partial(self._rows, partition, base_ms * 1000))
        if self.catch_up:
            cursor.paced_from = 0
            cursor.paced_before_seconds = (clock.wall_ms() - base_ms) / 1000
        elif self.ramp_up_seconds:  # how many come depends on when: it goes on where it was
            cursor.paced_from = 0
            due = self._ramp.times_us(np.array([cursor.next * self.partitions]))
            cursor.paced_before_seconds = float(due[0]) / 1e6
        return cursor

    def _rows(self, partition: int, base_us: int, start: int, stop: int) -> pa.RecordBatch:
        ordinals = np.arange(start, stop, dtype=np.int64) * self.partitions + partition
        times_us = base_us + self._ramp.times_us(ordinals)
        times = pa.array(times_us).view(RATE_SCHEMA.field("timestamp").type)
        values = pa.array(ordinals + self.start)
        return pa.RecordBatch.from_arrays([times, values], schema=RATE_SCHEMA)

    def describe(self) -> str:
        size = "unbounded" if self.rows is None else f"{self.rows} rows"
        return f"rate ({size}, {self.partitions} partitions)"


def rate_from_options(options: Mapping[str, str]) -> RateSource:
    """What `readStream.format("rate").option(…)` asks for."""
    known: dict[str, Option] = {
        "rowsPerSecond": ("rows_per_second", parse_count),
        "numPartitions": ("partitions", parse_count),
        "rows": ("rows", parse_count_or_zero),
        "start": ("start", parse_count_or_zero),
        "catchUp": ("catch_up", parse_flag),
        "rampUpTime": ("ramp_up_seconds", _parse_whole_seconds),
    }
    return RateSource(**parsed_options(options, known, "the source rate"))


def _parse_whole_seconds(name: str, value: str) -> int:
    return int(parse_duration_seconds(name, value))


class _Ramp:
    """When each row comes: in each of the first seconds as many more as in the one before."""

    def __init__(self, rows_per_second: int, seconds: int) -> None:
        self._rate, self._seconds = rows_per_second, seconds
        more = rows_per_second // (seconds + 1)
        self._each = more * np.arange(seconds + 1, dtype=np.int64)
        """Rows in each second of the ramp; in front of the first there is none."""
        self._before = np.cumsum(self._each)

    def times_us(self, ordinals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """After the beginning."""
        climbed = int(self._before[-1])
        # In two steps: ordinals * 1,000,000 would overflow after nine million million rows.
        whole, rest = np.divmod(ordinals - climbed, self._rate)
        times_us: npt.NDArray[np.int64] = (self._seconds + whole) * 1_000_000
        times_us += rest * 1_000_000 // self._rate
        early = np.flatnonzero(ordinals < climbed)
        if len(early):
            second = np.searchsorted(self._before, ordinals[early], side="right")
            within = ordinals[early] - self._before[second - 1]
            times_us[early] = (second - 1) * 1_000_000 + within * 1_000_000 // self._each[second]
        return times_us

    def rows_until(self, seconds: float) -> float:
        whole = int(seconds)
        if whole >= self._seconds:
            return float(self._before[-1]) + (seconds - self._seconds) * self._rate
        return float(self._before[whole]) + (seconds - whole) * float(self._each[whole + 1])


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast the rows of each split come."""

    rows_per_second: float
    """When it is even."""
    splits: int = 1
    ramp: _Ramp | None = None

    def rows_until(self, seconds: float) -> int:
        if self.ramp is not None:
            return int(self.ramp.rows_until(seconds) / self.splits)
        return int(seconds * self.rows_per_second)

    def seconds_until(self, rows: float) -> float:
        if self.ramp is not None:
            return float(self.ramp.times_us(np.array([int(rows) * self.splits]))[0]) / 1e6
        return rows / self.rows_per_second


class _Cursor:
    """One split, the index of its next row, and how its rows are made."""

    def __init__(
        self, split: Split, end: float, make: Callable[[int, int], pa.RecordBatch]
    ) -> None:
        self.next = self.paced_from = whole_of(split, "next")
        self.end = end
        self.make = make
        self.paced_before_seconds = 0.0
        """How long before the reader was opened the row `paced_from` was due."""
        self._split = split

    @property
    def id(self) -> str:
        return self._split.id

    @property
    def ended(self) -> bool:
        return self.next >= self.end

    def take(self, rows: int) -> pa.RecordBatch:
        batch = self.make(self.next, self.next + rows)
        self.next += rows
        return batch

    def split(self) -> Split:
        return Split(self._split.id, {**self._split.position, "next": self.next})


class _GeneratingReader(SourceReader):
    """Takes turns between its splits, each at its pace."""

    def __init__(
        self, cursors: list[_Cursor], batch_rows: int, pace: _Pace | None, clock: Clock
    ) -> None:
        self._cursors = cursors
        self._batch_rows = batch_rows
        self._pace = pace
        """None: as fast as they are taken."""
        self._clock = clock
        self._opened_seconds = clock.monotonic_seconds()
        self._turn = 0
        self._open = frozenset(cursor.id for cursor in cursors if not cursor.ended)
        self._polled: str | None = None

    def poll(self) -> Polled:
        elapsed_seconds = self._clock.monotonic_seconds() - self._opened_seconds
        wait_seconds = math.inf
        for offset in range(len(self._cursors)):
            turn = (self._turn + offset) % len(self._cursors)
            cursor = self._cursors[turn]
            if cursor.ended:
                continue
            wait = self._wait_seconds(cursor, elapsed_seconds)
            if wait <= 0:
                self._turn = turn + 1
                return self._take(cursor, self._rows_due(cursor, elapsed_seconds))
            wait_seconds = min(wait_seconds, wait)
        return EndOfData() if wait_seconds == math.inf else NothingYet(wait_seconds)

    def _take(self, cursor: _Cursor, rows: int) -> pa.RecordBatch:
        batch = cursor.take(rows)
        self._polled = cursor.id
        if cursor.ended:
            self._open -= {cursor.id}
        return batch

    def open_splits(self) -> frozenset[str]:
        return self._open

    def polled_split(self) -> str | None:
        return self._polled

    def _wait_seconds(self, cursor: _Cursor, elapsed_seconds: float) -> float:
        """Until this split has gathered enough for a batch."""
        if self._pace is None:
            return 0.0
        tick_rows = min(self._batch_rows, max(1, int(self._pace.rows_per_second * _TICK_SECONDS)))
        wanted = min(cursor.next + tick_rows, cursor.end)
        # Compared as whole rows: a wait computed in floats may end a hair too early, for ever.
        if wanted <= self._allowed(cursor, elapsed_seconds):
            return 0.0
        due_seconds = self._pace.seconds_until(wanted - cursor.paced_from)
        due_seconds -= cursor.paced_before_seconds
        return max(due_seconds - elapsed_seconds, _WAIT_SECONDS_MIN)

    def _rows_due(self, cursor: _Cursor, elapsed_seconds: float) -> int:
        stop = min(cursor.next + self._batch_rows, cursor.end)
        if self._pace is not None:
            stop = min(stop, self._allowed(cursor, elapsed_seconds))
        return int(stop) - cursor.next

    def _allowed(self, cursor: _Cursor, elapsed_seconds: float) -> int:
        """The index this split may have reached by now."""
        assert self._pace is not None
        paced_seconds = elapsed_seconds + cursor.paced_before_seconds
        return cursor.paced_from + self._pace.rows_until(paced_seconds)

    def splits(self) -> list[Split]:
        return [cursor.split() for cursor in self._cursors]

    def close(self) -> None:
        self._cursors = []


Option = tuple[str, Callable[[str, str], Any]]


def parsed_options(options: Mapping[str, str], known: dict[str, Option], of: str) -> dict[str, Any]:
    refuse_unknown(options, known, of)
    by_lower = {name.lower(): name for name in known}
    values: dict[str, Any] = {}
    for given, text in options.items():
        option = by_lower[given.lower()]
        field_name, parse = known[option]
        values[field_name] = parse(option, str(text))
    return values


def _parse_rate(option: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    _check_rate("clicks", option, rate)
    return rate


def _check_rate(source: str, option: str, rate: float | None) -> None:
    if rate is not None and not 0 < rate < math.inf:
        raise BuildError(
            f"option {option} of {source} is a number of records above 0, not {rate}:"
            " leave it out for full speed"
        )


def check_at_least(source: str, option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise BuildError(f"option {option} of {source} must be at least {least}, not {value}")


def partition_rows(total: int | None, partitions: int, partition: int) -> float:
    """How many of the dense ids 0 … total-1 belong to this partition."""
    return math.inf if total is None else max(0, -((partition - total) // partitions))


def split_id(partition: int) -> str:
    return f"partition-{partition:05d}"


def partition_of(split: Split) -> int:
    return int(split.id.removeprefix("partition-"))


def whole_of(split: Split, name: str) -> int:
    value = split.position[name]
    assert isinstance(value, int), f"{name} of split {split.id} is {value!r}"
    return value


def _app_names(indices: npt.NDArray[np.int32], apps: int) -> pa.Array:
    names = _all_app_names(apps)
    if apps > _APPS_OF_EIGHT_BYTES:
        return names.take(pa.array(indices))
    # Each is one word, and numpy takes words in a third of the time that Arrow needs for strings.
    words = np.frombuffer(names.buffers()[2], np.uint64, apps).take(indices)
    offsets = _offsets_of_words(1 << (len(words) - 1).bit_length())
    buffers = [None, offsets, pa.py_buffer(words)]
    return pa.Array.from_buffers(pa.string(), len(words), buffers)


@lru_cache(maxsize=8)
def _all_app_names(apps: int) -> pa.Array:
    return pa.array([f"app-{number:04d}" for number in range(1, apps + 1)], pa.string())


@lru_cache(maxsize=8)
def _offsets_of_words(count: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(0, 8 * (count + 1), 8, dtype=np.int32))


def _seed_bits(seed: int) -> np.uint64:
    """Seeds far apart, so that neighbouring seeds do not give shifted copies of one stream."""
    return np.uint64(_mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))[0])


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finalizer: every input bit moves half of the output bits."""
    mixed = values + np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
