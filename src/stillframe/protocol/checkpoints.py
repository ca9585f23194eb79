"""The life of checkpoints, the coordinator's half: trigger, collect, store, announce, or abort.

Theory of operation
-------------------
A checkpoint is *pending* from its trigger until every subtask has acknowledged it, then *storing*
while its metadata and its entry in the job log are written, then complete. Completion is announced
to every slot; slots with sinks then commit and report it. Anything that goes wrong before the log
entry exists aborts the checkpoint: its files are deleted and every slot is told. When all records
of a bounded job have been processed, one last checkpoint is taken at once, and when its commits
have been reported the job is done.

Rules of this file
------------------
1. No threads, no clock, no I/O: the caller says what happened and what time it is, and carries out
   the instructions it gets, in order.
2. A checkpoint id is used once. What arrives for a checkpoint that is not pending is late, or a
   duplicate, and changes nothing.
3. The next checkpoint starts only when the one before is committed everywhere, so that slow
   commits slow checkpoints down instead of piling up. A slot that does not commit in time breaks
   the attempt; the coordinator's own commits run a user's function and may take as long as it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from stillframe.ids import CheckpointId

Subtask = TypeVar("Subtask")
Snapshot = TypeVar("Snapshot")

FINAL_RETRY_SECONDS = 1.0
"""How long after the start of a failed last checkpoint the next try begins, unless the interval is
shorter: nothing else is left to do, so a long interval is not waited for."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When checkpoints start and how long they may take."""

    interval_seconds: float | None
    timeout_seconds: float
    min_pause_seconds: float = 0.0
    enabled: bool = True
    """False: there is nowhere to keep checkpoints, so none is ever taken."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """Tell the sources to begin this checkpoint."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class StoreCheckpoint(Generic[Subtask, Snapshot]):
    """Write the metadata, then the log entry; then call `on_stored` or `on_store_failed`."""

    checkpoint_id: CheckpointId
    triggered_at_seconds: float
    acknowledged: Mapping[Subtask, Snapshot]


@dataclass(frozen=True, slots=True)
class AnnounceComplete:
    """Tell every slot: its sinks may commit."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class NoteCommitted:
    """Everything this checkpoint holds is visible outside."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class Abort:
    """Delete what this checkpoint wrote and tell every slot."""

    checkpoint_id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class BreakAttempt:
    """Something hangs that only a new attempt can mend."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything is processed, snapshotted and committed: end the job."""


Instruction = (
    Trigger
    | StoreCheckpoint[Subtask, Snapshot]
    | AnnounceComplete
    | NoteCommitted
    | Abort
    | BreakAttempt
    | Finish
)


class Acknowledged(Enum):
    """What became of an acknowledgement."""

    COUNTED = "counted"
    DUPLICATE = "duplicate"
    TOO_LATE = "too late"


@dataclass(slots=True)
class _Pending(Generic[Subtask, Snapshot]):
    checkpoint_id: CheckpointId
    triggered_at_seconds: float
    is_final: bool
    waiting_for: set[Subtask]
    acknowledged: dict[Subtask, Snapshot] = field(default_factory=dict)

    @property
    def is_storing(self) -> bool:
        return not self.waiting_for


