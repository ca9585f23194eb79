"""What coordinator and slots tell each other over the control connection, as types and as JSON.

Orders go from the coordinator to a slot, reports from a slot to the coordinator. A connection
belongs to one job and one attempt, proved when it was made, so messages need not repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast, get_args

import msgspec

from stillframe.errors import (
    Blame,
    BuildError,
    DataError,
    SnapshotDamaged,
    StillframeError,
    UserCodeError,
)
from stillframe.ids import CheckpointId, Epoch, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.json_values import JsonObject, built
from stillframe.protocol.documents import JsonFields
from stillframe.protocol.failures import blame_from_json, blame_to_json
from stillframe.protocol.manifests import ChannelState, FileHandle, OperatorSnapshot, SubtaskTimings
from stillframe.protocol.measures import Measured
from stillframe.protocol.restore import StartingChannels, StartingState, SubtaskState

# --- orders ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartSlot:
    """Connect to the peers (host and port by slot) and begin, from this state."""

    peers: Mapping[SlotIndex, tuple[str, int]]
    state: StartingState
    restored_checkpoint: CheckpointId | None = None
    restored_epoch: Epoch | None = None
    channels: StartingChannels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakeFile:
    """Keep what lives in the metadata of the checkpoint to start from: the start refers to it."""

    file: FileHandle


@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """Sources: snapshot, and send this checkpoint's barrier."""

    checkpoint_id: CheckpointId
    triggered_at_ms: int
    alignment_timeout_ms: int | None = None
    """As in the barrier."""
    savepoint: str | None = None
    """As in the barrier."""
    holds: bool = False
    """As in the barrier."""


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """The checkpoint is complete: sinks may commit."""

    checkpoint_id: CheckpointId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """The checkpoint was given up; or it was a savepoint, which commits nothing, and is over."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class AssignSplits:
    """A source's subtask: read these splits too, except those it has; no more come if last."""

    uid: OperatorUid
    subtask: SubtaskIndex
    splits: tuple[JsonObject, ...]
    is_last: bool
    stops: bool = False
    """Of the last ones: the job stops behind them, and more may come when it goes on."""


@dataclass(frozen=True, slots=True)
class EndSources:
    """Sources: no more records, as if there were none."""


@dataclass(frozen=True, slots=True)
class EndSlot:
    """The job is over: give everything back and return."""


@dataclass(frozen=True, slots=True)
class StillThere:
    """The coordinator is alive. `watched`: tasks at whose channels somebody looks."""

    watched: tuple[int, ...] = ()


Order = (
    StartSlot
    | TakeFile
    | TriggerCheckpoint
    | CompleteCheckpoint
    | AbortCheckpoint
    | AssignSplits
    | EndSources
    | EndSlot
    | StillThere
)


# --- reports ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """The slot is connected to its peers and has its state."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A subtask's part of a checkpoint is durable."""

    task: int
    subtask: SubtaskIndex
    checkpoint_id: CheckpointId
    operators: tuple[OperatorSnapshot, ...]
    timings: SubtaskTimings
    channels: tuple[ChannelState, ...] = ()

    def files(self) -> tuple[FileHandle, ...]:
        """Every file this part of the checkpoint needs."""
        states = [file for operator in self.operators for file in operator.files()]
        files = [*states, *(channel.file for channel in self.channels)]
        return tuple(dict.fromkeys(file for file in files if not file.is_inline))


@dataclass(frozen=True, slots=True)
class Declined:
    """A subtask could not do its part of a checkpoint."""

    checkpoint_id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """All sinks of a subtask have committed everything up to this checkpoint."""

    task: int
    subtask: SubtaskIndex
    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class Drained:
    """A subtask has processed the last record it will ever get."""

    task: int
    subtask: SubtaskIndex


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A source's subtask has read what was there, in a job that stops then."""

    task: int
    subtask: SubtaskIndex


