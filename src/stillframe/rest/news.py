"""What a stream tells of a job: what happened, once, and how it is, again and again.

The only file of the stream that knows the events of the coordinator: each becomes one of a few
kinds, with the words and figures that people see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointDamaged,
    CheckpointFailed,
    Event,
    SavepointCompleted,
    SlotsRunning,
)
from stillframe.coordinator.replanned import Refreshed, Rescaled
from stillframe.graph.plan import Plan
from stillframe.ids import CheckpointId
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.failures import in_words
from stillframe.protocol.statistics import CheckpointStatistics
from stillframe.rest import answers, figure_rows
from stillframe.rest.jobs import ServedJob
from stillframe.rest.operations import Done, Failed, Kind

TICK_SECONDS = 1.0
HEARTBEAT_SECONDS = 5.0
_TEXT_CHARACTERS_MAX = 4_000
_LINES_MAX = 200


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the coordinator, as it came."""

    at_ms: int
    event: Event


@dataclass(frozen=True, slots=True)
class OperationNews:
    """Something was asked for, or has come to its end."""

    at_ms: int
    kind: Kind
    trigger_id: str
    outcome: Done | Failed | None


@dataclass(frozen=True, slots=True)
class Logged:
    """A line of the log; for those alone who have shown the token."""

    at_ms: int
    line: JsonObject


News = Happened | OperationNews | Logged


def encoded(value: JsonObject) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def told(job: ServedJob, news: News) -> tuple[str, JsonObject]:
    """The kind of an event of the stream, and what it says."""
    match news:
        case Happened(at_ms, event):
            text = str(event).partition("\n")[0][:_TEXT_CHARACTERS_MAX]
            kind, fields = _event(job, event)
            return kind, {"at": at_ms, "text": text, **fields}
        case OperationNews():
            return "operation", _operation(news)
        case Logged(at_ms, line):
            return "log", {"at": at_ms, **line}


def _event(job: ServedJob, event: Event) -> tuple[str, JsonObject]:
    match event:
        case CheckpointCompleted(checkpoint_id):
            return "checkpoint", _checkpoint(job, "completed", checkpoint_id)
        case SavepointCompleted(checkpoint_id):
            return "checkpoint", _checkpoint(job, "savepoint", checkpoint_id)
        case CheckpointCommitted(checkpoint_id):
            return "checkpoint", _checkpoint(job, "committed", checkpoint_id)
        case CheckpointFailed(checkpoint_id, reason):
            return "checkpoint", _checkpoint(job, "failed", checkpoint_id, reason)
        case CheckpointDamaged(checkpoint_id, reason):
            return "checkpoint", _checkpoint(job, "damaged", checkpoint_id, reason)
        case AttemptStarted(attempt, restored_from, savepoint=savepoint):
            return "attempt", {
                "event": "started",
                "attempt": attempt,
                "restored_from": restored_from,
                "savepoint": savepoint,
            }
        case SlotsRunning(attempt, pids):
            return "attempt", {"event": "running", "attempt": attempt, "pids": pids}
        case Rescaled(before, after, seconds):
            return "attempt", {
                "event": "rescaled",
                "attempt": job.query.summary.attempts,
                "before": before,
                "after": after,
                "downtime_seconds": seconds,
            }
        case Refreshed(seconds):
            return "attempt", {
                "event": "refreshed",
                "attempt": job.query.summary.attempts,
                "downtime_seconds": seconds,
            }
        case AttemptFailed(attempt, reason, restart_seconds, blame):
            details = () if blame is None else in_words(blame)
            return "failure", {
                "attempt": attempt,
                "reason": reason[:_TEXT_CHARACTERS_MAX],
                "restart_seconds": restart_seconds,
                "details": [line[:_TEXT_CHARACTERS_MAX] for line in details[:_LINES_MAX]],
            }
        case _:
            name = re.sub(r"(?<!^)([A-Z])", r"_\1", type(event).__name__).lower()
            return "job", {"event": name, **state_of(job)}


