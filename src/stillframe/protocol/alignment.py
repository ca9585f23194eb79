"""Barrier alignment: decides when one task may take its snapshot.

Theory of operation
-------------------
A task reads several input channels. The coordinator's barrier for a checkpoint
arrives on each of them at a different moment. To snapshot exactly once, every
record before the barrier must be inside the snapshot and no record after it may
be. So a channel that has delivered its barrier is held until all the others
have delivered theirs; then the task snapshots and every channel is released.

A barrier may overtake: then nothing is held. The task takes its snapshot at the
first one, and what the other channels deliver before theirs is recorded as part
of the checkpoint (see `recording`). An alignment that takes too long is turned
into that. Channels that close a cycle are never waited for, but recorded: their
barrier comes only after the task has sent it, unless it overtakes and another
head of the cycle had it earlier.

Rules of this file
------------------
1. No threads, no clock, no I/O. The task tells the aligner what arrived and
   carries out the instructions it answers, in order.
2. Checkpoints close in ascending order and never reopen. What arrives for a
   closed checkpoint is ignored, because it can only be late, unless its channel
   is recorded for it.
3. Channels do not end. Where the records have ended, barriers still come, until
   the job ends: so the channels to wait for are always all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stillframe.ids import NO_CHECKPOINT, ChannelIndex, CheckpointId
from stillframe.protocol.recording import Abandon, Recordings, StopRecording


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
    """Snapshot the operators, send the barrier downstream, record what these channels deliver."""

    checkpoint_id: CheckpointId
    recorded: frozenset[ChannelIndex] = frozenset()
    overtakes: bool = False
    """Whether the barrier goes out ahead of the records that wait to be sent."""


Instruction = Hold | Release | TakeSnapshot | StopRecording | Abandon


class BarrierAligner:
    """The alignment of one task: which channels are held, and for which checkpoint."""

    def __init__(
        self, channels: Iterable[ChannelIndex], feedback: Iterable[ChannelIndex] = ()
    ) -> None:
        self._feedback = frozenset(feedback)
        self._channels = set(channels) - self._feedback
        self._held_channels: set[ChannelIndex] = set()
        self._aligning: CheckpointId | None = None
        self._recordings = Recordings()
        self._last_closed = NO_CHECKPOINT
        self._cancelled: set[CheckpointId] = set()
        assert self._channels, "a task without inputs does not align"

    @property
    def is_between_barriers(self) -> bool:
        """Never: nothing behind a barrier is read before the snapshot."""
        return False

    def is_awaited(self, checkpoint_id: CheckpointId) -> bool:
        """Whether its snapshot may still be taken here."""
        return checkpoint_id > self._last_closed and checkpoint_id not in self._cancelled

    def is_recorded(self, channel: ChannelIndex, checkpoint_id: CheckpointId) -> bool:
        """Whether the snapshot is taken and this channel's barrier is awaited."""
        return self._recordings.is_awaited(channel, checkpoint_id)

    def on_barrier(
        self, channel: ChannelIndex, checkpoint_id: CheckpointId, overtakes: bool = False
    ) -> list[Instruction]:
        """A channel delivered its barrier, in its place or ahead of it."""
        assert overtakes or channel not in self._held_channels, "a held channel was read"
        instructions: list[Instruction] = [*self._recordings.on_barrier(channel, checkpoint_id)]
        if not self.is_awaited(checkpoint_id):
            return instructions
        # One that overtakes may have come round by another head before our own inputs deliver it.
        assert channel in self._channels or (overtakes and channel in self._feedback)
        if self._aligning is not None and self._aligning < checkpoint_id:
            instructions += self._abandon(self._aligning)
        self._aligning = checkpoint_id
        self._held_channels.add(channel)
        if overtakes:
            return instructions + self._snapshot(overtakes=True)
        instructions.append(Hold(channel))
        return instructions + self._snapshot_if_aligned()

    def on_patience_over(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        """Its barriers have been waited for long enough: it overtakes from here on."""
        return self._snapshot(overtakes=True) if checkpoint_id == self._aligning else []

    def on_cancel(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        """The coordinator gave this checkpoint up, perhaps before its barrier came."""
        if checkpoint_id == self._aligning:
            return self._abandon(checkpoint_id)
        if checkpoint_id > self._last_closed:
            self._cancelled.add(checkpoint_id)
        return [*self._recordings.cancel(checkpoint_id)]

    def _snapshot_if_aligned(self) -> list[Instruction]:
        if self._aligning is None or self._held_channels != self._channels:
            return []
        return self._snapshot(overtakes=False)

    def _snapshot(self, overtakes: bool) -> list[Instruction]:
        assert self._aligning is not None
        checkpoint_id = self._aligning
        recorded = frozenset((self._feedback | self._channels) - self._held_channels)
        self._recordings.begin(checkpoint_id, recorded)
        return [TakeSnapshot(checkpoint_id, recorded, overtakes), *self._close(checkpoint_id)]

    def _abandon(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        return [Abandon(checkpoint_id), *self._close(checkpoint_id)]

    def _close(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        released = frozenset(self._held_channels)
        self._held_channels.clear()
        self._aligning = None
        self._last_closed = checkpoint_id
        self._cancelled = {late for late in self._cancelled if late > checkpoint_id}
        return [Release(released)]
