"""Two-phase commit, the subtask's half: what is prepared, and when it may be made visible.

Rules of this file
------------------
1. A committable is kept, and is in every snapshot, until its commit has been carried out.
2. A checkpoint commits its own committables and those of every older checkpoint, because an
   aborted checkpoint's records must still come out with the next one that completes. Only where
   every epoch brings everything anew it commits its own alone.
3. What was committed may be asked for again until a checkpoint is complete that does not hold it:
   then it is settled. A snapshot that was taken before the commit was done holds it too.
4. What was prepared stays the work of the writer who prepared it, also where another subtask holds
   it because the parallelism has changed: in another system it is known by that writer's mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stillframe.ids import NO_CHECKPOINT, CheckpointId, Writer
from stillframe.json_values import JsonObject
from stillframe.protocol.manifests import PendingCommit


@dataclass(frozen=True, slots=True)
class Commit:
    """Make these visible now; call `on_committed` when it is done."""

    checkpoint_id: CheckpointId
    prepared: tuple[PendingCommit, ...]
    """In the order of their checkpoints."""
    settled: tuple[JsonObject, ...] = ()
    """Committed before, and never asked for again: the sink need not remember these."""


class PendingCommits:
    """What one sink subtask has prepared and not yet committed, oldest first."""

    def __init__(
        self,
        restored: Iterable[PendingCommit] = (),
        *,
        is_whole: bool = False,
        writer: Writer | None = None,
    ) -> None:
        self._writer = writer
        held = [replace(each, writer=each.writer or writer) for each in restored]
        self._pending: list[PendingCommit] = sorted(held, key=lambda each: each.checkpoint_id)
        self._is_whole = is_whole
        self._newest_held = NO_CHECKPOINT
        """The newest checkpoint whose snapshot has been told what to hold."""
        self._remembered: list[tuple[CheckpointId, JsonObject]] = []
        """What was committed, and the newest checkpoint that may hold it."""

    def on_prepared(
        self, checkpoint_id: CheckpointId, committables: Iterable[JsonObject]
    ) -> tuple[PendingCommit, ...]:
        """The epoch of this checkpoint is prepared; answers what its snapshot must hold.

        Preparing happens in the background and may finish out of order, so the snapshot of n
        takes nothing that was prepared for a later checkpoint.
        """
        self._newest_held = max(self._newest_held, checkpoint_id)
        self._pending += [PendingCommit(checkpoint_id, made, self._writer) for made in committables]
        return self._up_to(checkpoint_id)

    def on_complete(self, checkpoint_id: CheckpointId) -> Commit:
        """The checkpoint is complete: all it holds may be seen. Twice answers the rest, if any."""
        settled = tuple(made for held_by, made in self._remembered if held_by < checkpoint_id)
        self._settle(checkpoint_id)
        return Commit(checkpoint_id, self._up_to(checkpoint_id), settled)

    def on_committed(self, checkpoint_id: CheckpointId) -> None:
        """The commit was carried out; nothing up to this checkpoint has to be kept."""
        held_by = max(self._newest_held, checkpoint_id)
        done = self._up_to(checkpoint_id)
        self._settle(checkpoint_id)
        self._remembered += [(held_by, pending.committable) for pending in done]
        self._pending = [kept for kept in self._pending if kept.checkpoint_id > checkpoint_id]

    def _settle(self, completed: CheckpointId) -> None:
        self._remembered = [kept for kept in self._remembered if kept[0] >= completed]

    def _up_to(self, checkpoint_id: CheckpointId) -> tuple[PendingCommit, ...]:
        held = (
            kept
            for kept in self._pending
            if kept.checkpoint_id == checkpoint_id
            or (kept.checkpoint_id < checkpoint_id and not self._is_whole)
        )
        # Preparing may finish out of order.
        return tuple(sorted(held, key=lambda kept: kept.checkpoint_id))
