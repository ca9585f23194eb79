"""What the two examples with Kafka share: their topics, their job, and a look into a checkpoint."""

import json
import time
import uuid
from argparse import ArgumentParser
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

import stillframe

WAIT_SECONDS_MAX = 40


class Topics:
    """Two new topics: `views` gets log lines, `counts` is a screen that shows counts at once."""

    def __init__(self, servers, partitions):
        self.servers = servers
        name = uuid.uuid4().hex[:8]
        self.views, self.counts = f"views-{name}", f"counts-{name}"
        client = {"bootstrap.servers": servers, "log_level": 0}
        self._admin = AdminClient(client)
        topics = [NewTopic(self.views, partitions, 1), NewTopic(self.counts, 1, 1)]
        for made in self._admin.create_topics(topics).values():
            made.result(WAIT_SECONDS_MAX)
        self._producer = Producer(client)
        self._screen = Consumer({**client, "group.id": self.counts})
        self._screen.assign([TopicPartition(self.counts, 0, 0)])
        self.shown = {}
        """The newest count of each app; clear it to see what is shown from now on."""

    def send(self, values, partition=0):
        for value in values:
            self._producer.produce(self.views, json.dumps(value), partition=partition)
        assert self._producer.flush(WAIT_SECONDS_MAX) == 0

    def await_counts(self, counts):
        """Until the screen shows these."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while self.shown != counts:
            assert time.monotonic() < deadline, f"the screen shows {self.shown}, not {counts}"
            for message in self._screen.consume(1000, 0.05):
                assert message.error() is None, message.error()
                self.shown[message.key().decode()] = int(message.value())

    def delete(self):
        self._screen.close()
        for deleted in self._admin.delete_topics([self.views, self.counts]).values():
            deleted.result(WAIT_SECONDS_MAX)


def in_words(counts):
    return ", ".join(f"{app} = {count}" for app, count in sorted(counts.items()))


def line(app, event="view"):
    """A line of the log."""
    return {"app": app, "event": event}


def start(spark, topics, name, directory, **options):
    """The job: lines of the log come in, the views of each app go out."""
    lines = (
        stillframe.on(spark)
        .readStream.format("kafka")
        .option("kafka.bootstrap.servers", topics.servers)
        .option("subscribe", topics.views)
        .option("startingOffsets", "earliest")
        .option("valueFormat", "json")
        .schema("app string, event string")
        .load()
        .uid("lines")
    )
    views = lines.where("event = 'view'").groupBy("app").count().uid("views")
    return (
        views.selectExpr("app as key", "string(count) as value")
        .writeStream.format("kafka")
        .queryName(name)
        .outputMode("update")
        .option("kafka.bootstrap.servers", topics.servers)
        .option("topic", topics.counts)
        # A screen shows counts that no checkpoint holds yet. Without this line it would wait.
        .option("deliveryGuarantee", "at-least-once")
        .option("checkpointLocation", directory)
        .option("checkpointInterval", "1 hour")  # the example says when
        .option("restartDelay", "100 ms")
        .options(**options)
        .start()
    )


@contextmanager
def running(spark, servers, partitions, name, **options):
    """The job, its topics and its checkpoints, for as long as they are looked at."""
    topics = Topics(servers, partitions)
    with TemporaryDirectory() as directory:
        try:
            query = start(spark, topics, name, directory, **options)
            try:
                yield query, topics
            finally:
                query.stop()
        finally:
            topics.delete()


class Held(NamedTuple):
    """What a checkpoint holds, read from its files (docs/snapshot-format.md)."""

    number: int
    offsets: dict[int, int]
    """For each partition the offset of the next record."""
    counts: dict[str, int]
    """For each app its views."""

    def __str__(self):
        offsets = ", ".join(f"partition {p} at offset {o}" for p, o in self.offsets.items())
        return f"checkpoint {self.number} holds {offsets}; {in_words(self.counts)}"


def look_into(query, number):
    """Read a checkpoint from its files."""
    job = Path(query.config.checkpoint_location) / query.name
    [metadata] = job.glob(f"chk-{number}-*/_metadata")
    parts = json.loads(metadata.read_text())["body"]["snapshots"]
    positions = [split["position"] for part in parts for split in part["items"]]
    files = [job / state["file"]["path"] for part in parts for state in part["keyed"]]
    rows = [row for file in files for row in pa.ipc.open_file(file).read_all().to_pylist()]
    return Held(
        number,
        dict(sorted((each["partition"], each["offset"]) for each in positions)),
        dict(sorted((row["app"], row["count(1)"]) for row in rows)),
    )


def take_99_checkpoints(query):
    """The first 99; every sink has done its part of them when this returns."""
    for _ in range(98):
        query.checkpoint()
    query.processAllAvailable()  # takes one, and waits for the sinks


def session_and_servers(name):
    """Spark, and the brokers that the command line names."""
    arguments = ArgumentParser()
    arguments.add_argument("--bootstrap-servers", required=True)
    servers = arguments.parse_args().bootstrap_servers
    return SparkSession.builder.appName(name).getOrCreate(), servers


def restored_from(query):
    """The number of the checkpoint from which the job has restarted."""
    return query.checkpoint_statistics.restored.checkpoint_id
