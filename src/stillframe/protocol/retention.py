"""Who needs which shared file: a file goes when nobody is left who does.

Theory of operation
-------------------
A checkpoint may refer to files that an older one wrote. So a file does not end with the checkpoint
it was written for, but with its last user. Users are the *retained* checkpoints, those the job log
speaks of, and the *pending* ones, as far as they have been acknowledged. Whenever a user goes, the
files that nobody else uses are handed back to be deleted.

What has no user was written for a checkpoint that failed: an acknowledgement that comes too late
is answered with its files at once, and what was never acknowledged is left to its writer and to the
next sweep.

Rules of this file
------------------
1. No I/O: the caller deletes what it is told to, or leaves it to the sweep; it may come twice.
2. A pending checkpoint takes nothing away from a retained one, whatever becomes of it.
3. While a retained checkpoint cannot be read, any file might be its own: nothing is handed back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stillframe.ids import CheckpointId

Files = frozenset[str]
_NONE: Files = frozenset()


class Retention:
    """The shared files of one job and the checkpoints that use them."""

    def __init__(self) -> None:
        self._retained: dict[CheckpointId, Files | None] = {}
        """None: its metadata could not be read."""
        self._has_started = False
        self._pending: dict[CheckpointId, Files] = {}

    def retained_files(self) -> Files | None:
        """What the retained checkpoints use; None where that is not known."""
        if not self._has_started:
            return None
        known = [files for files in self._retained.values() if files is not None]
        return _NONE.union(*known) if len(known) == len(self._retained) else None

    def on_started(self, retained: Mapping[CheckpointId, Iterable[str] | None]) -> None:
        """An attempt begins: what was pending is over, and its files are left to the sweep."""
        self._pending.clear()
        self._has_started = True
        self._retained = {
            checkpoint_id: None if files is None else frozenset(files)
            for checkpoint_id, files in retained.items()
        }

    def on_triggered(self, checkpoint_id: CheckpointId) -> None:
        """Acknowledgements of this checkpoint count from now on."""
        self._pending[checkpoint_id] = _NONE

    def on_acknowledged(self, checkpoint_id: CheckpointId, files: Iterable[str]) -> Files:
        """One subtask's part uses these; to be deleted are those of a checkpoint given up."""
        if checkpoint_id not in self._pending:
            return self._unused(frozenset(files))
        self._pending[checkpoint_id] |= frozenset(files)
        return _NONE

    def on_completed(
        self, checkpoint_id: CheckpointId, files: Iterable[str], dropped: Iterable[CheckpointId]
    ) -> Files:
        """It is retained from now on, the dropped ones no more; what to delete."""
        self._retained[checkpoint_id] = frozenset(files)
        gone = [self._pending.pop(checkpoint_id, _NONE)]
        gone += [self._retained.pop(each, None) or _NONE for each in dropped]
        return self._unused(_NONE.union(*gone))

    def on_aborted(self, checkpoint_id: CheckpointId) -> Files:
        """It was given up; what to delete."""
        return self._unused(self._pending.pop(checkpoint_id, _NONE))

    def _unused(self, files: Files) -> Files:
        return _NONE if None in self._retained.values() else files - self._in_use()

    def _in_use(self) -> Files:
        retained = (files for files in self._retained.values() if files is not None)
        return _NONE.union(*retained, *self._pending.values())
