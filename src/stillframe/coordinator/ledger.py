"""What a job has to its name: its record in the log, and the checkpoints the record speaks of.

The order in which things become true is kept here: first the files, then the metadata, then the
log entry, and only then is anything announced or deleted. Used by the job's thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from stillframe.clock import Clock
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.snapshots import Snapshots
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.protocol.joblog import (
    CompletedCheckpoint,
    JobRecord,
    attempt_started,
    checkpoint_completed,
    ended,
    epoch_committed,
)
from stillframe.protocol.manifests import Manifest
from stillframe.storage.store import Store


class Ledger:
    """The record of one job, kept on a store, or only in memory where checkpointing is off."""

    def __init__(
        self,
        store: Store | None,
        job: str,
        retained_max: int,
        clock: Clock,
        written_by: str | None = None,
    ) -> None:
        """`written_by` names this driver in the log; None: by its host and process."""
        self._retained_max = retained_max
        self._record: JobRecord | None = None
        self._highest_id = NO_CHECKPOINT
        self._log = JobLog(store, job, clock, written_by) if store is not None else None
        self._snapshots = Snapshots(store) if store is not None else None
        self.store_address = store.address if store is not None else None

    @property
    def keeps_checkpoints(self) -> bool:
        return self._snapshots is not None

    @property
    def record(self) -> JobRecord | None:
        """Where the job stands; None before its first attempt."""
        return self._record

    @property
    def attempt(self) -> Attempt:
        assert self._record is not None, "no attempt has begun"
        return self._record.attempt

    @property
    def next_epoch(self) -> Epoch:
        assert self._record is not None, "no attempt has begun"
        return self._record.next_epoch

    @property
    def first_free_id(self) -> CheckpointId:
        """Above every number that was ever used, also by checkpoints that failed."""
        last = self._record.last_checkpoint_id if self._record else NO_CHECKPOINT
        return CheckpointId(max(last, self._highest_id) + 1)

    def read(self) -> JobRecord | None:
        """What was written before, by this driver or another."""
        if self._log is not None:
            self._record = self._log.read()
        if self._snapshots is not None:
            self._highest_id = self._snapshots.highest_id()
        return self._record

    def read_manifest(self, completed: CompletedCheckpoint) -> Manifest:
        """Raises `SnapshotDamaged` if it is not what the log says it was."""
        return self._kept().read_manifest(completed)

    def check_newest(self) -> None:
        """Raise `Fenced` if another driver has taken over: what is known here is out of date."""
        if self._log is not None:
            self._log.check_newest()

    def begin_attempt(self, restored: Manifest | None) -> None:
        """The fence: from this entry on, whatever an older driver or attempt does is void."""
        restored_from = restored.checkpoint_id if restored is not None else None
        self._append(attempt_started(self._record, restored_from, self._highest_id))

    def note_used(self, checkpoint_id: CheckpointId) -> None:
        """This number is taken, whatever becomes of the checkpoint."""
        self._highest_id = max(self._highest_id, checkpoint_id)

    def complete(self, manifest: Manifest) -> CompletedCheckpoint:
        """Write the metadata, then the log entry: with it, and not before, it is complete.

        A `StorageError` means that it certainly is not; `Fenced`, that another driver took over.
        """
        assert self._record is not None
        completed = self._kept().write_manifest(manifest)
        after, dropped = checkpoint_completed(self._record, completed, self._retained_max)
        self._append(after)
        for gone in dropped:
            self._kept().delete(gone.checkpoint_id, gone.attempt)
        return completed

    def discard(self, checkpoint_id: CheckpointId) -> None:
        """Delete what a failed checkpoint of this attempt wrote."""
        self._kept().delete(checkpoint_id, self.attempt)

    def is_committed(self, uid: OperatorUid, epoch: Epoch) -> bool:
        assert self._record is not None
        return self._record.committed_epoch_by_sink.get(uid, -1) >= epoch

    def note_committed(self, uids: Sequence[OperatorUid], epoch: Epoch) -> None:
        """The coordinator has made this epoch of these sinks visible."""
        for uid in uids:
            assert self._record is not None
            after = epoch_committed(self._record, uid, epoch)
            if after is not self._record:
                self._append(after)

    def finish(self) -> None:
        """Every record is processed and committed; starting the job again changes nothing."""
        assert self._record is not None
        self._append(ended(self._record, "finished"))

    def sweep(self, up_to: Attempt) -> None:
        """Delete what attempts up to this one left behind and no retained checkpoint needs."""
        if self._snapshots is not None and self._record is not None:
            self._snapshots.sweep(self._record.checkpoints, up_to)

    def _append(self, record: JobRecord) -> None:
        self._record = self._log.append(record) if self._log is not None else record

    def _kept(self) -> Snapshots:
        assert self._snapshots is not None, "there is nowhere to keep checkpoints"
        return self._snapshots
