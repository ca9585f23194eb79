"""Mistakes on the driver: its log, what it starts from, its sinks and its enumerators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stillframe.coordinator import attempt, control, enumerators
from stillframe.coordinator.attempt_checkpoints import AttemptCheckpoints
from stillframe.coordinator.enumerators import Enumerators
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.ledger_mail import Stored
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import Starter
from stillframe.protocol.joblog import checkpoint_completed
from stillframe.protocol.manifests import decode_manifest
from stillframe.storage.paths import checkpoint_of, metadata_path
from stillframe.testing.simulation.mutants.mutant import Mutant, nothing

# --- the log and what it keeps ---


def _complete_without_the_log(original: Any) -> Any:
    def complete(self: Any, manifest: Any) -> Any:
        completed = self._kept().write_manifest(manifest)
        after, _ = checkpoint_completed(self._record, completed, self._retained_max)
        self._record = replace(after, sequence=self._record.sequence)
        self._log._last = self._record
        return Stored(completed, after.checkpoints, (), (), None)

    return complete


def _delete_the_newest(original: Any) -> Any:
    def complete(self: Any, manifest: Any) -> Any:
        stored = original(self, manifest)
        self._kept().delete(stored.completed.checkpoint_id, stored.completed.attempt)
        return stored

    return complete


def _delete_first(original: Any) -> Any:
    def complete(self: Any, manifest: Any) -> Any:
        kept = self._record.checkpoints
        for gone in kept[: len(kept) + 1 - self._retained_max]:
            self._kept().delete(gone.checkpoint_id, gone.attempt)
        return original(self, manifest)

    return complete


def _announce_first(original: Any) -> Any:
    def store_checkpoint(self: Any, *what: Any) -> None:
        original(self, *what)
        self._announce()

    return store_checkpoint


def _give_up_what_is_late(original: Any) -> Any:
    def on_ledger_late(self: Any, event: Any) -> None:
        if isinstance(event, Stored):
            self._abort(event.completed.checkpoint_id, "the attempt is over")
        else:
            original(self, event)

    return on_ledger_late


def _write_all_the_same(original: Any) -> Any:
    def append(self: Any, record: Any) -> Any:
        newest = self._newest()
        self._last = newest
        self._own_attempt, self._fenced = record.attempt, None
        sequence = newest.sequence + 1 if newest else 1
        return original(self, replace(record, sequence=sequence))

    return append


# --- what to start from ---


def _newest_directory(original: Any) -> Any:
    def choose_manifest(self: Any) -> Any:
        store = self._ledger._snapshots._store
        found = sorted(filter(None, map(checkpoint_of, store.list(""))))
        for checkpoint in reversed(found):
            path = metadata_path(*checkpoint)
            if "_metadata" in store.list(path.split("/", maxsplit=1)[0]):
                return decode_manifest(store.read(path)), False
        return None, False

    return choose_manifest


def _from_the_beginning(original: Any) -> Any:
    return lambda self: (None, False)


# --- sinks and enumerators ---


def _sweep_everything(original: Any) -> Any:
    return lambda self, older_than, manifest, **when: original(self, older_than, None, **when)


def _found_by_now(original: Any) -> Any:
    def at_trigger(self: Any, checkpoint_id: Any) -> Any:
        self.on_triggered(checkpoint_id)
        return original(self, checkpoint_id)

    return at_trigger


COORDINATOR_MUTANTS: Mapping[str, Mutant] = {
    "skip-recommit-on-the-driver": Mutant(
        "what the restored checkpoint had prepared is not committed by the driver",
        Starter, "_commit_again", nothing,
    ),
    "sweep-too-much": Mutant(
        "the sweep takes prepared transactions the restored checkpoint needs",
        DriverSinks, "sweep", _sweep_everything,
    ),
    "accept-an-old-attempts-acknowledgement": Mutant(
        "the coordinator listens to slots of attempts that are over",
        control, "refusal", lambda original: lambda *hello: None,
    ),
    "metadata-without-log-entry": Mutant(
        "a checkpoint counts as complete when its metadata is written",
        Ledger, "complete", _complete_without_the_log,
    ),
    "delete-a-checkpoint-too-early": Mutant(
        "retention deletes the newest checkpoint",
        Ledger, "complete", _delete_the_newest,
    ),
    "delete-before-the-entry-exists": Mutant(
        "what an entry of the log will no longer need is deleted before it is written",
        Ledger, "complete", _delete_first,
    ),
    "announce-before-the-entry-exists": Mutant(
        "completion is announced when the store has been asked, not when it has answered",
        AttemptCheckpoints, "_store_checkpoint", _announce_first,
    ),
    "give-up-what-was-stored-late": Mutant(
        "a checkpoint that came to exist after the end of its attempt is deleted",
        AttemptCheckpoints, "on_ledger_late", _give_up_what_is_late,
    ),
    "restore-newest-directory": Mutant(
        "the newest directory is restored instead of the newest completed checkpoint",
        Starter, "_choose_manifest", _newest_directory,
    ),
    "never-restore": Mutant(
        "every attempt starts from the beginning",
        Starter, "_choose_manifest", _from_the_beginning,
    ),
    "ignore-the-fence": Mutant(
        "a driver whose successor is alive writes its log entries all the same",
        JobLog, "append", _write_all_the_same,
    ),
    "lose-a-split-assigned-around-a-barrier": Mutant(
        "a checkpoint keeps what the enumerator has found when it is stored, not when triggered",
        Enumerators, "at_trigger", _found_by_now,
    ),
    "forget-what-was-discovered": Mutant(
        "a restored job opens its enumerators without their state",
        enumerators, "restored_enumerator",
        lambda original: lambda restored, uid: original(None, uid),
    ),
    "keep-the-metadata-to-yourself": Mutant(
        "slots are sent a start that refers to state in the metadata, and not that state",
        attempt, "in_pieces",
        lambda original: lambda start: list(original(start))[-1:],
    ),
    "let-deletions-come-back": Mutant(
        "the job is called finished while what its last sweep deleted may come back",
        Ledger, "settle", nothing,
    ),
}  # fmt: skip
