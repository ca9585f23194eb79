"""A job from start to end: attempt after attempt, each from the newest completed checkpoint."""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.commit_watch import CommitWatch
from stillframe.coordinator.history import (
    DriverAwaited,
    GuaranteeGiven,
    History,
    JobEnded,
)
from stillframe.coordinator.job_parts import JobParts, UnfitStates, no_unfit_states
from stillframe.coordinator.kept_history import HistoryThread
from stillframe.coordinator.lease import DriverLease
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.located import refuse_checkpoints_of_spark
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptRested,
    AttemptStopped,
    CheckpointWanted,
    Mail,
    Outcome,
    StopWanted,
)
from stillframe.coordinator.rescaling import Replan, RescaleOutcome, RescaleWanted, Scale
from stillframe.coordinator.running import DriverAddress, Stage, run_attempt
from stillframe.coordinator.savepoints import SavepointFailed, SavepointOutcome, SavepointWanted
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import Start, Starter
from stillframe.errors import (
    Blame,
    Fenced,
    JobFailed,
    SnapshotDamaged,
    StartRefused,
    StillframeError,
    StorageError,
    Unavailable,
    Unsettled,
    UserCodeError,
)
from stillframe.graph.guarantees import Guarantee, guarantee_of, refuse_weaker
from stillframe.graph.launch import Deployment
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt, CheckpointId
from stillframe.memory import oom_kills
from stillframe.protocol.checkpoints import Then
from stillframe.protocol.failures import EndOutcome, Failure, in_words
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.kept import KeptHistory
from stillframe.protocol.lease import Alive, TakeOver
from stillframe.protocol.messages import FailureCause, blame_of, cause_of
from stillframe.protocol.restarts import GiveUp, SameFailure, restart_strategy
from stillframe.secrets import masked, shows_secret
from stillframe.storage.paths import job_directory
from stillframe.storage.staging import StagedFiles
from stillframe.storage.store import Store, open_store

_THIS_PROCESS = (
    "; it is this process: if the job has ended because its function hangs, end the process"
)