def state_of(job: ServedJob) -> JsonObject:
    query = job.query
    return {"state": job.state, "outcome": query.summary.outcome, "trouble": query.trouble}


def _checkpoint(
    job: ServedJob, event: str, number: CheckpointId, reason: str | None = None
) -> JsonObject:
    found = job.query.checkpoint_statistics.checkpoint(number)
    return {
        "event": event,
        "id": number,
        "checkpoint": None if found is None else found.to_json(),
        "reason": None if reason is None else reason[:_TEXT_CHARACTERS_MAX],
    }


def _operation(news: OperationNews) -> JsonObject:
    result: JsonValue = None
    failure: JsonValue = None
    match news.outcome:
        case None:
            text = f"{news.kind} asked for"
        case Done(done):
            # What a difference shows is for those alone who ask with the token.
            text, result = f"{news.kind} done", None if news.kind == "difference" else done
        case Failed(kind, reason):
            text = f"{news.kind} failed: {reason}"[:_TEXT_CHARACTERS_MAX]
            failure = {"class": kind, "reason": reason[:_TEXT_CHARACTERS_MAX]}
    return {
        "at": news.at_ms,
        "text": text,
        "operation": news.kind,
        "request-id": news.trigger_id,
        "status": "IN_PROGRESS" if news.outcome is None else "COMPLETED",
        "result": result,
        "failure": failure,
    }


# --- how it is ---


def hello(job: ServedJob, run: str, now_ms: int, is_reset: bool) -> JsonObject:
    query, plan = job.query, job.query.plan
    return {
        **hello_to_all(run, now_ms),
        "reset": is_reset,
        "job": {
            "jid": job.jid,
            "name": job.name,
            "state": job.state,
            "attempt": query.summary.attempts,
            "guarantee": query.guarantee().word,
            "parallelism": query.parallelism,
            "started_at": job.started_at_ms,
        },
        "tasks": [
            {
                "id": answers.task_vertex(task),
                "name": task.name,
                "parallelism": task.parallelism,
            }
            for task in plan.tasks
        ],
        "edges": [
            {
                "source": edge.source_task,
                "target": edge.target_task,
                "channels": edge.channels,
                "feedback": edge.is_feedback,
            }
            for edge in plan.edges
        ],
        "columns": {
            "tasks": figure_rows.TASK_COLUMNS,
            "edges": figure_rows.EDGE_COLUMNS,
            "subtasks": figure_rows.SUBTASK_COLUMNS,
            "channels": figure_rows.CHANNEL_COLUMNS,
        },
    }


@dataclass(frozen=True, slots=True)
class Figures:
    """Encoded once for all who look, and once more for each task that somebody watches."""

    text: str
    watched: Mapping[str, str]
    """By the task's vertex: the same, and its subtasks."""

    def of(self, vertex: str | None) -> str:
        return self.text if vertex is None else self.watched.get(vertex, self.text)


def figures(job: ServedJob, watched: frozenset[str], now_ms: int) -> Figures:
    query, plan = job.query, job.query.plan
    numbers = {answers.task_vertex(task): task.index for task in plan.tasks}
    looked_at = {vertex: numbers[vertex] for vertex in watched if vertex in numbers}
    for task in looked_at.values():
        query.watch(task)
    spans = query.measured_lately
    rates = figure_rows.rates_of(spans)
    at_ms = min((last.at_ms for _, last in spans.values()), default=now_ms)
    fields: JsonObject = {
        "at": at_ms,
        "age_ms": max(0, now_ms - at_ms),
        "state": job.state,
        "attempt": query.summary.attempts,
        "diagnosis": answers.diagnosis(job),
        "trouble": [each.partition("\n")[0] for each in query.trouble],
        "job": _job_figures(job, rates, now_ms),
        "tasks": figure_rows.task_rows(rates),
        "edges": figure_rows.edge_rows(plan, rates, query.config.channel_buffer_bytes),
        "aligning": figure_rows.alignments(rates),
    }
    text = encoded(fields)
    return Figures(
        text,
        {
            vertex: f"{text[:-1]},{_subtasks(plan, rates.get(task, ()))[1:]}"
            for vertex, task in looked_at.items()
        },
    )


