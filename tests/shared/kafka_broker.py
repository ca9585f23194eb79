"""The Kafka broker of the tests, with what they ask of it.

As a command it runs another one beside a broker, whose address is put behind its arguments:

    python tests/shared/kafka_broker.py COMMAND ... --bootstrap-servers
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from certificates import certified
from confluent_kafka import Consumer, IsolationLevel, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec
from ports import hold_port, port_of

from stillframe.testing.kafka_node import Node, answered

_ANSWER_SECONDS_MAX = 30.0

_SECURE = """\
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port},\
SASL_PLAINTEXT://127.0.0.1:{sasl_port},SSL://127.0.0.1:{tls_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{sasl_port},\
SSL://localhost:{tls_port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,\
SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
transaction.max.timeout.ms=7200000
ssl.keystore.type=PEM
ssl.keystore.location={home}/broker.pem
"""


USER, PASSWORD = "ann", "tiger9-of-kafka"


class Broker(Node):
    """With two more addresses, for those who have to show who they are."""

    def __init__(
        self, home: Path, port: int, controller_port: int, sasl_port: int, tls_port: int
    ) -> None:
        secure = _SECURE.format(
            port=port,
            controller_port=controller_port,
            sasl_port=sasl_port,
            tls_port=tls_port,
            user=USER,
            password=PASSWORD,
            home=home,
        )
        super().__init__(home, port, controller_port, settings=secure)
        self.sasl_address = f"127.0.0.1:{sasl_port}"
        """Where `USER` and `PASSWORD` are wanted."""
        self.tls_address = f"localhost:{tls_port}"
        """Where it shows the certificate of localhost that is in `certificate`."""
        self.certificate = home / "certificate.pem"
        key, certificate = certified("localhost")
        (home / "broker.pem").write_bytes(key + certificate)
        self.certificate.write_bytes(certificate)

    def topic(self, partitions: int = 1, **config: str) -> str:
        """A new topic; its name."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        self.create(name, partitions, **config)
        return name

    def delete(self, topic: str) -> None:
        answered(self.admin.delete_topics([topic]))

    def set(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        resource.add_incremental_config(
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        )
        answered(self.admin.incremental_alter_configs([resource]))

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        answered(self.admin.delete_records([TopicPartition(topic, partition, offset)]))

    def topics(self) -> set[str]:
        return set(self.admin.list_topics(timeout=_ANSWER_SECONDS_MAX).topics)

    def groups(self) -> set[str]:
        listed = self.admin.list_consumer_groups().result(_ANSWER_SECONDS_MAX)
        return {group.group_id for group in listed.valid}

    def delete_group(self, group: str) -> None:
        answered(self.admin.delete_consumer_groups([group]))

    def open_transactions(self, topic: str) -> set[int]:
        """The partitions in which readers are held back."""
        partitions = self.admin.list_topics(topic).topics[topic].partitions
        asked = {TopicPartition(topic, each): OffsetSpec.latest() for each in partitions}
        stable, all_of_them = (
            self.admin.list_offsets(asked, isolation_level=level)
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
        return {
            each.partition
            for each in asked
            if stable[each].result(_ANSWER_SECONDS_MAX).offset
            < all_of_them[each].result(_ANSWER_SECONDS_MAX).offset
        }

    def committed(self, group: str, topic: str, partition: int = 0) -> int:
        """The offset of a group; -1001: there is none."""
        consumer = self.consumer(**{"group.id": group})
        try:
            [found] = consumer.committed([TopicPartition(topic, partition)], _ANSWER_SECONDS_MAX)
            return int(found.offset)
        finally:
            consumer.close()

    def send(
        self, topic: str, values: Iterable[bytes | None], partition: int = 0, **more: Any
    ) -> None:
        producer = Producer({"bootstrap.servers": self.address, "log_level": 0, "linger.ms": 5})
        failed: list[Any] = []

        def told(error: Any, message: Any) -> None:
            failed.extend([error] if error is not None else [])

        for value in values:
            producer.produce(topic, value, partition=partition, on_delivery=told, **more)
            producer.poll(0)
        assert producer.flush(_ANSWER_SECONDS_MAX) == 0
        assert not failed, f"{len(failed)} records were not sent: {failed[0]}"

    def transaction(self, id: str | None = None, **config: Any) -> Producer:
        """A producer in the middle of one."""
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "transactional.id": id or f"x-{uuid.uuid4().hex[:12]}",
                "log_level": 0,
                **config,
            }
        )
        producer.init_transactions(_ANSWER_SECONDS_MAX)
        producer.begin_transaction()
        return producer

    def messages(self, topic: str, level: str = "read_committed") -> list[Any]:
        """All that a reader sees now, partition by partition."""
        consumer = self.consumer(**{"isolation.level": level})
        partitions = consumer.list_topics(topic, _ANSWER_SECONDS_MAX).topics[topic].partitions
        consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
        try:
            found = list(_until_ends(consumer, len(partitions)))
        finally:
            consumer.close()
        return sorted(found, key=lambda message: (message.partition(), message.offset()))

    def values(self, topic: str, level: str = "read_committed") -> list[bytes | None]:
        return [message.value() for message in self.messages(topic, level)]

    def consumer(self, **config: Any) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "tests",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "log_level": 0,
                **config,
            }
        )


def _until_ends(consumer: Consumer, partitions: int) -> Iterator[Any]:
    deadline, ended = time.monotonic() + _ANSWER_SECONDS_MAX, set()
    while len(ended) < partitions:
        assert time.monotonic() < deadline, f"only the ends of {ended} came"
        for message in consumer.consume(10_000, 0.2):
            if message.error() is None:
                yield message
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())


@contextmanager
def running_broker(home: Path) -> Iterator[Broker]:
    """A broker that has started, on ports of its own."""
    with ExitStack() as holding:
        ports = [port_of(holding.enter_context(closing(hold_port()))) for _ in range(4)]
        broker = Broker(home, *ports)
        try:
            broker.start()
            yield broker
        finally:
            broker.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, running_broker(Path(place)) as started:
        sys.exit(subprocess.call([*sys.argv[1:], started.address]))
