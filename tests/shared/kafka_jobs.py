"""A job from Kafka to Kafka: views go to one topic one by one, to another as running counts, and to
a third as counts of windows, each told once when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.aggregates import AggregateCall
from stillframe.api.sinks import Sink
from stillframe.connectors.kafka_sink import sink_from_options
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.graph.logical import (
    WINDOW,
    Aggregate,
    MapInArrow,
    Node,
    Read,
    Window,
    WithWatermark,
    Write,
)
from stillframe.graph.plan import Plan, build_plan
from stillframe.options import Options

WINDOW_SECONDS = 100
_SECOND_US = 1_000_000
_TIME = pa.timestamp("us", "UTC")
VIEWS = pa.schema([("app", pa.string()), ("id", pa.int64())])
_TIMED = VIEWS.append(pa.field("at", _TIME))
RECORDS = pa.schema([("key", pa.string()), ("value", pa.string())])
_COUNT = AggregateCall("count", None, "count", pa.int64())
_COUNTS = pa.schema([("app", pa.string()), ("count", pa.int64())])
_WINDOWS = _COUNTS.insert(0, pa.field(WINDOW, pa.struct([("start", _TIME), ("end", _TIME)])))


@dataclass(frozen=True)
class ViewsThroughKafka:
    """The event time of a view is its id, in seconds."""

    servers: str
    topic: str
    out: str
    counts: str
    windows: str
    job: str = "views"
    options: tuple[tuple[str, str], ...] = ()

    def __call__(self, parallelism: int) -> Plan:
        given = {
            "kafka.bootstrap.servers": self.servers,
            "subscribe": self.topic,
            "startingOffsets": "earliest",
            "valueFormat": "json",
            "discoveryInterval": "200 ms",
            **dict(self.options),
        }
        source = KafkaSource.from_options(Options("the source kafka", given), VIEWS)
        read = Node(Read(source), source.schema, given_uid="views")
        counted = Node(Aggregate(("app",), (_COUNT,)), _COUNTS, (read,), given_uid="count")
        timed = Node(MapInArrow(_with_time, "time"), _TIMED, (read,), given_uid="time")
        marked = Node(WithWatermark("at", 0), _TIMED, (timed,), given_uid="watermark")
        window = Window("at", WINDOW_SECONDS * _SECOND_US, WINDOW_SECONDS * _SECOND_US)
        windowed = Aggregate(("app",), (_COUNT,), window, emits_closed=True)
        over = Node(windowed, _WINDOWS, (marked,), given_uid="windows")
        ends = [
            self._written(read, self.out, "views"),
            self._written(counted, self.counts, "counts"),
            self._written(
                Node(MapInArrow(_by_start, "flat"), _COUNTS, (over,)), self.windows, "windows"
            ),
        ]
        return build_plan(self.job, ends, parallelism)

    def _written(self, rows: Node, topic: str, name: str) -> Node:
        records = Node(MapInArrow(_as_records, "as_records"), RECORDS, (rows,))
        return Node(Write(self._sink(topic)), RECORDS, (records,), given_uid=f"write-{name}")

    def _sink(self, topic: str) -> Sink:
        given = {"kafka.bootstrap.servers": self.servers, "topic": topic}
        return sink_from_options(Options("the sink kafka", given), RECORDS)


def _as_records(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The first column as the key, the second one as the value."""
    for batch in batches:
        key, value = batch.columns[:2]
        yield pa.record_batch([key, value.cast(pa.string())], RECORDS)


def _with_time(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        at = pc.multiply(batch.column("id"), _SECOND_US).cast(_TIME)
        yield pa.record_batch([batch.column("app"), batch.column("id"), at], _TIMED)


def _by_start(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """With keys like `300 app-7`."""
    for batch in batches:
        start = pc.struct_field(batch.column(WINDOW), "start").cast(pa.int64())
        seconds = pc.divide(start, _SECOND_US).cast(pa.string())
        key = pc.binary_join_element_wise(seconds, batch.column("app"), " ")
        yield pa.record_batch([key, batch.column("count")], _COUNTS)
