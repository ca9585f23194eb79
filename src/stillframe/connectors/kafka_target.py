"""Writes rows to Kafka: `Producing` for one producer, `KafkaTarget` for transactions with marks.

Theory of operation
-------------------
A mark is the offset of the writer's own group: the newest checkpoint all of whose rows are written.
A part that takes too long for one transaction is written in several. Each but the last leaves the
offset as it is and says beside it, as `7:20000`, how many rows of which checkpoint are written by
now: who commits the part again leaves these out. Rows have one order, that of the staged files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from itertools import repeat
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from stillframe.api.sinks import Target
from stillframe.connectors.kafka_client import Client, made, refused
from stillframe.connectors.kafka_options import Settings
from stillframe.connectors.kafka_sink import OURS_IN_GROUPS, Destination, name_of
from stillframe.errors import DataError, StillframeError, StorageError, Unavailable
from stillframe.ids import (
    NO_CHECKPOINT,
    CheckpointId,
    Mark,
    OperatorUid,
    Writer,
    incarnation_in,
)

log = logging.getLogger("stillframe")

_ANSWER_SECONDS_MAX = 15.0
_COMMIT_SECONDS_MAX = 30.0
"""It flushes first. Not by flush(), whose callbacks raise where the client was fenced. One that
takes longer is given up; the next try, with another client, finds out what became of it."""
_ABORT_SECONDS_MAX = 5.0
_PATIENT_SECONDS = 10.0
"""How often a sink says that it waits for the broker."""
_ROOM_SECONDS = 0.1
_POLL_ROWS = 10_000
_CUT_ROWS = 20_000
"""So often a long transaction looks at the clock."""
_TRANSACTION_TIMEOUT = "transaction.timeout.ms"
_TRANSACTION_TIMEOUT_MS = 30_000
"""For so long at most one that died holds readers back."""
_OPEN_SHARE = 1 / 3
"""Of that time, how long rows are added to a transaction; the rest is for the broker."""
_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError._FATAL,
    KafkaError._PURGE_QUEUE,
}
_REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_EXCEPTION,
}


_USUAL: Mapping[str, Any] = {
    "linger.ms": 20,
    "batch.num.messages": 20_000,
    "compression.type": "lz4",
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 128 << 10,
    # What is too large was refused before by the topic's own limit.
    "message.max.bytes": 100 << 20,
    _TRANSACTION_TIMEOUT: _TRANSACTION_TIMEOUT_MS,
    # A key goes where Java's clients, and so Spark, would send it.
    "partitioner": "murmur2_random",
    # A producer that starts over with all brokers when none answers keeps the group's coordinator
    # of before, and waits for it for ever: seen with librdkafka 2.16, whatever the time limit.
    "metadata.recovery.strategy": "none",
}
_BATCH_BYTES_MAX = 1 << 20
_OURS: Mapping[str, Any] = {"enable.idempotence": True, "delivery.report.only.error": True}


class Producing:
    """One producer, and what has become of its rows."""

    def __init__(self, destination: Destination, client: Client, **ours: Any) -> None:
        self._destination = destination
        self._failed: KafkaError | None = None
        self.producer = made(
            Producer,
            destination.settings,
            {**_USUAL, "batch.size": _batch_bytes(client, destination.topic)},
            **{**_OURS, **ours},
            on_delivery=self._on_failure,
        )

    @property
    def settings(self) -> Settings:
        return self._destination.settings

    def _on_failure(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and self._failed is None:
            self._failed = error

    def produced(self, batch: pa.RecordBatch) -> Iterator[tuple[int, str]]:
        """Queue these rows; the places of those that the client itself refuses, and why."""
        produce, poll = self.producer.produce, self.producer.poll
        if "headers" in batch.schema.names:
            produce = _with_headers(produce)
        for place, arguments in enumerate(_rows(batch, self._destination.topic)):
            while True:
                try:
                    produce(*arguments)
                    break
                except BufferError:
                    poll(_ROOM_SECONDS)
                    self.raise_failure()
                except KafkaException as error:
                    if error.args[0].code() not in _REFUSED:
                        raise understood(error, self.settings) from error
                    yield place, error.args[0].str()
                    break
            if place % _POLL_ROWS == 0:
                poll(0)
        poll(0)
        self.raise_failure()

    def raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is None:
            return
        if failed.code() in _REFUSED:
            raise DataError(
                f"{self._destination.describe()} refuses records ({failed.str()}): correct the"
                " topic or its settings, or set kafka.batch.size below its max.message.bytes, then"
                " start the job again, it goes on"
            )
        raise understood(KafkaException(failed), self.settings)

    def flush(self) -> None:
        """For as long as it takes, if the broker takes some."""
        for left in self._without_progress(_ANSWER_SECONDS_MAX):
            raise Unavailable(
                f"Kafka at {self.settings.servers} has taken none of {left} records within"
                f" {_ANSWER_SECONDS_MAX:g} s"
            )

    def flush_patiently(self) -> None:
        """Also while no broker answers, until the client gives a record up (message.timeout.ms)."""
        for left in self._without_progress(_PATIENT_SECONDS):
            log.warning(
                "%s has taken none of %s records within %g s: the sink waits for it",
                self._destination.describe(),
                left,
                _PATIENT_SECONDS,
            )

    def _without_progress(self, seconds: float) -> Iterator[int]:
        """Flush; what is left each time that not one record was taken for so long."""
        producer = self.producer  # another thread may close this meanwhile, which ends the wait
        left = len(producer)
        while left:
            before, left = left, producer.flush(seconds)
            self.raise_failure()
            if left >= before:
                yield left

    def close(self) -> None:
        """What was not flushed is dropped.

        Not by the client's own close: that raises for one that was fenced, and waits. A client
        ends with its last reference.
        """
        self.producer.purge()
        self.producer = None


def _batch_bytes(client: Client, topic: str | None) -> int:
    """What goes out together must not be larger than a record may be: the broker refuses both."""
    said = client.topic_setting(topic, "max.message.bytes") if topic is not None else None
    if said is None and topic is not None:
        client.refuse_missing([topic])
    return min(int(said or _BATCH_BYTES_MAX), _BATCH_BYTES_MAX)


def _rows(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[Any, ...]]:
    """What `produce` is called with for each row: by place, and no more than there are columns
    for, since a call with all of it takes twice as long. Headers come last, if there are any."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    takes = [
        repeat(topic) if topic is not None else columns["topic"].to_pylist(),
        columns["value"].to_pylist(),
    ]
    if columns.keys() & {"key", "partition", "headers"}:
        takes.append(columns["key"].to_pylist() if "key" in columns else repeat(None))
    if columns.keys() & {"partition", "headers"}:
        partition = columns.get("partition")
        takes.append(repeat(-1) if partition is None else partition.fill_null(-1).to_pylist())
    if "headers" in columns:
        headers = columns["headers"].to_pylist()
        pairs = [each and [(pair["key"], pair["value"]) for pair in each] for each in headers]
        takes.append(pairs)
    return zip(*takes)  # noqa: B905 (some have no end)


