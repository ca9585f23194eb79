"""What an attempt starts from: chosen, found to fit, fenced off from the past, the past made good.

A job begins with its own newest checkpoint, or with the one a person asks for. If it has none it
begins with the snapshot from elsewhere that a person has named, or from the beginning. A person may
also have it start over, whatever it has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stillframe.api.sources import Source
from stillframe.config import JobConfig
from stillframe.coordinator.claims import claim_on, settle_claim
from stillframe.coordinator.enumerators import enumerated_sources, refuse_bad_splits
from stillframe.coordinator.history import AlreadyFinished, AttemptStarted, CheckpointDamaged
from stillframe.coordinator.job_parts import JobParts, UnfitStates
from stillframe.coordinator.located import LocatedSnapshot, own_checkpoint
from stillframe.coordinator.plan_descriptions import describe_edges, describe_operators
from stillframe.errors import SnapshotDamaged, StartRefused, StillframeError
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.failures import AttemptBegun, Restored
from stillframe.protocol.fit import (
    Evolves,
    Fitted,
    JobShape,
    Mismatch,
    StateFinding,
    evolving,
    fitted,
    in_words,
    mismatches,
)
from stillframe.protocol.joblog import Beginning, JobRecord
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.restore import (
    Refuse,
    RestoreFrom,
    StartingState,
    choose_restore,
    starting_state,
)
from stillframe.protocol.savepoints import (
    as_beginning,
    as_savepoint,
    prepared_output,
    without_operators,
    without_prepared,
)
from stillframe.storage.paths import checkpoint_directory
from stillframe.storage.savepoint import StoreWithSavepoint, path_in_savepoint
from stillframe.storage.store import Store
from stillframe.user_code import calling

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
        self._elsewhere = wanted if isinstance(wanted, str) else None
        """A snapshot that is not the job's own, to begin with."""
        self._fresh = parts.config.fresh
        self._has_begun = False
        self._have_states_fit = False
        self._is_understood = False

    def use(self, parts: JobParts) -> None:
        """Begin attempts of another plan of the same job from now on."""
        self._parts = parts
        self._plan = parts.plan

    def _understand(self) -> None:
        """What a person has named may be the job's own: then it is a checkpoint like any other."""
        own = self._ledger.store_address
        if self._is_understood or self._elsewhere is None or own is None:
            return
        self._is_understood = True
        meant = own_checkpoint(self._elsewhere, own)
        if meant is not None:
            self._elsewhere = None
            self._wanted = None if meant == "newest" else meant

    def is_finished(self) -> bool:
        """Whether the log says that the job is over, and nobody asked to go on all the same."""
        self._understand()
        record = self._ledger.read(passes_over_damage=self._fresh)
        if record is None or self._fresh or not _is_over(record):
            return False
        names_a_start = self._wanted is not None or self._elsewhere is not None
        if record.outcome == "finished" and names_a_start:
            return False
        try:
            self._sweep_after_the_end()
        except StillframeError as error:
            log.warning("what was left behind could not be swept: %s", error)
        if record.outcome != "finished":
            return False
        last = record.newest.checkpoint_id if record.newest is not None else None
        self._parts.history.tell(AlreadyFinished(last, self._ledger.store_address or ""))
        return True

    def begin(self) -> Start:
        """Choose a checkpoint, fence off older attempts, commit and sweep what they left."""
        self._understand()
        self._ledger.check_newest()
        own, is_anew = self._choose_manifest()
        found = self._read_elsewhere() if own is None else None
        # Before the fence: a job that does not fit must not end one that runs.
        if is_anew and found is not None:
            self._refuse_to_leave_behind_what_is_prepared(found)
        if own is not None:
            own = self._without_what_is_discarded(own)
        manifest, former = self._fitted(_as_beginning(found) if found is not None else own, found)
        first = self._first_splits(manifest, is_anew=is_anew)
        state = self._starting_state(manifest, first)
        is_claimed = self._parts.config.restore_mode == "claim"
        claim = claim_on(found) if found is not None and is_claimed else None
        before = self._ledger.record
        self._ledger.begin_attempt(
            own, is_anew=is_anew, claim=claim, beginnings=self._to_keep(first)
        )
        self._note_begun(before, own, found)
        self._fresh = False  # it was asked for now, not for every restart
        self._has_begun = True
        self._sinks.go_on_after(former, self._ledger.incarnation)
        if own is not None:
            assert manifest is not None
            own = manifest
            settle_claim(self._ledger, self._parts.open_store)
            self._commit_again(own, former)
        attempt = self._ledger.attempt
        self._ledger.sweep(Attempt(attempt - 1))
        self._sinks.sweep(attempt, own)
        restored_from = own.checkpoint_id if own else None
        place = found.place if found is not None else None
        self._parts.history.tell(AttemptStarted(attempt, restored_from, _positions(state), place))
        return Start(manifest, state, found.store if found is not None else None)

    def _note_begun(
        self, before: JobRecord | None, own: Manifest | None, found: LocatedSnapshot | None
    ) -> None:
        """For people: an attempt that fails in what it does first has begun too."""
        now_ms = self._parts.clock.wall_ms()
        restored = None
        if own is not None:
            directory = checkpoint_directory(own.checkpoint_id, own.attempt)
            path = f"{self._ledger.store_address}/{directory}"
            restored = Restored(own.checkpoint_id, now_ms, False, path)
        elif found is not None:
            taken = found.manifest
            is_savepoint = taken.kind == "savepoint"
            restored = Restored(taken.checkpoint_id, now_ms, is_savepoint, found.place)
        begun = AttemptBegun(self._ledger.attempt, now_ms, restored)
        self._parts.history.note_begun(begun, before)

    def stopped(self) -> None:
        """The job may go on some time; what its sinks have committed is known until then."""
        try:
            self._ledger.note_stopped()
        except StillframeError as error:
            log.warning("that all output is committed could not be written down: %s", error)

    def finish(self) -> None:
        """The job is over: say so in the log, and leave nothing behind that nobody needs."""
        # First: a driver that dies in between is followed by one that sweeps again.
        self._ledger.sweep(self._ledger.attempt)
        self._ledger.settle()
        self._ledger.finish()
        self._sinks.sweep(Attempt(self._ledger.attempt + 1), None)

    def cancel(self) -> None:
        """The job is over because somebody said so; what sinks have committed stays."""
        self._ledger.check_newest()
        keeps = self._parts.config.retain_on_cancel
        self._ledger.cancel(keeps_checkpoints=keeps)
        if not keeps:  # otherwise the newest may have something to commit
            self._sinks.sweep(Attempt(self._ledger.attempt + 1), None)

    def _sweep_after_the_end(self) -> None:
        """What a driver or a slot of the past has written since, or the last sweep did not get."""
        self._ledger.sweep_log()
        self._parts.history.sweep()
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

    def _read_elsewhere(self) -> LocatedSnapshot | None:
        """What a job begins with that has no checkpoint of its own, if a person said so."""
        if self._elsewhere is None:
            return None
        if self._savepoint_damage is not None:
            raise StartRefused(
                f"the savepoint {self._elsewhere} is damaged ({self._savepoint_damage}):"
                " bring the file back, or start from another one (restoreFrom)"
            )
        found = self._parts.located(self._elsewhere)
        missing = found.missing_files()
        if missing:
            raise StartRefused(
                f"{found.place} is half deleted: {len(missing)} of the files it needs are gone,"
                f" among them {missing[0]}: bring them back, or start from another snapshot"
                " (restoreFrom)"
            )
        return found

    def _fitted(
        self, manifest: Manifest | None, found: LocatedSnapshot | None
    ) -> tuple[Manifest | None, Mapping[OperatorUid, OperatorUid]]:
        """The snapshot in the uids of the job, and those it had; raises all that does not fit."""
        if manifest is None:
            return None, {}
        allows = self._parts.config.allow_non_restored_state
        fit = fit_to(self._plan, manifest, self._committed(), allows_gone=allows)
        unfit = self._unfit_states(fit.manifest, found)
        wrong = mismatches(job_shape(self._plan), fit, unfit, allows_state_lost=allows)
        if wrong:
            raise StartRefused(in_words(manifest, wrong))
        self._have_states_fit = True
        for change in evolving(unfit):
            log.warning("%s", change)
        for lost in fit.lost:
            log.warning(
                "the state of %r (%s) is not restored: the job has no such operator, and"
                " allowNonRestoredState is set",
                lost.operator.name,
                lost.operator.uid,
            )
        for uid, before in fit.former.items():
            log.info("operator %s goes on with the state of %s", uid, before)
        return fit.manifest, fit.former

    def _committed(self) -> Mapping[OperatorUid, Epoch]:
        record = self._ledger.record
        return record.committed_epoch_by_sink if record is not None else {}

    def _without_what_is_discarded(self, own: Manifest) -> Manifest:
        """Without the output that a person has named, sink by sink, because it is not wanted."""
        wanted = self._parts.config.discard_prepared or ()
        prepared = prepared_output(own, self._committed())
        gone = [each for each in prepared if each.key in wanted]
        missed = sorted(set(wanted) - {each.key for each in gone})
        if missed and not self._has_begun:
            there = ", ".join(each.key for each in prepared) or "none"
            raise StartRefused(
                f"discardPrepared names {missed[0]}, but {own.title} holds other prepared output"
                f" ({there}): correct it, or leave it out"
            )
        for each in gone:
            log.warning("%s has prepared are discarded: discardPrepared names them", each)
        return without_prepared(own, [each.uid for each in gone])

    def _refuse_to_leave_behind_what_is_prepared(self, found: LocatedSnapshot) -> None:
        """Started over from elsewhere the job may be past the records of it: nobody would make it
        again."""
        newest = self._ledger.record.newest if self._ledger.record is not None else None
        if newest is None:
            return
        try:
            own = self._ledger.read_manifest(newest)
        except SnapshotDamaged:
            return  # there is no telling
        own = self._without_what_is_discarded(own)
        for prepared in prepared_output(own, self._committed()):
            raise StartRefused(
                f"{own.title} holds {prepared} has prepared and is not known to have committed, and"
                f" {found.place} may be from after them: start the job once without fresh and"
                " restoreFrom, so that they are committed, and stop it"
            )

    def _unfit_states(
        self, manifest: Manifest, found: LocatedSnapshot | None
    ) -> Sequence[StateFinding]:
        """Looked for once: a checkpoint of the job's own that follows has the states it has."""
        address = self._ledger.store_address
        if self._have_states_fit or address is None:
            return ()
        store = self._parts.open_store(address)
        if found is not None:
            store = StoreWithSavepoint(store, found.store)
        return self._parts.unfit_states(
            self._plan, manifest, store, self._parts.config.state_defaults
        )

    def _choose_manifest(self) -> tuple[Manifest | None, bool]:
        """The job's own checkpoint to begin with, and whether all it was is left behind."""
        wanted, self._wanted = self._wanted, None  # it was asked for now, not for every restart
        while True:
            choice = choose_restore(
                self._ledger.record,
                wanted,
                self._damaged,
                # At most once: what an older one had not reserved may have been emitted since.
                sinks_commit=self._makes_anything_visible()
                or self._parts.config.checkpoint_mode == "at-most-once",
                fresh=self._fresh,
                # A restart goes on from what the job has by then.
                from_elsewhere=None if self._has_begun else self._elsewhere,
            )
            if isinstance(choice, Refuse):
                raise StartRefused(choice.reason)
            if not isinstance(choice, RestoreFrom):
                return None, choice.is_anew
            try:
                return self._ledger.read_manifest(choice.checkpoint), False
            except SnapshotDamaged as error:
                self.mark_damaged(choice.checkpoint.checkpoint_id, str(error))
                self._look_at_the_others()

    def _look_at_the_others(self) -> None:
        """So that none is offered that is damaged too."""
        record = self._ledger.record
        for kept in record.checkpoints if record is not None else ():
            if kept.checkpoint_id not in self._damaged:
                try:
                    self._ledger.read_manifest(kept)
                except SnapshotDamaged as error:
                    self.mark_damaged(kept.checkpoint_id, str(error))

    def _makes_anything_visible(self) -> bool:
        return any(
            isinstance(planned.operator, Write) and planned.operator.sink.makes_visible
            for _, planned in self._plan.operators()
        )

    def _commit_again(self, manifest: Manifest, former: Mapping[OperatorUid, OperatorUid]) -> None:
        """What the restored checkpoint had prepared for sinks that commit here, if not done yet."""
        for uid in self._sinks.committing_here:
            known_as = {uid, former.get(uid, uid)}
            if not any(self._ledger.is_committed(each, manifest.epoch) for each in known_as):
                (self._parts.commit or self._sinks.commit)(uid, manifest)
                self._ledger.note_committed([uid], manifest.epoch)

    def _starting_state(
        self, manifest: Manifest | None, first: Mapping[OperatorUid, Sequence[JsonObject]]
    ) -> StartingState:
        return starting_state(
            describe_operators(self._plan), self._plan.max_parallelism, manifest, first
        )

    def _first_splits(
        self, manifest: Manifest | None, *, is_anew: bool
    ) -> Mapping[OperatorUid, Sequence[JsonObject]]:
        """The beginning of every source that no checkpoint knows yet."""
        known = {snapshot.uid for snapshot in manifest.snapshots} if manifest else set()
        record = self._ledger.record
        kept = record.beginnings if record is not None and not is_anew else {}
        return {
            planned.uid: _splits_of(
                planned.operator.source, task.parallelism, kept.get(planned.uid)
            )
            for task, planned in self._plan.operators()
            if isinstance(planned.operator, Read) and planned.uid not in known
        }

    def _to_keep(
        self, first: Mapping[OperatorUid, Sequence[JsonObject]]
    ) -> Mapping[OperatorUid, Beginning]:
        sources = {
            planned.uid: planned.operator.source
            for _, planned in self._plan.operators()
            if isinstance(planned.operator, Read)
        }
        return {
            uid: Beginning(sources[uid].tied_to, tuple(splits))
            for uid, splits in first.items()
            if sources[uid].begins_now
        }


