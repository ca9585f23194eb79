"""A job from start to end: attempt after attempt, each from the newest completed checkpoint."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.attempt import (
    DriverAddress,
    RunningAttempt,
    Surroundings,
    describe_operators,
)
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointDamaged,
    History,
    JobEnded,
)
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptStopped,
    CheckpointWanted,
    Mail,
    Outcome,
    StopWanted,
)
from stillframe.coordinator.sinks import DriverSinks
from stillframe.errors import (
    JobFailed,
    SnapshotDamaged,
    StartRefused,
    StillframeError,
    StorageError,
)
from stillframe.graph.launch import Deployment
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt, CheckpointId, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import FailureCause
from stillframe.protocol.restarts import FixedDelay, GiveUp
from stillframe.protocol.restore import (
    Refuse,
    RestoreFrom,
    StartingState,
    choose_restore,
    starting_state,
)
from stillframe.storage.paths import job_directory
from stillframe.storage.store import open_store


class Job(threading.Thread):
    """Runs a job to its end on a thread of its own. Everything public may be called by any."""

    def __init__(
        self,
        plan: Plan,
        config: JobConfig,
        deployment: Deployment,
        driver: DriverAddress,
        clock: Clock,
    ) -> None:
        super().__init__(name=f"stillframe-job-{plan.job}", daemon=True)
        self.plan = plan
        self.config = config
        self.history = History()
        self.failure: JobFailed | None = None
        self._clock = clock
        self._mailbox: queue.Queue[Mail] = queue.Queue()
        self._restarts = FixedDelay(config.restart_attempts, config.restart_delay_seconds)
        self._damaged: dict[CheckpointId, str] = {}
        self._wanted = None if config.restore_from is None else CheckpointId(config.restore_from)
        store = None
        if config.checkpoint_location is not None:
            store = open_store(config.checkpoint_location).below(job_directory(plan.job))
        self._ledger = Ledger(store, plan.job, config.checkpoints_retained, clock)
        self._sinks = DriverSinks(plan)
        self._around = Surroundings(
            plan=plan,
            config=config,
            deployment=deployment,
            secret=secrets.token_bytes(32),
            driver=driver,
            clock=clock,
            history=self.history,
            sinks=self._sinks,
            ledger=self._ledger,
            mailbox=self._mailbox,
        )

    def request_stop(self) -> None:
        """End the job in good order; it can be started again from its last checkpoint."""
        self._mailbox.put(StopWanted())

    def request_checkpoint(self, on_numbered: Callable[[CheckpointId], None]) -> None:
        """Take a checkpoint as soon as none is under way; tells the number it will have."""
        self._mailbox.put(CheckpointWanted(on_numbered))

    def run(self) -> None:
        outcome = "failed"
        try:
            outcome = self._run_attempts()
        except StillframeError as error:
            self.failure = JobFailed(f"job {self.plan.job!r} failed: {error}")
            self.failure.__cause__ = error
        except Exception as error:
            self.failure = JobFailed(
                f"job {self.plan.job!r} failed: {type(error).__name__}: {error}"
            )
            self.failure.__cause__ = error
        finally:
            self._sinks.close()
            self.history.tell(JobEnded(outcome))

    # --- attempts ---

    def _run_attempts(self) -> str:
        record = self._ledger.read()
        if record is not None and record.outcome == "finished" and self._wanted is None:
            return "finished"
        while True:
            match self._run_attempt_if_storage_lets():
                case AttemptFinished():
                    self._finish()
                    return "finished"
                case AttemptStopped():
                    return "stopped"
                case AttemptBroke(reason, cause):
                    self._note_damage(reason, cause)
                    self._restart_or_raise(reason, is_permanent=cause == "permanent")
                    if not self._wait_before_restart():
                        return "stopped"

    def _run_attempt_if_storage_lets(self) -> Outcome:
        """A storage that fails between two attempts is a failure like any other; at the first
        start it is told at once."""
        try:
            return self._run_attempt()
        except SnapshotDamaged:
            raise
        except StorageError as error:
            if self.history.summary().attempts == 0:
                raise
            return AttemptBroke(str(error), "other")

    def _run_attempt(self) -> Outcome:
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
        self.history.tell(AttemptStarted(attempt, restored_from, _positions(state)))
        before = self._newest()
        outcome = RunningAttempt(self._around, manifest, state).run()
        if self._newest() != before:
            self._restarts.on_progress()
        return outcome

    def _newest(self) -> CompletedCheckpoint | None:
        return self._ledger.record.newest if self._ledger.record else None

    def _restart_or_raise(self, reason: str, is_permanent: bool) -> None:
        decision = self._restarts.on_failure(reason, is_permanent)
        if isinstance(decision, GiveUp):
            self.history.tell(AttemptFailed(self._ledger.attempt, reason, None))
            raise JobFailed(decision.reason)
        self.history.tell(AttemptFailed(self._ledger.attempt, reason, decision.delay_seconds))

    def _wait_before_restart(self) -> bool:
        """False if somebody stops the job meanwhile."""
        deadline = self._clock.monotonic_seconds() + self.config.restart_delay_seconds
        postponed: list[Mail] = []
        while (left := deadline - self._clock.monotonic_seconds()) > 0:
            try:
                mail = self._mailbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(mail, StopWanted):
                return False
            if isinstance(mail, CheckpointWanted):
                postponed.append(mail)
        for mail in postponed:
            self._mailbox.put(mail)
        return True

    def _finish(self) -> None:
        self._ledger.finish()
        self._ledger.sweep(self._ledger.attempt)
        self._sinks.sweep(Attempt(self._ledger.attempt + 1), None)

    # --- what an attempt starts from ---

    def _choose_manifest(self) -> Manifest | None:
        wanted, self._wanted = self._wanted, None  # it was asked for now, not for every restart
        while True:
            choice = choose_restore(
                self._ledger.record,
                wanted,
                self._damaged,
                sinks_commit=self._makes_anything_visible(),
            )
            if isinstance(choice, Refuse):
                raise StartRefused(choice.reason)
            if not isinstance(choice, RestoreFrom):
                return None
            try:
                return self._ledger.read_manifest(choice.checkpoint)
            except SnapshotDamaged as error:
                self._mark_damaged(choice.checkpoint.checkpoint_id, str(error))

    def _note_damage(self, reason: str, cause: FailureCause) -> None:
        record = self._ledger.record
        if cause == "damaged snapshot" and record is not None and record.restored_from is not None:
            self._mark_damaged(record.restored_from, reason)

    def _mark_damaged(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._damaged[checkpoint_id] = reason
        self.history.tell(CheckpointDamaged(checkpoint_id, reason))

    def _makes_anything_visible(self) -> bool:
        return any(
            isinstance(planned.operator, Write) and planned.operator.sink.makes_visible
            for _, planned in self.plan.operators()
        )

    def _commit_again(self, manifest: Manifest) -> None:
        """What the restored checkpoint had prepared for sinks that commit here, if not done yet."""
        for uid in self._sinks.committing_here:
            if not self._ledger.is_committed(uid, manifest.epoch):
                self._sinks.commit(uid, manifest)
                self._ledger.note_committed([uid], manifest.epoch)

    def _starting_state(self, manifest: Manifest | None) -> StartingState:
        known = {snapshot.uid for snapshot in manifest.snapshots} if manifest else set()
        return starting_state(
            describe_operators(self.plan),
            self.plan.max_parallelism,
            manifest,
            self._first_splits(known),
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
            for task, planned in self.plan.operators()
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