def _with_headers(produce: Callable[..., None]) -> Callable[..., None]:
    """They can only be given by name."""
    return lambda topic, value, key, partition, headers: produce(
        topic, value, key, partition, headers=headers
    )


class KafkaTarget(Target):
    """One transactional producer at a time: that of the writer whose part is committed."""

    def __init__(
        self,
        destination: Destination,
        mark_topic: str,
        answer_seconds_max: float = _ANSWER_SECONDS_MAX,
        open_seconds_max: float | None = None,
    ) -> None:
        """`open_seconds_max`: how long rows are added to one transaction; None: by its timeout."""
        self._seconds = answer_seconds_max
        timeout_ms = destination.settings.get(_TRANSACTION_TIMEOUT) or _TRANSACTION_TIMEOUT_MS
        self._open_seconds_max = (
            int(timeout_ms) / 1000 * _OPEN_SHARE if open_seconds_max is None else open_seconds_max
        )
        self._destination = destination
        self._mark_topic = mark_topic
        self._of: Writer | None = None
        self._producing: Producing | None = None
        self._group: Any = None
        self._client: Client | None = None
        self._is_in_transaction = False
        self._has_mark = False
        self._newest = NO_CHECKPOINT
        """All rows up to it are written."""
        self._begun = (NO_CHECKPOINT, 0)
        """How many rows of a later one are."""

    def begin(self, writer: Writer) -> CheckpointId | None:
        """The mark is read once: who else would write it ends this producer before."""
        if writer != self._of:
            self._leave()
            self._open(writer)
            self._look(writer)
        return self._newest if self._has_mark else None

    def _look(self, writer: Writer) -> None:
        assert self._client is not None
        found = self._client.group_offset(name_of(writer), self._mark_topic)
        newest, said = found or (NO_CHECKPOINT, "")
        self._has_mark = found is not None
        self._newest, self._begun = CheckpointId(newest), _begun_of(said)
        self._of = writer

    def _open(self, writer: Writer) -> None:
        settings = self._destination.settings
        self._client = self._client or Client(settings, self._seconds)
        self._producing = Producing(
            self._destination, self._client, **{"transactional.id": name_of(writer)}
        )
        try:
            self._producing.producer.init_transactions(self._seconds)
        except KafkaException as error:
            raise understood(error, settings) from error
        # It never joins: its group is where the mark is kept, and nothing else.
        ours: dict[str, Any] = {"group.id": name_of(writer), "enable.auto.commit": False}
        self._group = made(Consumer, settings, **ours)

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        assert self._producing is not None, "begin comes first"
        of, done = self._begun if self._begun[0] == mark.checkpoint_id else (mark.checkpoint_id, 0)
        try:
            began_at = self._begin_transaction()
            for batch in _cut(rows, skipped=done):
                for place, reason in self._producing.produced(batch):
                    refuse(batch.slice(place, 1), reason)
                done += batch.num_rows
                if time.monotonic() - began_at >= self._open_seconds_max:
                    self._commit(self._newest, f"{of}:{done}")
                    began_at = self._begin_transaction()
            self._commit(mark.checkpoint_id)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._STATE:
                # A transaction that cannot go on: what is told of a record says why.
                self._producing.producer.poll(_ROOM_SECONDS)
            self._producing.raise_failure()
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                assert self._client is not None
                self._client.refuse_missing([self._mark_topic])
            raise understood(error, self._destination.settings) from error

    def _begin_transaction(self) -> float:
        assert self._producing is not None
        self._producing.producer.begin_transaction()
        self._is_in_transaction = True
        return time.monotonic()

    def _commit(self, newest: CheckpointId, said: str = "") -> None:
        """With the mark, which is the offset of a group: in the transaction, or not at all."""
        assert self._producing is not None
        producer = self._producing.producer
        offset = TopicPartition(self._mark_topic, 0, newest, said)
        producer.send_offsets_to_transaction(
            [offset], self._group.consumer_group_metadata(), self._seconds
        )
        producer.commit_transaction(_COMMIT_SECONDS_MAX)
        self._is_in_transaction = False
        self._has_mark, self._newest, self._begun = True, newest, _begun_of(said)

    def forget(self, writer: Writer) -> None:
        self._leave()
        self._open(writer)  # which ends what is open there
        assert self._client is not None
        self._client.delete_group(name_of(writer))
        self._leave()

    def incarnations(self, uid: OperatorUid) -> Set[str]:
        self._client = self._client or Client(self._destination.settings, self._seconds)
        names = [name.removeprefix(OURS_IN_GROUPS) for name in self._client.groups(OURS_IN_GROUPS)]
        return {each for name in names if (each := incarnation_in(name, uid)) is not None}

    def abandon(self) -> None:
        """What becomes of a transaction that was not ended is for the next `begin` to find out."""
        if self._is_in_transaction and self._producing is not None:
            with suppress(KafkaException):  # the next one who begins ends it
                self._producing.producer.abort_transaction(_ABORT_SECONDS_MAX)
            self._leave()
        self._is_in_transaction = False

    def close(self) -> None:
        self._leave()
        self._client = None

    def _leave(self) -> None:
        """The writer whose parts were committed."""
        if self._producing is not None:
            self._producing.close()
        if self._group is not None:
            self._group.close()
        self._of = self._producing = self._group = None


def _begun_of(said: str) -> tuple[CheckpointId, int]:
    of, _, rows = said.partition(":")
    return (CheckpointId(int(of)), int(rows)) if rows else (NO_CHECKPOINT, 0)


def _cut(rows: Iterator[pa.RecordBatch], skipped: int) -> Iterator[pa.RecordBatch]:
    """Small batches of what comes behind the first rows."""
    for batch in rows:
        first, skipped = min(skipped, batch.num_rows), max(0, skipped - batch.num_rows)
        for start in range(first, batch.num_rows, _CUT_ROWS):
            yield batch.slice(start, _CUT_ROWS)


def understood(error: KafkaException, settings: Settings) -> StillframeError:
    """What a committer raises for this."""
    told: KafkaError = error.args[0]
    # A client that was fenced drops what it has, and tells so of each record.
    if told.code() in _FENCED:
        return StorageError(
            "another committer of this job has taken over, so this one must not write"
            f" ({told.str()})"
        )
    return refused(told, settings)
