"""Where the elements of a subtask come from: channels, some of them held, and whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stillframe.protocol.measures import ChannelMeasures
from stillframe.runtime.channels import InputChannel
from stillframe.runtime.task import ChannelName


@dataclass(frozen=True, slots=True)
class ChannelPlace:
    """What a channel is in the plan."""

    name: ChannelName
    input: int = 0
    is_feedback: bool = False
    loops: tuple[int, ...] = ()


@dataclass(slots=True)
class Inputs:
    """The input channels of a subtask: which are held, and whose turn it is."""

    channels: Sequence[InputChannel]
    records: list[int]
    """That have come on each of them."""
    held: set[int] = field(default_factory=set)
    turn: int = 0

    def next_readable(self) -> int | None:
        count = len(self.channels)
        for offset in range(count):
            index = (self.turn + offset) % count
            if index not in self.held and not self.channels[index].is_empty():
                self.turn = (index + 1) % count
                return index
        return None

    def measures(self, places: Sequence[ChannelPlace]) -> tuple[ChannelMeasures, ...]:
        """Of each channel. May be called by any thread."""
        return tuple(
            ChannelMeasures(
                *place.name,
                records,
                channel.bytes_taken,
                channel.queued_bytes,
                index in self.held,
            )
            for index, (place, channel, records) in enumerate(
                zip(places, self.channels, self.records, strict=True)
            )
        )
