"""The last events of a job, so that who was cut off for a while misses none and gets none twice.

Theory of operation
-------------------
Each event has a number, and an id that is `<run>-<number>`; another start of the job is another
run. A reader says the id it has seen last. If all that came after it is still here, it gets exactly
that; otherwise it is told to begin again, because what it knows has a gap that nobody can fill.

Rules of this file
------------------
1. The ring is bounded in events and in bytes: the oldest go.
2. A reader has a place and no queue: however many read, an event is here once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

EVENTS_MAX = 1_000
RING_BYTES_MAX = 2 << 20


@dataclass(frozen=True, slots=True)
class RingEvent:
    number: int
    data: bytes
    """As it is sent."""
    is_secret: bool = False
    """Whether it is for those alone who have shown the token."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader begins: it has seen this number and all before it."""

    number: int
    is_reset: bool = False
    """Whether there is a gap before it."""


def frame(kind: str, data: str, event_id: str | None = None) -> bytes:
    """An event as `text/event-stream` has it; without an id it leaves its reader's place alone."""
    first = "" if event_id is None else f"id: {event_id}\n"
    return f"{first}event: {kind}\ndata: {data}\n\n".encode()


class EventRing:
    """Of one run of a job."""

    def __init__(
        self, run: str, events_max: int = EVENTS_MAX, bytes_max: int = RING_BYTES_MAX
    ) -> None:
        self.run = run
        self._events: deque[RingEvent] = deque()
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self.newest = 0
        """The number of the last event; 0: there was none."""

    def id_of(self, number: int) -> str:
        return f"{self.run}-{number}"

    def append(self, kind: str, data: str, is_secret: bool = False) -> None:
        """`data`: JSON in one line."""
        self.newest += 1
        event = RingEvent(self.newest, frame(kind, data, self.id_of(self.newest)), is_secret)
        self._events.append(event)
        self._bytes += len(event.data)
        while len(self._events) > self._events_max or self._bytes > self._bytes_max:
            self._bytes -= len(self._events.popleft().data)

    def place_after(self, last_id: str | None) -> Place:
        """Where somebody goes on who has seen this; without a word, from now on."""
        if last_id is None:
            return Place(self.newest)
        run, _, text = last_id.rpartition("-")
        is_number = text.isascii() and text.isdigit() and len(text) <= 15
        if run == self.run and is_number and self.has_all_after(int(text)):
            return Place(int(text))
        return Place(self.newest, is_reset=True)

    def has_all_after(self, number: int) -> bool:
        oldest = self._events[0].number if self._events else self.newest + 1
        return oldest - 1 <= number <= self.newest

    def after(self, number: int, bytes_max: int) -> list[RingEvent]:
        """The next ones, as many as fit, but one at least if there is one."""
        found: list[RingEvent] = []
        size = 0
        for event in reversed(self._events):
            if event.number <= number:
                break
            found.append(event)
        found.reverse()
        for count, event in enumerate(found):
            size += len(event.data)
            if count and size > bytes_max:
                return found[:count]
        return found

    def bytes_after(self, number: int) -> int:
        size = 0
        for event in reversed(self._events):
            if event.number <= number:
                break
            size += len(event.data)
        return size
