"""Channels: bounded, ordered queues of stream elements between two subtasks.

A channel has one sender and one receiver. The sender asks `has_room` before it sends a batch;
markers are always taken. The bound is in bytes and a channel with room takes one whole batch, so
the most that can wait is the bound plus one batch. A receiver that does not `take` (because the
channel is held for alignment) fills this channel and no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

import pyarrow as pa

from stillframe.ids import SlotIndex
from stillframe.runtime.elements import Element

_BATCH_BYTES_MIN = 1024
"""What a batch takes beside its values: the number of those that have hardly any is bounded too."""


class OutputChannel(ABC):
    """The sending end. Used by the slot's loop thread only."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether a batch may be sent now."""

    @abstractmethod
    def send(self, element: Element) -> None:
        """Put the element behind everything sent before; never blocks."""

    @abstractmethod
    def is_flushed(self) -> bool:
        """Whether everything sent has left this process or been taken by the receiver."""


class InputChannel(ABC):
    """The receiving end. Used by the slot's loop thread only."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is nothing to take now."""

    @abstractmethod
    def take(self) -> Element:
        """The oldest element; the sender gets its room back. Only when not empty."""


class Exchange(Protocol):
    """Where a slot gets the ends of its channels to other slots."""

    def output(self, peer: SlotIndex, channel_id: int) -> OutputChannel: ...

    def input(self, peer: SlotIndex, channel_id: int) -> InputChannel: ...


class LocalChannel(OutputChannel, InputChannel):
    """Both ends in one slot: a queue, nothing is encoded."""

    def __init__(self, buffer_bytes_max: int) -> None:
        self._buffer_bytes_max = buffer_bytes_max
        self._elements: deque[tuple[Element, int]] = deque()
        self._buffered_bytes = 0

    def has_room(self) -> bool:
        return self._buffered_bytes < self._buffer_bytes_max

    def send(self, element: Element) -> None:
        size_bytes = _size_bytes(element)
        self._elements.append((element, size_bytes))
        self._buffered_bytes += size_bytes

    def is_flushed(self) -> bool:
        return not self._elements

    def is_empty(self) -> bool:
        return not self._elements

    def take(self) -> Element:
        element, size_bytes = self._elements.popleft()
        self._buffered_bytes -= size_bytes
        return element


def _size_bytes(element: Element) -> int:
    return element.nbytes + _BATCH_BYTES_MIN if isinstance(element, pa.RecordBatch) else 0
