"""A job from start to end: attempt after attempt, each from the newest completed checkpoint."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Mapping

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.attempt import (
    AttemptBroke,
    AttemptFinished,
    AttemptStopped,
    CheckpointWanted,
    DriverAddress,
    Mail,
    Outcome,
    RunningAttempt,
    StopWanted,
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
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import JobFailed, SnapshotDamaged, StartRefused, StillframeError
from stillframe.graph.launch import Deployment
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import Plan
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.joblog import JobRecord, attempt_started, ended, epoch_committed
from stillframe.protocol.manifests import Manifest
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
        self._highest_id = NO_CHECKPOINT
        self._log: JobLog | None = None
        self._snapshots: Snapshots | None = None
        store_address = None
        if config.checkpoint_location is not None:
            store = open_store(config.checkpoint_location).below(job_directory(plan.job))
            store_address = store.address
            self._log = JobLog(store, plan.job, clock)
            self._snapshots = Snapshots(store)
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
            log=self._log,
            snapshots=self._snapshots,
            store_address=store_address,
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
        record = self._log.read() if self._log else None
        if record is not None and record.outcome == "finished":
            return "finished"
        if self._snapshots is not None:
            self._highest_id = self._snapshots.highest_id()
        while True:
            record, outcome = self._run_attempt(record)
            match outcome:
                case AttemptFinished():
                    self._end_in_log(record)
                    return "finished"
                case AttemptStopped():
                    return "stopped"
                case AttemptBroke(reason, cause):
                    self._note_damage(record, reason, cause)
                    self._restart_or_raise(record, reason, is_permanent=cause == "permanent")
                    if not self._wait_before_restart():
                        return "stopped"

    def _run_attempt(self, record: JobRecord | None) -> tuple[JobRecord, Outcome]:
        manifest = self._choose_manifest(record)
        # Before the fence: a job that does not fit must not end one that runs.
        state = self._starting_state(manifest)
        started = attempt_started(
            record, manifest.checkpoint_id if manifest else None, self._highest_id
        )
        # The fence: from this entry on, whatever an older driver or attempt does is void.
        record = self._log.append(started) if self._log else started
        if manifest is not None:
            record = self._commit_again(record, manifest)
        self._sweep(record, manifest)
        self.history.tell(
            AttemptStarted(
                record.attempt, manifest.checkpoint_id if manifest else None, _positions(state)
            )
        )
        attempt = RunningAttempt(self._around, record, manifest, state)
        outcome = attempt.run()
        self._highest_id = attempt.highest_checkpoint_id
        if attempt.record.newest != record.newest:
            self._restarts.on_progress()
        return attempt.record, outcome

    def _restart_or_raise(self, record: JobRecord, reason: str, is_permanent: bool) -> None:
        decision = self._restarts.on_failure(reason, is_permanent)
        if isinstance(decision, GiveUp):
            self.history.tell(AttemptFailed(record.attempt, reason, None))
            raise JobFailed(decision.reason)
        self.history.tell(AttemptFailed(record.attempt, reason, decision.delay_seconds))

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

    def _end_in_log(self, record: JobRecord) -> None:
        if self._log is None:
            return
        self._log.append(ended(record, "finished"))
        assert self._snapshots is not None
        self._snapshots.sweep(record.checkpoints, record.attempt)
        self._sinks.sweep(Attempt(record.attempt + 1), None)

    # --- what an attempt starts from ---

    def _choose_manifest(self, record: JobRecord | None) -> Manifest | None:
        wanted, self._wanted = self._wanted, None  # it was asked for now, not for every restart
        while True:
            choice = choose_restore(
                record,
                wanted,
                self._damaged,
                sinks_commit=self._has_committing_sinks(),
            )
            if isinstance(choice, Refuse):
                raise StartRefused(choice.reason)
            if not isinstance(choice, RestoreFrom):
                return None
            assert self._snapshots is not None
            try:
                return self._snapshots.read_manifest(choice.checkpoint)
            except SnapshotDamaged as error:
                self._mark_damaged(choice.checkpoint.checkpoint_id, str(error))

    def _note_damage(self, record: JobRecord, reason: str, cause: str) -> None:
        if cause == "damaged snapshot" and record.restored_from is not None:
            self._mark_damaged(record.restored_from, reason)

    def _mark_damaged(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._damaged[checkpoint_id] = reason
        self.history.tell(CheckpointDamaged(checkpoint_id, reason))

    def _has_committing_sinks(self) -> bool:
        return any(
            isinstance(planned.operator, Write) and planned.operator.sink.guarantee != "none"
            for _, planned in self.plan.operators()
        )

    def _commit_again(self, record: JobRecord, manifest: Manifest) -> JobRecord:
        """What the restored checkpoint had prepared for sinks that commit here, if not done yet."""
        assert self._log is not None
        before = [kept for kept in record.checkpoints if kept.epoch < manifest.epoch]
        after = before[-1].checkpoint_id if before else NO_CHECKPOINT
        for uid in self._sinks.committing_here:
            if record.committed_epoch_by_sink.get(uid, -1) < manifest.epoch:
                self._sinks.commit(uid, manifest, after)
                record = self._log.append(epoch_committed(record, uid, manifest.epoch))
        return record

    def _sweep(self, record: JobRecord, manifest: Manifest | None) -> None:
        if self._snapshots is not None:
            self._snapshots.sweep(record.checkpoints, Attempt(record.attempt - 1))
        self._sinks.sweep(record.attempt, manifest)

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
