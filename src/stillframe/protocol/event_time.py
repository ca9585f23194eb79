"""Event time at one task: as far as its slowest input has come.

Rules of this file
------------------
1. Pure. The task tells what came on which channel and passes on what it is told.
2. Time never goes back: a channel that was idle and wakes up with an older watermark holds time
   where it is, and does not turn it back.
3. An idle or ended channel does not hold time back. When all are idle, so is the task; when all
   have ended, time has come to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stillframe.ids import ChannelIndex

END_OF_TIME_US = 2**63 - 1
"""The watermark of records that have ended."""


@dataclass(frozen=True, slots=True)
class AdvanceTime:
    """Event time has come this far: fire what is due, then pass it on."""

    time_us: int


@dataclass(frozen=True, slots=True)
class BecomeIdle:
    """Tell the outputs not to wait for this task."""


TimeInstruction = AdvanceTime | BecomeIdle


class EventTime:
    """The event time of one task, by its channels."""

    def __init__(self, channels: Iterable[ChannelIndex], restored_us: int | None = None) -> None:
        self._time_us = restored_us
        self._channels: dict[ChannelIndex, int | None] = dict.fromkeys(channels, restored_us)
        self._idle: set[ChannelIndex] = set()
        self._is_idle = False

    @property
    def time_us(self) -> int | None:
        """None: nothing is known yet."""
        return self._time_us

    def on_watermark(self, channel: ChannelIndex, time_us: int) -> list[TimeInstruction]:
        """Event time on a channel has come this far."""
        before = self._channels[channel]
        self._channels[channel] = time_us if before is None else max(before, time_us)
        self.on_active(channel)
        return self._advanced()

    def on_active(self, channel: ChannelIndex) -> None:
        """Something came on the channel: it counts again."""
        self._idle.discard(channel)
        self._is_idle = False

    def on_idle(self, channel: ChannelIndex) -> list[TimeInstruction]:
        """Nothing comes on the channel for a while."""
        self._idle.add(channel)
        if self._idle >= self._channels.keys():
            if self._is_idle:
                return []
            self._is_idle = True
            return [BecomeIdle()]
        return self._advanced()

    def _advanced(self) -> list[TimeInstruction]:
        counting = [time for each, time in self._channels.items() if each not in self._idle]
        known = [time for time in counting if time is not None]
        if len(known) < len(counting) or not known:
            return []
        slowest_us = min(known)
        if self._time_us is not None and slowest_us <= self._time_us:
            return []
        self._time_us = slowest_us
        return [AdvanceTime(slowest_us)]
