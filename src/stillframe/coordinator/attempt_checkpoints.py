"""The checkpoints of one attempt: triggered, stored, committed or given up, as `protocol/` decides.

Theory of operation
-------------------
`protocol/checkpoints` is told what happened and answers instructions; `_carry_out` follows them at
once, one by one. To trigger is to number, to note and to send; to store is to write the metadata
and the entry in the log (`coordinator/ledger`), and then to tell that it is there. What follows
from that, such as the commits of the sinks on the driver, comes back as mail and is told to
`protocol/checkpoints` in turn. Savepoints go the same way, past the log (`coordinator/savepoints`).

Rules of this file
------------------
1. Nothing is decided here that could be decided in `protocol/checkpoints`.
2. How the attempt ends is its own business: that a checkpoint ended or broke it is said to
   `on_outcome`, and the instructions after that are still carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stillframe.coordinator.checkpoint_news import CheckpointNews
from stillframe.coordinator.claims import settle_claim
from stillframe.coordinator.enumerators import Enumerators
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptStopped,
    CheckpointWanted,
    Outcome,
)
from stillframe.coordinator.plan_descriptions import describe_operators
from stillframe.coordinator.ports import CommitsPort, SlotsPort
from stillframe.coordinator.rescaling import RescaleFailed, RescaleWanted
from stillframe.coordinator.resting import Rest
from stillframe.coordinator.savepoints import Savepoints, SavepointWanted
from stillframe.errors import Fenced, StorageError, Unsettled
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import SubtaskRef, Task
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch
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
from stillframe.protocol.manifests import Manifest, OperatorSnapshot
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    CaughtUp,
    Committed,
    CompleteCheckpoint,
    Declined,
    Drained,
    TriggerCheckpoint,
)
from stillframe.protocol.statistics import TriggeredType

CheckpointReport = Acknowledged | Declined | Committed | Drained | CaughtUp
"""What a slot says about a checkpoint, or about the end that calls for the last one."""


class AttemptCheckpoints:
    """Carries out what `protocol/checkpoints` decides. Used by the job's thread alone."""

    def __init__(
        self,
        parts: JobParts,
        slots: SlotsPort,
        commits: CommitsPort,
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
        self._open_store = parts.open_store
        self._slots = slots
        self._commits = commits
        self._enumerators = enumerators
        self._on_outcome = on_outcome
        self._attempt = parts.ledger.attempt
        self._protocol = _protocol(parts, what_does, restored)
        self._news = CheckpointNews(parts)
        self._savepoints = Savepoints(parts.open_store)
        self._rest = Rest()
        self._triggered_at_ms: dict[CheckpointId, int] = {}
        """Of the checkpoints that are pending."""
        self._completed_before = restored.checkpoint_id if restored else NO_CHECKPOINT
        self._checkpoint_of_epoch: dict[Epoch, CheckpointId] = {}
        """Of those that the sinks here are committing."""
        self._requests: list[tuple[CheckpointId, CheckpointWanted]] = []
        self._swept = False

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
        if self._savepoints.begin(wanted):
            self._carry_out(self._protocol.request_savepoint(wanted.then, self._now()))

    def request_rest(self, wanted: RescaleWanted) -> None:
        if self._rest.is_for(wanted):
            return  # the message came twice
        if not self._protocol.can_rest:
            wanted.on_outcome(RescaleFailed("the job is not rescaled: it is about to end"))
            return
        self._rest.begin(wanted)
        self._carry_out(self._protocol.request_rest(self._now()))

    def give_up_rest(self, reason: str) -> None:
        """The attempt ends before it has rested."""
        self._rest.give_up(reason)

    def on_attempt_over(self) -> list[CheckpointWanted]:
        """A savepoint that had begun is given up; answers whom no checkpoint has answered."""
        self._savepoints.on_broken(f"attempt {self._attempt} of the job has ended")
        return [request for _, request in self._requests]

    # --- what slots and sinks say ---

    def on_report(self, report: CheckpointReport) -> None:
        match report:
            case Acknowledged(task, subtask):
                self._on_acknowledged(SubtaskRef(task, subtask), report)
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

    def _on_acknowledged(self, ref: SubtaskRef, report: Acknowledged) -> None:
        checkpoint_id = report.checkpoint_id
        if checkpoint_id not in self._savepoints:
            self._ledger.note_acknowledged(checkpoint_id, report.files())
        answer, instructions = self._protocol.on_acknowledged(checkpoint_id, ref, report)
        if answer is Answer.COUNTED:
            self._news.on_acknowledged(checkpoint_id, self._plan.tasks[ref.task], report.timings)
        self._carry_out(instructions)

    def on_epoch_committed(self, epoch: Epoch) -> None:
        """The sinks on the driver have committed it."""
        self.note_epoch(epoch)
        committed = self._checkpoint_of_epoch.pop(epoch)
        self._carry_out(self._protocol.on_coordinator_committed(committed, self._now()))

    def note_epoch(self, epoch: Epoch) -> None:
        """They have, and for this attempt it is too late to matter: the next one must know."""
        self._ledger.note_committed(self._sinks.committing_here, epoch)

    # --- what to do ---

    def _carry_out(self, instructions: Sequence[Instruction[SubtaskRef, Acknowledged]]) -> None:
        for instruction in instructions:
            match instruction:
                case Trigger(checkpoint_id, holds):
                    self._trigger(checkpoint_id, holds)
                case StoreCheckpoint(checkpoint_id, triggered_at, acknowledged):
                    self._store(checkpoint_id, triggered_at, acknowledged)
                case AnnounceComplete(checkpoint_id):
                    epoch = Epoch(self._ledger.next_epoch - 1)
                    self._slots.broadcast(CompleteCheckpoint(checkpoint_id, epoch))
                case NoteCommitted(checkpoint_id):
                    self._ledger.note_committed_everywhere(self._sinks.uids, checkpoint_id)
                    self._news.on_committed(checkpoint_id)
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
        triggered_at = self._news.on_triggered(checkpoint_id, triggered_as)
        self._triggered_at_ms[checkpoint_id] = triggered_at.wall_ms
        return triggered_at.wall_ms

    def _store(
        self,
        checkpoint_id: CheckpointId,
        triggered_at_seconds: float,
        acknowledged: Mapping[SubtaskRef, Acknowledged],
    ) -> None:
        manifest = self._manifest(checkpoint_id, acknowledged)
        try:
            completed = self._ledger.complete(manifest)
        except Unsettled as error:
            # Neither complete nor failed: only the next attempt can tell, from the log.
            self._on_outcome(AttemptBroke(str(error), "other"))
            return
        except StorageError as error:
            self._on_store_failed(checkpoint_id, error)
            return
        self._news.on_completed(manifest, completed, triggered_at_seconds)
        self._enumerators.on_completed(manifest)
        self._forget(checkpoint_id)
        # One that completes holds what older ones would have held: it answers them all.
        self._requests = [each for each in self._requests if each[0] > checkpoint_id]
        commits_here = bool(self._sinks.committing_here)
        if commits_here:
            self._checkpoint_of_epoch[manifest.epoch] = checkpoint_id
            self._commits.submit(manifest)
        self._completed_before = checkpoint_id
        settle_claim(self._ledger, self._open_store)
        self._sweep_once(manifest)
        self._carry_out(self._protocol.on_stored(checkpoint_id, commits_here, self._now()))

    def _store_savepoint(
        self, checkpoint_id: CheckpointId, acknowledged: Mapping[SubtaskRef, Acknowledged]
    ) -> None:
        manifest = self._manifest(checkpoint_id, acknowledged)
        try:
            if self._savepoints.is_last:
                # Whoever has taken the job over goes on, and commits what this one would say again.
                self._ledger.check_newest()
            self._savepoints.store(manifest)
        except Fenced as error:
            self._savepoints.on_broken(str(error))
            raise
        except StorageError as error:
            self._on_store_failed(checkpoint_id, error)
            return
        self._news.on_savepoint_completed(manifest, self._savepoints.address)
        self._forget(checkpoint_id)
        self._carry_out(self._protocol.on_savepoint_stored(checkpoint_id, self._now()))

    def _on_store_failed(self, checkpoint_id: CheckpointId, error: StorageError) -> None:
        self._carry_out(self._protocol.on_store_failed(checkpoint_id, str(error), self._now()))

    def _abort(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._news.on_aborted(checkpoint_id, reason)
        self._slots.broadcast(AbortCheckpoint(checkpoint_id))
        if checkpoint_id in self._savepoints:
            self._savepoints.on_failed(reason)
        else:
            self._ledger.discard(checkpoint_id)
        self._forget(checkpoint_id)
        self._requests = [each for each in self._requests if each[0] != checkpoint_id]
        self._rest.on_aborted(checkpoint_id, reason)

    def _forget(self, decided: CheckpointId) -> None:
        """It is not pending any more."""
        del self._triggered_at_ms[decided]
        self._enumerators.forget(decided)

    def _sweep_once(self, manifest: Manifest) -> None:
        """A slot of the attempt before may have written on for seconds after its end."""
        if not self._swept:
            self._swept = True
            self._ledger.sweep(Attempt(self._attempt - 1))
            self._sinks.sweep(self._attempt, manifest)

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
            epoch=self._ledger.next_epoch,
            kind="checkpoint",
            triggered_at_ms=self._triggered_at_ms[checkpoint_id],
            completed_at_ms=self._clock.wall_ms(),
            max_parallelism=plan.max_parallelism,
            operators=describe_operators(plan),
            snapshots=tuple(
                self._without_committed(part) for report in reports for part in report.operators
            ),
            timings=tuple(report.timings for report in reports),
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
