"""One attempt as a state machine: what happens goes in, orders to slots and log entries come out.

Theory of operation
-------------------
Everything that happens (a slot joins, reports or is lost; the slots have ended; an epoch is
committed; a person asks for something) is handed to `handle`, and the passing of time to
`on_time`, until there is an `outcome`. `protocol/checkpoints` decides; this file carries it out,
through the ledger and through two ports: one to the slots, one to the sinks that commit here.
`coordinator/running` drives it with threads and sockets, the simulator with neither.

An attempt breaks as soon as its first slot is lost. The first news of a loss is often not the
best: a slot that fails takes its peers' connections with it, and their complaints may arrive
first. So the attempt listens until every slot has said something or is lost too, a moment at most,
and then reports the reason that explains the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.claims import settle_claim
from stillframe.coordinator.control import SlotJoined, SlotLost, SlotReported
from stillframe.coordinator.enumerators import DiscoveryFailed, Enumerators, SplitsDiscovered
from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    History,
    SavepointCompleted,
    SlotsRunning,
)
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptRested,
    AttemptStopped,
    CheckpointWanted,
    FailedAt,
    Mail,
    Outcome,
    SlotsEnded,
    StopWanted,
)
from stillframe.coordinator.ports import CommitsPort, DiscoveriesPort, SlotsPort
from stillframe.coordinator.recorder import Recorder, shapes_of
from stillframe.coordinator.rescaling import RescaleFailed, RescaleWanted
from stillframe.coordinator.savepoints import OpenStore, Savepoints, SavepointWanted
from stillframe.coordinator.sinks import CommitFailed, DriverSinks, EpochCommitted
from stillframe.errors import StorageError, Unsettled
from stillframe.graph.logical import Write
from stillframe.graph.plan import (
    Broadcast,
    Forward,
    HashBy,
    Partitioning,
    Plan,
    Rebalance,
    SubtaskRef,
    Task,
    describe,
)
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch, SlotIndex
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
from stillframe.protocol.figures import Moment, Triggered
from stillframe.protocol.fit import Mismatch
from stillframe.protocol.inline import in_pieces
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.manifests import Manifest, OperatorDescription, OperatorSnapshot
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    Committed,
    CompleteCheckpoint,
    Declined,
    Drained,
    Failed,
    FailureCause,
    Progress,
    Running,
    StartSlot,
    StillThere,
    TriggerCheckpoint,
)
from stillframe.protocol.restore import (
    ChannelKind,
    EdgeDescription,
    StartingState,
    starting_channels,
)
from stillframe.protocol.statistics import TriggeredType
from stillframe.storage.paths import checkpoint_directory
from stillframe.storage.store import Store, open_store

_JOIN_SECONDS_MAX = 120.0
_STILL_THERE_SECONDS = 5.0
_BETTER_REASON_SECONDS = 0.5


UnfitStates = Callable[[Plan, Manifest, Store], Sequence[Mismatch]]


def no_unfit_states(plan: Plan, manifest: Manifest, store: Store) -> Sequence[Mismatch]:
    """Where nobody knows how states are kept it is found out when they are restored."""
    return ()


@dataclass(frozen=True, slots=True)
class JobParts:
    """What an attempt works with and what outlives it."""

    plan: Plan
    config: JobConfig
    clock: Clock
    history: History
    sinks: DriverSinks
    ledger: Ledger
    open_store: OpenStore = open_store
    """Where savepoints go."""
    on_running: Callable[[], None] = lambda: None
    """Called when all slots of an attempt run, and everybody knows."""
    unfit_states: UnfitStates = no_unfit_states
    """Which states of a snapshot the plan cannot go on with, as far as that can be told here."""
    recorder: Recorder = field(default_factory=Recorder)
    """What became of checkpoints and attempts, for people."""

    def now(self) -> Moment:
        return Moment(self.clock.wall_ms(), self.clock.monotonic_seconds())


class RunningAttempt:
    """The coordinator's half of one attempt. Used by the job's thread alone."""

    def __init__(
        self,
        parts: JobParts,
        slots: SlotsPort,
        commits: CommitsPort,
        restored: Manifest | None,
        state: StartingState,
        discoveries: DiscoveriesPort | None = None,
    ) -> None:
        self._plan = parts.plan
        self._config = parts.config
        self._clock = parts.clock
        self._history = parts.history
        self._recorder, self._moment = parts.recorder, parts.now
        self._shapes = shapes_of(parts.plan)
        self._sinks = parts.sinks
        self._ledger = parts.ledger
        self._slots = slots
        self._commits = commits
        self._restored = restored
        self._state = state
        self._enumerators = Enumerators(parts.plan, restored, state, slots, discoveries)
        self._attempt = parts.ledger.attempt
        self._joined: dict[SlotIndex, SlotJoined] = {}
        self._running: set[SlotIndex] = set()
        self._checkpoints = _checkpoints(parts)
        self._triggered_at_ms: dict[CheckpointId, int] = {}
        """Of the checkpoints that are pending."""
        self._completed_before = restored.checkpoint_id if restored else NO_CHECKPOINT
        self._checkpoint_of_epoch: dict[Epoch, CheckpointId] = {}
        """Of those that the sinks here are committing."""
        self._requests: list[tuple[CheckpointId, CheckpointWanted]] = []
        self._open_store = parts.open_store
        self._savepoints = Savepoints(parts.open_store)
        self._rescale: RescaleWanted | None = None
        self._resting_with: CheckpointId | None = None
        self._held_at = 0.0
        self._unbegun: list[SavepointWanted | RescaleWanted] = []
        """Came when this attempt was over already, or about to rest."""
        self._on_running_all = parts.on_running
        self._complained: set[SlotIndex] = set()
        self._lost: set[SlotIndex] = set()
        self._broken: AttemptBroke | None = None
        self._broken_for_good_at = 0.0
        self._outcome: Outcome | None = None
        self._slots_ended = False
        self._swept = False
        self._join_deadline = self._now() + _JOIN_SECONDS_MAX
        self._still_there_at = self._now()

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended; None while it runs."""
        return self._outcome

    @property
    def have_all_joined(self) -> bool:
        return len(self._joined) == self._plan.slots

    @property
    def have_slots_ended(self) -> bool:
        return self._slots_ended

    def unanswered_requests(self) -> list[CheckpointWanted | SavepointWanted | RescaleWanted]:
        """Those that no checkpoint has answered; the next attempt gets them.

        A savepoint that had begun is given up, and whoever asked for it knows; as is a rescale for
        which the attempt has not come to rest.
        """
        if not isinstance(self._outcome, AttemptRested):
            why = f" ({self._outcome.reason})" if isinstance(self._outcome, AttemptBroke) else ""
            self._give_up_rescale(f"attempt {self._attempt} of the job ended before{why}")
        self._savepoints.on_broken(f"attempt {self._attempt} of the job has ended")
        return [*(request for _, request in self._requests), *self._unbegun]

    def wake_at_seconds(self) -> float:
        """When `on_time` has something to do at the latest."""
        moments = [self._still_there_at]
        if self._broken is not None:
            moments.append(self._broken_for_good_at)
        checkpoint_at = self._checkpoints.wake_at_seconds()
        if checkpoint_at is not None:
            moments.append(checkpoint_at)
        discovery_at = self._enumerators.wake_at_seconds()
        if discovery_at is not None:
            moments.append(discovery_at)
        return min(moments)

    def on_time(self) -> None:
        """Time has passed."""
        now = self._now()
        if self._broken is not None:
            if now >= self._broken_for_good_at:
                self._outcome = self._outcome or self._broken
            return
        self._enumerators.on_time(now)
        self._carry_out(self._checkpoints.on_time(now))
        missing = sorted(set(range(self._plan.slots)) - self._running)
        if missing and now > self._join_deadline:
            self._break(f"slots {missing} did not come up within {_JOIN_SECONDS_MAX:g} s", "other")
        if now >= self._still_there_at:
            self._slots.broadcast(StillThere())
            self._still_there_at = now + _STILL_THERE_SECONDS
        self._take_up_waiting()

    def handle(self, mail: Mail) -> None:
        """Something happened."""
        if self._outcome is not None:
            self._handle_late(mail)
        elif self._broken is not None:
            self._look_for_better_reason(mail)
        else:
            self._handle_running(mail)
            self._take_up_waiting()

    def _handle_running(self, mail: Mail) -> None:
        match mail:
            case SlotJoined():
                self._on_joined(mail)
            case SlotReported(slot, report):
                self._on_report(slot, report)
            case SlotLost(slot, reason):
                self._lost.add(slot)
                self._break(self._loss(slot, reason), "bystander", _crash(slot))
            case SlotsEnded(attempt, reason) if attempt == self._attempt:
                self._slots_ended = True
                self._break(reason or "the slots returned before the job was over", "other")
            case EpochCommitted(epoch):
                self._on_epoch_committed(epoch)
            case SplitsDiscovered(attempt, uid, discovered) if attempt == self._attempt:
                self._enumerators.on_discovered(uid, discovered, self._now())
            case DiscoveryFailed(attempt, reason, is_permanent) if attempt == self._attempt:
                self._break(reason, "permanent" if is_permanent else "other")
            case CommitFailed(reason, is_permanent):
                self._break(reason, "permanent" if is_permanent else "other")
            case CheckpointWanted(on_numbered):
                # One that is under way does not count: it holds less than was read until now.
                on_numbered(self._checkpoints.next_id)
                self._keep_request(mail)
                self._carry_out(self._checkpoints.request(self._now()))
            case SavepointWanted() if self._rescale is not None:
                self._unbegun.append(mail)
            case RescaleWanted():
                self._on_rescale_wanted(mail)
            case SavepointWanted():
                if self._savepoints.begin(mail):
                    self._carry_out(self._checkpoints.request_savepoint(mail.then, self._now()))
            case StopWanted(cancels):
                self._outcome = AttemptStopped(cancels)

    def _break(self, reason: str, cause: FailureCause, at: FailedAt | None = None) -> None:
        """Note the failure; a reason that explains little is given a moment to be bettered."""
        if self._outcome is not None or self._broken is not None:
            return
        self._broken = AttemptBroke(reason, cause, at)
        patience = _BETTER_REASON_SECONDS if cause == "bystander" else 0.0
        self._broken_for_good_at = self._now() + patience
        if not patience:
            self._outcome = self._broken

    def _look_for_better_reason(self, mail: Mail) -> None:
        match mail:
            case SlotReported(slot, Failed(said, why, task, subtask)):
                self._complained.add(slot)
                if why != "bystander":
                    self._outcome = AttemptBroke(said, why, FailedAt(slot, task, subtask))
            case SlotLost(slot, said) if slot not in self._complained:
                self._lost.add(slot)
                self._broken = AttemptBroke(self._loss(slot, said), "bystander", _crash(slot))
            case SlotsEnded(attempt, said) if attempt == self._attempt:
                self._slots_ended = True
                if said and not self.have_all_joined:
                    self._outcome = AttemptBroke(said, "other")  # of one that never came to speak
            case StopWanted(cancels):
                self._outcome = AttemptStopped(cancels)
            case _:
                self._handle_late(mail)
        if self.have_all_joined and len(self._complained | self._lost) == self._plan.slots:
            self._outcome = self._outcome or self._broken  # nobody is left to explain it better

    def _handle_late(self, mail: Mail) -> None:
        """Of what comes late, only what concerns the job rather than the attempt matters."""
        match mail:
            case SlotsEnded(attempt) if attempt == self._attempt:
                self._slots_ended = True
            case EpochCommitted(epoch):
                self._note_epoch(epoch)
            case StopWanted(cancels):
                if isinstance(self._outcome, AttemptBroke | AttemptRested):
                    self._outcome = AttemptStopped(cancels)
            case CheckpointWanted():
                self._keep_request(mail)
            case SavepointWanted() | RescaleWanted():
                self._unbegun.append(mail)
            case SlotReported(slot, Progress() as progress):
                self._history.report_progress(slot, progress)

    def _loss(self, slot: SlotIndex, reason: str) -> str:
        joined = self._joined.get(slot)  # it may have come while the attempt was breaking
        pid = f" (pid {joined.pid})" if joined else ""
        return f"slot {slot}{pid} was lost: {reason}"

    def _keep_request(self, request: CheckpointWanted) -> None:
        self._requests.append((self._checkpoints.next_id, request))

    def _forget_requests(self, completed: CheckpointId) -> None:
        """One that completes holds what older ones would have held: it answers them all."""
        self._requests = [(number, kept) for number, kept in self._requests if number > completed]

    # --- slots ---

    def _on_joined(self, joined: SlotJoined) -> None:
        self._joined[joined.slot] = joined
        if len(self._joined) < self._plan.slots:
            return
        peers = {slot: mate.data_address for slot, mate in self._joined.items()}
        channels = starting_channels(describe_edges(self._plan), self._restored)
        own = self._restored
        if own is not None and own.checkpoint_id == NO_CHECKPOINT:
            own = None  # a savepoint: no checkpoint of this job, so there is nothing to commit
        for slot in self._joined:
            start = StartSlot(
                peers=peers,
                state={ref: part for ref, part in self._state.items() if int(ref[1]) == slot},
                restored_checkpoint=own.checkpoint_id if own else None,
                restored_epoch=own.epoch if own else None,
                channels={to: under for to, under in channels.items() if int(to[1]) == slot},
            )
            for order in in_pieces(start):
                self._slots.send(slot, order)

    def _on_report(self, slot: SlotIndex, report: object) -> None:
        checkpoints = self._checkpoints
        match report:
            case Running():
                self._on_running(slot)
            case Progress():
                self._history.report_progress(slot, report)
            case Failed(reason, cause, task_name, subtask):
                self._complained.add(slot)
                self._break(reason, cause, FailedAt(slot, task_name, subtask))
            case Acknowledged(task, subtask, checkpoint_id):
                if checkpoint_id not in self._savepoints:
                    self._ledger.note_acknowledged(checkpoint_id, report.files())
                ref = SubtaskRef(task, subtask)
                answer, instructions = checkpoints.on_acknowledged(checkpoint_id, ref, report)
                if answer is Answer.COUNTED:
                    self._recorder.on_acknowledged(
                        checkpoint_id, self._plan.tasks[task], report.timings, self._moment()
                    )
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
        if slot in self._running:
            return  # the message came twice
        self._running.add(slot)
        if len(self._running) < self._plan.slots:
            return
        pids = tuple(self._joined[SlotIndex(i)].pid for i in range(self._plan.slots))
        self._history.tell(SlotsRunning(self._attempt, pids))
        self._on_running_all()
        self._enumerators.on_running()
        self._carry_out(self._checkpoints.on_running(self._now()))

    # --- checkpoints ---

    def _carry_out(self, instructions: Sequence[Instruction[SubtaskRef, Acknowledged]]) -> None:
        for instruction in instructions:
            match instruction:
                case Trigger(checkpoint_id, holds_sources):
                    self._trigger(checkpoint_id, holds_sources)
                case StoreCheckpoint(checkpoint_id, triggered_at, acknowledged):
                    self._store(checkpoint_id, triggered_at, acknowledged)
                case AnnounceComplete(checkpoint_id):
                    epoch = Epoch(self._ledger.next_epoch - 1)
                    self._slots.broadcast(CompleteCheckpoint(checkpoint_id, epoch))
                case NoteCommitted(checkpoint_id):
                    self._history.tell(CheckpointCommitted(checkpoint_id))
                case Abort(checkpoint_id, reason):
                    self._abort(checkpoint_id, reason)
                case BreakAttempt(reason):
                    self._break(reason, "other")
                case EndSources():
                    self._slots.broadcast(messages.EndSources())
                case TriggerSavepoint(checkpoint_id, holds_sources):
                    self._trigger_savepoint(checkpoint_id, holds_sources)
                case StoreSavepoint(checkpoint_id, acknowledged):
                    self._store_savepoint(checkpoint_id, acknowledged)
                case LetGo(checkpoint_id):
                    self._slots.broadcast(AbortCheckpoint(checkpoint_id))
                case Finish():
                    self._savepoints.on_ended()
                    self._outcome = AttemptFinished()
                case Stop() if self._rescale is not None:
                    self._outcome = AttemptRested(self._rescale, self._held_at)
                case Stop():
                    self._savepoints.on_ended()
                    self._outcome = AttemptStopped()

    def _trigger(self, checkpoint_id: CheckpointId, holds_sources: bool) -> None:
        triggered_at_ms = self._note_triggered(checkpoint_id, "CHECKPOINT")
        timeout_ms = self._config.alignment_timeout_ms
        if holds_sources:
            # Without a timeout: nothing comes behind the barriers, so they are not waited for long,
            # and what they would overtake would have to be sorted out among other channels.
            timeout_ms, self._resting_with, self._held_at = None, checkpoint_id, self._now()
        self._slots.broadcast(
            TriggerCheckpoint(
                checkpoint_id, triggered_at_ms, timeout_ms, holds_sources=holds_sources
            )
        )

    def _on_rescale_wanted(self, wanted: RescaleWanted) -> None:
        if wanted is self._rescale:
            return  # the message came twice
        if not self._checkpoints.can_rest:
            wanted.on_outcome(RescaleFailed("the job is not rescaled: it is about to end"))
            return
        self._rescale = wanted
        self._carry_out(self._checkpoints.request_rest(self._now()))

    def _give_up_rescale(self, reason: str) -> None:
        """The job goes on as it was, if it does."""
        wanted, self._rescale, self._resting_with = self._rescale, None, None
        if wanted is not None:
            what = f"the job is not rescaled to parallelism {wanted.parallelism}"
            wanted.on_outcome(RescaleFailed(f"{what}: {reason}"))

    def _take_up_waiting(self) -> None:
        """Savepoints that waited for a rescale of which nothing came."""
        is_running = self._outcome is None and self._broken is None
        if self._unbegun and self._rescale is None and is_running:
            waiting, self._unbegun = self._unbegun, []
            for mail in waiting:
                self._handle_running(mail)

    def _trigger_savepoint(self, checkpoint_id: CheckpointId, holds_sources: bool) -> None:
        address = self._savepoints.on_triggered(checkpoint_id)
        triggered_as: TriggeredType = "SYNC_SAVEPOINT" if self._savepoints.is_last else "SAVEPOINT"
        triggered_at_ms = self._note_triggered(checkpoint_id, triggered_as)
        # Without a timeout: what is under way would have to fit the channels of another job.
        self._slots.broadcast(
            TriggerCheckpoint(checkpoint_id, triggered_at_ms, None, address, holds_sources)
        )

    def _note_triggered(self, checkpoint_id: CheckpointId, triggered_as: TriggeredType) -> int:
        self._ledger.note_used(checkpoint_id)
        self._enumerators.on_triggered(checkpoint_id)
        now = self._moment()
        self._triggered_at_ms[checkpoint_id] = now.wall_ms
        self._recorder.on_triggered(
            Triggered(checkpoint_id, self._attempt, triggered_as, self._shapes, now)
        )
        return now.wall_ms

    def _store_savepoint(
        self, checkpoint_id: CheckpointId, acknowledged: Mapping[SubtaskRef, Acknowledged]
    ) -> None:
        manifest = self._manifest(checkpoint_id, acknowledged)
        try:
            self._savepoints.store(manifest)
        except StorageError as error:
            self._carry_out(
                self._checkpoints.on_store_failed(checkpoint_id, str(error), self._now())
            )
            return
        place, size_bytes = self._savepoints.address, manifest.state_bytes()
        self._recorder.on_completed(checkpoint_id, place, 0, self._moment())
        self._history.tell(SavepointCompleted(checkpoint_id, place, size_bytes))
        del self._triggered_at_ms[checkpoint_id]
        self._enumerators.forget(checkpoint_id)
        self._carry_out(self._checkpoints.on_savepoint_stored(checkpoint_id, self._now()))

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
            self._break(str(error), "other")
            return
        except StorageError as error:
            self._carry_out(
                self._checkpoints.on_store_failed(checkpoint_id, str(error), self._now())
            )
            return
        self._recorder.on_completed(
            checkpoint_id,
            self._path_of(completed),
            completed.manifest_length_bytes,
            self._moment(),
        )
        records = self._history.records_of_attempt()
        self._history.tell(
            CheckpointCompleted(
                checkpoint_id=checkpoint_id,
                epoch=manifest.epoch,
                attempt=self._attempt,
                triggered_at_ms=manifest.triggered_at_ms,
                duration_ms=(self._now() - triggered_at_seconds) * 1000,
                state_bytes=manifest.state_bytes() + completed.manifest_length_bytes,
                timings=manifest.timings,
                records_in=records.records_in,
                records_out=records.records_out,
                records_late=records.records_late,
            )
        )
        del self._triggered_at_ms[checkpoint_id]
        self._enumerators.forget(checkpoint_id)
        self._forget_requests(checkpoint_id)
        commits_here = bool(self._sinks.committing_here)
        if commits_here:
            self._checkpoint_of_epoch[manifest.epoch] = checkpoint_id
            self._commits.submit(manifest)
        self._completed_before = checkpoint_id
        settle_claim(self._ledger, self._open_store)
        self._sweep_once(manifest)
        self._carry_out(self._checkpoints.on_stored(checkpoint_id, commits_here, self._now()))

    def _path_of(self, completed: CompletedCheckpoint) -> str:
        directory = checkpoint_directory(completed.checkpoint_id, completed.attempt)
        return f"{self._ledger.store_address}/{directory}"

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

    def _abort(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._recorder.on_aborted(checkpoint_id, reason, self._moment())
        self._history.tell(CheckpointFailed(checkpoint_id, reason))
        self._slots.broadcast(AbortCheckpoint(checkpoint_id))
        self._enumerators.forget(checkpoint_id)
        if checkpoint_id in self._savepoints:
            self._savepoints.on_failed(reason)
        else:
            self._ledger.discard(checkpoint_id)
        del self._triggered_at_ms[checkpoint_id]
        self._requests = [each for each in self._requests if each[0] != checkpoint_id]
        if checkpoint_id == self._resting_with:
            self._give_up_rescale(
                f"checkpoint {checkpoint_id}, from which it would have gone on, failed: {reason}"
            )

    def _sweep_once(self, manifest: Manifest) -> None:
        """A slot of the attempt before may have written on for seconds after its end."""
        if not self._swept:
            self._swept = True
            self._ledger.sweep(Attempt(self._attempt - 1))
            self._sinks.sweep(self._attempt, manifest)

    def _on_epoch_committed(self, epoch: Epoch) -> None:
        self._note_epoch(epoch)
        committed = self._checkpoint_of_epoch.pop(epoch)
        self._carry_out(self._checkpoints.on_coordinator_committed(committed, self._now()))

    def _note_epoch(self, epoch: Epoch) -> None:
        self._ledger.note_committed(self._sinks.committing_here, epoch)

    def _now(self) -> float:
        return self._clock.monotonic_seconds()


def _crash(slot: SlotIndex) -> FailedAt:
    return FailedAt(slot, is_crash=True)


def _checkpoints(parts: JobParts) -> Checkpoints[SubtaskRef, Acknowledged]:
    config = parts.config
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
    return Checkpoints(settings, parts.plan.subtasks(), committing, parts.ledger.first_free_id)


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


def describe_edges(plan: Plan) -> list[EdgeDescription]:
    """The edges, as far as records under way are concerned."""
    return [
        EdgeDescription(
            edge.name,
            _channel_kind(edge.partitioning),
            plan.tasks[edge.target_task].operators[0].uid,
            edge.target_parallelism,
        )
        for edge in plan.edges
    ]


def _channel_kind(partitioning: Partitioning) -> ChannelKind:
    match partitioning:
        case Forward():
            return "forward"
        case Rebalance():
            return "rebalance"
        case Broadcast():
            return "broadcast"
        case HashBy():
            return "hash"