@dataclass(frozen=True, slots=True)
class Hanging:
    """A call of the user's code that does not return, and with it nothing else in its slot."""

    seconds: float
    code: str | None
    """`function tidy`; None: no code of the user's is on the stack."""
    line: str | None
    """`/home/ann/job.py:12 in tidy`: where it is now, in code that is no library."""
    stack: str
    """As Python prints it, the innermost call last."""
    task: str | None = None
    """The name of the task whose turn it is."""
    subtask: SubtaskIndex | None = None
    operator: str | None = None
    """The uid of the operator that has called it."""
    called_with: str | None = None
    """Its arguments, in words: the key, the record."""
    may_wait: bool = False
    """Whether it may only be waiting for records, so that nothing is ended for it."""

    def __str__(self) -> str:
        what = self.code or "a step of the job"
        if self.line is not None:
            what += f" ({self.line})"
        does = "has given nothing" if self.may_wait else "has not returned"
        return f"{what} {does} for {self.seconds:.0f} s"

    @property
    def blame(self) -> Blame | None:
        """As of an error, so that one that comes again is known."""
        if self.code is None:
            return None
        return Blame(
            self.code,
            "Hang",
            True,
            self.line,
            self.stack,
            self.operator,
            self.called_with,
            row=self.called_with,
        )

    def to_json(self) -> JsonObject:
        return {
            "seconds": self.seconds,
            "code": self.code,
            "line": self.line,
            "stack": self.stack,
            "task": self.task,
            "subtask": self.subtask,
            "operator": self.operator,
            "called_with": self.called_with,
            "may_wait": self.may_wait,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> Hanging:
        fields = JsonFields(value)
        return cls(
            fields.number("seconds"),
            fields.text_or_none("code"),
            fields.text_or_none("line"),
            fields.text("stack"),
            fields.text_or_none("task"),
            _subtask_or_none(fields),
            fields.text_or_none("operator"),
            fields.text_or_none("called_with"),
            fields.flag("may_wait"),
        )


@dataclass(frozen=True, slots=True)
class SubtaskDoing:
    """How far a subtask is with a checkpoint."""

    task: int
    subtask: SubtaskIndex
    checkpoint_id: CheckpointId
    what: str

    def to_json(self) -> JsonObject:
        return {
            "task": self.task,
            "subtask": self.subtask,
            "checkpoint": self.checkpoint_id,
            "what": self.what,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> SubtaskDoing:
        fields = JsonFields(value)
        return cls(
            fields.integer("task"), _subtask(fields), _checkpoint(fields), fields.text("what")
        )


_DOING_IN_WORDS = {
    "an open snapshot": "it writes its snapshot",
    "an alignment": "it waits for the barrier on its other inputs",
    "a recording": "it waits for the end of what its barrier overtook",
}


def doing_in_words(
    told: Iterable[SubtaskDoing], task: int, subtask: SubtaskIndex, checkpoint_id: CheckpointId
) -> str:
    """How far a subtask is with a checkpoint, by what slots have told."""
    for each in told:
        if (each.task, each.subtask, each.checkpoint_id) == (task, subtask, checkpoint_id):
            return _DOING_IN_WORDS.get(each.what, each.what)
    return "its barrier has not come"


@dataclass(frozen=True, slots=True)
class SourceLag:
    """How far a source is behind what is there to be read, in one slot or in all."""

    uid: OperatorUid
    source: str
    """In words."""
    records: int
    seconds: float | None
    """How long ago the newest record that was read was written; None: nothing is known."""

    def to_json(self) -> JsonObject:
        return {
            "uid": self.uid,
            "source": self.source,
            "records": self.records,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> SourceLag:
        f = JsonFields(value)
        return cls(
            OperatorUid(f.text("uid")),
            f.text("source"),
            f.integer("records"),
            f.number_or_none("seconds"),
        )


def lag_of_each(parts: Iterable[SourceLag]) -> tuple[SourceLag, ...]:
    """Of each source in all slots: what is left to be read in all, and the slowest."""
    found: dict[OperatorUid, SourceLag] = {}
    for part in parts:
        other = found.get(part.uid, replace(part, records=0, seconds=None))
        seconds = [each for each in (part.seconds, other.seconds) if each is not None]
        found[part.uid] = replace(
            part, records=part.records + other.records, seconds=max(seconds, default=None)
        )
    return tuple(found[uid] for uid in sorted(found))


@dataclass(frozen=True, slots=True)
class Progress:
    """How many records the slot has read from sources and handed to sinks in this attempt."""

    records_in: int
    records_out: int
    records_late: int = 0
    """Those that came too late and were dropped."""
    watermark_us: int | None = None
    """How far event time has come in the slowest operator of the slot; None: nothing is known."""
    hanging: Hanging | None = None
    """What the slot's loop has not come back from, if that is so."""
    doing: tuple[SubtaskDoing, ...] = ()
    """Of subtasks that have begun with a checkpoint."""
    records_malformed: int = 0
    """Those that could not be read as their schema declares them."""
    oom_kills: int | None = None
    """How many processes its machine has killed for want of memory; None: nothing is known."""
    awaits: str | None = None
    """What a source or sink of the slot waits for before it goes on, in a sentence."""
    lags: tuple[SourceLag, ...] = ()
    """Of the sources that tell."""


FailureCause = Literal["permanent", "damaged snapshot", "lost slot", "other"]
"""Permanent: trying again would fail the same way. Lost slot: it died, or only lost a peer."""


def cause_of(error: BaseException) -> FailureCause:
    """What an error says of itself; who only lost somebody else is for the slot to say."""
    match error:
        case UserCodeError(heals=True):
            return "other"
        case DataError() | UserCodeError() | BuildError():
            return "permanent"
        case SnapshotDamaged():
            return "damaged snapshot"
        case _:
            return "other"


def blame_of(error: BaseException) -> Blame | None:
    return error.blame if isinstance(error, UserCodeError) else None


@dataclass(frozen=True, slots=True)
class Failed:
    """The slot ends itself."""

    reason: str
    cause: FailureCause
    task: str | None = None
    """The name of the task that was at work, if one was."""
    subtask: SubtaskIndex | None = None
    blame: Blame | None = None
    """Of an error in code that is not ours."""


class SaidLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of a slot's log."""

    at_ms: int
    level: int
    """As Python's logging counts them."""
    text: str


class Said(msgspec.Struct, frozen=True):
    """What a slot has logged since it told the last time, if it is a warning or worse."""

    lines: tuple[SaidLine, ...]


Report = (
    Running
    | Acknowledged
    | Declined
    | Committed
    | Drained
    | CaughtUp
    | Progress
    | Measured
    | Said
    | Failed
)


# --- as JSON ---------------------------------------------------------------------------------

Message = TypeVar("Message")


def message_to_json(message: Order | Report) -> JsonObject:
    return {"type": type(message).__name__, **_fields_of(message)}


def _fields_of(message: Order | Report) -> JsonObject:
    match message:
        case StartSlot(peers, state, checkpoint_id, epoch, channels):
            return {
                "peers": [
                    {"slot": slot, "host": host, "port": port}
                    for slot, (host, port) in peers.items()
                ],
                "state": [
                    {"uid": uid, "subtask": subtask, "state": part.to_json()}
                    for (uid, subtask), part in state.items()
                ],
                "checkpoint": checkpoint_id,
                "epoch": epoch,
                "channels": [
                    {
                        "edge": edge,
                        "target": target,
                        "states": [state.to_json() for state in states],
                    }
                    for (edge, target), states in channels.items()
                ],
            }
        case TakeFile(file):
            return {"file": file.to_json()}
        case TriggerCheckpoint(checkpoint_id, triggered_at_ms, alignment_timeout_ms):
            return {
                "checkpoint": checkpoint_id,
                "triggered_at_ms": triggered_at_ms,
                "alignment_timeout_ms": alignment_timeout_ms,
                "savepoint": message.savepoint,
                "holds": message.holds,
            }
        case CompleteCheckpoint(checkpoint_id, epoch):
            return {"checkpoint": checkpoint_id, "epoch": epoch}
        case AbortCheckpoint(checkpoint_id):
            return {"checkpoint": checkpoint_id}
        case Acknowledged(task, subtask, checkpoint_id, operators, timings, channels):
            return {
                "task": task,
                "subtask": subtask,
                "checkpoint": checkpoint_id,
                "operators": [operator.to_json() for operator in operators],
                "timings": timings.to_json(),
                "channels": [channel.to_json() for channel in channels],
            }
        case Declined(checkpoint_id, reason):
            return {"checkpoint": checkpoint_id, "reason": reason}
        case Committed(task, subtask, checkpoint_id):
            return {"task": task, "subtask": subtask, "checkpoint": checkpoint_id}
        case Drained(task, subtask) | CaughtUp(task, subtask):
            return {"task": task, "subtask": subtask}
        case Progress(
            records_in, records_out, records_late, watermark_us, hanging, doing, records_malformed
        ):
            hangs: JsonObject = {} if hanging is None else {"hanging": hanging.to_json()}
            return {
                "records_in": records_in,
                "records_out": records_out,
                "records_late": records_late,
                "watermark_us": watermark_us,
                "doing": [each.to_json() for each in doing],
                "oom_kills": message.oom_kills,
                "awaits": message.awaits,
                "lags": [lag.to_json() for lag in message.lags],
                **hangs,
                "records_malformed": records_malformed,
            }
        case Measured():
            return {"measured": msgspec.to_builtins(message)}
        case Said():
            return {"said": msgspec.to_builtins(message)}
        case Failed(reason, cause, task_name, failed_subtask, blame):
            at: JsonObject = {"task": task_name, "subtask": failed_subtask}
            told = {} if blame is None else {"blame": blame_to_json(blame)}
            return {"reason": reason, "cause": cause, **at, **told}
        case AssignSplits(uid, subtask, splits, is_last, stops):
            ends: JsonObject = {"is_last": is_last, "stops": stops}
            return {"uid": uid, "subtask": subtask, "splits": list(splits), **ends}
        case StillThere(watched):
            return {"watched": list(watched)}
        case EndSources() | EndSlot() | Running():
            return {}


def order_from_json(value: JsonObject) -> Order:
    return _from_json(value, _ORDERS)


def report_from_json(value: JsonObject) -> Report:
    return _from_json(value, _REPORTS)


def _from_json(value: JsonObject, known: Mapping[str, Callable[[JsonFields], Message]]) -> Message:
    fields = JsonFields(value)
    try:
        return known[fields.text("type")](fields)
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise StillframeError(
            f"a control message cannot be understood ({error}): do driver and executors have the"
            " same version of stillframe?"
        ) from error


def _start_slot(fields: JsonFields) -> StartSlot:
    peers = [JsonFields(peer) for peer in fields.objects("peers")]
    parts = [JsonFields(part) for part in fields.objects("state")]
    checkpoint_id = fields.integer_or_none("checkpoint")
    epoch = fields.integer_or_none("epoch")
    return StartSlot(
        peers={
            SlotIndex(peer.integer("slot")): (peer.text("host"), peer.integer("port"))
            for peer in peers
        },
        state={
            (
                OperatorUid(part.text("uid")),
                SubtaskIndex(part.integer("subtask")),
            ): SubtaskState.from_json(part.object("state"))
            for part in parts
        },
        restored_checkpoint=None if checkpoint_id is None else CheckpointId(checkpoint_id),
        restored_epoch=None if epoch is None else Epoch(epoch),
        channels={
            (
                part.text("edge"),
                SubtaskIndex(part.integer("target")),
            ): part.parts("states", ChannelState.from_json)
            for part in map(JsonFields, fields.objects("channels"))
        },
    )


def _checkpoint(fields: JsonFields) -> CheckpointId:
    return CheckpointId(fields.integer("checkpoint"))


def _subtask(fields: JsonFields) -> SubtaskIndex:
    return SubtaskIndex(fields.integer("subtask"))


def _subtask_or_none(fields: JsonFields) -> SubtaskIndex | None:
    return cast(SubtaskIndex | None, fields.integer_or_none("subtask"))


def _cause(fields: JsonFields) -> FailureCause:
    return cast(FailureCause, fields.one_of("cause", get_args(FailureCause)))


_ORDERS: Mapping[str, Callable[[JsonFields], Order]] = {
    "StartSlot": _start_slot,
    "TakeFile": lambda f: TakeFile(FileHandle.from_json(f.object("file"))),
    "TriggerCheckpoint": lambda f: TriggerCheckpoint(
        _checkpoint(f),
        f.integer("triggered_at_ms"),
        f.integer_or_none("alignment_timeout_ms"),
        f.text_or_none("savepoint"),
        f.flag("holds"),
    ),
    "CompleteCheckpoint": lambda f: CompleteCheckpoint(_checkpoint(f), Epoch(f.integer("epoch"))),
    "AbortCheckpoint": lambda f: AbortCheckpoint(_checkpoint(f)),
    "AssignSplits": lambda f: AssignSplits(
        OperatorUid(f.text("uid")),
        _subtask(f),
        f.objects("splits"),
        f.flag("is_last"),
        f.flag("stops"),
    ),
    "EndSources": lambda f: EndSources(),
    "EndSlot": lambda f: EndSlot(),
    "StillThere": lambda f: StillThere(tuple(f.integers("watched"))),
}

_REPORTS: Mapping[str, Callable[[JsonFields], Report]] = {
    "Running": lambda f: Running(),
    "Acknowledged": lambda f: Acknowledged(
        f.integer("task"),
        _subtask(f),
        _checkpoint(f),
        f.parts("operators", OperatorSnapshot.from_json),
        SubtaskTimings.from_json(f.object("timings")),
        f.parts("channels", ChannelState.from_json),
    ),
    "Declined": lambda f: Declined(_checkpoint(f), f.text("reason")),
    "Committed": lambda f: Committed(f.integer("task"), _subtask(f), _checkpoint(f)),
    "Drained": lambda f: Drained(f.integer("task"), _subtask(f)),
    "CaughtUp": lambda f: CaughtUp(f.integer("task"), _subtask(f)),
    "Progress": lambda f: Progress(
        f.integer("records_in"),
        f.integer("records_out"),
        f.integer("records_late"),
        f.integer_or_none("watermark_us"),
        f.part_if_any("hanging", Hanging.from_json),
        f.parts("doing", SubtaskDoing.from_json),
        f.integer("records_malformed"),
        f.integer_or_none("oom_kills"),
        f.text_or_none("awaits"),
        f.parts("lags", SourceLag.from_json),
    ),
    "Measured": lambda f: msgspec.convert(f.object("measured"), Measured),
    "Said": lambda f: msgspec.convert(f.object("said"), Said),
    "Failed": lambda f: Failed(
        f.text("reason"),
        _cause(f),
        f.text_or_none("task"),
        _subtask_or_none(f),
        f.part_if_any("blame", blame_from_json),
    ),
}

built(Measured, Said)
