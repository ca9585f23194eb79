"""The Kafka of one command: a broker of its own, and topics that are filled once."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Producer

from stillframe.bench.inputs import views
from stillframe.bench.servers import held_port
from stillframe.connectors.generate import ClickSource
from stillframe.testing.kafka_node import Node

_JAVA_FLAGS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
"""It runs for long and is to hold up nobody."""
_WARM_UP_PARTS = 3
_BATCH_RECORDS = 50_000
_FLUSH_SECONDS_MAX = 60.0
_FIRST_MS = 1_700_000_000_000


class Kafka:
    """Starts its broker when it is first needed; `close` ends it and deletes what it holds."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._node: Node | None = None
        self._ending = ExitStack()
        self._filled: dict[tuple[int, int], tuple[str, str]] = {}

    def given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a program is told: the broker, what to read, and an empty topic to write to."""
        node = self._node or self._started()
        told: dict[str, Any] = {"brokers": node.address}
        if params["source"] == "kafka":
            to_read = self._views(node, params["input_records"], params["parallelism"])
            told["input"], told["warmup_input"] = to_read
        else:
            names = ("input", "output") if params["source"] == "generator" else ("output",)
            told |= {name: _created(node, params["parallelism"]) for name in names}
        return told

    def close(self) -> None:
        self._node = None
        self._filled.clear()
        self._ending.close()

    def _started(self) -> Node:
        self._tell("starting a Kafka broker")
        home = Path(tempfile.mkdtemp(prefix="stillframe-bench-kafka-"))
        self._ending.callback(shutil.rmtree, home, ignore_errors=True)
        node = Node(home, held_port(self._ending), held_port(self._ending), _JAVA_FLAGS)
        self._ending.callback(node.stop)
        node.start()
        self._node = node
        return node

    def _views(self, node: Node, records: int, partitions: int) -> tuple[str, str]:
        """The topics of this many page views, and of a part of them to warm up with."""
        if (records, partitions) not in self._filled:
            self._tell(f"writing {records:,} page views to Kafka")
            made = tuple(_created(node, partitions) for _ in range(2))
            for topic, count in zip(made, (records, records // _WARM_UP_PARTS), strict=True):
                fill(node.address, topic, count, partitions)
            self._filled[records, partitions] = made[0], made[1]
        return self._filled[records, partitions]


def _created(node: Node, partitions: int) -> str:
    name = f"bench-{uuid.uuid4().hex[:12]}"
    node.create(name, partitions)
    return name


def fill(brokers: str, topic: str, records: int, partitions: int) -> None:
    """Page views as JSON of five fields, dealt out to the partitions."""
    producer = Producer(
        {
            "bootstrap.servers": brokers,
            "log_level": 0,
            "linger.ms": 20,
            "batch.size": 1 << 20,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    source = ClickSource(records=records, partitions=partitions, skew=1)
    for partition in range(partitions):
        rows = len(range(partition, records, partitions))
        for start in range(0, rows, _BATCH_RECORDS):
            batch = views(source, partition, start, min(rows, start + _BATCH_RECORDS))
            for value in _documents(batch, start).to_pylist():
                producer.produce(topic, value, partition=partition)
            left = producer.flush(_FLUSH_SECONDS_MAX)
            assert left == 0, f"{left} records were not taken by the broker"


def _documents(batch: pa.RecordBatch, start: int) -> pa.Array:
    app, user, url = batch.columns
    moment = pa.array(range(_FIRST_MS + start, _FIRST_MS + start + batch.num_rows))
    referrer = pc.if_else(pc.equal(pc.bit_wise_and(user, 1), 0), '"search"', '"mail"')
    parts = [
        '{"app_id":"', app, '","user_id":', user.cast(pa.string()), ',"url":"', url,
        '","at":', moment.cast(pa.string()), ',"referrer":', referrer, "}",
    ]  # fmt: skip
    return pc.binary_join_element_wise(*parts, "")
