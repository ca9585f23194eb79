"""What is asked of Kafka beside records, and what its errors mean, each in one sentence.

Rules of this file
------------------
1. A client is made in the process that uses it, never before a fork, and kept in a variable: one
   that is collected drops its requests without a word.
2. Everything has a limit. What may heal is `Unavailable`, what will not is a `DataError`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from stillframe.connectors.kafka_options import EARLIEST, LATEST, Places, Settings, Subscribed
from stillframe.errors import BuildError, DataError, StillframeError, Unavailable

ANSWER_SECONDS_MAX = 10.0
_FINAL = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError._SSL,
}

_SOON = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    # Of a topic that was just made: it has no leader yet, or not every broker knows which.
    KafkaError._NOENT,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
}
_AGAIN_SECONDS = 0.05
_SILENT_SECONDS_MAX = 2.0
"""How long a connection that fails is tried again."""
_SILENT = {
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._RESOLVE,
    KafkaError._ALL_BROKERS_DOWN,
}

_LOOK = "look whether it runs, and whether it wants another kafka.security.protocol"
_BROKER = re.compile(r"(?:\w+://)?(?P<address>[^/\s]+)/(?:bootstrap|\d+): ")
_ADVICE = re.compile(r": broker certificate could not be verified, verify that .*$")
_STATE = re.compile(r" \(after \d+ms in state .*\)$")

_USUAL: Mapping[str, Any] = {"reconnect.backoff.max.ms": 2_000}
"""A broker that is back is found within seconds."""

Partition: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Topic:
    id: str
    """Which topic of this name it is: one that is deleted and made again has another. Empty where
    the broker is too old to tell."""
    partitions: tuple[int, ...]


def made(
    kind: type[Any], settings: Settings, usual: Mapping[str, Any] | None = None, **ours: Any
) -> Any:
    """A client; what the user gave comes before what is usual, and what must be before both."""
    # Its own log goes to stderr; what matters of it comes by the callback.
    try:
        return kind({"log_level": 0, **_USUAL, **(usual or {}), **settings.config(), **ours})
    except KafkaException as error:
        _refuse_missing_files(settings)
        said = error.args[0].str()
        raise BuildError(
            f"the Kafka client does not take its settings ({said}): correct the kafka.* options,"
            " which have librdkafka's names"
        ) from None


def _refuse_missing_files(settings: Settings) -> None:
    """What the client says of one is a number of OpenSSL's."""
    for name, value in settings.given:
        if name.endswith(".location") and isinstance(value, str) and not Path(value).exists():
            raise BuildError(
                f"option kafka.{name} is {value!r}, and there is no such file on this machine:"
                " correct it, or put the file there"
            )


def _plainly(error: KafkaError, settings: Settings) -> str:
    """What the client says, without its own states and advice and the address that is told."""
    if error.code() == KafkaError._ALL_BROKERS_DOWN:
        return "no broker answers"
    said = _ADVICE.sub("", _STATE.sub("", error.str()))
    broker = _BROKER.match(said)
    return said[broker.end() :] if broker and broker["address"] in settings.servers else said


def refused(error: KafkaError, settings: Settings) -> StillframeError:
    """What a job raises for this."""
    said = _plainly(error, settings)
    if error.code() == KafkaError._SSL and "certificate" not in said:
        return DataError(
            f"Kafka at {settings.servers} does not speak TLS as this client does ({said}): correct"
            " kafka.security.protocol, or the port in kafka.bootstrap.servers"
        )
    if error.code() == KafkaError._SSL:
        return DataError(
            f"the certificate of Kafka at {settings.servers} is not accepted ({said}): set"
            " kafka.ssl.ca.location to the file of who has signed it, and name the broker as it is"
            " named there"
        )
    if error.code() in _FINAL:
        return DataError(
            f"Kafka at {settings.servers} refuses this client ({said}): correct the kafka.* options"
            " for security, or what this user may do there"
        )
    if error.code() in _SILENT:
        is_closed = "Disconnected" in said  # it was reached, so it may be of another kind
        return Unavailable(
            f"Kafka at {settings.servers} cannot be reached ({said}): "
            + (_LOOK if is_closed else "start it, or correct kafka.bootstrap.servers")
        )
    return Unavailable(f"Kafka at {settings.servers} cannot do what is asked of it now ({said})")


