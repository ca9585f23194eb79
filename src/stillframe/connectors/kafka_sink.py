"""Kafka as a sink, with Spark's columns: exactly once by one transaction for each part, or plainly.

Theory of operation
-------------------
*Exactly once*: rows are staged with the checkpoint (`transactional.py`). When it is complete, one
Kafka transaction writes them and, as the offset of a consumer group of the writer's own, the
checkpoint's id: the mark. `begin` first initialises the transactional id, which is the writer's
name: that ends what an older committer left open and fences it for good, and waits where a commit
is under way. Only then is the group's offset read. It expires some days after it was written: a
mark has to last only until the receipt is noted, and one that is gone too early is missed
(`marks_expire`).

*At least once*: rows are produced as they come and flushed at the barrier. Nothing is prepared.

This file imports the client only where rows are written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkGuarantee,
    SinkWriter,
    Target,
)
from stillframe.connectors.kafka_options import GROUP, Settings, settings_of
from stillframe.connectors.transactional import (
    OnRefused,
    StagingWriter,
    TransactionalSink,
    required_staging,
)
from stillframe.errors import BuildError, DataError, StartRefused, Unavailable
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, Writer
from stillframe.options import Options

if TYPE_CHECKING:
    from stillframe.connectors.kafka_client import Client

log = logging.getLogger("stillframe")

_TYPES: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "key": (lambda type_: _is_bytes(type_), "a string or binary"),
    "value": (lambda type_: _is_bytes(type_), "a string or binary"),
    "headers": (lambda type_: pa.types.is_list(type_), "an array of (key string, value binary)"),
    "topic": (pa.types.is_string, "a string"),
    "partition": (pa.types.is_int32, "an int"),
}
_OVERHEAD_BYTES = 128
"""What a record of its own takes beside its key, value and headers, and some more."""
_GUARANTEES = ("exactly-once", "at-least-once")


OURS_IN_GROUPS = "stillframe/"


def name_of(writer: Writer) -> str:
    """Of a transactional id, and of the group that keeps its mark."""
    return f"{OURS_IN_GROUPS}{writer}"


def _is_bytes(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_binary(type_))


@dataclass(frozen=True)
class Destination:
    """Where rows go to."""

    settings: Settings
    topic: str | None = None
    """Of all rows; None: the column topic says it."""

    def describe(self) -> str:
        return f"kafka {self.topic or 'topics by column'} at {self.settings.servers}"

    def check_start(self, *topics: str | None) -> None:
        from stillframe.connectors.kafka_client import Client

        try:
            Client(self.settings).refuse_missing([each for each in topics if each])
        except (DataError, Unavailable) as error:
            raise StartRefused(str(error)) from None


SINK_OPTIONS = (
    "topic",
    "markTopic",
    "deliveryGuarantee",
    "onRefused",
    "kafka.*",
)


def sink_from_options(options: Options, schema: pa.Schema) -> Sink:
    """What `writeStream.format("kafka").option(…)` asks for."""
    topic = options.get("topic", "").strip() or None
    _check_columns(schema, topic)
    settings = settings_of(options)
    if settings.get(GROUP) is not None:
        raise BuildError(f"the sink kafka does not take kafka.{GROUP}: leave it out")
    destination = Destination(settings, topic)
    guarantee = options.get("deliveryGuarantee", "exactly-once").lower()
    if guarantee not in _GUARANTEES:
        raise BuildError(
            f"option deliveryGuarantee is {' or '.join(_GUARANTEES)}, not {guarantee!r}"
        )
    if guarantee == "at-least-once":
        return PlainKafkaSink(destination)
    mark_topic = options.get("markTopic", "").strip() or topic
    if mark_topic is None:
        raise BuildError(
            "rows go to the topics that their column names, so option markTopic has to name one"
            " that is always there: marks are kept as a group's offset of its partition 0"
        )
    refused = options.get("onRefused", "fail").lower()
    if refused not in ("fail", "go on"):
        raise BuildError(f"option onRefused is 'fail' or 'go on', not {refused!r}")
    on_refused: OnRefused = "fail" if refused == "fail" else "go on"
    return KafkaSink(destination, mark_topic, on_refused)


def _check_columns(schema: pa.Schema, topic: str | None) -> None:
    """The stream has Spark's columns for Kafka, and no others."""
    if "value" not in schema.names:
        raise BuildError(
            f"the sink kafka needs a column value, and the stream has {', '.join(schema.names)}:"
            " select one, such as to_json(struct('*')) as value"
        )
    if topic is None and "topic" not in schema.names:
        raise BuildError(
            "the sink kafka needs the option topic, or a column topic that says where each row goes"
        )
    for field in schema:
        if field.name not in _TYPES:
            raise BuildError(
                f"the sink kafka does not take a column {field.name}: it takes"
                f" {', '.join(_TYPES)}; put the others into the value"
            )
        fits, wanted = _TYPES[field.name]
        if not fits(field.type):
            raise BuildError(
                f"column {field.name} is {field.type}, and the sink kafka wants {wanted}: cast it"
            )


# --- Exactly once ----------------------------------------------------------------------------


