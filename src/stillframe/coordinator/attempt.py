"""One attempt as a state machine: what happens goes in, orders to slots and log entries come out.

Theory of operation
-------------------
Everything that happens (a slot joins, reports or is lost; the slots have ended; an epoch is
committed; a person asks for something) is handed to `handle`, and the passing of time to
`on_time`, until there is an `outcome`. This file is the life of the attempt: its slots come up, it
runs, it ends, and what comes late is sorted out for the next one. The checkpoints that it takes
while it runs, and savepoints and the rest before a rescale, which are checkpoints too, are in
`coordinator/attempt_checkpoints`. `coordinator/running` drives it all with threads and sockets, the
simulator with neither.

An attempt breaks as soon as its first slot is lost. The first news of a loss is often not the
best: a slot that fails takes its peers' connections with it, and their complaints may arrive
first. So the attempt listens until every slot has said something or is lost too, a moment at most,
and then reports the reason that explains the most.
"""

from __future__ import annotations

from stillframe.coordinator.attempt_checkpoints import AttemptCheckpoints
from stillframe.coordinator.control import SlotJoined, SlotLost, SlotReported
from stillframe.coordinator.enumerators import DiscoveryFailed, Enumerators, SplitsDiscovered
from stillframe.coordinator.history import SlotsRunning
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptRested,
    AttemptStopped,
    CheckpointWanted,
    FailedAt,
    Mail,
    Outcome,
    SlotsEnded,
    StopWanted,
)
from stillframe.coordinator.plan_descriptions import describe_edges
from stillframe.coordinator.ports import CommitsPort, DiscoveriesPort, SlotsPort
from stillframe.coordinator.rescaling import RescaleWanted
from stillframe.coordinator.savepoints import SavepointWanted
from stillframe.coordinator.sinks import CommitFailed, EpochCommitted
from stillframe.ids import NO_CHECKPOINT, SlotIndex
from stillframe.protocol.inline import in_pieces
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import (
    Acknowledged,
    Committed,
    Declined,
    Drained,
    Failed,
    FailureCause,
    Progress,
    Running,
    StartSlot,
    StillThere,
)
from stillframe.protocol.restore import StartingState, starting_channels

