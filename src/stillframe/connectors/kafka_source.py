"""Kafka as a source, with Spark's options and columns: offsets are kept in the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    Discovered,
    Source,
    SourceContext,
    Split,
    SplitEnumerator,
)
from stillframe.config import parse_duration_seconds, parse_flag
from stillframe.connectors.avro_values import AvroFormat
from stillframe.connectors.json_lines import JSON_OPTIONS, rules_from_options
from stillframe.connectors.kafka_columns import Shape, ValueFormat
from stillframe.connectors.kafka_options import (
    EVERYTHING,
    NOTHING_YET,
    SECRET_OPTIONS,
    Places,
    Settings,
    Subscribed,
    ending_of,
    settings_of,
    starting_of,
    subscribed_of,
)
from stillframe.errors import BuildError, DataError, StartRefused, Unavailable
from stillframe.json_texts.rules import JsonRules
from stillframe.json_values import JsonObject
from stillframe.options import Options

if TYPE_CHECKING:
    from stillframe.connectors.kafka_client import Client, Partition, Topic

log = logging.getLogger("stillframe")

_FORMATS: tuple[ValueFormat, ...] = ("binary", "string", "json", "avro")
_WITHOUT_EFFECT = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
)
"""Spark's, about micro-batches or its own client: here records flow, as fast as they are taken."""


@dataclass(frozen=True)
class KafkaSource(Source):
    """Records of topics, each partition from an offset on."""

    option_names: ClassVar[tuple[str, ...]] = (
        "subscribe",
        "subscribePattern",
        "assign",
        "startingOffsets",
        "startingTimestamp",
        "startingOffsetsByTimestamp",
        "startingOffsetsByTimestampStrategy",
        "endingOffsets",
        "failOnDataLoss",
        "includeHeaders",
        "discoveryInterval",
        "valueFormat",
        "avroSchema",
        "confluentHeader",
        "kafka.*",
        *_WITHOUT_EFFECT,
        *JSON_OPTIONS,
    )
    secret_options: ClassVar[tuple[str, ...]] = SECRET_OPTIONS
    begins_now: ClassVar[bool] = True

    settings: Settings
    subscribed: Subscribed
    starting: Places = NOTHING_YET
    ending: Places | None = None
    """None: it goes on for ever, or until the job has read what is there."""
    shape: Shape = field(default_factory=Shape)
    fails_on_data_loss: bool = True
    discovery_seconds: float = 10.0

    @classmethod
    def from_options(cls, options: Options, schema: pa.Schema | None) -> KafkaSource:
        shape = _shape(options, schema)
        shape.check()
        for name in _WITHOUT_EFFECT:
            if name in options:
                log.warning("option %s has no effect: there are no micro-batches here", name)
        every = options.get("discoveryInterval", "10 seconds")
        source = cls(
            settings_of(options),
            subscribed_of(options),
            starting_of(options),
            ending_of(options),
            shape,
            parse_flag("failOnDataLoss", options.get("failOnDataLoss", "true")),
            parse_duration_seconds("discoveryInterval", every),
        )
        if source.discovery_seconds <= 0:
            raise BuildError(
                f"option discoveryInterval is {every!r}, which leaves no pause between two looks:"
                " give a duration such as '10 seconds'"
            )
        return source

    @property
    def schema(self) -> pa.Schema:
        return self.shape.schema

    @property
    def reads_committed(self) -> bool:
        return self.settings.get("isolation.level") != "read_uncommitted"

    @property
    def discovery_interval_seconds(self) -> float:
        return self.discovery_seconds

    def check_start(self) -> None:
        from stillframe.connectors.kafka_client import Client

        try:
            Client(self.settings).refuse_missing(self.subscribed.named)
        except (DataError, Unavailable) as error:
            raise StartRefused(str(error)) from None

    def splits(self, parallelism: int) -> list[Split]:
        from stillframe.connectors.kafka_client import Client

        client = Client(self.settings)
        client.refuse_missing(self.subscribed.named)
        topics = client.subscribed(self.subscribed)
        every = [(name, number) for name in topics for number in topics[name].partitions]
        return _splits(self, client, topics, every, self.starting)

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        return _Partitions(self, state)

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        # Here, in the slot: a session that never reads from Kafka does not import the client.
        from stillframe.connectors.kafka_reader import KafkaReader

        return KafkaReader(self, splits, context)

    def goes_back(self, position: JsonObject, later: JsonObject) -> bool:
        is_same = position.get("topic_id") == later.get("topic_id")
        back = cast(int, later["offset"]) < cast(int, position["offset"])
        return is_same and back and self.fails_on_data_loss

    def describe(self) -> str:
        return f"kafka {self.subscribed} at {self.settings.servers}"

    @property
    def tied_to(self) -> str:
        return f"kafka {self.subscribed}"


