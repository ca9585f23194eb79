"""One attempt as a state machine: what happens goes in, orders to slots and letters come out.

Theory of operation
-------------------
Everything that happens (a slot joins, reports or is lost; the slots have ended; a checkpoint is
stored, an epoch committed; a person asks for something) is handed to `handle`, and the passing of
time to `on_time`, until there is an `outcome`. This file is the life of the attempt: its slots come
up, it runs, it ends, and what comes late is sorted out for the next one. The checkpoints that it
takes while it runs, and savepoints and the rest before a rescale, which are checkpoints too, are in
`coordinator/attempt_checkpoints`. `coordinator/running` drives it all with threads and sockets, the
simulator with neither.

An attempt breaks as soon as its first slot is lost. The first news of a loss is often not the
best: a slot that fails takes its peers' connections with it, and their complaints may arrive
first. So the attempt listens until every slot has said something or is lost too, a moment at most,
and then reports the reason that explains the most.
"""

from __future__ import annotations

from dataclasses import replace

from stillframe.config import LOOPBACK
from stillframe.coordinator import history
from stillframe.coordinator.attempt_checkpoints import AttemptCheckpoints
from stillframe.coordinator.control import SlotJoined, SlotLost, SlotReported, StacksDumped
from stillframe.coordinator.enumerators import DiscoveryFailed, Enumerators, SplitsDiscovered
from stillframe.coordinator.history import SlotsRunning
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger_mail import LedgerEvent, SavepointOpened
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
    crashed,
)
from stillframe.coordinator.plan_descriptions import describe_edges
from stillframe.coordinator.ports import CommitsPort, DiscoveriesPort, LedgerPort, SlotsPort
from stillframe.coordinator.rescaling import RescaleWanted
from stillframe.coordinator.savepoints import SavepointWanted
from stillframe.coordinator.sinks import CommitFailed, EpochCommitted
from stillframe.graph.plan import SubtaskRef
from stillframe.ids import NO_CHECKPOINT, CheckpointId, SlotIndex
from stillframe.logs import About, slot_log
from stillframe.protocol.inline import in_pieces
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.measures import Measured
from stillframe.protocol.messages import (
    Acknowledged,
    CaughtUp,
    Committed,
    Declined,
    Drained,
    Failed,
    Hanging,
    Progress,
    Running,
    Said,
    SaidLine,
    StartSlot,
    StillThere,
    SubtaskDoing,
    doing_in_words,
)
from stillframe.protocol.restore import StartingState, starting_channels
from stillframe.protocol.statistics import SlotPlace
from stillframe.stacks import bounded, called, dumped_frames, innermost_own

_JOIN_SECONDS_MAX = 120.0
_STILL_THERE_SECONDS_MAX = 5.0
_BETTER_REASON_SECONDS = 0.5
_SILENT_SECONDS = 5.0
"""A slot that reports twice a second is told to be silent after this long."""


