"""Measures where the time of a subtask goes: read the clock between subtasks, and nowhere else."""

from __future__ import annotations

from stillframe.protocol.measures import TimeShares

WORKING, TURN, BACKPRESSURED, HELD, IDLE = range(5)


class ShareClock:
    """Written by the loop; read by anyone, who may see it a step ago.

    Between its turns a subtask waits, for what its last step said; the time until its next turn is
    for that.
    """

    __slots__ = ("_since_ns", "_spent_ns", "_waits")

    def __init__(self, now_ns: int) -> None:
        self._spent_ns = [0, 0, 0, 0, 0]
        self._since_ns = now_ns
        self._waits = IDLE

    def begin_turn(self, now_ns: int) -> None:
        self._spent_ns[self._waits] += now_ns - self._since_ns
        self._since_ns, self._waits = now_ns, WORKING

    def end_turn(self, now_ns: int, has_worked: bool, waits: int) -> None:
        """`waits`: for what from now on."""
        self._spent_ns[WORKING if has_worked else waits] += now_ns - self._since_ns
        self._since_ns, self._waits = now_ns, waits

    def shares(self, now_ns: int) -> TimeShares:
        """All time until now."""
        spent = list(self._spent_ns)
        spent[self._waits] += max(0, now_ns - self._since_ns)
        return TimeShares(*spent)