class Checkpoints(Generic[Subtask, Snapshot]):
    """The checkpoints of one attempt."""

    def __init__(
        self,
        settings: CheckpointSettings,
        subtasks: Iterable[Subtask],
        committing: Iterable[Subtask],
        first_id: CheckpointId,
    ) -> None:
        self._settings = settings
        self._subtasks = frozenset(subtasks)
        self._committing = frozenset(committing)
        self._next_id = first_id
        self._pending: _Pending[Subtask, Snapshot] | None = None
        self._requested = False
        self._is_running = False
        self._due_at_seconds: float | None = None
        self._pause_over_at_seconds = 0.0
        self._undrained = set(self._subtasks)
        self._uncommitted_checkpoint: CheckpointId | None = None
        self._uncommitted: set[Subtask] = set()
        self._commit_deadline_seconds = 0.0
        self._coordinator_commits_outstanding = False
        self._final_complete: CheckpointId | None = None
        assert self._subtasks, "a job has at least one subtask"

    @property
    def next_id(self) -> CheckpointId:
        return self._next_id

    @property
    def in_progress(self) -> int:
        return 0 if self._pending is None else 1

    def wake_at_seconds(self) -> float | None:
        """When `on_time` has something to do at the latest."""
        if self._pending is not None:
            if self._pending.is_storing:
                return None
            return self._pending.triggered_at_seconds + self._settings.timeout_seconds
        if self._uncommitted_checkpoint is not None:
            return self._commit_deadline_seconds if self._uncommitted else None
        if self._final_complete is not None or self._due_at_seconds is None:
            return None
        return max(self._due_at_seconds, self._pause_over_at_seconds)

    def on_running(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """Every subtask has its state and can be asked for a snapshot from now on."""
        self._is_running = True
        self._pause_over_at_seconds = now_seconds
        interval = self._settings.interval_seconds
        if not self._undrained:
            self._due_at_seconds = now_seconds
        elif interval is not None:
            self._due_at_seconds = now_seconds + interval
        return self._trigger_if_due(now_seconds)

    def on_time(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """Time has passed."""
        pending = self._pending
        if pending is not None:
            waited = now_seconds - pending.triggered_at_seconds
            if pending.is_storing or waited < self._settings.timeout_seconds:
                return []
            missing = len(pending.waiting_for)
            return self._abort(
                f"it took longer than {self._settings.timeout_seconds:g} s and {missing} of"
                f" {len(self._subtasks)} subtasks had not acknowledged it",
                now_seconds,
            )
        if self._uncommitted and now_seconds >= self._commit_deadline_seconds:
            return [
                BreakAttempt(
                    f"{len(self._uncommitted)} of {len(self._committing)} subtasks with sinks have"
                    f" not committed checkpoint {self._uncommitted_checkpoint} within"
                    f" {self._settings.timeout_seconds:g} s"
                )
            ]
        return self._trigger_if_due(now_seconds)

    def request(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """A person asks for a checkpoint: as soon as none is pending."""
        self._requested = True
        return self._trigger_if_due(now_seconds)

    def on_acknowledged(
        self, checkpoint_id: CheckpointId, subtask: Subtask, snapshot: Snapshot
    ) -> tuple[Acknowledged, list[Instruction[Subtask, Snapshot]]]:
        """A subtask's part of the checkpoint is durable."""
        pending = self._pending
        if pending is None or pending.checkpoint_id != checkpoint_id:
            return Acknowledged.TOO_LATE, []
        if subtask not in pending.waiting_for:
            return Acknowledged.DUPLICATE, []
        pending.waiting_for.remove(subtask)
        pending.acknowledged[subtask] = snapshot
        if pending.waiting_for:
            return Acknowledged.COUNTED, []
        return Acknowledged.COUNTED, [
            StoreCheckpoint(checkpoint_id, pending.triggered_at_seconds, pending.acknowledged)
        ]

    def on_declined(
        self, checkpoint_id: CheckpointId, reason: str, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A subtask could not do its part."""
        pending = self._pending
        if pending is None or pending.checkpoint_id != checkpoint_id or pending.is_storing:
            return []
        return self._abort(reason, now_seconds)

    def on_stored(
        self, checkpoint_id: CheckpointId, coordinator_commits: bool, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """The log entry exists: the checkpoint is complete and nothing can undo it."""
        pending = self._pending
        assert pending is not None
        assert pending.checkpoint_id == checkpoint_id
        assert pending.is_storing
        self._close(now_seconds)
        self._uncommitted_checkpoint = checkpoint_id
        self._uncommitted = set(self._committing)
        self._commit_deadline_seconds = now_seconds + self._settings.timeout_seconds
        self._coordinator_commits_outstanding = coordinator_commits
        if pending.is_final:
            self._final_complete = checkpoint_id
        return [
            AnnounceComplete(checkpoint_id),
            *self._settle_if_committed(),
            *self._trigger_if_due(now_seconds),
        ]

    def on_store_failed(
        self, checkpoint_id: CheckpointId, reason: str, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """The metadata could not be written, and no log entry was."""
        assert self._pending is not None
        assert self._pending.checkpoint_id == checkpoint_id
        return self._abort(reason, now_seconds)

    def on_committed(
        self, checkpoint_id: CheckpointId, subtask: Subtask, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A sink subtask has made everything up to this checkpoint visible."""
        if self._uncommitted_checkpoint is None or checkpoint_id < self._uncommitted_checkpoint:
            return []
        self._uncommitted.discard(subtask)
        return [*self._settle_if_committed(), *self._trigger_if_due(now_seconds)]

    def on_coordinator_committed(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """The sinks that commit at the coordinator have done so for the last checkpoint."""
        self._coordinator_commits_outstanding = False
        return [*self._settle_if_committed(), *self._trigger_if_due(now_seconds)]

    def on_drained(
        self, subtask: Subtask, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A subtask has processed the last record it will ever get."""
        if subtask not in self._undrained:
            return []
        self._undrained.remove(subtask)
        if self._undrained:
            return []
        if not self._settings.enabled:
            return [Finish()]
        self._due_at_seconds = self._pause_over_at_seconds = now_seconds
        return self._trigger_if_due(now_seconds)

    def _trigger_if_due(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        if (
            not self._settings.enabled
            or not self._is_running
            or self._pending is not None
            or self._uncommitted_checkpoint is not None
            or self._final_complete is not None
        ):
            return []
        is_due = (
            self._due_at_seconds is not None
            and now_seconds >= self._due_at_seconds
            and now_seconds >= self._pause_over_at_seconds
        )
        if not (is_due or self._requested):
            return []
        self._requested = False
        checkpoint_id = self._next_id
        self._next_id = CheckpointId(checkpoint_id + 1)
        self._pending = _Pending(
            checkpoint_id, now_seconds, not self._undrained, set(self._subtasks)
        )
        self._due_at_seconds = self._next_due_at_seconds(now_seconds)
        return [Trigger(checkpoint_id)]

    def _next_due_at_seconds(self, now_seconds: float) -> float | None:
        interval = self._settings.interval_seconds
        if self._undrained:
            return None if interval is None else now_seconds + interval
        return now_seconds + min(FINAL_RETRY_SECONDS, interval or FINAL_RETRY_SECONDS)

    def _abort(self, reason: str, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        assert self._pending is not None
        aborted = self._pending.checkpoint_id
        self._close(now_seconds)
        return [Abort(aborted, reason), *self._trigger_if_due(now_seconds)]

    def _close(self, now_seconds: float) -> None:
        was_final = self._pending is not None and self._pending.is_final
        self._pending = None
        self._pause_over_at_seconds = now_seconds + self._settings.min_pause_seconds
        if not self._undrained and not was_final:
            # The records ended while another checkpoint was under way: the last follows at once.
            self._due_at_seconds = self._pause_over_at_seconds = now_seconds

    def _settle_if_committed(self) -> list[Instruction[Subtask, Snapshot]]:
        committed = self._uncommitted_checkpoint
        if committed is None or self._uncommitted or self._coordinator_commits_outstanding:
            return []
        self._uncommitted_checkpoint = None
        if committed != self._final_complete:
            return [NoteCommitted(committed)]
        return [NoteCommitted(committed), Finish()]
