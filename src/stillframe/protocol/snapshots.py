"""One subtask's part of a checkpoint: what it acknowledges, operator by operator, and what it cost.

It travels in a slot's acknowledgement in the same JSON form in which the metadata file keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stillframe.ids import CheckpointId, OperatorUid, SubtaskIndex, Writer
from stillframe.json_values import JsonObject, built
from stillframe.protocol.documents import JsonFields
from stillframe.protocol.states import DiskState, FileHandle, KeyedState


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """Something a sink prepared for this checkpoint and must still make visible."""

    checkpoint_id: CheckpointId
    committable: JsonObject
    writer: Writer | None = None
    """Who prepared it, whoever holds it now; None, in older metadata: who holds it."""

    def to_json(self) -> JsonObject:
        return {
            "checkpoint_id": self.checkpoint_id,
            "committable": self.committable,
            **({} if self.writer is None else {"writer": _writer_to_json(self.writer)}),
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> PendingCommit:
        fields = JsonFields(value)
        checkpoint_id = CheckpointId(fields.integer("checkpoint_id"))
        writer = fields.part_if_any("writer", _writer_from_json)
        return cls(checkpoint_id, fields.object("committable"), writer)


def _writer_to_json(writer: Writer) -> JsonObject:
    return {"incarnation": writer.incarnation, "uid": writer.uid, "subtask": writer.subtask}


def _writer_from_json(value: JsonObject) -> Writer:
    fields = JsonFields(value)
    subtask = fields.integer_or_none("subtask")
    return Writer(
        fields.text("incarnation"),
        OperatorUid(fields.text("uid")),
        None if subtask is None else SubtaskIndex(subtask),
    )


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
    ended: bool = False
    """Of a source: whether it was told to end, whatever there is left; a restore reads no more."""
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
            **({"ended": True} if self.ended else {}),
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
            ended=fields.flag_if_any("ended"),
            broadcast=fields.parts_if_any("broadcast", KeyedState.from_json),
            watermark_us=fields.integer_if_any("watermark_us"),
            reached=fields.parts_if_any("reached", GroupsReached.from_json),
            disk=fields.part_if_any("disk", DiskState.from_json),
        )


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """What one subtask's part of a checkpoint cost."""

    start_delay_ms: float
    """From the trigger until its first barrier came."""
    alignment_ms: float
    sync_ms: float
    async_ms: float
    bytes_written: int
    state_bytes: int
    """Of all files it needs, older ones included."""
    in_flight_bytes: int
    """Of records that a barrier overtook."""
    processed_bytes: int = 0
    """Of records it took between the first barrier and the last; 0 where an older format does not
    say."""

    def figures(self) -> dict[str, Any]:
        """By their names."""
        return {
            "start_delay_ms": self.start_delay_ms,
            "alignment_ms": self.alignment_ms,
            "sync_ms": self.sync_ms,
            "async_ms": self.async_ms,
            "bytes_written": self.bytes_written,
            "state_bytes": self.state_bytes,
            "in_flight_bytes": self.in_flight_bytes,
            "processed_bytes": self.processed_bytes,
        }

    @staticmethod
    def figures_in(fields: JsonFields) -> dict[str, Any]:
        """Those of `figures` that were written into a JSON object."""
        return {
            "start_delay_ms": fields.number("start_delay_ms"),
            "alignment_ms": fields.number("alignment_ms"),
            "sync_ms": fields.number("sync_ms"),
            "async_ms": fields.number("async_ms"),
            "bytes_written": fields.integer("bytes_written"),
            "state_bytes": fields.integer("state_bytes"),
            "in_flight_bytes": fields.integer("in_flight_bytes"),
            "processed_bytes": fields.integer_if_any("processed_bytes") or 0,
        }


Arrival = tuple[str, SubtaskIndex, float]
"""A barrier has come: the edge by its name, the sender, and how long after the trigger in ms."""
built(tuple[Arrival, ...])
ARRIVALS_MAX = 4_096
"""Where there are more channels, only the first barrier and the last are told."""


class EventTimes(msgspec.Struct, frozen=True, array_like=True):
    """Of the rows that one `withWatermark` has seen between two barriers; those without a time are
    not among them."""

    uid: OperatorUid
    rows: int
    earliest_us: int
    latest_us: int
    mean_us: float

    def plus(self, other: EventTimes) -> EventTimes:
        rows = self.rows + other.rows
        return EventTimes(
            self.uid,
            rows,
            min(self.earliest_us, other.earliest_us),
            max(self.latest_us, other.latest_us),
            self.mean_us + (other.mean_us - self.mean_us) * other.rows / rows,
        )


built(tuple[EventTimes, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskTimings(SnapshotCost):
    """What it cost, as the subtask itself says."""

    task: str
    subtask: SubtaskIndex
    arrivals: tuple[Arrival, ...] = ()
    """Of its barriers, in the order in which they came; told the driver and not kept."""
    records_read: int = 0
    """Of a source: in this attempt before its barrier; told the driver and not kept."""
    event_times: tuple[EventTimes, ...] = ()
    """Since the barrier before; told the driver and not kept."""

    def kept(self) -> SubtaskTimings:
        """As the metadata of a checkpoint keeps it."""
        return replace(self, arrivals=(), records_read=0, event_times=())

    def to_json(self) -> JsonObject:
        return {
            "task": self.task,
            "subtask": self.subtask,
            **self.figures(),
            **({"arrivals": [list(each) for each in self.arrivals]} if self.arrivals else {}),
            **({"records_read": self.records_read} if self.records_read else {}),
            **({"event_times": msgspec.to_builtins(self.event_times)} if self.event_times else {}),
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> SubtaskTimings:
        fields = JsonFields(value)
        return cls(
            task=fields.text("task"),
            subtask=SubtaskIndex(fields.integer("subtask")),
            arrivals=msgspec.convert(value.get("arrivals", ()), tuple[Arrival, ...]),
            records_read=fields.integer_if_any("records_read") or 0,
            event_times=msgspec.convert(value.get("event_times", ()), tuple[EventTimes, ...]),
            **cls.figures_in(fields),
        )
