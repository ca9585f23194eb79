"""The handle of a running job: the members of PySpark's StreamingQuery, and a few of our own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from stillframe.config import JobConfig
from stillframe.coordinator.diagnosing import job_now
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    Event,
    JobEnded,
    Listener,
    SlotsRunning,
    Summary,
)
from stillframe.coordinator.job import Job
from stillframe.coordinator.progress import progress_of
from stillframe.coordinator.replanned import Rescaled
from stillframe.coordinator.rescaling import RescaleFailed, RescaleOutcome
from stillframe.coordinator.savepoints import SavepointFailed, SavepointOutcome, SavepointTaken
from stillframe.errors import JobFailed, StillframeError
from stillframe.graph.guarantees import Guarantee
from stillframe.graph.plan import Plan
from stillframe.ids import NO_CHECKPOINT, CheckpointId, OperatorUid, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.checkpointing import CheckpointingStatistics
from stillframe.protocol.checkpoints import Then
from stillframe.protocol.diagnosis import Diagnosis, diagnose
from stillframe.protocol.failures import Failure
from stillframe.protocol.measures import Measured
from stillframe.protocol.statistics import SlotPlace
from stillframe.storage.paths import job_id

_STOP_SECONDS_MAX = 120.0
_DISCOVERED_SECONDS = 0.1
"""How often it is looked whether sources have answered: no event tells of it."""
_COMMIT_SECONDS_MAX = 600.0
_FAILED_KEPT_MAX = 100


class Query:
    """A job that was started. Every member may be used from any thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._pids: tuple[int, ...] = ()
        self._ended = False
        self._completed = self._committed = NO_CHECKPOINT
        self._failed: dict[CheckpointId, str] = {}
        # Once: the working directory, which a relative location goes by, may change later.
        self._id = job_id(job.config.checkpoint_location, job.plan.job)
        self._run_id = str(uuid.uuid4())
        job.history.add_listener(self._on_event)

    def __repr__(self) -> str:
        told = ", ".join(f"{what}: {value}" for what, value in self._in_words().items())
        return f"<Query {self.name}, {told}>"

    def _repr_html_(self) -> str:
        return table_html(f"Query {self.name}", self._in_words())

    def _in_words(self) -> dict[str, str]:
        summary = self.summary
        last = self.checkpoints[-1:]
        return {
            "state": str(self.status["message"]),
            "guarantee": self.guarantee().word,
            "records read": f"{summary.records_in:,} ({summary.records_per_second:,.0f}/s)",
            "checkpoints": f"{summary.checkpoints_completed} ({last[0] if last else 'none yet'})",
            "restarts": str(summary.restarts),
            "checkpointLocation": str(self.config.checkpoint_location),
        }

    # --- StreamingQuery's members ---

    @property
    def id(self) -> str:
        """The same whenever this job is started again from the same place."""
        return self._id

    @property
    def runId(self) -> str:
        """Another one for every start."""
        return self._run_id

    @property
    def name(self) -> str:
        return self._job.plan.job

    @property
    def isActive(self) -> bool:
        return self._job.is_alive()

    @property
    def status(self) -> dict[str, Any]:
        summary = self.summary
        present, events = self._job.history.present(), self._job.history.events()
        told = (str(event).partition("\n")[0] for event in present or events[-1:])
        message = "; ".join(told) or "starting"
        return {
            "message": message if summary.outcome == "running" else summary.outcome,
            "isDataAvailable": self.isActive,
            "isTriggerActive": self.isActive,
            "guarantee": self.guarantee().word,
        }

    @property
    def lastProgress(self) -> dict[str, Any] | None:
        """Of the last completed checkpoint; None before the first."""
        recent = self.recentProgress
        return recent[-1] if recent else None

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """One entry per completed checkpoint, oldest first, the last hundred."""
        completed = self._job.history.completed()
        earlier: list[CheckpointCompleted | None] = [None, *completed]
        return [
            self._progress(before, this) for before, this in zip(earlier, completed, strict=False)
        ]

    def exception(self) -> JobFailed | None:
        """Why the job failed; None if it has not."""
        return self._job.failure

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait for the end. Raises if the job failed.

        Without a timeout it returns nothing; with one, whether the job has ended.
        """
        self._refuse_inside("awaitTermination()")
        if not self._wait_for_end(timeout):
            return False
        if self._job.failure is not None:
            raise self._job.failure
        return None if timeout is None else True

    def processAllAvailable(self) -> None:
        """Wait until what had been read when this was called is processed and committed.

        Takes a checkpoint for it; returns at once if the job has ended. Meant for tests.
        """
        self._refuse_inside("processAllAvailable()")
        checkpoint_id = self.checkpoint()
        if checkpoint_id is not None:
            self._await(lambda: self._committed >= checkpoint_id, _COMMIT_SECONDS_MAX)

    def stop(
        self, savepoint: str | None = None, *, drain: bool = False, timeout: float = 600.0
    ) -> None:
        """End the job; started again, it goes on from its last completed checkpoint.

        With `savepoint`, a directory that is not there yet, everything the job knows goes there
        first; not one record is emitted after it, and sinks have committed all before it. With
        `drain` the sources end, and timers and windows that wait for event time fire before: for a
        job that will not go on. If the savepoint cannot be taken within `timeout` seconds this
        raises, and the job runs on.

        Called by a function of the job on the driver (`foreachBatch`, a listener) it does not wait:
        the job ends when that function has returned.
        """
        if savepoint is not None:
            self._take_savepoint(savepoint, "drain" if drain else "stop", timeout)
        elif drain:
            raise StillframeError("stop(drain=True) wants a savepoint: say where it goes")
        else:
            self._job.request_stop()
        if self._job.is_called_by_itself:
            return
        if not self._wait_for_end(_STOP_SECONDS_MAX):
            waits = "; ".join(self.trouble)
            raise StillframeError(
                f"job {self.name!r} did not stop within {_STOP_SECONDS_MAX:g} s:"
                f" {waits or 'look at the Spark job it runs in'}"
            )

    def cancel(self, timeout: float = _STOP_SECONDS_MAX) -> None:
        """End the job now, for good: it is not meant to go on.

        Its checkpoints are deleted, and it can only be started anew (option `fresh`) or from a
        savepoint (`restoreFrom`); with option `retainOnCancel` they are kept, and started again it
        goes on from the newest. Savepoints and what sinks have committed stay in any case. Raises
        if the job has ended otherwise, or did not end within `timeout` seconds. Called by a
        function of the job on the driver it does not wait, as `stop`.
        """
        self._job.request_cancel()
        if self._job.is_called_by_itself:
            return
        if not self._wait_for_end(timeout):
            raise StillframeError(
                f"job {self.name!r} did not end within {timeout:g} s: look at the Spark job it runs"
                " in"
            )
        if self._job.failure is not None:
            raise self._job.failure
        if self.summary.outcome != "cancelled":
            raise StillframeError(
                f"job {self.name!r} has {self.summary.outcome} before it could be cancelled, and"
                " what it has kept is still there: start it with option fresh=true to start over"
            )

    def explain(self, extended: bool = False) -> None:
        """Print the physical plan, and which guarantee it gives."""
        guarantee = self.guarantee()
        print(self._job.plan.explain())
        print("\n    ".join([f"guarantee: {guarantee.word}", *guarantee.reasons]))

    # --- ours ---

    def guarantee(self) -> Guarantee:
        """What holds for every record of the job whatever fails, and why it is not more.

        By its sources, its sinks and its checkpoints; it does not change while the job runs.
        """
        return self._job.guarantee

    @property
    def plan(self) -> Plan:
        """The tasks of the job, and the channels between them."""
        return self._job.plan

    @property
    def config(self) -> JobConfig:
        """The settings it was started with."""
        return self._job.config

    @property
    def checkpoints(self) -> list[CheckpointCompleted]:
        """The last completed checkpoints, oldest first, with all their timings."""
        return self._job.history.completed()

    @property
    def checkpoint_statistics(self) -> CheckpointingStatistics:
        """What became of the last checkpoints and savepoints (`historyCheckpoints`), those that
        failed included, and figures over them; also of those of earlier drivers of the job."""
        return self._job.kept_history().statistics()

    @property
    def attempts(self) -> list[JsonObject]:
        """How the last hundred attempts came up and what became of them, the newest first."""
        return self._job.kept_history().attempts_json()

    @property
    def failures(self) -> list[Failure]:
        """The last hundred, oldest first, with their causes and what the job recovered from; also
        those of earlier drivers of the job."""
        return self._job.kept_history().failures

    @property
    def trouble(self) -> list[str]:
        """What is in the job's way now: functions that hang, cores that are busy; mostly empty.

        What several slots tell alike is there once."""
        return list(dict.fromkeys(str(event) for event in self._job.history.present()))

    @property
    def events(self) -> list[Event]:
        """What happened lately, oldest first."""
        return self._job.history.events()

    @property
    def measured(self) -> dict[SlotIndex, Measured]:
        """What each slot of the running attempt has told of itself last."""
        return self._job.history.measured()

    @property
    def clock_offsets_ms(self) -> dict[SlotIndex, int]:
        """By how much the driver's clock is ahead of that of each slot, at most."""
        return self._job.history.clock_offsets_ms()

    @property
    def measured_lately(self) -> dict[SlotIndex, tuple[Measured, Measured]]:
        """Of each slot of the running attempt, two reports some seconds apart."""
        return self._job.history.measured_lately()

    def watch(self, task: int) -> None:
        """Somebody looks at the channels of this task: they are measured for some seconds."""
        self._job.watch(task)

    @property
    def slot_places(self) -> tuple[SlotPlace, ...]:
        """Where the slots of the running attempt are; empty before all are there."""
        return self._job.history.places()

    def diagnosis(self, state: str) -> Diagnosis:
        """One sentence: what the job waits for, or that it keeps up. `state`: Flink's word."""
        error = self.exception()
        reason = str(self.status["message"]) if error is None else str(error)
        told = self.checkpoint_statistics
        return diagnose(job_now(state, reason, self.plan, self._job.history, told))

    @property
    def summary(self) -> Summary:
        """The job so far in a few figures."""
        return self._job.history.summary()

    @property
    def slot_pids(self) -> tuple[int, ...]:
        """The process of each slot of the running attempt; empty while none runs."""
        with self._changed:
            return self._pids

    def add_listener(self, listener: Listener) -> None:
        """Have every event from now on told; called on the job's thread, must not block."""
        self._job.history.add_listener(listener)

    def checkpoint(self, timeout: float = 600.0) -> CheckpointId | None:
        """Take a checkpoint now and wait until it is complete; None if the job ended instead.

        It holds everything that was read before the call, unless the job restarts meanwhile:
        then the next attempt takes it. Raises if it, or the job, failed, or after `timeout`
        seconds.
        """
        self._refuse_inside("checkpoint()")
        if self._job.config.checkpoint_location is None:
            raise StillframeError(
                f"job {self.name!r} has no checkpointLocation, so it can take no checkpoint"
            )
        wanted: list[CheckpointId] = []

        def is_decided() -> bool:
            return bool(wanted) and (self._completed >= wanted[-1] or wanted[-1] in self._failed)

        self._job.request_checkpoint(wanted.append)
        self._await(is_decided, timeout)
        if wanted and self._completed >= wanted[-1]:
            return self._completed  # it, or a newer one that holds all it would have held
        if wanted and wanted[-1] in self._failed:
            raise StillframeError(f"checkpoint {wanted[-1]} failed: {self._failed[wanted[-1]]}")
        return None

    def _await_discovered(self, uids: Sequence[OperatorUid]) -> None:
        """Until each of these sources has been asked what there is, later than this was called."""
        # The first answer may be to a question that was asked before.
        wanted = {uid: self._job.history.discoveries(uid) + 2 for uid in uids}

        def are_answered() -> bool:
            return all(self._job.history.discoveries(uid) >= n for uid, n in wanted.items())

        with self._changed:
            while not (self._ended or are_answered()):
                self._changed.wait(_DISCOVERED_SECONDS)

    def savepoint(self, directory: str, timeout: float = 600.0) -> str:
        """Write everything the job knows into a directory that is not there yet; the job runs on.

        Answers the address. It can be moved, and any job that fits can start from it (option
        `restoreFrom`). Raises if it failed, or the job did, or after `timeout` seconds.
        """
        return self._take_savepoint(directory, "go on", timeout)

    @property
    def parallelism(self) -> int:
        """In how many slots the job runs, apart from operators with a parallelism of their own."""
        return self._job.parallelism

    def rescale(self, parallelism: int, timeout: float = 600.0) -> Rescaled:
        """Go on with another parallelism, in the same driver and from where the job is.

        The sources are held while the job takes its last checkpoint and its sinks commit it; then
        its slots end and the others start from that checkpoint. Nothing is lost or doubled by it.
        Answers how long that took. Raises, and the job runs on as it was, if it cannot be or that
        checkpoint fails. Raises too after `timeout` seconds, but the job may be rescaled still.
        """
        outcomes: list[RescaleOutcome] = []

        def note(outcome: RescaleOutcome) -> None:
            with self._changed:
                outcomes.append(outcome)
                self._changed.notify_all()

        self._refuse_inside("rescale()")
        if not self.isActive:
            raise StillframeError(f"job {self.name!r} does not run: start it with the parallelism")
        self._job.request_rescale(parallelism, note)
        self._await(lambda: bool(outcomes), timeout)
        match outcomes:
            case [Rescaled() as rescaled]:
                return rescaled
            case [RescaleFailed(reason)]:
                raise StillframeError(reason)
            case _:
                raise StillframeError(f"job {self.name!r} ended before it was rescaled")

    def _take_savepoint(self, directory: str, then: Then, timeout: float) -> str:
        outcomes: list[SavepointOutcome] = []

        def note(outcome: SavepointOutcome) -> None:
            with self._changed:
                outcomes.append(outcome)
                self._changed.notify_all()

        self._refuse_inside("savepoint()" if then == "go on" else "stop(savepoint=...)")
        self._job.request_savepoint(directory, then, note)
        self._await(lambda: bool(outcomes), timeout)
        match outcomes:
            case [SavepointTaken(address)]:
                return address
            case [SavepointFailed(reason)]:
                raise StillframeError(reason)
            case _:
                raise StillframeError(
                    f"job {self.name!r} ended before a savepoint of it could be taken"
                )

    def _refuse_inside(self, call: str) -> None:
        if self._job.is_called_by_itself:
            raise StillframeError(
                f"query.{call} inside foreachBatch or a listener would wait for the epoch that is"
                " being handed over: call it from another thread, or end the job with query.stop(),"
                " which does not wait here"
            )

    def _await(self, is_done: Callable[[], bool], seconds_max: float) -> None:
        """Until it is done, or the job has ended. Raises if the job failed or time is up."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._ended or is_done(), seconds_max)
        if self._job.failure is not None:
            raise self._job.failure
        if not came:
            raise StillframeError(
                f"job {self.name!r} did not get there within {seconds_max:g} s: it is"
                f" {self.status['message']!r}"
            )

    def _wait_for_end(self, timeout: float | None) -> bool:
        # Not by joining the thread: Ctrl-C in Thread.join makes Python 3.11 and 3.12 take a running
        # thread for one that has ended, and `stop` would not wait for it any more.
        with self._changed:
            has_ended = self._changed.wait_for(lambda: self._ended, timeout)
        if has_ended:
            self._job.join()  # it has told its end as the last thing it did
        return has_ended

    def _on_event(self, event: Event) -> None:
        with self._changed:
            match event:
                case SlotsRunning(pids=pids):
                    self._pids = pids
                case AttemptFailed() | AttemptStarted():
                    self._pids = ()
                case CheckpointCompleted(checkpoint_id):
                    self._completed = checkpoint_id
                case CheckpointCommitted(checkpoint_id):
                    self._committed = checkpoint_id
                case CheckpointFailed(checkpoint_id, reason):
                    kept = list(self._failed.items())[1 - _FAILED_KEPT_MAX :]
                    self._failed = {**dict(kept), checkpoint_id: reason}
                case JobEnded():
                    self._pids = ()
                    self._ended = True
            self._changed.notify_all()

    def _progress(
        self, before: CheckpointCompleted | None, this: CheckpointCompleted
    ) -> dict[str, Any]:
        known_as = {"id": self.id, "runId": self.runId, "name": self.name}
        return {**known_as, **progress_of(self.plan, before, this)}


def table_html(title: str, rows: Mapping[str, str]) -> str:
    """For notebooks, where nothing that a name contains may become markup."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(what)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for what, value in rows.items()
    )
    return f"<b>{escape(title)}</b><table>{cells}</table>"