class Client:
    """Asks about topics and offsets. Used by one thread."""

    def __init__(self, settings: Settings, answer_seconds_max: float = ANSWER_SECONDS_MAX) -> None:
        self._settings = settings
        self._seconds = answer_seconds_max
        self._heard: KafkaError | None = None
        self._admin = made(AdminClient, settings, error_cb=self._hear)

    def _hear(self, error: KafkaError) -> None:
        # That all brokers are down says less than why.
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._heard = error

    def topic_names(self) -> list[str]:
        try:
            return sorted(self._admin.list_topics(timeout=self._seconds).topics)
        except KafkaException as error:
            raise self._refused(error) from None

    def described(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those of these topics that exist."""
        found: dict[str, Topic] = {}
        wanted = sorted(set(names))
        if not wanted:
            return found
        asked = self._admin.describe_topics(TopicCollection(wanted), request_timeout=self._seconds)
        for name, future in asked.items():
            try:
                told = self._answer(future)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    continue
                raise self._refused(error) from None
            numbers = sorted(each.id for each in told.partitions)
            found[name] = Topic(str(told.topic_id or ""), tuple(numbers))
        return found

    def subscribed(self, to: Subscribed) -> dict[str, Topic]:
        """The topics that are there of those that are read, with the partitions that are."""
        names = to.named or [name for name in self.topic_names() if to.takes(name)]
        found = self.described(names)
        for name, wanted in to.assigned:
            if name in found:
                missing = set(wanted) - set(found[name].partitions)
                if missing:
                    raise DataError(
                        f"topic {name} at {self._settings.servers} has no partition"
                        f" {min(missing)}: correct the option assign"
                    )
                found[name] = Topic(found[name].id, wanted)
        return found

    def refuse_missing(self, names: Iterable[str]) -> dict[str, Topic]:
        found = self.described(names)
        for name in names:
            if name not in found:
                raise DataError(
                    f"topic {name} does not exist in Kafka at {self._settings.servers}: create it,"
                    " or correct its name"
                )
        return found

    def places(
        self, partitions: Iterable[Partition], places: Places, *, is_committed: bool
    ) -> dict[Partition, int]:
        """The offsets that are meant by these places."""
        meant = {each: places.of(*each) for each in partitions}
        if places.kind == "offset":
            asked = {each: place for each, place in meant.items() if place < 0}
            return meant | self._offsets(asked, is_committed=is_committed)
        found = self._offsets(
            {each: OffsetSpec.for_timestamp(place) for each, place in meant.items()},
            is_committed=is_committed,
        )
        after = [each for each, offset in found.items() if offset < 0]
        if after and not places.latest_if_none:
            topic, partition = after[0]
            raise DataError(
                f"partition {partition} of topic {topic} has no record at or after"
                f" {meant[after[0]]} ms, which {places.option} names: give an earlier time, or set"
                " startingOffsetsByTimestampStrategy to latest"
            )
        return found | self._offsets(dict.fromkeys(after, LATEST), is_committed=is_committed)

    def ends(self, partitions: Iterable[Partition], *, is_committed: bool) -> dict[Partition, int]:
        return self._offsets(dict.fromkeys(partitions, LATEST), is_committed=is_committed)

    def ask_ends(
        self, partitions: Iterable[Partition], *, is_committed: bool
    ) -> dict[Partition, Future[Any]]:
        """`ends`, to be answered later; for any thread."""
        asked = {TopicPartition(*each): OffsetSpec.latest() for each in partitions}
        answers = self._admin.list_offsets(
            asked, isolation_level=_level(is_committed), request_timeout=self._seconds
        )
        return {(of.topic, of.partition): future for of, future in answers.items()}

    def begins(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return self._offsets(dict.fromkeys(partitions, EARLIEST), is_committed=False)

    def _offsets(
        self, asked: Mapping[Partition, Any], *, is_committed: bool
    ) -> dict[Partition, int]:
        if not asked:
            return {}
        words = {EARLIEST: OffsetSpec.earliest(), LATEST: OffsetSpec.latest()}
        specs = {
            TopicPartition(*each): words.get(spec, spec) if isinstance(spec, int) else spec
            for each, spec in asked.items()
        }
        deadline = time.monotonic() + self._seconds
        while True:
            answers = self._admin.list_offsets(
                specs, isolation_level=_level(is_committed), request_timeout=self._seconds
            )
            try:
                return {
                    (of.topic, of.partition): self._answer(future).offset
                    for of, future in answers.items()
                }
            except KafkaException as error:
                # A topic that was just made may have no leader yet.
                if error.args[0].code() not in _SOON or time.monotonic() > deadline:
                    raise self._refused(error) from None
            time.sleep(_AGAIN_SECONDS)

    def group_offset(self, group: str, topic: str) -> tuple[int, str] | None:
        """Of partition 0, with what was said beside it; None: there is none.

        Waits for one that a transaction has not decided. Not by a consumer of the group: one that
        was made while its coordinator was away may not find it for a long time.
        """
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
        deadline = time.monotonic() + self._seconds
        while True:
            [future] = self._admin.list_consumer_group_offsets(
                [wanted], require_stable=True, request_timeout=self._seconds
            ).values()
            try:
                [found] = self._answer(future).topic_partitions
                if found.error is not None:
                    raise KafkaException(found.error)
                return (int(found.offset), found.metadata or "") if found.offset >= 0 else None
            except KafkaException as error:
                code, is_late = error.args[0].code(), time.monotonic() > deadline
                if is_late and code == KafkaError.UNSTABLE_OFFSET_COMMIT:
                    raise Unavailable(
                        f"Kafka at {self._settings.servers} has not ended a transaction with an"
                        f" offset of group {group} within {self._seconds:g} s; if that lasts it has"
                        " lost the end of it (as 4.2 and 4.3 may, KAFKA-20734): find it with"
                        " kafka-transactions.sh find-hanging and abort it"
                    ) from None
                if is_late or code not in _SOON:
                    raise self._refused(error) from None
            time.sleep(_AGAIN_SECONDS)

    def groups(self, prefix: str) -> list[str]:
        """Whose names begin so, as far as this user may see them."""
        future = self._admin.list_consumer_groups(request_timeout=self._seconds)
        try:
            names = [each.group_id for each in self._answer(future).valid]
        except KafkaException as error:
            raise self._refused(error) from None
        return [name for name in names if name.startswith(prefix)]

    def delete_group(self, group: str) -> None:
        """That it is gone already is fine."""
        asked = self._admin.delete_consumer_groups([group], request_timeout=self._seconds)
        try:
            self._answer(asked[group])
        except KafkaException as error:
            if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                raise self._refused(error) from None

    def topic_setting(self, topic: str, name: str) -> str | None:
        """A setting of a topic; None: this user may not see it, or there is no such topic."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        [future] = self._admin.describe_configs([resource], request_timeout=self._seconds).values()
        try:
            found = self._answer(future).get(name)
        except KafkaException as error:
            if error.args[0].code() in (
                KafkaError.TOPIC_AUTHORIZATION_FAILED,
                KafkaError.CLUSTER_AUTHORIZATION_FAILED,
                KafkaError.UNKNOWN_TOPIC_OR_PART,
            ):
                return None
            raise self._refused(error) from None
        return None if found is None else found.value

    def _answer(self, future: Future[Any]) -> Any:
        """Sooner than at the deadline if the callback hears that there will be none."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self._seconds + 1:
            with suppress(TimeoutError):
                answer = future.result(_AGAIN_SECONDS)
                self._heard = None
                return answer
            self._admin.poll(0)
            heard = self._heard
            if heard is not None and (heard.code() in _FINAL or waited > _SILENT_SECONDS_MAX):
                break
        raise self._silent()

    def _refused(self, error: KafkaException) -> StillframeError:
        told: KafkaError = error.args[0]
        return self._silent() if told.code() in _SILENT else refused(told, self._settings)

    def _silent(self) -> StillframeError:
        """That there was no answer is all a call says; the callback has heard why."""
        self._admin.poll(0)
        heard, self._heard = self._heard, None
        if heard is not None:
            return refused(heard, self._settings)
        return Unavailable(f"Kafka at {self._settings.servers} does not answer: {_LOOK}")


def _level(is_committed: bool) -> IsolationLevel:
    return IsolationLevel.READ_COMMITTED if is_committed else IsolationLevel.READ_UNCOMMITTED
