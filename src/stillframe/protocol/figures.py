"""What one driver has seen of its job's checkpoints and attempts, as records.

Told what happened, it answers the record that is to be kept, if something is over with it; told a
second time, or of what it does not know, nothing. Pure, and bounded: the caller says the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from stillframe.ids import Attempt, CheckpointId
from stillframe.protocol.failures import (
    AttemptBegun,
    AttemptEnded,
    EndOutcome,
    Failure,
)
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.kept import KEPT_MAX, KeptHistory, Totals
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.statistics import (
    CheckpointStatistics,
    CheckpointStatus,
    SubtaskStatistics,
    TaskShape,
    TriggeredType,
)

_REASON_CHARS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, by both readings of a clock: one to tell, one to measure with."""

    wall_ms: int
    monotonic_seconds: float


@dataclass(frozen=True, slots=True)
class Triggered:
    """A checkpoint or savepoint has begun, of all subtasks of these tasks."""

    checkpoint_id: CheckpointId
    attempt: Attempt
    triggered_as: TriggeredType
    tasks: tuple[TaskShape, ...]
    at: Moment


@dataclass(slots=True)
class _UnderWay:
    triggered: Triggered
    subtasks: dict[tuple[str, int], SubtaskStatistics] = field(default_factory=dict)

    def elapsed_ms(self, now: Moment) -> float:
        return (now.monotonic_seconds - self.triggered.at.monotonic_seconds) * 1000

    def statistics(self, status: CheckpointStatus, now: Moment) -> CheckpointStatistics:
        triggered = self.triggered
        places = {task.vertex: place for place, task in enumerate(triggered.tasks)}
        return CheckpointStatistics(
            checkpoint_id=triggered.checkpoint_id,
            attempt=triggered.attempt,
            status=status,
            triggered_as=triggered.triggered_as,
            triggered_at_ms=triggered.at.wall_ms,
            end_to_end_ms=round(self.elapsed_ms(now), 3),
            tasks=triggered.tasks,
            subtasks=tuple(
                sorted(self.subtasks.values(), key=lambda part: (places[part.vertex], part.index))
            ),
        )


class Figures:
    """The figures of one driver; of its attempts one runs at a time."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._attempt: Attempt | None = None
        self._under_way: dict[CheckpointId, _UnderWay] = {}
        self._checkpoints = deque[CheckpointStatistics](maxlen=kept_max)
        self._begun = deque[AttemptBegun](maxlen=kept_max)
        self._ended = deque[AttemptEnded](maxlen=kept_max)
        self._failures = deque[Failure](maxlen=kept_max)
        self._totals = Totals()

    @property
    def has_begun(self) -> bool:
        """Whether this driver has had an attempt of its own."""
        return self._attempt is not None

    @property
    def totals(self) -> Totals:
        """Of this driver."""
        return self._totals

    def kept(self, now: Moment) -> KeptHistory:
        """All of it; what is under way, as far as it has come."""
        under_way = [each.statistics("IN_PROGRESS", now) for each in self._under_way.values()]
        return KeptHistory(
            checkpoints=tuple(self._checkpoints),
            begun=tuple(self._begun),
            ended=tuple(self._ended),
            kept_failures=tuple(self._failures),
            totals=self._totals,
            under_way=tuple(under_way),
        )

    # --- attempts ---

    def on_begun(self, begun: AttemptBegun) -> AttemptBegun:
        self._attempt = begun.attempt
        self._begun.append(begun)
        if begun.restored is not None:
            self._totals = self._totals.plus(Totals(restored=1))
        return begun

    def on_failed(self, failure: Failure) -> Failure:
        """It gets its number here, unless it has a higher one."""
        others = (each.number for each in self._failures if each.attempt == failure.attempt)
        number = max(failure.number, 1 + max(others, default=0))
        numbered = replace(failure, number=number, reason=_keepable(failure.reason))
        self._failures.append(numbered)
        return numbered

    def on_ended(self, outcome: EndOutcome, now: Moment) -> AttemptEnded | None:
        """The driver's last attempt is over; None if it has had none."""
        if self._attempt is None or any(each.attempt == self._attempt for each in self._ended):
            return None
        ended = AttemptEnded(self._attempt, now.wall_ms, outcome)
        self._ended.append(ended)
        return ended

    # --- checkpoints ---

    def on_triggered(self, triggered: Triggered) -> None:
        self._under_way[triggered.checkpoint_id] = _UnderWay(triggered)

    def on_acknowledged(
        self, checkpoint_id: CheckpointId, vertex: str, timings: SubtaskTimings, now: Moment
    ) -> None:
        """The first time counts."""
        under_way = self._under_way.get(checkpoint_id)
        if under_way is not None:
            elapsed_ms = under_way.elapsed_ms(now)
            part = SubtaskStatistics.of(vertex, timings, now.wall_ms, elapsed_ms)
            under_way.subtasks.setdefault((vertex, timings.subtask), part)

    def on_completed(
        self, checkpoint_id: CheckpointId, path: str | None, metadata_bytes: int, now: Moment
    ) -> CheckpointStatistics | None:
        under_way = self._under_way.pop(checkpoint_id, None)
        if under_way is None:
            return None
        self._totals = self._totals.plus(Totals(completed=1))
        over = replace(
            under_way.statistics("COMPLETED", now), path=path, metadata_bytes=metadata_bytes
        )
        self._checkpoints.append(over)
        return over

    def on_aborted(
        self, checkpoint_id: CheckpointId, reason: str, now: Moment
    ) -> CheckpointStatistics | None:
        under_way = self._under_way.pop(checkpoint_id, None)
        if under_way is None:
            return None
        self._totals = self._totals.plus(Totals(failed=1))
        over = replace(
            under_way.statistics("FAILED", now),
            failed_at_ms=now.wall_ms,
            failure=_keepable(reason),
        )
        self._checkpoints.append(over)
        return over

    def on_attempt_over(self, reason: str, now: Moment) -> list[CheckpointStatistics]:
        """What was under way is not any more."""
        over = [self.on_aborted(each, reason, now) for each in list(self._under_way)]
        return [each for each in over if each is not None]


def _keepable(reason: str) -> str:
    """Within a bound, and without what no file can hold: half a sign from a file's odd name."""
    return reason[:_REASON_CHARS_MAX].encode(errors="replace").decode()


def driver_lost(before: JobRecord | None, kept: KeptHistory, now: Moment) -> Failure | None:
    """The failure that nobody was there to tell: the log shows an attempt that nobody has ended.

    `before` is the log's last record before this driver began, `kept` what earlier drivers left.
    Without any history the log is no proof: a version that kept none may have stopped the job.
    """
    if before is None or before.outcome != "running" or not kept or kept.is_over(before.attempt):
        return None
    return Failure(
        attempt=before.attempt,
        number=1 + kept.failures_of(before.attempt),
        at_ms=now.wall_ms,
        reason=(
            f"the driver of attempt {before.attempt} ({before.written_by}) ended without a word:"
            " it was killed, lost its machine, or this driver has replaced it"
        ),
        kind="driver lost",
        restart_delay_seconds=None,
    )
