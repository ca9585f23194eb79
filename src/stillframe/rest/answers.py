"""A query as Flink's JSON.

What Flink has goes by Flink's names, also where Flink has no time to tell and says -1. What only we
know of a job is in its field `stillframe`.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice

from stillframe.config import settings_in_force
from stillframe.graph.plan import Edge, Partitioning, Plan, Task, describe
from stillframe.ids import CheckpointId
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.measures import Latency, SubtaskMeasures
from stillframe.protocol.statistics import CheckpointStatistics, vertex_id
from stillframe.rest.jobs import STATES, ServedJob
from stillframe.rest.log_ring import LogLine
from stillframe.rest.operations import Done, Failed
from stillframe.rest.refusals import Refused

LOG_LINES_MAX = 500
TASK_STATES = (
    "created",
    "scheduled",
    "deploying",
    "initializing",
    "running",
    "finished",
    "canceling",
    "canceled",
    "failed",
    "reconciling",
)
TASKS_OF = {
    "INITIALIZING": "initializing",
    "RUNNING": "running",
    "RESTARTING": "scheduled",
    "FINISHED": "finished",
    "CANCELED": "canceled",
    "FAILED": "failed",
}
"""What all tasks of a job do while it is in a state: they come and go together."""


# --- jobs ---


def id_and_status(job: ServedJob) -> JsonObject:
    return {"id": job.jid, "status": job.state}


def overview(job: ServedJob, now_ms: int) -> JsonObject:
    subtasks = sum(task.parallelism for task in job.query.plan.tasks)
    return {
        "jid": job.jid,
        "name": job.name,
        "state": job.state,
        **times_of(job, now_ms),
        "last-modification": job.changed_at_ms,
        "tasks": {"total": subtasks, **_task_counts(job.state, subtasks)},
    }


def details(job: ServedJob, now_ms: int) -> JsonObject:
    plan, state = job.query.plan, job.state
    subtasks = sum(task.parallelism for task in plan.tasks)
    since_ms = job.since_ms
    return {
        "jid": job.jid,
        "name": job.name,
        "isStoppable": not job.has_ended,
        "state": state,
        **times_of(job, now_ms),
        "maxParallelism": plan.max_parallelism,
        "now": now_ms,
        "timestamps": {each: since_ms.get(each, 0) for each in STATES},
        "vertices": [_vertex(task, job, now_ms) for task in plan.tasks],
        "status-counts": _status_counts(state, subtasks),
        "plan": _plan(plan, job.jid),
        "stillframe": _own_words(job),
    }


def _own_words(job: ServedJob) -> JsonObject:
    query = job.query
    summary = query.summary
    failure, guarantee = query.exception(), query.guarantee()
    failures = query.failures
    return {
        "run-id": query.runId,
        "outcome": summary.outcome,
        "message": str(query.status["message"]),
        "diagnosis": query.diagnosis(job.state).sentence,
        "trouble": query.trouble,
        "failure": None if failure is None else str(failure),
        "last-failure": failures[-1].reason if failures else None,
        "last-failure-details": list(failures[-1].details) if failures else [],
        "guarantee": guarantee.word,
        "guarantee-reasons": list(guarantee.reasons),
        "parallelism": query.parallelism,
        "attempts": summary.attempts,
        "restarts": summary.restarts,
        "records-in": summary.records_in,
        "records-out": summary.records_out,
        "records-late": summary.records_late,
        "records-malformed": summary.records_malformed,
        "records-in-per-second": round(summary.records_per_second, 1),
        "watermark": None if summary.watermark_us is None else summary.watermark_us // 1000,
        "lags": [lag.to_json() for lag in summary.lags],
        "last-checkpoint": summary.last_checkpoint,
        "checkpoint-location": query.config.checkpoint_location,
        "slot-pids": list(query.slot_pids),
    }


def diagnosis(job: ServedJob) -> JsonObject:
    found = job.query.diagnosis(job.state)
    return {"code": found.code, "sentence": found.sentence, "args": dict(found.arguments)}


def figures(job: ServedJob, window_seconds: int | None, vertex: str | None) -> JsonObject:
    """What slots have measured last, and in the last seconds of a window. Counts are since the
    attempt began."""
    told = _figures_now(job)
    if window_seconds is None:
        return told
    task = None if vertex is None else task_of(job, vertex).index
    return {**told, "window": job.remembered(window_seconds, task)}


def task_of(job: ServedJob, vertex: str) -> Task:
    for task in job.query.plan.tasks:
        if task_vertex(task) == vertex.lower():
            return task
    raise Refused(
        404, f"job {job.name!r} has no task {vertex}: GET /jobs/{job.jid} tells which it has"
    )


def _figures_now(job: ServedJob) -> JsonObject:
    measured, plan = job.query.measured, job.query.plan
    places = {place.slot: place for place in job.query.slot_places}
    senders = {edge.name: plan.tasks[edge.source_task].name for edge in plan.edges}
    names = [task.name for task in plan.tasks]
    of_task: dict[int, list[JsonValue]] = {}
    for slot, told in sorted(measured.items()):
        for subtask in told.subtasks:
            row = _subtask_figures(slot, subtask, senders, names)
            of_task.setdefault(subtask.task, []).append(row)
    return {
        "attempt": job.query.summary.attempts,
        "tasks": [
            {
                "id": task_vertex(task),
                "name": task.name,
                "operators": [
                    {"uid": each.uid, "name": describe(each.operator)} for each in task.operators
                ],
                "subtasks": of_task.get(number, []),
            }
            for number, task in enumerate(plan.tasks)
        ],
        "slots": [
            {
                "slot": slot,
                "host": places[slot].host if slot in places else None,
                "pid": places[slot].pid if slot in places else None,
                "at": told.at_ms,
                "memory-bytes": told.rss_bytes,
                "cpu-seconds": told.cpu_seconds,
                "longest-step-ms": told.longest_step_seconds * 1000,
            }
            for slot, told in sorted(measured.items())
        ],
    }


def _subtask_figures(
    slot: int, told: SubtaskMeasures, senders: Mapping[str, str], names: Sequence[str]
) -> JsonObject:
    shares, aligning = told.shares, told.aligning
    return {
        "subtask": told.subtask,
        "slot": slot,
        "records-in": told.records_in,
        "records-out": told.records_out,
        "bytes-in": told.bytes_in,
        "bytes-out": told.bytes_out,
        "time-ms": {
            "working": shares.working / 1e6,
            "turn": shares.turn / 1e6,
            "backpressured": shares.backpressured / 1e6,
            "held": shares.held / 1e6,
            "idle": shares.idle / 1e6,
        },
        "watermark": None if told.watermark_us is None else told.watermark_us // 1000,
        "records-late": told.records_late,
        "queued-bytes": told.queued_bytes,
        "state-rows": told.state_rows,
        "state-bytes": told.state_bytes,
        "lag-records": told.lag_records,
        "lag-ms": told.lag_ms,
        "latency": [_latency(each, names) for each in told.latency],
        "aligning": None
        if aligning is None
        else {
            "checkpoint": aligning.checkpoint,
            "arrived": aligning.arrived,
            "channels": aligning.channels,
            "since": aligning.since_ms,
            "missing": [[senders.get(edge, edge), source] for edge, source in aligning.missing],
        },
    }


def _latency(told: Latency, names: Sequence[str]) -> JsonObject:
    return {
        "source": names[told.source_task],
        "count": sum(told.counts),
        "p50-ms": told.quantile_ms(0.5),
        "p99-ms": told.quantile_ms(0.99),
    }


def times_of(job: ServedJob, now_ms: int) -> JsonObject:
    ended_at_ms = job.ended_at_ms
    until_ms = now_ms if ended_at_ms is None else ended_at_ms
    return {
        "start-time": job.started_at_ms,
        "end-time": -1 if ended_at_ms is None else ended_at_ms,
        "duration": max(0, until_ms - job.started_at_ms),
    }


def _task_counts(state: str, subtasks: int) -> JsonObject:
    return {each: subtasks if each == TASKS_OF[state] else 0 for each in TASK_STATES}


def _status_counts(state: str, subtasks: int) -> JsonObject:
    return {name.upper(): count for name, count in _task_counts(state, subtasks).items()}


def _vertex(task: Task, job: ServedJob, now_ms: int) -> JsonObject:
    return {
        "id": task_vertex(task),
        "name": task.name,
        "maxParallelism": job.query.plan.max_parallelism,
        "parallelism": task.parallelism,
        "status": TASKS_OF[job.state].upper(),
        **times_of(job, now_ms),
        "tasks": _status_counts(job.state, task.parallelism),
    }


def task_vertex(task: Task) -> str:
    return vertex_id(task.operators[0].uid)


def _plan(plan: Plan, jid: str) -> JsonObject:
    return {
        "jid": jid,
        "name": plan.job,
        "type": "STREAMING",
        "nodes": [_node(task, plan) for task in plan.tasks],
    }


def _node(task: Task, plan: Plan) -> JsonObject:
    return {
        "id": task_vertex(task),
        "parallelism": task.parallelism,
        "operator": "",
        "operator_strategy": "",
        "description": task.name,
        "optimizer_properties": {},
        "inputs": [
            _input(number, plan.edges[index], plan) for number, index in enumerate(task.input_edges)
        ],
    }


def _input(number: int, edge: Edge, plan: Plan) -> JsonObject:
    return {
        "num": number,
        "id": task_vertex(plan.tasks[edge.source_task]),
        "ship_strategy": _ship_strategy(edge.partitioning),
        "exchange": "pipelined_bounded",
    }


def _ship_strategy(partitioning: Partitioning) -> str:
    """Forward, Rebalance and Broadcast are Flink's words too."""
    name = type(partitioning).__name__
    return "HASH" if name == "HashBy" else name.upper()


