"""Recording: which input channels still carry records that belong to a snapshot already taken.

Theory of operation
-------------------
A task that has taken its snapshot before the barrier came on some channel must write down what
comes on that channel until it does: those records were sent before the barrier, and the snapshot
does not hold them. That is so where a barrier overtakes records, and at the head of a cycle, which
cannot wait for a barrier that it has to send round itself. What is written down is the channel
state of the checkpoint; it is complete when the barrier has come on every recorded channel.

Rules of this file
------------------
1. Pure: the task is told which channels to record and when to stop, and does it.
2. Barriers of a channel come in ascending order. One that comes while an older checkpoint is still
   recorded there means that the older one's will not come any more: it is given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stillframe.ids import ChannelIndex, CheckpointId


@dataclass(frozen=True, slots=True)
class StopRecording:
    """What follows on this channel does not belong to the checkpoint any more."""

    checkpoint_id: CheckpointId
    channel: ChannelIndex
    is_last: bool
    """Whether no other channel is recorded for it: its channel state is complete."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Tell the coordinator that this checkpoint will not complete here."""

    checkpoint_id: CheckpointId


class Recordings:
    """The channels on which barriers of checkpoints are awaited after their snapshot."""

    def __init__(self) -> None:
        self._awaited: dict[CheckpointId, set[ChannelIndex]] = {}

    def begin(self, checkpoint_id: CheckpointId, channels: Iterable[ChannelIndex]) -> None:
        """The snapshot is taken; these channels have not delivered the barrier."""
        awaited = set(channels)
        if awaited:
            self._awaited[checkpoint_id] = awaited

    def is_awaited(self, channel: ChannelIndex, checkpoint_id: CheckpointId) -> bool:
        return channel in self._awaited.get(checkpoint_id, ())

    def on_barrier(
        self, channel: ChannelIndex, checkpoint_id: CheckpointId
    ) -> list[StopRecording | Abandon]:
        """A channel delivered a barrier, of a recorded checkpoint or not."""
        passed = [
            older
            for older, awaited in self._awaited.items()
            if older < checkpoint_id and channel in awaited
        ]
        for older in passed:
            del self._awaited[older]
        stopped = self._stop(channel, checkpoint_id)
        return [*map(Abandon, passed), *stopped]

    def cancel(self, checkpoint_id: CheckpointId) -> list[Abandon]:
        """The checkpoint was given up."""
        return [Abandon(checkpoint_id)] if self._awaited.pop(checkpoint_id, None) else []

    def _stop(self, channel: ChannelIndex, checkpoint_id: CheckpointId) -> list[StopRecording]:
        awaited = self._awaited.get(checkpoint_id)
        if awaited is None or channel not in awaited:
            return []
        awaited.remove(channel)
        if not awaited:
            del self._awaited[checkpoint_id]
        return [StopRecording(checkpoint_id, channel, is_last=not awaited)]
