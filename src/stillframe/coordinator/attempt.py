"""One attempt: starts the slots, runs the checkpoints, and says how it ended.

Theory of operation
-------------------
Everything that happens (a slot joins, reports or is lost; the slots have ended; an epoch is
committed; a person asks for something) is an event in one mailbox, handled by the job's thread
alone. `protocol/checkpoints` decides; this file carries it out.

An attempt ends as soon as its first slot is lost. The first news of a loss is often not the best:
a slot that fails takes its peers' connections with it, and their complaints may arrive first. So
the attempt listens a moment longer and then reports the reason that explains the most.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.control import (
    ControlServer,
    SlotJoined,
    SlotLost,
    SlotReported,
)
from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    History,
    SlotsRunning,
)
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptStopped,
    CheckpointWanted,
    Mail,
    Outcome,
    SlotsEnded,
    StopWanted,
)
from stillframe.coordinator.sinks import CommitFailed, CommitThread, DriverSinks, EpochCommitted
from stillframe.errors import StorageError
from stillframe.graph.launch import Deployment, RunningSlots, SlotLaunch
from stillframe.graph.logical import Write
from stillframe.graph.plan import Plan, SubtaskRef, Task, describe
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch, SlotIndex
from stillframe.protocol.checkpoints import (
    Abort,
    AnnounceComplete,
    BreakAttempt,
    Checkpoints,
    CheckpointSettings,
    Finish,
    Instruction,
    NoteCommitted,
    StoreCheckpoint,
    Trigger,
)
from stillframe.protocol.manifests import Manifest, OperatorDescription, OperatorSnapshot
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    Committed,
    CompleteCheckpoint,
    Declined,
    Drained,
    EndSlot,
    Failed,
    FailureCause,
    Progress,
    Running,
    StartSlot,
    StillThere,
    TriggerCheckpoint,
)
from stillframe.protocol.restore import StartingState
from stillframe.wire import Address

_JOIN_SECONDS_MAX = 120.0
_END_SECONDS_MAX = 30.0
_CANCEL_SECONDS_MAX = 60.0
_STILL_THERE_SECONDS = 5.0
_BETTER_REASON_SECONDS = 0.5
_WAIT_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """Where slots reach the coordinator; it may listen on another address than they dial."""

    host: str
    bind_host: str | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What outlives an attempt."""

    plan: Plan
    config: JobConfig
    deployment: Deployment
    secret: bytes
    driver: DriverAddress
    clock: Clock
    history: History
    sinks: DriverSinks
    ledger: Ledger
    mailbox: queue.Queue[Mail]


