"""What a slot measures of its subtasks, told once a second.

Counts are since the attempt began and never go down, so that a report that is lost loses nothing:
the difference of two reports is what happened between them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stillframe.ids import CheckpointId, SubtaskIndex


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


class Aligning(msgspec.Struct, frozen=True, array_like=True):
    """Barriers of a checkpoint have come to a subtask, and others have not."""

    checkpoint: CheckpointId
    arrived: int
    channels: int
    since_ms: int
    """When the first one came."""
    missing: tuple[tuple[str, SubtaskIndex], ...]
    """Where one is waited for: the edge by its name, and the sender; eight at most."""


LATENCY_BOUNDS_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000,
    120_000, 300_000, 600_000,
)  # fmt: skip


class Latency(msgspec.Struct, frozen=True, array_like=True):
    """How long markers took from one source, on the way of its records."""

    source_task: int
    counts: tuple[int, ...]
    """Of those that took up to each of the bounds and no less than the one before, and longer."""
    sum_ms: int

    def quantile_ms(self, share: float) -> int | None:
        """What this share of them took at most, to the next bound; None: longer than all bounds."""
        wanted, so_far = share * sum(self.counts), 0
        for bound_ms, count in zip(LATENCY_BOUNDS_MS, self.counts, strict=False):
            so_far += count
            if so_far >= wanted:
                return bound_ms
        return None

    def plus(self, other: Latency) -> Latency:
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return Latency(self.source_task, counts, self.sum_ms + other.sum_ms)


def latencies_together(told: Iterable[Latency]) -> dict[int, Latency]:
    """By the source."""
    found: dict[int, Latency] = {}
    for each in told:
        before = found.get(each.source_task)
        found[each.source_task] = each if before is None else before.plus(each)
    return found


class ChannelMeasures(msgspec.Struct, frozen=True, array_like=True):
    """One channel to a subtask, since the attempt began; told while somebody looks at its task."""

    edge: str
    source: SubtaskIndex
    """The sender."""
    records: int
    bytes: int
    queued_bytes: int
    is_held: bool
    """Its barrier has come, and others have not."""


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
    state_rows: int | None = None
    """Of its keyed states, when its last snapshot was durable; None: there was none, or they are in
    a database, which does not tell."""
    state_bytes: int | None = None
    """Of all files of that snapshot."""
    lag_records: int | None = None
    """That its source has not read yet; None: it does not tell."""
    lag_ms: int | None = None
    """Since the newest record that was read was written."""
    records_written: int = 0
    """Handed to sinks; what is sent to channels is not among them."""
    aligning: Aligning | None = None
    """The oldest checkpoint for which it waits for barriers."""
    latency: tuple[Latency, ...] = ()
    """Of markers that came from each source."""
    channels: tuple[ChannelMeasures, ...] = ()
    """To it, while they are watched."""
    timers_fired: int = 0
    restore_ms: int = 0
    """How long it took to make it, with what was restored."""
    silent_ms: int | None = None
    """Of a source: since it has given something, or since the attempt began; None: it is none."""


class Measured(msgspec.Struct, frozen=True):
    """One slot, now."""

    at_ms: int
    subtasks: tuple[SubtaskMeasures, ...] = ()
    rss_bytes: int = 0
    cpu_seconds: float = 0.0
    longest_step_seconds: float = 0.0
    memory: tuple[int, int] | None = None
    """How much is left on its machine, or of what its container may have, and of how much; None:
    the system does not tell."""
    """Of the steps since the report before."""
