"""Manifests taken out of their job: moved elsewhere, cut to fit another, begun from.

Rules of this file
------------------
1. Pure: a manifest in, a manifest out. Whoever says that a file has moved has moved it.
2. What a sink had prepared belongs to the job that prepared it. It commits it, so nobody who
   begins from the same state elsewhere may do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stillframe.ids import NO_CHECKPOINT, Epoch, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.manifests import (
    DiskState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
)

Moved = Callable[[FileHandle], FileHandle]


def with_files_moved(manifest: Manifest, moved: Moved) -> Manifest:
    """The same state in other files; what lives in the metadata itself stays there.

    Databases are left as they are: they are not moved file by file.
    """

    def moved_file(file: FileHandle) -> FileHandle:
        return file if file.is_inline else moved(file)

    def moved_states(states: Sequence[KeyedState]) -> tuple[KeyedState, ...]:
        return tuple(replace(state, file=moved_file(state.file)) for state in states)

    return replace(
        manifest,
        snapshots=tuple(
            replace(each, keyed=moved_states(each.keyed), broadcast=moved_states(each.broadcast))
            for each in manifest.snapshots
        ),
        channels=tuple(replace(each, file=moved_file(each.file)) for each in manifest.channels),
    )


def as_savepoint(manifest: Manifest) -> Manifest:
    """The state of a checkpoint on its own: without what belongs to the job that took it.

    That a subtask had seen the end of its data, or was told to end, is left out, too: in another
    job there may be more.
    """
    return replace(
        manifest,
        kind="savepoint",
        timings=(),
        snapshots=tuple(_on_its_own(each) for each in manifest.snapshots),
    )


def _on_its_own(part: OperatorSnapshot) -> OperatorSnapshot:
    return replace(part, commits=(), finished=False, ended=False)


def as_beginning(savepoint: Manifest, moved: Moved) -> Manifest:
    """A snapshot from elsewhere as a job sees it that starts from it: before all its own.

    A checkpoint of another job may have databases: their files are seen in their place, too.
    """
    begun = as_savepoint(with_files_moved(savepoint, moved))
    snapshots = tuple(replace(each, disk=_moved_disk(each.disk, moved)) for each in begun.snapshots)
    return replace(begun, snapshots=snapshots, checkpoint_id=NO_CHECKPOINT, epoch=Epoch(0))


def _moved_disk(disk: DiskState | None, moved: Moved) -> DiskState | None:
    if disk is None:
        return None
    files = tuple(replace(each, file=moved(each.file)) for each in disk.files)
    return replace(disk, files=files)


def with_state(
    manifest: Manifest,
    described: OperatorDescription,
    name: str,
    parts: Sequence[tuple[KeyedState, ...]],
    watermark_us: int,
) -> Manifest:
    """This state of this operator, whatever it was before; `parts` are those of its subtasks.

    `watermark_us` is said where there was no such operator.
    """
    known = manifest.snapshots_of(described.uid)
    assert not known or len(known) == len(parts), "one part for each subtask there is"
    without = without_state(manifest, described.uid, name)
    own = without.snapshots_of(described.uid) or [
        OperatorSnapshot(described.uid, SubtaskIndex(subtask), watermark_us=watermark_us)
        for subtask in range(len(parts))
    ]
    others = [each for each in without.snapshots if each.uid != described.uid]
    changed = [
        replace(each, keyed=(*each.keyed, *part)) for each, part in zip(own, parts, strict=True)
    ]
    descriptions = [each for each in without.operators if each.uid != described.uid]
    return replace(
        without,
        operators=(*descriptions, described),
        snapshots=(*others, *changed),
    )


def without_state(manifest: Manifest, uid: OperatorUid, name: str) -> Manifest:
    """All subtasks of this operator forget this state."""

    def cut(each: OperatorSnapshot) -> OperatorSnapshot:
        keyed = tuple(state for state in each.keyed if state.name != name)
        broadcast = tuple(state for state in each.broadcast if state.name != name)
        return replace(each, keyed=keyed, broadcast=broadcast)

    snapshots = (cut(each) if each.uid == uid else each for each in manifest.snapshots)
    return replace(manifest, snapshots=tuple(snapshots))


def without_operators(manifest: Manifest, gone: Collection[OperatorUid]) -> Manifest:
    """As if these operators had never been, with what was under way from and to them."""

    def is_lost(edge: str) -> bool:
        return any(edge.startswith(f"{uid}>") or _leads_to(edge, uid) for uid in gone)

    return replace(
        manifest,
        operators=tuple(each for each in manifest.operators if each.uid not in gone),
        snapshots=tuple(each for each in manifest.snapshots if each.uid not in gone),
        channels=tuple(each for each in manifest.channels if not is_lost(each.edge)),
        enumerators={uid: state for uid, state in manifest.enumerators.items() if uid not in gone},
    )


def _leads_to(edge: str, uid: OperatorUid) -> bool:
    """An edge's name may go on with which input it is, and which of several such edges."""
    _, arrow, rest = edge.partition(f">{uid}")
    return bool(arrow) and rest[:1] in _AFTER_TARGET