class RunningAttempt:
    """The coordinator's half of one attempt. Used by the job's thread alone."""

    def __init__(
        self,
        parts: JobParts,
        slots: SlotsPort,
        commits: CommitsPort,
        store: LedgerPort,
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
        self._enumerators = Enumerators(
            parts.plan,
            restored,
            state,
            slots,
            discoveries,
            available_now=parts.config.available_now,
        )
        self._checkpoints = AttemptCheckpoints(
            parts,
            slots,
            commits,
            store,
            restored,
            self._enumerators,
            self._on_outcome,
            self._what_does,
        )
        self._joined: dict[SlotIndex, SlotJoined] = {}
        self._running: set[SlotIndex] = set()
        self._complained: set[SlotIndex] = set()
        self._lost: set[SlotIndex] = set()
        self._heard_at: dict[SlotIndex, float] = {}
        self._hanging: dict[SlotIndex, Hanging] = {}
        """By the slots' own reports, or by what was dumped when they could not report."""
        self._doing: dict[SlotIndex, tuple[SubtaskDoing, ...]] = {}
        self._still_there_seconds = min(
            _STILL_THERE_SECONDS_MAX, parts.config.heartbeat_timeout_seconds / 3
        )
        self._oom_kills = parts.oom_kills
        self._watched = parts.watched
        self._oom_kills_before: dict[str, int | None] = {LOOPBACK: parts.oom_kills()}
        """By machine, when the attempt began or was first heard from there."""
        self._hosts_out_of_memory: set[str] = set()
        self._stuck_timeout_seconds = parts.config.stuck_timeout_seconds
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
    def do_all_run(self) -> bool:
        return len(self._running) == self._plan.slots

    @property
    def have_slots_ended(self) -> bool:
        return self._slots_ended

    def is_hanging(self) -> bool:
        """Whether one of its slots will not hear what it is told."""
        return bool(self._hanging) or bool(self._silent())

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
            late = f"slots {missing} did not come up within {_JOIN_SECONDS_MAX:g} s"
            self._break(AttemptBroke(late, "other"))
        if now >= self._still_there_at or self._watched.has_changed(now):
            self._slots.broadcast(StillThere(self._watched.told(now)))
            self._still_there_at = now + self._still_there_seconds
        self._tell_silent()
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
        self._history.note_slots([self._place(slot) for slot in sorted(self._joined)])
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

    def _place(self, slot: SlotIndex) -> SlotPlace:
        joined = self._joined[slot]
        return SlotPlace(slot, joined.data_address[0], joined.pid)

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
            case SlotLost(slot, reason, is_silent):
                self._lost.add(slot)
                hanging = self._hanging.get(slot)
                if is_silent and hanging is not None:
                    self._break_hanging(slot, hanging, self._loss(slot, reason))
                self._break(AttemptBroke(self._loss(slot, reason), "lost slot", crashed(slot)))
            case StacksDumped():
                self._on_dumped(mail)
            case SlotsEnded(attempt, reason) if attempt == self._attempt:
                self._slots_ended = True
                reason = reason or "the slots returned before the job was over"
                self._break(AttemptBroke(reason, "other", nothing_ran=not self._running))
            case EpochCommitted(epoch):
                self._checkpoints.on_epoch_committed(epoch)
            case SavepointOpened() if self._checkpoints.is_rest_wanted:
                self._unbegun.append(self._checkpoints.postpone_savepoint())
            case _ if isinstance(mail, LedgerEvent):
                self._checkpoints.on_ledger(mail)
            case SplitsDiscovered(attempt, uid, discovered) if attempt == self._attempt:
                self._enumerators.on_discovered(uid, discovered, self._now())
                self._history.note_discovered(uid)
            case DiscoveryFailed(attempt, reason, cause, blame) if attempt == self._attempt:
                self._break(AttemptBroke(reason, cause, blame=blame))
            case CommitFailed(reason, cause, blame):
                self._break(AttemptBroke(reason, cause, blame=blame))
            case CheckpointWanted():
                self._checkpoints.request(mail)
            case SavepointWanted() if self._checkpoints.is_rest_wanted:
                self._unbegun.append(mail)
            case SavepointWanted():
                self._checkpoints.request_savepoint(mail)
            case RescaleWanted() if len(self._running) < self._plan.slots:
                # Nothing has been done that the next attempt would not do again, and if slots are
                # missing this one may never run.
                self._outcome = AttemptRested(mail, self._now())
            case RescaleWanted():
                self._checkpoints.request_rest(mail)
            case StopWanted(cancels):
                self._outcome = AttemptStopped(cancels)

    # --- it stands still ---

    def _note_progress(self, slot: SlotIndex, progress: Progress) -> None:
        self._history.report_progress(slot, progress, self._now())
        self._doing[slot] = progress.doing
        joined = self._joined.get(slot)  # not if it came when the attempt was over
        if joined is not None:
            self._note_oom_kills(joined.data_address[0], progress.oom_kills)
        self._history.over(f"slot {slot} silent")
        if progress.awaits is None:
            self._history.over(f"slot {slot} awaits")
        else:
            self._history.begin(f"slot {slot} awaits", history.Waiting(progress.awaits))
        if progress.hanging is None:
            self._hanging.pop(slot, None)
            self._history.over(f"slot {slot} hanging")
        else:
            self._on_hanging(slot, progress.hanging)

    def _on_hanging(self, slot: SlotIndex, hanging: Hanging) -> None:
        self._hanging[slot] = hanging
        self._history.begin(f"slot {slot} hanging", history.Hanging(slot, hanging))
        if 0 < self._stuck_timeout_seconds <= hanging.seconds and not hanging.may_wait:
            self._break_hanging(slot, hanging, f"slot {slot} was ended (stuckTimeout)")

    def _on_dumped(self, dumped: StacksDumped) -> None:
        """Since its last report, which is when its interpreter stopped."""
        frames = dumped_frames(dumped.text, dumped.loop_id)
        at = called(frames, dumped.places)
        seconds = self._now() - self._heard_at.get(dumped.slot, self._now())
        hanging = Hanging(
            seconds,
            None if at is None else f"function {frames[at].function}",
            innermost_own(frames, dumped.places),
            bounded("\n".join(map(str, frames if at is None else frames[at:]))),
        )
        self._on_hanging(dumped.slot, hanging)

    def _break_hanging(self, slot: SlotIndex, hanging: Hanging, then: str) -> None:
        at = FailedAt(slot, hanging.task, hanging.subtask)
        self._break(AttemptBroke(f"{hanging}; {then}", "other", at, hanging.blame))

    def _silent(self) -> list[SlotIndex]:
        now = self._now()
        return [slot for slot, at in self._heard_at.items() if now - at > _SILENT_SECONDS]

    def _tell_silent(self) -> None:
        for slot in self._silent():
            seconds, pid = self._now() - self._heard_at[slot], self._joined[slot].pid
            told = f"slot {slot} (pid {pid}) has sent nothing for {seconds:.0f} s"
            self._history.begin(f"slot {slot} silent", history.Waiting(told))

    def _what_does(self, ref: SubtaskRef, checkpoint_id: CheckpointId) -> str:
        """How far a subtask is with a checkpoint, as far as it is known here."""
        slot = SlotIndex(int(ref.subtask))
        hanging = self._hanging.get(slot)
        if hanging is not None and not hanging.may_wait:
            return str(hanging)
        if slot in self._silent():
            return "its slot has sent nothing for a while"
        return doing_in_words(self._doing.get(slot, ()), *ref, checkpoint_id)

    def _on_report(self, slot: SlotIndex, report: object) -> None:
        self._heard_at[slot] = self._now()
        match report:
            case Running():
                self._on_running(slot)
            case Progress():
                self._note_progress(slot, report)
            case Measured():
                self._history.note_measures(slot, report)
            case Said(lines):
                self._note_said(slot, lines)
            case Failed():
                self._complained.add(slot)
                self._break(_failure(slot, report))
            case Acknowledged() | Declined() | Committed() | Drained() | CaughtUp():
                self._checkpoints.on_report(report, self._place(slot))

    def _note_said(self, slot: SlotIndex, lines: tuple[SaidLine, ...]) -> None:
        of = About(self._plan.job, self._attempt, slot=slot)
        for line in lines:
            record = slot_log.makeRecord(
                slot_log.name, line.level, "", 0, line.text, (), None, extra=of.extra()
            )
            record.created = line.at_ms / 1000
            slot_log.handle(record)

    def _take_up_waiting(self) -> None:
        """Savepoints that waited for a rescale of which nothing came."""
        is_running = self._outcome is None and self._broken is None
        if self._unbegun and not self._checkpoints.is_rest_wanted and is_running:
            waiting, self._unbegun = self._unbegun, []
            for mail in waiting:
                self._handle_running(mail)

    # --- it ends ---

    def _on_outcome(self, outcome: Outcome) -> None:
        """A checkpoint has ended the attempt, or broken it.

        One that broke is ended by a savepoint that came to exist and is the job's last word.
        """
        if isinstance(outcome, AttemptBroke):
            self._break(outcome)
        elif self._outcome is None or isinstance(self._outcome, AttemptBroke):
            self._outcome = outcome

    def _break(self, broke: AttemptBroke) -> None:
        """Note the failure; a reason that explains little is given a moment to be bettered."""
        if self._outcome is not None or self._broken is not None:
            return
        self._history.note_noticed(self._heard_at.get(broke.at.slot) if broke.at else None)
        self._broken = broke
        patience = _BETTER_REASON_SECONDS if broke.cause == "lost slot" else 0.0
        self._broken_for_good_at = self._now() + patience
        if not patience:
            self._outcome = self._broken

    def _loss(self, slot: SlotIndex, reason: str) -> str:
        joined = self._joined.get(slot)  # it may have come while the attempt was breaking
        pid = f" (pid {joined.pid})" if joined else ""
        host = joined.data_address[0] if joined else LOOPBACK
        if host == LOOPBACK:
            self._note_oom_kills(host, self._oom_kills())
        if host not in self._hosts_out_of_memory:
            return f"slot {slot}{pid} was lost: {reason}"
        return (
            f"slot {slot}{pid} was lost: the system has killed it for want of memory; give it more"
            " (on a cluster spark.executor.memoryOverhead), or keep less in it: a higher"
            " parallelism, or stateBackend=rocksdb"
        )

    def _note_oom_kills(self, host: str, kills: int | None) -> None:
        before = self._oom_kills_before.setdefault(host, kills)
        if kills is not None and before is not None and kills > before:
            self._hosts_out_of_memory.add(host)

    def _look_for_better_reason(self, mail: Mail) -> None:
        match mail:
            case SlotReported(slot, Failed() as report):
                self._complained.add(slot)
                if report.cause != "lost slot":
                    self._outcome = _failure(slot, report)
            case SlotLost(slot, said) if slot not in self._complained:
                self._lost.add(slot)
                self._broken = AttemptBroke(self._loss(slot, said), "lost slot", crashed(slot))
            case SlotsEnded(attempt, said) if attempt == self._attempt:
                self._slots_ended = True
                if said and not self.have_all_joined:
                    # Of one that never came to speak.
                    self._outcome = AttemptBroke(said, "other", nothing_ran=not self._running)
            case SlotReported(slot, Progress() as progress):
                self._note_progress(slot, progress)
                self._explain_by_memory()
            case StopWanted(cancels):
                self._outcome = AttemptStopped(cancels)
            case _:
                self._handle_late(mail)
        if self.have_all_joined and len(self._complained | self._lost) == self._plan.slots:
            self._outcome = self._outcome or self._broken  # nobody is left to explain it better

    def _explain_by_memory(self) -> None:
        """A peer on the machine of the slot that was lost has told of it meanwhile."""
        broken = self._broken
        if broken is None or broken.at is None or not broken.at.is_crash:
            return
        joined = self._joined.get(broken.at.slot)
        if joined is not None and joined.data_address[0] in self._hosts_out_of_memory:
            self._broken = replace(broken, reason=self._loss(broken.at.slot, ""))

    # --- it is over ---

    def _handle_late(self, mail: Mail) -> None:
        """Of what comes late, only what concerns the job rather than the attempt matters."""
        match mail:
            case SlotsEnded(attempt) if attempt == self._attempt:
                self._slots_ended = True
            case EpochCommitted(epoch):
                self._checkpoints.note_epoch(epoch)
            case _ if isinstance(mail, LedgerEvent):
                self._checkpoints.on_ledger_late(mail)
            case StopWanted(cancels):
                if isinstance(self._outcome, AttemptBroke | AttemptRested):
                    self._outcome = AttemptStopped(cancels)
            case CheckpointWanted():
                self._checkpoints.keep_request(mail)
            case SavepointWanted() | RescaleWanted():
                self._unbegun.append(mail)
            case SlotReported(slot, Progress() as progress):
                self._heard_at[slot] = self._now()
                self._note_progress(slot, progress)
            case StacksDumped():
                self._on_dumped(mail)
            case SlotLost(slot):
                self._heard_at.pop(slot, None)
                self._hanging.pop(slot, None)

    def give_up(self) -> None:
        """Nothing more will be done: a savepoint that had begun is given up, and whoever asked for
        it knows; as is a rescale for which the attempt has not come to rest."""
        if not isinstance(self._outcome, AttemptRested):
            why = f" ({self._outcome.reason})" if isinstance(self._outcome, AttemptBroke) else ""
            self._checkpoints.give_up_rest(f"attempt {self._attempt} of the job ended before{why}")
        self._checkpoints.give_up_savepoint()

    def on_port_closed(self) -> None:
        """Nothing more is written or deleted for this attempt."""
        self._checkpoints.on_port_closed()

    def unanswered_requests(self) -> list[CheckpointWanted | SavepointWanted | RescaleWanted]:
        """Those that no checkpoint has answered; the next attempt gets them."""
        return [*self._checkpoints.unanswered_requests(), *self._unbegun]


def _failure(slot: SlotIndex, report: Failed) -> AttemptBroke:
    at = FailedAt(slot, report.task, report.subtask)
    return AttemptBroke(report.reason, report.cause, at, report.blame)
