"""What one driver has seen of its job's checkpoints and attempts, as records.

Told what happened, it answers the records that are to be kept, if something is over with it; told
a second time, or of what it does not know, nothing. Pure, and bounded: the caller says the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from stillframe.ids import Attempt, CheckpointId
from stillframe.protocol.checkpointing import Spent
from stillframe.protocol.failures import (
    AttemptBegun,
    AttemptEnded,
    AttemptPhases,
    EndOutcome,
    Failure,
)
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.kept import KEPT_MAX, KeptHistory, Record, Totals, within_bounds
from stillframe.protocol.snapshots import ARRIVALS_MAX, SubtaskTimings
from stillframe.protocol.statistics import (
    CheckpointStatistics,
    CheckpointStatus,
    SlotPlace,
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
    senders: Mapping[str, str] = field(default_factory=dict)
    """Of each edge the task at its beginning, by name."""


@dataclass(slots=True)
class _UnderWay:
    triggered: Triggered
    subtasks: dict[tuple[str, int], SubtaskStatistics] = field(default_factory=dict)
    records_read: int = 0
    """In this attempt, before its barriers."""

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


class _Coming:
    """How an attempt comes up, and how far its sources are behind where they have been.

    Records are counted from where the driver's first attempt began.
    """

    def __init__(self) -> None:
        self._read_at: dict[CheckpointId | None, int] = {}
        """How many had been read before a checkpoint's barriers."""
        self._offset: int | None = None
        """How many before this attempt; None: it is from elsewhere."""
        self._furthest = 0
        self._goal = 0
        self._noticed: tuple[int | None, int] | None = None
        self.phases: AttemptPhases | None = None
        self.is_told = True
        self.down_ms = 0
        """Of this driver's attempts together, from when a failure was noticed until all ran."""

    def on_noticed(self, heard_ms: int | None, now: Moment) -> None:
        """The attempt has failed. What fails after that is the same failure."""
        self._noticed = self._noticed or (heard_ms, now.wall_ms)

    def on_begun(self, begun: AttemptBegun, is_first: bool) -> None:
        start = None if begun.restored is None else begun.restored.checkpoint_id
        if is_first:
            self._read_at[start] = 0
        self._offset = self._read_at.get(start)
        self._goal = self._furthest
        # How far the attempt before had come is known later, if at all: `on_behind`.
        is_known = not is_first or begun.attempt == 1
        heard, noticed = self._noticed or (None, None)
        replayed = self._goal - self._offset if is_known and self._offset is not None else None
        self.phases = AttemptPhases(begun.attempt, heard, noticed, replayed=replayed)
        self._noticed = None
        self.is_told = False

    def on_behind(self, attempt: Attempt, records: int) -> None:
        """The driver's first attempt began so many records behind the one before it."""
        self._furthest = max(self._furthest, records)
        if self.phases is not None and self.phases.attempt == attempt:
            self._goal = records
            self.phases = replace(self.phases, replayed=records)

    def on_phase(
        self, name: Literal["slots", "running", "first_record", "caught_up"], at: Moment
    ) -> None:
        """The first time counts."""
        if self.phases is not None and getattr(self.phases, name) is None:
            self.phases = replace(self.phases, **cast(Any, {name: at.wall_ms}))
            if name == "running" and self.phases.noticed is not None:
                self.down_ms += max(0, at.wall_ms - self.phases.noticed)

    def on_read(self, records: int, now: Moment) -> bool:
        """Its sources have read so much so far; whether they have just caught up."""
        if self.phases is None or (not records and self.phases.running is None):
            return False
        if records:
            self.on_phase("first_record", now)
        if self._offset is None:
            return False
        self._furthest = max(self._furthest, self._offset + records)
        had_caught_up = self.phases.caught_up is not None
        if self.phases.replayed is not None and self._offset + records >= self._goal:
            self.on_phase("caught_up", now)
        return not had_caught_up and self.phases.caught_up is not None

    def on_completed(self, checkpoint_id: CheckpointId, records_read: int) -> None:
        if self._offset is not None:
            self._read_at[checkpoint_id] = self._offset + records_read
            while len(self._read_at) > KEPT_MAX:
                del self._read_at[next(iter(self._read_at))]


