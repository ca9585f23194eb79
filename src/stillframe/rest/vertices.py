"""One task of a job, as Flink's JSON of a vertex: its subtasks, their metrics, back pressure, event
time.

Counts are since the attempt began. What is told for a second is the mean of the last seconds, where
Flink takes that of the last minute. What is not known is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from stillframe.graph.plan import Task
from stillframe.ids import SlotIndex
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.measures import SubtaskMeasures
from stillframe.rest.answers import TASKS_OF, task_of, task_vertex, times_of
from stillframe.rest.figure_rows import SubtaskRates, rates_of
from stillframe.rest.jobs import ServedJob

AGGREGATES = ("min", "max", "avg", "sum", "skew")
_LOW, _HIGH = 0.1, 0.5
"""Of a subtask's time: above it Flink calls its back pressure low, or high."""


def details(job: ServedJob, vertex: str, now_ms: int) -> JsonObject:
    task = task_of(job, vertex)
    told, hosts = _measured(job, task), {place.slot: place.host for place in job.query.slot_places}
    status = TASKS_OF[job.state].upper()
    subtasks: list[JsonValue] = [
        {
            "subtask": index,
            "status": status,
            "attempt": max(0, job.query.summary.attempts - 1),
            "endpoint": hosts.get(told[index][0], "") if index in told else "",
            **times_of(job, now_ms),
            "taskmanager-id": f"slot-{told[index][0]}" if index in told else "",
            "metrics": _io_metrics(told[index][1] if index in told else None),
        }
        for index in range(task.parallelism)
    ]
    return {
        "id": task_vertex(task),
        "name": task.name,
        "parallelism": task.parallelism,
        "maxParallelism": job.query.plan.max_parallelism,
        "now": now_ms,
        "subtasks": subtasks,
    }


def metrics(
    job: ServedJob, vertex: str, names: Sequence[str] | None, aggregates: Sequence[str]
) -> list[JsonObject]:
    """Over all subtasks; without names, which there are. What nobody knows is left out."""
    values: dict[str, list[float]] = {}
    for each in _metrics_of(job, task_of(job, vertex)).values():
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    if names is None:
        return [{"id": name} for name in values]
    return [
        {"id": name, **{each: _aggregate(each, values[name]) for each in aggregates}}
        for name in names
        if name in values
    ]


def backpressure(job: ServedJob, vertex: str) -> JsonObject:
    task = task_of(job, vertex)
    rates = _rates(job, task)
    if not rates:
        return {"status": "deprecated"}
    worst = max(each.shares[2] for each in rates)
    subtasks: list[JsonValue] = [
        {
            "subtask": each.subtask,
            "attempt-number": max(0, job.query.summary.attempts - 1),
            "backpressureLevel": _level(each.shares[2]),
            "backpressure-level": _level(each.shares[2]),
            "ratio": round(each.shares[2], 3),
            "busyRatio": round(each.shares[0] + each.shares[1], 3),
            "idleRatio": round(each.shares[3] + each.shares[4], 3),
        }
        for each in rates
    ]
    return {
        "status": "ok",
        "backpressureLevel": _level(worst),
        "backpressure-level": _level(worst),
        "end-timestamp": max(told.at_ms for told in job.query.measured.values()),
        "subtasks": subtasks,
    }


def watermarks(job: ServedJob, vertex: str) -> list[JsonObject]:
    """Of subtasks that have one, in milliseconds since 1970."""
    told = sorted(_measured(job, task_of(job, vertex)).items())
    return [
        {"id": f"{index}.currentInputWatermark", "value": str(each.watermark_us // 1000)}
        for index, (_, each) in told
        if each.watermark_us is not None
    ]


def _measured(job: ServedJob, task: Task) -> dict[int, tuple[SlotIndex, SubtaskMeasures]]:
    """By subtask: its slot, and what it has told last."""
    return {
        each.subtask: (slot, each)
        for slot, told in job.query.measured.items()
        for each in told.subtasks
        if each.task == task.index
    }


def _rates(job: ServedJob, task: Task) -> list[SubtaskRates]:
    found = rates_of(job.query.measured_lately).get(task.index, [])
    return sorted(found, key=lambda each: each.subtask)


def _io_metrics(told: SubtaskMeasures | None) -> JsonObject:
    known = told is not None
    shares = None if told is None else told.shares
    return {
        "read-bytes": told.bytes_in if told else 0,
        "read-bytes-complete": known,
        "write-bytes": told.bytes_out if told else 0,
        "write-bytes-complete": known,
        "read-records": told.records_in if told else 0,
        "read-records-complete": known,
        "write-records": told.records_out if told else 0,
        "write-records-complete": known,
        "accumulated-busy-time": (shares.working + shares.turn) / 1e6 if shares else 0.0,
        "accumulated-backpressured-time": shares.backpressured // 1_000_000 if shares else 0,
        "accumulated-idle-time": (shares.held + shares.idle) // 1_000_000 if shares else 0,
    }


def _metrics_of(job: ServedJob, task: Task) -> dict[int, dict[str, float]]:
    """By subtask: what Flink has a name for."""
    found: dict[int, dict[str, float]] = {}
    for index, (_, told) in sorted(_measured(job, task).items()):
        watermark_us = told.watermark_us
        values: dict[str, float | None] = {
            "numRecordsIn": told.records_in,
            "numRecordsOut": told.records_out,
            "numBytesIn": told.bytes_in,
            "numBytesOut": told.bytes_out,
            "numLateRecordsDropped": told.records_late,
            "inputQueueSize": told.queued_bytes,
            "currentInputWatermark": None if watermark_us is None else watermark_us // 1000,
            "pendingRecords": told.lag_records,
            "currentEmitEventTimeLag": told.lag_ms,
        }
        found[index] = {name: value for name, value in values.items() if value is not None}
    for each in _rates(job, task):
        records_in, records_out, bytes_in, bytes_out = each.rates
        working, turn, backpressured, held, idle = each.shares
        found[each.subtask] |= {
            "numRecordsInPerSecond": records_in,
            "numRecordsOutPerSecond": records_out,
            "numBytesInPerSecond": bytes_in,
            "numBytesOutPerSecond": bytes_out,
            "busyTimeMsPerSecond": 1000 * (working + turn),
            "backPressuredTimeMsPerSecond": 1000 * backpressured,
            "idleTimeMsPerSecond": 1000 * (held + idle),
        }
    return found


def _aggregate(which: str, values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    match which:
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "sum":
            return sum(values)
        case "avg":
            return mean
        case _:  # as Flink has it: by how much of the mean they differ from it, in percent
            spread = sum(abs(value - mean) for value in values) / len(values)
            return min(100.0, 100 * spread / mean) if mean else 0.0


def _level(ratio: float) -> str:
    return "ok" if ratio <= _LOW else "low" if ratio <= _HIGH else "high"