def _subtasks(plan: Plan, subtasks: Sequence[figure_rows.SubtaskRates]) -> str:
    rows, channels = figure_rows.subtask_rows(subtasks), figure_rows.channel_rows(plan, subtasks)
    return encoded({"subtasks": rows, "channels": channels})


def _job_figures(job: ServedJob, rates: figure_rows.Rates, now_ms: int) -> JsonObject:
    summary, told_of = job.query.summary, job.query.checkpoint_statistics
    watermark_us = summary.watermark_us
    watermark_ms = None if watermark_us is None else watermark_us // 1000
    return {
        **_speed(job),
        "records_out_per_second": _written(job, rates),
        "watermark": watermark_ms,
        "watermark_lag_ms": None if watermark_ms is None else max(0, now_ms - watermark_ms),
        "checkpoints_completed": summary.checkpoints_completed,
        "checkpoints_failed": summary.checkpoints_failed,
        "under_way": [
            {
                "id": each.checkpoint_id,
                "at": each.triggered_at_ms,
                "acknowledged": len(each.subtasks),
                "subtasks": each.subtasks_total,
            }
            for each in told_of.history
            if each.status == "IN_PROGRESS"
        ],
    }


def remember(job: ServedJob, now_ms: int) -> None:
    """A point for those who look later."""
    rates = figure_rows.rates_of(job.query.measured_lately)
    speed = _speed(job)
    known = speed["records_in_per_second"], _written(job, rates), speed["lag_records"]
    job.remember(now_ms, cast(tuple[float | None, ...], known), figure_rows.ring_rows(rates))


def _written(job: ServedJob, rates: figure_rows.Rates) -> int | None:
    """By the sinks; None: nothing is known."""
    sinks = [task.index for task in job.query.plan.tasks if task.has_sinks]
    known = [figure_rows.sent_per_second(rates[task]) for task in sinks if task in rates]
    return sum(known) if known else None


def _speed(job: ServedJob) -> JsonObject:
    summary = job.query.summary
    seconds = [lag.seconds for lag in summary.lags if lag.seconds is not None]
    return {
        "records_in_per_second": round(summary.records_per_second),
        "lag_records": sum(lag.records for lag in summary.lags) if summary.lags else None,
        "lag_seconds": max(seconds) if seconds else None,
        "restarts": summary.restarts,
        "last_checkpoint": _last(job.query.checkpoint_statistics.latest_completed),
    }


def _last(last: CheckpointStatistics | None) -> JsonObject | None:
    if last is None:
        return None
    return {
        "id": last.checkpoint_id,
        "at": last.triggered_at_ms,
        "duration_ms": round(last.end_to_end_ms, 1),
        "new_bytes": last.bytes_written,
        "full_bytes": last.state_bytes,
    }


def hello_to_all(run: str, now_ms: int) -> JsonObject:
    return {
        "run": run,
        "at": now_ms,
        "reset": False,
        "tick_ms": round(TICK_SECONDS * 1000),
        "heartbeat_ms": round(HEARTBEAT_SECONDS * 1000),
    }


def figures_of_all(jobs: Sequence[ServedJob], now_ms: int) -> Figures:
    """Every one of them holds all there is to know, so that none need be sent again."""
    return Figures(encoded({"at": now_ms, "jobs": [in_list(job) for job in jobs]}), {})


def in_list(job: ServedJob) -> JsonObject:
    """A job in the stream of all jobs."""
    return {
        "jid": job.jid,
        "name": job.name,
        "state": job.state,
        "guarantee": job.query.guarantee().word,
        "started_at": job.started_at_ms,
        "diagnosis": answers.diagnosis(job),
        **_speed(job),
    }
