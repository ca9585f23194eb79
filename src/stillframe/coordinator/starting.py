"""What an attempt starts from: chosen, fenced off from the past, and the past made good."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from stillframe.coordinator.attempt import JobParts, describe_edges, describe_operators
from stillframe.coordinator.enumerators import enumerated_sources
from stillframe.coordinator.history import AttemptStarted, CheckpointDamaged
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

log = logging.getLogger("stillframe")


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint an attempt was restored from, if any, and the state of each subtask."""

    restored: Manifest | None
    state: StartingState


class Starter:
    """Begins the attempts of one job, in one driver. Used by the job's thread alone."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._plan = parts.plan
        self._ledger = parts.ledger
        self._sinks = parts.sinks
        self._damaged: dict[CheckpointId, str] = {}
        wanted = parts.config.restore_from
        self._wanted = None if wanted is None else CheckpointId(wanted)

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
        manifest = self._choose_manifest()
        # Before the fence: a job that does not fit must not end one that runs.
        state = self._starting_state(manifest)
        self._ledger.begin_attempt(manifest)
        if manifest is not None:
            self._commit_again(manifest)
        attempt = self._ledger.attempt
        self._ledger.sweep(Attempt(attempt - 1))
        self._sinks.sweep(attempt, manifest)
        restored_from = manifest.checkpoint_id if manifest else None
        self._parts.history.tell(AttemptStarted(attempt, restored_from, _positions(state)))
        return Start(manifest, state)

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