def _splits_of(source: Source, parallelism: int, kept: Beginning | None) -> Sequence[JsonObject]:
    """What the job's log has of them, or else what the source says now."""
    if kept is not None and source.begins_now and kept.tied_to == source.tied_to:
        return kept.splits
    name = f"source {source.describe()}"
    with calling(name):
        splits = source.splits(parallelism)
    refuse_bad_splits(name, splits)
    return [
        {"id": split.id, "position": split.position}
        for split in sorted(splits, key=lambda split: split.id)
    ]


def _is_over(record: JobRecord) -> bool:
    """Whether nothing of the job will go on: it has finished, or was cancelled and kept nothing."""
    is_gone = record.outcome == "cancelled" and not record.checkpoints
    return is_gone or record.outcome == "finished"


def mismatches_with(
    plan: Plan,
    found: LocatedSnapshot,
    unfit_states: UnfitStates,
    config: JobConfig,
    *,
    allows_gone: bool,
) -> tuple[tuple[Mismatch, ...], list[Evolves]]:
    """Why a job of this plan cannot begin with this snapshot, and which states it would go on with
    in other columns, told as its start would tell it."""
    manifest = found.manifest
    if manifest.kind == "savepoint" or manifest.job != plan.job:
        manifest = as_savepoint(manifest)  # what was prepared is for the job that prepared it
    prepared = prepared_output(manifest, found.committed)
    discarded = [each.uid for each in prepared if each.key in (config.discard_prepared or ())]
    manifest = without_prepared(manifest, discarded)
    fit = fit_to(plan, manifest, found.committed, allows_gone=allows_gone)
    unfit = unfit_states(plan, fit.manifest, found.store, config.state_defaults)
    wrong = mismatches(job_shape(plan), fit, unfit, allows_state_lost=allows_gone)
    return wrong, evolving(unfit)


def fit_to(
    plan: Plan, manifest: Manifest, committed: Mapping[OperatorUid, Epoch], *, allows_gone: bool
) -> Fitted:
    """The snapshot in the uids of the plan; without all that the plan has not, if it may be so."""
    fit = fitted(job_shape(plan), manifest, committed)
    if not allows_gone:
        return fit
    present = {planned.uid for _, planned in plan.operators()}
    there = {snapshot.uid for snapshot in fit.manifest.snapshots} | fit.manifest.enumerators.keys()
    return replace(fit, manifest=without_operators(fit.manifest, there - present))


def job_shape(plan: Plan) -> JobShape:
    """The plan, as far as a snapshot must fit it."""
    return JobShape(
        describe_operators(plan),
        describe_edges(plan),
        plan.max_parallelism,
        enumerated_sources(plan).keys(),
    )


def _as_beginning(found: LocatedSnapshot) -> Manifest:
    return as_beginning(
        found.manifest, lambda file: replace(file, path=path_in_savepoint(file.path))
    )


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