class Job(threading.Thread):
    """Runs a job to its end on a thread of its own. Everything public may be called by any."""

    def __init__(
        self,
        plan: Plan,
        config: JobConfig,
        deployment: Deployment,
        driver: DriverAddress,
        clock: Clock,
        replan: Replan | None = None,
        parallelism: int | None = None,
        unfit_states: UnfitStates = no_unfit_states,
    ) -> None:
        """`parallelism`: what the plan was made for, which not all its operators need to have.
        `replan` makes one for another; without it the job cannot be rescaled while it runs.
        `unfit_states` tells before the start which states of a snapshot do not fit."""
        super().__init__(name=f"stillframe-job-{plan.job}", daemon=True)
        refuse_weaker(guarantee_of(plan, config), config)
        self.plan = plan
        self.config = config
        store = None
        self._location: Store | None = None
        if config.checkpoint_location is not None:
            self._location = open_store(config.checkpoint_location, config.storage_settings)
            store = self._location.below(job_directory(plan.job))
        kept_max = config.history_checkpoints
        keeping = HistoryThread(store, kept_max) if store is not None else None
        self.history = History(keeping, clock, kept_max, plan.job)
        self.failure: JobFailed | None = None
        self._cancels_between = False
        """Whether a person who ended the job between two attempts has cancelled it."""
        self._clock = clock
        self._mailbox: queue.Queue[Mail] = queue.Queue()
        self._restarts = restart_strategy(config, jitter=random.random)
        self._same_failure = SameFailure(
            config.restart_same_crash_max, config.restart_same_error_max
        )
        self._scale = Scale(parallelism or plan.slots, replan, config, clock, self.history)
        self._lease: DriverLease | None = None
        if store is not None and config.lease_timeout_seconds > 0:
            self._lease = DriverLease(store, config.lease_timeout_seconds)
        self._ledger = Ledger(store, plan.job, config.checkpoints_retained, clock)
        self._sinks = DriverSinks(
            plan,
            StagedFiles(store) if store is not None else None,
            config.accept_missing_output,
        )
        self._parts = JobParts(
            plan,
            config,
            clock,
            self.history,
            self._sinks,
            self._ledger,
            partial(open_store, settings=config.storage_settings),
            self._on_running,
            unfit_states=unfit_states,
            oom_kills=oom_kills,
        )
        self._stage = Stage(deployment, driver, secrets.token_bytes(32), self._mailbox)
        self._parts = replace(self._parts, commit=CommitWatch(self._parts, deployment).commit)
        self._starter = Starter(self._parts)

    def kept_history(self) -> KeptHistory:
        """What became of checkpoints and attempts, in earlier drivers too."""
        kept = self.history.kept()
        record = self._ledger.record
        if record is None:
            return kept
        retained = frozenset(each.checkpoint_id for each in record.checkpoints)
        return replace(kept, retained=retained)

    @property
    def guarantee(self) -> Guarantee:
        """What the job gives as it is planned now: a rescale may change it."""
        return guarantee_of(self.plan, self.config)

    @property
    def is_called_by_itself(self) -> bool:
        """Whether this is one of its own threads, on which waiting for the job never ends."""
        calling = self._sinks.under_way
        return threading.current_thread() in (self, calling.thread if calling else None)

    def request_stop(self) -> None:
        """End the job in good order; it can be started again from its last checkpoint."""
        self._mailbox.put(StopWanted())

    def request_cancel(self) -> None:
        """End the job for good; its checkpoints are deleted, unless retainOnCancel says no."""
        self._mailbox.put(StopWanted(cancels=True))

    def request_checkpoint(self, on_numbered: Callable[[CheckpointId], None]) -> None:
        """Take a checkpoint as soon as none is under way; tells the number it will have."""
        self._mailbox.put(CheckpointWanted(on_numbered))

    def watch(self, task: int) -> None:
        """Have slots tell of each channel to this task, for a while."""
        self._parts.watched.note(task, self._clock.monotonic_seconds())

    def request_savepoint(
        self, address: str, then: Then, on_outcome: Callable[[SavepointOutcome], None]
    ) -> None:
        """Take a savepoint as soon as possible; tells, on the job's thread, what became of it."""
        self._mailbox.put(SavepointWanted(address, then, on_outcome))

    @property
    def parallelism(self) -> int:
        """Of all operators that have none of their own."""
        return self._scale.parallelism

    def request_rescale(
        self, parallelism: int, on_outcome: Callable[[RescaleOutcome], None]
    ) -> None:
        """Go on with another parallelism; raises if that cannot be, and nothing has changed then.

        Otherwise tells what became of it, mostly on the job's thread.
        """
        wanted = self._scale.ask(parallelism, on_outcome)
        if wanted is not None:
            self._mailbox.put(wanted)

    def request_refresh(self, on_outcome: Callable[[RescaleOutcome], None]) -> None:
        """Go on with new rows of the tables that it joins with; raises if that cannot be.

        Otherwise tells what became of it, as `request_rescale` does.
        """
        self._mailbox.put(self._scale.refresh(on_outcome))

    def run(self) -> None:
        outcome: EndOutcome = "failed"
        self.history.start()
        try:
            self.history.tell(GuaranteeGiven(self.guarantee.word, self.guarantee.reasons))
            outcome = self._run_attempts()
        except StillframeError as error:
            self._note_end(error)
            self.failure = self._failed_by(error, str(error))
            for note in getattr(error, "__notes__", ()):
                self.failure.add_note(note)
        except Exception as error:
            self._note_end(error)
            self.failure = self._failed_by(error, f"{type(error).__name__}: {error}")
        finally:
            self._sinks.close()
            self.history.close(outcome)
            if self._lease is not None:
                self._lease.release(when_ended=self._sinks.left_behind)
            self._turn_away(outcome)
            self.history.tell(JobEnded(outcome))

    def _failed_by(self, error: Exception, said: str) -> JobFailed:
        failure = JobFailed(f"job {self.plan.job!r} failed: {masked(said)}")
        if not shows_secret(error):
            failure.__cause__ = error
        return failure

    def _turn_away(self, outcome: str) -> None:
        """Nobody will take the savepoints that were asked for too late."""
        with contextlib.suppress(queue.Empty):
            while True:
                mail = self._mailbox.get_nowait()
                if isinstance(mail, SavepointWanted):
                    mail.on_outcome(SavepointFailed(f"job {self.plan.job!r} has {outcome}"))
        self._scale.on_ended(f"job {self.plan.job!r} has {outcome}")

    def _note_end(self, error: Exception) -> None:
        """Remember why the job failed, unless that is done; written down only if the history is
        not somebody else's by now."""
        if isinstance(error, Fenced) and not isinstance(error, Unsettled):
            self.history.abandon()
        if not isinstance(error, JobFailed):
            reason = str(error) if isinstance(error, StillframeError) else repr(error)
            broke = AttemptBroke(masked(reason), "permanent", blame=blame_of(error))
            self.history.note_failure(self._failure(broke, None))

    def _failure(self, broke: AttemptBroke, delay_seconds: float | None) -> Failure:
        return Failure(
            attempt=self._ledger.record.attempt if self._ledger.record else Attempt(0),
            number=1,
            at_ms=self._clock.wall_ms(),
            reason=broke.reason,
            kind=broke.cause,
            restart_delay_seconds=delay_seconds,
            task=broke.at.task if broke.at else None,
            subtask=broke.at.subtask if broke.at else None,
            slot=broke.at.slot if broke.at else None,
            blame=broke.blame,
        )

    # --- attempts ---

    def _run_attempts(self) -> EndOutcome:
        if self._lease is not None and not self._take(self._lease):
            return "stopped"
        if self._starter.is_finished():
            return "finished"
        if self._location is not None and self._ledger.record is None:
            refuse_checkpoints_of_spark(self._location)
        while True:
            match self._run_attempt_if_storage_lets():
                case AttemptFinished():
                    return "finished"
                case AttemptStopped(is_cancelled):
                    return self._end_as_asked(cancels=is_cancelled)
                case AttemptRested(wanted, held_at_seconds):
                    self.history.note_rest()
                    self._change_plan(wanted, held_at_seconds)
                case AttemptBroke(reason, cause) as broke:
                    self._note_damage(reason, cause)
                    delay_seconds = self._delay_or_raise(broke)
                    if not self._wait_before_restart(delay_seconds):
                        return self._end_as_asked(cancels=self._cancels_between)

    def _end_as_asked(self, *, cancels: bool) -> EndOutcome:
        if not cancels:
            self._starter.stopped()
            return "stopped"
        self._starter.cancel()
        return "cancelled"

    def _take(self, lease: DriverLease) -> bool:
        """Wait until no other driver runs this job; False if somebody stops it meanwhile."""
        awaited: str | None = None
        while not isinstance(found := lease.look(self._clock.monotonic_seconds()), TakeOver):
            other = found.lease
            if isinstance(found, Alive):
                here = lease.is_of_this_process(other)
                raise StartRefused(
                    f"another driver runs it, on {other.host} (pid {other.pid}): stop that one"
                    " first, or give this job another queryName or checkpointLocation"
                    f"{_THIS_PROCESS if here else ''}"
                )
            if other.driver != awaited:
                awaited = other.driver
                told = DriverAwaited(other.host, other.pid, other.timeout_seconds)
                self.history.tell(told)
            if not self._wait_before_restart(found.seconds):
                return False
        lease.take()
        return True

    def _run_attempt_if_storage_lets(self) -> Outcome:
        """A storage that fails between two attempts is a failure like any other; at the first
        start it is told at once. A sink that fails to commit what it had prepared is one always,
        and so is another system that cannot be reached for it."""
        try:
            return self._run_attempt()
        except SnapshotDamaged:
            raise
        except (StorageError, Unsettled) as error:
            if self.history.summary().attempts == 0:
                raise
            return AttemptBroke(str(error), "other")
        except Unavailable as error:
            if self._ledger.record is None:  # where a source begins: no attempt has begun
                raise
            return AttemptBroke(str(error), "other")
        except UserCodeError as error:
            if self._ledger.record is None:  # a source's first splits: no attempt has begun
                raise
            return AttemptBroke(str(error), cause_of(error), blame=error.blame)

    def _run_attempt(self) -> Outcome:
        start = self._begin()
        before = self._newest()
        outcome = run_attempt(
            self._parts, self._stage, start.restored, start.state, start.savepoint
        )
        if self._newest() != before:
            self._restarts.on_progress()
            self._same_failure.on_progress()
        if not isinstance(outcome, AttemptBroke):
            self.history.note_attempt_over("the attempt was over before it")
        if isinstance(outcome, AttemptFinished):
            self._starter.finish()  # a storage that is down now costs a restart, not the job
        return outcome

    def _on_running(self) -> None:
        self._same_failure.on_running()
        self._scale.on_running()

    def _begin(self) -> Start:
        try:
            return self._starter.begin()
        except StartRefused as error:
            before = self._scale.take_back(str(error))
            if before is None:
                raise
        self._use(before)
        return self._starter.begin()

    def _change_plan(self, wanted: RescaleWanted, held_at_seconds: float) -> None:
        self._scale.change(self.plan, held_at_seconds)
        self._use(wanted.plan)

    def _use(self, plan: Plan) -> None:
        """From the next attempt on. The sinks are the same, and so are their committers."""
        self.plan = plan
        self._parts = replace(self._parts, plan=plan)
        self._starter.use(self._parts)

    def _newest(self) -> CompletedCheckpoint | None:
        return self._ledger.record.newest if self._ledger.record else None

    def _delay_or_raise(self, broke: AttemptBroke) -> float:
        """How long to wait before the next attempt, if there is to be one."""
        reason, now_seconds = broke.reason, self._clock.monotonic_seconds()
        is_permanent = broke.cause == "permanent"
        sign = None if is_permanent else broke.sign
        decision = self._same_failure.on_failure(
            reason, sign, now_seconds
        ) or self._restarts.on_failure(reason, is_permanent, now_seconds)
        delay_seconds = None if isinstance(decision, GiveUp) else decision.delay_seconds
        self.history.tell_failure(self._failure(broke, delay_seconds))
        if isinstance(decision, GiveUp):
            raise _with_notes(JobFailed(decision.reason), broke.blame)
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
                self._cancels_between = mail.cancels
                return False
            if isinstance(mail, RescaleWanted):
                self._change_plan(mail, self._clock.monotonic_seconds())
                if not mail.refreshes:
                    break  # at once: perhaps the job was for want of slots, and needs fewer now
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


def _with_notes(failure: JobFailed, blame: Blame | None) -> JobFailed:
    """Python shows notes below the error, so that its sentence can stay one."""
    for line in in_words(blame) if blame is not None else ():
        failure.add_note(line)
    return failure
