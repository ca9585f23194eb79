"""Event time in simulated jobs: every record has a moment, and some branches count by windows.

Each split is in the order of time, and all begin at the same moment. Where time is told right
behind the source, nothing is late with hardly any delay, and windows close while the job runs.
Where records are held back on their way, or splits appear later, the watermark stays so far behind
that nothing is late, and windows close when the records have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.aggregates import AggregateCall
from stillframe.graph.logical import WINDOW, Aggregate, MapInArrow, Node, Window, WithWatermark
from stillframe.testing.simulation.outside import IDS_PER_SPLIT, Records

_SECOND_US = 1_000_000
_SHORT_DELAY_US = 2 * _SECOND_US
_LONG_DELAY_US = IDS_PER_SPLIT * _SECOND_US
_TIMED_SCHEMA = pa.schema(
    [("id", pa.int64()), ("key", pa.int64()), ("at", pa.timestamp("us", "UTC"))]
)
_WINDOW_TYPE = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])
WINDOWED_SCHEMA = pa.schema(
    [("start", pa.int64()), ("key", pa.int64()), ("count", pa.int64()), ("total", pa.int64())]
)
Windowed = dict[tuple[int, int], tuple[int, int]]
"""By the start of a window in seconds, and by key: how many records, and the sum of their ids."""


def marked(node: Node, uid: str) -> Node:
    """The records of this node, which is a source's, with event time behind them."""
    timed = Node(MapInArrow(_with_time, "moment"), _TIMED_SCHEMA, (node,), f"moment-{uid}")
    told = Node(WithWatermark("at", _SHORT_DELAY_US), _TIMED_SCHEMA, (timed,), f"watermark-{uid}")
    return Node(MapInArrow(_without_time, "plain"), node.schema, (told,), f"plain-{uid}")


def windowed(
    node: Node,
    uid: str,
    size: int,
    slide: int,
    emits_closed: bool,
    calls: tuple[AggregateCall, ...],
    is_marked: bool,
) -> Node:
    """The records of this node counted by window and key."""
    timed = Node(MapInArrow(_with_time, "time"), _TIMED_SCHEMA, (node,), f"time-{uid}")
    if not is_marked:
        late = WithWatermark("at", _LONG_DELAY_US)
        timed = Node(late, _TIMED_SCHEMA, (timed,), f"watermark-{uid}")
    window = Window("at", size * _SECOND_US, slide * _SECOND_US)
    counted = Node(
        Aggregate(("key",), calls, window, emits_closed),
        pa.schema([(WINDOW, _WINDOW_TYPE), *[WINDOWED_SCHEMA.field(i) for i in (1, 2, 3)]]),
        (timed,),
        f"windows-{uid}",
    )
    return Node(MapInArrow(_flat, "flat"), WINDOWED_SCHEMA, (counted,), f"flat-{uid}")


def windows_of(records: Records, size: int, slide: int) -> Windowed:
    """What must come out."""
    made: Windowed = {}
    for number, key in records.tolist():
        moment = _moment(number)
        start = moment // slide * slide
        while start > moment - size:
            count, total = made.get((start, key), (0, 0))
            made[start, key] = (count + 1, total + number)
            start -= slide
    return made


def _moment(number: int) -> int:
    return number % IDS_PER_SPLIT


def _with_time(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        moments = batch.column("id").to_numpy() % IDS_PER_SPLIT * _SECOND_US
        at = pa.array(moments.astype(np.int64)).cast(pa.timestamp("us", "UTC"))
        yield pa.record_batch([*batch.columns, at], _TIMED_SCHEMA)


def _without_time(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.select(["id", "key"])


def _flat(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        start = pc.struct_field(batch.column(WINDOW), "start").cast(pa.int64())
        seconds = pc.divide(start, _SECOND_US)
        yield pa.record_batch([seconds, *batch.columns[1:]], WINDOWED_SCHEMA)
