"""A job from start to end: attempt after attempt, each from the newest completed checkpoint."""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import threading
from collections.abc import Callable
from functools import partial

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.attempt import JobParts
from stillframe.coordinator.history import AttemptFailed, History, JobEnded
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
from stillframe.coordinator.running import DriverAddress, Stage, run_attempt
from stillframe.coordinator.savepoints import SavepointFailed, SavepointOutcome, SavepointWanted
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import Starter
from stillframe.errors import (
    JobFailed,
    SnapshotDamaged,
    StillframeError,
    StorageError,
    Unsettled,
)
from stillframe.graph.launch import Deployment
from stillframe.graph.plan import Plan
from stillframe.ids import CheckpointId
from stillframe.protocol.checkpoints import Then
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.messages import FailureCause
from stillframe.protocol.restarts import GiveUp, restart_strategy
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
        self._restarts = restart_strategy(config, jitter=random.random)
        store = None
        if config.checkpoint_location is not None:
            location = open_store(config.checkpoint_location, config.storage_settings)
            store = location.below(job_directory(plan.job))
        self._ledger = Ledger(store, plan.job, config.checkpoints_retained, clock)
        self._sinks = DriverSinks(plan)
        self._parts = JobParts(
            plan,
            config,
            clock,
            self.history,
            self._sinks,
            self._ledger,
            partial(open_store, settings=config.storage_settings),
        )
        self._stage = Stage(deployment, driver, secrets.token_bytes(32), self._mailbox)
        self._starter = Starter(self._parts)

    def request_stop(self) -> None:
        """End the job in good order; it can be started again from its last checkpoint."""
        self._mailbox.put(StopWanted())

    def request_checkpoint(self, on_numbered: Callable[[CheckpointId], None]) -> None:
        """Take a checkpoint as soon as none is under way; tells the number it will have."""
        self._mailbox.put(CheckpointWanted(on_numbered))

    def request_savepoint(
        self, address: str, then: Then, on_outcome: Callable[[SavepointOutcome], None]
    ) -> None:
        """Take a savepoint as soon as possible; tells, on the job's thread, what became of it."""
        self._mailbox.put(SavepointWanted(address, then, on_outcome))

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
            self._turn_away(outcome)
            self.history.tell(JobEnded(outcome))

    def _turn_away(self, outcome: str) -> None:
        """Nobody will take the savepoints that were asked for too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._mailbox.get_nowait()
                if isinstance(mail, SavepointWanted):
                    mail.on_outcome(SavepointFailed(f"job {self.plan.job!r} has {outcome}"))

    # --- attempts ---

    def _run_attempts(self) -> str:
        if self._starter.is_finished():
            return "finished"
        while True:
            match self._run_attempt_if_storage_lets():
                case AttemptFinished():
                    return "finished"
                case AttemptStopped():
                    return "stopped"
                case AttemptBroke(reason, cause):
                    self._note_damage(reason, cause)
                    delay_seconds = self._delay_or_raise(reason, is_permanent=cause == "permanent")
                    if not self._wait_before_restart(delay_seconds):
                        return "stopped"

    def _run_attempt_if_storage_lets(self) -> Outcome:
        """A storage that fails between two attempts is a failure like any other; at the first
        start it is told at once."""
        try:
            return self._run_attempt()
        except SnapshotDamaged:
            raise
        except (StorageError, Unsettled) as error:
            if self.history.summary().attempts == 0:
                raise
            return AttemptBroke(str(error), "other")

    def _run_attempt(self) -> Outcome:
        start = self._starter.begin()
        before = self._newest()
        outcome = run_attempt(
            self._parts, self._stage, start.restored, start.state, start.savepoint
        )
        if self._newest() != before:
            self._restarts.on_progress()
        if isinstance(outcome, AttemptFinished):
            self._starter.finish()  # a storage that is down now costs a restart, not the job
        return outcome

    def _newest(self) -> CompletedCheckpoint | None:
        return self._ledger.record.newest if self._ledger.record else None

    def _delay_or_raise(self, reason: str, is_permanent: bool) -> float:
        """How long to wait before the next attempt, if there is to be one."""
        now_seconds = self._clock.monotonic_seconds()
        decision = self._restarts.on_failure(reason, is_permanent, now_seconds)
        if isinstance(decision, GiveUp):
            self.history.tell(AttemptFailed(self._ledger.attempt, reason, None))
            raise JobFailed(decision.reason)
        self.history.tell(AttemptFailed(self._ledger.attempt, reason, decision.delay_seconds))
        return decision.delay_seconds

    def _wait_before_restart(self, delay_seconds: float) -> bool:
        """False if somebody stops the job meanwhile."""
        deadline = self._clock.monotonic_seconds() + delay_seconds
        postponed: list[Mail] = []
        while (left := deadline - self._clock.monotonic_seconds()) > 0:
            try:
                mail = self._mailbox.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(mail, StopWanted):
                return False
            if isinstance(mail, CheckpointWanted | SavepointWanted):
                postponed.append(mail)
        for mail in postponed:
            self._mailbox.put(mail)
        return True

    def _note_damage(self, reason: str, cause: FailureCause) -> None:
        record = self._ledger.record
        if cause != "damaged snapshot" or record is None:
            return
        if record.restored_from is not None:
            self._starter.mark_damaged(record.restored_from, reason)
        else:
            self._starter.mark_savepoint_damaged(reason)
