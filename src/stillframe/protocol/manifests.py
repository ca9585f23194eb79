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

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast, get_args

from stillframe.errors import DataError, SnapshotDamaged, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject, JsonValue

MANIFEST_VERSION = 3

SnapshotKind = Literal["checkpoint", "savepoint"]


@dataclass(frozen=True, slots=True)
class FileHandle:
    """A file of a snapshot and what it held when it was written."""

    path: str
    """Relative to the job's directory; only a name where the bytes are here."""
    length_bytes: int
    crc32: int
    data: bytes | None = field(default=None, repr=False, compare=False)
    """The bytes themselves, of what travels in the acknowledgement and lives in the metadata.

    Not compared: what a file holds is known by its length and checksum.
    """

    @property
    def is_inline(self) -> bool:
        """Whether there is no such file, because the bytes are here."""
        return self.data is not None

    def to_json(self) -> JsonObject:
        named: JsonObject = {
            "path": self.path,
            "length_bytes": self.length_bytes,
            "crc32": self.crc32,
        }
        if self.data is None:
            return named
        return {**named, "data": base64.b64encode(self.data).decode()}

    @classmethod
    def from_json(cls, value: JsonObject) -> FileHandle:
        fields = JsonFields(value)
        data = fields.bytes_if_any("data")
        handle = cls(
            fields.text("path"), fields.integer("length_bytes"), fields.integer("crc32"), data
        )
        if data is not None:
            _expect_whole(handle, data)
        return handle


def _expect_whole(handle: FileHandle, data: bytes) -> None:
    seen = (len(data), zlib.crc32(data))
    if seen != (handle.length_bytes, handle.crc32):
        raise ValueError(
            f"what it holds of {handle.path} has {seen[0]} bytes and checksum {seen[1]:08x} where"
            f" {handle.length_bytes} and {handle.crc32:08x} were recorded"
        )


Redistribution = Literal["copied", "dealt", "united"]
"""How subtasks that are restored get state without keys: one former subtask's as it was, a share of
the rows of all, or the rows of all."""


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
    redistribution: Redistribution = "copied"
    """Of a state without keys."""
    kind: str = ""
    """What a state of a program is (value, list or map); nothing is said of others."""

    def to_json(self) -> JsonObject:
        # Not said of most, which have keys.
        how: JsonObject = {} if self.redistribution == "copied" else {"how": self.redistribution}
        kind: JsonObject = {"kind": self.kind} if self.kind else {}
        return {
            "name": self.name,
            "file": self.file.to_json(),
            "key_groups": list(self.key_groups),
            "rows": self.rows,
            "schema": self.schema,
            **how,
            **kind,
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
            redistribution=_redistribution(fields),
            kind=fields.text_if_any("kind") or "",
        )


def _redistribution(fields: JsonFields) -> Redistribution:
    how = fields.text_if_any("how") or "copied"
    if how not in get_args(Redistribution):
        raise ValueError(f"how {how!r}")
    return cast(Redistribution, how)


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file of a database, by the name it has there."""

    name: str
    file: FileHandle

    def to_json(self) -> JsonObject:
        return {"name": self.name, "file": self.file.to_json()}

    @classmethod
    def from_json(cls, value: JsonObject) -> DiskFile:
        fields = JsonFields(value)
        return cls(fields.text("name"), FileHandle.from_json(fields.object("file")))


@dataclass(frozen=True, slots=True)
class DiskTable:
    """A state in a database: its columns and its kind, as of a `KeyedState`."""

    name: str
    schema: str
    kind: str = ""

    def to_json(self) -> JsonObject:
        kind: JsonObject = {"kind": self.kind} if self.kind else {}
        return {"name": self.name, "schema": self.schema, **kind}

    @classmethod
    def from_json(cls, value: JsonObject) -> DiskTable:
        fields = JsonFields(value)
        return cls(fields.text("name"), fields.text("schema"), fields.text_if_any("kind") or "")


@dataclass(frozen=True, slots=True)
class DiskState:
    """The keyed states of one operator in one subtask, as the files of its database.

    Most of them are shared with older checkpoints. What is in the database, it knows itself.
    """

    first_key_group: int
    stop_key_group: int
    """The first key group after its own."""
    files: tuple[DiskFile, ...]
    tables: tuple[DiskTable, ...] = ()
    """What is in it, to be told without opening it; older snapshots do not say."""

    def to_json(self) -> JsonObject:
        tables: JsonObject = (
            {"tables": [table.to_json() for table in self.tables]} if self.tables else {}
        )
        return {
            "first_key_group": self.first_key_group,
            "stop_key_group": self.stop_key_group,
            "files": [file.to_json() for file in self.files],
            **tables,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> DiskState:
        fields = JsonFields(value)
        return cls(
            fields.integer("first_key_group"),
            fields.integer("stop_key_group"),
            fields.parts("files", DiskFile.from_json),
            fields.parts_if_any("tables", DiskTable.from_json),
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
    """State without keys, such as what every subtask has a copy of; key groups mean nothing."""
    watermark_us: int | None = None
    """How far event time had come here; None where nobody remembers it."""
    reached: tuple[GroupsReached, ...] = ()
    """Key groups for which it had come further before a restore, and has not again yet."""
    disk: DiskState | None = None
    """Keyed states that are kept in a database; beside it there may be others in `keyed`."""

    def files(self) -> Iterator[FileHandle]:
        """Every file it needs."""
        yield from (state.file for state in (*self.keyed, *self.broadcast))
        if self.disk is not None:
            yield from (each.file for each in self.disk.files)

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
            **({} if self.disk is None else {"disk": self.disk.to_json()}),
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
            disk=fields.part_if_any("disk", DiskState.from_json),
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

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        of_job = f" of job {self.job!r}" if self.job else ""
        if self.kind == "savepoint":
            return f"the savepoint{of_job}"
        return f"checkpoint {self.checkpoint_id}{of_job}"

    def snapshots_of(self, uid: OperatorUid) -> tuple[OperatorSnapshot, ...]:
        return tuple(snapshot for snapshot in self.snapshots if snapshot.uid == uid)

    def files(self) -> tuple[FileHandle, ...]:
        """Every file the checkpoint needs besides its metadata."""
        return tuple(file for file in self._contents() if not file.is_inline)

    def state_bytes(self) -> int:
        return sum(file.length_bytes for file in self._contents())

    def _contents(self) -> Iterable[FileHandle]:
        """Each once, also what is in the metadata itself."""
        states = (file for snapshot in self.snapshots for file in snapshot.files())
        return dict.fromkeys([*states, *(channel.file for channel in self.channels)])


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
