"""Overlapping windows that a batch has changed, merged of the panes they share.

Theory of operation
-------------------
A batch that touches a key in one pane changes every window that has the pane. Each has to be merged
of all its panes, but only for the keys that were touched. Take all windows that have one moment in
common: what they have before that moment are ends of one row of panes, and what they have after it
beginnings of another. So panes are merged going back from the moment and going on from it, and each
step is kept (`_steps`). A window is one step of each, and many are put together at once. Windows
that follow each other have a moment in common as far as one window is long; for the next ones there
is another.

Rules of this file
------------------
1. Keys are numbers, or places among those that are asked for: no key is compared here.
2. Loops go over panes and windows, never over keys.
3. Steps are bounded: where they would be too many, keys are asked for in portions.
4. Called by the loop thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from stillframe.key_groups import Positions, Words, hash_columns
from stillframe.state.aggregates import AggregateTable, Layout
from stillframe.state.columns import Array

_CELLS_MAX = 1 << 21
"""So many times a key is in a step, in all that are kept at once."""
_ROWS_MAX = 32_768
"""So many rows are put together at once, or one window."""
_SCANNED_PER_NUMBER_MAX = 8
"""So many keys of a pane are looked at for each that is asked for."""


class LookedUp:
    """Numbers of keys that are looked for in one pane after the other."""

    def __init__(self, asked: Positions, count: int) -> None:
        """`count` is that of all numbers there are."""
        self.asked = asked
        self._count = count

    def is_to_be_scanned(self, table: AggregateTable) -> bool:
        """Whether to look at all that a pane has is quicker than to hash what is asked for."""
        return len(table) <= _SCANNED_PER_NUMBER_MAX * len(self.asked)

    def found_in(self, table: AggregateTable) -> tuple[Positions, list[Array]]:
        """Which of them a pane has, by their places, and what it has accumulated of them."""
        return table.held_of([pa.array(self.asked)], self._hashes)

    def found_among(self, numbers: Positions, parts: list[Array]) -> tuple[Positions, list[Array]]:
        """The same, of a pane that has these numbers; good until the pane changes."""
        places = self._place_of.take(numbers)
        here = places >= 0
        if here.all():
            return places, parts
        return places[here], [array[here] for array in parts]

    def places_of(self, numbers: Positions) -> Positions:
        """The places of those that are asked for, in no order."""
        places = self._place_of.take(numbers)
        return places[places >= 0]

    @cached_property
    def _hashes(self) -> Words:
        return hash_columns([pa.array(self.asked)])

    @cached_property
    def _place_of(self) -> Positions:
        place_of = np.full(self._count, -1, dtype=np.int64)
        place_of[self.asked] = np.arange(len(self.asked))
        return place_of


class Touches:
    """Which keys were touched between two times, asked for windows that follow each other."""

    def __init__(self, places: dict[int, Positions]) -> None:
        """`places` are those of the keys, for each pane that was touched."""
        self._panes = sorted(places)
        self._places = places
        self._last: tuple[int, int] | None = None
        self._found: Positions = np.zeros(0, dtype=np.int64)

    def between(self, start_us: int, end_us: int) -> Positions:
        """The places of those keys, sorted; the same object as long as it is the same panes."""
        span = bisect_left(self._panes, start_us), bisect_left(self._panes, end_us)
        if span != self._last:
            self._last = span
            panes = self._panes[span[0] : span[1]]
            self._found = distinct([self._places[pane] for pane in panes])
        return self._found


def distinct(numbers: Sequence[Positions]) -> Positions:
    """Each number that is in any of them once, sorted; none is negative."""
    highest = max((int(each.max(initial=-1)) for each in numbers), default=-1)
    used = np.zeros(highest + 1, dtype=np.bool_)
    for each in numbers:
        used[each] = True
    return np.flatnonzero(used)


@dataclass(frozen=True, slots=True)
class Changed:
    """What has been accumulated of some keys in windows that follow each other."""

    ends_us: Sequence[int]
    asked: Positions
    """The numbers of keys."""
    places: Sequence[Positions]
    """Of each window's keys among `asked`, sorted; where they are the same, often one object."""
    parts: list[Array]
    """Of one window after the other."""


