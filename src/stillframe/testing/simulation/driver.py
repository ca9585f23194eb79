"""A simulated driver: the real starter, attempt, ledger and job log, fed by the schedule.

It can die between any two of its steps, and at any operation on the store; it can stall and wake
up after its successor has taken over. A successor is a new object over the same disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import partial

from stillframe.api.sources import SplitEnumerator
from stillframe.config import JobConfig
from stillframe.coordinator import control, enumerators
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import SlotJoined, SlotLost, SlotReported
from stillframe.coordinator.history import Event, History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.located import located_in
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptRested,
    AttemptStopped,
    Mail,
    SlotsEnded,
    StopWanted,
)
from stillframe.coordinator.ports import CommitsPort, DiscoveriesPort, LedgerPort, Letter, SlotsPort
from stillframe.coordinator.rescaling import RescaleWanted
from stillframe.coordinator.savepoints import SavepointWanted
from stillframe.coordinator.sinks import CommitFailed, DriverSinks, EpochCommitted
from stillframe.coordinator.starting import Starter
from stillframe.errors import Fenced, StartRefused, StillframeError, StorageError, Unavailable
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import (
    Acknowledged,
    CompleteCheckpoint,
    EndSlot,
    Order,
    Report,
)
from stillframe.protocol.outside import retry_after_seconds
from stillframe.runtime.task import Subtask
from stillframe.storage.staging import StagedFiles
from stillframe.storage.store import Store
from stillframe.testing.simulation.letters import SimulatedLine
from stillframe.testing.simulation.slot import Exchange, SimulatedSlot
from stillframe.testing.simulation.storage import Died
from stillframe.testing.simulation.world import World


@dataclass(frozen=True, slots=True)
class DriverNeeds:
    """What a driver is made of."""

    world: World
    plan: Plan
    config: JobConfig
    store: Store
    """Its own, which fails and dies with it."""
    open_store: Callable[[str], Store]
    """Another directory, with the same troubles."""
    slot_store: Callable[[str], Store]
    repeats: float
    """The share of control messages that come twice."""
    on_event: Callable[[SimulatedDriver, Event], None]
    on_announced: Callable[[Attempt, CheckpointId], None]
    on_stray: Callable[[SimulatedSlot, Acknowledged], None]
    """A slot acknowledges, and the driver it belongs to is not there to hear it."""
    on_started: Callable[[Attempt, Iterable[Subtask]], None]
    """These subtasks of an attempt are there, restored."""
    on_closed: Callable[[Iterable[Subtask], Container[CheckpointId] | None], None]
    """Some checkpoints are over for these subtasks; None: all are."""
    on_finished: Callable[[], None]
    on_refused: Callable[[str], None]


class SimulatedDriver(SlotsPort, CommitsPort, LedgerPort, DiscoveriesPort):
    """One driver process, from its start to its death or the end of the job."""

    def __init__(self, needs: DriverNeeds, number: int) -> None:
        self.number = number
        self.is_dead = False
        self.stalled_until = 0.0
        self.slots: dict[SlotIndex, SimulatedSlot] = {}
        self.everyone: list[SimulatedSlot] = []
        """Slots of all its attempts: those of old ones may still be alive."""
        self._needs = needs
        self._world = needs.world
        self._attempt: RunningAttempt | None = None
        self._enumerators: dict[OperatorUid, SplitEnumerator] = {}
        self._to_commit: deque[Manifest] = deque()
        """Epochs whose commit is under way or waits its turn."""
        self._is_ending = False
        """Whether the attempt is over, and what it left to be done is not."""
        # Some storages are slow, so that a lot happens before they answer.
        self._write_seconds_max = needs.world.random.choice([0.02, 0.1, 0.5])
        self._delete_seconds_max = needs.world.random.choice([0.1, 0.5, 3.0])
        self._open_lines()
        self._commit_failures = 0
        self._commit_began_at = 0.0
        self._tick_at = 0.0
        # A user's function may take its time: meanwhile the next checkpoint must not complete.
        self._commit_seconds_max = needs.world.random.choice([0.5, 0.5, 4.0])
        self._history = History(clock=needs.world)
        self._history.add_listener(lambda event: needs.on_event(self, event))
        ledger = Ledger(
            needs.store,
            needs.plan.job,
            needs.config.checkpoints_retained,
            needs.world,
            written_by=f"driver {number}",
            draw_incarnation=lambda: f"drawn-by-{number}",  # a seed gives the same ones again
        )
        self._parts = JobParts(
            needs.plan,
            needs.config,
            needs.world,
            self._history,
            DriverSinks(needs.plan, StagedFiles(needs.store)),
            ledger,
            needs.open_store,
            locate=lambda address: located_in(needs.open_store(address)),
        )
        self._starter = Starter(self._parts)

    @property
    def plan(self) -> Plan:
        return self._needs.plan

    @property
    def ledger(self) -> Ledger:
        return self._parts.ledger

    # --- life ---

    def start(self) -> None:
        def read_and_begin() -> None:
            if self._starter.is_finished():
                self._needs.on_finished()
                self.is_dead = True
                return
            self._begin()

        self._do(read_and_begin)

    def die(self) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self._world.note(f"driver {self.number} dies")
        self._cut_off_slots()

    def lose_power(self) -> None:
        """Nobody is left to notice that somebody is gone."""
        self.is_dead = True
        for slot in self.everyone:
            slot.is_dead = True

    def _begin(self) -> None:
        if self._to_commit or not self._writes.is_idle:
            self._world.soon(lambda: self._do(self._begin))
            return
        self._deletions.give_up()
        self._is_ending = False
        start = self._starter.begin()
        self._open_lines()
        self._attempt = RunningAttempt(
            self._parts, self, self, self, start.restored, start.state, self
        )
        self._enumerators = {
            uid: source.open_enumerator(enumerators.restored_enumerator(start.restored, uid).state)
            for uid, source in enumerators.enumerated_sources(self._needs.plan).items()
        }
        exchange = Exchange(self._world, self._needs.repeats)
        self.slots = {}
        for index in map(SlotIndex, range(self._needs.plan.slots)):
            slot = SimulatedSlot(
                self._world,
                self._needs.plan,
                self.ledger.attempt,
                index,
                self,
                exchange,
                self._needs.slot_store,
                self._needs.config.checkpoint_mode,
                self._needs.config.state,
                self.ledger.incarnation,
                start.savepoint,
            )
            self.slots[index] = slot
            exchange.slots[index] = slot
            self.everyone.append(slot)
            self._world.soon(slot.join, 0.5)
        self._tick()

    def _tick(self) -> None:
        """Let the attempt know the time, and come back when it next needs to know."""
        attempt = self._attempt
        if attempt is None or attempt.outcome is not None:
            return
        attempt.on_time()
        wake_at = max(self._world.now + 0.001, attempt.wake_at_seconds())
        if wake_at < self._tick_at or self._tick_at <= self._world.now:
            self._tick_at = wake_at
            self._world.after(wake_at - self._world.now, lambda: self._do(self._tick))

    def _do(self, step: Callable[[], None]) -> None:
        """One step of the driver; what it may raise is what may happen to a real one."""
        if self.is_dead:
            return
        if self._world.now < self.stalled_until:
            self._world.after(self.stalled_until - self._world.now, lambda: self._do(step))
            return
        try:
            step()
            self._end_attempt_if_over()
        except Died:
            self.die()
        except Fenced as error:
            self._world.note(f"driver {self.number} is fenced: {error}")
            self.die()
        except StartRefused as error:
            self._needs.on_refused(str(error))
            self.die()
        except (StorageError, Unavailable) as error:
            self._world.note(f"driver {self.number}: {error}")
            self._try_again()

    def _end_attempt_if_over(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.outcome is None:
            return
        is_broken = isinstance(attempt.outcome, AttemptBroke)
        if not self._is_ending:
            self._is_ending = True
            self._cut_off_slots() if is_broken else self.broadcast(EndSlot())
        if self._to_commit or not self._writes.is_idle:
            return  # this is looked at again after every step
        attempt.give_up()
        if not is_broken and not self._deletions.is_idle:
            return
        attempt.on_port_closed()
        match attempt.outcome:
            case AttemptStopped(is_cancelled):
                self._world.note(f"driver {self.number} has stopped the job")
                self._attempt = None
                if is_cancelled:
                    self._starter.cancel()
                self.is_dead = True
            case AttemptRested(wanted):
                self._world.note(f"driver {self.number} goes on with {wanted.plan.slots} slots")
                self._use(wanted.plan)
                self._try_again()
            case AttemptFinished():
                self._attempt = None
                self._starter.finish()
                self.is_dead = True
                self._needs.on_finished()
            case AttemptBroke(reason, cause):
                self._world.note(f"attempt {self.ledger.attempt} broke: {reason}")
                record = self.ledger.record
                if cause == "damaged snapshot" and record and record.restored_from is not None:
                    self._starter.mark_damaged(record.restored_from, reason)
                self._try_again()

    def _use(self, plan: Plan) -> None:
        """From the next attempt on, as the real job does."""
        self._needs = replace(self._needs, plan=plan)
        self._parts = replace(self._parts, plan=plan)
        self._starter.use(self._parts)

    def _try_again(self) -> None:
        """A new attempt, while slots of the old one may still be at work for a while."""
        self._attempt = None
        self._cut_off_slots()
        self._world.after(self._world.random.random(), lambda: self._do(self._begin))

    def _cut_off_slots(self) -> None:
        for slot in self.slots.values():
            if slot.is_cut_off:
                continue
            slot.is_cut_off = True
            # Mostly noticed at once; a stopped or partitioned one notices much later.
            seconds = self._world.random.choice([0.1, 0.1, 0.1, 5.0])
            self._world.soon(partial(slot.lose_connection, "the coordinator"), seconds)

    def end_slots(self) -> None:
        """Of the attempt in which the job was finished."""
        for slot in self.slots.values():
            if not slot.is_dead:
                slot.end()

    # --- what reaches it ---

    def take_savepoint(self, wanted: SavepointWanted) -> None:
        self._do(lambda: self._handle(wanted))

    def cancel(self) -> None:
        """For good, says the log; but its checkpoints are kept, and somebody starts it again."""
        self._do(lambda: self._handle(StopWanted(cancels=True)))

    def rescale(self, wanted: RescaleWanted) -> bool:
        """Whether there is an attempt to ask; it may be over before it hears of it."""
        self._do(lambda: self._handle(wanted))
        return self._attempt is not None and not self.is_dead

    def on_joined(self, slot: SimulatedSlot) -> None:
        slot.has_joined = True
        joined = SlotJoined(slot.index, 1000 + slot.index, ("simulated", slot.index))
        self._deliver(slot, joined)

    def on_started(self, attempt: Attempt, subtasks: Iterable[Subtask]) -> None:
        self._needs.on_started(attempt, subtasks)

    def on_closed(
        self, subtasks: Iterable[Subtask], closed: Container[CheckpointId] | None
    ) -> None:
        self._needs.on_closed(subtasks, closed)

    def on_report(self, slot: SimulatedSlot, report: Report) -> None:
        is_away = self.is_dead or self._world.now < self.stalled_until
        if isinstance(report, Acknowledged) and (is_away or slot.is_cut_off):
            self._needs.on_stray(slot, report)
        if not slot.is_cut_off:
            self._deliver(slot, SlotReported(slot.index, report))

    def on_stray(self, slot: SimulatedSlot, report: Acknowledged) -> None:
        """A slot that is not one of its own, as far as it knows, speaks to it."""
        if self._attempt is None or self.slots.get(slot.index) is slot:
            return
        about = (self._needs.plan.job, self.ledger.attempt, self._needs.plan.slots, self.slots)
        if control.refusal(slot.hello(), *about) is None:
            self._do(lambda: self._handle(SlotReported(slot.index, report)))

    def on_lost(self, slot: SimulatedSlot, reason: str) -> None:
        if slot.has_joined:
            self._deliver(slot, SlotLost(slot.index, reason))
        else:
            self._deliver(slot, SlotsEnded(slot.attempt, f"slot {slot.index} never came up"))

    def _deliver(self, slot: SimulatedSlot, mail: Mail) -> None:
        """Only from slots of the running attempt: a connection belongs to one."""
        if self.slots.get(slot.index) is slot:
            self._do(lambda: self._handle(mail) if self.slots.get(slot.index) is slot else None)

    def _handle(self, mail: Mail) -> None:
        if self._attempt is not None:
            self._attempt.handle(mail)
            self._tick()

    # --- ports of the attempt ---

    def send(self, slot: SlotIndex, order: Order) -> None:
        self.slots[slot].order(order)

    def broadcast(self, order: Order) -> None:
        if isinstance(order, CompleteCheckpoint):
            self._needs.on_announced(self.ledger.attempt, order.checkpoint_id)
        for slot in self.slots.values():
            slot.order(order)

    def write(self, letter: Letter) -> None:
        self._writes.put(letter)

    def delete(self, letter: Letter) -> None:
        self._deletions.put(letter)

    def _open_lines(self) -> None:
        """As threads are started for an attempt."""
        line = partial(SimulatedLine, self._world, do=self._do, deliver=self._handle)
        self._deletions = line(self._delete_seconds_max)
        self._writes = line(self._write_seconds_max, on_fenced=self._deletions.give_up)

    def ask(self, uid: OperatorUid) -> None:
        attempt, enumerator = self.ledger.attempt, self._enumerators[uid]

        def discover() -> None:
            found = enumerator.discover()
            mail = enumerators.SplitsDiscovered(attempt, uid, found)
            self._world.soon(lambda: self._do(lambda: self._handle(mail)), 0.3)

        self._world.soon(lambda: self._do(discover), 0.5)

    def tell_complete(self, uid: OperatorUid, completed: Manifest) -> None:
        """The simulated source has nothing to let go."""

    def submit(self, manifest: Manifest) -> None:
        self._to_commit.append(manifest)
        if len(self._to_commit) == 1:
            self._commit_later()

    def _commit_later(self) -> None:
        seconds_max = 0.5 if self._world.is_calm else self._commit_seconds_max
        self._world.soon(lambda: self._do(self._commit_next), seconds_max)

    def _commit_next(self) -> None:
        """One epoch after the other, as the real thread does."""
        manifest = self._to_commit[0]
        mail: Mail = EpochCommitted(manifest.epoch)
        if not self._commit_failures:
            self._commit_began_at = self._world.now
        try:
            for uid in self._parts.sinks.committing_here:
                self._parts.sinks.commit(uid, manifest)
        except Unavailable as error:
            self._commit_failures += 1
            patience_seconds = self._needs.config.checkpoint_timeout_seconds
            is_patient = self._world.now - self._commit_began_at <= patience_seconds
            if is_patient and self._attempt is not None:
                seconds = retry_after_seconds(self._commit_failures)
                self._world.after(seconds, lambda: self._do(self._commit_next))
                return
            mail = CommitFailed(str(error), cause="other")
        except StillframeError as error:
            mail = CommitFailed(str(error), cause="other")
        self._world.soon(lambda: self._do(lambda: self._note_commit(mail)))

    def _note_commit(self, mail: Mail) -> None:
        self._commit_failures = 0
        self._to_commit.popleft()
        if self._to_commit:
            self._commit_later()
        if self._attempt is not None:
            self._attempt.handle(mail)
            self._tick()
        elif isinstance(mail, EpochCommitted):
            here = self._parts.sinks.committing_here
            self.write(partial(self.ledger.note_committed, here, mail.epoch))
