"""Channels: bounded, ordered queues of stream elements between two subtasks.

A channel has one sender and one receiver. The sender asks `has_room` before it sends a batch;
markers are always taken. The bound is in bytes and a channel with room takes one whole batch, so
the most that can wait is the bound plus one batch. A receiver that does not `take` (because the
channel is held for alignment) fills this channel and no other.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import pyarrow as pa

from stillframe.ids import CheckpointId, SlotIndex
from stillframe.runtime.elements import Barrier, Element

_BATCH_BYTES_MIN = 1024
"""What a batch takes beside its values: the number of those that have hardly any is bounded too."""


class OutputChannel(ABC):
    """The sending end. Used by the slot's loop thread only; what it has sent is read by any."""

    rows_sent = 0
    bytes_sent = 0

    @abstractmethod
    def has_room(self) -> bool:
        """Whether a batch may be sent now."""

    @abstractmethod
    def send(self, element: Element) -> None:
        """Put the element behind everything sent before; never blocks."""

    @abstractmethod
    def is_flushed(self) -> bool:
        """Whether everything sent has left this process or been taken by the receiver."""

    @abstractmethod
    def overtake(self, barrier: Barrier) -> list[pa.RecordBatch]:
        """Send the barrier ahead of all that has not left yet; answers the batches it overtook.

        They are still sent, behind it, and are in their order in the answer. What both ends share
        (a queue within one slot) is left to the receiver's `pull` and not in the answer.
        """

    @abstractmethod
    def hasten(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch] | None:
        """As `overtake`, for a barrier sent before; None if it has left already."""

    @abstractmethod
    def holds(self, checkpoint_id: CheckpointId) -> bool:
        """Whether the barrier of this checkpoint was sent and has not left yet."""


class InputChannel(ABC):
    """The receiving end. Used by the slot's loop thread only; its counts are read by any."""

    bytes_taken = 0
    queued_bytes = 0

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is nothing to take now."""

    @abstractmethod
    def peek(self) -> Element:
        """What `take` would answer. Only when not empty."""

    @abstractmethod
    def take(self) -> Element:
        """The oldest element; the sender gets its room back. Only when not empty."""

    @abstractmethod
    def waiting_barriers(self) -> Sequence[Barrier]:
        """The barriers that wait to be taken, oldest first. Cheap: asked at every step."""

    @abstractmethod
    def pull(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch]:
        """Take this waiting barrier out of its place; answers the batches in front of it.

        They stay where they are and are taken as if the barrier had never been behind them.
        """


class Exchange(Protocol):
    """Where a slot gets the ends of its channels to other slots."""

    def output(self, peer: SlotIndex, channel_id: int) -> OutputChannel: ...

    def input(self, peer: SlotIndex, channel_id: int) -> InputChannel: ...


class QueuedInput(InputChannel):
    """An input whose elements wait in a queue of this process, each with its size in bytes."""

    def __init__(self) -> None:
        self._elements: deque[tuple[Element, int]] = deque()
        self._barriers: deque[Barrier] = deque()
        self._buffered_bytes = 0
        self._overhead_bytes = 0

    @property
    def queued_bytes(self) -> int:  # type: ignore[override]
        return self._buffered_bytes

    def is_empty(self) -> bool:
        return not self._elements

    def peek(self) -> Element:
        return self._elements[0][0]

    def take(self) -> Element:
        element, size_bytes = self._elements.popleft()
        self._buffered_bytes -= size_bytes
        if size_bytes:
            self.bytes_taken += size_bytes - self._overhead_bytes
        if self._barriers and element is self._barriers[0]:
            self._barriers.popleft()
        return element

    def waiting_barriers(self) -> Sequence[Barrier]:
        return self._barriers

    def pull(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch]:
        return pull_barrier(self._elements, self._barriers, checkpoint_id)

    def _put(self, element: Element, size_bytes: int) -> None:
        self._elements.append((element, size_bytes))
        self._buffered_bytes += size_bytes
        if isinstance(element, Barrier):
            self._barriers.append(element)


class LocalChannel(OutputChannel, QueuedInput):
    """Both ends in one slot: a queue, nothing is encoded."""

    def __init__(self, buffer_bytes_max: int) -> None:
        super().__init__()
        self._buffer_bytes_max = buffer_bytes_max
        self._overhead_bytes = _BATCH_BYTES_MIN

    def has_room(self) -> bool:
        return self._buffered_bytes < self._buffer_bytes_max

    def send(self, element: Element) -> None:
        size_bytes = 0
        if isinstance(element, pa.RecordBatch):
            self.rows_sent += element.num_rows
            size_bytes = element.nbytes
            self.bytes_sent += size_bytes
            size_bytes += _BATCH_BYTES_MIN
        self._put(element, size_bytes)

    def is_flushed(self) -> bool:
        return not self._elements

    # The receiver sees all that was sent: overtaking is its part.

    def overtake(self, barrier: Barrier) -> list[pa.RecordBatch]:
        self.send(barrier)
        return []

    def hasten(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch] | None:
        return None

    def holds(self, checkpoint_id: CheckpointId) -> bool:
        return False


class ReplayingInput(InputChannel):
    """A channel in front of which stands what a checkpoint says was under way in it."""

    def __init__(self, channel: InputChannel, restored: Iterable[pa.RecordBatch]) -> None:
        self._channel = channel
        self._restored = deque(restored)

    @property
    def bytes_taken(self) -> int:  # type: ignore[override]
        return self._channel.bytes_taken

    @property
    def queued_bytes(self) -> int:  # type: ignore[override]
        return self._channel.queued_bytes

    def is_empty(self) -> bool:
        return not self._restored and self._channel.is_empty()

    def peek(self) -> Element:
        return self._restored[0] if self._restored else self._channel.peek()

    def take(self) -> Element:
        return self._restored.popleft() if self._restored else self._channel.take()

    def waiting_barriers(self) -> Sequence[Barrier]:
        return self._channel.waiting_barriers()

    def pull(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch]:
        return [*self._restored, *self._channel.pull(checkpoint_id)]


def pull_barrier(
    elements: deque[tuple[Element, int]], barriers: deque[Barrier], checkpoint_id: CheckpointId
) -> list[pa.RecordBatch]:
    """Take a waiting barrier out of a queue of elements and their sizes; see `InputChannel`."""
    barrier = next(each for each in barriers if each.checkpoint_id == checkpoint_id)
    place = next(index for index, (each, _) in enumerate(elements) if each is barrier)
    ahead = (element for element, _ in itertools.islice(elements, place))
    overtaken = [element for element in ahead if isinstance(element, pa.RecordBatch)]
    del elements[place]
    barriers.remove(barrier)
    return overtaken
