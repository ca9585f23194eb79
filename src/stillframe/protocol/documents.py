"""JSON objects that are kept: with a version and a checksum, and read field by field.

The metadata of checkpoints, the entries of the log and the kept history are such documents; the
messages between driver and slots have the same fields and no version, for both ends are one job.

Rules of this file
------------------
1. Pure: values and text. Who writes the bytes, and where, is the coordinator's business.
2. A document carries its format version and a checksum of itself, so that an altered one is seen.
3. A field that is missing, or is something else than it should be, is said by its name.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from stillframe.errors import DataError, SnapshotDamaged, StorageError
from stillframe.json_values import JsonObject, JsonValue

Part = TypeVar("Part")


def _expect(name: str, value: JsonValue, good: bool) -> None:
    if not good:
        raise ValueError(f"field {name!r} is {value!r}")


class JsonFields:
    """Reads typed fields of a JSON object; a missing or mistyped one raises `ValueError`."""

    def __init__(self, value: JsonObject) -> None:
        self._value = value

    def _get(self, name: str) -> JsonValue:
        if name not in self._value:
            raise ValueError(f"field {name!r} is missing")
        return self._value[name]

    def integer(self, name: str) -> int:
        value = self._get(name)
        _expect(name, value, isinstance(value, int) and not isinstance(value, bool))
        return cast(int, value)

    def integer_or_none(self, name: str) -> int | None:
        return None if self._get(name) is None else self.integer(name)

    def number_or_none(self, name: str) -> float | None:
        return None if self._get(name) is None else self.number(name)

    def number(self, name: str) -> float:
        value = self._get(name)
        _expect(name, value, isinstance(value, int | float) and not isinstance(value, bool))
        return float(cast(float, value))

    def text_or_none(self, name: str) -> str | None:
        return None if self._get(name) is None else self.text(name)

    def text(self, name: str) -> str:
        value = self._get(name)
        _expect(name, value, isinstance(value, str))
        return cast(str, value)

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        value = self.text(name)
        if value not in allowed:
            raise ValueError(f"{name} {value!r}")
        return value

    def text_if_any(self, name: str) -> str | None:
        return self.text(name) if name in self._value else None

    def bytes_if_any(self, name: str) -> bytes | None:
        """As text in base 64."""
        if name not in self._value:
            return None
        return base64.b64decode(self.text(name), validate=True)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        _expect(name, value, isinstance(value, bool))
        return cast(bool, value)

    def object(self, name: str) -> JsonObject:
        value = self._get(name)
        _expect(name, value, isinstance(value, Mapping))
        return cast(JsonObject, value)

    def _list(self, name: str) -> Sequence[JsonValue]:
        value = self._get(name)
        _expect(name, value, isinstance(value, list | tuple))
        return cast(Sequence[JsonValue], value)

    def integers(self, name: str) -> tuple[int, ...]:
        values = self._list(name)
        _expect(name, values, all(type(value) is int for value in values))
        return tuple(cast(Sequence[int], values))

    def text_lists(self, name: str) -> tuple[tuple[str, ...], ...]:
        values = self._list(name)
        _expect(name, values, all(isinstance(value, list | tuple) for value in values))
        lists = cast(Sequence[Sequence[str]], values)
        _expect(name, values, all(isinstance(text, str) for texts in lists for text in texts))
        return tuple(map(tuple, lists))

    def objects(self, name: str) -> tuple[JsonObject, ...]:
        values = self._list(name)
        _expect(name, values, all(isinstance(value, Mapping) for value in values))
        return tuple(cast(Sequence[JsonObject], values))

    def parts(self, name: str, from_json: Callable[[JsonObject], Part]) -> tuple[Part, ...]:
        return tuple(from_json(value) for value in self.objects(name))

    def flag_if_any(self, name: str) -> bool:
        """For flags that are left out where they do not hold."""
        return self.flag(name) if name in self._value else False

    def integer_if_any(self, name: str) -> int | None:
        """For fields that are left out where there is nothing to say."""
        return self.integer(name) if name in self._value else None

    def parts_if_any(self, name: str, from_json: Callable[[JsonObject], Part]) -> tuple[Part, ...]:
        """For fields that an older format does not have."""
        return self.parts(name, from_json) if name in self._value else ()

    def part_if_any(self, name: str, from_json: Callable[[JsonObject], Part]) -> Part | None:
        return from_json(self.object(name)) if name in self._value else None


def encode_document(body: JsonObject, version: int, where: str) -> bytes:
    """One JSON object with its format version and a checksum of itself, made to be read.

    Each field has a line, and so has each part of a list. (`json` could indent it all, in ten times
    the time: it does that in Python.)
    """
    try:
        fields = [f'"{name}":{_in_lines(body[name])}' for name in sorted(body)]
        checksum = _checksum(version, body)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} cannot be written, because something in it is not JSON ({error}): positions"
            " and committables are made of text, finite numbers, booleans, lists and objects"
        ) from error
    lines = ",\n  ".join(fields)
    text = f'{{"format_version":{version},\n "crc32":{checksum},\n "body":{{\n  {lines}}}}}\n'
    return text.encode()


def _in_lines(value: JsonValue) -> str:
    if isinstance(value, list) and value:
        return "[\n   " + ",\n   ".join(map(_canonical, value)) + "]"
    return _canonical(value)


def decode_document(data: bytes, version_max: int, where: str) -> tuple[int, JsonObject]:
    """The format version and the body of what `encode_document` made."""
    try:
        fields = JsonFields(_parsed(data))
        version = fields.integer("format_version")
    except ValueError as error:
        raise SnapshotDamaged(f"{where} is damaged: {_briefly(error)}") from error
    if version > version_max:
        raise StorageError(
            f"{where} has format version {version}, but this Stillframe reads versions up to"
            f" {version_max}: use the newer Stillframe that wrote it"
        )
    body, recorded = decode_fields(lambda: (fields.object("body"), fields.integer("crc32")), where)
    seen = decode_fields(lambda: _checksum(version, body), where)
    if seen != recorded:
        raise SnapshotDamaged(
            f"{where} is damaged: its contents have checksum {seen:08x} where {recorded:08x} was"
            " recorded"
        )
    return version, body


def decode_fields(decode: Callable[[], Part], where: str) -> Part:
    """What `decode` answers; a field that does not fit means that the document is damaged."""
    try:
        return decode()
    except ValueError as error:
        raise SnapshotDamaged(f"{where} is damaged: {_briefly(error)}") from error


def _parsed(data: bytes) -> JsonObject:
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__} and not an object")
    return value


def _checksum(version: int, body: JsonObject) -> int:
    # Of a canonical text and not of the file's bytes, so that people may re-indent a file.
    return zlib.crc32(_canonical({"format_version": version, "body": body}).encode())


_canonical = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode


def _briefly(error: ValueError) -> str:
    text = str(error)
    return text if len(text) <= 200 else text[:200] + "…"
