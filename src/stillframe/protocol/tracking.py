"""Barriers without alignment: for at-least-once, where no channel ever waits for another.

Theory of operation
-------------------
A task that does not hold channels back keeps reading a channel whose barrier has come. When the
barrier has come on all channels it takes its snapshot; by then it may have processed records that
follow the barrier on the early channels. These are in the snapshot *and* will be replayed by the
sources: counted twice after a recovery, never lost. With one input channel nothing can be early,
so at-least-once and exactly-once are the same there.

Rules of this file
------------------
1. The same as those of `alignment`: no threads, no clock, no I/O; checkpoints close in ascending
   order and never reopen.
2. Barriers of several checkpoints may be under way at once, as nothing holds the later ones back.
3. Channels that close a cycle are recorded, as in `alignment`: what they carry is replayed by no
   source.
"""

from __future__ import annotations

from collections.abc import Iterable

from stillframe.ids import NO_CHECKPOINT, ChannelIndex, CheckpointId
from stillframe.protocol.alignment import Instruction, TakeSnapshot
from stillframe.protocol.recording import Abandon, Recordings


class BarrierTracker:
    """The barriers of one task: on which channels each checkpoint's has come."""

    def __init__(
        self, channels: Iterable[ChannelIndex], feedback: Iterable[ChannelIndex] = ()
    ) -> None:
        self._feedback = frozenset(feedback)
        self._channels = set(channels) - self._feedback
        self._recordings = Recordings()
        self._arrived: dict[CheckpointId, set[ChannelIndex]] = {}
        self._last_closed = NO_CHECKPOINT
        self._cancelled: set[CheckpointId] = set()
        assert self._channels, "a task without inputs does not wait for barriers"

    @property
    def is_between_barriers(self) -> bool:
        """Whether a barrier has come on some channels, of which more may have been read since."""
        return bool(self._arrived)

    def is_awaited(self, checkpoint_id: CheckpointId) -> bool:
        """Whether its snapshot may still be taken here."""
        return checkpoint_id > self._last_closed and checkpoint_id not in self._cancelled

    def is_recorded(self, channel: ChannelIndex, checkpoint_id: CheckpointId) -> bool:
        """Whether the snapshot is taken and this channel's barrier is awaited."""
        return self._recordings.is_awaited(channel, checkpoint_id)

    def on_barrier(
        self, channel: ChannelIndex, checkpoint_id: CheckpointId, overtakes: bool = False
    ) -> list[Instruction]:
        """A channel delivered its barrier; only those of cycles come ahead of their place."""
        instructions: list[Instruction] = [*self._recordings.on_barrier(channel, checkpoint_id)]
        if channel in self._feedback:
            return instructions
        assert channel in self._channels
        if not self.is_awaited(checkpoint_id):
            return instructions
        self._arrived.setdefault(checkpoint_id, set()).add(channel)
        return instructions + self._snapshot_if_arrived()

    def on_patience_over(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        """Nothing is held back here that patience could run out of."""
        return []

    def on_cancel(self, checkpoint_id: CheckpointId) -> list[Instruction]:
        """The coordinator gave this checkpoint up, perhaps before its barrier came."""
        if checkpoint_id <= self._last_closed:
            return [*self._recordings.cancel(checkpoint_id)]
        self._cancelled.add(checkpoint_id)
        arrived = self._arrived.pop(checkpoint_id, None)
        return [] if arrived is None else [Abandon(checkpoint_id)]

    def _snapshot_if_arrived(self) -> list[Instruction]:
        everywhere = [
            checkpoint_id
            for checkpoint_id, arrived in self._arrived.items()
            if arrived >= self._channels
        ]
        if not everywhere:
            return []
        newest = max(everywhere)
        passed = sorted(older for older in self._arrived if older < newest)
        self._close(newest)
        self._recordings.begin(newest, self._feedback)
        return [*map(Abandon, passed), TakeSnapshot(newest, self._feedback)]

    def _close(self, checkpoint_id: CheckpointId) -> None:
        self._last_closed = checkpoint_id
        self._arrived = {
            later: arrived for later, arrived in self._arrived.items() if later > checkpoint_id
        }
        self._cancelled = {later for later in self._cancelled if later > checkpoint_id}