_AFTER_TARGET = ("", "/", "#")


def with_uids(manifest: Manifest, new: Mapping[OperatorUid, OperatorUid]) -> Manifest:
    """The same state for a job that has its operators under these uids.

    What has no new uid keeps the one it has; if that is another operator's now, it is left out.
    """
    kept = without_operators(manifest, set(new.values()) - new.keys())

    def renamed(uid: OperatorUid) -> OperatorUid:
        return new.get(uid, uid)

    def with_times(item: JsonObject) -> JsonObject:
        """How far each operator of event time had come in a split."""
        times = item.get("times")
        if not isinstance(times, Mapping):
            return item
        return {**item, "times": {renamed(OperatorUid(uid)): time for uid, time in times.items()}}

    return replace(
        kept,
        operators=tuple(replace(each, uid=renamed(each.uid)) for each in kept.operators),
        snapshots=tuple(
            replace(each, uid=renamed(each.uid), items=tuple(map(with_times, each.items)))
            for each in kept.snapshots
        ),
        channels=tuple(replace(each, edge=_renamed_edge(each.edge, new)) for each in kept.channels),
        enumerators={renamed(uid): state for uid, state in kept.enumerators.items()},
    )


def _renamed_edge(edge: str, new: Mapping[OperatorUid, OperatorUid]) -> str:
    for source in new:
        for target in sorted(new, key=len, reverse=True):
            if edge.startswith(f"{source}>{target}"):
                rest = edge.removeprefix(f"{source}>{target}")
                if rest[:1] in _AFTER_TARGET:
                    return f"{new[source]}>{new[target]}{rest}"
    return edge


@dataclass(frozen=True, slots=True)
class PreparedOutput:
    """What a sink has prepared with a checkpoint, and is not known to have committed."""

    uid: OperatorUid
    name: str
    epoch: Epoch
    rows: int | None
    """None: the sink does not tell."""

    @property
    def key(self) -> str:
        """By which a person says that it is not wanted: sink, epoch and number of rows."""
        return f"{self.uid}:{self.epoch}:{'unknown' if self.rows is None else self.rows}"

    def __str__(self) -> str:
        rows = "an unknown number of" if self.rows is None else f"{self.rows:,}"
        return f"{rows} rows of epoch {self.epoch} that the sink {self.name!r} ({self.uid})"


def prepared_output(
    manifest: Manifest, committed: Mapping[OperatorUid, Epoch]
) -> tuple[PreparedOutput, ...]:
    """Of each sink that has any. `committed`: the newest epoch it is known to have committed."""
    names = {each.uid: each.name for each in manifest.operators}
    by_sink: dict[OperatorUid, list[JsonValue]] = {}
    for snapshot in manifest.snapshots:
        if committed.get(snapshot.uid, -1) < manifest.epoch:
            rows = [pending.committable.get("rows") for pending in snapshot.commits]
            by_sink.setdefault(snapshot.uid, []).extend(rows)
    return tuple(
        PreparedOutput(uid, names.get(uid, uid), manifest.epoch, _sum_if_told(rows))
        for uid, rows in by_sink.items()
        if rows
    )


def _sum_if_told(rows: Sequence[JsonValue]) -> int | None:
    told = [each for each in rows if type(each) is int]
    return sum(told) if len(told) == len(rows) else None


def without_prepared(manifest: Manifest, sinks: Collection[OperatorUid]) -> Manifest:
    """As if these sinks had prepared nothing."""
    return replace(
        manifest,
        snapshots=tuple(
            replace(each, commits=()) if each.uid in sinks else each for each in manifest.snapshots
        ),
    )


def keeps_something(manifest: Manifest, uid: OperatorUid) -> bool:
    """Whether there is something to restore of an operator, besides what it has prepared."""
    return any(each.items or any(each.files()) for each in manifest.snapshots_of(uid))
