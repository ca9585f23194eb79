"""The checkpoints of one attempt: triggered, stored, committed or given up, as `protocol/` decides.

Theory of operation
-------------------
`protocol/checkpoints` is told what happened and answers instructions; `_carry_out` follows them at
once, one by one. To trigger is to number, to note and to send; to store is to have the metadata and
the entry in the log written, by a letter to whoever owns the ledger meanwhile. What became of it,
and what follows from it, such as the commits of the sinks on the driver, comes back as mail and is
told to `protocol/checkpoints` in turn. What nobody needs from then on goes later
(`coordinator/deletions`). Savepoints go the same way, past the log (`coordinator/savepoints`).

Rules of this file
------------------
1. Nothing is decided here that could be decided in `protocol/checkpoints`.
2. How the attempt ends is its own business: that a checkpoint ended or broke it is said to
   `on_outcome`, and the instructions after that are still carried out.
3. Nothing here waits for the store or reads the ledger's record, which is another thread's: which
   epoch is next is known by what was stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stillframe.coordinator.completed import completed
from stillframe.coordinator.deletions import Deletions
from stillframe.coordinator.enumerators import Enumerators
from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointFailed,
    SavepointCompleted,
)
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger_mail import (
    LedgerEvent,
    LedgerFailed,
    SavepointEmptied,
    SavepointOpened,
    SavepointRefused,
    SavepointStored,
    Stored,
    StoreFailed,
)
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptStopped,
    CheckpointWanted,
    Outcome,
)
from stillframe.coordinator.plan_descriptions import (
    describe_operators,
    shapes_of,
    vertex_of,
)
from stillframe.coordinator.ports import CommitsPort, LedgerPort, SlotsPort
from stillframe.coordinator.rescaling import RescaleFailed, RescaleWanted
from stillframe.coordinator.resting import Rest
from stillframe.coordinator.savepoints import Savepoints, SavepointWanted
from stillframe.errors import SnapshotDamaged, StorageError, Unsettled, UserCodeError
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import SubtaskRef, Task
from stillframe.ids import NO_CHECKPOINT, CheckpointId, Epoch
from stillframe.protocol import messages
from stillframe.protocol.checkpoints import (
    Abort,
    AnnounceComplete,
    BreakAttempt,
    Checkpoints,
    CheckpointSettings,
    EndSources,
    Finish,
    Instruction,
    LetGo,
    NoteCommitted,
    Stop,
    StoreCheckpoint,
    StoreSavepoint,
    Trigger,
    TriggerSavepoint,
)
from stillframe.protocol.checkpoints import Acknowledged as Answer
from stillframe.protocol.figures import Triggered
from stillframe.protocol.manifests import Manifest, OperatorSnapshot, SubtaskTimings
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    CaughtUp,
    Committed,
    CompleteCheckpoint,
    Declined,
    Drained,
    TriggerCheckpoint,
    cause_of,
)
from stillframe.protocol.statistics import SlotPlace, TriggeredType

log = logging.getLogger("stillframe")

CheckpointReport = Acknowledged | Declined | Committed | Drained | CaughtUp
"""What a slot says about a checkpoint, or about the end that calls for the last one."""


class AttemptCheckpoints:
    """Carries out what `protocol/checkpoints` decides. Used by the job's thread alone."""

    def __init__(
        self,
        parts: JobParts,
        slots: SlotsPort,
        commits: CommitsPort,
        store: LedgerPort,
        restored: Manifest | None,
        enumerators: Enumerators,
        on_outcome: Callable[[Outcome], None],
        what_does: Callable[[SubtaskRef, CheckpointId], str] = lambda ref, checkpoint_id: "",
    ) -> None:
        """`what_does` tells how far a subtask is with a checkpoint, in words."""
        self._plan = parts.plan
        self._clock = parts.clock
        self._alignment_timeout_ms = parts.config.alignment_timeout_ms
        self._sinks = parts.sinks
        self._ledger = parts.ledger
        self._slots = slots
        self._commits = commits
        self._store = store
        self._enumerators = enumerators
        self._on_outcome = on_outcome
        self._attempt = parts.ledger.attempt
        self._protocol = _protocol(parts, what_does, restored)
        self._history = parts.history
        self._shapes = shapes_of(parts.plan)
        self._senders = {
            edge.name: parts.plan.tasks[edge.source_task].name for edge in parts.plan.edges
        }
        self._savepoints = Savepoints(parts.open_store, store)
        self._deletions = Deletions(parts, store)
        self._rest = Rest()
        self._triggered_at_ms: dict[CheckpointId, int] = {}
        """Of the checkpoints that are pending."""
        self._completed_before = restored.checkpoint_id if restored else NO_CHECKPOINT
        self._checkpoint_of_epoch: dict[Epoch, CheckpointId] = {}
        """Of those that the sinks here are committing."""
        self._requests: list[tuple[CheckpointId, CheckpointWanted]] = []
        self._next_epoch = parts.ledger.next_epoch
        self._storing: tuple[Manifest, float, tuple[SubtaskTimings, ...]] | None = None
        """What is being stored, or was last, and when it was triggered."""

    def wake_at_seconds(self) -> float | None:
        return self._protocol.wake_at_seconds()

    def on_time(self, now_seconds: float) -> None:
        self._carry_out(self._protocol.on_time(now_seconds))

    def on_running(self) -> None:
        """Every slot runs."""
        self._carry_out(self._protocol.on_running(self._now()))

    # --- what people ask for ---

    @property
    def is_rest_wanted(self) -> bool:
        """Whether the attempt is about to rest, so that savepoints have to wait."""
        return self._rest.is_wanted

    def request(self, wanted: CheckpointWanted) -> None:
        # One that is under way does not count: it holds less than was read until now.
        wanted.on_numbered(self._protocol.next_id)
        self.keep_request(wanted)
        self._carry_out(self._protocol.request(self._now()))

    def keep_request(self, wanted: CheckpointWanted) -> None:
        """The next checkpoint will answer it, in this attempt or in the one that follows."""
        self._requests.append((self._protocol.next_id, wanted))

    def request_savepoint(self, wanted: SavepointWanted) -> None:
        self._savepoints.begin(wanted)

    def _on_opened(self, opened: SavepointOpened) -> None:
        then = self._savepoints.on_opened(opened.store)
        self._carry_out(self._protocol.request_savepoint(then, self._now()))

    def postpone_savepoint(self) -> SavepointWanted:
        """The attempt is to rest before the savepoint, for which nothing was done yet, is taken."""
        return self._savepoints.postpone()

    def request_rest(self, wanted: RescaleWanted) -> None:
        if self._rest.is_for(wanted):
            return  # the message came twice
        if not self._protocol.can_rest:
            wanted.on_outcome(RescaleFailed(f"{wanted.not_done}: it is about to end"))
            return
        self._rest.begin(wanted)
        self._carry_out(self._protocol.request_rest(self._now()))

    def give_up_rest(self, reason: str) -> None:
        """The attempt ends before it has rested."""
        self._rest.give_up(reason)

    def give_up_savepoint(self) -> None:
        """The attempt ends before it is taken, if one had begun."""
        self._savepoints.on_broken(f"attempt {self._attempt} of the job has ended")

    def unanswered_requests(self) -> list[CheckpointWanted]:
        return [request for _, request in self._requests]

    def on_port_closed(self) -> None:
        """Nothing more is written or deleted for this attempt."""
        self._savepoints.on_port_closed()

    # --- what slots and sinks say ---

    def on_report(self, report: CheckpointReport, place: SlotPlace | None = None) -> None:
        """`place`: of the slot that says so."""
        match report:
            case Acknowledged(task, subtask):
                self._on_acknowledged(SubtaskRef(task, subtask), report, place)
            case Declined(checkpoint_id, reason):
                self._carry_out(self._protocol.on_declined(checkpoint_id, reason, self._now()))
            case Committed(task, subtask, checkpoint_id):
                ref = SubtaskRef(task, subtask)
                self._carry_out(self._protocol.on_committed(checkpoint_id, ref, self._now()))
            case Drained(task, subtask):
                ref = SubtaskRef(task, subtask)
                self._carry_out(self._protocol.on_drained(ref, self._now()))
            case CaughtUp(task, subtask):
                ref = SubtaskRef(task, subtask)
                self._carry_out(self._protocol.on_caught_up(ref, self._now()))

    def _on_acknowledged(
        self, ref: SubtaskRef, report: Acknowledged, place: SlotPlace | None
    ) -> None:
        checkpoint_id = report.checkpoint_id
        if checkpoint_id not in self._savepoints:
            self._deletions.on_acknowledged(checkpoint_id, report.files())
        answer, instructions = self._protocol.on_acknowledged(checkpoint_id, ref, report)
        if answer is Answer.COUNTED:
            vertex = vertex_of(self._plan.tasks[ref.task])
            self._history.note_acknowledged(checkpoint_id, vertex, report.timings, place)
        self._carry_out(instructions)

    def on_epoch_committed(self, epoch: Epoch) -> None:
        """The sinks on the driver have committed it."""
        self.note_epoch(epoch)
        committed = self._checkpoint_of_epoch.pop(epoch)
        self._carry_out(self._protocol.on_coordinator_committed(committed, self._now()))

    def note_epoch(self, epoch: Epoch) -> None:
        """They have, and for this attempt it is too late to matter: the next one must know."""
        here = self._sinks.committing_here
        self._store.write(partial(self._ledger.note_committed, here, epoch))

    # --- what becomes of letters to the store ---

    def on_ledger(self, event: LedgerEvent) -> None:
        match event:
            case Stored():
                self._on_stored(event)
            case StoreFailed(checkpoint_id, reason):
                self._carry_out(self._protocol.on_store_failed(checkpoint_id, reason, self._now()))
            case SavepointOpened():
                self._on_opened(event)
            case SavepointRefused(reason):
                self._savepoints.on_refused(reason)
            case SavepointStored(checkpoint_id):
                self._on_savepoint_stored(checkpoint_id)
            case SavepointEmptied(address):
                self._savepoints.on_emptied(address)
            case LedgerFailed(error):
                self._on_ledger_failed(error)

    def on_ledger_late(self, event: LedgerEvent) -> None:
        """The attempt is over. What came to exist counts; nothing new begins."""
        self._protocol.on_over()
        if isinstance(event, LedgerFailed):
            log.warning("a letter to the store failed as the attempt ended: %s", event.error)
        if not isinstance(event, SavepointOpened):
            self.on_ledger(event)

    def _on_ledger_failed(self, error: Exception) -> None:
        """Only a new attempt can mend it, or (it raises) not even that."""
        if isinstance(error, UserCodeError):
            self._on_outcome(AttemptBroke(str(error), cause_of(error), blame=error.blame))
        elif isinstance(error, StorageError | Unsettled) and not isinstance(error, SnapshotDamaged):
            # Unsettled: neither complete nor failed, and only the next attempt can tell.
            self._on_outcome(AttemptBroke(str(error), "other"))
        else:
            self._savepoints.on_broken(str(error))
            raise error

    # --- what to do ---

    def _carry_out(self, instructions: Sequence[Instruction[SubtaskRef, Acknowledged]]) -> None:
        for instruction in instructions:
            match instruction:
                case Trigger(checkpoint_id, holds):
                    self._trigger(checkpoint_id, holds)
                case StoreCheckpoint(checkpoint_id, triggered_at, acknowledged):
                    self._store_checkpoint(checkpoint_id, triggered_at, acknowledged)
                case AnnounceComplete():
                    self._announce()
                case NoteCommitted(checkpoint_id):
                    noted = self._ledger.note_committed_everywhere
                    self._store.write(partial(noted, self._sinks.uids, checkpoint_id))
                    self._history.tell(CheckpointCommitted(checkpoint_id))
                case Abort(checkpoint_id, reason):
                    self._abort(checkpoint_id, reason)
                case BreakAttempt(reason):
                    self._on_outcome(AttemptBroke(reason, "other"))
                case EndSources():
                    self._slots.broadcast(messages.EndSources())
                case TriggerSavepoint(checkpoint_id, holds):
                    self._trigger_savepoint(checkpoint_id, holds)
                case StoreSavepoint(checkpoint_id, acknowledged):
                    self._store_savepoint(checkpoint_id, acknowledged)
                case LetGo(checkpoint_id):
                    self._slots.broadcast(AbortCheckpoint(checkpoint_id))
                case Finish():
                    self._on_outcome(AttemptFinished())
                case Stop() if self._rest.is_wanted:
                    self._on_outcome(self._rest.rested())
                case Stop():
                    self._on_outcome(AttemptStopped())

    def _trigger(self, checkpoint_id: CheckpointId, holds: bool) -> None:
        triggered_at_ms = self._note_triggered(checkpoint_id, "CHECKPOINT")
        timeout_ms = self._alignment_timeout_ms
        if holds:
            # Without a timeout: nothing comes behind the barriers, so they are not waited for long,
            # and what they would overtake would have to be sorted out among other channels.
            timeout_ms = None
            self._rest.on_triggered(checkpoint_id, self._now())
        self._slots.broadcast(
            TriggerCheckpoint(checkpoint_id, triggered_at_ms, timeout_ms, holds=holds)
        )

    def _trigger_savepoint(self, checkpoint_id: CheckpointId, holds: bool) -> None:
        address = self._savepoints.on_triggered(checkpoint_id)
        triggered_as: TriggeredType = "SYNC_SAVEPOINT" if self._savepoints.is_last else "SAVEPOINT"
        triggered_at_ms = self._note_triggered(checkpoint_id, triggered_as)
        # Without a timeout: what is under way would have to fit the channels of another job.
        self._slots.broadcast(
            TriggerCheckpoint(checkpoint_id, triggered_at_ms, None, address, holds)
        )

    def _note_triggered(self, checkpoint_id: CheckpointId, triggered_as: TriggeredType) -> int:
        self._ledger.note_used(checkpoint_id)
        self._enumerators.on_triggered(checkpoint_id)
        triggered_at = self._history.now()
        self._history.note_triggered(
            Triggered(
                checkpoint_id,
                self._attempt,
                triggered_as,
                self._shapes,
                triggered_at,
                self._senders,
            )
        )
        self._triggered_at_ms[checkpoint_id] = triggered_at.wall_ms
        return triggered_at.wall_ms

    def _store_checkpoint(
        self,
        checkpoint_id: CheckpointId,
        triggered_at_seconds: float,
        acknowledged: Mapping[SubtaskRef, Acknowledged],
    ) -> None:
        manifest = self._manifest(checkpoint_id, acknowledged)
        self._deletions.check(manifest)
        told = tuple(report.timings for report in acknowledged.values())
        self._storing = manifest, triggered_at_seconds, told
        self._store.write(partial(self._ledger.store, manifest))

    def _on_stored(self, stored: Stored) -> None:
        assert self._storing is not None
        manifest, triggered_at_seconds, told = self._storing
        checkpoint_id = manifest.checkpoint_id
        self._next_epoch = Epoch(manifest.epoch + 1)
        self._history.tell(
            completed(
                manifest,
                stored.completed,
                (self._now() - triggered_at_seconds) * 1000,
                self._history.records_of_attempt(),
                self._ledger.store_address,
                told,
            )
        )
        self._forget(checkpoint_id)
        # One that completes holds what older ones would have held: it answers them all.
        self._requests = [each for each in self._requests if each[0] > checkpoint_id]
        self._completed_before = checkpoint_id
        self._deletions.on_stored(manifest, stored)
        commits_here = bool(self._sinks.committing_here)
        self._carry_out(self._protocol.on_stored(checkpoint_id, commits_here, self._now()))

    def _announce(self) -> None:
        """To sinks and enumerators here, and to the slots: what was stored is complete."""
        assert self._storing is not None
        manifest, *_ = self._storing
        if self._sinks.committing_here:
            self._checkpoint_of_epoch[manifest.epoch] = manifest.checkpoint_id
            self._commits.submit(manifest)
        self._slots.broadcast(CompleteCheckpoint(manifest.checkpoint_id, manifest.epoch))
        self._enumerators.on_completed(manifest)

    def _store_savepoint(
        self, checkpoint_id: CheckpointId, acknowledged: Mapping[SubtaskRef, Acknowledged]
    ) -> None:
        manifest = self._manifest(checkpoint_id, acknowledged)
        self._storing = manifest, 0.0, ()
        self._savepoints.store(manifest, self._ledger.check_newest)

    def _on_savepoint_stored(self, checkpoint_id: CheckpointId) -> None:
        assert self._storing is not None
        manifest, *_ = self._storing
        told = SavepointCompleted(checkpoint_id, self._savepoints.address, manifest.state_bytes())
        self._history.tell(told)
        self._savepoints.on_stored()
        self._forget(checkpoint_id)
        self._carry_out(self._protocol.on_savepoint_stored(checkpoint_id, self._now()))

    def _abort(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._history.tell(CheckpointFailed(checkpoint_id, reason))
        self._slots.broadcast(AbortCheckpoint(checkpoint_id))
        if checkpoint_id in self._savepoints:
            self._savepoints.on_failed(reason)
        else:
            self._deletions.on_aborted(checkpoint_id)
        self._forget(checkpoint_id)
        self._requests = [each for each in self._requests if each[0] != checkpoint_id]
        self._rest.on_aborted(checkpoint_id, reason)

    def _forget(self, decided: CheckpointId) -> None:
        """It is not pending any more."""
        del self._triggered_at_ms[decided]
        self._enumerators.forget(decided)

    # --- what the metadata says ---

    def _manifest(
        self, checkpoint_id: CheckpointId, acknowledged: Mapping[SubtaskRef, Acknowledged]
    ) -> Manifest:
        plan = self._plan
        reports = [acknowledged[ref] for ref in sorted(acknowledged)]
        return Manifest(
            job=plan.job,
            attempt=self._attempt,
            checkpoint_id=checkpoint_id,
            epoch=self._next_epoch,
            kind="checkpoint",
            triggered_at_ms=self._triggered_at_ms[checkpoint_id],
            completed_at_ms=self._clock.wall_ms(),
            max_parallelism=plan.max_parallelism,
            operators=describe_operators(plan),
            snapshots=tuple(
                self._without_committed(part) for report in reports for part in report.operators
            ),
            timings=tuple(report.timings.kept() for report in reports),
            channels=tuple(channel for report in reports for channel in report.channels),
            enumerators=self._enumerators.at_trigger(checkpoint_id),
        )

    def _without_committed(self, part: OperatorSnapshot) -> OperatorSnapshot:
        """What the coordinator's own sinks still have to commit.

        A barrier may reach a slot before the news that the checkpoint before it is complete; the
        slot then still holds what that one has committed. (It has: this one is not stored sooner.)
        """
        if part.uid not in self._sinks.committing_here:
            return part
        unseen = (kept for kept in part.commits if kept.checkpoint_id > self._completed_before)
        return replace(part, commits=tuple(unseen))

    def _now(self) -> float:
        return self._clock.monotonic_seconds()


def _protocol(
    parts: JobParts,
    what_does: Callable[[SubtaskRef, CheckpointId], str],
    restored: Manifest | None,
) -> Checkpoints[SubtaskRef, Acknowledged]:
    config, tasks = parts.config, parts.plan.tasks

    def in_words(ref: SubtaskRef, checkpoint_id: CheckpointId | None) -> str:
        doing = "" if checkpoint_id is None else what_does(ref, checkpoint_id)
        return f"{tasks[ref.task].name} ({ref.subtask}){f': {doing}' if doing else ''}"

    settings = CheckpointSettings(
        interval_seconds=config.checkpoint_interval_seconds,
        timeout_seconds=config.checkpoint_timeout_seconds,
        min_pause_seconds=config.checkpoint_min_pause_seconds,
        enabled=parts.ledger.keeps_checkpoints,
        max_concurrent=config.max_concurrent_checkpoints,
        tolerable_failures=config.tolerable_failed_checkpoints,
    )
    committing = [
        ref for task in parts.plan.tasks if _commits_in_slots(task) for ref in task.subtasks()
    ]
    sources = [ref for task in parts.plan.tasks if _reads(task) for ref in task.subtasks()]
    return Checkpoints(
        settings,
        parts.plan.subtasks(),
        committing,
        parts.ledger.first_free_id,
        sources if config.available_now else (),
        in_words,
        # A savepoint is no checkpoint of the job, so there is nothing of it to commit.
        restored.checkpoint_id if restored and restored.checkpoint_id != NO_CHECKPOINT else None,
    )


def _reads(task: Task) -> bool:
    return any(isinstance(planned.operator, Read) for planned in task.operators)


def _commits_in_slots(task: Task) -> bool:
    return any(
        isinstance(planned.operator, Write) and not planned.operator.sink.commits_at_coordinator
        for planned in task.operators
    )
