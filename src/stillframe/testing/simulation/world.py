"""Virtual time, chance and the schedule: everything that happens, happens here, one at a time."""

from __future__ import annotations

import contextlib
import heapq
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from stillframe.clock import Clock

_TRACE_MAX = 60
_SHARED_MEMORY = "/dev/shm"
_WALL_START_MS = 1_700_000_000_000


class SimulationStuck(AssertionError):
    """The job makes no progress although nothing is broken any more."""


class World(Clock):
    """The clock, the dice and the agenda of one run. Also the clock of everyone in it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._seed = seed
        self._at_end: list[Callable[[], None]] = []
        self._directories: tempfile.TemporaryDirectory[str] | None = None
        self.now = 0.0
        self.events = 0
        self.is_calm = False
        """Once nothing goes wrong any more: then whoever dawdled hurries, to end the run soon."""
        self._trace: deque[tuple[float, tuple[object, ...]]] = deque(maxlen=_TRACE_MAX)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._wall_jump_ms = 0

    def own_random(self, what: str) -> Random:
        """Dice for one question alone, whose answer changes nothing else that is drawn."""
        return Random(f"{what} of {self._seed}")

    def new_directory(self) -> Path:
        """A real one, in memory where that can be had; it is gone with the world."""
        if self._directories is None:
            quick = _SHARED_MEMORY if Path(_SHARED_MEMORY).is_dir() else None
            self._directories = tempfile.TemporaryDirectory("-simulated", "stillframe-", quick)
        return Path(tempfile.mkdtemp(dir=self._directories.name))

    def at_end(self, action: Callable[[], None]) -> None:
        """Do this when all is over, before real directories go."""
        self._at_end.append(action)

    def close(self) -> None:
        for action in self._at_end:
            with contextlib.suppress(Exception):  # the verdict is known
                action()
        if self._directories is not None:
            self._directories.cleanup()

    def monotonic_seconds(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return _WALL_START_MS + int(self.now * 1000) + self._wall_jump_ms

    def jump_clock(self, by_ms: int) -> None:
        """What people call the time may jump; what is measured with may not."""
        self._wall_jump_ms += by_ms

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do this later; of two things due at the same moment the earlier asked for comes first."""
        self._scheduled += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._scheduled, action))

    def soon(self, action: Callable[[], None], seconds_max: float = 0.1) -> None:
        self.after(self.random.random() * seconds_max, action)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def note(self, *what: object) -> None:
        """For the trace: made into text only if somebody reads it, so give what never changes."""
        self._trace.append((self.now, what))

    def trace(self) -> tuple[str, ...]:
        """What was noted last, in words."""
        return tuple(
            f"{seconds:8.3f}  {' '.join(str(each) for each in what)}"
            for seconds, what in self._trace
        )

    def run(self, is_over: Callable[[], bool], events_max: int) -> None:
        """Until it is over; raises if that takes more events than any job could need."""
        while not is_over():
            if not self._agenda:
                raise SimulationStuck("nothing is left to happen and the job is not over")
            if self.events >= events_max:
                raise SimulationStuck(f"the job is not over after {events_max} events")
            self.events += 1
            self.now, _, action = heapq.heappop(self._agenda)
            action()
