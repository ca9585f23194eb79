"""What reaches the job's thread, and how an attempt can end: closed sets, every case named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stillframe.coordinator.control import ControlEvent
from stillframe.coordinator.enumerators import DiscoveryEvent
from stillframe.coordinator.ledger_mail import LedgerEvent
from stillframe.coordinator.rescaling import RescaleWanted
from stillframe.coordinator.savepoints import SavepointWanted
from stillframe.coordinator.sinks import CommitEvent
from stillframe.errors import Blame
from stillframe.ids import Attempt, CheckpointId, SlotIndex, SubtaskIndex
from stillframe.protocol.messages import FailureCause
from stillframe.protocol.restarts import CodeFailed, NothingRan, Sign, SlotCrashed


@dataclass(frozen=True, slots=True)
class SlotsEnded:
    """None of the slots of this attempt runs any more."""

    attempt: Attempt
    reason: str | None


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """A person asks for a checkpoint, and is told its number."""

    on_numbered: Callable[[CheckpointId], None]


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A person asks the job to stop; it can be started again from its last checkpoint."""

    cancels: bool = False
    """Whether the job is not meant to go on: option retainOnCancel says what becomes of it."""


Mail = (
    ControlEvent
    | CommitEvent
    | LedgerEvent
    | DiscoveryEvent
    | SlotsEnded
    | CheckpointWanted
    | SavepointWanted
    | RescaleWanted
    | StopWanted
)


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """Every record has been processed, snapshotted and committed."""


@dataclass(frozen=True, slots=True)
class AttemptStopped:
    """Somebody asked for it."""

    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class AttemptRested:
    """All that was read is committed; an attempt with another parallelism goes on from there."""

    rescale: RescaleWanted
    held_at_seconds: float


@dataclass(frozen=True, slots=True)
class FailedAt:
    """The slot in which an attempt failed, and the subtask that was at work there, if one was."""

    slot: SlotIndex
    task: str | None = None
    subtask: SubtaskIndex | None = None
    is_crash: bool = False
    """Whether its process was gone before it could say why."""


def crashed(slot: SlotIndex) -> FailedAt:
    return FailedAt(slot, is_crash=True)


@dataclass(frozen=True, slots=True)
class AttemptBroke:
    """Something went wrong."""

    reason: str
    cause: FailureCause
    at: FailedAt | None = field(default=None, compare=False)
    """Where, if that is known; not compared, because the reason says it too."""

    blame: Blame | None = field(default=None, compare=False)
    """Of an error in code that is not ours."""
    nothing_ran: bool = field(default=False, compare=False)
    """Whether the slots ended before any of them ran."""

    @property
    def sign(self) -> Sign | None:
        """By which it is known if it comes again."""
        if self.at is not None and self.at.is_crash:
            return SlotCrashed(self.at.slot)
        if self.nothing_ran:
            return NothingRan(self.reason)
        return None if self.blame is None else CodeFailed(self.blame.same_as, self.blame.row)


Outcome = AttemptFinished | AttemptStopped | AttemptRested | AttemptBroke
