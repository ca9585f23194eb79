"""Time, passed in wherever it is needed, so that tests and the simulator can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one to measure with, one to tell people."""

    def monotonic_seconds(self) -> float:
        """A reading that never goes back; only differences mean anything."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as people and files know it; may jump."""


class SystemClock:
    """The machine's own clock."""

    def monotonic_seconds(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
