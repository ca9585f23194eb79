"""What an attempt starts from: chosen, fenced off from the past, and the past made good."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stillframe.coordinator.attempt import JobParts, describe_edges, describe_operators
from stillframe.coordinator.enumerators import enumerated_sources
from stillframe.coordinator.history import AttemptStarted, CheckpointDamaged
from stillframe.coordinator.located import LocatedSnapshot, locate_savepoint
from stillframe.errors import SnapshotDamaged, StartRefused, StillframeError
from stillframe.graph.logical import Read, Write
from stillframe.ids import Attempt, CheckpointId, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.restore import (
    Refuse,
    RestoreFrom,
    StartingState,
    choose_restore,
    starting_channels,
    starting_state,
)
from stillframe.protocol.savepoints import as_beginning, operators_gone, without_operators
from stillframe.storage.savepoint import path_in_savepoint
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint an attempt was restored from, if any, and the state of each subtask."""

    restored: Manifest | None
    state: StartingState
    savepoint: Store | None = None
    """Where the restored files are, if it is a savepoint and no checkpoint of the job's own."""


class Starter:
    """Begins the attempts of one job, in one driver. Used by the job's thread alone."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._plan = parts.plan
        self._ledger = parts.ledger
        self._sinks = parts.sinks
        self._damaged: dict[CheckpointId, str] = {}
        self._savepoint_damage: str | None = None
        wanted = parts.config.restore_from
        self._wanted = CheckpointId(wanted) if isinstance(wanted, int) else None
        self._savepoint_address = wanted if isinstance(wanted, str) else None

    @property
    def goes_back(self) -> bool:
        """Whether a person asked for a certain checkpoint."""
        return self._wanted is not None

    def is_finished(self) -> bool:
        """Whether the log says that the job is over, and nobody asked to go back all the same."""
        record = self._ledger.read()
        if record is None or record.outcome != "finished" or self.goes_back:
            return False
        try:
            self._sweep_after_the_end()
        except StillframeError as error:
            log.warning("what was left behind could not be swept: %s", error)
        return True

    def begin(self) -> Start:
        """Choose a checkpoint, fence off older attempts, commit and sweep what they left."""
        self._ledger.check_newest()
        own = self._choose_manifest()
        savepoint = self._read_savepoint() if own is None else None
        manifest = savepoint.manifest if savepoint is not None else own
        # Before the fence: a job that does not fit must not end one that runs.
        manifest = self._without_what_is_gone(manifest)
        state = self._starting_state(manifest)
        self._ledger.begin_attempt(own)
        if own is not None:
            self._commit_again(own)
        attempt = self._ledger.attempt
        self._ledger.sweep(Attempt(attempt - 1))
        self._sinks.sweep(attempt, own)
        restored_from = own.checkpoint_id if own else None
        place = savepoint.address if savepoint is not None else None
        self._parts.history.tell(AttemptStarted(attempt, restored_from, _positions(state), place))
        return Start(manifest, state, savepoint.store if savepoint is not None else None)

    def finish(self) -> None:
        """The job is over: say so in the log, and leave nothing behind that nobody needs."""
        # First: a driver that dies in between is followed by one that sweeps again.
        self._ledger.sweep(self._ledger.attempt)
        self._ledger.settle()
        self._ledger.finish()
        self._sinks.sweep(Attempt(self._ledger.attempt + 1), None)

    def _sweep_after_the_end(self) -> None:
        """What a driver or a slot of the past has written since, or the last sweep did not get."""
        self._ledger.take_stock()
        self._ledger.sweep(self._ledger.attempt)
        self._ledger.settle()
        self._sinks.sweep(Attempt(self._ledger.attempt + 1), None)

    def mark_damaged(self, checkpoint_id: CheckpointId, reason: str) -> None:
        """This checkpoint cannot be restored; the next `begin` knows."""
        self._damaged[checkpoint_id] = reason
        self._parts.history.tell(CheckpointDamaged(checkpoint_id, reason))

    def mark_savepoint_damaged(self, reason: str) -> None:
        """The savepoint the job was started from cannot be restored; the next `begin` knows."""
        self._savepoint_damage = reason

    def _read_savepoint(self) -> LocatedSnapshot | None:
        """What a job begins with that has no checkpoint of its own yet, if a person said so."""
        if self._savepoint_address is None:
            return None
        if self._savepoint_damage is not None:
            raise StartRefused(
                f"the savepoint {self._savepoint_address} is damaged ({self._savepoint_damage}):"
                " bring the file back, or start from another one (restoreFrom)"
            )
        found = locate_savepoint(self._savepoint_address, self._parts.config.storage_settings)
        begun = as_beginning(
            found.manifest, lambda file: replace(file, path=path_in_savepoint(file.path))
        )
        return LocatedSnapshot(found.store, begun)

    def _without_what_is_gone(self, manifest: Manifest | None) -> Manifest | None:
        """Without the state of operators that the job does not have, if that is allowed."""
        if manifest is None or not self._parts.config.allow_non_restored_state:
            return manifest
        present = {operator.uid for operator in describe_operators(self._plan)}
        for operator in operators_gone(manifest, present):
            log.warning(
                "the state of %r (%s) is not restored: the job has no such operator, and"
                " allowNonRestoredState is set",
                operator.name,
                operator.uid,
            )
        there = {snapshot.uid for snapshot in manifest.snapshots}
        return without_operators(manifest, (there | manifest.enumerators.keys()) - present)

    def _choose_manifest(self) -> Manifest | None:
        wanted, self._wanted = self._wanted, None  # it was asked for now, not for every restart
        while True:
            choice = choose_restore(
                self._ledger.record,
                wanted,
                self._damaged,
                # At most once: what an older one had not reserved may have been emitted since.
                sinks_commit=self._makes_anything_visible()
                or self._parts.config.checkpoint_mode == "at-most-once",
            )
            if isinstance(choice, Refuse):
                raise StartRefused(choice.reason)
            if not isinstance(choice, RestoreFrom):
                return None
            try:
                return self._ledger.read_manifest(choice.checkpoint)
            except SnapshotDamaged as error:
                self.mark_damaged(choice.checkpoint.checkpoint_id, str(error))

    def _makes_anything_visible(self) -> bool:
        return any(
            isinstance(planned.operator, Write) and planned.operator.sink.makes_visible
            for _, planned in self._plan.operators()
        )

    def _commit_again(self, manifest: Manifest) -> None:
        """What the restored checkpoint had prepared for sinks that commit here, if not done yet."""
        for uid in self._sinks.committing_here:
            if not self._ledger.is_committed(uid, manifest.epoch):
                self._sinks.commit(uid, manifest)
                self._ledger.note_committed([uid], manifest.epoch)

    def _starting_state(self, manifest: Manifest | None) -> StartingState:
        if manifest is not None:
            self._refuse_lost_enumerators(manifest)
        starting_channels(describe_edges(self._plan), manifest)  # refuses what cannot be placed
        known = {snapshot.uid for snapshot in manifest.snapshots} if manifest else set()
        return starting_state(
            describe_operators(self._plan),
            self._plan.max_parallelism,
            manifest,
            self._first_splits(known),
        )

    def _refuse_lost_enumerators(self, manifest: Manifest) -> None:
        """Without its enumerator a source would end with the splits that were found until then."""
        lost = sorted(manifest.enumerators.keys() - enumerated_sources(self._plan).keys())
        if lost:
            raise StartRefused(
                f"checkpoint {manifest.checkpoint_id} of job {manifest.job!r} was looking for more"
                f" splits of source {', '.join(lost)}, which now has none to look for: let it"
                " follow its path (followInterval) as before, or start under another name"
            )

    def _first_splits(self, known: set[OperatorUid]) -> Mapping[OperatorUid, list[JsonObject]]:
        """The beginning of every source that no checkpoint knows yet."""
        return {
            planned.uid: [
                {"id": split.id, "position": split.position}
                for split in sorted(
                    planned.operator.source.splits(task.parallelism), key=lambda split: split.id
                )
            ]
            for task, planned in self._plan.operators()
            if isinstance(planned.operator, Read) and planned.uid not in known
        }


def _positions(state: StartingState) -> tuple[str, ...]:
    """Where sources begin, in words: `partition-0 at next=1000`."""
    items = [item for part in state.values() for item in part.items]
    return tuple(
        f"{item['id']} at {_brief(item['position'])}"
        for item in sorted(items, key=lambda item: str(item["id"]))
    )


def _brief(position: object) -> str:
    if not isinstance(position, Mapping):
        return str(position)
    numbers = {name: value for name, value in position.items() if isinstance(value, int)}
    return " ".join(f"{name}={value}" for name, value in (numbers or position).items())
