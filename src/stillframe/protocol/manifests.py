"""What a checkpoint consists of: the metadata file, as types and as JSON.

A snapshot's parts (`OperatorSnapshot`, `SubtaskTimings`) travel in a slot's acknowledgement in the
same JSON form in which the metadata file keeps them.

Rules of this file
------------------
1. Pure: types and text. Who writes the bytes, and where, is the coordinator's business.
2. A document carries its format version and a checksum of itself, so that an altered one is seen.
3. A change of the JSON form raises the version; older versions stay readable, newer are refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast, get_args

from stillframe.errors import DataError, SnapshotDamaged, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject, JsonValue

MANIFEST_VERSION = 2

SnapshotKind = Literal["checkpoint", "savepoint"]


@dataclass(frozen=True, slots=True)
class FileHandle:
    """A file of a snapshot and what it held when it was written."""

    path: str
    """Relative to the job's directory."""
    length_bytes: int
    crc32: int

    def to_json(self) -> JsonObject:
        return {"path": self.path, "length_bytes": self.length_bytes, "crc32": self.crc32}

    @classmethod
    def from_json(cls, value: JsonObject) -> FileHandle:
        fields = JsonFields(value)
        return cls(fields.text("path"), fields.integer("length_bytes"), fields.integer("crc32"))


@dataclass(frozen=True, slots=True)
class KeyedState:
    """One keyed state of one subtask: a file with one record batch per listed key group."""

    name: str
    file: FileHandle
    key_groups: tuple[int, ...]
    """In the order of the file's record batches."""
    rows: int
    schema: str
    """For people; the file knows its own."""

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "file": self.file.to_json(),
            "key_groups": list(self.key_groups),
            "rows": self.rows,
            "schema": self.schema,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> KeyedState:
        fields = JsonFields(value)
        return cls(
            name=fields.text("name"),
            file=FileHandle.from_json(fields.object("file")),
            key_groups=fields.integers("key_groups"),
            rows=fields.integer("rows"),
            schema=fields.text("schema"),
        )


