"""What a checkpoint consists of: the metadata file, as types and as JSON.

Its parts are told where they belong: what is stored of a state in `protocol/states`, what a subtask
acknowledges in `protocol/snapshots`; whoever needs a checkpoint finds all of it here.

Rules of this file
------------------
1. Pure: types and text. Who writes the bytes, and where, is the coordinator's business.
2. A change of the JSON form, of the parts too, raises the version; older versions stay readable,
   newer are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, Writer
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import (
    JsonFields,
    decode_document,
    decode_fields,
    encode_document,
)
from stillframe.protocol.snapshots import (
    GroupsReached,
    OperatorSnapshot,
    PendingCommit,
    SubtaskTimings,
)
from stillframe.protocol.states import (
    ChannelState,
    DiskFile,
    DiskState,
    DiskTable,
    FileHandle,
    KeyedState,
    Redistribution,
)

__all__ = [
    "MANIFEST_VERSION",
    "ChannelState",
    "DiskFile",
    "DiskState",
    "DiskTable",
    "FileHandle",
    "GroupsReached",
    "KeyedState",
    "Manifest",
    "OperatorDescription",
    "OperatorSnapshot",
    "PendingCommit",
    "Place",
    "Redistribution",
    "SnapshotKind",
    "SubtaskTimings",
    "decode_manifest",
    "encode_manifest",
]

MANIFEST_VERSION = 5

SnapshotKind = Literal["checkpoint", "savepoint"]


@dataclass(frozen=True, slots=True)
class Place:
    """By what an operator is known again whose uid nobody has given."""

    traits: str
    """What is its own, such as keys and window, or what it is tied to outside of the job."""
    fed_by: tuple[tuple[OperatorUid, ...], ...]
    """Of each input: the operators with state whose records come to it, through those without."""

    def to_json(self) -> JsonObject:
        return {"traits": self.traits, "fed_by": [list(uids) for uids in self.fed_by]}

    @classmethod
    def from_json(cls, value: JsonObject) -> Place:
        fields = JsonFields(value)
        inputs = fields.text_lists("fed_by")
        return cls(fields.text("traits"), tuple(tuple(map(OperatorUid, uids)) for uids in inputs))


@dataclass(frozen=True, slots=True)
class OperatorDescription:
    """An operator of the plan of which a snapshot was taken."""

    uid: OperatorUid
    kind: str
    name: str
    parallelism: int
    place: Place | None = None
    """None: it is known by its uid alone, which somebody gave it; or an older format says no
    more."""

    def to_json(self) -> JsonObject:
        return {
            "uid": self.uid,
            "kind": self.kind,
            "name": self.name,
            "parallelism": self.parallelism,
            **({} if self.place is None else {"place": self.place.to_json()}),
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> OperatorDescription:
        fields = JsonFields(value)
        return cls(
            uid=OperatorUid(fields.text("uid")),
            kind=fields.text("kind"),
            name=fields.text("name"),
            parallelism=fields.integer("parallelism"),
            place=fields.part_if_any("place", Place.from_json),
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

    def writers(self) -> frozenset[Writer]:
        """Those whose output is still to be committed, as far as the checkpoint knows."""
        commits = (each for snapshot in self.snapshots for each in snapshot.commits)
        return frozenset(each.writer for each in commits if each.writer is not None)

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
