"""What Spark's options for Kafka say: which partitions, from where, to where, and how to connect.

Nothing here imports the client, so that a session which never reads from Kafka does not pay for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from stillframe.errors import BuildError
from stillframe.options import Options
from stillframe.secrets import Secret

SERVERS = "kafka.bootstrap.servers"
SECRET_OPTIONS = ("kafka.ssl.key.pem",)
GROUP = "group.id"

EARLIEST, LATEST = -2, -1
"""As Spark has them in its JSON."""

_NOT_TO_SET: Mapping[str, str] = {
    "auto.offset.reset": "say startingOffsets instead",
    "enable.auto.commit": "offsets are kept in the checkpoint",
    "enable.auto.offset.store": "offsets are kept in the checkpoint",
    "enable.partition.eof": "it is always on here",
    "key.deserializer": "keys are bytes: convert them with an expression",
    "value.deserializer": "values are bytes: set valueFormat, or convert them with an expression",
    "key.serializer": "keys are bytes or strings: convert them with an expression",
    "value.serializer": "values are bytes or strings: convert them with an expression",
    "interceptor.classes": "interceptors are Java's",
    "transactional.id": "each writer of the sink has one of its own",
    "enable.idempotence": "it is always on here",
}
_OF_JAVA: Mapping[str, str] = {
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "sasl.login.class": "",
    "sasl.kerberos.kinit.cmd": "",
}
"""Java's names of what librdkafka calls otherwise; those without one say nothing to it."""
_JAAS = re.compile(r'\b(username|password)\s*=\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Settings:
    """How to reach the brokers: what the user gave as `kafka.*`, for each client to be made of."""

    servers: str
    given: tuple[tuple[str, str | Secret], ...] = ()

    def config(self) -> dict[str, str]:
        """With its secrets, for a client and for nobody else."""
        shown = {
            name: value.reveal() if isinstance(value, Secret) else value
            for name, value in self.given
        }
        jaas = shown.pop("sasl.jaas.config", None)
        return {"bootstrap.servers": self.servers, **_of_jaas(jaas), **shown}

    def get(self, name: str) -> str | None:
        found = dict(self.given).get(name)
        return found if isinstance(found, str) else None


def settings_of(options: Options) -> Settings:
    """What every `kafka.*` of these options says."""
    servers = options.get(SERVERS, "").strip()
    if not servers:
        raise BuildError(f"Kafka needs the option {SERVERS}: say .option({SERVERS!r}, 'host:9092')")
    given: dict[str, str | Secret] = {}
    for spelled, value in options.below("kafka.").items():
        name = spelled.lower()
        if name in _NOT_TO_SET:
            raise BuildError(f"option kafka.{name} is not to be set: {_NOT_TO_SET[name]}")
        if name == "ssl.truststore.location" and str(value).endswith((".jks", ".p12")):
            raise BuildError(
                f"option kafka.{name} is {value!r}, a store that only Java reads: export its"
                " certificates as PEM and name that file"
            )
        if (translated := _OF_JAVA.get(name, name)) and name != "bootstrap.servers":
            given[translated] = value
    return Settings(servers, tuple(sorted(given.items())))


def _of_jaas(text: str | None) -> dict[str, str]:
    """User and password out of the sentence in which Java's clients want them."""
    if text is None:
        return {}
    found = {name: value.replace('\\"', '"') for name, value in _JAAS.findall(text)}
    if set(found) != {"username", "password"}:
        raise BuildError(
            "option kafka.sasl.jaas.config has no username and password in it: give"
            " kafka.sasl.username and kafka.sasl.password, or what librdkafka wants for the"
            " mechanism"
        )
    return {f"sasl.{name}": value for name, value in found.items()}


# --- Which partitions ------------------------------------------------------------------------


@dataclass(frozen=True)
class Subscribed:
    """Whole topics by name, by a pattern, or some partitions of some topics; one of the three."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        if self.pattern:
            return f"topics like {self.pattern}"
        if self.assigned:
            return ", ".join(f"{name} {list(parts)}" for name, parts in self.assigned)
        return f"topic{'s' if len(self.topics) > 1 else ''} {', '.join(self.topics)}"

    @property
    def named(self) -> tuple[str, ...]:
        """Topics that have to exist."""
        return self.topics or tuple(name for name, _ in self.assigned)

    def takes(self, topic: str) -> bool:
        return bool(self.pattern) and re.fullmatch(self.pattern, topic) is not None


def subscribed_of(options: Options) -> Subscribed:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in options]
    if len(given) != 1:
        raise BuildError(
            f"the source kafka wants one of subscribe, subscribePattern and assign, and"
            f" {' and '.join(given) or 'none'} is given"
        )
    text = options[given[0]]
    if given == ["subscribe"]:
        topics = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
        if not topics:
            raise BuildError("option subscribe names no topic: say it as 'clicks,orders'")
        return Subscribed(topics=topics)
    if given == ["assign"]:
        return Subscribed(assigned=_assigned(text))
    try:
        re.compile(text)
    except re.error as error:
        raise BuildError(
            f"option subscribePattern is {text!r}, which is no regular expression ({error})"
        ) from None
    return Subscribed(pattern=text)


def _assigned(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    said = _json("assign", text, '{"clicks":[0,1]}')
    wrong = BuildError(f"option assign is {text!r}: say it as " + '{"clicks":[0,1]}')
    parts: list[tuple[str, tuple[int, ...]]] = []
    for topic, numbers in said.items():
        if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
            raise wrong
        parts.append((topic, tuple(sorted(set(cast("list[int]", numbers))))))
    if not parts:
        raise wrong
    return tuple(parts)


# --- From where, to where --------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where to begin or to end in each partition: one place for all, or one for each."""

    kind: Literal["offset", "timestamp"] = "offset"
    all: int | None = LATEST
    """An offset, or milliseconds since 1970; None: `each` says it."""
    each: tuple[tuple[str, int, int], ...] = ()
    option: str = "startingOffsets"
    """Where it was said, for people."""
    latest_if_none: bool = False
    """Of a timestamp after the last record: the end of the partition. Otherwise it is refused."""

    def of(self, topic: str, partition: int) -> int:
        if self.all is not None:
            return self.all
        for at, number, place in self.each:
            if (at, number) == (topic, partition):
                return place
        raise BuildError(
            f"option {self.option} says nothing of partition {partition} of topic {topic}: name"
            " all partitions, with -2 for the earliest offset and -1 for the latest"
        )


EVERYTHING = Places(all=EARLIEST)
NOTHING_YET = Places(all=LATEST)


def starting_of(options: Options) -> Places:
    strategy = options.get("startingOffsetsByTimestampStrategy", "error").lower()
    if strategy not in ("error", "latest"):
        raise BuildError(
            f"option startingOffsetsByTimestampStrategy is error or latest, not {strategy!r}"
        )
    late = strategy == "latest"
    if (text := options.get("startingTimestamp")) is not None:
        if not text.strip().isdigit():
            raise BuildError(
                f"option startingTimestamp is {text!r}: give milliseconds since 1970 in UTC"
            )
        return Places("timestamp", int(text), (), "startingTimestamp", late)
    if (text := options.get("startingOffsetsByTimestamp")) is not None:
        each = _each("startingOffsetsByTimestamp", text)
        return Places("timestamp", None, each, "startingOffsetsByTimestamp", late)
    return _offsets("startingOffsets", options.get("startingOffsets", "latest"))


def ending_of(options: Options) -> Places | None:
    """None: never, or where the trigger says."""
    text = options.get("endingOffsets")
    if text is None:
        return None
    ending = _offsets("endingOffsets", text)
    if EARLIEST in (ending.all, *(place for _, _, place in ending.each)):
        raise BuildError(f"option endingOffsets is {text!r}: a job cannot end at the earliest")
    return ending


def _offsets(option: str, text: str) -> Places:
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return Places(all=words[text.strip().lower()], option=option)
    return Places(all=None, each=_each(option, text), option=option)


def _each(option: str, text: str) -> tuple[tuple[str, int, int], ...]:
    example = '{"clicks":{"0":23,"1":-1}}'
    found: list[tuple[str, int, int]] = []
    for topic, places in _json(option, text, example).items():
        if not isinstance(places, dict) or not all(
            str(number).isdigit() and type(place) is int and place >= EARLIEST
            for number, place in places.items()
        ):
            raise BuildError(f"option {option} is {text!r}: say it as {example}")
        found += [(topic, int(number), place) for number, place in places.items()]
    return tuple(found)


def _json(option: str, text: str, example: str) -> dict[str, object]:
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise BuildError(
            f"option {option} is {text!r}, which is no JSON ({error.msg}): say it as {example}"
        ) from None
    if not isinstance(said, dict):
        raise BuildError(f"option {option} is {text!r}: say it as {example}")
    return said
