"""The life of checkpoints, the coordinator's half: trigger, collect, store, announce, or abort.

Theory of operation
-------------------
A checkpoint is *pending* from its trigger until every subtask has acknowledged it and its metadata
and its entry in the job log have been written; then it is complete. Completion is announced to
every slot; slots with sinks then commit and report it. Anything that goes wrong before the log
entry exists aborts the checkpoint: its files are deleted and every slot is told. Too many failures
in a row break the attempt. When all records of a bounded job have been processed, one last
checkpoint is taken at once, and when its commits have been reported the job is done.

Several checkpoints may be in flight. One that completes subsumes the older ones that are still
pending: it holds all they would have held, so they are aborted, which is no failure.

A savepoint is taken like a checkpoint and belongs to whoever asked for it: the job never goes back
to it, so nothing is announced or committed when it is stored, and it fails alone. What sinks have
prepared at its barrier comes out with the next checkpoint, which is taken at once.

The savepoint with which a job ends is its last word: what it holds is committed before it exists,
and nothing else ever is. So its barrier holds the job (behind it no subtask takes a record, fires a
timer, closes a window or finishes), and when every subtask is in it one last checkpoint is taken,
which therefore holds exactly what the savepoint holds. When that is committed everywhere, the
savepoint is stored and the job ends. If the savepoint fails at any point, the job is let go and
goes on. If the job is to drain first, all this begins when the last record has been processed;
until then no checkpoint is taken, as a job that went on from it would have told its windows before
their time.

A job can also be asked to rest, so that another attempt goes on exactly where this one stopped: a
checkpoint is taken whose barrier holds the job, and when it is committed everywhere the attempt
stops. If that checkpoint fails, the job goes on as if nobody had asked.

A job that is to stop when it has read what was there is asked to rest by its sources: when each of
them has caught up, or ended. Another checkpoint is tried until that one succeeds. A job that keeps
no checkpoints has nothing to go on from, so its sources end there.

Rules of this file
------------------
1. No threads, no clock, no I/O: the caller says what happened and what time it is, and carries out
   the instructions it gets, in order.
2. A checkpoint id is used once. What arrives for a checkpoint that is not pending is late, or a
   duplicate, and changes nothing.
3. A checkpoint is in flight from its trigger until it is committed everywhere, and at most
   `max_concurrent` are, so that slow commits slow checkpoints down instead of piling up. A pause
   between checkpoints means that they do not overlap. A slot that does not commit in time breaks
   the attempt; the coordinator's own commits run a user's function and may take as long as it does.
4. Checkpoints complete in ascending order. One is stored at a time, and only when the coordinator
   has committed the one before: what a checkpoint's metadata leaves to be committed after a crash
   is its own epoch, never two.
5. There is one last checkpoint at a time, and nothing is triggered after it.
6. There is one savepoint at a time. It counts as in flight while subtasks are missing in it.
7. What the restored checkpoint leaves to be committed is committed everywhere before anything newer
   is: another subtask may hold it now than the one that prepared it, and of one writer's output the
   later must not be seen before the earlier. So it is in flight from the start.
8. A savepoint with which the job ends is stored when its last checkpoint is committed everywhere,
   and what follows that is the end: nobody can find it while the job may still commit something.
9. Whether something that is being stored comes to exist is not ours to decide any more: no timeout,
   no subtask and no newer checkpoint ends it, only the answer does. If the attempt is over before
   the answer comes, a checkpoint that came to exist counts all the same: it is not announced, and
   the next attempt begins with it and commits what it holds. A savepoint with which the job was to
   end and that came to exist ends it, however the attempt ended: the job must not go on behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal, TypeVar

from stillframe.ids import CheckpointId

Subtask = TypeVar("Subtask")
Snapshot = TypeVar("Snapshot")

FINAL_RETRY_SECONDS = 1.0
"""How long after the start of a failed last checkpoint the next try begins, unless the interval is
shorter: nothing else is left to do, so a long interval is not waited for."""


_NAMED_MAX = 8
"""So many subtasks are named in one sentence."""

Then = Literal["go on", "stop", "drain"]
"""What a job does with a savepoint: nothing, end behind it, or end its sources before it."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When checkpoints start and how long they may take."""

    interval_seconds: float | None
    timeout_seconds: float
    min_pause_seconds: float = 0.0
    enabled: bool = True
    """False: there is nowhere to keep checkpoints, so none is ever taken."""
    max_concurrent: int = 1
    tolerable_failures: float = math.inf
    """How many checkpoints in a row may fail before the attempt is broken."""

    @property
    def in_flight_max(self) -> int:
        return 1 if self.min_pause_seconds > 0 else self.max_concurrent


