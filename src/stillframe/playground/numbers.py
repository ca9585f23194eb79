"""Which numbers were seen, and how often: a click is its number, so nothing can hide.

Click `index` of partition `p` has the number `index * partitions + p`. A column of counts with a
place for each number says of every click whether it is lost, there once, or doubled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stillframe.playground.truth import PARTITIONS, Positions

Numbers = npt.NDArray[np.int64]
_FIRST_ROOM = 1 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What a sink shows, against what it should show up to some positions."""

    rows: int
    lost: int
    """Of the numbers before the positions, those that are not there."""
    doubled: int
    """Rows whose number had been there before."""
    behind: int
    """Numbers that the positions do not cover yet: a restart from there brings each once more."""

    @property
    def is_exact(self) -> bool:
        """Every number before the positions once, and no other."""
        return not (self.lost or self.doubled or self.behind)


class NumbersSeen:
    """The numbers that some files show. For one thread at a time."""

    def __init__(self) -> None:
        self._times = np.zeros(_FIRST_ROOM, np.uint16)
        self._top = 0
        """Above the highest number."""

    def add(self, numbers: Iterable[Numbers]) -> None:
        for each in numbers:
            if not len(each):
                continue
            self._top = max(self._top, int(each.max()) + 1)
            if self._top > len(self._times):
                room = np.zeros(max(self._top, 2 * len(self._times)), np.uint16)
                room[: len(self._times)] = self._times
                self._times = room
            np.add.at(self._times, each, 1)

    def against(self, base: Positions, positions: Positions) -> Seen:
        """What should be there: every number from `base` up to `positions`, once."""
        times = self._times[: self._top]
        lost = behind = 0
        for partition in range(PARTITIONS):
            own = times[partition::PARTITIONS]
            start, stop = base.get(partition, 0), positions.get(partition, 0)
            there = int(np.count_nonzero(own[start:stop]))
            lost += max(0, stop - start) - there
            behind += int(np.count_nonzero(own[stop:]))
        rows = int(times.sum(dtype=np.int64))
        return Seen(rows, lost, rows - int(np.count_nonzero(times)), behind)

    def reached(self) -> dict[int, int]:
        """By partition: the index after the highest that was seen."""
        times = self._times[: self._top]
        ends = {}
        for partition in range(PARTITIONS):
            found = np.flatnonzero(times[partition::PARTITIONS])
            ends[partition] = int(found[-1]) + 1 if len(found) else 0
        return ends
