"""When an operator may refer to a file it wrote before instead of writing it again.

Theory of operation
-------------------
State that has not changed since the last completed checkpoint need not be written again: the
snapshot refers to what that checkpoint, the *base*, holds. The danger is that the base is gone
before the new checkpoint is complete. The coordinator drops a checkpoint when a newer one
completes, and a barrier, which comes over a channel, may be here before the news of that
completion, which comes from the coordinator:

    snapshot 5 writes a file; 6 begins before anybody here knows that 5 is complete, so it writes
    its own; then 5 is known to be complete. Now 7 begins. Has 6 completed too? If so, the file of
    5 may be deleted at any moment: 6 does not hold it.

So the base is referred to only if every snapshot taken since, whose fate is not known here, holds
the same. Whichever of them completes keeps the file alive: the newest completed checkpoint is
always retained, and one that is older than it can no longer complete.

`Sharing` is for state that is one file, `SharedFiles` for a database that is many: there the same
is decided file by file.

Rules of this file
------------------
1. No I/O and no clock: the caller writes, refers, and says what became of each checkpoint.
2. Snapshots are taken in the order of their numbers. The news may come in any order, or late.
3. State that was restored is no base, as its files may hold other key groups than these; except
   for a database that goes on with the very files it was restored from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from stillframe.ids import CheckpointId

Written = TypeVar("Written")


@dataclass(slots=True)
class _Taken(Generic[Written]):
    """A snapshot: which version of the state it holds, and where, once that is written."""

    version: int
    written: Written | None = None


class Sharing(Generic[Written]):
    """The snapshots of one state, as far as later ones may build on them."""

    def __init__(self) -> None:
        self._base: _Taken[Written] | None = None
        self._undecided: dict[CheckpointId, _Taken[Written]] = {}

    def on_snapshot(self, checkpoint_id: CheckpointId, version: int) -> Written | None:
        """What to refer to; None if the state has to be written, then call `on_written`."""
        base = self._base
        may_refer = (
            base is not None
            and base.version == version
            and all(taken.written == base.written for taken in self._undecided.values())
        )
        written = base.written if base is not None and may_refer else None
        self._undecided[checkpoint_id] = _Taken(version, written)
        return written

    def on_written(self, checkpoint_id: CheckpointId, written: Written) -> None:
        """The state is stored; the checkpoint may have been given up meanwhile."""
        if checkpoint_id in self._undecided:
            self._undecided[checkpoint_id].written = written

    def on_completed(self, checkpoint_id: CheckpointId) -> None:
        """It is the base from now on; older ones can no longer complete."""
        self._base = self._undecided.get(checkpoint_id)
        self._undecided = {
            newer: taken for newer, taken in self._undecided.items() if newer > checkpoint_id
        }

    def on_aborted(self, checkpoint_id: CheckpointId) -> None:
        """It will never complete, so nothing it holds matters."""
        self._undecided.pop(checkpoint_id, None)


class SharedFiles(Generic[Written]):
    """The files of a database, by the names they have there; a file never changes under its name.

    `restored` are those that it goes on with.
    """

    def __init__(self, restored: Mapping[str, Written] | None = None) -> None:
        self._base: Mapping[str, Written] = dict(restored or {})
        self._undecided: dict[CheckpointId, Mapping[str, Written]] = {}

    def on_snapshot(self, checkpoint_id: CheckpointId) -> Mapping[str, Written]:
        """What may be referred to instead of written; then call `on_written` with all it holds."""
        in_all = {
            name: file
            for name, file in self._base.items()
            if all(taken.get(name) == file for taken in self._undecided.values())
        }
        self._undecided[checkpoint_id] = {}
        return in_all

    def on_written(self, checkpoint_id: CheckpointId, files: Mapping[str, Written]) -> None:
        """The snapshot is stored; the checkpoint may have been given up meanwhile."""
        if checkpoint_id in self._undecided:
            self._undecided[checkpoint_id] = files

    def on_completed(self, checkpoint_id: CheckpointId) -> None:
        """It is the base from now on; older ones can no longer complete.

        One that was not taken here is the one that was restored.
        """
        self._base = self._undecided.get(checkpoint_id, self._base)
        self._undecided = {
            newer: taken for newer, taken in self._undecided.items() if newer > checkpoint_id
        }

    def on_aborted(self, checkpoint_id: CheckpointId) -> None:
        """It will never complete, so nothing it holds matters."""
        self._undecided.pop(checkpoint_id, None)