# --- settings ---


def configuration(job: ServedJob) -> JsonObject:
    config = job.query.config
    return {
        "jid": job.jid,
        "name": job.name,
        "execution-config": {
            "execution-mode": "PIPELINED",
            "restart-strategy": config.restart_strategy_in_force,
            "job-parallelism": job.query.parallelism,
            "object-reuse-mode": False,
            "user-config": settings_in_force(config),
        },
        "versions": _versions(),
    }


def _versions() -> dict[str, JsonValue]:
    known: dict[str, JsonValue] = {"python": platform.python_version()}
    for package in ("stillframe", "pyspark", "pyarrow"):
        with suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def checkpoint_configuration(job: ServedJob) -> JsonObject:
    config = job.query.config
    interval, tolerable = config.checkpoint_interval_seconds, config.tolerable_failed_checkpoints
    return {
        "mode": config.checkpoint_mode.replace("-", "_"),
        "interval": None if interval is None else _ms(interval),
        "timeout": _ms(config.checkpoint_timeout_seconds),
        "min_pause": _ms(config.checkpoint_min_pause_seconds),
        "max_concurrent": config.max_concurrent_checkpoints,
        "externalization": {
            "enabled": config.checkpoint_location is not None,
            "delete_on_cancellation": not config.retain_on_cancel,
        },
        "state_backend": config.state_backend,
        "checkpoint_storage": config.checkpoint_location,
        "unaligned_checkpoints": config.unaligned_checkpoints,
        "aligned_checkpoint_timeout": _ms(config.aligned_checkpoint_timeout_seconds),
        "tolerable_failed_checkpoints": None if tolerable == float("inf") else int(tolerable),
        "checkpoints_after_tasks_finish": True,
        "state_changelog_enabled": False,
        "num_retained": config.checkpoints_retained,
    }


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


