"""One seed, one run: a random job, random faults, then peace, and the verdict."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.coordinator.rescaling import RescaleWanted
from stillframe.coordinator.savepoints import SavepointOutcome, SavepointTaken, SavepointWanted
from stillframe.ids import CheckpointId
from stillframe.protocol.checkpoints import Then
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.manifests import decode_manifest
from stillframe.protocol.messages import Acknowledged
from stillframe.storage.paths import LOG_DIRECTORY, metadata_path
from stillframe.testing.simulation.by_hand import ByHand
from stillframe.testing.simulation.checkers import Checkers, Violation
from stillframe.testing.simulation.driver import DriverNeeds, SimulatedDriver
from stillframe.testing.simulation.jobs import SimulatedJob, random_job
from stillframe.testing.simulation.limits import FAULTS, NO_LIMITS, Limits
from stillframe.testing.simulation.marked import MarkedOutside
from stillframe.testing.simulation.mutants import MUTANTS
from stillframe.testing.simulation.outside import Outside, Row
from stillframe.testing.simulation.rates import random_rates
from stillframe.testing.simulation.slot import SimulatedSlot
from stillframe.testing.simulation.storage import Died, Disk, simulated_store
from stillframe.testing.simulation.world import SimulationStuck, World

_EVENTS_MAX = 20_000
"""Some hundreds are usual, and a few thousand the most that was ever seen."""
_STRAY_TIMES = 3
_STRAY_SECONDS_MAX = 5.0
_RESCALE_TRIES = 4
_SAVEPOINTS = "/savepoints/"
_STRIKES_AT_SAVEPOINT = 0.2
"""How often a slot is killed between what a driver writes into a savepoint and the news of it."""
_LAST_WORDS_SECONDS = 3.0
"""After peace: then the job is soon over."""
_MISFITS = ("crash: TypeError", "crash: AttributeError", "crash: NameError")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run showed."""

    seed: int
    violation: str | None
    """None: every promise was kept."""
    trace: tuple[str, ...]
    checkpoints: int
    recoveries: int
    """Attempts that began from a checkpoint."""
    events: int
    drawn: Mapping[str, float]
    """How large the job was and how much went wrong in it, by the names of `Limits`."""

    @property
    def checker(self) -> str | None:
        """The name of the checker that saw a promise broken."""
        return self.violation.partition(":")[0] if self.violation else None

    @property
    def catches_mutant(self) -> bool:
        """A mutant that no longer fits the code it changes fails too, but proves nothing."""
        return self.violation is not None and not self.violation.startswith(_MISFITS)

    @property
    def is_vacuous(self) -> bool:
        """Whether the run proves little: nothing was ever recovered from a checkpoint."""
        return self.violation is None and self.recoveries == 0


