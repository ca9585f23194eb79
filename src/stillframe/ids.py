"""The names things go by: one type per kind of number, so that they cannot be mixed up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

CheckpointId = NewType("CheckpointId", int)
"""Counts the checkpoints of a job upward from 1, across attempts; never reused."""

Attempt = NewType("Attempt", int)
"""One run of a job between restarts, counted from 1; the fencing number."""

Epoch = NewType("Epoch", int)
"""Counts the *completed* checkpoints of a job densely from 0: aborted ones leave no gap."""

SlotIndex = NewType("SlotIndex", int)
SubtaskIndex = NewType("SubtaskIndex", int)
ChannelIndex = NewType("ChannelIndex", int)
"""An input channel of one subtask, counted from 0."""

KeyGroup = NewType("KeyGroup", int)
OperatorUid = NewType("OperatorUid", str)

NO_CHECKPOINT = CheckpointId(0)
"""Before the first checkpoint; the coordinator counts from 1."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who has prepared output of a sink: one of its subtasks, in one incarnation of its job.

    It stays who it is when the parallelism changes and another subtask commits what it prepared.
    """

    incarnation: str
    """Drawn at random when a job log begins: no two jobs share one, whatever their names are."""
    uid: OperatorUid
    subtask: SubtaskIndex | None
    """None: all of them together, where the sink commits at the coordinator."""

    def __str__(self) -> str:
        """A name for it in another system."""
        return f"{self.incarnation}/{self.uid}/{'all' if self.subtask is None else self.subtask}"


def incarnation_in(name: str, uid: OperatorUid) -> str | None:
    """Of the writer with this name, if it is one of this sink."""
    incarnation, _, rest = name.partition("/")
    return incarnation if rest.rpartition("/")[0] == uid else None


@dataclass(frozen=True, slots=True)
class Mark:
    """What output is known by in another system: who prepared it, and for which checkpoint.

    Never the epoch: epochs go back when an older checkpoint is restored, checkpoint ids do not.
    """

    writer: Writer
    checkpoint_id: CheckpointId

    def __str__(self) -> str:
        return f"{self.writer}/{self.checkpoint_id}"

    @property
    def delta_options(self) -> dict[str, str]:
        """For Spark's writer of Delta tables: it leaves a write out whose mark is in the table."""
        return {"txnAppId": str(self.writer), "txnVersion": str(self.checkpoint_id)}