# --- checkpoints and failures ---


def subtask_details(job: ServedJob, number: int, vertex: str) -> JsonObject:
    found = checkpoint(job, number).task_to_json(vertex.lower())
    if found is None:
        raise Refused(
            404,
            f"checkpoint {number} of job {job.name!r} has no task {vertex}:"
            f" GET /jobs/{job.jid}/checkpoints/details/{number} tells which",
        )
    return found


def checkpoint(job: ServedJob, number: int) -> CheckpointStatistics:
    found = job.query.checkpoint_statistics.checkpoint(CheckpointId(number))
    if found is None:
        raise Refused(
            404,
            f"job {job.name!r} has no checkpoint {number} that is remembered:"
            f" GET /jobs/{job.jid}/checkpoints tells which",
        )
    return found


def held_by_checkpoint(job: ServedJob, number: int) -> JsonObject:
    """Of the last that this driver has taken: it remembers what was in their metadata."""
    told = checkpoint(job, number)
    held = [each for each in job.query.checkpoints if each.checkpoint_id == told.checkpoint_id]
    if not held:
        sentence = f"what checkpoint {number} holds is not remembered"
        raise Refused(409, sentence + (f": stillframe inspect {told.path}" if told.path else ""))
    return {"id": number, "operators": [each.to_json() for each in held[-1].operators]}


def exceptions(job: ServedJob, entries_max: int) -> JsonObject:
    """Newest first, as in Flink."""
    failures = list(reversed(job.query.failures))
    shown = failures[:entries_max]
    newest = failures[0] if failures else None
    return {
        "root-exception": None if newest is None else newest.reason,
        "timestamp": None if newest is None else newest.at_ms,
        "all-exceptions": [],
        "truncated": False,
        "exceptionHistory": {
            "entries": [failure.to_json() for failure in shown],
            "truncated": len(shown) < len(failures),
        },
    }


# --- the log ---


def log_lines(
    newest_first: Iterable[LogLine], slot: int | None, level: str, before: int | None
) -> JsonObject:
    wanted = (
        line
        for line in newest_first
        if (slot is None or line.about.slot == slot)
        and line.level >= logging.getLevelNamesMapping()[level]
        and (before is None or line.number < before)
    )
    found = list(islice(wanted, LOG_LINES_MAX + 1))
    return {
        "lines": [line.to_json() for line in reversed(found[:LOG_LINES_MAX])],
        "more": len(found) > LOG_LINES_MAX,
    }


# --- operations ---


def operation(outcome: Done | Failed | None, failure_field: str) -> JsonObject:
    """`failure_field`: Flink spells it in two ways."""
    status: JsonObject = {"id": "IN_PROGRESS" if outcome is None else "COMPLETED"}
    told: JsonValue = None
    match outcome:
        case Done(result):
            told = result
        case Failed(kind, reason):
            told = {failure_field: {"class": kind, "stack-trace": reason}}
    return {"status": status, "operation": told}
