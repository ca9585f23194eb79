"""Notes what becomes of a job's checkpoints and attempts, for people, and has it kept.

The job's thread tells it; any thread may ask. Without a `HistoryThread` it all is in memory only,
as where there is no place for checkpoints.
"""

from __future__ import annotations

import threading

from stillframe.coordinator.kept_history import HistoryThread, Kept
from stillframe.graph.plan import Plan, Task
from stillframe.ids import CheckpointId
from stillframe.protocol.failures import AttemptBegun, EndOutcome, Failure
from stillframe.protocol.figures import Figures, Moment, Triggered, driver_lost
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.kept import KeptHistory, Record
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.statistics import TaskShape, vertex_id


def vertex_of(task: Task) -> str:
    """The id of a task in Flink's paths."""
    return vertex_id(task.operators[0].uid)


def shapes_of(plan: Plan) -> tuple[TaskShape, ...]:
    return tuple(TaskShape(vertex_of(task), task.name, task.parallelism) for task in plan.tasks)


class Recorder:
    """The past of one job, as one driver knows it."""

    def __init__(self, keeping: HistoryThread | None = None) -> None:
        self._keeping = keeping
        self._lock = threading.Lock()
        self._figures = Figures()

    def history(self, now: Moment) -> KeptHistory:
        """All that is known, also of earlier drivers; waits some seconds until that is read."""
        earlier = self._keeping.earlier() if self._keeping is not None else KeptHistory()
        with self._lock:
            return earlier.followed_by(self._figures.kept(now))

    def start(self) -> None:
        """Begin to read what earlier drivers left. Nothing is written before an attempt begins."""
        if self._keeping is not None:
            self._keeping.start()

    def abandon(self) -> None:
        """Another driver has taken over: it is its history now."""
        if self._keeping is not None:
            self._keeping.abandon()

    def close(self, outcome: EndOutcome, now: Moment) -> None:
        """The driver's part is over; waits some seconds until that is written."""
        with self._lock:
            self._keep(self._figures.on_ended(outcome, now))
        if self._keeping is not None:
            self._keeping.close()

    def sweep(self) -> None:
        """The job is this driver's now: remove what others have begun to write and never ended."""
        if self._keeping is not None:
            self._keeping.sweep()

    # --- attempts ---

    def on_begun(self, begun: AttemptBegun, before: JobRecord | None, now: Moment) -> None:
        """An attempt begins; `before` is what the log said until then."""
        with self._lock:
            if not self._figures.has_begun and self._keeping is not None:
                self._keeping.sweep()
                self._keeping.submit(lambda earlier: self._lost(before, earlier, now))
            self._keep(self._figures.on_begun(begun))

    def on_failed(self, failure: Failure) -> None:
        """An attempt did not go on; before the first of this driver there is nothing to tell."""
        with self._lock:
            if self._figures.has_begun:
                self._keep(self._figures.on_failed(failure))

    def on_attempt_over(self, reason: str, now: Moment) -> None:
        """What was under way is not any more."""
        with self._lock:
            for aborted in self._figures.on_attempt_over(reason, now):
                self._keep(aborted)

    # --- checkpoints ---

    def on_triggered(self, triggered: Triggered) -> None:
        with self._lock:
            self._figures.on_triggered(triggered)

    def on_acknowledged(
        self, checkpoint_id: CheckpointId, task: Task, timings: SubtaskTimings, now: Moment
    ) -> None:
        with self._lock:
            self._figures.on_acknowledged(checkpoint_id, vertex_of(task), timings, now)

    def on_completed(
        self, checkpoint_id: CheckpointId, path: str | None, metadata_bytes: int, now: Moment
    ) -> None:
        with self._lock:
            self._keep(self._figures.on_completed(checkpoint_id, path, metadata_bytes, now))

    def on_aborted(self, checkpoint_id: CheckpointId, reason: str, now: Moment) -> None:
        with self._lock:
            self._keep(self._figures.on_aborted(checkpoint_id, reason, now))

    # --- keeping ---

    def _keep(self, record: Record | None) -> None:
        if record is not None and self._keeping is not None:
            own = self._figures.totals
            self._keeping.submit(lambda earlier: (record, earlier.totals.plus(own)))

    def _lost(self, before: JobRecord | None, earlier: KeptHistory, now: Moment) -> Kept | None:
        """On the history's thread: only now it is known what earlier drivers have told."""
        lost = driver_lost(before, earlier, now)
        if lost is None:
            return None
        with self._lock:
            return self._figures.on_failed(lost), earlier.totals
