"""Page views from Kafka to Kafka on plain processes: slots, driver and broker are killed."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from driven_jobs import KILLS, on_plain_processes
from kafka_jobs import Views, kill_again_and_again

from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.coordinator.history import AttemptFailed, AttemptStarted, SlotsRunning
from stillframe.graph.logical import Node, Read, WithWatermark, Write
from stillframe.graph.plan import build_plan
from stillframe.options import Options

pytestmark = pytest.mark.kafka


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
    views, tmp_path
):
    with closing(on_plain_processes(tmp_path, "views", views.through_kafka())) as job:
        kill_again_and_again(job, views)


@pytest.mark.parametrize("seconds", [0, pytest.param(30, marks=pytest.mark.soak)])
def test_while_the_broker_is_away_the_job_waits_and_goes_on(
    page_views, views, kafka, until, seconds
):
    views.send(1_000, 0)
    running = start(page_views, views)
    until(lambda: len(views.ids_out()) == 1_000)
    kafka.kill()
    back_at = time.monotonic() + seconds
    try:
        until(lambda: any("cannot be reached" in each for each in running.query.trouble))
        until(lambda: time.monotonic() >= back_at)
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