@dataclass(frozen=True)
class KafkaSink(TransactionalSink):
    """Rows become visible to readers with `read_committed`, each once, whatever is killed."""

    marks_expire: ClassVar[bool] = True

    destination: Destination
    mark_topic: str
    on_refused: OnRefused = "fail"

    def open_target(self) -> Target:
        from stillframe.connectors.kafka_target import KafkaTarget

        return KafkaTarget(self.destination, self.mark_topic)

    def mark_in_words(self, writer: Writer) -> str:
        return f"offset of group {name_of(writer)} in topic {self.mark_topic}"

    def open_writer(self, context: SinkContext) -> SinkWriter:
        staging = required_staging(context.staging, self)
        return StagingWriter(staging, context, Refusing(self.destination).check_batch)

    def check_start(self) -> None:
        self.destination.check_start(self.destination.topic, self.mark_topic)

    def describe(self) -> str:
        return self.destination.describe()

    @property
    def tied_to(self) -> str:
        return f"kafka {self.destination.topic}"


class Refusing:
    """Finds at once what the broker would refuse when the checkpoint is complete."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._limits: dict[str, tuple[int, int]] = {}
        """Of each topic: how large a record may be, and how many partitions there are."""
        self._client: Client | None = None

    def check_batch(self, batch: pa.RecordBatch) -> None:
        for topic, rows in self._by_topic(batch):
            try:
                bytes_max, partitions = self._limit(topic)
            except Unavailable as error:
                # Records do not wait for the broker: what is refused later is kept aside.
                log.warning("rows for topic %s are not checked: %s", topic, error)
                continue
            _refuse_large(rows, topic, bytes_max)
            _refuse_partition(rows, topic, partitions)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._destination.topic is not None:
            yield self._destination.topic, batch
            return
        column = batch.column("topic")
        for topic in column.unique().to_pylist():
            if topic is None:
                raise DataError("a row has no topic: its column topic is null, and option topic is"
                                " not set")  # fmt: skip
            yield topic, batch.filter(pa.compute.equal(column, topic))

    def _limit(self, topic: str) -> tuple[int, int]:
        if topic not in self._limits:
            from stillframe.connectors.kafka_client import Client

            self._client = self._client or Client(self._destination.settings, 5.0)
            [found] = self._client.refuse_missing([topic]).values()
            said = self._client.topic_setting(topic, "max.message.bytes")
            self._limits[topic] = int(said or 1_048_588), len(found.partitions)
        return self._limits[topic]


def _refuse_large(rows: pa.RecordBatch, topic: str, bytes_max: int) -> None:
    if rows.nbytes + _OVERHEAD_BYTES <= bytes_max:
        return  # all of them together
    columns = {name: rows.column(name) for name in rows.schema.names}
    sizes = sum(_lengths(columns[name]) for name in ("key", "value") if name in columns)
    if "headers" in columns:
        parents = pa.compute.list_parent_indices(columns["headers"])
        for each in columns["headers"].flatten().flatten():  # all keys, all values
            sizes = sizes + np.bincount(parents, _lengths(each), rows.num_rows)
    largest = int(np.max(sizes)) + _OVERHEAD_BYTES
    if largest > bytes_max:
        raise DataError(
            f"a record of {largest} bytes is larger than the {bytes_max} that topic {topic} takes:"
            " make its value smaller, or raise max.message.bytes of the topic"
        )


def _lengths(texts: pa.Array) -> npt.NDArray[np.int64]:
    lengths = pa.compute.fill_null(pa.compute.binary_length(texts), 0)
    return np.asarray(lengths, dtype=np.int64)


def _refuse_partition(rows: pa.RecordBatch, topic: str, partitions: int) -> None:
    if "partition" not in rows.schema.names:
        return
    ends = pa.compute.min_max(rows.column("partition")).as_py()
    for number in (ends["min"], ends["max"]):
        if number is not None and not 0 <= number < partitions:
            raise DataError(
                f"a row is to go to partition {number} of topic {topic}, which has {partitions}:"
                " correct the column partition"
            )


# --- At least once ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainKafkaSink(Sink):
    """Rows are produced as they come; after a failure those since the checkpoint come again."""

    destination: Destination
    guarantee: SinkGuarantee = "at-least-once"
    weakness: str | None = (
        "shows rows before their checkpoint is complete, and shows them again after a failure"
    )

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _PlainWriter(self.destination)

    def open_committer(self, context: CommitterContext) -> Committer:
        return _NothingToCommit()

    def check_start(self) -> None:
        self.destination.check_start(self.destination.topic)

    def describe(self) -> str:
        return self.destination.describe()

    @property
    def tied_to(self) -> str:
        return f"kafka {self.destination.topic}"


class _PlainWriter(SinkWriter):
    def __init__(self, destination: Destination) -> None:
        from stillframe.connectors.kafka_client import Client
        from stillframe.connectors.kafka_target import Producing

        self._refusing = Refusing(destination)
        self._producing = Producing(destination, Client(destination.settings))

    def write(self, batch: pa.RecordBatch) -> None:
        self._refusing.check_batch(batch)
        for _, reason in self._producing.produced(batch):
            raise DataError(f"the Kafka client refuses a row ({reason}): correct it")

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        def flushed() -> Sequence[Committable]:
            self._producing.flush_patiently()
            return []

        return flushed

    def close(self) -> None:
        with suppress(Exception):  # what was not flushed belongs to no checkpoint
            self._producing.close()


class _NothingToCommit(Committer):
    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        """It is there already."""

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        """Nothing is left behind."""
