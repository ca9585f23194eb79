"""Which of the visible rows belong to the job as it is, when a person has had it go back.

A job that is restored by hand from an older checkpoint, or begun anew, makes visible again what it
had made visible before: that is what was asked for. From then on only that counts which the job had
written up to where it went back to, and what it writes from there on. Slots of its former life may
still be at work, and what they write counts for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stillframe.ids import CheckpointId
from stillframe.testing.simulation.outside import Row


@dataclass(frozen=True, slots=True)
class Shown:
    """A transaction of a sink that carries a mark."""

    uid: str
    writer: str
    prepared_for: CheckpointId
    rows: list[Row]


class Past:
    """What was made visible, with marks, and still counts."""

    def __init__(self) -> None:
        self.shown: list[Shown] = []
        self.wanted: CheckpointId | None = None
        """Where somebody wants the job to go back to, while nobody knows whether it does."""
        self._newest: float = 0
        self._doubtful: list[Shown] = []
        self._left: list[tuple[float, float]] = []
        """Checkpoints that are of no former life that counts: above the first, up to the second."""

    def is_left(self, number: CheckpointId) -> bool:
        """Whether this checkpoint is of a former life, or may be."""
        is_doubtful = self.wanted is not None and number > self.wanted
        return is_doubtful or self._is_of_former_life(number)

    def _is_of_former_life(self, number: CheckpointId) -> bool:
        return any(first < number <= last for first, last in self._left)

    def takes(self, shown: Shown) -> bool:
        """Whether this counts, as far as anybody knows by now."""
        number = shown.prepared_for
        if self._is_of_former_life(number):
            return False
        if self.wanted is not None and number > self.wanted:
            self._doubtful.append(shown)
            return False
        self.shown.append(shown)
        return True

    def go_back_to(self, wanted: CheckpointId, newest: CheckpointId | None) -> None:
        """`newest`: the last there is, after which numbers go on; None: they begin again."""
        if self.wanted is not None:
            self.went_on()
        self.wanted = wanted
        self._newest = -math.inf if newest is None else newest

    def went_back(self) -> None:
        assert self.wanted is not None
        wanted, self.wanted = self.wanted, None
        self.shown = [each for each in self.shown if each.prepared_for <= wanted]
        self._doubtful = []
        if self._newest == -math.inf:
            self._left = []
        else:
            self._left.append((wanted, self._newest))

    def went_on(self) -> None:
        """It did not go back."""
        self.wanted = None
        doubtful, self._doubtful = self._doubtful, []
        self.shown += doubtful
