"""What checkpoints cost, one by one and together: our own types, and Flink's JSON of them.

Rules of this file
------------------
1. Pure: the caller says what happened and when (`protocol/figures`).
2. In Flink's JSON (`to_json`) durations are whole milliseconds and sizes bytes, as in Flink; in our
   own fields, and in what is kept (`protocol/kept`), durations have their fractions.
3. What is asked of a thousand checkpoints at once is summed up when one is over (`Sums`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.snapshots import Arrival, SnapshotCost, SubtaskTimings

CheckpointStatus = Literal["IN_PROGRESS", "COMPLETED", "FAILED"]
CheckpointType = Literal["CHECKPOINT", "UNALIGNED_CHECKPOINT", "SAVEPOINT", "SYNC_SAVEPOINT"]
"""Flink's names; a SYNC_SAVEPOINT is one the job ends with."""
_SHRUNK_SUBTASKS = 3
TriggeredType = Literal["CHECKPOINT", "SAVEPOINT", "SYNC_SAVEPOINT"]
"""As far as it is known at the trigger: whether a barrier overtakes records shows later."""


def vertex_id(uid: OperatorUid) -> str:
    """The 32 hexadecimal digits that stand for a task in Flink's paths: by its first operator."""
    return hashlib.md5(uid.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class TaskShape:
    """A task of the plan of which the checkpoint is."""

    vertex: str
    """See `vertex_id`."""
    name: str
    parallelism: int


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a subtask runs."""

    slot: SlotIndex
    host: str
    pid: int


Sender = tuple[str, SubtaskIndex]
"""A subtask by the name of its task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskStatistics(SnapshotCost):
    """What one subtask's part of a checkpoint cost, and when it was here."""

    vertex: str
    index: SubtaskIndex
    acknowledged_at_ms: int
    end_to_end_ms: float
    """From the trigger until the acknowledgement was here."""
    place: SlotPlace | None = None
    """Where it ran; None: an older format does not say."""
    last_barrier_ms: float | None = None
    """From the trigger until its last barrier came; None: it is a source, or nothing is known."""
    last_from: Sender | None = None
    """Who has sent that one, and so was waited for last."""
    arrivals: tuple[Arrival, ...] = ()
    """Of all its barriers, each by the task that has sent it; of the newest checkpoints only."""

    @classmethod
    def of(
        cls,
        vertex: str,
        timings: SubtaskTimings,
        acknowledged_at_ms: int,
        end_to_end_ms: float,
        place: SlotPlace | None = None,
        senders: Mapping[str, str] | None = None,
    ) -> SubtaskStatistics:
        """`senders`: of each edge the task at its beginning, by name."""
        names = senders or {}
        arrivals = tuple(
            (names.get(edge, edge), source, at_ms) for edge, source, at_ms in timings.arrivals
        )
        return cls(
            vertex=vertex,
            index=timings.subtask,
            acknowledged_at_ms=acknowledged_at_ms,
            end_to_end_ms=round(end_to_end_ms, 3),
            place=place,
            last_barrier_ms=arrivals[-1][2] if arrivals else None,
            last_from=arrivals[-1][:2] if arrivals else None,
            arrivals=arrivals,
            **timings.figures(),
        )

    @property
    def taken_ms(self) -> float:
        """From the trigger until its snapshot was taken, by the clocks of two machines."""
        return self.start_delay_ms + self.alignment_ms + self.sync_ms

    def barriers_json(self) -> JsonObject:
        """When what happened here, in milliseconds since the trigger."""
        return {
            "vertex": self.vertex,
            "index": self.index,
            "first": round(self.start_delay_ms, 3),
            "last": self.last_barrier_ms,
            "last_from": None if self.last_from is None else list(self.last_from),
            "taken": round(self.taken_ms, 3),
            "durable": round(self.taken_ms + self.async_ms, 3),
            "ack": self.end_to_end_ms,
            "arrivals": [list(each) for each in self.arrivals],
        }

    @property
    def is_unaligned(self) -> bool:
        return self.in_flight_bytes > 0

    def to_json(self, aborted: bool = False) -> JsonObject:
        """As Flink's SubtaskCheckpointStatistics."""
        return {
            "className": "completed",
            "index": self.index,
            "status": "completed",
            "ack_timestamp": self.acknowledged_at_ms,
            "end_to_end_duration": round(self.end_to_end_ms),
            "checkpointed_size": self.bytes_written,
            "state_size": self.state_bytes,
            "checkpoint": {"sync": round(self.sync_ms), "async": round(self.async_ms)},
            "alignment": {
                "buffered": 0,
                "processed": self.processed_bytes,
                "persisted": self.in_flight_bytes,
                "duration": round(self.alignment_ms),
            },
            "start_delay": round(self.start_delay_ms),
            "unaligned_checkpoint": self.is_unaligned,
            "aborted": aborted,
            "stillframe": {
                "slot": None if self.place is None else self.place.slot,
                "host": None if self.place is None else self.place.host,
                "pid": None if self.place is None else self.place.pid,
                "last_barrier": self.last_barrier_ms,
                "last_from": None if self.last_from is None else list(self.last_from),
            },
        }


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of a checkpoint went, in milliseconds: together they are all of it.

    Along its critical path: from the subtask that acknowledged last to the one whose barrier it
    waited for last, and so on up to a source.
    """

    start: float = 0.0
    """Barriers were under way."""
    align: float = 0.0
    """Some had come and others were waited for; of one that failed, subtasks that did not answer"""
    sync: float = 0.0
    background: float = 0.0
    """What was taken was written."""
    store: float = 0.0
    """The metadata and the entry in the job log were written."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What is told of a checkpoint in a line; of one that is over nothing of it changes."""

    acknowledged: int
    acknowledged_at_ms: int | None
    """When the last acknowledgement came, so far."""
    bytes_written: int
    state_bytes: int
    in_flight_bytes: int
    processed_bytes: int
    phases: Phases
    critical_path: tuple[Sender, ...] = ()
    """From a source to the subtask that acknowledged last."""


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """One checkpoint or savepoint: under way, complete or failed."""

    checkpoint_id: CheckpointId
    attempt: Attempt
    status: CheckpointStatus
    triggered_as: TriggeredType
    triggered_at_ms: int
    end_to_end_ms: float
    """From the trigger until it was complete or given up; so far, if it is under way."""
    tasks: tuple[TaskShape, ...]
    subtasks: tuple[SubtaskStatistics, ...]
    """Those that have acknowledged it."""
    metadata_bytes: int = 0
    path: str | None = None
    """Where it is, if it is complete."""
    failed_at_ms: int | None = None
    failure: str | None = None
    commit_ms: float | None = None
    """From when it was complete until all sinks had committed it; None: nothing is known."""
    records_read: int | None = None
    """By the sources in this attempt before it; None: not complete, or of an older version."""
    summed: Sums | None = None
    """None: all subtasks are there to be summed up."""
    is_discarded: bool = False
    """Whether it is complete and not retained any more; worked out, not kept."""

    @property
    def is_savepoint(self) -> bool:
        return self.triggered_as != "CHECKPOINT"

    @property
    def checkpoint_type(self) -> CheckpointType:
        unaligned = not self.is_savepoint and self.in_flight_bytes > 0
        return "UNALIGNED_CHECKPOINT" if unaligned else self.triggered_as

    @property
    def sums(self) -> Sums:
        return self.summed or self._sum_up()

    @property
    def acknowledged_at_ms(self) -> int | None:
        """When the last acknowledgement came, so far."""
        return self.sums.acknowledged_at_ms

    @property
    def bytes_written(self) -> int:
        return self.sums.bytes_written

    @property
    def state_bytes(self) -> int:
        """Of all files it needs, its metadata included."""
        return self.sums.state_bytes

    @property
    def in_flight_bytes(self) -> int:
        return self.sums.in_flight_bytes

    @property
    def processed_bytes(self) -> int:
        return self.sums.processed_bytes

    @property
    def subtasks_total(self) -> int:
        return sum(task.parallelism for task in self.tasks)

    @property
    def is_shrunk(self) -> bool:
        """Whether only its slowest subtasks are remembered."""
        return len(self.subtasks) < self.sums.acknowledged

    @property
    def slowest(self) -> SubtaskStatistics | None:
        """Who acknowledged last."""
        return max(self.subtasks, key=lambda part: part.end_to_end_ms, default=None)

    def summed_up(self) -> CheckpointStatistics:
        """Nothing more comes: so that nobody sums it up again."""
        return self if self.summed is not None else replace(self, summed=self._sum_up())

    def shrunk(self) -> CheckpointStatistics:
        """With the three slowest of its subtasks only."""
        if len(self.subtasks) <= _SHRUNK_SUBTASKS:
            return self
        slowest = sorted(self.subtasks, key=lambda part: -part.end_to_end_ms)[:_SHRUNK_SUBTASKS]
        left = tuple(part for part in self.subtasks if part in slowest)
        return replace(self.summed_up(), subtasks=left)

    def with_arrivals(self, channels_max: int) -> CheckpointStatistics:
        """Where more channels are told of, only with the first and the last barrier of each
        subtask; with none at all if there may be none."""
        if sum(len(part.arrivals) for part in self.subtasks) <= channels_max:
            return self
        parts = []
        for part in self.subtasks:
            ends = (part.arrivals[:1] + part.arrivals[1:][-1:]) if channels_max else ()
            parts.append(replace(part, arrivals=ends))
        return replace(self, subtasks=tuple(parts))

    def _sum_up(self) -> Sums:
        parts, metadata_bytes = self.subtasks, self.metadata_bytes
        path = self._critical_path()
        return Sums(
            acknowledged=len(parts),
            acknowledged_at_ms=max((part.acknowledged_at_ms for part in parts), default=None),
            bytes_written=metadata_bytes + sum(part.bytes_written for part in parts),
            state_bytes=metadata_bytes + sum(part.state_bytes for part in parts),
            in_flight_bytes=sum(part.in_flight_bytes for part in parts),
            processed_bytes=sum(part.processed_bytes for part in parts),
            phases=self._phases(path),
            critical_path=tuple((self._name_of(part), part.index) for part in path),
        )

    def _name_of(self, part: SubtaskStatistics) -> str:
        return next(task.name for task in self.tasks if task.vertex == part.vertex)

    def _critical_path(self) -> list[SubtaskStatistics]:
        """From the source to who acknowledged last, as far as it is known who waited for whom."""
        names = {task.vertex: task.name for task in self.tasks}
        there = {(names[part.vertex], part.index): part for part in self.subtasks}
        path: list[SubtaskStatistics] = []
        step = self.slowest
        while step is not None and step not in path:
            path.insert(0, step)
            step = None if step.last_from is None else there.get(step.last_from)
        return path

    def _phases(self, path: Sequence[SubtaskStatistics]) -> Phases:
        """Clocks of several machines are compared, so that a step may seem to end too early."""
        until = min(path[-1].end_to_end_ms, self.end_to_end_ms) if path else 0.0
        start = align = sync = at = 0.0
        for part in path:
            first = max(at, min(part.start_delay_ms, until))
            aligned = max(first, min(part.start_delay_ms + part.alignment_ms, until))
            taken = max(aligned, min(part.taken_ms, until))
            start, align, sync = start + first - at, align + aligned - first, sync + taken - aligned
            at = taken
        rest = self.end_to_end_ms - until
        is_stored = len(self.subtasks) == self.subtasks_total
        waited, store = (0.0, rest) if is_stored else (rest, 0.0)
        return Phases(
            *(round(each, 3) for each in (start, align + waited, sync, until - at, store))
        )

    def subtasks_of(self, vertex: str) -> tuple[SubtaskStatistics, ...]:
        found = (part for part in self.subtasks if part.vertex == vertex)
        return tuple(sorted(found, key=lambda part: part.index))

    def to_json(self, with_tasks: bool = False) -> JsonObject:
        """As Flink's CheckpointStatistics; `with_tasks` as `…/checkpoints/details/:id` has it."""
        tasks = {task.vertex: self._task_figures(task) for task in self.tasks} if with_tasks else {}
        return {
            "className": self.status.lower(),
            "id": self.checkpoint_id,
            "status": self.status,
            "is_savepoint": self.is_savepoint,
            "savepointFormat": "canonical" if self.is_savepoint else None,
            "trigger_timestamp": self.triggered_at_ms,
            "latest_ack_timestamp": _or_minus_one(self.acknowledged_at_ms),
            "checkpointed_size": self.bytes_written,
            "state_size": self.state_bytes,
            "end_to_end_duration": round(self.end_to_end_ms),
            "alignment_buffered": 0,
            "processed_data": self.processed_bytes,
            "persisted_data": self.in_flight_bytes,
            "num_subtasks": self.subtasks_total,
            "num_acknowledged_subtasks": self.sums.acknowledged,
            "checkpoint_type": self.checkpoint_type,
            "tasks": tasks,
            **self._outcome_figures(),
            "stillframe": self._own_words(),
        }

    def phases_json(self) -> JsonObject:
        """In milliseconds. All but the commit, which comes after it, are the whole duration."""
        phases = self.sums.phases
        return {
            "start": phases.start,
            "align": phases.align,
            "sync": phases.sync,
            "async": phases.background,
            "store": phases.store,
            "commit": self.commit_ms,
        }

    def barriers_json(self) -> JsonObject:
        """When which barrier came, as far as it is remembered."""
        return {
            "triggered": self.triggered_at_ms,
            "details": "slowest" if self.is_shrunk else "all",
            "subtasks": [part.barriers_json() for part in self.subtasks],
        }

    def _own_words(self) -> JsonObject:
        slowest = self.slowest
        return {
            "attempt": self.attempt,
            "duration": self.end_to_end_ms,
            "phases": self.phases_json(),
            "critical-path": [list(each) for each in self.sums.critical_path],
            "slowest": None
            if slowest is None
            else {
                "task": self._name_of(slowest),
                "subtask": slowest.index,
                "slot": None if slowest.place is None else slowest.place.slot,
                "host": None if slowest.place is None else slowest.place.host,
                "waited-for": None if slowest.last_from is None else list(slowest.last_from),
            },
            "details": "slowest" if self.is_shrunk else "all",
        }

    def task_to_json(self, vertex: str) -> JsonObject | None:
        """As `…/checkpoints/details/:id/subtasks/:vertex`; None if it has no such task."""
        found = [task for task in self.tasks if task.vertex == vertex]
        if not found:
            return None
        subtasks = self.subtasks_of(vertex)
        there = {part.index: part for part in subtasks}
        aborted = self.status == "FAILED"
        return {
            **self._task_figures(found[0]),
            "summary": _subtasks_summary(subtasks),
            "subtasks": [
                there[index].to_json(aborted)
                if index in there
                else {"className": "pending", "index": index, "status": "pending_or_failed"}
                for index in map(SubtaskIndex, range(found[0].parallelism))
                if index in there or not self.is_shrunk
            ],
        }

    def _outcome_figures(self) -> JsonObject:
        match self.status:
            case "COMPLETED":
                return {"external_path": self.path, "discarded": self.is_discarded}
            case "FAILED":
                return {"failure_timestamp": self.failed_at_ms, "failure_message": self.failure}
            case "IN_PROGRESS":
                return {}

    def _task_figures(self, task: TaskShape) -> JsonObject:
        subtasks = self.subtasks_of(task.vertex)
        return {
            "id": self.checkpoint_id,
            "name": task.name,
            "status": self.status,
            "latest_ack_timestamp": _or_minus_one(
                max((part.acknowledged_at_ms for part in subtasks), default=None)
            ),
            "checkpointed_size": sum(part.bytes_written for part in subtasks),
            "state_size": sum(part.state_bytes for part in subtasks),
            "end_to_end_duration": round(
                max((part.end_to_end_ms for part in subtasks), default=0.0)
            ),
            "alignment_buffered": 0,
            "processed_data": sum(part.processed_bytes for part in subtasks),
            "persisted_data": sum(part.in_flight_bytes for part in subtasks),
            "num_subtasks": task.parallelism,
            "num_acknowledged_subtasks": len(subtasks),
        }


def _or_minus_one(moment_ms: int | None) -> int:
    return -1 if moment_ms is None else moment_ms  # as Flink says that there is none


# --- over several ---

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True, slots=True)
class StatsSummary:
    """Some numbers in a few: all zero where there are none."""

    values: tuple[float, ...]
    """Ascending."""

    @classmethod
    def of(cls, values: Iterable[float]) -> StatsSummary:
        return cls(tuple(sorted(values)))

    @property
    def min(self) -> float:
        return self.values[0] if self.values else 0

    @property
    def max(self) -> float:
        return self.values[-1] if self.values else 0

    @property
    def avg(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0

    def quantile(self, share: float) -> float:
        """Between two neighbours in proportion, as Flink's library does it by default."""
        if not self.values:
            return 0.0
        position = share * (len(self.values) + 1)
        below = math.floor(position)
        if below < 1:
            return float(self.values[0])
        if below >= len(self.values):
            return float(self.values[-1])
        lower, upper = self.values[below - 1], self.values[below]
        return float(lower + (position - below) * (upper - lower))

    def to_json(self) -> JsonObject:
        """As Flink's StatsSummaryDto."""
        return {
            "min": round(self.min),
            "max": round(self.max),
            "avg": round(self.avg),
            **{name: self.quantile(share) for name, share in _QUANTILES.items()},
        }


def _subtasks_summary(subtasks: Sequence[SubtaskStatistics]) -> JsonObject:
    def over(value: Callable[[SubtaskStatistics], float]) -> JsonObject:
        return StatsSummary.of(value(part) for part in subtasks).to_json()

    return {
        "checkpointed_size": over(lambda part: part.bytes_written),
        "state_size": over(lambda part: part.state_bytes),
        "end_to_end_duration": over(lambda part: part.end_to_end_ms),
        "checkpoint_duration": {
            "sync": over(lambda part: part.sync_ms),
            "async": over(lambda part: part.async_ms),
        },
        "alignment": {
            "buffered": over(lambda part: 0),
            "processed": over(lambda part: part.processed_bytes),
            "persisted": over(lambda part: part.in_flight_bytes),
            "duration": over(lambda part: part.alignment_ms),
        },
        "start_delay": over(lambda part: part.start_delay_ms),
    }
