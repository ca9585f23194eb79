"""Counts how long markers took from sources to a subtask."""

from __future__ import annotations

from bisect import bisect_left

from stillframe.protocol.measures import LATENCY_BOUNDS_MS, Latency


class Latencies:
    """Written by the loop; read by anyone, who may see one marker less."""

    __slots__ = ("_counts", "_sums_ms")

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}
        self._sums_ms: dict[int, int] = {}

    def add(self, source_task: int, took_ms: int) -> None:
        """Clocks of two machines may differ: nothing takes less than no time."""
        took_ms = max(0, took_ms)
        counts = self._counts.get(source_task)
        if counts is None:
            counts = self._counts[source_task] = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        counts[bisect_left(LATENCY_BOUNDS_MS, took_ms)] += 1
        self._sums_ms[source_task] = self._sums_ms.get(source_task, 0) + took_ms

    def told(self) -> tuple[Latency, ...]:
        return tuple(
            Latency(source, tuple(counts), self._sums_ms.get(source, 0))
            for source, counts in self._counts.copy().items()
        )