Held = Callable[[int, LookedUp], tuple[Positions, list[Array]]]
"""Which of the keys a pane has, by their places, and what it has accumulated of them."""


class ChangedWindows:
    """Merges the windows that one batch has changed."""

    def __init__(self, layout: Layout, size_us: int, panes: Sequence[int], held: Held) -> None:
        """`panes` are all there are, sorted."""
        self._layout = layout
        self._size_us = size_us
        self._panes = panes
        self._held = held

    def values(
        self, ends_us: Iterable[int], touched: dict[int, Positions], count: int
    ) -> Iterator[Changed]:
        """Of the windows that end then, the keys that were touched in one of their panes.

        `touched` are the numbers of keys that were, by pane, and `count` that of all numbers.
        """
        for ends in _with_a_moment_in_common(ends_us, self._size_us):
            begin, end = (bisect_left(self._panes, t) for t in (ends[0] - self._size_us, ends[-1]))
            panes = self._panes[begin:end]
            of_panes = {pane: touched[pane] for pane in panes if pane in touched}
            asked = distinct(list(of_panes.values()))
            portion = max(1, _CELLS_MAX // (len(panes) + 2))
            for first in range(0, len(asked), portion):
                looked_up = LookedUp(asked[first : first + portion], count)
                touches = Touches(
                    {pane: looked_up.places_of(each) for pane, each in of_panes.items()}
                )
                yield from self._of_group(ends, panes, looked_up, touches)

    def _of_group(
        self, ends: Sequence[int], panes: Sequence[int], looked_up: LookedUp, touches: Touches
    ) -> Iterator[Changed]:
        """The windows of a group, which all have the end of the first in common."""
        middle = bisect_left(panes, ends[0])
        before = self._steps(panes[:middle][::-1], looked_up, goes_back=True)
        after = self._steps(panes[middle:], looked_up)
        at_once = max(1, _ROWS_MAX // len(looked_up.asked))
        for first in range(0, len(ends), at_once):
            some = ends[first : first + at_once]
            backward = [middle - bisect_left(panes, end - self._size_us) for end in some]
            forward = [bisect_left(panes, end) - middle for end in some]
            merged: list[Array] = []
            for accumulator, where in self._layout.each_in_memory():
                merged += accumulator.combined(
                    [steps[backward] for steps in before[where]],
                    [steps[forward] for steps in after[where]],
                )
            places = [touches.between(end - self._size_us, end) for end in some]
            yield Changed(some, looked_up.asked, places, _chosen(merged, places))

    def _steps(
        self, panes: Sequence[int], looked_up: LookedUp, goes_back: bool = False
    ) -> list[Array]:
        """What the keys have in none of the panes, in the first, in the first two, and so on."""
        steps = [
            np.empty((len(panes) + 1, len(looked_up.asked)), spec.dtype)
            for spec in self._layout.columns
        ]
        for array, spec in zip(steps, self._layout.columns, strict=True):
            array[0] = spec.initial
        for step, pane in enumerate(panes):
            places, parts = self._held(pane, looked_up)
            for array in steps:
                array[step + 1] = array[step]
            for accumulator, where in self._layout.each_in_memory():
                arrays = [array[step + 1] for array in steps[where]]
                both = ([array[places] for array in arrays], parts[where])
                values = accumulator.combined(*(both[::-1] if goes_back else both))
                for array, value in zip(arrays, values, strict=True):
                    array[places] = value
        return steps


def _with_a_moment_in_common(ends_us: Iterable[int], size_us: int) -> Iterator[list[int]]:
    """The ends, which ascend, in groups: a window that ends within one size has the first end."""
    group: list[int] = []
    for end_us in ends_us:
        if group and end_us - size_us > group[0]:
            yield group
            group = []
        group.append(end_us)
    if group:
        yield group


def _chosen(merged: Sequence[Array], places: Sequence[Positions]) -> list[Array]:
    """Of a row for each window, with all keys, those at these places, one after the other."""
    count = merged[0].shape[1] if merged else 0
    if all(len(each) == count for each in places):
        return [array.reshape(-1) for array in merged]
    flat = np.concatenate([row * count + each for row, each in enumerate(places)])
    return [array.reshape(-1).take(flat) for array in merged]
