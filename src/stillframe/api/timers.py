"""The contract of timers: calls that a function orders for a key and a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import pyarrow as pa

TimerClock = Literal["event", "processing"]
"""By event time, as far as the watermark has come, or by the clock on the wall."""


class Timers(ABC):
    """The timers of one function in one subtask, as `open` is given them.

    A timer is a key, a time and a clock; the same three registered again are still one timer.
    Whole columns are registered and deleted at once. Keys are given as a batch that has the key
    columns, so the batch that was just processed will do; other columns are not looked at. Times
    are timestamps of any unit, those without a time zone in UTC; where a time is null there is no
    timer. All is part of every checkpoint, and goes where its key goes.
    """

    @property
    @abstractmethod
    def watermark_us(self) -> int | None:
        """How far event time has come, in microseconds since 1970; None: nobody knows yet.

        At the end of all records it is the largest 64-bit integer.
        """

    @property
    @abstractmethod
    def now_us(self) -> int:
        """The clock on the wall, in microseconds since 1970. It may jump, also backward."""

    @abstractmethod
    def register(self, keys: pa.RecordBatch, times: pa.Array, clock: TimerClock = "event") -> None:
        """Fire for each of these keys at its time: one time for each row of `keys`.

        A time that has passed already fires before the next records are processed.
        """

    @abstractmethod
    def delete(self, keys: pa.RecordBatch, times: pa.Array, clock: TimerClock = "event") -> None:
        """Forget these timers; those that are not there are passed over."""

    @abstractmethod
    def registered(
        self, keys: pa.RecordBatch | None = None, clock: TimerClock = "event"
    ) -> pa.RecordBatch:
        """The timers that have not fired, of these keys or of all: the key columns and `time`.

        In ascending order of times. Looks at every timer of the subtask: ask for the keys of a
        whole batch at once.
        """
