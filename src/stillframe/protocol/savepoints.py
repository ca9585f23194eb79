"""Manifests taken out of their job: moved elsewhere, cut to fit another, begun from.

Rules of this file
------------------
1. Pure: a manifest in, a manifest out. Whoever says that a file has moved has moved it.
2. What a sink had prepared belongs to the job that prepared it. It commits it, so nobody who
   begins from the same state elsewhere may do it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from stillframe.ids import NO_CHECKPOINT, Epoch, OperatorUid, SubtaskIndex
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

    That a subtask had seen the end of its data is left out, too: in another job there may be more.
    """
    return replace(
        manifest,
        kind="savepoint",
        timings=(),
        snapshots=tuple(replace(each, commits=(), finished=False) for each in manifest.snapshots),
    )


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
    return bool(arrow) and rest[:1] in ("", "/", "#")


def operators_gone(
    manifest: Manifest, present: Collection[OperatorUid]
) -> tuple[OperatorDescription, ...]:
    """Operators that have something to restore, and that a job with these does not have."""
    holding = {
        snapshot.uid
        for snapshot in manifest.snapshots
        if snapshot.items or snapshot.commits or any(snapshot.files())
    }
    return tuple(
        each for each in manifest.operators if each.uid in holding and each.uid not in present
    )
