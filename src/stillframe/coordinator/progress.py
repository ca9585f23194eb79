"""What a completed checkpoint says of the job, in the form of Spark's StreamingQueryProgress.

One for each checkpoint, from what the checkpoint itself holds and what slots have reported by then.
Spark counts some things for each operator that nobody counts here; where it says -1 if it does not
know a figure, so do we.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from stillframe.coordinator.history import CheckpointCompleted, OperatorFigures
from stillframe.graph.logical import (
    Aggregate,
    DropDuplicates,
    Join,
    Operator,
    Read,
    SessionWindow,
    Transform,
    WithWatermark,
    Write,
)
from stillframe.graph.plan import Plan, PlannedOperator, Task
from stillframe.ids import OperatorUid

_UNKNOWN = -1
_EARLIEST_MS, _LATEST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The years from 1 to 9999."""


def progress_of(
    plan: Plan, before: CheckpointCompleted | None, this: CheckpointCompleted
) -> dict[str, Any]:
    """All but who it is of. `before` is the checkpoint before it in this process."""
    is_same = before is not None and before.attempt == this.attempt
    earlier = before if before is not None and is_same else None
    read = _rows_read(earlier, this)
    rows = sum(read.values()) if read else this.records_in - (earlier.records_in if earlier else 0)
    out = this.records_out - (earlier.records_out if earlier else 0)
    late = this.records_late - (earlier.records_late if earlier else 0)
    elapsed_ms = this.triggered_at_ms - before.triggered_at_ms if before else 0
    duration_ms = round(this.duration_ms)
    counted = _counted(rows, elapsed_ms)
    return {
        "timestamp": iso(this.triggered_at_ms),
        "batchId": this.epoch,
        "batchDuration": duration_ms,
        **counted,
        "numRowsDroppedByWatermark": late,
        "durationMs": {"triggerExecution": duration_ms, "checkpoint": duration_ms},
        "eventTime": _event_time(plan, this),
        "stateOperators": _state_operators(plan, this, late),
        "sources": _sources(plan, before, this, counted, read, elapsed_ms),
        "sink": _sink(plan, out),
        "observedMetrics": {},
        "checkpoint": {
            "id": this.checkpoint_id,
            "attempt": this.attempt,
            "end_to_end_duration": this.duration_ms,
            "state_size": this.state_bytes,
            "subtasks": [timings.to_json() for timings in this.timings],
        },
    }


def _rows_read(earlier: CheckpointCompleted | None, this: CheckpointCompleted) -> dict[str, int]:
    """By the task of each source, since the checkpoint before; nothing if it was not told."""
    before = dict(earlier.records_read) if earlier else {}
    return {task: rows - before.get(task, 0) for task, rows in this.records_read}


def _counted(rows: int, elapsed_ms: int) -> dict[str, float]:
    rate = rows / elapsed_ms * 1000 if elapsed_ms > 0 else 0.0
    return {"numInputRows": rows, "inputRowsPerSecond": rate, "processedRowsPerSecond": rate}


