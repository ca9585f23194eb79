"""Splits that are found while a job runs: when to look, who gets them, what a checkpoint keeps.

Theory of operation
-------------------
An enumerator is a function of its state: asked once, it answers new splits and the state to go on
from. The coordinator keeps the last state and hands each split to one subtask, over the same
connection, first in first out, that carries the triggers of checkpoints. So a checkpoint cuts both
halves at the same place. A split handed out before the trigger is in the snapshot of its reader,
and the state taken at the trigger knows it. One handed out after the trigger is in neither, and a
job restored from the checkpoint finds it again.

Rules of this file
------------------
1. The state of a checkpoint is what `snapshot` answers when the checkpoint is triggered; by the
   time it is stored, more may have been found.
2. A split is known by its id. One that comes again, from the enumerator or as a repeated message,
   is passed over.
3. One question at a time: the next is asked an interval after the last answer.
4. A job that stops at what is there asks once in each attempt. Its subtasks hear that they have all
   for now; the state does not say so, since a job that is started again asks again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stillframe.ids import SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import JsonFields

SPLITS_PER_ORDER_MAX = 1_000
"""So that a directory of a million files does not become one message."""


@dataclass(frozen=True, slots=True)
class EnumeratorState:
    """What a checkpoint keeps of an enumerator."""

    state: JsonObject | None = None
    """None: it has not been asked yet."""
    is_last: bool = False
    """Whether it has said that there will never be more."""

    def to_json(self) -> JsonObject:
        return {"state": self.state, "is_last": self.is_last}

    @classmethod
    def from_json(cls, value: JsonObject) -> EnumeratorState:
        fields = JsonFields(value)
        state = None if value.get("state") is None else fields.object("state")
        return cls(state, fields.flag("is_last"))


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the enumerator for splits, in the background."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Tell this subtask to read these splits too; the last ones, if it says so."""

    subtask: SubtaskIndex
    splits: tuple[JsonObject, ...]
    is_last: bool
    stops: bool = False
    """Of the last ones: the last for now, behind which the job stops, and not of all."""


Instruction = Ask | Assign


class Enumeration:
    """The coordinator's side of one source with an enumerator, in one attempt."""

    def __init__(
        self,
        interval_seconds: float,
        restored: EnumeratorState,
        held: Sequence[Collection[str]],
        *,
        stops: bool = False,
    ) -> None:
        """`held` has, per subtask, the ids of the splits it starts with; `stops`: the job stops
        when it has read what is there."""
        self._interval_seconds = interval_seconds
        self._stops = stops
        self._now = restored
        self._counts = [len(ids) for ids in held]
        self._known = {split_id for ids in held for split_id in ids}
        self._ask_at_seconds: float | None = None
        self._is_running = False

    def snapshot(self) -> EnumeratorState:
        """What a checkpoint that is triggered now keeps."""
        return self._now

    def wake_at_seconds(self) -> float | None:
        """When `on_time` has something to do; None: not before something else happens."""
        return self._ask_at_seconds

    def on_running(self) -> Sequence[Instruction]:
        """All subtasks are there to be told something; the second time nothing happens."""
        if self._is_running:
            return []
        self._is_running = True
        return self._deal(()) if self._now.is_last else [Ask()]

    def on_time(self, now_seconds: float) -> Sequence[Instruction]:
        if self._ask_at_seconds is None or now_seconds < self._ask_at_seconds:
            return []
        self._ask_at_seconds = None
        return [Ask()]

    def on_discovered(
        self, splits: Sequence[JsonObject], after: EnumeratorState, now_seconds: float
    ) -> Sequence[Instruction]:
        """The enumerator has answered."""
        assert self._ask_at_seconds is None, "the enumerator answered without being asked"
        assert not self._now.is_last, "the enumerator was asked after its last answer"
        self._now = after
        if not after.is_last and not self._stops:
            self._ask_at_seconds = now_seconds + self._interval_seconds
        return self._deal(splits)

    def _deal(self, splits: Sequence[JsonObject]) -> Sequence[Assign]:
        shares: list[list[JsonObject]] = [[] for _ in self._counts]
        for split in splits:
            if split["id"] not in self._known:
                self._known.add(str(split["id"]))
                fewest = self._counts.index(min(self._counts))
                self._counts[fewest] += 1
                shares[fewest].append(split)
        stops = self._stops and not self._now.is_last
        return [
            assign
            for index, share in enumerate(shares)
            for assign in _orders(SubtaskIndex(index), share, self._now.is_last or stops, stops)
        ]


def _orders(
    subtask: SubtaskIndex, share: Sequence[JsonObject], is_last: bool, stops: bool
) -> list[Assign]:
    """In pieces; the last of them says whether it is the last of all."""
    starts = range(0, len(share), SPLITS_PER_ORDER_MAX)
    pieces = [tuple(share[start : start + SPLITS_PER_ORDER_MAX]) for start in starts]
    if is_last and not pieces:
        pieces = [()]
    ends = [False] * (len(pieces) - 1) + [is_last]
    return [
        Assign(subtask, piece, ends_here, stops and ends_here)
        for piece, ends_here in zip(pieces, ends, strict=False)
    ]