class Figures:
    """The figures of one driver; of its attempts one runs at a time."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._attempt: Attempt | None = None
        self._under_way: dict[CheckpointId, _UnderWay] = {}
        self._checkpoints: tuple[CheckpointStatistics, ...] = ()
        self._uncommitted: dict[CheckpointId, float] = {}
        """When those were complete that are not committed yet."""
        others_max = min(kept_max, KEPT_MAX)
        self._begun = deque[AttemptBegun](maxlen=others_max)
        self._phases = deque[AttemptPhases](maxlen=others_max)
        self._ended = deque[AttemptEnded](maxlen=others_max)
        self._failures = deque[Failure](maxlen=others_max)
        self._coming = _Coming()
        self._totals = Totals()
        self._spent = Spent()

    @property
    def has_begun(self) -> bool:
        """Whether this driver has had an attempt of its own."""
        return self._attempt is not None

    @property
    def down_seconds(self) -> float:
        """How long failures have kept the job from running, in this driver."""
        return self._coming.down_ms / 1000

    @property
    def totals(self) -> Totals:
        """Of this driver."""
        return self._totals

    def kept(self, now: Moment) -> KeptHistory:
        """All of it; what is under way, as far as it has come."""
        under_way = [each.statistics("IN_PROGRESS", now) for each in self._under_way.values()]
        coming = self._coming
        now_coming = () if coming.phases is None or coming.is_told else (coming.phases,)
        return KeptHistory(
            checkpoints=self._checkpoints,
            begun=tuple(self._begun),
            phases=(*self._phases, *now_coming),
            ended=tuple(self._ended),
            kept_failures=tuple(self._failures),
            totals=self._totals,
            under_way=tuple(under_way),
            spent=self._spent,
        )

    # --- attempts ---

    def on_begun(self, begun: AttemptBegun) -> AttemptBegun:
        self._coming.on_begun(begun, is_first=self._attempt is None)
        self._attempt = begun.attempt
        self._begun.append(begun)
        if begun.restored is not None:
            self._totals = self._totals.plus(Totals(restored=1))
        return begun

    def on_earlier(self, begun: AttemptBegun, earlier: KeptHistory) -> None:
        """This is what earlier drivers have left of the attempt before this driver's first."""
        behind = earlier.read_behind(begun)
        if behind is not None:
            self._coming.on_behind(begun.attempt, behind)

    def on_noticed(self, heard_ms: int | None, now: Moment) -> None:
        """It is known now that the attempt has failed; `heard_ms`: when what failed was heard of
        last."""
        self._coming.on_noticed(heard_ms, now)

    def on_slots(self, now: Moment) -> None:
        """All slots of the attempt are there."""
        self._coming.on_phase("slots", now)

    def on_running(self, now: Moment) -> None:
        self._coming.on_phase("running", now)

    def on_read(self, records: int, now: Moment) -> AttemptPhases | None:
        """The sources of the attempt have read so many records so far."""
        return self._phases_told() if self._coming.on_read(records, now) else None

    def _phases_told(self) -> AttemptPhases | None:
        """Once of each attempt: when it has caught up, or is over before."""
        if self._coming.is_told or self._coming.phases is None:
            return None
        self._coming.is_told = True
        self._phases.append(self._coming.phases)
        return self._coming.phases

    def on_failed(self, failure: Failure) -> Failure:
        """It gets its number here, unless it has a higher one."""
        others = (each.number for each in self._failures if each.attempt == failure.attempt)
        number = max(failure.number, 1 + max(others, default=0))
        blame = None if failure.blame is None else replace(failure.blame, rows=None)
        reason = _keepable(failure.reason)
        numbered = replace(failure, number=number, reason=reason, blame=blame)
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
        self,
        checkpoint_id: CheckpointId,
        vertex: str,
        timings: SubtaskTimings,
        now: Moment,
        place: SlotPlace | None = None,
    ) -> None:
        """The first time counts."""
        under_way = self._under_way.get(checkpoint_id)
        if under_way is None or (vertex, timings.subtask) in under_way.subtasks:
            return
        under_way.records_read += timings.records_read
        under_way.subtasks[vertex, timings.subtask] = SubtaskStatistics.of(
            vertex,
            timings,
            now.wall_ms,
            under_way.elapsed_ms(now),
            place,
            under_way.triggered.senders,
        )

    def on_completed(
        self, checkpoint_id: CheckpointId, path: str | None, metadata_bytes: int, now: Moment
    ) -> CheckpointStatistics | None:
        under_way = self._under_way.pop(checkpoint_id, None)
        if under_way is None:
            return None
        self._totals = self._totals.plus(Totals(completed=1))
        self._coming.on_completed(checkpoint_id, under_way.records_read)
        self._uncommitted[checkpoint_id] = now.monotonic_seconds
        done = under_way.statistics("COMPLETED", now)
        read = under_way.records_read
        told = replace(
            done, path=path, metadata_bytes=metadata_bytes, records_read=read
        ).summed_up()
        self._spent = self._spent.plus(told)
        return self._over(told)

    def on_committed(self, checkpoint_id: CheckpointId, now: Moment) -> CheckpointStatistics | None:
        """Every sink has; and what older ones held too."""
        completed_at = self._uncommitted.get(checkpoint_id)
        self._uncommitted = {n: at for n, at in self._uncommitted.items() if n > checkpoint_id}
        if completed_at is None:
            return None
        commit_ms = round((now.monotonic_seconds - completed_at) * 1000, 3)
        self._spent = self._spent.plus_commit(commit_ms)
        for place, each in reversed(list(enumerate(self._checkpoints))):
            if each.checkpoint_id == checkpoint_id:
                told = replace(each, commit_ms=commit_ms)
                before, after = self._checkpoints[:place], self._checkpoints[place + 1 :]
                self._checkpoints = (*before, told, *after)
                return told.with_arrivals(0)
        return None

    def on_aborted(
        self, checkpoint_id: CheckpointId, reason: str, now: Moment
    ) -> CheckpointStatistics | None:
        under_way = self._under_way.pop(checkpoint_id, None)
        if under_way is None:
            return None
        self._totals = self._totals.plus(Totals(failed=1))
        given_up = under_way.statistics("FAILED", now)
        return self._over(replace(given_up, failed_at_ms=now.wall_ms, failure=_keepable(reason)))

    def on_attempt_over(self, reason: str, now: Moment) -> list[Record]:
        """What was under way is not any more."""
        over = [self.on_aborted(each, reason, now) for each in list(self._under_way)]
        return [each for each in (*over, self._phases_told()) if each is not None]

    def _over(self, checkpoint: CheckpointStatistics) -> CheckpointStatistics:
        """Answers what is kept: nobody replays barriers of a driver that is gone."""
        summed = checkpoint.summed_up().with_arrivals(ARRIVALS_MAX)
        self._checkpoints = within_bounds((*self._checkpoints, summed), self._kept_max)
        return summed.with_arrivals(0)


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