@dataclass(frozen=True, slots=True)
class Trigger:
    """Tell the sources to begin this checkpoint, and whether its barrier holds the job."""

    checkpoint_id: CheckpointId
    holds: bool = False


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
class EndSources:
    """Tell every source that its records have ended."""


@dataclass(frozen=True, slots=True)
class TriggerSavepoint:
    """Tell the sources to begin the savepoint, and whether its barrier holds the job."""

    checkpoint_id: CheckpointId
    holds: bool


@dataclass(frozen=True, slots=True)
class StoreSavepoint(Generic[Subtask, Snapshot]):
    """Write the metadata; then call `on_savepoint_stored` or `on_store_failed`."""

    checkpoint_id: CheckpointId
    acknowledged: Mapping[Subtask, Snapshot]


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell every slot that nothing more comes of this savepoint for it."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class Abort:
    """Delete what this checkpoint wrote and tell every slot."""

    checkpoint_id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class BreakAttempt:
    """Something is wrong that only a new attempt can mend."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything is processed, snapshotted and committed: end the job."""


@dataclass(frozen=True, slots=True)
class Stop:
    """All that was read is committed, and nothing came after it: stop the attempt."""


Instruction = (
    Trigger
    | EndSources
    | TriggerSavepoint
    | StoreSavepoint[Subtask, Snapshot]
    | LetGo
    | Stop
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
    savepoint: Then | None = None
    """None: it is a checkpoint."""
    acknowledged: dict[Subtask, Snapshot] = field(default_factory=dict)

    @property
    def is_last_word(self) -> bool:
        """Whether the job ends with it."""
        return self.savepoint in ("stop", "drain")


@dataclass(slots=True)
class _Uncommitted(Generic[Subtask]):
    """A complete checkpoint that is not visible everywhere."""

    checkpoint_id: CheckpointId
    is_final: bool
    deadline_seconds: float
    waiting_for: set[Subtask]
    waits_for_coordinator: bool


class Checkpoints(Generic[Subtask, Snapshot]):
    """The checkpoints of one attempt."""

    def __init__(
        self,
        settings: CheckpointSettings,
        subtasks: Iterable[Subtask],
        committing: Iterable[Subtask],
        first_id: CheckpointId,
        stops_after: Iterable[Subtask] = (),
        in_words: Callable[[Subtask, CheckpointId | None], str] = lambda subtask, _: str(subtask),
        restored: CheckpointId | None = None,
    ) -> None:
        """`stops_after`: the job stops when these, all its sources, have read what was there.
        `restored`: the job's own checkpoint that the attempt began with.
        `in_words` names a subtask, and says how far it is with a pending checkpoint, if given."""
        self._settings = settings
        self._subtasks = frozenset(subtasks)
        self._committing = frozenset(committing)
        self._in_words = in_words
        self._next_id = first_id
        # Both in the order of their ids: checkpoints begin, and complete, in ascending order.
        self._pending: dict[CheckpointId, _Pending[Subtask, Snapshot]] = {}
        self._uncommitted: dict[CheckpointId, _Uncommitted[Subtask]] = {}
        self._restored = restored
        if restored is not None and self._committing:
            self._uncommitted[restored] = _Uncommitted(
                restored, False, math.inf, set(self._committing), False
            )
        self._storing: CheckpointId | None = None
        self._is_over = False
        self._requested = False
        self._savepoint_wanted: Then | None = None
        self._rest_wanted = False
        self._resting_with: CheckpointId | None = None
        """The checkpoint whose barrier holds the job, because it is to rest."""
        self._is_running = False
        self._due_at_seconds: float | None = None
        self._pause_over_at_seconds = 0.0
        self._undrained = set(self._subtasks)
        self._stops_after = frozenset(stops_after)
        self._caught_up: set[Subtask] = set()
        self._is_caught_up = False
        """Whether all sources have read what was there, so that the job is to stop."""
        self._has_last_completed = False
        self._failures_in_a_row = 0
        self._last_failure: Abort | None = None
        assert self._subtasks, "a job has at least one subtask"
        assert settings.max_concurrent >= 1

    @property
    def next_id(self) -> CheckpointId:
        return self._next_id

    @property
    def in_progress(self) -> int:
        """How many are pending."""
        return len(self._pending)

    def wake_at_seconds(self) -> float | None:
        """When `on_time` has something to do at the latest."""
        moments = [
            pending.triggered_at_seconds + self._settings.timeout_seconds
            for pending in self._pending.values()
            if pending.waiting_for
        ]
        moments += [
            completed.deadline_seconds
            for completed in self._uncommitted.values()
            if completed.waiting_for and self._is_running
        ]
        if self._due_at_seconds is not None and self._may_trigger():
            moments.append(max(self._due_at_seconds, self._pause_over_at_seconds))
        return min(moments, default=None)

    def on_running(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """Every subtask has its state and can be asked for a snapshot from now on."""
        self._is_running = True
        for restored in self._uncommitted.values():
            restored.deadline_seconds = now_seconds + self._settings.timeout_seconds
        self._pause_over_at_seconds = now_seconds
        interval = self._settings.interval_seconds
        if not self._undrained or self._is_caught_up:
            self._due_at_seconds = now_seconds
        elif interval is not None:
            self._due_at_seconds = now_seconds + interval
        return self._go_on(now_seconds)

    def on_time(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """Time has passed."""
        for completed in self._uncommitted.values():
            if completed.waiting_for and now_seconds >= completed.deadline_seconds:
                return [self._commit_overdue(completed)]
        expired = [
            pending
            for pending in self._pending.values()
            if pending.waiting_for
            and now_seconds - pending.triggered_at_seconds >= self._settings.timeout_seconds
        ]
        aborted = [
            self._fail(
                pending,
                f"it took longer than {self._settings.timeout_seconds:g} s and"
                f" {len(pending.waiting_for)} of {len(self._subtasks)} subtasks had not"
                f" acknowledged it: {self._named(pending.waiting_for, pending.checkpoint_id)}",
                now_seconds,
            )
            for pending in expired
        ]
        return [*aborted, *self._go_on(now_seconds)]

    def request(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """A person asks for a checkpoint: as soon as there is room for one more in flight."""
        self._requested = True
        return self._go_on(now_seconds)

    def request_savepoint(
        self, then: Then, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A person asks for a savepoint: as soon as there is room for one more in flight."""
        assert not self._has_savepoint(), "there is one savepoint at a time"
        self._savepoint_wanted = then
        ending: list[Instruction[Subtask, Snapshot]] = [EndSources()] if then == "drain" else []
        return [*ending, *self._go_on(now_seconds)]

    @property
    def can_rest(self) -> bool:
        """Whether the attempt can be asked to: not if it is about to end, or to rest, anyway."""
        savepoints = [self._savepoint_wanted, *(each.savepoint for each in self._pending.values())]
        is_stopping = "stop" in savepoints or "drain" in savepoints
        is_resting = self._rest_wanted or self._resting_with is not None
        return self._settings.enabled and not (self._is_ending or is_stopping or is_resting)

    def request_rest(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """A person asks the attempt to stop, so that the next one goes on where it stopped.

        As soon as nothing else is in flight that it would have to wait for. Ends with `Stop`, or
        with the `Abort` of the checkpoint that `resting_with` names, or with neither if the job
        comes to its end first.
        """
        assert self.can_rest
        self._rest_wanted = True
        return self._go_on(now_seconds)

    @property
    def resting_with(self) -> CheckpointId | None:
        """The checkpoint with which the attempt stops, once it is triggered and until it fails."""
        return self._resting_with

    def on_savepoint_stored(
        self, checkpoint_id: CheckpointId, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """The savepoint is complete. If the job goes on, its sinks commit with a checkpoint now."""
        stored = self._take_storing(checkpoint_id)
        self._close(stored, now_seconds)
        if stored.is_last_word:
            return [self._end()]
        if self._is_over:
            return []
        self._requested = self._settings.enabled
        return [LetGo(checkpoint_id), *self._go_on(now_seconds)]

    def on_acknowledged(
        self, checkpoint_id: CheckpointId, subtask: Subtask, snapshot: Snapshot
    ) -> tuple[Acknowledged, list[Instruction[Subtask, Snapshot]]]:
        """A subtask's part of the checkpoint is durable."""
        pending = self._pending.get(checkpoint_id)
        if pending is None:
            return Acknowledged.TOO_LATE, []
        if subtask not in pending.waiting_for:
            return Acknowledged.DUPLICATE, []
        pending.waiting_for.remove(subtask)
        pending.acknowledged[subtask] = snapshot
        if pending.is_last_word and not pending.waiting_for:
            # The last checkpoint is due: the caller, who knows the time, is woken for it.
            self._due_at_seconds = self._pause_over_at_seconds = pending.triggered_at_seconds
        return Acknowledged.COUNTED, self._store_next()

    def on_declined(
        self, checkpoint_id: CheckpointId, reason: str, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A subtask could not do its part."""
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.waiting_for:
            return []
        return [self._fail(pending, reason, now_seconds), *self._go_on(now_seconds)]

    def on_stored(
        self, checkpoint_id: CheckpointId, coordinator_commits: bool, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """The log entry exists: the checkpoint is complete and nothing can undo it."""
        stored = self._take_storing(checkpoint_id)
        if self._is_over:
            self._close(stored, now_seconds)
            return []
        subsumed = [
            older
            for older in self._pending.values()
            if older.checkpoint_id < checkpoint_id and older.savepoint is None
        ]
        for closed in (*subsumed, stored):
            self._close(closed, now_seconds)
        self._failures_in_a_row = 0
        self._has_last_completed = stored.is_final
        self._uncommitted[checkpoint_id] = _Uncommitted(
            checkpoint_id,
            stored.is_final,
            now_seconds + self._settings.timeout_seconds,
            set(self._committing),
            coordinator_commits,
        )
        reason = f"checkpoint {checkpoint_id} completed first"
        return [
            AnnounceComplete(checkpoint_id),
            *(Abort(older.checkpoint_id, reason) for older in subsumed),
            *self._go_on(now_seconds),
        ]

    def on_store_failed(
        self, checkpoint_id: CheckpointId, reason: str, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """The metadata could not be written, and no log entry was."""
        failed = self._take_storing(checkpoint_id)
        aborted = self._fail(failed, reason, now_seconds)
        if self._is_over:
            return [aborted]
        if failed.savepoint is not None and self._has_last_completed:
            if not self._undrained:
                return [aborted, Finish()]
            # It was not the last, after all: the job goes on.
            self._has_last_completed = False
            self._due_at_seconds = self._next_due_at_seconds(now_seconds)
        return [aborted, *self._go_on(now_seconds)]

    def on_over(self) -> None:
        """The attempt is over, whatever ended it: all that may still be told is what became of what
        is being stored."""
        self._is_over = True

    def on_committed(
        self, checkpoint_id: CheckpointId, subtask: Subtask, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A sink subtask has made everything up to this checkpoint visible."""
        for completed in self._uncommitted.values():
            if completed.checkpoint_id <= checkpoint_id:
                completed.waiting_for.discard(subtask)
        return self._go_on(now_seconds)

    def on_coordinator_committed(
        self, checkpoint_id: CheckpointId, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """The sinks that commit at the coordinator have done so for this checkpoint."""
        completed = self._uncommitted.get(checkpoint_id)
        if completed is not None:
            completed.waits_for_coordinator = False
        return self._go_on(now_seconds)

    def on_drained(
        self, subtask: Subtask, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A subtask has processed the last record it will ever get."""
        if subtask not in self._undrained:
            return []
        self._undrained.remove(subtask)
        if self._undrained:
            return self._stop_if_caught_up(now_seconds)
        if not self._settings.enabled and not self._has_savepoint():
            return [Finish()]
        self._due_at_seconds = self._pause_over_at_seconds = now_seconds
        return self._go_on(now_seconds)

    def on_caught_up(
        self, subtask: Subtask, now_seconds: float
    ) -> list[Instruction[Subtask, Snapshot]]:
        """A source has read what was there, and the job is to stop when all have."""
        self._caught_up.add(subtask)
        return self._stop_if_caught_up(now_seconds)

    def _stop_if_caught_up(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        is_reading = self._stops_after & self._undrained - self._caught_up
        if is_reading or self._is_caught_up or not self._caught_up:
            return []
        if not self._settings.enabled:
            self._caught_up.clear()
            return [EndSources()]
        self._is_caught_up = True
        self._due_at_seconds = self._pause_over_at_seconds = now_seconds
        return self._go_on(now_seconds)

    def _go_on(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        """What has become possible, now that something has changed."""
        failure = self._last_failure
        if failure is not None and self._failures_in_a_row > self._settings.tolerable_failures:
            return [
                BreakAttempt(
                    f"checkpoint {failure.checkpoint_id} failed: {failure.reason}; this is failure"
                    f" {self._failures_in_a_row} in a row, and tolerableFailedCheckpoints is"
                    f" {self._settings.tolerable_failures:g}"
                )
            ]
        return [*self._settle(), *self._trigger_if_due(now_seconds), *self._store_next()]

    def _settle(self) -> list[Instruction[Subtask, Snapshot]]:
        instructions: list[Instruction[Subtask, Snapshot]] = []
        for completed in list(self._uncommitted.values()):
            if completed.waiting_for or completed.waits_for_coordinator:
                break
            del self._uncommitted[completed.checkpoint_id]
            instructions.append(NoteCommitted(completed.checkpoint_id))
            if completed.is_final and self._last_word is None:
                instructions.append(self._end())
        return instructions

    def _end(self) -> Finish | Stop:
        # Who rests never finishes: what ended behind the barrier of its checkpoint is not in it.
        return Stop() if self._undrained or self._resting_with is not None else Finish()

    def _store_next(self) -> list[Instruction[Subtask, Snapshot]]:
        """The oldest that everybody has acknowledged, if nothing stands in its way."""
        is_committing = self._restored in self._uncommitted or any(
            each.waits_for_coordinator for each in self._uncommitted.values()
        )
        if self._storing is not None:
            return []
        for pending in self._pending.values():
            if pending.waiting_for or (pending.is_last_word and not self._is_all_committed):
                continue
            if pending.savepoint is not None:
                self._storing = pending.checkpoint_id
                return [StoreSavepoint(pending.checkpoint_id, pending.acknowledged)]
            if not is_committing:
                self._storing = pending.checkpoint_id
                return [
                    StoreCheckpoint(
                        pending.checkpoint_id, pending.triggered_at_seconds, pending.acknowledged
                    )
                ]
        return []

    def _trigger_if_due(self, now_seconds: float) -> list[Instruction[Subtask, Snapshot]]:
        if self._savepoint_wanted is not None and self._may_take_savepoint():
            return [self._trigger_savepoint(self._savepoint_wanted, now_seconds)]
        if self._rest_wanted and self._may_rest():
            return [self._trigger_rest(now_seconds)]
        is_due = (
            self._due_at_seconds is not None
            and now_seconds >= self._due_at_seconds
            and now_seconds >= self._pause_over_at_seconds
        )
        if is_due and self._is_caught_up and self._may_rest():
            return [self._trigger_rest(now_seconds)]
        if not (is_due or self._requested) or not self._may_trigger():
            return []
        self._requested = False
        checkpoint_id = self._begin(now_seconds, self._is_ending, None)
        self._due_at_seconds = self._next_due_at_seconds(now_seconds)
        return [Trigger(checkpoint_id)]

    def _trigger_savepoint(self, then: Then, now_seconds: float) -> TriggerSavepoint:
        self._savepoint_wanted = None
        checkpoint_id = self._begin(now_seconds, False, then)
        return TriggerSavepoint(checkpoint_id, holds=then != "go on")

    def _trigger_rest(self, now_seconds: float) -> Trigger:
        self._rest_wanted = self._requested = False  # it holds all that was read before
        self._resting_with = self._begin(now_seconds, True, None)
        self._due_at_seconds = self._next_due_at_seconds(now_seconds)
        return Trigger(self._resting_with, holds=True)

    def _begin(self, now_seconds: float, is_final: bool, savepoint: Then | None) -> CheckpointId:
        checkpoint_id = self._next_id
        self._next_id = CheckpointId(checkpoint_id + 1)
        self._pending[checkpoint_id] = _Pending(
            checkpoint_id, now_seconds, is_final, set(self._subtasks), savepoint
        )
        return checkpoint_id

    @property
    def _is_ending(self) -> bool:
        """Whether no record will come any more, so that the next checkpoint is the last one."""
        return not self._undrained or self._is_held

    @property
    def _last_word(self) -> _Pending[Subtask, Snapshot] | None:
        """The savepoint with which the job ends, until it is stored or given up."""
        return next((each for each in self._pending.values() if each.is_last_word), None)

    @property
    def _is_held(self) -> bool:
        """Whether every subtask is in the savepoint with which the job ends."""
        last_word = self._last_word
        return last_word is not None and not last_word.waiting_for

    @property
    def _is_all_committed(self) -> bool:
        """Whether the last checkpoint is, or there is none to wait for."""
        is_over = self._has_last_completed and not self._uncommitted
        return is_over or not self._settings.enabled

    def _has_savepoint(self) -> bool:
        is_pending = any(pending.savepoint is not None for pending in self._pending.values())
        return is_pending or self._savepoint_wanted is not None

    def _may_take_savepoint(self) -> bool:
        return self._has_room() and not (self._savepoint_wanted == "drain" and self._undrained)

    def _may_rest(self) -> bool:
        return self._has_room() and not self._has_savepoint() and not self._is_ending

    def _may_trigger(self) -> bool:
        is_draining = self._savepoint_wanted == "drain"
        waits_for_savepoint = self._is_ending and self._has_savepoint() and not self._is_held
        is_before_the_end = is_draining or waits_for_savepoint
        return self._settings.enabled and self._has_room() and not is_before_the_end

    def _has_room(self) -> bool:
        in_flight = len(self._pending) + len(self._uncommitted) - self._is_held
        return (
            self._is_running
            and in_flight < self._settings.in_flight_max
            and not self._has_last_completed
            and not any(pending.is_final for pending in self._pending.values())
        )

    def _next_due_at_seconds(self, now_seconds: float) -> float | None:
        interval = self._settings.interval_seconds
        if not self._is_ending and not self._is_caught_up:
            return None if interval is None else now_seconds + interval
        return now_seconds + min(FINAL_RETRY_SECONDS, interval or FINAL_RETRY_SECONDS)

    def _take_storing(self, checkpoint_id: CheckpointId) -> _Pending[Subtask, Snapshot]:
        assert self._storing == checkpoint_id, f"checkpoint {checkpoint_id} is not being stored"
        self._storing = None
        return self._pending[checkpoint_id]

    def _fail(self, pending: _Pending[Subtask, Snapshot], reason: str, now_seconds: float) -> Abort:
        """Unlike being subsumed, this counts, except of a savepoint."""
        self._close(pending, now_seconds)
        if pending.checkpoint_id == self._resting_with:
            self._resting_with = None
        failure = Abort(pending.checkpoint_id, reason)
        if pending.savepoint is None:
            self._failures_in_a_row += 1
            self._last_failure = failure
        elif self._is_ending:
            self._due_at_seconds = self._pause_over_at_seconds = now_seconds
        return failure

    def _close(self, pending: _Pending[Subtask, Snapshot], now_seconds: float) -> None:
        del self._pending[pending.checkpoint_id]
        if not self._is_ending or pending.is_final:
            # Where the records ended meanwhile, the last checkpoint follows without a pause.
            self._pause_over_at_seconds = now_seconds + self._settings.min_pause_seconds

    def _commit_overdue(self, completed: _Uncommitted[Subtask]) -> BreakAttempt:
        return BreakAttempt(
            f"{len(completed.waiting_for)} of {len(self._committing)} subtasks with sinks have not"
            f" committed checkpoint {completed.checkpoint_id} within"
            f" {self._settings.timeout_seconds:g} s:"
            f" {self._named(completed.waiting_for, None)}"
        )

    def _named(self, subtasks: Iterable[Subtask], checkpoint_id: CheckpointId | None) -> str:
        named = sorted(self._in_words(subtask, checkpoint_id) for subtask in subtasks)
        more = len(named) - _NAMED_MAX
        return "; ".join(named[:_NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")
