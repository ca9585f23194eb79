"""Kills slots of a running job, as a machine would: without a warning, at a random moment.

Rules of this file
------------------
1. A slot is killed only in an attempt that has completed a checkpoint, so that a job that is killed
   any number of times still comes to its end.
2. Victims and moments follow from the seed alone. Every fourth moment or so is the very instant in
   which a checkpoint is complete and its sinks commit; the others lie anywhere in the next few
   seconds, so that some hit a later checkpoint under way.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from stillframe.clock import Clock
from stillframe.coordinator.history import (
    AttemptFailed,
    CheckpointCompleted,
    Event,
    JobEnded,
    SlotsRunning,
)

WAIT_SECONDS_MAX = 2.5
_AT_ONCE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill to come."""

    victim: float
    """0 … 1: which of the slots, however many there are."""
    wait_seconds: float
    """After the attempt's first completed checkpoint."""


def planned_kills(count: int, seed: int) -> list[Kill]:
    chance = random.Random(seed)
    kills = []
    for _ in range(count):
        victim, at_once = chance.random(), chance.random() < _AT_ONCE_SHARE
        wait_seconds = chance.uniform(0, WAIT_SECONDS_MAX)
        kills.append(Kill(victim, 0.0 if at_once else wait_seconds))
    return kills


class Killer(threading.Thread):
    """Carries out the planned kills on one job, told of its events by `on_event`."""

    def __init__(
        self, kills: list[Kill], clock: Clock, on_killed: Callable[[int, int], None]
    ) -> None:
        """`on_killed` is called with the slot and its process after each kill."""
        super().__init__(name="stillframe-killer", daemon=True)
        self.done = 0
        self._kills = kills
        self._clock = clock
        self._on_killed = on_killed
        self._events: queue.Queue[Event] = queue.Queue()
        self._pids: tuple[int, ...] = ()
        self._due_seconds: float | None = None

    def on_event(self, event: Event) -> None:
        self._events.put(event)

    def run(self) -> None:
        while self.done < len(self._kills):
            try:
                event = self._events.get(timeout=self._patience_seconds())
            except queue.Empty:
                if self._due_seconds is not None:
                    self._kill()
                continue
            if isinstance(event, JobEnded):
                return
            self._note(event)

    def _note(self, event: Event) -> None:
        match event:
            case SlotsRunning(pids=pids):
                self._pids, self._due_seconds = pids, None
            case CheckpointCompleted() if self._pids and self._due_seconds is None:
                now = self._clock.monotonic_seconds()
                self._due_seconds = now + self._kills[self.done].wait_seconds
            case AttemptFailed():
                self._pids, self._due_seconds = (), None

    def _patience_seconds(self) -> float:
        if self._due_seconds is None:
            return 1.0
        return max(0.0, self._due_seconds - self._clock.monotonic_seconds())

    def _kill(self) -> None:
        slot = int(self._kills[self.done].victim * len(self._pids))
        pid, self._pids, self._due_seconds = self._pids[slot], (), None
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has just ended by itself; the next attempt has others
        self.done += 1
        self._on_killed(slot, pid)
