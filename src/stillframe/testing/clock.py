"""A clock that stands still until it is told otherwise."""

from __future__ import annotations


class ManualClock:
    """Time for tests: it passes only in `advance`."""

    def __init__(self, monotonic_seconds: float = 100.0, wall_ms: int = 1_767_225_600_000) -> None:
        self._monotonic_seconds = monotonic_seconds
        self._wall_ms = wall_ms

    def monotonic_seconds(self) -> float:
        return self._monotonic_seconds

    def wall_ms(self) -> int:
        return self._wall_ms

    def advance(self, seconds: float) -> None:
        """Let this much time pass, on both readings."""
        assert seconds >= 0, "time does not go back"
        self._monotonic_seconds += seconds
        self._wall_ms += round(seconds * 1000)