def iso(moment_ms: int) -> str:
    """As Spark writes it."""
    at = datetime.datetime.fromtimestamp(moment_ms / 1000, datetime.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{moment_ms % 1000:03d}Z"


def _event_time(plan: Plan, this: CheckpointCompleted) -> dict[str, str]:
    """Before the first row of a stream with a watermark Spark says the epoch's beginning."""
    uids = [each.uid for _, each in plan.operators() if isinstance(each.operator, WithWatermark)]
    if not uids:
        return {}
    watermark = {"watermark": iso(max(0, this.watermark_us or 0) // 1000)}
    # Of several Spark tells of the first that has seen rows, too.
    seen = {each.uid: each for each in this.event_times}
    of_first = next((seen[uid] for uid in uids if uid in seen), None)
    if of_first is None:
        return watermark
    return {
        "max": _iso_of_any(of_first.latest_us),
        "min": _iso_of_any(of_first.earliest_us),
        "avg": _iso_of_any(of_first.mean_us),
        **watermark,
    }


def _iso_of_any(moment_us: float) -> str:
    """Of an event time, which may be in no year that Python knows."""
    return iso(min(max(int(moment_us // 1000), _EARLIEST_MS), _LATEST_MS))


def _figures(this: CheckpointCompleted, uid: OperatorUid) -> OperatorFigures | None:
    return next((each for each in this.operators if each.uid == uid), None)


def _state_operators(plan: Plan, this: CheckpointCompleted, late: int) -> list[dict[str, Any]]:
    keyed = [(task, each) for task, each in plan.operators() if _name_of(each.operator) is not None]
    return [
        _state_operator(task, each, this, late if len(keyed) == 1 else _UNKNOWN)
        for task, each in keyed
    ]


def _state_operator(
    task: Task, planned: PlannedOperator, this: CheckpointCompleted, late: int
) -> dict[str, Any]:
    figures = _figures(this, planned.uid)
    rows = None if figures is None else figures.rows
    timings = [each for each in this.timings if each.task == task.name]
    return {
        "operatorName": _name_of(planned.operator),
        "numRowsTotal": _UNKNOWN if rows is None else rows,
        "numRowsUpdated": _UNKNOWN,
        "numRowsRemoved": _UNKNOWN,
        "allUpdatesTimeMs": _UNKNOWN,
        "allRemovalsTimeMs": _UNKNOWN,
        "commitTimeMs": round(sum(each.sync_ms + each.async_ms for each in timings)),
        "memoryUsedBytes": 0 if figures is None else figures.state_bytes,
        "numRowsDroppedByWatermark": late,
        "numShufflePartitions": task.parallelism,
        "numStateStoreInstances": task.parallelism,
        "customMetrics": {},
    }


def _name_of(operator: Operator) -> str | None:
    """Spark's name for what keeps state by keys; None: it keeps none."""
    match operator:
        case Aggregate(window=SessionWindow()):
            return "sessionWindowStateStoreSaveExec"
        case Aggregate():
            return "stateStoreSave"
        case Join():
            return "symmetricHashJoin"
        case DropDuplicates():
            return "dedupe"
        case Transform():
            return "transformWithStateExec"
        case _:
            return None


def _sources(
    plan: Plan,
    before: CheckpointCompleted | None,
    this: CheckpointCompleted,
    counted: Mapping[str, float],
    rows_read: Mapping[str, int],
    elapsed_ms: int,
) -> list[dict[str, Any]]:
    """Where each begins and ends, and what was read of it."""
    read = [
        (task.name, each.uid, each.operator.source)
        for task, each in plan.operators()
        if isinstance(each.operator, Read)
    ]

    def told(task: str) -> Mapping[str, float]:
        if len(read) == 1:
            return counted
        if [name for name, *_ in read].count(task) > 1 or task not in rows_read:
            return dict.fromkeys(counted, _UNKNOWN)
        return _counted(rows_read[task], elapsed_ms)

    return [
        {
            "description": source.describe(),
            "startOffset": None if before is None else _offset(_figures(before, uid)),
            "endOffset": (end := _offset(_figures(this, uid))),
            "latestOffset": end,
            **told(task),
            "metrics": {},
        }
        for task, uid, source in read
    ]


def _offset(figures: OperatorFigures | None) -> Any:
    if figures is None or figures.positions is None:
        return None
    return json.loads(json.dumps({str(at["id"]): at["position"] for at in figures.positions}))


def _sink(plan: Plan, records_out: int) -> dict[str, Any]:
    written = [
        each.operator.sink.describe()
        for _, each in plan.operators()
        if isinstance(each.operator, Write)
    ]
    return {
        "description": ", ".join(written),
        "numOutputRows": records_out,
        "metrics": {},
    }
