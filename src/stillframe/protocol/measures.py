"""What a slot measures of its subtasks, told once a second.

Counts are since the attempt began and never go down, so that a report that is lost loses nothing:
the difference of two reports is what happened between them.
"""

from __future__ import annotations

import msgspec

from stillframe.ids import SubtaskIndex


class TimeShares(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of a subtask went, in nanoseconds. Together they are all of it."""

    working: int = 0
    """In steps that did something."""
    turn: int = 0
    """It had something to do, and others of its slot had their turn."""
    backpressured: int = 0
    """What it sends to had no room."""
    held: int = 0
    """It waited for barriers, or behind one with which the job stops."""
    idle: int = 0
    """There was nothing to do."""

    @property
    def total(self) -> int:
        return self.working + self.turn + self.backpressured + self.held + self.idle

    def since(self, earlier: TimeShares) -> TimeShares:
        return TimeShares(
            self.working - earlier.working,
            self.turn - earlier.turn,
            self.backpressured - earlier.backpressured,
            self.held - earlier.held,
            self.idle - earlier.idle,
        )


class SubtaskMeasures(msgspec.Struct, frozen=True, array_like=True):
    """One subtask, since the attempt began."""

    task: int
    subtask: SubtaskIndex
    records_in: int
    """From channels, or read by the source."""
    records_out: int
    """To channels, each as often as it was sent, and handed to sinks."""
    bytes_in: int
    bytes_out: int
    """As they lie in memory within a slot, as they are sent between slots."""
    shares: TimeShares
    watermark_us: int | None
    """Of its slowest operator."""
    records_late: int
    queued_bytes: int
    """Waiting in front of it now."""


class Measured(msgspec.Struct, frozen=True):
    """One slot, now."""

    at_ms: int
    subtasks: tuple[SubtaskMeasures, ...] = ()
    rss_bytes: int = 0
    cpu_seconds: float = 0.0
    longest_step_seconds: float = 0.0
    """Of the steps since the report before."""
