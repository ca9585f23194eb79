"""What goes during one attempt, and when: never before the log entry that does not need it.

Theory of operation
-------------------
The job's thread decides what may go, by `protocol/retention` and by what it was told is in the log;
the letters it sends are carried out later, one after the other, and delay nothing. So a file may be
there for a while after nobody needs it, and may outlive the attempt: then the sweep with which the
next one begins takes it.

Rules of this file
------------------
1. A letter says what goes, or what stays, and reads no record: by the time it is carried out there
   are newer ones. What an older entry did not need, no newer one does.
2. Used by the job's thread alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from stillframe.coordinator.claims import delete_claimed
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import shared_paths
from stillframe.coordinator.ledger_mail import Stored
from stillframe.coordinator.ports import LedgerPort
from stillframe.ids import Attempt, CheckpointId, Writer
from stillframe.protocol.joblog import Claim
from stillframe.protocol.manifests import FileHandle, Manifest
from stillframe.storage.paths import number_of_file


class Deletions:
    """Has deleted what no checkpoint of the job needs, and what older attempts left behind."""

    def __init__(self, parts: JobParts, port: LedgerPort) -> None:
        self._ledger = parts.ledger
        self._retention = parts.ledger.retention
        self._attempt = parts.ledger.attempt
        self._sinks = parts.sinks
        self._open_store = parts.open_store
        self._port = port
        self._has_swept = False
        self._plan = parts.plan
        self._has_ended_writers = False
        self._writers: dict[CheckpointId, frozenset[Writer]] = {}
        """Whose output the checkpoints of this attempt hold, until nothing of the past is left."""

    def on_acknowledged(self, checkpoint_id: CheckpointId, files: Iterable[FileHandle]) -> None:
        """A part of this checkpoint needs these files; too late, they are deleted if unused."""
        self._delete(self._retention.on_acknowledged(checkpoint_id, shared_paths(files)))

    def check(self, manifest: Manifest) -> None:
        """A checkpoint may refer only to older files that a retained one keeps alive."""
        paths = shared_paths(manifest.files())
        older = {path for path in paths if number_of_file(path) != manifest.checkpoint_id}
        retained = self._retention.retained_files()
        assert retained is None or older <= retained, (
            f"checkpoint {manifest.checkpoint_id} refers to files that may be deleted by now:"
            f" {sorted(older - retained)}"
        )

    def on_stored(self, manifest: Manifest, stored: Stored) -> None:
        """The entry is in the log: all that only older entries needed may go."""
        gone = [(each.checkpoint_id, each.attempt) for each in stored.dropped]
        unused = self._retention.on_completed(
            manifest.checkpoint_id, shared_paths(manifest.files()), [number for number, _ in gone]
        )
        self._delete([*unused, *stored.superfluous], gone)
        if stored.claim is not None:
            self._port.delete(partial(self._settle, stored.claim))
        if not self._has_swept:
            # Once more, as a slot of the attempt before may have written on for seconds.
            self._has_swept = True
            files, before = self._retention.retained_files(), Attempt(self._attempt - 1)
            self._port.delete(partial(self._ledger.sweep_all_but, stored.retained, files, before))
            self._port.delete(partial(self._sinks.sweep, self._attempt, manifest, is_running=True))

        if not self._has_ended_writers:
            self._end_writers(manifest, [each.checkpoint_id for each in stored.retained])

    def _end_writers(self, manifest: Manifest, retained: Collection[CheckpointId]) -> None:
        """Writers of the past are done when no checkpoint that may be restored holds their output.

        Before, another system has to remember them, also if a damaged checkpoint is passed over.
        """
        self._writers[manifest.checkpoint_id] = manifest.writers()
        needed = self._sinks.writers(self._plan)
        of_this_attempt = self._writers.keys() >= set(retained)
        if of_this_attempt and all(self._writers[number] <= needed for number in retained):
            self._has_ended_writers = True
            self._port.delete(partial(self._sinks.end_writers, needed))

    def on_aborted(self, checkpoint_id: CheckpointId) -> None:
        """What a failed checkpoint of this attempt wrote and no other one needs."""
        unused = self._retention.on_aborted(checkpoint_id)
        self._delete(unused, [(checkpoint_id, self._attempt)])

    def _delete(
        self, paths: Collection[str], checkpoints: Collection[tuple[CheckpointId, Attempt]] = ()
    ) -> None:
        if paths or checkpoints:
            self._port.delete(partial(self._ledger.delete, checkpoints, paths))

    def _settle(self, claim: Claim) -> None:
        if delete_claimed(claim, self._open_store):
            self._port.write(self._ledger.note_claim_settled)
