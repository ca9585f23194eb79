"""Event time where several inputs meet: as far as the slowest of them has come.

Inputs are the channels of a task, or the splits of a source, which come and go. Channels are of
one stream if none of them shall hold the others back for ever: usually all are. In a job that rests
when it has read what there is, each input of a task is a stream of its own.

Rules of this file
------------------
1. Pure. The task tells what came on which channel and passes on what it is told.
2. Time never goes back: a channel that was idle and wakes up with an older watermark holds time
   where it is, and does not turn it back.
3. One of which nothing is known yet holds time where it is. An idle or closed one does not. When
   all of a stream are idle or closed, it has come as far as the furthest of them. Time has come as
   far as the slowest stream, whatever its channels do. When all are idle, so is the task.
4. Time comes to its end with the last record of all, which is not decided here: what is idle may
   still give some, and they would all be late.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

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
Channel = TypeVar("Channel", bound=Hashable)

_ONE_STREAM = 0


class EventTime(Generic[Channel]):
    """The event time of one task, by its channels."""

    def __init__(
        self,
        channels: Iterable[Channel],
        restored_us: int | None = None,
        stream_of: Mapping[Channel, int] | None = None,
    ) -> None:
        """`stream_of`: the streams of the channels; None: they are of one, as all that are opened
        later."""
        self._time_us = restored_us
        self._channels: dict[Channel, int | None] = dict.fromkeys(channels, restored_us)
        self._stream_of = stream_of or {}
        self._streams = frozenset(self._stream_of.values()) or {_ONE_STREAM}
        self._idle: set[Channel] = set()
        self._is_idle = False
        self._closed_us: dict[int, int] = {}
        """How far those had come that are closed, by stream."""

    @property
    def time_us(self) -> int | None:
        """None: nothing is known yet."""
        return self._time_us

    @property
    def channels(self) -> Mapping[Channel, int | None]:
        """Those that are open and how far each has come; None: nothing is known of it."""
        return self._channels

    def on_watermark(self, channel: Channel, time_us: int) -> list[TimeInstruction]:
        """Event time on a channel has come this far."""
        before = self._channels[channel]
        self._channels[channel] = time_us if before is None else max(before, time_us)
        self.on_active(channel)
        return self._advanced()

    def on_active(self, channel: Channel) -> None:
        """Something came on the channel: it counts again."""
        self._idle.discard(channel)
        self._is_idle = False

    def on_idle(self, channel: Channel) -> list[TimeInstruction]:
        """Nothing comes on the channel for a while."""
        self._idle.add(channel)
        return self._rested() if self._idle >= self._channels.keys() else self._advanced()

    def on_change(
        self, closed: Iterable[Channel], opened: Mapping[Channel, int | None]
    ) -> list[TimeInstruction]:
        """Nothing will come on some channels any more; others count from now on.

        Together, because what is opened must hold time back before what is closed lets it go.
        """
        for channel in closed:
            self._close(channel)
        instructions = [] if self._channels else self._advanced()
        for channel, time_us in opened.items():
            self._channels[channel] = time_us
            self.on_active(channel)
        if self._channels and self._idle >= self._channels.keys():
            return instructions + self._rested()
        return instructions + self._advanced()

    def _close(self, channel: Channel) -> None:
        time_us = self._channels.pop(channel)
        self._idle.discard(channel)
        stream = self._stream_of.get(channel, _ONE_STREAM)
        if time_us is not None:
            self._closed_us[stream] = max(time_us, self._closed_us.get(stream, time_us))

    def _rested(self) -> list[TimeInstruction]:
        if self._is_idle:
            return []
        self._is_idle = True
        return [*self._advanced(), BecomeIdle()]

    def _advanced(self) -> list[TimeInstruction]:
        times = [self._time_of(stream) for stream in self._streams]
        known = [time for time in times if time is not None]
        return self._reached(min(known)) if len(known) == len(times) else []

    def _time_of(self, stream: int) -> int | None:
        of_it = [
            each for each in self._channels if self._stream_of.get(each, _ONE_STREAM) == stream
        ]
        counting = [self._channels[each] for each in of_it if each not in self._idle]
        if counting:
            known = [time for time in counting if time is not None]
            return min(known) if len(known) == len(counting) else None
        left = (*(self._channels[each] for each in of_it), self._closed_us.get(stream))
        return max((time for time in left if time is not None), default=None)

    def _reached(self, time_us: int) -> list[TimeInstruction]:
        if self._time_us is not None and time_us <= self._time_us:
            return []
        self._time_us = time_us
        return [AdvanceTime(time_us)]
