"""The conformance kit's drawn schedules of failures, on Kafka with a real broker."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.connectors.kafka_sink import sink_from_options
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.options import Options
from stillframe.testing.conformance import check_sink, check_source

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.string())])


def test_the_sink_keeps_its_promises(kafka):
    def sink(place):
        given = {"kafka.bootstrap.servers": kafka.address, "topic": kafka.topic()}
        return sink_from_options(Options("the sink kafka", given), SCHEMA)

    def visible(sink):
        messages = kafka.messages(sink.destination.topic)
        return [(message.key().decode(), message.value().decode()) for message in messages]

    check_sink(
        sink,
        visible,
        schema=SCHEMA,
        row=lambda n: (f"k{n}", f"v{n}"),
        checks=2,
        seed=3,
        another_process=False,
    )


def test_the_source_keeps_its_promises(kafka):
    def source(place):
        topic = kafka.topic(3)
        for partition in range(3):
            kafka.send(topic, [b"%d-%d" % (partition, n) for n in range(30)], partition)
        given = {
            "kafka.bootstrap.servers": kafka.address,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "endingOffsets": "latest",
        }
        return KafkaSource.from_options(Options("the source kafka", given), None)

    check_source(source, checks=6, seed=3)
