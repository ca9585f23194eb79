"""Kafka on Spark: page views in, counts out, by PySpark's own words."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from stillframe.errors import BuildError, StartRefused

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

WAIT_SECONDS_MAX = 120


def views(kafka, partitions, count):
    topic = kafka.topic(partitions)
    apps = [f"app{number % 7}" for number in range(count)]
    for partition in range(partitions):
        mine = apps[partition::partitions]
        kafka.send(topic, [json.dumps({"app": app, "n": 1}).encode() for app in mine], partition)
    return topic, Counter(apps)


def read(still, kafka, topic, **options):
    reader = still.readStream.format("kafka").option("kafka.bootstrap.servers", kafka.address)
    for name, value in {"subscribe": topic, "startingOffsets": "earliest", **options}.items():
        reader = reader.option(name, value)
    return reader


def test_counts_of_views_go_from_topic_to_topic_and_the_next_night_goes_on(still, kafka, tmp_path):
    topic, truth = views(kafka, partitions=2, count=5_000)
    out = kafka.topic(2)

    def run():
        stream = read(still, kafka, topic, valueFormat="json").schema("app string, n int").load()
        counted = stream.groupBy("app").count().selectExpr("app as key", "string(count) as value")
        query = (
            counted.writeStream.format("kafka")
            .queryName("views")
            .outputMode("update")
            .option("kafka.bootstrap.servers", kafka.address)
            .option("topic", out)
            .option("checkpointLocation", str(tmp_path / "chk"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_SECONDS_MAX)
        assert query.exception() is None

    def told():
        newest = {}
        for message in kafka.messages(out):
            app, count = message.key().decode(), int(message.value())
            newest[app] = max(newest.get(app, 0), count)
        return newest

    run()
    assert told() == truth

    kafka.send(topic, [b'{"app":"app0","n":1}'] * 10, 1)
    run()
    assert told() == truth + Counter(app0=10)


def test_without_a_format_the_columns_are_sparks(still, kafka):
    stream = read(still, kafka, kafka.topic()).load()

    assert stream.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )


def test_a_start_is_refused_before_any_slot_runs_if_the_topic_is_missing(still, kafka, tmp_path):
    stream = read(still, kafka, "nowhere").load()

    with pytest.raises(StartRefused, match="topic nowhere does not exist"):
        stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()


def test_an_option_that_nobody_knows_is_refused_with_the_nearest(still, kafka):
    with pytest.raises(BuildError, match="did you mean 'startingOffsets'"):
        read(still, kafka, "clicks", startingOffset="earliest").load()


def test_a_secret_is_not_shown(still, kafka):
    stream = read(
        still,
        kafka,
        kafka.topic(),
        **{"kafka.sasl.username": "ann", "kafka.sasl.password": "tiger9"},
    ).load()

    assert "tiger9" not in repr(stream.node)
