"""Overlapping windows that close, merged of the panes they share.

Theory of operation
-------------------
Windows that overlap share most of their panes, so they are merged by one `Sliding`, which adds a
pane at its end and takes one away at its beginning. What has been accumulated cannot be taken back
out of a minimum, so it keeps two stacks: all that came since the last turn in one merge, and before
that, for each pane, the merge of it and those after it up to the turn. A window is one entry of
each. When the older stack is used up it is made anew from the younger: every pane is merged three
times in all, however many there are in a window. Panes wait until a window is asked for; those that
come together, as the first do, become an older stack at once.

Windows that close are merged so, of all their keys (`Closing`). Those that change are merged in
another way (`changed_windows`): of the keys that a batch has touched.

Rules of this file
------------------
1. Keys are numbers: no key is compared here.
2. Loops go over panes, never over keys.
3. Called by the loop thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stillframe.key_groups import Flags, Positions
from stillframe.state.aggregates import Layout
from stillframe.state.columns import Array
from stillframe.state.reached import BEGINNING_US


@dataclass(frozen=True, slots=True)
class PaneParts:
    """What one pane has accumulated of its keys."""

    start_us: int
    numbers: Positions
    """Of its keys."""
    parts: list[Array]


class Sliding:
    """The merge of the panes between a beginning and an end that both only move forward.

    Keys are numbers, given by the caller. Within, each has a *place* in the columns; those of the
    older stack come first, the keys of its newest pane before all others, so that each entry of
    the stack is no longer than the keys it has.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._panes: deque[PaneParts] = deque()
        self._waiting: list[PaneParts] = []
        """The last of the panes, which are in neither stack yet."""
        self._older: list[tuple[int, list[Array]]] = []
        """Of the panes of the older stack, from the last one back: each merged with those after,
        and how many keys they have."""
        self._younger: list[Array] = []
        self._in_younger: Flags = np.zeros(0, dtype=np.bool_)
        self._place_of: Positions = np.zeros(0, dtype=np.int64)
        self._number_of: Positions = np.zeros(0, dtype=np.int64)
        self._turn()

    def append(self, pane: PaneParts) -> None:
        """Move the end past this pane, which is younger than all before."""
        self._panes.append(pane)
        self._waiting.append(pane)

    def drop_before(self, start_us: int) -> None:
        """Move the beginning to this time."""
        while self._panes and self._panes[0].start_us < start_us:
            if not self._older:
                self._turn()
            self._panes.popleft()
            self._older.pop()

    def merged(self) -> tuple[Positions, list[Array]]:
        """The numbers of the keys that any pane has, and what has been accumulated of each."""
        if not self._older and len(self._waiting) > 1:
            self._turn()
        self._add_waiting()
        count, older = self._older[-1] if self._older else (0, [])
        parts = [array.copy() for array in self._younger]
        if count:
            self._merge(parts, slice(count), older, are_older=True)
        here = self._in_younger.copy()
        here[:count] = True
        if here.all():
            return self._number_of, parts
        return self._number_of[here], [array[here] for array in parts]

    def _add_waiting(self) -> None:
        """Merge those that wait into the younger stack."""
        for pane in self._waiting:
            places = self._places(pane.numbers)
            self._younger = self._extended(self._younger, len(self._number_of))
            self._merge(self._younger, places, pane.parts)
            self._in_younger[places] = True
        self._waiting = []

    def _turn(self) -> None:
        """Make the older stack of all panes; the younger is empty then, and none waits."""
        self._waiting = []
        highest = max((int(pane.numbers.max(initial=-1)) for pane in self._panes), default=-1)
        count = max(len(self._place_of), highest + 1)
        newest = np.full(count, -1, dtype=np.int64)
        for index, pane in enumerate(self._panes):
            newest[pane.numbers] = index
        order = np.argsort(-newest, kind="stable")
        self._number_of = order[: int(np.count_nonzero(newest >= 0))]
        self._place_of = np.full(count, -1, dtype=np.int64)
        self._place_of[self._number_of] = np.arange(len(self._number_of))
        self._older = self._merged_from_the_last(newest)
        self._younger = self._extended([], len(self._number_of))
        self._in_younger = np.zeros(len(self._number_of), dtype=np.bool_)

    def _merged_from_the_last(self, newest: Positions) -> list[tuple[int, list[Array]]]:
        stack: list[tuple[int, list[Array]]] = []
        merged: list[Array] = []
        for index in range(len(self._panes) - 1, -1, -1):
            pane = self._panes[index]
            count = int(np.count_nonzero(newest >= index))
            merged = self._extended(merged, count, copy=True)
            self._merge(merged, self._place_of[pane.numbers], pane.parts, are_older=True)
            stack.append((count, merged))
        return stack

    def _places(self, numbers: Positions) -> Positions:
        if len(numbers) and (highest := int(numbers.max())) >= len(self._place_of):
            more = np.full(highest + 1 - len(self._place_of), -1, dtype=np.int64)
            self._place_of = np.concatenate([self._place_of, more])
        new = numbers[self._place_of[numbers] < 0]
        if len(new):
            self._place_of[new] = np.arange(len(new)) + len(self._number_of)
            self._number_of = np.concatenate([self._number_of, new])
            absent = np.zeros(len(new), dtype=np.bool_)
            self._in_younger = np.concatenate([self._in_younger, absent])
        return self._place_of[numbers]

    def _extended(self, parts: list[Array], count: int, copy: bool = False) -> list[Array]:
        specs = self._layout.columns
        parts = parts or [np.zeros(0, dtype=spec.dtype) for spec in specs]
        if not copy and all(len(array) == count for array in parts):
            return parts
        return [
            np.concatenate([array, np.full(count - len(array), spec.initial, spec.dtype)])
            for array, spec in zip(parts, specs, strict=True)
        ]

    def _merge(
        self,
        into: list[Array],
        rows: Positions | slice,
        parts: Sequence[Array],
        are_older: bool = False,
    ) -> None:
        """Take parts, which are younger or older, into these rows, of which none comes twice."""
        with np.errstate(all="ignore"):  # infinities and NaN are values
            for accumulator, where in self._layout.each_in_memory():
                arrays = into[where]
                both = ([array[rows] for array in arrays], parts[where])
                values = accumulator.combined(*(both[::-1] if are_older else both))
                for array, value in zip(arrays, values, strict=True):
                    array[rows] = value


# --- windows that close


class Closing:
    """The newest window that was closed, on its way to the next."""

    def __init__(self, layout: Layout) -> None:
        self._sliding = Sliding(layout)
        self.is_outdated = False
        """Whether a pane has changed that is in already: start over."""
        self.next_us = BEGINNING_US
        """Panes before are in already, or were left behind."""

    def on_change(self, pane: int) -> None:
        """Records have come for this pane, or it is new."""
        self.is_outdated |= pane < self.next_us

    def append(self, pane: PaneParts) -> None:
        """Move the end past this pane."""
        self._sliding.append(pane)
        self.next_us = pane.start_us + 1

    def values_from(self, start_us: int) -> tuple[Positions, list[Array]]:
        """Of the window that begins then: numbers of keys, and what is accumulated of each."""
        self._sliding.drop_before(start_us)
        return self._sliding.merged()
