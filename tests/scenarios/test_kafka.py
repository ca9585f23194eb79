"""Page views from Kafka to Kafka on plain processes: slots, the driver and the broker are killed."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from random import Random

import pytest
from driven_jobs import IS_LONG, KILLS, SEED, DrivenJob
from kafka_jobs import WINDOW_SECONDS, ViewsThroughKafka

from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.coordinator.history import AttemptFailed, AttemptStarted, SlotsRunning
from stillframe.graph.logical import Node, Read, WithWatermark, Write
from stillframe.graph.plan import build_plan
from stillframe.options import Options

pytestmark = pytest.mark.kafka


class Views:
    """Topics with views, and those that get them: one by one, as counts, as counts of windows."""

    def __init__(self, kafka, partitions=2):
        self.kafka = kafka
        self.topic, self.out = kafka.topic(partitions), kafka.topic(3)
        self.counts, self.windows = kafka.topic(), kafka.topic()
        self.sent = 0

    def send(self, count, partition=0):
        ids = range(self.sent, self.sent + count)
        self.sent += count
        views = [json.dumps({"app": f"app-{i % 17}", "id": i}).encode() for i in ids]
        self.kafka.send(self.topic, views, partition)

    def plan(self, parallelism=2, job="views", **options):
        return self.through_kafka(job, **options)(parallelism)

    def through_kafka(self, job="views", **options):
        topics = (self.topic, self.out, self.counts, self.windows)
        return ViewsThroughKafka(self.kafka.address, *topics, job, tuple(options.items()))

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

    def windows_out(self):
        told = self.kafka.messages(self.windows)
        return sorted((message.key().decode(), int(message.value())) for message in told)

    def windows_over(self, seconds):
        """What they must say when event time is there."""
        over = range(seconds // WINDOW_SECONDS * WINDOW_SECONDS)
        views = Counter(f"{i // WINDOW_SECONDS * WINDOW_SECONDS} app-{i % 17}" for i in over)
        return sorted(views.items())


@pytest.fixture
def views(kafka):
    return Views(kafka)


def start(page_views, views, parallelism=2, **options):
    plan = views.through_kafka()
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
@pytest.mark.timeout(180 + 30 * KILLS)
def test_kills_of_slots_driver_and_broker_rescales_and_new_partitions_lose_and_double_nothing(
    views, kafka, tmp_path
):
    random, others, topics = Random(SEED), kafka.groups(), kafka.topics()
    foreign = kafka.transaction(**{"transaction.timeout.ms": 600_000})
    for topic in (views.out, views.windows):
        foreign.produce(topic, b"never", partition=0)
    foreign.flush(30)  # it holds readers back, and nothing of ours
    with closing(DrivenJob(tmp_path, "views", views.through_kafka())) as job:
        job.start(4)
        victims = random.sample(["slot", "driver"] * (KILLS // 2), KILLS)
        for step, victim in enumerate(victims):
            views.send(1_500, random.randrange(2))
            if random.random() < 0.7:  # else while it restarts
                job.next_checkpoint()
            views.send(500, 0)
            parallelism = (4, 2, 3)[3 * step // KILLS]
            if step in (KILLS // 4, *([KILLS // 2] if IS_LONG else [])):
                kafka.kill()
                job.kill(victim, random, parallelism)
                kafka.start()
                kafka.grow(views.topic, 2 + 4 * step // KILLS)
            else:
                job.kill(victim, random, parallelism)
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
    assert (job.slots_killed, job.drivers) >= (KILLS // 2 - 1, KILLS // 2 + 1)


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
