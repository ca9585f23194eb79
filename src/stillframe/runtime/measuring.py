"""When a slot measures its subtasks, and how closely: what costs is done while somebody looks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from msgspec.structs import replace

from stillframe.clock import Clock
from stillframe.memory import memory_left, resident_bytes
from stillframe.protocol.measures import Measured, SubtaskMeasures
from stillframe.runtime.inner_task import InnerSubtask
from stillframe.runtime.source_task import SourceSubtask
from stillframe.runtime.task import Subtask, Turn


class Measuring:
    """Used by the thread that reports; the loop sets what is watched."""

    def __init__(self, interval_seconds: float | Literal["off"], clock: Clock, turn: Turn) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._turn = turn
        self._at_seconds = clock.monotonic_seconds()
        self.watched: frozenset[int] = frozenset()
        """Tasks at whose channels somebody looks."""

    def is_due(self) -> bool:
        now = self._clock.monotonic_seconds()
        if self._interval_seconds == "off" or now < self._at_seconds:
            return False
        # Counted from when it was due, for it is looked at twice a second only.
        self._at_seconds = max(now, self._at_seconds + self._interval_seconds)
        return True

    def measured(self, subtasks: Iterable[Subtask]) -> Measured:
        now_ns = time.perf_counter_ns()
        longest_ns, self._turn.longest_ns = self._turn.longest_ns, 0
        return Measured(
            self._clock.wall_ms(),
            tuple(self._measures(subtask, now_ns) for subtask in list(subtasks)),
            resident_bytes(),
            time.process_time(),
            longest_ns / 1e9,
            memory_left(),
        )

    def _measures(self, subtask: Subtask, now_ns: int) -> SubtaskMeasures:
        told = subtask.measures(now_ns)
        if subtask.ref.task not in self.watched or not isinstance(subtask, InnerSubtask):
            return told
        return replace(told, channels=subtask.channel_measures())


def want_latency(subtasks: Iterable[Subtask], now_ms: int) -> None:
    """Have sources send a marker behind which nobody waits. Called by the loop."""
    for subtask in subtasks:
        if isinstance(subtask, SourceSubtask):
            subtask.on_latency_wanted(now_ms)
