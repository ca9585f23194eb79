"""Event time at a source: as far as the slowest of the splits it reads.

Theory of operation
-------------------
A source's subtask reads several splits, each of which has a time of its own: partitions of a log
are read at different speeds, and files one after the other, the older perhaps last. Time has come
as far as the split that is furthest behind, so that none of them can make the others late. A split
counts from when it is there, before it has given anything, until it has ended.

One from which no time has come for long is idle and does not hold the others back, as one whose
records are all filtered away before anybody looks at their time. How long is measured in the time
that the source has *listened*: while it is held up by those behind it, a split has not been asked.
Where splits are read in turn, one that waits for its turn is not idle.

Rules of this file
------------------
1. Pure. The source's subtask says what it reads from, also how long it has listened.
2. A source that does not tell its splits has one, which is always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stillframe.protocol.event_time import EventTime, TimeInstruction

_WholeSource: TypeAlias = None
_SplitId: TypeAlias = str | _WholeSource


@dataclass(frozen=True, slots=True)
class OpenSplits:
    """What a source reads from, as of one moment."""

    ids: frozenset[str]
    """The splits that may still give records."""
    polled: str | None = None
    """The one that the next records are from, which may have ended with them."""
    listened_seconds: float | None = None
    """How long the source has listened; None: it reads in turn, none of its splits is idle."""


class SplitTimes:
    """How far event time has come at one place behind a source."""

    def __init__(
        self,
        restored_us: int | None = None,
        restored_splits: Mapping[str, int] | None = None,
        idle_timeout_seconds: float | None = None,
    ) -> None:
        self._time: EventTime[_SplitId] = EventTime([None], restored_us)
        self._restored = dict(restored_splits or {})
        self._idle_timeout_seconds = idle_timeout_seconds
        self._polled: _SplitId = None
        self._counted: frozenset[str] | None = None
        self._listened_seconds: float | None = None
        self._seen_at_seconds: dict[str, float] = {}
        self._idle: set[str] = set()

    @property
    def time_us(self) -> int | None:
        """None: nothing is known yet."""
        return self._time.time_us

    def time_of(self, split: str) -> int | None:
        """How far event time had come for the records of this split, of a source that tells.

        Not behind what was promised of all: what had been late must be so after a restore.
        """
        if self._counted is None:
            return None
        own_us, time_us = self._time.channels.get(split), self._time.time_us
        return max((each for each in (own_us, time_us) if each is not None), default=None)

    def on_splits(self, splits: OpenSplits) -> list[TimeInstruction]:
        """What the source reads from now."""
        self._polled, self._listened_seconds = splits.polled, splits.listened_seconds
        counted = splits.ids
        if splits.polled is not None and splits.polled not in counted:
            counted |= {splits.polled}
        instructions: list[TimeInstruction] = []
        if counted is not self._counted:
            self._counted = counted
            instructions = self._change(counted)
        return instructions + self._notice_idle()

    def on_time(self, time_us: int) -> list[TimeInstruction]:
        """Event time has come this far in the split that was polled."""
        if self._polled is not None and self._listened_seconds is not None:
            self._seen_at_seconds[self._polled] = self._listened_seconds
            self._idle.discard(self._polled)
        return self._time.on_watermark(self._polled, time_us)

    def _change(self, counted: frozenset[str]) -> list[TimeInstruction]:
        before = self._time.channels.keys()
        new = counted - before
        self._idle &= counted
        self._seen_at_seconds = {
            split: seen for split, seen in self._seen_at_seconds.items() if split in counted
        }
        if self._listened_seconds is not None:
            self._seen_at_seconds |= dict.fromkeys(new, self._listened_seconds)
        opened: dict[_SplitId, int | None] = {
            split: self._restored.pop(split, None) for split in new
        }
        return self._time.on_change(before - counted, opened)

    def _notice_idle(self) -> list[TimeInstruction]:
        if self._idle_timeout_seconds is None or self._listened_seconds is None:
            return []
        since = self._listened_seconds - self._idle_timeout_seconds
        silent = {split for split, seen in self._seen_at_seconds.items() if seen <= since}
        instructions: list[TimeInstruction] = []
        for split in sorted(silent - self._idle):
            if split != self._polled:
                self._idle.add(split)
                instructions += self._time.on_idle(split)
        return instructions
