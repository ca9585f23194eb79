"""Stillframe from Kafka to Kafka, exactly once: how old a record is when readers see it.

    python stillframe_kafka_latency.py '{"workload": "kafka_latency", "rate": 10000, …}'

One process produces records by schedule: record n is due at start + n/rate and carries that time.
The job copies them from one topic to another, with a checkpoint in each interval. A third process
reads that topic with `read_committed` and takes the age of each record when it gets it, on the same
clock. Those that were due in the first seconds do not count.
"""

import json
import subprocess
import sys
import time

import kafka_topics
import numpy as np
import stillframe_session as ours
from confluent_kafka import Producer

WARMUP_SECONDS = 5
FIRST = b"first"
_START_SECONDS_MAX = 120.0
_END_SECONDS_MAX = 60.0
_STEP_SECONDS = 0.001


def main():
    params = ours.params_given()
    role = sys.argv[2] if len(sys.argv) > 2 else "job"
    {"job": run_job, "producer": produce, "reader": read}[role](params)


def number_of(params):
    return int(params["rate"] * (params["seconds"] + WARMUP_SECONDS))


def run_job(params):
    import stillframe

    still = stillframe.on(ours.open_session(params["parallelism"]))
    brokers = {"kafka.bootstrap.servers": params["brokers"]}
    records = still.readStream.format("kafka").options(**brokers)
    records = records.option("subscribe", params["input"]).option("startingOffsets", "earliest")
    writer = records.load().select("value").writeStream.format("kafka").options(**brokers)
    options = ours.job_options(params, params["directory"] + "/checkpoints")
    writer = writer.option("topic", params["output"]).options(**options)
    watch = ours.Watch()
    query = writer.queryName("measured").start()
    query.add_listener(watch)
    let_through(params)
    reader, producer = (started(params, role) for role in ("reader", "producer"))
    told, _ = reader.communicate()
    query.stop()
    for each in (reader, producer):
        if each.wait() != 0:
            raise SystemExit(f"{each.args} ended with exit code {each.returncode}")
    seen = json.loads(told)
    if seen["records"] != number_of(params):
        raise SystemExit(f"{seen['records']} records came of {number_of(params)}")
    figures = ours.checkpoint_figures(watch.completed, query.summary.checkpoints_failed)
    ours.tell(params, records=seen["records"], latency_ms=seen["latency_ms"], checkpoints=figures)


def let_through(params):
    """A record of each partition: with the first ones the broker makes topics of its own."""
    producer = Producer({"bootstrap.servers": params["brokers"], "log_level": 0})
    for partition in range(params["parallelism"]):
        producer.produce(params["input"], FIRST, partition=partition)
    producer.flush(_START_SECONDS_MAX)
    deadline = time.monotonic() + _START_SECONDS_MAX
    visible = 0
    while visible < params["parallelism"]:
        if time.monotonic() > deadline:
            raise SystemExit(f"{visible} records were visible after {_START_SECONDS_MAX} s")
        visible = kafka_topics.number_visible(params["brokers"], params["output"])


def started(params, role):
    command = [sys.executable, __file__, json.dumps(params), role]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def produce(params):
    """Each record when it is due, or as soon after it as this process gets to it."""
    producer = Producer(
        {"bootstrap.servers": params["brokers"], "linger.ms": 1, "log_level": 0, "acks": "all"}
    )
    producer.list_topics(params["input"], _START_SECONDS_MAX)
    total, parts, rate = number_of(params), params["parallelism"], params["rate"]
    began_us, sent = time.time_ns() // 1000, 0
    while sent < total:
        due = min(total, (time.time_ns() // 1000 - began_us) * rate // 1_000_000 + 1)
        for number in range(sent, due):
            value = b"%d" % (began_us + number * 1_000_000 // rate)
            producer.produce(params["input"], value, partition=number % parts)
        sent = due
        producer.poll(0)
        time.sleep(_STEP_SECONDS)
    assert producer.flush(_END_SECONDS_MAX) == 0, "the broker did not take all records"


def read(params):
    total = number_of(params)
    reader = kafka_topics.consumer(
        params["brokers"], **{"isolation.level": "read_committed", "fetch.wait.max.ms": 20}
    )
    reader.assign(kafka_topics.partitions_of(reader, params["output"]))
    due_us, ages_us = np.zeros(total, np.int64), np.zeros(total, np.int64)
    seen, silent_since = 0, time.monotonic()
    while seen < total and time.monotonic() - silent_since < _END_SECONDS_MAX:
        messages = [each for each in reader.consume(5_000, 0.002) if each.error() is None]
        now_us = time.time_ns() // 1000
        due = [int(each.value()) for each in messages if each.value() != FIRST]
        if not due:
            continue
        due_us[seen : seen + len(due)] = due
        ages_us[seen : seen + len(due)] = now_us - np.array(due)
        seen, silent_since = seen + len(due), time.monotonic()
    counted = np.sort(ages_us[:seen][due_us[:seen] >= due_us.min() + WARMUP_SECONDS * 1_000_000])
    shares = {"p50": 50, "p99": 99, "p999": 99.9, "max": 100}
    latency = {name: round(np.percentile(counted, each) / 1000, 2) for name, each in shares.items()}
    told = {"records": seen, "latency_ms": {**latency, "samples": len(counted)}}
    print(json.dumps(told), flush=True)
    reader.close()


if __name__ == "__main__":
    main()
