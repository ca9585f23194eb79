"""confluent-kafka alone: what `Consumer.consume` gives, and what a transactional producer takes.

    python client_kafka.py '{"workload": "kafka_values", "brokers": "127.0.0.1:9092", …}'

Each process has one partition to read, or its share of the rows to write. The settings of the
client are those of Stillframe.

`kafka_values` counts the messages and looks at none. `kafka_sink` takes urls out of Arrow batches
that are in memory, and commits a transaction each second.
"""

import os

import client_session as ours
import confluent_kafka
import kafka_topics
from confluent_kafka import KafkaError, Producer, TopicPartition

_READING = {
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 100,
    "fetch.queue.backoff.ms": 10,
    "fetch.message.max.bytes": 4 << 20,
    "queued.min.messages": 200_000,
    "queued.max.messages.kbytes": 64 << 10,
}
_WRITING = {
    "linger.ms": 20,
    "batch.size": 1 << 20,
    "batch.num.messages": 20_000,
    "compression.type": "lz4",
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 128 << 10,
    "message.max.bytes": 100 << 20,
    "enable.idempotence": True,
    "delivery.report.only.error": True,
    "log_level": 0,
}
_ANSWER_SECONDS_MAX = 60.0


def read(params, part, begin):
    reader = kafka_topics.consumer(params["brokers"], **_READING)
    begin()
    reader.assign([TopicPartition(params["input"], part, 0)])  # from here on it fetches ahead
    records, has_ended = 0, False
    while not has_ended:
        # As many as is quickest: of ten thousand at a time each takes half as long again.
        messages = reader.consume(500, 0.1)
        records += len(messages)
        # Only the last may be one that says where the partition ends.
        if messages and messages[-1].error() is not None:
            assert messages[-1].error().code() == KafkaError._PARTITION_EOF, messages[-1].error()
            records, has_ended = records - 1, True
    reader.close()
    return records


def write(params, part, begin):
    batches = ours.rows_of(params, part, ["url"])
    id_ = f"bench-{os.getpid()}"
    producer = Producer(
        {**_WRITING, "bootstrap.servers": params["brokers"], "transactional.id": id_}
    )
    producer.init_transactions(_ANSWER_SECONDS_MAX)
    begin()
    records, topic, produce = 0, params["output"], producer.produce
    producer.begin_transaction()
    cadence = ours.Cadence(params)
    for batch in batches:
        for value in batch.column(0).to_pylist():
            try:
                produce(topic, value)
            except BufferError:
                make_room(producer, topic, value)
        producer.poll(0)
        records += batch.num_rows
        if cadence.is_due():
            producer.commit_transaction(_ANSWER_SECONDS_MAX)
            producer.begin_transaction()
    producer.commit_transaction(_ANSWER_SECONDS_MAX)
    return records


def make_room(producer, topic, value):
    while True:
        producer.poll(0.1)
        try:
            producer.produce(topic, value)
            return
        except BufferError:
            pass


def number_there(params):
    if params["workload"] == "kafka_values":
        return kafka_topics.number_of_offsets(params["brokers"], params["input"])
    return kafka_topics.number_visible(params["brokers"], params["output"])


def main():
    params = ours.params_given()
    work = {"kafka_values": read, "kafka_sink": write}[params["workload"]]
    done = ours.run_together(params, work)
    ours.tell(params, confluent_kafka.version(), done, number_there(params))


if __name__ == "__main__":
    main()
