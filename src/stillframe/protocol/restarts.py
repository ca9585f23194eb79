"""Whether to start again after a failure, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin a new attempt after this long."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job fails."""

    reason: str


class FixedDelay:
    """Start again after a fixed time, so many times in a row.

    A completed checkpoint is progress and starts the count anew: a job that is killed once a day
    for a year has not failed 365 times in a row.
    """

    def __init__(self, attempts_max: int, delay_seconds: float) -> None:
        self._attempts_max = attempts_max
        self._delay_seconds = delay_seconds
        self._failures_in_a_row = 0

    def on_progress(self) -> None:
        self._failures_in_a_row = 0

    def on_failure(self, reason: str, is_permanent: bool) -> Restart | GiveUp:
        if is_permanent:
            return GiveUp(reason)
        self._failures_in_a_row += 1
        if self._failures_in_a_row > self._attempts_max:
            return GiveUp(
                f"{reason} (after {self._attempts_max} restarts without a completed checkpoint in"
                " between; raise restartAttempts to try longer)"
            )
        return Restart(self._delay_seconds)
