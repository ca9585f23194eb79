"""Event time in simulated jobs: every record has a moment, and some branches go by it.

Each split is in the order of time, and all begin at the same moment. Where time is told right
behind the source, nothing is late with hardly any delay, and windows close while the job runs.
Where records are held back on their way, or splits appear later, the watermark stays so far behind
that nothing is late, and windows close when the records have ended.

What a branch makes of its records is a `Timed`: an operator, and what must come out of it, said
once more in plain Python over all records. Whatever the schedule, that is the same: records of one
moment come from several splits, but nothing depends on which comes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.aggregates import AggregateCall
from stillframe.graph.logical import (
    WINDOW,
    Aggregate,
    MapInArrow,
    Node,
    SessionWindow,
    Window,
    WithWatermark,
)
from stillframe.testing.simulation.outside import IDS_PER_SPLIT, Records

SECOND_US = 1_000_000
_SHORT_DELAY_US = 2 * SECOND_US
_LONG_DELAY_US = IDS_PER_SPLIT * SECOND_US
TIME_TYPE = pa.timestamp("us", "UTC")
TIMED_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64()), ("at", TIME_TYPE)])
_WINDOW_TYPE = pa.struct([("start", TIME_TYPE), ("end", TIME_TYPE)])
_COUNTS = [pa.field(name, pa.int64()) for name in ("key", "count", "total")]
_WINDOWS_SCHEMA = pa.schema([pa.field(WINDOW, _WINDOW_TYPE), *_COUNTS])
COUNTED_SCHEMA = pa.schema([*_COUNTS, pa.field("at", TIME_TYPE)])
WINDOWED_SCHEMA = pa.schema([pa.field("start", pa.int64()), *_COUNTS])
_SESSIONS_SCHEMA = pa.schema([("start", pa.int64()), ("end", pa.int64()), *_COUNTS])
CALLS = (
    AggregateCall("count", None, "count", pa.int64()),
    AggregateCall("sum", "id", "total", pa.int64()),
)
_SUMS = (
    AggregateCall("sum", "count", "count", pa.int64()),
    AggregateCall("sum", "total", "total", pa.int64()),
)

Place = tuple[int, ...]
"""What a row is about, such as the start of a window in seconds, and the key."""
Results = dict[Place, tuple[int, ...]]
"""What is said of each place, such as how many records, and the sum of their ids."""


class Timed(ABC):
    """What a branch does with its records by event time, and what must come out of it."""

    name: ClassVar[str]
    """Of the checker."""
    schema: ClassVar[pa.Schema]
    places: ClassVar[int]
    """So many of the columns are the place; the others are what is said of it."""

    @property
    def says_once(self) -> bool:
        """Whether there is one row for each place; else the last one counts, which is the most."""
        return True

    @abstractmethod
    def built(self, node: Node, uid: str) -> Node:
        """Records of `TIMED_SCHEMA` come in, rows of `schema` come out."""

    @abstractmethod
    def expected(self, records: Records) -> Results:
        """What must come out."""

    def is_of_fewer(self, found: Results, expected: Results) -> bool:
        """Whether this may come out if records are lost."""
        return all(
            place in expected and is_most(said, expected[place]) for place, said in found.items()
        )


def is_most(less: tuple[int, ...], more: tuple[int, ...]) -> bool:
    return all(one <= other for one, other in zip(less, more, strict=True))


# --- telling the time ------------------------------------------------------------------------


def marked(node: Node, uid: str) -> Node:
    """The records of this node, which is a source's, with event time behind them."""
    timed = Node(MapInArrow(_with_time, "moment"), TIMED_SCHEMA, (node,), f"moment-{uid}")
    told = Node(WithWatermark("at", _SHORT_DELAY_US), TIMED_SCHEMA, (timed,), f"watermark-{uid}")
    return Node(MapInArrow(_without_time, "plain"), node.schema, (told,), f"plain-{uid}")


def by_time(timed: Timed, node: Node, uid: str, is_marked: bool) -> Node:
    """What the branch makes of the records of this node; marked: time is told already."""
    node = Node(MapInArrow(_with_time, "time"), TIMED_SCHEMA, (node,), f"time-{uid}")
    if not is_marked:
        late = WithWatermark("at", _LONG_DELAY_US)
        node = Node(late, TIMED_SCHEMA, (node,), f"watermark-{uid}")
    return timed.built(node, uid)


def moment_of(number: int) -> int:
    return number % IDS_PER_SPLIT