ChannelSide = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class ChannelState:
    """Records that were under way in one channel when its barrier overtook them.

    A channel's input part was in front of its output part. The bytes from `offset_bytes` on are an
    Arrow stream of their own; several channels of one subtask share a file.
    """

    edge: str
    """The name of the edge: it does not change while the operators at its ends keep their uids."""
    source: SubtaskIndex
    target: SubtaskIndex
    side: ChannelSide
    file: FileHandle
    offset_bytes: int
    length_bytes: int
    rows: int

    def to_json(self) -> JsonObject:
        return {
            "edge": self.edge,
            "source": self.source,
            "target": self.target,
            "side": self.side,
            "file": self.file.to_json(),
            "offset_bytes": self.offset_bytes,
            "length_bytes": self.length_bytes,
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> ChannelState:
        fields = JsonFields(value)
        side = fields.text("side")
        if side not in get_args(ChannelSide):
            raise ValueError(f"side {side!r}")
        return cls(
            edge=fields.text("edge"),
            source=SubtaskIndex(fields.integer("source")),
            target=SubtaskIndex(fields.integer("target")),
            side=cast(ChannelSide, side),
            file=FileHandle.from_json(fields.object("file")),
            offset_bytes=fields.integer("offset_bytes"),
            length_bytes=fields.integer("length_bytes"),
            rows=fields.integer("rows"),
        )


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """Something a sink prepared for this checkpoint and must still make visible."""

    checkpoint_id: CheckpointId
    committable: JsonObject

    def to_json(self) -> JsonObject:
        return {"checkpoint_id": self.checkpoint_id, "committable": self.committable}

    @classmethod
    def from_json(cls, value: JsonObject) -> PendingCommit:
        fields = JsonFields(value)
        return cls(CheckpointId(fields.integer("checkpoint_id")), fields.object("committable"))


@dataclass(frozen=True, slots=True)
class GroupsReached:
    """How far event time had come for some key groups."""

    first: int
    stop: int
    """The first key group after them."""
    watermark_us: int

    def to_json(self) -> JsonObject:
        return {"first": self.first, "stop": self.stop, "watermark_us": self.watermark_us}

    @classmethod
    def from_json(cls, value: JsonObject) -> GroupsReached:
        fields = JsonFields(value)
        return cls(fields.integer("first"), fields.integer("stop"), fields.integer("watermark_us"))


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """One operator's part of a checkpoint in one subtask."""

    uid: OperatorUid
    subtask: SubtaskIndex
    keyed: tuple[KeyedState, ...] = ()
    items: tuple[JsonObject, ...] = ()
    """Operator list state: redistributed item by item; a source's splits."""
    commits: tuple[PendingCommit, ...] = ()
    finished: bool = False
    """Whether the subtask has seen the end of its data; a restore does not run it again."""
    broadcast: tuple[KeyedState, ...] = ()
    """What every subtask has a whole copy of; its key groups mean nothing."""
    watermark_us: int | None = None
    """How far event time had come here; None where nobody remembers it."""
    reached: tuple[GroupsReached, ...] = ()
    """Key groups for which it had come further before a restore, and has not again yet."""

    def to_json(self) -> JsonObject:
        time: JsonObject = {} if self.watermark_us is None else {"watermark_us": self.watermark_us}
        return {
            "uid": self.uid,
            "subtask": self.subtask,
            "keyed": [state.to_json() for state in self.keyed],
            "broadcast": [state.to_json() for state in self.broadcast],
            "items": list(self.items),
            "commits": [commit.to_json() for commit in self.commits],
            "finished": self.finished,
            **time,
            **({"reached": [each.to_json() for each in self.reached]} if self.reached else {}),
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> OperatorSnapshot:
        fields = JsonFields(value)
        return cls(
            uid=OperatorUid(fields.text("uid")),
            subtask=SubtaskIndex(fields.integer("subtask")),
            keyed=fields.parts("keyed", KeyedState.from_json),
            items=fields.objects("items"),
            commits=fields.parts("commits", PendingCommit.from_json),
            finished=fields.flag("finished"),
            broadcast=fields.parts_if_any("broadcast", KeyedState.from_json),
            watermark_us=fields.integer_if_any("watermark_us"),
            reached=fields.parts_if_any("reached", GroupsReached.from_json),
        )


@dataclass(frozen=True, slots=True)
class SubtaskTimings:
    """What one subtask's part of a checkpoint cost."""

    task: str
    subtask: SubtaskIndex
    start_delay_ms: float
    alignment_ms: float
    sync_ms: float
    async_ms: float
    bytes_written: int
    state_bytes: int
    in_flight_bytes: int

    def to_json(self) -> JsonObject:
        return {
            "task": self.task,
            "subtask": self.subtask,
            "start_delay_ms": self.start_delay_ms,
            "alignment_ms": self.alignment_ms,
            "sync_ms": self.sync_ms,
            "async_ms": self.async_ms,
            "bytes_written": self.bytes_written,
            "state_bytes": self.state_bytes,
            "in_flight_bytes": self.in_flight_bytes,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> SubtaskTimings:
        fields = JsonFields(value)
        return cls(
            task=fields.text("task"),
            subtask=SubtaskIndex(fields.integer("subtask")),
            start_delay_ms=fields.number("start_delay_ms"),
            alignment_ms=fields.number("alignment_ms"),
            sync_ms=fields.number("sync_ms"),
            async_ms=fields.number("async_ms"),
            bytes_written=fields.integer("bytes_written"),
            state_bytes=fields.integer("state_bytes"),
            in_flight_bytes=fields.integer("in_flight_bytes"),
        )


@dataclass(frozen=True, slots=True)
class OperatorDescription:
    """An operator of the plan that was photographed."""

    uid: OperatorUid
    kind: str
    name: str
    parallelism: int

    def to_json(self) -> JsonObject:
        return {
            "uid": self.uid,
            "kind": self.kind,
            "name": self.name,
            "parallelism": self.parallelism,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> OperatorDescription:
        fields = JsonFields(value)
        return cls(
            uid=OperatorUid(fields.text("uid")),
            kind=fields.text("kind"),
            name=fields.text("name"),
            parallelism=fields.integer("parallelism"),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """All there is to know about one checkpoint; the contents of its `_metadata`."""

    job: str
    attempt: Attempt
    checkpoint_id: CheckpointId
    epoch: Epoch
    kind: SnapshotKind
    triggered_at_ms: int
    completed_at_ms: int
    max_parallelism: int
    operators: tuple[OperatorDescription, ...]
    snapshots: tuple[OperatorSnapshot, ...]
    timings: tuple[SubtaskTimings, ...] = ()
    channels: tuple[ChannelState, ...] = ()
    """What was under way where a barrier overtook records."""
    enumerators: Mapping[OperatorUid, JsonObject] = field(default_factory=dict)
    """What the enumerator of each source that has one knew when the checkpoint was triggered."""
    format_version: int = MANIFEST_VERSION

    def snapshots_of(self, uid: OperatorUid) -> tuple[OperatorSnapshot, ...]:
        return tuple(snapshot for snapshot in self.snapshots if snapshot.uid == uid)

    def files(self) -> tuple[FileHandle, ...]:
        """Every file the checkpoint needs besides its metadata."""
        keyed = (
            state.file
            for snapshot in self.snapshots
            for state in (*snapshot.keyed, *snapshot.broadcast)
        )
        return tuple(dict.fromkeys([*keyed, *(channel.file for channel in self.channels)]))

    def state_bytes(self) -> int:
        return sum(file.length_bytes for file in self.files())


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a `_metadata` file; the same manifest always gives the same bytes."""
    body: JsonObject = {
        "job": manifest.job,
        "attempt": manifest.attempt,
        "checkpoint_id": manifest.checkpoint_id,
        "epoch": manifest.epoch,
        "kind": manifest.kind,
        "triggered_at_ms": manifest.triggered_at_ms,
        "completed_at_ms": manifest.completed_at_ms,
        "max_parallelism": manifest.max_parallelism,
        "operators": [operator.to_json() for operator in manifest.operators],
        "snapshots": [snapshot.to_json() for snapshot in manifest.snapshots],
        "timings": [timings.to_json() for timings in manifest.timings],
        "channels": [channel.to_json() for channel in manifest.channels],
        "enumerators": {str(uid): state for uid, state in manifest.enumerators.items()},
    }
    where = f"the metadata of checkpoint {manifest.checkpoint_id} of job {manifest.job!r}"
    return encode_document(body, MANIFEST_VERSION, where)


def decode_manifest(data: bytes, where: str = "checkpoint metadata") -> Manifest:
    """The manifest in these bytes; `where` names their origin in an error.

    Torn or altered bytes are `SnapshotDamaged`; a newer format is a plain `StorageError`, because
    the file is whole and falling back to an older checkpoint would be the wrong answer.
    """
    version, body = decode_document(data, MANIFEST_VERSION, where)
    return decode_fields(lambda: _manifest(version, JsonFields(body)), where)


def _manifest(version: int, fields: JsonFields) -> Manifest:
    kind = fields.text("kind")
    if kind not in get_args(SnapshotKind):
        raise ValueError(f"kind {kind!r}")
    return Manifest(
        format_version=version,
        job=fields.text("job"),
        attempt=Attempt(fields.integer("attempt")),
        checkpoint_id=CheckpointId(fields.integer("checkpoint_id")),
        epoch=Epoch(fields.integer("epoch")),
        kind=cast(SnapshotKind, kind),
        triggered_at_ms=fields.integer("triggered_at_ms"),
        completed_at_ms=fields.integer("completed_at_ms"),
        max_parallelism=fields.integer("max_parallelism"),
        operators=fields.parts("operators", OperatorDescription.from_json),
        snapshots=fields.parts("snapshots", OperatorSnapshot.from_json),
        timings=fields.parts("timings", SubtaskTimings.from_json),
        channels=fields.parts_if_any("channels", ChannelState.from_json),
        enumerators=_enumerators(fields) if version >= 2 else {},
    )


def _enumerators(fields: JsonFields) -> Mapping[OperatorUid, JsonObject]:
    by_uid = JsonFields(fields.object("enumerators"))
    return {OperatorUid(uid): by_uid.object(uid) for uid in fields.object("enumerators")}


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

    def number(self, name: str) -> float:
        value = self._get(name)
        _expect(name, value, isinstance(value, int | float) and not isinstance(value, bool))
        return float(cast(float, value))

    def text(self, name: str) -> str:
        value = self._get(name)
        _expect(name, value, isinstance(value, str))
        return cast(str, value)

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

    def objects(self, name: str) -> tuple[JsonObject, ...]:
        values = self._list(name)
        _expect(name, values, all(isinstance(value, Mapping) for value in values))
        return tuple(cast(Sequence[JsonObject], values))

    def parts(self, name: str, from_json: Callable[[JsonObject], Part]) -> tuple[Part, ...]:
        return tuple(from_json(value) for value in self.objects(name))

    def integer_if_any(self, name: str) -> int | None:
        """For fields that are left out where there is nothing to say."""
        return self.integer(name) if name in self._value else None

    def parts_if_any(self, name: str, from_json: Callable[[JsonObject], Part]) -> tuple[Part, ...]:
        """For fields that an older format does not have."""
        return self.parts(name, from_json) if name in self._value else ()


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