class _Partitions(SplitEnumerator):
    """Finds partitions of topics that came after the start; they are read from their beginning.

    At first also those that the job began with, which are passed over because their ids are known.
    """

    def __init__(self, source: KafkaSource, state: JsonObject | None) -> None:
        from stillframe.connectors.kafka_client import Client

        self._source = source
        self._client = Client(source.settings)
        self._is_away = False
        found = {} if state is None else cast("dict[str, list[int]]", state["partitions"])
        self._found = {topic: set(numbers) for topic, numbers in found.items()}

    def discover(self) -> Discovered:
        if self._source.ending is not None or self._source.subscribed.assigned:
            return Discovered([], self._state(), is_last=True)
        try:
            found = self._found_now()
        except Unavailable as error:
            # What is known is read on, and its readers say what they wait for.
            if not self._is_away:
                log.warning("new partitions cannot be looked for: %s", error)
            self._is_away = True
            return Discovered([], self._state())
        self._is_away = False
        return found

    def _found_now(self) -> Discovered:
        topics = self._client.subscribed(self._source.subscribed)
        new: list[Partition] = [
            (name, number)
            for name, topic in sorted(topics.items())
            for number in topic.partitions
            if number not in self._found.get(name, ())
        ]
        splits = _splits(self._source, self._client, topics, new, EVERYTHING)
        for name, number in new:
            self._found.setdefault(name, set()).add(number)
        return Discovered(splits, self._state())

    def _state(self) -> JsonObject:
        return {"partitions": {name: sorted(at) for name, at in self._found.items()}}


def _splits(
    source: KafkaSource,
    client: Client,
    topics: Mapping[str, Topic],
    partitions: Sequence[Partition],
    starting: Places,
) -> list[Split]:
    committed = source.reads_committed
    begins = client.places(partitions, starting, is_committed=committed)
    ends: Mapping[Partition, int] = {}
    if source.ending is not None:
        ends = client.places(partitions, source.ending, is_committed=committed)
    return [
        Split(f"{name}-{number}", _position(each, topics[name].id, begins[each], ends))
        for each in partitions
        for name, number in [each]
    ]


def _position(
    of: Partition, topic_id: str, offset: int, ends: Mapping[Partition, int]
) -> JsonObject:
    """All that is needed to read on, and to see that the topic is still the same."""
    end: JsonObject = {"end": ends[of]} if of in ends else {}
    return {"topic": of[0], "partition": of[1], "topic_id": topic_id, "offset": offset, **end}


def _shape(options: Options, schema: pa.Schema | None) -> Shape:
    value_format = _value_format(options.get("valueFormat", "binary"))
    with_headers = parse_flag("includeHeaders", options.get("includeHeaders", "false"))
    if value_format != "avro":
        for name in ("avroSchema", "confluentHeader"):
            if name in options:
                raise BuildError(
                    f"option {name} is for values of Avro: set valueFormat to avro, or leave it out"
                )
        return Shape(value_format, schema, _rules(options), with_headers)
    if schema is not None:
        raise BuildError(
            "the columns of Avro's values are those of avroSchema: leave .schema(...) out"
        )
    if "avroSchema" not in options:
        raise BuildError(
            "valueFormat is avro, so the schema of the values has to be given: set avroSchema to"
            " its JSON text"
        )
    mode = options.get("mode", "FAILFAST").strip().upper()
    if mode not in ("FAILFAST", "PERMISSIVE"):
        raise BuildError(f"option mode is FAILFAST or PERMISSIVE for values of Avro, not {mode!r}")
    form = AvroFormat(
        options["avroSchema"],
        mode == "FAILFAST",
        parse_flag("confluentHeader", options.get("confluentHeader", "false")),
    )
    return Shape(value_format, form.columns(), with_headers=with_headers, avro=form)


def _value_format(text: str) -> ValueFormat:
    for each in _FORMATS:
        if text.strip().lower() == each:
            return each
    raise BuildError(f"option valueFormat is one of {', '.join(_FORMATS)}, not {text!r}")


def _rules(options: Options) -> JsonRules:
    return rules_from_options(options, "the source kafka")
