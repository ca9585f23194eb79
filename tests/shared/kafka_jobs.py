"""A job from Kafka to Kafka: views go to one topic one by one, to another as running counts, and to
a third as counts of windows, each told once when it is over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
from driven_jobs import IS_LONG, KILLS, SEED, DrivenJob
from kafka_broker import Broker

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


class Views:
    """Topics with views, and those that get them: one by one, as counts, as counts of windows."""

    def __init__(self, kafka: Broker, partitions: int = 2) -> None:
        self.kafka = kafka
        self.topic, self.out = kafka.topic(partitions), kafka.topic(3)
        self.counts, self.windows = kafka.topic(), kafka.topic()
        self.sent = 0

    def send(self, count: int, partition: int = 0) -> None:
        ids = range(self.sent, self.sent + count)
        self.sent += count
        views = [_view(i) for i in ids]
        self.kafka.send(self.topic, views, partition)

    def plan(self, parallelism: int = 2, job: str = "views", **options: str) -> Plan:
        return self.through_kafka(job, **options)(parallelism)

    def through_kafka(self, job: str = "views", **options: str) -> ViewsThroughKafka:
        topics = (self.topic, self.out, self.counts, self.windows)
        return ViewsThroughKafka(self.kafka.address, *topics, job, tuple(options.items()))

    def ids_out(self) -> list[int]:
        return sorted(int(value) for value in self.kafka.values(self.out))

    def check_each_is_there_once(self) -> None:
        assert self.ids_out() == list(range(self.sent))
        told = Counter(
            (message.key().decode(), int(message.value()))
            for message in self.kafka.messages(self.counts)
        )
        assert max(told.values()) == 1, "a count was told twice"
        last = Counter()
        for app, count in told:
            last[app] = max(last[app], count)
        assert last == Counter(f"app-{i % 17}" for i in range(self.sent))

    def windows_out(self) -> list[tuple[str, int]]:
        told = self.kafka.messages(self.windows)
        return sorted((message.key().decode(), int(message.value())) for message in told)

    def windows_over(self, seconds: int) -> list[tuple[str, int]]:
        """What they must say when event time is there."""
        over = range(seconds // WINDOW_SECONDS * WINDOW_SECONDS)
        views = Counter(f"{i // WINDOW_SECONDS * WINDOW_SECONDS} app-{i % 17}" for i in over)
        return sorted(views.items())


def _view(number: int) -> bytes:
    at = datetime.fromtimestamp(number, UTC).isoformat()
    return json.dumps({"app": f"app-{number % 17}", "id": number, "at": at}).encode()


def kill_again_and_again(job: DrivenJob, views: Views) -> None:
    """Slots, the driver and the broker, beside a transaction that somebody else holds open, while
    partitions are added and the job is rescaled: each view is there once."""
    kafka, random = views.kafka, Random(SEED)
    others, topics = kafka.groups(), kafka.topics()
    foreign = kafka.transaction(**{"transaction.timeout.ms": 7_200_000})  # longer than the story
    for topic in (views.out, views.windows):
        foreign.produce(topic, b"never", partition=0)
    foreign.flush(30)  # it holds readers back, and nothing of ours
    job.start(4)
    victims = random.sample(["slot", "driver"] * (KILLS // 2), KILLS)
    for step, victim in enumerate(victims):
        views.send(1_500, random.randrange(2))
        is_away = step in (KILLS // 4, *([KILLS // 2] if IS_LONG else []))
        if is_away or random.random() < 0.7:  # else while it restarts
            job.next_checkpoint()
        views.send(500, 0)
        parallelism = (4, 2, 3)[3 * step // KILLS]
        if is_away:  # not while a driver starts: it would refuse to
            kafka.kill()
        job.kill(victim, random)
        if is_away:
            kafka.start()
            kafka.grow(views.topic, 2 + 4 * step // KILLS)
        if victim == "driver":
            job.start(parallelism)
        else:
            job.ask(parallelism)
    foreign.abort_transaction(60)
    job.ask(3)
    seconds = views.sent
    for partition in range(4 if IS_LONG else 3):
        views.send(WINDOW_SECONDS, partition)  # event time goes on in all of them
    job.wait_until(lambda: len(views.ids_out()) >= views.sent)
    windows = views.windows_over(seconds)
    job.wait_until(lambda: len(views.windows_out()) >= len(windows))
    job.wait_until(
        lambda: {name.rpartition("/")[2] for name in kafka.groups() - others} <= set("012")
    )
    job.ask("stop")
    job.finish()

    views.check_each_is_there_once()
    assert views.windows_out() == windows
    for topic in (views.out, views.counts, views.windows):
        assert kafka.open_transactions(topic) == set()
    assert job.left_behind() == set()
    assert {name for name in kafka.topics() - topics if not name.startswith("__")} == set()


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
