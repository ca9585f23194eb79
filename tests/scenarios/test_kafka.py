"""Page views from Kafka to Kafka on plain processes: slots and the broker itself are killed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from functools import partial
from random import Random

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.kafka_sink import sink_from_options
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.coordinator.history import AttemptFailed, AttemptStarted, SlotsRunning
from stillframe.errors import StillframeError
from stillframe.graph.logical import Aggregate, MapInArrow, Node, Read, WithWatermark, Write
from stillframe.graph.plan import build_plan
from stillframe.options import Options

pytestmark = pytest.mark.kafka

VIEWS = pa.schema([("app", pa.string()), ("id", pa.int64())])
RECORDS = pa.schema([("key", pa.string()), ("value", pa.string())])
COUNTS = pa.schema([("app", pa.string()), ("count", pa.int64())])


def as_records(batches):
    """The first column as the key, the second one as the value."""
    for batch in batches:
        key, value = batch.columns[:2]
        yield pa.record_batch([key, value.cast(pa.string())], RECORDS)


class Views:
    """Topics with views, one that gets them one by one and one that gets their counts."""

    def __init__(self, kafka, partitions=2):
        self.kafka = kafka
        self.topic, self.out, self.counts = kafka.topic(partitions), kafka.topic(3), kafka.topic()
        self.sent = 0

    def send(self, count, partition=0):
        ids = range(self.sent, self.sent + count)
        self.sent += count
        views = [json.dumps({"app": f"app-{i % 17}", "id": i}).encode() for i in ids]
        self.kafka.send(self.topic, views, partition)

    def plan(self, parallelism=2, job="views", **options):
        given = {
            "kafka.bootstrap.servers": self.kafka.address,
            "subscribe": self.topic,
            "startingOffsets": "earliest",
            "valueFormat": "json",
            "discoveryInterval": "200 ms",
            **options,
        }
        source = KafkaSource.from_options(Options("the source kafka", given), VIEWS)
        read = Node(Read(source), source.schema, given_uid="views")
        one_by_one = Node(MapInArrow(as_records, "as_records"), RECORDS, (read,))
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app",), (call,)), COUNTS, (read,), given_uid="count")
        counts = Node(MapInArrow(as_records, "as_records"), RECORDS, (counted,))
        ends = [
            Node(Write(self.sink(topic)), RECORDS, (node,), given_uid=uid)
            for topic, node, uid in (
                (self.out, one_by_one, "write-views"),
                (self.counts, counts, "write-counts"),
            )
        ]
        return build_plan(job, ends, parallelism)

    def sink(self, topic):
        given = {"kafka.bootstrap.servers": self.kafka.address, "topic": topic}
        return sink_from_options(Options("the sink kafka", given), RECORDS)

    def ids_out(self):
        return sorted(int(value) for value in self.kafka.values(self.out))

    def check_each_is_there_once(self):
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


@pytest.fixture
def views(kafka):
    return Views(kafka)


def start(page_views, views, parallelism=2, **options):
    plan = partial(views.plan)
    given = {"checkpointInterval": "150 ms", "restartAttempts": "100", **options}
    return page_views.start(plan(parallelism), plan, **given)


def see_all(running, views, until):
    """All that was sent is to be seen, once."""
    until(lambda: len(views.ids_out()) >= views.sent)
    until(
        lambda: [(each.uid, each.records) for each in running.query.summary.lags] == [("views", 0)]
    )
    running.query.processAllAvailable()
    running.query.stop()
    views.check_each_is_there_once()


@pytest.mark.slow
def test_kills_of_slots_and_broker_rescales_and_new_partitions_lose_and_double_nothing(
    page_views, views, kafka, until
):
    random = Random(5)
    views.send(2_000, 0)
    views.send(2_000, 1)
    foreign = kafka.transaction(**{"transaction.timeout.ms": 600_000})
    foreign.produce(views.out, b"never", partition=0)
    foreign.flush(30)  # it holds readers back, and nothing of ours
    others = kafka.groups()
    running = start(page_views, views)
    for step, parallelism in enumerate((4, 1, 3)):
        running.next_checkpoint()
        views.send(1_500, step % 2)
        running.kill_any(random)
        if step != 1:
            kafka.kill()
            threading.Event().wait(random.random())  # it comes from outside, at any moment
            kafka.start()
        kafka.grow(views.topic, 3 + step)
        views.send(800, 2 + step)
        with contextlib.suppress(StillframeError):  # a kill may come in its way
            running.query.rescale(parallelism, timeout=90)
        views.send(700, 0)
        running.kill_any(random)
    foreign.abort_transaction(60)
    running.next_checkpoint()
    running.query.rescale(2, timeout=90)
    views.send(500, 1)

    until(lambda: len(views.ids_out()) >= views.sent)
    until(lambda: {name.rpartition("/")[2] for name in kafka.groups() - others} <= {"0", "1"})
    see_all(running, views, until)
    assert kafka.open_transactions(views.out) | kafka.open_transactions(views.counts) == set()
    assert len(running.attempts()) > 3


def test_while_the_broker_is_away_the_job_waits_and_goes_on(page_views, views, kafka, until):
    views.send(1_000, 0)
    running = start(page_views, views)
    until(lambda: len(views.ids_out()) == 1_000)
    kafka.kill()
    try:
        until(lambda: any("cannot be reached" in each for each in running.query.trouble))
        assert any(kafka.address in each for each in running.query.trouble)
    finally:
        kafka.start()
    views.send(1_000, 1)

    see_all(running, views, until)
    assert not [event for event in running.told if isinstance(event, AttemptFailed)]


def test_night_after_night_a_job_reads_what_is_there_and_stops(page_views, views, kafka):
    for night, partition in enumerate((0, 1, 1)):
        if night:
            views.send(1_000, partition)
        running = page_views.start(views.plan(1 + night % 2), available_now=True)
        assert running.query.awaitTermination(60)
        read = running.job.history.records_of_attempt().records_in
        assert read == (1_000 if night else 0)

    views.check_each_is_there_once()


def test_a_restart_goes_on_at_the_offsets_of_the_checkpoint(page_views, views, until):
    views.send(3_000, 0)
    running = start(page_views, views)
    until(lambda: len(views.ids_out()) == 3_000)
    running.next_checkpoint()
    running.kill(0)
    running.wait(AttemptStarted, attempt=2)
    views.send(500, 1)
    until(lambda: len(views.ids_out()) == 3_500)

    assert running.job.history.records_of_attempt().records_in <= 1_500, "not from the beginning"
    see_all(running, views, until)


def test_latest_is_where_the_job_first_began_also_if_it_crashes_before_its_first_checkpoint(
    page_views, views
):
    views.send(10, 0)
    plan = views.plan(1, startingOffsets="latest")
    running = page_views.start(plan, checkpointInterval="1 hour", restartAttempts="3")
    running.wait(SlotsRunning, attempt=1)
    views.send(100, 0)
    running.wait_for_records(100)
    running.kill(0)
    running.wait(SlotsRunning, attempt=2)

    running.wait_for_records(100)
    running.query.processAllAvailable()
    running.query.stop()
    assert views.ids_out() == list(range(10, 110))


def test_event_time_is_that_of_the_slowest_partition_until_it_is_idle(page_views, kafka, until):
    topic = kafka.topic(2)
    for partition, at_ms in ((0, 60_000), (1, 3_600_000)):
        kafka.send(topic, [b"x"], partition, timestamp=at_ms)
    given = {
        "kafka.bootstrap.servers": kafka.address,
        "subscribe": topic,
        "startingOffsets": "earliest",
    }
    source = KafkaSource.from_options(Options("the source kafka", given), None)
    read = Node(Read(source), source.schema, given_uid="read")
    timed = Node(WithWatermark("timestamp", 0), source.schema, (read,), given_uid="time")
    write = Node(Write(DiscardSink()), source.schema, (timed,), given_uid="nowhere")
    plan = build_plan("times", [write], 1)
    running = page_views.start(plan, watermarkIdleTimeout="2 seconds")

    seen_ms = set()
    until(lambda: seen_ms.add(watermark_ms(running)) or 3_600_000 in seen_ms)

    assert seen_ms - {None} == {60_000, 3_600_000}, "the slowest, then those that are not idle"
    running.query.stop()


def watermark_ms(running):
    watermark_us = running.query.summary.watermark_us
    return None if watermark_us is None else watermark_us // 1000
