"""What reaches the job's thread, and how an attempt can end: closed sets, every case named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stillframe.coordinator.control import ControlEvent
from stillframe.coordinator.enumerators import DiscoveryEvent
from stillframe.coordinator.savepoints import SavepointWanted
from stillframe.coordinator.sinks import CommitEvent
from stillframe.ids import Attempt, CheckpointId
from stillframe.protocol.messages import FailureCause


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


Mail = (
    ControlEvent
    | CommitEvent
    | DiscoveryEvent
    | SlotsEnded
    | CheckpointWanted
    | SavepointWanted
    | StopWanted
)


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """Every record has been processed, snapshotted and committed."""


@dataclass(frozen=True, slots=True)
class AttemptStopped:
    """Somebody asked for it."""


@dataclass(frozen=True, slots=True)
class AttemptBroke:
    """Something went wrong."""

    reason: str
    cause: FailureCause


Outcome = AttemptFinished | AttemptStopped | AttemptBroke
