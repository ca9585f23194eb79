"""Barrier alignment: decides when one task may take its snapshot.

Theory of operation
-------------------
A task reads several input channels. The coordinator's barrier for a checkpoint
arrives on each of them at a different moment. To snapshot exactly once, every
record before the barrier must be inside the snapshot and no record after it may
be. So a channel that has delivered its barrier is held until all the others
have delivered theirs; then the task snapshots and every channel is released.

Rules of this file
------------------
1. No threads, no clock, no I/O. The task tells the aligner what arrived and
   carries out the instructions it answers, in order.
2. Checkpoints close in ascending order and never reopen. What arrives for a
   closed checkpoint is ignored, because it can only be late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stillframe.ids import NO_CHECKPOINT, ChannelIndex, CheckpointId


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop reading this channel."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class Release:
    """Read these channels again."""

    channels: frozenset[ChannelIndex]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Snapshot the operators, then send the barrier downstream."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class Abandon:
    """Tell the coordinator that this checkpoint will not complete here."""

    checkpoint_id: CheckpointId


Instruction = Hold | Release | TakeSnapshot | Abandon


class BarrierAligner:
    """The alignment of one task: which channels are held, and for which checkpoint."""

    def __init__(self, channels: Iterable[ChannelIndex]) -> None:
        self._open_channels = set(channels)
        self._held_channels: set[ChannelIndex] = set()
        self._aligning: CheckpointId | None = None
        self._last_closed = NO_CHECKPOINT
        self._cancelled: set[CheckpointId] = set()
        assert self._open_channels, "a task without inputs does not align"

    def on_barrier(self, channel: ChannelIndex, checkpoint_id: CheckpointId) -> list[Instruction]:
        """A channel delivered its barrier."""
        assert channel in self._open_channels
        assert channel not in self._held_channels, "a held channel was read"
        if checkpoint_id <= self._last_closed or checkpoint_id in self._cancelled:
            return []

        instructions: list[Instruction] = []
        if self._aligning is not None and self._aligning < checkpoint_id:
            instructions += self._abandon(self._aligning)
        self._aligning = checkpoint_id
        self._held_channels.add(channel)
        instructions.append(Hold(channel))
        return instructions + self._snapshot_if_aligned()

    def on_end_of_input(self, channel: ChannelIndex) -> list[Instruction]:
        """A channel ended; it will deliver no more barriers."""
        assert channel in self._open_channels
        assert channel not in self._held_channels, "a held channel was read"
        self._open_channels.remove(channel)
        return self._snapshot_if_aligned()

    def on_cancel(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        """The coordinator gave this checkpoint up, perhaps before its barrier came."""
        if checkpoint_id == self._aligning:
            return self._abandon(checkpoint_id)
        if checkpoint_id > self._last_closed:
            self._cancelled.add(checkpoint_id)
        return []

    def _snapshot_if_aligned(self) -> list[Instruction]:
        if self._aligning is None or self._held_channels != self._open_channels:
            return []
        checkpoint_id = self._aligning
        return [TakeSnapshot(checkpoint_id), *self._close(checkpoint_id)]

    def _abandon(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        return [Abandon(checkpoint_id), *self._close(checkpoint_id)]

    def _close(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        released = frozenset(self._held_channels)
        self._held_channels.clear()
        self._aligning = None
        self._last_closed = checkpoint_id
        self._cancelled = {late for late in self._cancelled if late > checkpoint_id}
        return [Release(released)]
