"""One seed, one run: a random job, random faults, then peace, and the verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from stillframe.coordinator.history import CheckpointCompleted, Event
from stillframe.errors import StorageError
from stillframe.storage.paths import checkpoint_directory
from stillframe.testing.simulation.checkers import Checkers, Violation
from stillframe.testing.simulation.driver import DriverNeeds, SimulatedDriver
from stillframe.testing.simulation.jobs import SimulatedJob, random_job
from stillframe.testing.simulation.mutants import MUTANTS
from stillframe.testing.simulation.storage import Died, Disk, SimulatedStore
from stillframe.testing.simulation.world import SimulationStuck, World

_EVENTS_MAX = 60_000


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

    @property
    def is_vacuous(self) -> bool:
        """Whether the run proves little: nothing was ever recovered from a checkpoint."""
        return self.violation is None and self.recoveries == 0


@dataclass(frozen=True, slots=True)
class Rates:
    """How much goes wrong in this run, and until when."""

    peace_from: float
    kills: int
    driver_deaths: int
    driver_stalls: int
    store_fails: float
    driver_dies_at_store: float
    after_completion: float
    """How often something is killed right after a checkpoint has completed."""
    rescales: bool
    rots: int


def run_seed(seed: int, mutant: str | None = None) -> Verdict:
    """Play the seed's job under the seed's faults, with one deliberate mistake if asked for."""
    with MUTANTS[mutant].applied() if mutant else contextlib.nullcontext():
        return _Run(seed).play()


class _Run:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._world = World(seed)
        self._disk = Disk()
        self._job: SimulatedJob = random_job(self._world)
        self._checkers = Checkers(self._job, self._disk)
        self._rates = _random_rates(self._world)
        self._slots = self._world.random.randint(1, 3)
        self._driver: SimulatedDriver | None = None
        self._drivers = 0
        self._is_over = False
        self._violation: Violation | None = None
        self._has_rotted = False
        self._delete_refused_at = -1.0
        self._is_refused = False

    def play(self) -> Verdict:
        world = self._world
        violation = None
        try:
            self._start_driver()
            self._plan_faults()
            world.run(lambda: self._is_over, _EVENTS_MAX)
            if self._violation is not None:
                raise self._violation
            if not self._is_refused:
                self._checkers.check_end()
                # What the storage would not delete in the last sweep is left, and that is right.
                if self._delete_refused_at != world.now:
                    self._checkers.check_files()
        except Violation as error:
            violation = str(error)
        except SimulationStuck as error:
            violation = f"liveness: {error}"
        except AssertionError as error:
            violation = f"assertion: {error}"
        except Exception as error:  # whatever it is, no run may end like this
            violation = f"crash: {type(error).__name__}: {error}"
        return Verdict(
            self._seed,
            violation,
            tuple(world.trace),
            len(self._checkers.completed),
            len(self._checkers.restored),
            world.events,
        )

    # --- drivers ---

    def _start_driver(self) -> None:
        if self._is_over:
            return
        self._drivers += 1
        if self._rates.rescales and self._world.chance(0.5):
            self._slots = self._world.random.randint(1, 3)
        needs = DriverNeeds(
            world=self._world,
            plan=self._job.plan(self._slots),
            config=self._job.config,
            store=SimulatedStore(self._world, self._disk, self._driver_trouble),
            slot_store=lambda: SimulatedStore(self._world, self._disk, self._slot_trouble),
            on_event=self._on_event,
            on_finished=self._on_finished,
            on_refused=self._on_refused,
        )
        self._driver = SimulatedDriver(needs, self._drivers)
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
        self._world.note(f"driver {driver.number}: {event}")
        try:
            self._checkers.on_event(event)
        except Violation as violation:
            # Whoever tells events forgives a listener that raises, so it is kept for the end.
            self._violation = self._violation or violation
            self._is_over = True
        if isinstance(event, CheckpointCompleted) and not self._is_peace:
            self._perhaps_kill_after_completion()

    def _on_finished(self) -> None:
        self._is_over = True

    def _on_refused(self, reason: str) -> None:
        """Right if a checkpoint was really damaged; then the run is over, as it should be."""
        if not self._has_rotted:
            raise Violation(f"refused: {reason}")
        self._world.note(f"refused: {reason}")
        self._is_refused = self._is_over = True

    # --- faults ---

    @property
    def _is_peace(self) -> bool:
        return self._world.now >= self._rates.peace_from

    def _driver_trouble(self, operation: str, path: str) -> None:
        if self._is_peace:
            return
        if self._world.chance(self._rates.driver_dies_at_store):
            self._world.note(f"the driver dies at {operation} {path}")
            raise Died
        changes = operation in ("write", "create", "delete")
        if changes and self._world.chance(self._rates.store_fails):
            if operation == "delete":
                self._delete_refused_at = self._world.now
            raise StorageError(f"the storage refused to {operation} {path}")

    def _slot_trouble(self, operation: str, path: str) -> None:
        if not self._is_peace and self._world.chance(self._rates.store_fails):
            raise StorageError(f"the storage refused to {operation} {path}")

    def _plan_faults(self) -> None:
        rates, random = self._rates, self._world.random

        def plan(count: int, fault: Callable[[], None]) -> None:
            for _ in range(count):
                self._world.after(random.random() * rates.peace_from, fault)

        plan(rates.kills, self._kill_a_slot)
        plan(rates.driver_deaths, self._kill_the_driver)
        plan(rates.driver_stalls, self._stall_the_driver)
        plan(rates.rots, self._rot_a_file)
        plan(random.randint(0, 1), lambda: self._world.jump_clock(random.randint(-9999, 9999)))

    def _kill_a_slot(self) -> None:
        if self._driver is None or self._driver.is_dead or not self._driver.slots:
            return
        slots = [slot for slot in self._driver.slots.values() if not slot.is_dead]
        if slots:
            self._world.random.choice(slots).kill()
            if len(slots) > 1 and self._world.chance(0.2):
                self._world.soon(self._kill_a_slot)  # two in quick succession

    def _perhaps_kill_after_completion(self) -> None:
        """The moments around a completion are the delicate ones."""
        if self._world.chance(self._rates.after_completion):
            fault = self._world.random.choice([self._kill_a_slot, self._kill_the_driver])
            self._world.soon(fault, self._world.random.choice([0.05, 0.5]))

    def _kill_the_driver(self) -> None:
        if self._driver is not None:
            self._driver.die()

    def _rot_a_file(self) -> None:
        """Damage a state file of the newest checkpoint, then kill a slot so that it is read."""
        record = self._driver.ledger.record if self._driver else None
        newest = record.newest if record else None
        if newest is None:
            return
        directory = checkpoint_directory(newest.checkpoint_id, newest.attempt)
        files = [path for path in self._disk.files if path.startswith(directory)]
        states = [path for path in files if path.endswith(".arrow")]
        if states:
            path = self._world.random.choice(states)
            self._world.note(f"{path} rots")
            self._disk.rot(path)
            self._has_rotted = True
            self._world.soon(self._kill_a_slot, 0.01)

    def _stall_the_driver(self) -> None:
        """It sleeps; somebody takes it for dead and starts another; then it wakes up."""
        driver = self._driver
        if driver is None or driver.is_dead:
            return
        self._world.note(f"driver {driver.number} stalls")
        driver.stalled_until = self._world.now + 1.0 + self._world.random.random() * 6.0
        self._world.soon(self._start_driver, 3.0)


def _random_rates(world: World) -> Rates:
    random = world.random
    return Rates(
        peace_from=random.choice([4.0, 8.0, 15.0]),
        kills=random.choice([0, 1, 2, 4]),
        driver_deaths=random.choice([0, 0, 1, 2]),
        driver_stalls=random.choice([0, 0, 1]),
        store_fails=random.choice([0.0, 0.0, 0.02, 0.1]),
        driver_dies_at_store=random.choice([0.0, 0.0, 0.02, 0.05]),
        after_completion=random.choice([0.0, 0.3, 0.6]),
        rescales=random.random() < 0.4,
        rots=random.random() < 0.08,
    )
