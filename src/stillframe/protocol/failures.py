"""The attempts of a job, as they are remembered: what each started from, how it failed or ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stillframe.errors import Blame
from stillframe.ids import Attempt, CheckpointId, SlotIndex, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import JsonFields

FailureKind = Literal["permanent", "damaged snapshot", "lost slot", "other", "driver lost"]
"""As a slot tells it (`messages.FailureCause`), or found out by the driver that came after."""
EndOutcome = Literal["finished", "stopped", "failed", "cancelled"]


def blame_to_json(blame: Blame) -> JsonObject:
    """As it is sent and kept."""
    return {
        "code": blame.code,
        "error": blame.error,
        "heals": blame.heals,
        "line": blame.line,
        "traceback": blame.traceback,
        "operator": blame.operator,
        "record": blame.record,
        **({} if blame.row is None else {"row": blame.row}),
    }


def blame_from_json(value: JsonObject) -> Blame:
    fields = JsonFields(value)
    return Blame(
        code=fields.text("code"),
        error=fields.text("error"),
        heals=fields.flag("heals"),
        line=fields.text_or_none("line"),
        traceback=fields.text("traceback"),
        operator=fields.text_or_none("operator"),
        record=fields.text_or_none("record"),
        row=fields.text_if_any("row"),
    )


def in_words(blame: Blame) -> list[str]:
    """What is known besides the sentence that says what was raised, line by line."""
    named = {"operator": blame.operator, "record": blame.record}
    lines = [f"{name}: {value}" for name, value in named.items() if value is not None]
    return [*lines, *blame.traceback.splitlines()]


@dataclass(frozen=True, slots=True)
class Restored:
    """A snapshot from which an attempt started."""

    checkpoint_id: CheckpointId
    """Of a savepoint, the number it had in the job that took it."""
    restored_at_ms: int
    is_savepoint: bool
    path: str | None

    def to_json(self) -> JsonObject:
        """As Flink's RestoredCheckpointStatistics."""
        return {
            "id": self.checkpoint_id,
            "restore_timestamp": self.restored_at_ms,
            "is_savepoint": self.is_savepoint,
            "external_path": self.path,
        }


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """An attempt has started, from there; None: from the beginning."""

    attempt: Attempt
    at_ms: int
    restored: Restored | None


@dataclass(frozen=True, slots=True)
class AttemptPhases:
    """How an attempt came up: moments in milliseconds since 1970, None where there is none."""

    attempt: Attempt
    heard: int | None = None
    """When the slot that was lost before it had been heard of last."""
    noticed: int | None = None
    """When it was known that the attempt before had failed."""
    slots: int | None = None
    """All its slots were there."""
    running: int | None = None
    """All had their state."""
    first_record: int | None = None
    caught_up: int | None = None
    """Its sources had read as much as had been read before."""
    replayed: int | None = None
    """Records that were read once more; None: those who knew how many are gone."""


@dataclass(frozen=True, slots=True)
class SlotRead:
    """How much a slot had read from its sources in an attempt whose driver was gone all at once."""

    attempt: Attempt
    slot: SlotIndex
    slots: int
    """Of the attempt; those that have not told were lost with the driver."""
    records_read: int


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt is over, and so is its driver's part in the job."""

    attempt: Attempt
    at_ms: int
    outcome: EndOutcome


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt did not go on, and what followed."""

    attempt: Attempt
    number: int
    """Counts the failures of one attempt: storage may fail again before the next one begins."""
    at_ms: int
    reason: str
    kind: FailureKind
    restart_delay_seconds: float | None
    """None: the job was given up, or its driver was gone."""
    task: str | None = None
    subtask: SubtaskIndex | None = None
    slot: SlotIndex | None = None
    blame: Blame | None = None
    """Of an error in code that is not ours: which code, where, and at which record."""
    recovered_by: AttemptBegun | None = None
    """The attempt that came next, if it has begun; worked out, not kept."""

    @property
    def is_permanent(self) -> bool:
        """Whether trying again would fail the same way."""
        return self.kind == "permanent"

    @property
    def is_given_up(self) -> bool:
        return self.restart_delay_seconds is None and self.kind != "driver lost"

    @property
    def where(self) -> str | None:
        """In words, as far as it is known: `count (2)`, `slot 1`."""
        if self.task is not None:
            return self.task if self.subtask is None else f"{self.task} ({self.subtask})"
        return None if self.slot is None else f"slot {self.slot}"

    @property
    def details(self) -> list[str]:
        """What is known besides the reason: operator, record and traceback, line by line."""
        return [] if self.blame is None else in_words(self.blame)

    @property
    def recovered_from(self) -> Restored | None:
        """What the next attempt started from; None also if that was the beginning."""
        return self.recovered_by.restored if self.recovered_by is not None else None

    def to_json(self) -> JsonObject:
        """As an entry of Flink's exceptionHistory, and what we know besides."""
        delay = self.restart_delay_seconds
        recovered = self.recovered_by
        return {
            "exceptionName": self.kind,
            "stacktrace": self.reason,
            "timestamp": self.at_ms,
            "taskName": self.where,
            "endpoint": None,
            "taskManagerId": None if self.slot is None else f"slot-{self.slot}",
            "failureLabels": {"kind": self.kind},
            "concurrentExceptions": [],
            "function": None if self.blame is None else self.blame.code,
            "operator": None if self.blame is None else self.blame.operator,
            "record": None if self.blame is None else self.blame.record,
            "traceback": None if self.blame is None else self.blame.traceback,
            "attempt": self.attempt,
            "permanent": self.is_permanent,
            "given-up": self.is_given_up,
            "restart-delay-ms": None if delay is None else round(delay * 1000),
            "recovered-by-attempt": None if recovered is None else recovered.attempt,
            "recovered-at": None if recovered is None else recovered.at_ms,
            "recovered-from": None
            if self.recovered_from is None
            else self.recovered_from.to_json(),
        }
