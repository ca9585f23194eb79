"""What is measured with Kafka runs from the command to the report, small, with its own broker."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Consumer, TopicPartition
from tiny_trials import check_every_record, run_once, tiny

from stillframe.bench.kafka import fill
from stillframe.testing.kafka_node import VERSION

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_programs_of_kafka_read_and_write_every_record(tmp_path):
    wanted = [
        tiny("kafka-counts", "stillframe"),
        tiny("kafka-values", "client"),
        tiny("kafka-sink", "client"),
    ]

    check_every_record(run_once(wanted, tmp_path), 3)


def test_where_no_broker_starts_the_trial_is_left_out_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "cache" / f"kafka-{VERSION}").mkdir(parents=True)  # without a jar in it
    monkeypatch.setenv("STILLFRAME_TEST_CACHE", str(tmp_path / "cache"))

    [run] = run_once([tiny("kafka-values", "client")], tmp_path, rounds=2)
    assert run.status == "left out"
    assert "Kafka cannot make its directory: Error: Could not find" in run.reason


def test_a_page_view_in_kafka_is_json_of_five_fields(kafka):
    topic = kafka.topic(2)

    fill(kafka.address, topic, 101, 2)

    views = [json.loads(value) for value in kafka.values(topic)]
    assert len(views) == 101
    assert {tuple(view) for view in views} == {("app_id", "user_id", "url", "at", "referrer")}
    consumer: Consumer = kafka.consumer()
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, n))[1] for n in (0, 1)]
    consumer.close()
    assert ends == [51, 50]
