"""What a job has to its name: its record in the log, and the checkpoints the record speaks of.

The order in which things become true is kept here: first the files, then the metadata, then the
log entry, and only then is anything announced or deleted. Files that several checkpoints share go
with the last of them (`protocol/retention`).

Rules of this file
------------------
1. One thread owns the ledger at a time: the job's between attempts, the ledger thread
   (`coordinator/ledger_thread`) during one. Only its owner reads or changes the record; what the
   job's thread decides by during an attempt is what it was told (`coordinator/ledger_mail`).
2. The numbers that are used (`note_used`) and `retention`, which decide and write nothing, are
   always the job's thread's. `delete` and `sweep_all_but` read no record and are for any thread.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from stillframe.clock import Clock
from stillframe.coordinator.job_log import WAY_PAST_DAMAGE, JobLog
from stillframe.coordinator.ledger_mail import Stored, StoreFailed
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.protocol.joblog import (
    Beginning,
    Claim,
    CompletedCheckpoint,
    JobRecord,
    attempt_started,
    cancelled,
    checkpoint_completed,
    claim_settled,
    committed_everywhere,
    ended,
    epoch_committed,
    stopped,
)
from stillframe.protocol.manifests import FileHandle, Manifest
from stillframe.protocol.retention import Retention
from stillframe.storage.paths import LOG_DIRECTORY, is_shared
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")


class Ledger:
    """The record of one job, kept on a store, or only in memory where checkpointing is off."""

    def __init__(
        self,
        store: Store | None,
        job: str,
        retained_max: int,
        clock: Clock,
        written_by: str | None = None,
        draw_incarnation: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """`written_by` names this driver in the log; None: by its host and process."""
        self._draw_incarnation = draw_incarnation
        self._job = job
        self._retained_max = retained_max
        self._record: JobRecord | None = None
        self._highest_id = NO_CHECKPOINT
        self.retention = Retention()
        """What may be deleted of the files that checkpoints share."""
        self._log = JobLog(store, job, clock, written_by) if store is not None else None
        self._snapshots = Snapshots(store) if store is not None else None
        self.store_address = store.address if store is not None else None
        self.store_settings = store.settings if store is not None else {}

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
    def incarnation(self) -> str:
        """By which the job is known in other systems."""
        assert self._record is not None, "no attempt has begun"
        return self._record.incarnation

    @property
    def next_epoch(self) -> Epoch:
        assert self._record is not None, "no attempt has begun"
        return self._record.next_epoch

    @property
    def first_free_id(self) -> CheckpointId:
        """Above every number that was ever used, also by checkpoints that failed."""
        last = self._record.last_checkpoint_id if self._record else NO_CHECKPOINT
        return CheckpointId(max(last, self._highest_id) + 1)

    def read(self, *, passes_over_damage: bool = False) -> JobRecord | None:
        """What was written before, by this driver or another.

        A log that cannot be read is `SnapshotDamaged`, unless it may be passed over because the job
        starts over: then the record has no checkpoints, and the highest numbers any file shows.
        """
        if self._log is None:
            return self._record
        self._highest_id = self._kept().highest_id()
        try:
            self._record = self._log.read()
            self._refuse_lost_log()
        except SnapshotDamaged:
            if not passes_over_damage:
                raise
            self._record = self._log.pass_over_damage(self._kept().shown())
        return self._record

    def _refuse_lost_log(self) -> None:
        """The first entry comes before the first file of a checkpoint."""
        if self._record is None and self._highest_id > NO_CHECKPOINT:
            raise SnapshotDamaged(
                f"the log of job {self._job!r} ({self.store_address}/{LOG_DIRECTORY}) is missing,"
                f" but there are files of checkpoints up to {self._highest_id}; {WAY_PAST_DAMAGE}"
            )

    def read_manifest(self, completed: CompletedCheckpoint) -> Manifest:
        """Raises `SnapshotDamaged` if it is not what the log says it was."""
        return self._kept().read_manifest(completed)

    def check_newest(self) -> None:
        """Raise `Fenced` if another driver has taken over: what is known here is out of date."""
        if self._log is not None:
            self._log.check_newest()
            last = self._log.last
            # An entry of unknown outcome may be found kept. What the next one is to say stays.
            if last is None or self._record is None or last.sequence != self._record.sequence:
                self._record = last

    def begin_attempt(
        self,
        restored: Manifest | None,
        *,
        is_anew: bool = False,
        claim: Claim | None = None,
        beginnings: Mapping[OperatorUid, Beginning] | None = None,
    ) -> None:
        """The fence: from this entry on, whatever an older driver or attempt does is void."""
        restored_from = restored.checkpoint_id if restored is not None else None
        self._append(
            attempt_started(
                self._record,
                restored_from,
                self._highest_id,
                is_anew=is_anew,
                claim=claim,
                incarnation=self._draw_incarnation(),
                beginnings=beginnings,
            )
        )
        if self._log is not None:
            self._log.compact()
        self.sweep_log()
        self.take_stock()

    def take_stock(self) -> None:
        """Learn which files the retained checkpoints need: without that no sweep may begin."""
        self.retention.on_started(
            {kept.checkpoint_id: self._read_files(kept) for kept in self._retained()}
        )

    def note_used(self, checkpoint_id: CheckpointId) -> None:
        """This number is taken, whatever becomes of the checkpoint, which begins now."""
        self._highest_id = max(self._highest_id, checkpoint_id)
        self.retention.on_triggered(checkpoint_id)

    def store(self, manifest: Manifest) -> Stored | StoreFailed:
        """`complete`, as a letter."""
        try:
            return self.complete(manifest)
        except StorageError as error:
            return StoreFailed(manifest.checkpoint_id, str(error))

    def complete(self, manifest: Manifest) -> Stored:
        """Write the metadata, then the log entry: with it, and not before, it is complete.

        A `StorageError` means that it certainly is not; `Fenced`, that another driver took over.
        Nothing is deleted: what may be from now on is in the answer.
        """
        assert self._record is not None
        assert self._log is not None
        completed = self._kept().write_manifest(manifest)
        after, dropped = checkpoint_completed(self._record, completed, self._retained_max)
        self._append(after)
        return Stored(
            completed, after.checkpoints, dropped, self._log.superfluous, self._record.claim
        )

    def is_committed(self, uid: OperatorUid, epoch: Epoch) -> bool:
        assert self._record is not None
        return self._record.committed_epoch_by_sink.get(uid, -1) >= epoch

    def note_committed(self, uids: Sequence[OperatorUid], epoch: Epoch) -> None:
        """The coordinator has made this epoch of these sinks visible: an entry each."""
        for uid in uids:
            assert self._record is not None
            after = epoch_committed(self._record, uid, epoch)
            if after is not self._record:
                self._append(after)

    def note_committed_everywhere(
        self, uids: Iterable[OperatorUid], checkpoint_id: CheckpointId
    ) -> None:
        """All these sinks have committed this checkpoint; the next entry says so."""
        assert self._record is not None
        self._record = committed_everywhere(self._record, uids, checkpoint_id)

    def note_stopped(self) -> None:
        """Write down what the last entry does not say, if there is anything."""
        written = self._log.last if self._log is not None else None
        if self._record is not None and written is not None and written != self._record:
            self._append(stopped(self._record))

    def finish(self) -> None:
        """Every record is processed and committed; starting the job again changes nothing."""
        assert self._record is not None
        self._append(ended(self._record, "finished"))

    def cancel(self, *, keeps_checkpoints: bool) -> None:
        """Say that the job is over; only then delete what it does not keep."""
        assert self._record is not None
        self._append(cancelled(self._record, keeps_checkpoints=keeps_checkpoints))
        self.take_stock()
        self.sweep(self.attempt)
        self.settle()

    def note_claim_settled(self) -> None:
        """What the job had claimed is deleted; the next entry says so."""
        assert self._record is not None
        self._record = claim_settled(self._record)

    def sweep(self, up_to: Attempt) -> None:
        """Delete what attempts up to this one left behind and no retained checkpoint needs."""
        if self._snapshots is not None and self._record is not None:
            self.sweep_all_but(self._record.checkpoints, self.retention.retained_files(), up_to)

    def sweep_all_but(
        self,
        retained: Collection[CompletedCheckpoint],
        files: Collection[str] | None,
        up_to: Attempt,
    ) -> None:
        """`sweep`, for whoever does not own the ledger."""
        if files is None:
            log.warning(
                "the shared files of job %s are not swept: the metadata of a retained"
                " checkpoint cannot be read, and it may need any of them",
                self._job,
            )
        self._kept().sweep(retained, files, up_to)

    def delete(
        self, checkpoints: Iterable[tuple[CheckpointId, Attempt]], paths: Collection[str]
    ) -> None:
        """What cannot be deleted now is left for the next sweep."""
        for checkpoint_id, attempt in checkpoints:
            self._kept().delete(checkpoint_id, attempt)
        self._kept().delete_files(paths)

    def sweep_log(self) -> None:
        """Remove entries that drivers of the past have begun to write: they can write no more."""
        if self._log is not None:
            self._log.sweep()

    def settle(self) -> None:
        """Make deletions durable: for the last sweep, which no other will follow."""
        if self._snapshots is not None:
            self._snapshots.settle()

    def _retained(self) -> Sequence[CompletedCheckpoint]:
        return self._record.checkpoints if self._record is not None and self._snapshots else ()

    def _read_files(self, completed: CompletedCheckpoint) -> list[str] | None:
        try:
            return shared_paths(self.read_manifest(completed).files())
        except StorageError:
            return None

    def _append(self, record: JobRecord) -> None:
        self._record = self._log.append(record) if self._log is not None else record

    def _kept(self) -> Snapshots:
        assert self._snapshots is not None, "there is nowhere to keep checkpoints"
        return self._snapshots


def shared_paths(files: Iterable[FileHandle]) -> list[str]:
    """Those that live on their own; the others go with their checkpoint's directory."""
    return [file.path for file in files if is_shared(file.path)]