_JOIN_SECONDS_MAX = 120.0
_STILL_THERE_SECONDS = 5.0
_BETTER_REASON_SECONDS = 0.5


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
        self._clock = parts.clock
        self._history = parts.history
        self._on_all_running = parts.on_running
        self._attempt = parts.ledger.attempt
        self._slots = slots
        self._restored = restored
        self._state = state
        self._enumerators = Enumerators(parts.plan, restored, state, slots, discoveries)
        self._checkpoints = AttemptCheckpoints(
            parts, slots, commits, restored, self._enumerators, self._on_outcome
        )
        self._joined: dict[SlotIndex, SlotJoined] = {}
        self._running: set[SlotIndex] = set()
        self._complained: set[SlotIndex] = set()
        self._lost: set[SlotIndex] = set()
        self._slots_ended = False
        self._unbegun: list[SavepointWanted | RescaleWanted] = []
        """Came when this attempt was over already, or about to rest."""
        self._broken: AttemptBroke | None = None
        self._broken_for_good_at = 0.0
        self._outcome: Outcome | None = None
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
        self._checkpoints.on_time(now)
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

    def _now(self) -> float:
        return self._clock.monotonic_seconds()

    # --- it comes up ---

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

    def _on_running(self, slot: SlotIndex) -> None:
        if slot in self._running:
            return  # the message came twice
        self._running.add(slot)
        if len(self._running) < self._plan.slots:
            return
        pids = tuple(self._joined[SlotIndex(i)].pid for i in range(self._plan.slots))
        self._history.tell(SlotsRunning(self._attempt, pids))
        self._on_all_running()
        self._enumerators.on_running()
        self._checkpoints.on_running()

    # --- it runs ---

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
                self._checkpoints.on_epoch_committed(epoch)
            case SplitsDiscovered(attempt, uid, discovered) if attempt == self._attempt:
                self._enumerators.on_discovered(uid, discovered, self._now())
            case DiscoveryFailed(attempt, reason, is_permanent) if attempt == self._attempt:
                self._break(reason, "permanent" if is_permanent else "other")
            case CommitFailed(reason, is_permanent):
                self._break(reason, "permanent" if is_permanent else "other")
            case CheckpointWanted():
                self._checkpoints.request(mail)
            case SavepointWanted() if self._checkpoints.is_rest_wanted:
                self._unbegun.append(mail)
            case SavepointWanted():
                self._checkpoints.request_savepoint(mail)
            case RescaleWanted():
                self._checkpoints.request_rest(mail)
            case StopWanted(cancels):
                self._outcome = AttemptStopped(cancels)

    def _on_report(self, slot: SlotIndex, report: object) -> None:
        match report:
            case Running():
                self._on_running(slot)
            case Progress():
                self._history.report_progress(slot, report)
            case Failed(reason, cause, task_name, subtask):
                self._complained.add(slot)
                self._break(reason, cause, FailedAt(slot, task_name, subtask))
            case Acknowledged() | Declined() | Committed() | Drained():
                self._checkpoints.on_report(report)

    def _take_up_waiting(self) -> None:
        """Savepoints that waited for a rescale of which nothing came."""
        is_running = self._outcome is None and self._broken is None
        if self._unbegun and not self._checkpoints.is_rest_wanted and is_running:
            waiting, self._unbegun = self._unbegun, []
            for mail in waiting:
                self._handle_running(mail)

    # --- it ends ---

    def _on_outcome(self, outcome: Outcome) -> None:
        """A checkpoint has ended the attempt, or broken it."""
        if isinstance(outcome, AttemptBroke):
            self._break(outcome.reason, outcome.cause)
        else:
            self._outcome = outcome

    def _break(self, reason: str, cause: FailureCause, at: FailedAt | None = None) -> None:
        """Note the failure; a reason that explains little is given a moment to be bettered."""
        if self._outcome is not None or self._broken is not None:
            return
        self._broken = AttemptBroke(reason, cause, at)
        patience = _BETTER_REASON_SECONDS if cause == "bystander" else 0.0
        self._broken_for_good_at = self._now() + patience
        if not patience:
            self._outcome = self._broken

    def _loss(self, slot: SlotIndex, reason: str) -> str:
        joined = self._joined.get(slot)  # it may have come while the attempt was breaking
        pid = f" (pid {joined.pid})" if joined else ""
        return f"slot {slot}{pid} was lost: {reason}"

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

    # --- it is over ---

    def _handle_late(self, mail: Mail) -> None:
        """Of what comes late, only what concerns the job rather than the attempt matters."""
        match mail:
            case SlotsEnded(attempt) if attempt == self._attempt:
                self._slots_ended = True
            case EpochCommitted(epoch):
                self._checkpoints.note_epoch(epoch)
            case StopWanted(cancels):
                if isinstance(self._outcome, AttemptBroke | AttemptRested):
                    self._outcome = AttemptStopped(cancels)
            case CheckpointWanted():
                self._checkpoints.keep_request(mail)
            case SavepointWanted() | RescaleWanted():
                self._unbegun.append(mail)
            case SlotReported(slot, Progress() as progress):
                self._history.report_progress(slot, progress)

    def unanswered_requests(self) -> list[CheckpointWanted | SavepointWanted | RescaleWanted]:
        """Those that no checkpoint has answered; the next attempt gets them.

        A savepoint that had begun is given up, and whoever asked for it knows; as is a rescale for
        which the attempt has not come to rest.
        """
        if not isinstance(self._outcome, AttemptRested):
            why = f" ({self._outcome.reason})" if isinstance(self._outcome, AttemptBroke) else ""
            self._checkpoints.give_up_rest(f"attempt {self._attempt} of the job ended before{why}")
        return [*self._checkpoints.on_attempt_over(), *self._unbegun]


def _crash(slot: SlotIndex) -> FailedAt:
    return FailedAt(slot, is_crash=True)
