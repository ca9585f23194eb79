"""What is measured with Kafka runs from the command to the report, small, with its own broker."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, TopicPartition

from stillframe.bench.catalogue import benchmarks
from stillframe.bench.engines import Engines
from stillframe.bench.kafka import fill
from stillframe.cli.bench import measure
from stillframe.cli.lines import Lines
from stillframe.testing.kafka_node import VERSION

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

RECORDS = 30_000


def tiny(name: str, engine: str):
    """The trial of this engine alone, with few records."""
    benchmark = benchmarks()[name]
    [trial] = [each for each in benchmark.trials if each.engine == engine]
    small = replace(trial, params={**trial.params, "input_records": RECORDS}, seconds_max=250.0)
    return replace(benchmark, trials=(small,))


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_programs_of_kafka_read_and_write_every_record(tmp_path):
    wanted = [
        tiny("kafka-counts", "stillframe"),
        tiny("kafka-values", "client"),
        tiny("kafka-sink", "client"),
    ]

    results = measure(
        wanted, 1, tmp_path, Engines(tmp_path / "home"), Lines(as_json=False, out=io.StringIO())
    )

    for run in results.runs:
        assert run.status == "measured", (run.benchmark, run.reason)
        assert run.result["records"] == RECORDS
        assert run.result["records_per_second"] > 0
    assert len(results.runs) == 3


def test_where_no_broker_starts_the_trial_is_left_out_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "cache" / f"kafka-{VERSION}").mkdir(parents=True)  # without a jar in it
    monkeypatch.setenv("STILLFRAME_TEST_CACHE", str(tmp_path / "cache"))

    results = measure(
        [tiny("kafka-values", "client")],
        2,
        tmp_path,
        Engines(tmp_path / "home"),
        Lines(as_json=False, out=io.StringIO()),
    )

    [run] = results.runs
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
