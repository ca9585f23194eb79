"""What is stored of a state: its files, and what each of them holds.

State with keys is one file for each state, or the files of a database for all states of an
operator; records that were under way in channels are files too. All of it is in the metadata of a
checkpoint, and travels in a slot's acknowledgement in the same JSON form.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from stillframe.ids import SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import JsonFields


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
    """What the rows are: a state of a program (value, list, map), or windows of some length; of
    others nothing is said."""

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
