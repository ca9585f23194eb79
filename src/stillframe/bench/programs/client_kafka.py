"""confluent-kafka alone: what `Consumer.consume` gives, and what a transactional producer takes.

    python client_kafka.py '{"workload": "kafka_values", "brokers": "127.0.0.1:9092", …}'

As many processes as the job beside it has slots, each with one partition to read, or with its share
of the rows to write. The settings of the client are those of Stillframe. They begin together, when
all have their client and their rows; the time is from then to the end of the last.

`kafka_values` counts the messages and looks at none. `kafka_sink` takes urls out of Arrow batches
that are in memory, and commits a transaction each second.
"""

import glob
import json
import multiprocessing
import os
import sys
import time

import confluent_kafka
import kafka_topics
import pyarrow.parquet as pq
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
_BATCH_ROWS = 65_536
_ANSWER_SECONDS_MAX = 60.0


def read(params, part, begin, told):
    reader = kafka_topics.consumer(params["brokers"], **_READING)
    reader.assign([TopicPartition(params["input"], part, 0)])
    begin.wait()
    before_s = time.process_time()
    records, has_ended = 0, False
    while not has_ended:
        messages = reader.consume(10_000, 0.1)
        records += len(messages)
        # Only the last may be one that says where the partition ends.
        if messages and messages[-1].error() is not None:
            assert messages[-1].error().code() == KafkaError._PARTITION_EOF, messages[-1].error()
            records, has_ended = records - 1, True
    told.put((records, time.monotonic(), time.process_time() - before_s))
    reader.close()


def write(params, part, begin, told):
    batches = rows_of(params, part)
    id_ = f"bench-{os.getpid()}"
    producer = Producer(
        {**_WRITING, "bootstrap.servers": params["brokers"], "transactional.id": id_}
    )
    producer.init_transactions(_ANSWER_SECONDS_MAX)
    begin.wait()
    before_s = time.process_time()
    records, topic, produce = 0, params["output"], producer.produce
    producer.begin_transaction()
    committed_s = time.monotonic()
    for batch in batches:
        for value in batch.column(0).to_pylist():
            try:
                produce(topic, value)
            except BufferError:
                make_room(producer, topic, value)
        producer.poll(0)
        records += batch.num_rows
        if time.monotonic() - committed_s > params["checkpoint_interval_ms"] / 1000:
            producer.commit_transaction(_ANSWER_SECONDS_MAX)
            producer.begin_transaction()
            committed_s = time.monotonic()
    producer.commit_transaction(_ANSWER_SECONDS_MAX)
    told.put((records, time.monotonic(), time.process_time() - before_s))


def make_room(producer, topic, value):
    while True:
        producer.poll(0.1)
        try:
            producer.produce(topic, value)
            return
        except BufferError:
            pass


def rows_of(params, part):
    files = sorted(glob.glob(os.path.join(params["input"], "*.parquet")))
    mine = files[part :: params["parallelism"]]
    return [
        batch
        for file in mine
        for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=["url"])
    ]


def main():
    params = json.loads(sys.argv[1])
    work = {"kafka_values": read, "kafka_sink": write}[params["workload"]]
    processes, parallelism = multiprocessing.get_context("spawn"), params["parallelism"]
    begin, told = processes.Barrier(parallelism + 1), processes.Queue()
    started = [
        processes.Process(target=work, args=(params, part, begin, told), daemon=True)
        for part in range(parallelism)
    ]
    for each in started:
        each.start()
    begin.wait()
    began_s = time.monotonic()
    done = [told.get() for _ in started]
    for each in started:
        each.join()
    records, seconds = sum(each[0] for each in done), max(each[1] for each in done) - began_s
    refuse_wrong(params, records)
    result = {
        "engine": "client",
        "version": confluent_kafka.version(),
        "workload": params["workload"],
        "records": records,
        "seconds": round(seconds, 3),
        "records_per_second": round(records / seconds),
        "cpu_seconds": round(sum(each[2] for each in done), 2),
    }
    print("RESULT " + json.dumps(result), flush=True)


def refuse_wrong(params, records):
    if params["workload"] == "kafka_values":
        there = kafka_topics.number_of_offsets(params["brokers"], params["input"])
    else:
        there = kafka_topics.number_visible(params["brokers"], params["output"])
    if records != there:
        raise SystemExit(f"{records} records were counted, and there are {there}")


if __name__ == "__main__":
    main()
