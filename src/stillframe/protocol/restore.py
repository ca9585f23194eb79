"""What each subtask starts from: a checkpoint's state, cut to fit the plan that restores it.

Keyed state goes by key groups, so that any parallelism can read it; a source's splits and what a
sink still has to commit are dealt out one by one. Of state without keys every subtask gets one
former subtask's copy, the rows of all of them, or its share of these. Nothing is read here: only
handles are handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stillframe.ids import CheckpointId, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.key_groups import key_group_range
from stillframe.protocol.documents import JsonFields
from stillframe.protocol.joblog import CompletedCheckpoint, JobRecord
from stillframe.protocol.manifests import (
    ChannelState,
    DiskState,
    GroupsReached,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
    PendingCommit,
)


@dataclass(frozen=True, slots=True)
class DealtState:
    """A share of a file's rows: one, and then every so-manieth."""

    state: KeyedState
    first: int
    step: int

    def to_json(self) -> JsonObject:
        return {"state": self.state.to_json(), "first": self.first, "step": self.step}

    @classmethod
    def from_json(cls, value: JsonObject) -> DealtState:
        fields = JsonFields(value)
        state = KeyedState.from_json(fields.object("state"))
        return cls(state, fields.integer("first"), fields.integer("step"))


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """What one operator of one subtask starts from."""

    keyed: tuple[KeyedState, ...] = ()
    items: tuple[JsonObject, ...] = ()
    commits: tuple[PendingCommit, ...] = ()
    broadcast: tuple[KeyedState, ...] = ()
    finished: bool = False
    """Whether its records had ended."""
    ended: bool = False
    """Of a source: whether it was told to end, so that it reads nothing more."""
    watermark_us: int | None = None
    """How far event time had come everywhere: for the former subtask that was furthest behind."""
    reached: tuple[GroupsReached, ...] = ()
    """Key groups for which it had come further: a barrier that overtakes sees subtasks differ."""
    disks: tuple[DiskState, ...] = ()
    """The databases that hold key groups of its own."""
    dealt: tuple[DealtState, ...] = ()
    """Its share of the rows that belong to no key and to no subtask."""

    def to_json(self) -> JsonObject:
        time: JsonObject = {} if self.watermark_us is None else {"watermark_us": self.watermark_us}
        return {
            **time,
            "reached": [reached.to_json() for reached in self.reached],
            "keyed": [state.to_json() for state in self.keyed],
            "items": list(self.items),
            "commits": [commit.to_json() for commit in self.commits],
            "broadcast": [state.to_json() for state in self.broadcast],
            "finished": self.finished,
            "ended": self.ended,
            "disks": [disk.to_json() for disk in self.disks],
            "dealt": [dealt.to_json() for dealt in self.dealt],
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> SubtaskState:
        fields = JsonFields(value)
        return cls(
            keyed=fields.parts("keyed", KeyedState.from_json),
            items=fields.objects("items"),
            commits=fields.parts("commits", PendingCommit.from_json),
            broadcast=fields.parts("broadcast", KeyedState.from_json),
            finished=fields.flag("finished"),
            ended=fields.flag("ended"),
            watermark_us=fields.integer_if_any("watermark_us"),
            reached=fields.parts_if_any("reached", GroupsReached.from_json),
            disks=fields.parts("disks", DiskState.from_json),
            dealt=fields.parts("dealt", DealtState.from_json),
        )


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """Begin with the state of this checkpoint."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class StartFromBeginning:
    """There is no completed checkpoint of the job's own to begin with."""

    is_anew: bool = False
    """Whether the job leaves behind all it was: what it has retained is not needed any more."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no checkpoint that may be used without asking a person."""

    reason: str


def choose_restore(
    record: JobRecord | None,
    wanted: CheckpointId | None,
    damaged: Mapping[CheckpointId, str],
    sinks_commit: bool,
    *,
    fresh: bool = False,
    from_elsewhere: str | None = None,
) -> RestoreFrom | StartFromBeginning | Refuse:
    """What the next attempt begins with.

    The newest completed checkpoint, or the one a person asked for. If it is damaged, the one
    before it may stand in only if no sink may have committed the damaged one: otherwise records
    that are visible already would be written again.

    `fresh`: a person wants the job to start over. `from_elsewhere`: the snapshot that a person has
    named and that is not the job's own; a job that was cancelled begins with it, any other one only
    if it has none of its own.
    """
    was_cancelled = record is not None and record.outcome == "cancelled"
    if fresh or (was_cancelled and from_elsewhere is not None):
        return StartFromBeginning(is_anew=record is not None)
    retained = record.checkpoints if record is not None else ()
    if retained and from_elsewhere is not None:
        newest = retained[-1].checkpoint_id
        return Refuse(
            f"it has checkpoint {newest} of its own, so it does not start from {from_elsewhere}:"
            " leave restoreFrom (stillframe run --restore) out to resume from checkpoint"
            f" {newest}, or add fresh=true (stillframe run --fresh) to delete the job's checkpoints"
            f" and start from {from_elsewhere}"
        )
    if was_cancelled and not retained:
        return Refuse(
            "it was cancelled and its checkpoints deleted: start it with option fresh=true"
            " (stillframe run --fresh) to start over, or from a savepoint (restoreFrom)"
        )
    if wanted is not None:
        chosen = [kept for kept in retained if kept.checkpoint_id == wanted]
        if not chosen:
            there = ", ".join(str(kept.checkpoint_id) for kept in retained) or "none"
            return Refuse(f"checkpoint {wanted} is not retained; there are: {there}")
        if wanted in damaged:
            whole = [kept.checkpoint_id for kept in retained if kept.checkpoint_id not in damaged]
            way_on = (
                f"restoreFrom={whole[-1]}" if whole else "fresh=true to start from the beginning"
            )
            return Refuse(
                f"checkpoint {wanted} is damaged: {damaged[wanted]}; start with option {way_on}"
            )
        return RestoreFrom(chosen[0])
    for kept in reversed(retained):
        if kept.checkpoint_id not in damaged:
            return RestoreFrom(kept)
        if sinks_commit:
            return Refuse(_damage_sentence(kept, retained, damaged))
    if retained:
        return Refuse(
            f"all retained checkpoints are damaged ({damaged[retained[-1].checkpoint_id]}):"
            " start the job with option fresh=true to start over"
        )
    return StartFromBeginning()


def _damage_sentence(
    broken: CompletedCheckpoint,
    retained: Sequence[CompletedCheckpoint],
    damaged: Mapping[CheckpointId, str],
) -> str:
    older = [
        kept.checkpoint_id
        for kept in retained
        if kept.checkpoint_id < broken.checkpoint_id and kept.checkpoint_id not in damaged
    ]
    advice = (
        f"to accept duplicates, start with option restoreFrom={older[-1]}"
        f" (stillframe run --restore {older[-1]})"
        if older
        else "no older checkpoint is retained; start the job with option fresh=true to start over"
    )
    return (
        f"checkpoint {broken.checkpoint_id} is damaged ({damaged[broken.checkpoint_id]}) and its"
        f" output may be visible already, so an older one is not used unasked: {advice}"
    )


StartingState = Mapping[tuple[OperatorUid, SubtaskIndex], SubtaskState]


def starting_state(
    operators: Sequence[OperatorDescription],
    max_parallelism: int,
    manifest: Manifest | None,
    first_splits: Mapping[OperatorUid, Sequence[JsonObject]],
) -> StartingState:
    """The state of every subtask: from the checkpoint, or from the beginning where it has none.

    Whether the checkpoint fits is for `protocol/fit` to say, before this. `first_splits` are the
    sources' splits at their beginning, asked for only where the checkpoint does not know the
    source.
    """
    return {
        (operator.uid, SubtaskIndex(index)): _state_of(
            operator, SubtaskIndex(index), max_parallelism, manifest, first_splits
        )
        for operator in operators
        for index in range(operator.parallelism)
    }


def _state_of(
    operator: OperatorDescription,
    subtask: SubtaskIndex,
    max_parallelism: int,
    manifest: Manifest | None,
    first_splits: Mapping[OperatorUid, Sequence[JsonObject]],
) -> SubtaskState:
    snapshots = manifest.snapshots_of(operator.uid) if manifest is not None else ()
    if not snapshots:
        return SubtaskState(
            items=_dealt(first_splits.get(operator.uid, ()), subtask, operator.parallelism)
        )
    owned = key_group_range(subtask, operator.parallelism, max_parallelism)
    watermark_us = min(
        (each.watermark_us for each in snapshots if each.watermark_us is not None), default=None
    )
    keyed = (state for snapshot in snapshots for state in snapshot.keyed)
    disks = (snapshot.disk for snapshot in snapshots if snapshot.disk is not None)
    items = [item for snapshot in snapshots for item in snapshot.items]
    # All of a former subtask's together and in their order: a reader of the output must see an
    # older value of a key before a newer one.
    commits = (
        commit
        for snapshot in snapshots
        if snapshot.subtask % operator.parallelism == subtask
        for commit in snapshot.commits
    )
    return SubtaskState(
        keyed=tuple(state for state in keyed if any(g in owned for g in state.key_groups)),
        items=_dealt(
            sorted(items, key=lambda item: str(item.get("id"))), subtask, operator.parallelism
        ),
        commits=tuple(commits),
        broadcast=tuple(_whole(snapshots, subtask)),
        dealt=tuple(_shares(snapshots, subtask, operator.parallelism)),
        finished=all(snapshot.finished for snapshot in snapshots),
        ended=any(snapshot.ended for snapshot in snapshots),
        watermark_us=watermark_us,
        reached=tuple(_further(snapshots, watermark_us, owned, max_parallelism)),
        disks=tuple(
            disk
            for disk in disks
            if disk.first_key_group < owned.stop and owned.start < disk.stop_key_group
        ),
    )


def _whole(snapshots: Sequence[OperatorSnapshot], subtask: SubtaskIndex) -> Iterator[KeyedState]:
    """State without keys that a subtask gets as it is."""
    for place, snapshot in enumerate(snapshots):
        is_own = place == subtask % len(snapshots)
        for state in snapshot.broadcast:
            if state.redistribution == "united" or (is_own and state.redistribution == "copied"):
                yield state


def _shares(
    snapshots: Sequence[OperatorSnapshot], subtask: SubtaskIndex, parallelism: int
) -> Iterator[DealtState]:
    """Of each list, its rows in turn: as if the lists of all had been put end to end.

    As many subtasks as there were keep what they had, in its order.
    """
    before: dict[str, int] = {}
    for snapshot in sorted(snapshots, key=lambda each: each.subtask):
        for state in snapshot.broadcast:
            if state.redistribution != "dealt":
                continue
            if len(snapshots) == parallelism:
                if snapshot.subtask == subtask:
                    yield DealtState(state, 0, 1)
                continue
            first = (subtask - before.get(state.name, 0)) % parallelism
            before[state.name] = before.get(state.name, 0) + state.rows
            if first < state.rows:
                yield DealtState(state, first, parallelism)


def _further(
    snapshots: Sequence[OperatorSnapshot],
    watermark_us: int | None,
    owned: range,
    max_parallelism: int,
) -> Iterator[GroupsReached]:
    """Those of the owned key groups for which event time had come further.

    Because their former subtask had; or, where it was restored itself not long before, the one
    that had them before it.
    """
    for snapshot in snapshots:
        former = key_group_range(snapshot.subtask, len(snapshots), max_parallelism)
        if snapshot.watermark_us not in (None, watermark_us):
            assert snapshot.watermark_us is not None
            yield from _overlap(former.start, former.stop, snapshot.watermark_us, owned)
        for reached in snapshot.reached:
            yield from _overlap(reached.first, reached.stop, reached.watermark_us, owned)


def _overlap(first: int, stop: int, watermark_us: int, owned: range) -> Iterator[GroupsReached]:
    first, stop = max(first, owned.start), min(stop, owned.stop)
    if first < stop:
        yield GroupsReached(first, stop, watermark_us)


ChannelKind = Literal["forward", "rebalance", "broadcast", "hash"]


@dataclass(frozen=True, slots=True)
class EdgeDescription:
    """An edge of the plan that restores, as far as records under way are concerned."""

    name: str
    kind: ChannelKind
    target: OperatorUid
    target_parallelism: int


StartingChannels = Mapping[tuple[str, SubtaskIndex], tuple[ChannelState, ...]]
"""What was under way, by edge and by the subtask that gets it, in the order to process it in."""


def starting_channels(
    edges: Sequence[EdgeDescription], manifest: Manifest | None
) -> StartingChannels:
    """Who gets what was under way: whoever would get it if it were sent again.

    Of a hashed edge every subtask gets all and keeps the rows that are its own, of a broadcast one
    it gets what was under way to the subtask whose copy of the state it starts with.
    """
    if manifest is None or not manifest.channels:
        return {}
    by_name = {edge.name: edge for edge in edges}
    # Input before output: what had reached the receiver was sent before what had not.
    ordered = sorted(manifest.channels, key=lambda state: (state.source, state.side))
    starting: dict[tuple[str, SubtaskIndex], list[ChannelState]] = {}
    for state in ordered:
        edge = by_name[state.edge]
        for target in _receivers(edge, state, _former_parallelism(edge, manifest)):
            starting.setdefault((state.edge, target), []).append(state)
    return {where: tuple(states) for where, states in starting.items()}


def _receivers(edge: EdgeDescription, state: ChannelState, former: int) -> list[SubtaskIndex]:
    now = edge.target_parallelism
    match edge.kind:
        case "hash" if now != former:
            return [SubtaskIndex(index) for index in range(now)]
        case "broadcast":
            return [SubtaskIndex(i) for i in range(now) if i % former == state.target]
        case _:
            return [SubtaskIndex(state.target % now)]


def _former_parallelism(edge: EdgeDescription, manifest: Manifest) -> int:
    found = (op.parallelism for op in manifest.operators if op.uid == edge.target)
    return next(found, edge.target_parallelism)


def _dealt(
    items: Sequence[JsonObject], subtask: SubtaskIndex, parallelism: int
) -> tuple[JsonObject, ...]:
    return tuple(items[subtask::parallelism])