def _with_time(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        moments = batch.column("id").to_numpy() % IDS_PER_SPLIT * SECOND_US
        yield pa.record_batch([*batch.columns, times(moments)], TIMED_SCHEMA)


def _without_time(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.select(["id", "key"])


def times(microseconds: Records) -> pa.Array:
    return pa.array(microseconds.astype(np.int64)).cast(TIME_TYPE)


def seconds(column: pa.Array) -> pa.Array:
    return pc.divide(column.cast(pa.int64()), SECOND_US)


# --- windows ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Windows(Timed):
    """Counts by window and key; perhaps those once more, by larger windows."""

    name = "windows"
    schema = WINDOWED_SCHEMA
    places = 2

    size: int
    slide: int
    emits_closed: bool = True
    outer: int | None = None
    """The size of the larger windows, a multiple of `size`, which is then that of `slide` too."""

    @property
    def says_once(self) -> bool:
        return self.emits_closed

    def built(self, node: Node, uid: str) -> Node:
        window = Window("at", self.size * SECOND_US, self.slide * SECOND_US)
        counting = Aggregate(("key",), CALLS, window, self.emits_closed)
        node = Node(counting, _WINDOWS_SCHEMA, (node,), f"windows-{uid}")
        if self.outer is None:
            return _flat(node, uid)
        ended = MapInArrow(_at_their_ends, "ends")
        return summed(Node(ended, COUNTED_SCHEMA, (node,), f"ends-{uid}"), uid, self.outer)

    def expected(self, records: Records) -> Results:
        size, slide = (self.outer or self.size), (self.outer or self.slide)
        moments = ((moment_of(number), number, key) for number, key in records.tolist())
        return windows_of(moments, size, slide)


def windows_of(moments: Iterable[tuple[int, int, int]], size: int, slide: int) -> Results:
    """What windows say of moments, each with the id of a record and its key."""
    made: dict[Place, list[int]] = defaultdict(list)
    for moment, number, key in moments:
        start = moment // slide * slide
        while start > moment - size:
            made[start, key].append(number)
            start -= slide
    return {place: (len(ids), sum(ids)) for place, ids in made.items()}


def summed(node: Node, uid: str, size: int) -> Node:
    """Rows of `COUNTED_SCHEMA` added up by key in windows of so many seconds."""
    window = Window("at", size * SECOND_US, size * SECOND_US)
    summing = Aggregate(("key",), _SUMS, window, emits_closed=True)
    return _flat(Node(summing, _WINDOWS_SCHEMA, (node,), f"outer-{uid}"), uid)


def _flat(node: Node, uid: str) -> Node:
    return Node(MapInArrow(_flattened, "flat"), WINDOWED_SCHEMA, (node,), f"flat-{uid}")


def _flattened(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        start = seconds(pc.struct_field(batch.column(WINDOW), "start"))
        yield pa.record_batch([start, *batch.columns[1:]], WINDOWED_SCHEMA)


def _at_their_ends(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A window's event time is its last microsecond: not before it is over."""
    for batch in batches:
        ends = pc.struct_field(batch.column(WINDOW), "end").cast(pa.int64()).to_numpy()
        yield pa.record_batch([*batch.columns[1:], times(ends - 1)], COUNTED_SCHEMA)


@dataclass(frozen=True, slots=True)
class Sessions(Timed):
    """Counts by session and key."""

    name = "sessions"
    schema = _SESSIONS_SCHEMA
    places = 3

    gap: int

    def built(self, node: Node, uid: str) -> Node:
        window = SessionWindow("at", self.gap * SECOND_US)
        counting = Aggregate(("key",), CALLS, window, emits_closed=True)
        node = Node(counting, _WINDOWS_SCHEMA, (node,), f"sessions-{uid}")
        return Node(MapInArrow(_spans, "spans"), _SESSIONS_SCHEMA, (node,), f"spans-{uid}")

    def expected(self, records: Records) -> Results:
        made: Results = {}
        spans: dict[int, list[int]] = {}
        for moment, key, number in sorted((moment_of(n), key, n) for n, key in records.tolist()):
            span = spans.get(key)
            if span is None or span[1] < moment:
                span = spans[key] = [moment, moment, 0, 0]
            else:
                del made[span[0], span[1], key]
            span[1:] = [moment + self.gap, span[2] + 1, span[3] + number]
            made[span[0], span[1], key] = (span[2], span[3])
        return made

    def is_of_fewer(self, found: Results, expected: Results) -> bool:
        """Each is a part of one that there would have been."""
        whole: dict[int, list[Place]] = defaultdict(list)
        for place in expected:
            whole[place[2]].append(place)
        return all(
            any(
                start <= place[0] and place[1] <= end and is_most(said, expected[start, end, key])
                for start, end, key in whole[place[2]]
            )
            for place, said in found.items()
        )


def _spans(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        window = batch.column(WINDOW)
        span = [seconds(pc.struct_field(window, bound)) for bound in ("start", "end")]
        yield pa.record_batch([*span, *batch.columns[1:]], _SESSIONS_SCHEMA)
