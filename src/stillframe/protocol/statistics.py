"""What checkpoints cost, one by one and together: our own types, and Flink's JSON of them.

Rules of this file
------------------
1. Pure: the caller says what happened and when (`protocol/figures`).
2. In Flink's JSON (`to_json`) durations are whole milliseconds and sizes bytes, as in Flink; in our
   own records (`record`), which are kept, durations have their fractions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast, get_args

from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.documents import JsonFields
from stillframe.protocol.failures import Restored
from stillframe.protocol.snapshots import SnapshotCost, SubtaskTimings

CheckpointStatus = Literal["IN_PROGRESS", "COMPLETED", "FAILED"]
CheckpointType = Literal["CHECKPOINT", "UNALIGNED_CHECKPOINT", "SAVEPOINT", "SYNC_SAVEPOINT"]
"""Flink's names; a SYNC_SAVEPOINT is one the job ends with."""
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

    def record(self) -> JsonObject:
        return {"vertex": self.vertex, "name": self.name, "parallelism": self.parallelism}

    @classmethod
    def from_record(cls, value: JsonObject) -> TaskShape:
        fields = JsonFields(value)
        return cls(fields.text("vertex"), fields.text("name"), fields.integer("parallelism"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskStatistics(SnapshotCost):
    """What one subtask's part of a checkpoint cost, and when it was here."""

    vertex: str
    index: SubtaskIndex
    acknowledged_at_ms: int
    end_to_end_ms: float
    """From the trigger until the acknowledgement was here."""

    @classmethod
    def of(
        cls, vertex: str, timings: SubtaskTimings, acknowledged_at_ms: int, end_to_end_ms: float
    ) -> SubtaskStatistics:
        return cls(
            vertex=vertex,
            index=timings.subtask,
            acknowledged_at_ms=acknowledged_at_ms,
            end_to_end_ms=round(end_to_end_ms, 3),
            **timings.figures(),
        )

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
        }

    def record(self) -> JsonObject:
        return {
            "vertex": self.vertex,
            "index": self.index,
            "acknowledged_at_ms": self.acknowledged_at_ms,
            "end_to_end_ms": self.end_to_end_ms,
            **self.figures(),
        }

    @classmethod
    def from_record(cls, value: JsonObject) -> SubtaskStatistics:
        fields = JsonFields(value)
        return cls(
            vertex=fields.text("vertex"),
            index=SubtaskIndex(fields.integer("index")),
            acknowledged_at_ms=fields.integer("acknowledged_at_ms"),
            end_to_end_ms=fields.number("end_to_end_ms"),
            **cls.figures_in(fields),
        )


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
    is_discarded: bool = False
    """Whether it is complete and not retained any more; worked out, not kept."""

    @property
    def is_savepoint(self) -> bool:
        return self.triggered_as != "CHECKPOINT"

    @property
    def checkpoint_type(self) -> CheckpointType:
        unaligned = not self.is_savepoint and any(part.is_unaligned for part in self.subtasks)
        return "UNALIGNED_CHECKPOINT" if unaligned else self.triggered_as

    @property
    def acknowledged_at_ms(self) -> int | None:
        """When the last acknowledgement came, so far."""
        return max((part.acknowledged_at_ms for part in self.subtasks), default=None)

    @property
    def bytes_written(self) -> int:
        return self.metadata_bytes + sum(part.bytes_written for part in self.subtasks)

    @property
    def state_bytes(self) -> int:
        """Of all files it needs, its metadata included."""
        return self.metadata_bytes + sum(part.state_bytes for part in self.subtasks)

    @property
    def in_flight_bytes(self) -> int:
        return sum(part.in_flight_bytes for part in self.subtasks)

    @property
    def processed_bytes(self) -> int:
        return sum(part.processed_bytes for part in self.subtasks)

    @property
    def subtasks_total(self) -> int:
        return sum(task.parallelism for task in self.tasks)

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
            "num_acknowledged_subtasks": len(self.subtasks),
            "checkpoint_type": self.checkpoint_type,
            "tasks": tasks,
            **self._outcome_figures(),
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

    def record(self) -> JsonObject:
        return {
            "checkpoint_id": self.checkpoint_id,
            "attempt": self.attempt,
            "status": self.status,
            "triggered_as": self.triggered_as,
            "triggered_at_ms": self.triggered_at_ms,
            "end_to_end_ms": self.end_to_end_ms,
            "tasks": [task.record() for task in self.tasks],
            "subtasks": [part.record() for part in self.subtasks],
            "metadata_bytes": self.metadata_bytes,
            "path": self.path,
            "failed_at_ms": self.failed_at_ms,
            "failure": self.failure,
        }

    @classmethod
    def from_record(cls, fields: JsonFields) -> CheckpointStatistics:
        return cls(
            checkpoint_id=CheckpointId(fields.integer("checkpoint_id")),
            attempt=Attempt(fields.integer("attempt")),
            status=cast(CheckpointStatus, fields.one_of("status", get_args(CheckpointStatus))),
            triggered_as=cast(
                TriggeredType, fields.one_of("triggered_as", get_args(TriggeredType))
            ),
            triggered_at_ms=fields.integer("triggered_at_ms"),
            end_to_end_ms=fields.number("end_to_end_ms"),
            tasks=fields.parts("tasks", TaskShape.from_record),
            subtasks=fields.parts("subtasks", SubtaskStatistics.from_record),
            metadata_bytes=fields.integer("metadata_bytes"),
            path=fields.text_or_none("path"),
            failed_at_ms=fields.integer_or_none("failed_at_ms"),
            failure=fields.text_or_none("failure"),
        )


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


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there were since the job's very beginning, and are under way."""

    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int

    def to_json(self) -> JsonObject:
        return {
            "restored": self.restored,
            "total": self.total,
            "in_progress": self.in_progress,
            "completed": self.completed,
            "failed": self.failed,
        }


@dataclass(frozen=True, slots=True)
class CheckpointingStatistics:
    """What Flink's `GET /jobs/:jobid/checkpoints` tells."""

    counts: Counts
    history: tuple[CheckpointStatistics, ...]
    """Newest first; those under way included."""
    restored: Restored | None
    """By the last attempt that started from something."""

    @property
    def completed(self) -> tuple[CheckpointStatistics, ...]:
        """Those in the history that are complete, savepoints included; newest first."""
        return tuple(each for each in self.history if each.status == "COMPLETED")

    @property
    def latest_completed(self) -> CheckpointStatistics | None:
        return _first(each for each in self.completed if not each.is_savepoint)

    @property
    def latest_savepoint(self) -> CheckpointStatistics | None:
        return _first(each for each in self.completed if each.is_savepoint)

    @property
    def latest_failed(self) -> CheckpointStatistics | None:
        return _first(each for each in self.history if each.status == "FAILED")

    def checkpoint(self, checkpoint_id: CheckpointId) -> CheckpointStatistics | None:
        """The one of this number; of two drivers' that of the newer."""
        return _first(each for each in self.history if each.checkpoint_id == checkpoint_id)

    def summary(self, value: Callable[[CheckpointStatistics], float]) -> StatsSummary:
        """Over the completed ones in the history: `summary(lambda each: each.end_to_end_ms)`."""
        return StatsSummary.of(value(each) for each in self.completed)

    def to_json(self) -> JsonObject:
        return {
            "counts": self.counts.to_json(),
            "summary": self._summary_json(),
            "latest": {
                "completed": _json_or_none(self.latest_completed),
                "savepoint": _json_or_none(self.latest_savepoint),
                "failed": _json_or_none(self.latest_failed),
                "restored": _json_or_none(self.restored),
            },
            "history": [each.to_json() for each in self.history],
        }

    def _summary_json(self) -> JsonObject:
        return {
            "checkpointed_size": self.summary(lambda each: each.bytes_written).to_json(),
            "state_size": self.summary(lambda each: each.state_bytes).to_json(),
            "end_to_end_duration": self.summary(lambda each: each.end_to_end_ms).to_json(),
            "alignment_buffered": self.summary(lambda each: 0).to_json(),
            "processed_data": self.summary(lambda each: each.processed_bytes).to_json(),
            "persisted_data": self.summary(lambda each: each.in_flight_bytes).to_json(),
        }


def _json_or_none(value: CheckpointStatistics | Restored | None) -> JsonValue:
    return None if value is None else value.to_json()


_T = TypeVar("_T")


def _first(found: Iterable[_T]) -> _T | None:
    return next(iter(found), None)
