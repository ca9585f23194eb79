"""Laps: how the head of a cycle finds out that nothing circulates in it any more.

Theory of operation
-------------------
When the inputs of a cycle have ended, records may still go round. Its head then sends a lap marker
round with them, and the next one when it is back. Markers keep their place among the records, so
a lap that is back has pushed everything sent before it through. A lap says whether it was *quiet*:
no head it comes from has got a record back since it sent the lap before, and no task on the way
has an input from outside the cycle that had not ended by the lap before. If a lap comes back quiet,
nothing was in the cycle when it was sent and nothing can have entered since.

A task's open input makes laps busy only for the heads that it sends to directly, but its records go
on from there to the other heads. So laps come in pairs, and the second of a pair is quiet only if
the first came back quiet to the head that sends it. The cycle is empty for all heads, and they
find it out together, if the second comes back quiet.

Rules of this file
------------------
1. Pure: the task tells what came and sends what it is told to.
2. A cycle's subtasks may be connected in part only (by forwarding). A lap then goes where records
   can go, and a head ends when all heads whose records can reach it were quiet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from stillframe.ids import ChannelIndex


class Returned(Enum):
    """What became of a lap that came back on one channel."""

    IN_PART = "others are still under way"
    BUSY = "the cycle is not known to be empty: go round again"
    QUIET = "the cycle is empty"


@dataclass(frozen=True, slots=True)
class SendLap:
    """Send this lap on along the cycle."""

    number: int
    is_quiet: bool


class HeadLaps:
    """The laps of one subtask at the head of a cycle."""

    def __init__(self, feedback: Iterable[ChannelIndex]) -> None:
        self._feedback = frozenset(feedback)
        self._missing: set[ChannelIndex] = set()
        self._number = 0
        self._was_quiet_on_the_way = True
        self._is_quiet_here = False

    @property
    def is_under_way(self) -> bool:
        return bool(self._missing)

    def next_lap(self) -> SendLap:
        """Begin another one; none is under way."""
        assert not self._missing
        self._number += 1
        is_quiet = self._is_quiet_here
        if self._is_second_of_pair:
            is_quiet = is_quiet and self._was_quiet_on_the_way
        self._missing = set(self._feedback)
        self._was_quiet_on_the_way = True
        self._is_quiet_here = True
        return SendLap(self._number, is_quiet)

    @property
    def _is_second_of_pair(self) -> bool:
        # The very first is never quiet: it may as well stand alone.
        return self._number % 2 == 1

    def on_record(self) -> None:
        """A record came back."""
        self._is_quiet_here = False

    def on_lap(self, channel: ChannelIndex, number: int, is_quiet: bool) -> Returned:
        """The lap came back on this channel."""
        assert number == self._number
        self._missing.discard(channel)
        self._was_quiet_on_the_way &= is_quiet
        if self._missing:
            return Returned.IN_PART
        is_over = self._was_quiet_on_the_way and self._is_second_of_pair
        return Returned.QUIET if is_over else Returned.BUSY


class PassingLaps:
    """The laps of one cycle at a subtask on their way: several channels in, one lap out."""

    def __init__(self, channels: Iterable[ChannelIndex]) -> None:
        self._channels = frozenset(channels)
        self._arrived: dict[int, set[ChannelIndex]] = {}
        self._quiet: dict[int, bool] = {}
        self._had_outside_ended = False

    def on_lap(
        self, channel: ChannelIndex, number: int, is_quiet: bool, has_outside_ended: bool
    ) -> SendLap | None:
        """A lap came on this channel; it goes on when it has come on all.

        `has_outside_ended`: whether every channel from outside the cycle has ended by now.
        """
        arrived = self._arrived.setdefault(number, set())
        arrived.add(channel)
        self._quiet[number] = self._quiet.get(number, True) and is_quiet
        if arrived != self._channels:
            return None
        del self._arrived[number]
        quiet = self._quiet.pop(number) and self._had_outside_ended
        self._had_outside_ended = has_outside_ended
        return SendLap(number, quiet)