def run_seed(
    seed: int, mutant: str | None = None, limits: Limits = NO_LIMITS, *, traced: bool = False
) -> Verdict:
    """Play the seed's job under the seed's faults, with one deliberate mistake if asked for.

    A run that fails has its trace in any case; making one of every other would take a while.
    """
    with _quietly(), MUTANTS[mutant].applied() if mutant else contextlib.nullcontext():
        return _Run(seed, limits, traced).play()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What goes wrong here is meant to, and nobody's news."""
    log = logging.getLogger("stillframe")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class _Run:
    def __init__(self, seed: int, limits: Limits, traced: bool) -> None:
        self._seed = seed
        self._limits = limits
        self._traced = traced
        self._world = World(seed)
        self._disk = Disk()
        self._job: SimulatedJob = random_job(self._world, limits)
        self._rates = random_rates(self._world, self._job, limits)
        self._checkers = Checkers(
            self._job, self._disk, self._rates.rescales, self._world.new_directory
        )
        for outside in self._job.outside.values():
            self._watched(outside)
        rates = self._rates
        for system in self._job.marked:
            system.fails = rates.outside_fails
        self._by_hand = ByHand(
            self._world,
            self._disk,
            self._job,
            self._checkers,
            self._end_drivers,
            self._kill_everybody,
            {"older": rates.older, "anew": rates.anew, "losses": rates.losses},
        )
        self._slots = self._random_slots()
        self._first_slots = self._slots
        self._driver: SimulatedDriver | None = None
        self._drivers = 0
        self._everyone: list[SimulatedDriver] = []
        self._is_over = False
        self._raised: Exception | None = None
        self._has_rotted = False
        self._power_lasts: int | None = None
        """For how many more operations on the storage; None: as long as one likes."""
        self._power_fails_at_completion = False
        self._strikes_at_completion = False
        self._delete_refused_at = -1.0
        self._log_written_at = -1.0
        self._is_refused = False
        self._savepoints = 0
        self._last_words: set[int] = set()
        """Drivers whose job has stopped with a savepoint."""
        self._strikes_at_last_word = self._world.own_random("strikes at last words")
        self._handovers = self._rates.handovers if self._rates.rescales and self._job.marked else 0
        self._next_slots: int | None = None
        self._back_to: int | None = None
        """How many slots there were before what was prepared changed hands."""
        self._taken: tuple[str, CheckpointId] | None = None
        """A savepoint with which a second job may begin."""
        self._taken_in_attempt: tuple[str, CheckpointId] | None = None
        """One whose prepared rows have not come out yet: they do with the next checkpoint, or, if
        the attempt breaks before, are made again and belong to a later one."""

    def play(self) -> Verdict:
        world = self._world
        violation = None
        try:
            self._play_job()
            if self._rates.twice and self._taken is not None and not self._is_refused:
                self._by_hand.start_second(*self._taken)
                self._is_over = self._world.is_calm = False
                self._play_job()
        except Violation as error:
            violation = str(error)
        except SimulationStuck as error:
            violation = f"liveness: {error}"
        except AssertionError as error:
            violation = f"assertion: {error}"
        except Exception as error:  # whatever it is, no run may end like this
            violation = f"crash: {type(error).__name__}: {error}"
        finally:
            world.close()
        return Verdict(
            self._seed,
            violation,
            world.trace() if violation or self._traced else (),
            len(self._checkers.completed),
            len(self._checkers.restored),
            world.events,
            self._drawn(),
        )

    def _play_job(self) -> None:
        self._start_driver()
        self._plan_faults()
        self._let_it_run()
        if not self._is_refused:
            self._end_slots()
            self._checkers.check_end()
            # What the storage would not delete in the last sweep is left, and that is right.
            if self._delete_refused_at < self._log_written_at:
                self._checkers.check_staged()
            if self._delete_refused_at != self._log_written_at:
                self._disk.lose_power(self._world.random)  # once more, when all is over
                self._checkers.check_files()

    def _let_it_run(self) -> None:
        try:
            self._world.run(lambda: self._is_over, _EVENTS_MAX)
        except Exception:
            if self._raised is None:
                raise
        if self._raised is not None:
            raise self._raised

    def _keep(self, error: Exception) -> None:
        """For the end, whatever becomes of it on its way there."""
        self._raised = self._raised or error
        self._is_over = True

    def _watched(self, outside: Outside | MarkedOutside) -> None:
        """What a checker raises within a sink is taken for an error of that sink's."""
        watch = outside.on_visible

        def on_visible(writer: str, rows: list[Row], prepared_for: CheckpointId | None) -> None:
            try:
                watch(writer, rows, prepared_for)
            except Violation as error:
                self._keep(error)
                raise

        outside.on_visible = on_visible

    def _drawn(self) -> dict[str, float]:
        faults = {name: getattr(self._rates, name) for name in FAULTS}
        return {"slots": self._first_slots, **self._job.sizes(), **faults}

    # --- drivers ---

    def _random_slots(self) -> int:
        return self._limits.cap("slots", self._world.random.choice([1, 1, 2, 2, 3]))

    def _start_driver(self) -> None:
        if self._is_over:
            return
        self._drivers += 1
        if self._rates.rescales and self._world.chance(0.7):
            others = [slots for slots in (1, 2, 3) if slots != self._slots]
            self._slots = self._limits.cap("slots", self._world.random.choice(others))
        if self._back_to is not None:
            self._slots = 1
        elif self._next_slots is not None:
            self._slots, self._next_slots = self._next_slots, None
        needs = DriverNeeds(
            world=self._world,
            plan=self._job.plan(self._slots),
            config=self._by_hand.config(self._job.config_for(self._drivers)),
            store=simulated_store(self._world, self._disk, self._driver_trouble),
            open_store=partial(simulated_store, self._world, self._disk, self._driver_trouble),
            slot_store=partial(simulated_store, self._world, self._disk, self._slot_trouble),
            repeats=self._rates.repeats,
            on_event=self._on_event,
            on_announced=self._checkers.on_announced,
            on_stray=self._on_stray,
            on_started=self._checkers.on_started,
            on_closed=self._checkers.on_closed,
            on_finished=self._on_finished,
            on_refused=self._on_refused,
        )
        self._driver = SimulatedDriver(needs, self._drivers)
        self._everyone.append(self._driver)
        self._world.note(f"driver {self._drivers} starts with {self._slots} slots")
        self._driver.start()
        self._watch_driver(self._driver)

    def _watch_driver(self, driver: SimulatedDriver) -> None:
        """Somebody starts the job again when its driver is gone."""

        def look() -> None:
            if self._is_over or self._driver is not driver:
                return
            if driver.is_dead:
                self._start_driver()
            else:
                self._world.after(1.0, look)

        self._world.after(1.0, look)

    def _on_event(self, driver: SimulatedDriver, event: Event) -> None:
        self._world.note(f"driver {driver.number}:", event)
        if isinstance(event, AttemptStarted):
            self._by_hand.on_begun()
            self._taken_in_attempt = None
        try:
            self._check_not_behind_last_word(driver, event)
            self._checkers.on_event(event)
        except Exception as error:
            # Whoever tells events forgives a listener that raises.
            self._keep(error)
        if isinstance(event, CheckpointCompleted):
            self._taken = self._taken_in_attempt or self._taken
            self._by_hand.perhaps_act(self._record)
            if not self._world.is_calm:
                self._perhaps_kill_after_completion()

    def _check_not_behind_last_word(self, driver: SimulatedDriver, event: Event) -> None:
        """Somebody may start the job again, but it does not go on by itself."""
        if isinstance(event, AttemptStarted) and driver.number in self._last_words:
            raise Violation(
                f"last: attempt {event.attempt} follows the savepoint with which the job stopped"
            )

    def _on_stray(self, slot: SimulatedSlot, report: Acknowledged) -> None:
        """Nobody answers, so it is said again; by then another driver may listen in its place."""

        def arrive() -> None:
            if self._driver is not None:
                self._driver.on_stray(slot, report)

        for _ in range(_STRAY_TIMES):
            self._world.soon(arrive, _STRAY_SECONDS_MAX)

    def _on_finished(self) -> None:
        self._is_over = True

    def _end_slots(self) -> None:
        if self._driver is not None:
            self._driver.end_slots()

    def _on_refused(self, reason: str) -> None:
        """Right if a checkpoint was really damaged; then the run is over, as it should be."""
        if not self._has_rotted:
            raise Violation(f"refused: {reason}")
        self._world.note(f"refused: {reason}")
        self._is_refused = self._is_over = True

    # --- faults ---

    def _make_peace(self) -> None:
        """Unless somebody is killed in this run and none was restored yet: that is waited for."""
        world, rates = self._world, self._rates
        kills = rates.kills or rates.driver_deaths
        is_late = world.now >= 3 * rates.peace_from
        if self._back_to is not None and not is_late:
            world.after(0.5, self._make_peace)
        elif kills and not self._checkers.restored and not is_late:
            self._strikes_at_completion = True
            world.after(0.5, self._make_peace)
        else:
            world.note("peace")
            world.is_calm = True
            self._plan_last_words()
            for _ in range(3 * rates.twice):
                ask = partial(self._ask_for_a_savepoint, "go on")
                world.after(self._by_hand.random.random() * _LAST_WORDS_SECONDS, ask)

    def _driver_trouble(self, operation: str, path: str) -> None:
        if operation == "link" and f"/{LOG_DIRECTORY}/" in path:
            self._log_written_at = self._world.now  # in the end: when the job was called finished
        if operation == "link" and path.startswith(_SAVEPOINTS):
            self._perhaps_strike_at_last_word()
        if self._world.is_calm:
            return
        if self._world.chance(self._rates.driver_dies_at_store):
            self._world.note(f"the driver dies at {operation} {path}")
            raise Died
        self._use_power()
        changes = operation not in ("read", "list")
        if changes and self._world.chance(self._rates.store_fails):
            if operation in ("delete", "flush"):
                self._delete_refused_at = self._world.now
            raise OSError(errno.EIO, f"refused to {operation}")

    def _perhaps_strike_at_last_word(self) -> None:
        """Also in peace: before, a savepoint with which a job stops hardly ever comes so far."""
        if self._strikes_at_last_word.random() < _STRIKES_AT_SAVEPOINT:
            self._world.after(0.0, self._kill_a_slot)

    def _slot_trouble(self, operation: str, path: str) -> None:
        if self._world.is_calm:
            return
        self._use_power()
        if self._world.chance(self._rates.store_fails):
            raise OSError(errno.EIO, f"refused to {operation}")

    def _plan_faults(self) -> None:
        rates, random = self._rates, self._world.random
        self._world.after(rates.peace_from, self._make_peace)

        def plan(count: int, fault: Callable[[], None]) -> None:
            for _ in range(count):
                self._world.after(random.random() * rates.peace_from, fault)

        plan(rates.kills, self._kill_a_slot)
        plan(rates.driver_deaths, self._kill_the_driver)
        plan(rates.driver_stalls, self._stall_the_driver)
        plan(rates.rots, self._rot_a_file)
        plan(rates.power_losses, self._let_power_fail)
        plan(rates.savepoints, self._ask_for_a_savepoint)
        plan(rates.live_rescales if rates.rescales else 0, self._ask_for_a_rescale)
        plan(rates.cancels, self._cancel_the_job)
        plan(rates.aways, lambda: self._trouble_outside(MarkedOutside.go_away))
        plan(rates.locks, lambda: self._trouble_outside(_lock_somebody))
        plan(rates.forgets, lambda: self._trouble_outside(lambda outside, _: outside.forget()))
        plan(rates.clock_jumps, lambda: self._world.jump_clock(random.randint(-9999, 9999)))

    def _trouble_outside(self, trouble: Callable[[MarkedOutside, float], None]) -> None:
        """For some seconds."""
        for outside in self._job.marked:
            trouble(outside, outside.random.choice([0.5, 2.0, 6.0]))

    def _record(self) -> JobRecord | None:
        return self._driver.ledger.record if self._driver else None

    def _plan_last_words(self) -> None:
        """A job with timers is stopped with a savepoint again and again, as they may be due and not
        have fired when its barrier comes. In peace, as it is hardly ever complete before."""
        drawn = self._world.own_random("last words")
        count = drawn.choice([2, 4, 6]) if self._job.has_timers else 0
        for _ in range(self._limits.cap("savepoints", count)):
            stop = partial(self._ask_for_a_savepoint, "stop")
            self._world.after(drawn.random() * _LAST_WORDS_SECONDS, stop)

    def _kill_a_slot(self) -> None:
        if self._driver is None or self._driver.is_dead or not self._driver.slots:
            return
        slots = [slot for slot in self._driver.slots.values() if not slot.is_dead]
        if slots:
            self._world.random.choice(slots).kill()
            if len(slots) > 1 and self._world.chance(0.2):
                self._world.soon(self._kill_a_slot)  # two in quick succession

    def _ask_for_a_savepoint(self, then: Then | None = None) -> None:
        if self._driver is None:
            return
        self._savepoints += 1
        drawn: Then = self._world.random.choice(["go on", "go on", "stop"])
        then = then or drawn
        address = f"{_SAVEPOINTS}{self._savepoints}"
        self._world.note(f"somebody wants a savepoint in {address}, and then the job to {then}")
        told = partial(self._on_savepoint, self._driver.number, then)
        self._driver.take_savepoint(SavepointWanted(address, then, told))

    def _cancel_the_job(self) -> None:
        """Only when it has a checkpoint: without one it would not be started again unasked."""
        driver = self._driver
        if driver is None or driver.is_dead:
            return
        record = driver.ledger.record
        if record is not None and record.newest is not None:
            self._world.note("somebody cancels the job")
            driver.cancel()

    def _ask_for_a_rescale(self, tries: int = _RESCALE_TRIES) -> None:
        """At most once is refused, as what a source has reserved would be skipped."""
        driver = self._driver
        if driver is None or self._job.config.checkpoint_mode == "at-most-once" or not tries:
            return
        if self._back_to is not None:
            return  # its commits are pending, and are to stay so

        def try_again(outcome: object) -> None:
            self._world.note("the rescale:", outcome)
            self._world.soon(partial(self._ask_for_a_rescale, tries - 1), 1.0)

        others = [slots for slots in (1, 2, 3) if slots != driver.plan.slots]
        slots = self._limits.cap("slots", self._world.random.choice(others))
        self._world.note(f"somebody wants {slots} slots instead of {driver.plan.slots}")
        if not driver.rescale(RescaleWanted(slots, self._job.plan(slots), try_again)):
            try_again("nothing runs")

    def _on_savepoint(self, driver: int, then: Then, outcome: SavepointOutcome) -> None:
        self._world.note(str(outcome))
        if isinstance(outcome, SavepointTaken):
            if then == "stop":
                self._last_words.add(driver)
            place = self._world, self._disk, lambda operation, path: None, outcome.address
            store, is_last_word = simulated_store(*place), then == "stop"
            number = self._checkers.check_savepoint(store, is_last_word=is_last_word)
            if self._driver is not None and self._driver.number != driver:
                return  # what an overtaken one has prepared never comes out
            self._taken_in_attempt = outcome.address, number
            if is_last_word:
                self._taken = self._taken_in_attempt

    def _perhaps_kill_after_completion(self) -> None:
        """The moments around a completion are the delicate ones."""
        if self._handovers and self._hand_over():
            return
        if self._power_fails_at_completion:
            self._power_fails_at_completion = False
            self._world.soon(self._lose_power)
        elif self._strikes_at_completion:
            self._strikes_at_completion = False
            # Only a new driver has another parallelism.
            is_slot = self._rates.kills and not self._rates.rescales
            kill = self._kill_a_slot if is_slot else self._kill_the_driver
            self._world.soon(kill, 0.5)
        elif self._world.chance(self._rates.after_completion):
            fault = self._world.random.choice([self._kill_a_slot, self._kill_the_driver])
            self._world.soon(fault, self._world.random.choice([0.05, 0.5]))

    def _hand_over(self) -> bool:
        """To one slot while commits of the last subtask are pending, and back: there that subtask
        is at work again, and another one has to commit what it had prepared before."""
        slots = self._driver.plan.slots if self._driver is not None else 1
        if self._back_to is None and slots == 1:
            return False
        for outside in self._job.marked:
            # Until that subtask has something newer to commit.
            seconds = 10.0 if self._back_to is None else 3.0 + outside.random.random() * 4.0
            outside.lock((self._back_to or slots) - 1, seconds)
        if self._back_to is None:
            self._back_to = slots
        else:
            self._next_slots, self._back_to = self._back_to, None
            self._handovers -= 1
        self._world.soon(self._kill_the_driver, 0.05)
        return True

    def _kill_the_driver(self) -> None:
        if self._driver is not None:
            self._driver.die()

    def _rot_a_file(self) -> None:
        """Damage a state file of the newest checkpoint, then kill a slot so that it is read."""
        record = self._record()
        newest = record.newest if record else None
        if newest is None:
            return
        metadata = self._disk.read(metadata_path(newest.checkpoint_id, newest.attempt))
        files = decode_manifest(metadata).files() if metadata is not None else ()
        states = sorted(file.path for file in files if self._disk.read(file.path))
        if states:
            path = self._world.random.choice(states)
            self._world.note(f"{path} rots")
            self._disk.rot(path)
            self._has_rotted = True
            self._world.soon(self._kill_a_slot, 0.01)

    def _let_power_fail(self) -> None:
        """Now, or amid one of the next operations on the storage, or after the next completion."""
        when = self._world.random.choice(["now", "amid", "amid", "completion"])
        if when == "now":
            self._lose_power()
        elif when == "amid":
            self._power_lasts = self._world.random.randint(0, 30)
        else:
            self._power_fails_at_completion = True

    def _use_power(self) -> None:
        """For one operation on the storage."""
        if self._power_lasts is None:
            return
        self._power_lasts -= 1
        if self._power_lasts < 0:
            self._lose_power()
            raise Died

    def _lose_power(self) -> None:
        """Every process dies at once, and what the storage had not flushed is at stake."""
        self._power_lasts = None
        if self._world.is_calm:
            return
        self._world.note("the power fails")
        self._kill_everybody()
        self._disk.lose_power(self._world.random)

    def _end_drivers(self) -> None:
        for driver in self._everyone:
            driver.die()

    def _kill_everybody(self) -> None:
        for driver in self._everyone:
            driver.lose_power()

    def _stall_the_driver(self) -> None:
        """It sleeps; somebody takes it for dead and starts another; then it wakes up."""
        driver = self._driver
        if driver is None or driver.is_dead:
            return
        self._world.note(f"driver {driver.number} stalls")
        driver.stalled_until = self._world.now + 1.0 + self._world.random.random() * 6.0
        self._world.soon(self._start_driver, 3.0)


def _lock_somebody(outside: MarkedOutside, seconds: float) -> None:
    outside.lock(outside.random.randint(0, 2), seconds)