class RunningAttempt:
    """Runs on the job's thread, from launch to outcome."""

    def __init__(
        self,
        around: Surroundings,
        restored: Manifest | None,
        state: StartingState,
    ) -> None:
        self._around = around
        self._ledger = around.ledger
        self._restored = restored
        self._state = state
        self._attempt = around.ledger.attempt
        self._joined: dict[SlotIndex, SlotJoined] = {}
        self._running: set[SlotIndex] = set()
        self._checkpoints = _checkpoints(around)
        self._triggered_at_ms = 0
        self._completed_before = restored.checkpoint_id if restored else NO_CHECKPOINT
        self._complained: set[SlotIndex] = set()
        self._requests: list[tuple[CheckpointId, CheckpointWanted]] = []
        """Those that no checkpoint has answered yet; the next attempt gets them."""
        self._outcome: Outcome | None = None
        self._slots_ended = False
        self._swept = False
        self._still_there_at = 0.0
        self._commits = CommitThread(around.sinks, around.mailbox.put)
        self._server = ControlServer(
            around.driver.bind_host or around.driver.host,
            around.secret,
            around.plan.job,
            self._attempt,
            around.plan.slots,
            around.mailbox.put,
        )

    def run(self) -> Outcome:
        """Launch the slots and see the attempt through; when it returns none of them runs."""
        launch = SlotLaunch(
            plan=self._around.plan,
            attempt=self._attempt,
            coordinator=Address(self._around.driver.host, self._server.port),
            secret=self._around.secret,
            store_address=self._ledger.store_address,
            channel_buffer_bytes=self._around.config.channel_buffer_bytes,
        )
        slots: RunningSlots | None = None
        try:
            slots = self._around.deployment.launch(
                launch, lambda reason: self._around.mailbox.put(SlotsEnded(self._attempt, reason))
            )
            self._serve()
        finally:
            self._end(slots)
        assert self._outcome is not None
        return self._outcome

    # --- the loop ---

    def _serve(self) -> None:
        join_deadline = self._now() + _JOIN_SECONDS_MAX
        while self._outcome is None:
            mail = self._next_mail()
            if mail is not None:
                self._handle(mail)
            now = self._now()
            self._carry_out(self._checkpoints.on_time(now))
            missing = sorted(set(range(self._around.plan.slots)) - self._running)
            if missing and now > join_deadline:
                self._break(
                    f"slots {missing} did not come up within {_JOIN_SECONDS_MAX:g} s", "other"
                )
            if now >= self._still_there_at:
                self._server.broadcast(StillThere())
                self._still_there_at = now + _STILL_THERE_SECONDS

    def _next_mail(self) -> Mail | None:
        wait = _WAIT_SECONDS_MAX
        wake_at = self._checkpoints.wake_at_seconds()
        if wake_at is not None:
            wait = min(wait, max(0.0, wake_at - self._now()))
        try:
            return self._around.mailbox.get(timeout=wait)
        except queue.Empty:
            return None

    def _handle(self, mail: Mail) -> None:
        match mail:
            case SlotJoined():
                self._on_joined(mail)
            case SlotReported(slot, report):
                self._on_report(slot, report)
            case SlotLost(slot, reason):
                self._break(self._loss(slot, reason), "bystander")
            case SlotsEnded(attempt, reason) if attempt == self._attempt:
                self._slots_ended = True
                self._break(reason or "the slots returned before the job was over", "other")
            case EpochCommitted(epoch):
                self._on_epoch_committed(epoch)
            case CommitFailed(reason, is_permanent):
                self._break(reason, "permanent" if is_permanent else "other")
            case CheckpointWanted(on_numbered):
                # One that is under way does not count: it holds less than was read until now.
                on_numbered(self._checkpoints.next_id)
                self._keep_request(mail)
                self._carry_out(self._checkpoints.request(self._now()))
            case StopWanted():
                self._outcome = AttemptStopped()

    def _break(self, reason: str, cause: FailureCause) -> None:
        """Note the failure, then listen a moment for a reason that explains more."""
        if self._outcome is not None:
            return
        best = AttemptBroke(reason, cause)
        deadline = self._now() + _BETTER_REASON_SECONDS
        while best.cause == "bystander" and (left := deadline - self._now()) > 0:
            try:
                mail = self._around.mailbox.get(timeout=left)
            except queue.Empty:
                break
            match mail:
                case SlotReported(slot, Failed(said, why)):
                    self._complained.add(slot)
                    best = best if why == "bystander" else AttemptBroke(said, why)
                case SlotLost(slot, said) if slot not in self._complained:
                    best = AttemptBroke(self._loss(slot, said), "bystander")
                case SlotsEnded(attempt, said) if attempt == self._attempt:
                    self._slots_ended = True
                    if said and len(self._joined) < self._around.plan.slots:
                        best = AttemptBroke(said, "other")  # of one that never came to speak
                case EpochCommitted(epoch):
                    self._note_epoch(epoch)
                case CheckpointWanted():
                    self._keep_request(mail)
                case StopWanted():
                    self._outcome = AttemptStopped()
                    return
        self._outcome = best

    def _loss(self, slot: SlotIndex, reason: str) -> str:
        return f"slot {slot} (pid {self._joined[slot].pid}) was lost: {reason}"

    def _end(self, slots: RunningSlots | None) -> None:
        """Leave nothing running: slots are told, then cut off, then ended by force."""
        all_joined = len(self._joined) == self._around.plan.slots
        if all_joined and isinstance(self._outcome, AttemptFinished | AttemptStopped):
            self._server.broadcast(EndSlot())
            self._await_slots_ended(_END_SECONDS_MAX)
        self._server.close()
        if slots is not None and not self._slots_ended:
            slots.cancel()
            self._await_slots_ended(_CANCEL_SECONDS_MAX)
        self._commits.finish()
        self._drain_mailbox()
        for _, request in self._requests:
            self._around.mailbox.put(request)

    def _keep_request(self, request: CheckpointWanted) -> None:
        self._requests.append((self._checkpoints.next_id, request))

    def _forget_requests(self, decided: CheckpointId) -> None:
        self._requests = [(number, kept) for number, kept in self._requests if number > decided]

    def _await_slots_ended(self, seconds_max: float) -> None:
        deadline = self._now() + seconds_max
        while not self._slots_ended and (left := deadline - self._now()) > 0:
            try:
                self._after_the_end(self._around.mailbox.get(timeout=left))
            except queue.Empty:
                return

    def _drain_mailbox(self) -> None:
        while True:
            try:
                self._after_the_end(self._around.mailbox.get_nowait())
            except queue.Empty:
                return

    def _after_the_end(self, mail: Mail) -> None:
        """Of what comes late, only what concerns the job rather than the attempt matters."""
        match mail:
            case SlotsEnded(attempt) if attempt == self._attempt:
                self._slots_ended = True
            case EpochCommitted(epoch):
                self._note_epoch(epoch)
            case StopWanted():
                if isinstance(self._outcome, AttemptBroke):
                    self._outcome = AttemptStopped()
            case CheckpointWanted():
                self._keep_request(mail)
            case SlotReported(slot, Progress(records_in, records_out)):
                self._around.history.report_progress(slot, records_in, records_out)

    # --- slots ---

    def _on_joined(self, joined: SlotJoined) -> None:
        self._joined[joined.slot] = joined
        if len(self._joined) < self._around.plan.slots:
            return
        peers = {slot: mate.data_address for slot, mate in self._joined.items()}
        for slot in self._joined:
            self._server.send(
                slot,
                StartSlot(
                    peers=peers,
                    state={ref: part for ref, part in self._state.items() if int(ref[1]) == slot},
                    restored_checkpoint=self._restored.checkpoint_id if self._restored else None,
                    restored_epoch=self._restored.epoch if self._restored else None,
                ),
            )

    def _on_report(self, slot: SlotIndex, report: object) -> None:
        checkpoints = self._checkpoints
        match report:
            case Running():
                self._on_running(slot)
            case Progress(records_in, records_out):
                self._around.history.report_progress(slot, records_in, records_out)
            case Failed(reason, cause):
                self._complained.add(slot)
                self._break(reason, cause)
            case Acknowledged(task, subtask, checkpoint_id):
                ref = SubtaskRef(task, subtask)
                _, instructions = checkpoints.on_acknowledged(checkpoint_id, ref, report)
                self._carry_out(instructions)
            case Declined(checkpoint_id, reason):
                self._carry_out(checkpoints.on_declined(checkpoint_id, reason, self._now()))
            case Committed(task, subtask, checkpoint_id):
                ref = SubtaskRef(task, subtask)
                self._carry_out(checkpoints.on_committed(checkpoint_id, ref, self._now()))
            case Drained(task, subtask):
                ref = SubtaskRef(task, subtask)
                self._carry_out(checkpoints.on_drained(ref, self._now()))

    def _on_running(self, slot: SlotIndex) -> None:
        self._running.add(slot)
        if len(self._running) < self._around.plan.slots:
            return
        pids = tuple(self._joined[SlotIndex(i)].pid for i in range(self._around.plan.slots))
        self._around.history.tell(SlotsRunning(self._attempt, pids))
        self._carry_out(self._checkpoints.on_running(self._now()))

    # --- checkpoints ---

    def _carry_out(self, instructions: Sequence[Instruction[SubtaskRef, Acknowledged]]) -> None:
        for instruction in instructions:
            match instruction:
                case Trigger(checkpoint_id):
                    self._trigger(checkpoint_id)
                case StoreCheckpoint(checkpoint_id, triggered_at, acknowledged):
                    self._store(checkpoint_id, triggered_at, acknowledged)
                case AnnounceComplete(checkpoint_id):
                    epoch = Epoch(self._ledger.next_epoch - 1)
                    self._server.broadcast(CompleteCheckpoint(checkpoint_id, epoch))
                case NoteCommitted(checkpoint_id):
                    self._around.history.tell(CheckpointCommitted(checkpoint_id))
                case Abort(checkpoint_id, reason):
                    self._abort(checkpoint_id, reason)
                case BreakAttempt(reason):
                    self._break(reason, "other")
                case Finish():
                    self._outcome = AttemptFinished()

    def _trigger(self, checkpoint_id: CheckpointId) -> None:
        self._ledger.note_used(checkpoint_id)
        self._triggered_at_ms = self._around.clock.wall_ms()
        self._server.broadcast(TriggerCheckpoint(checkpoint_id, self._triggered_at_ms))

    def _store(
        self,
        checkpoint_id: CheckpointId,
        triggered_at_seconds: float,
        acknowledged: Mapping[SubtaskRef, Acknowledged],
    ) -> None:
        manifest = self._manifest(checkpoint_id, acknowledged)
        try:
            completed = self._ledger.complete(manifest)
        except StorageError as error:
            self._carry_out(
                self._checkpoints.on_store_failed(checkpoint_id, str(error), self._now())
            )
            return
        records_in, records_out = self._around.history.records_of_attempt()
        self._around.history.tell(
            CheckpointCompleted(
                checkpoint_id=checkpoint_id,
                epoch=manifest.epoch,
                attempt=self._attempt,
                triggered_at_ms=manifest.triggered_at_ms,
                duration_ms=(self._now() - triggered_at_seconds) * 1000,
                state_bytes=manifest.state_bytes() + completed.manifest_length_bytes,
                timings=manifest.timings,
                records_in=records_in,
                records_out=records_out,
            )
        )
        self._forget_requests(checkpoint_id)
        commits_here = bool(self._around.sinks.committing_here)
        if commits_here:
            self._commits.submit(manifest)
        self._completed_before = checkpoint_id
        self._sweep_once(manifest)
        self._carry_out(self._checkpoints.on_stored(checkpoint_id, commits_here, self._now()))

    def _manifest(
        self, checkpoint_id: CheckpointId, acknowledged: Mapping[SubtaskRef, Acknowledged]
    ) -> Manifest:
        plan = self._around.plan
        reports = [acknowledged[ref] for ref in sorted(acknowledged)]
        return Manifest(
            job=plan.job,
            attempt=self._attempt,
            checkpoint_id=checkpoint_id,
            epoch=self._ledger.next_epoch,
            kind="checkpoint",
            triggered_at_ms=self._triggered_at_ms,
            completed_at_ms=self._around.clock.wall_ms(),
            max_parallelism=plan.max_parallelism,
            operators=describe_operators(plan),
            snapshots=tuple(
                self._without_committed(part) for report in reports for part in report.operators
            ),
            timings=tuple(report.timings for report in reports),
        )

    def _without_committed(self, part: OperatorSnapshot) -> OperatorSnapshot:
        """What the coordinator's own sinks still have to commit.

        A barrier may reach a slot before the news that the checkpoint before it is complete; the
        slot then still holds what that one has committed.
        """
        if part.uid not in self._around.sinks.committing_here:
            return part
        unseen = (kept for kept in part.commits if kept.checkpoint_id > self._completed_before)
        return replace(part, commits=tuple(unseen))

    def _abort(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._around.history.tell(CheckpointFailed(checkpoint_id, reason))
        self._server.broadcast(AbortCheckpoint(checkpoint_id))
        self._ledger.discard(checkpoint_id)
        self._forget_requests(checkpoint_id)

    def _sweep_once(self, manifest: Manifest) -> None:
        """A slot of the attempt before may have written on for seconds after its end."""
        if not self._swept:
            self._swept = True
            self._ledger.sweep(Attempt(self._attempt - 1))
            self._around.sinks.sweep(self._attempt, manifest)

    def _on_epoch_committed(self, epoch: Epoch) -> None:
        self._note_epoch(epoch)
        self._carry_out(self._checkpoints.on_coordinator_committed(self._now()))

    def _note_epoch(self, epoch: Epoch) -> None:
        self._ledger.note_committed(self._around.sinks.committing_here, epoch)

    def _now(self) -> float:
        return self._around.clock.monotonic_seconds()


def _checkpoints(around: Surroundings) -> Checkpoints[SubtaskRef, Acknowledged]:
    config = around.config
    settings = CheckpointSettings(
        interval_seconds=config.checkpoint_interval_seconds,
        timeout_seconds=config.checkpoint_timeout_seconds,
        min_pause_seconds=config.checkpoint_min_pause_seconds,
        enabled=around.ledger.keeps_checkpoints,
    )
    committing = [
        ref for task in around.plan.tasks if _commits_in_slots(task) for ref in task.subtasks()
    ]
    return Checkpoints(settings, around.plan.subtasks(), committing, around.ledger.first_free_id)


def _commits_in_slots(task: Task) -> bool:
    return any(
        isinstance(planned.operator, Write) and not planned.operator.sink.commits_at_coordinator
        for planned in task.operators
    )


def describe_operators(plan: Plan) -> tuple[OperatorDescription, ...]:
    """The operators as metadata names them."""
    return tuple(
        OperatorDescription(
            planned.uid,
            type(planned.operator).__name__.lower(),
            describe(planned.operator),
            task.parallelism,
        )
        for task, planned in plan.operators()
    )
