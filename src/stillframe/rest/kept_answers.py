"""What the files of a job tell of it, in the shapes of a driver's answers."""

from __future__ import annotations

from typing import Any

from stillframe.coordinator.kept_history import read_history
from stillframe.errors import StillframeError, StorageError
from stillframe.json_values import JsonObject
from stillframe.protocol.diagnosis import JobNow, diagnose
from stillframe.rest.answers import TASK_STATES
from stillframe.rest.jobs import STATES
from stillframe.rest.kept_jobs import NO_DRIVER, STOPPED, UNREADABLE, KeptJob

_TASKS_OF = {"FINISHED": "FINISHED", "FAILED": "FAILED", "CANCELED": "CANCELED"}


def status_of(kept: KeptJob) -> dict[str, Any]:
    """One that cannot be read must not hide the others: it says so itself."""
    try:
        return kept.status()
    except StillframeError as error:
        return {
            "jid": kept.jid,
            "name": kept.name,
            "state": UNREADABLE,
            "start-time": None,
            "attempts": None,
            "last-failure": None,
            "last-failure-details": [],
            "last-checkpoint": None,
            "failure": str(error),
        }


def overview(kept: KeptJob) -> JsonObject:
    status = status_of(kept)
    return {
        "jid": status["jid"],
        "name": status["name"],
        "state": status["state"],
        **_times(status),
        "last-modification": _started(status),
        "tasks": {"total": 0, **dict.fromkeys(TASK_STATES, 0)},
    }


def details(kept: KeptJob, now_ms: int) -> JsonObject:
    status = status_of(kept)
    newest = next(iter(read_history(kept.store).statistics().history), None)
    doing = _TASKS_OF.get(status["state"], "CREATED")
    shapes = newest.tasks if newest is not None else ()
    return {
        "jid": status["jid"],
        "name": status["name"],
        "isStoppable": False,
        "state": status["state"],
        **_times(status),
        "maxParallelism": 0,
        "now": now_ms,
        "timestamps": dict.fromkeys(STATES, 0),
        "vertices": [
            {
                "id": task.vertex,
                "name": task.name,
                "maxParallelism": 0,
                "parallelism": task.parallelism,
                "status": doing,
                **_times(status),
                "tasks": {state.upper(): 0 for state in TASK_STATES},
            }
            for task in shapes
        ],
        "status-counts": {state.upper(): 0 for state in TASK_STATES},
        "plan": {"jid": status["jid"], "name": status["name"], "type": "STREAMING", "nodes": []},
        "stillframe": _own_words(kept, status),
    }


def _own_words(kept: KeptJob, status: dict[str, Any]) -> JsonObject:
    last = status["last-checkpoint"]
    return {
        "run-id": "",
        "outcome": status["state"].lower(),
        "message": status["state"].lower(),
        "diagnosis": str(diagnosis(kept)["sentence"]),
        "trouble": [],
        "failure": status["failure"],
        "last-failure": status["last-failure"],
        "last-failure-details": list(status["last-failure-details"]),
        "guarantee": "",
        "guarantee-reasons": [],
        "parallelism": 0,
        "attempts": status["attempts"] or 0,
        "restarts": 0,
        "records-in": 0,
        "records-out": 0,
        "records-late": 0,
        "records-malformed": 0,
        "records-in-per-second": 0,
        "watermark": None,
        "lags": [],
        "last-checkpoint": None if last is None else last["id"],
        "checkpoint-location": kept.location,
        "slot-pids": [],
    }


def diagnosis(kept: KeptJob) -> JsonObject:
    status = status_of(kept)
    state = {STOPPED: "FINISHED", UNREADABLE: NO_DRIVER}.get(status["state"], status["state"])
    found = diagnose(JobNow(state, status["failure"] or status["last-failure"] or ""))
    sentence = found.sentence
    if status["state"] == UNREADABLE:
        sentence = f"Its files cannot be read: {status['failure']}"
    elif unreadable := _unreadable(kept):
        sentence += f" Some of its history cannot be read: {unreadable[0]}"
    return {"code": found.code, "sentence": sentence, "args": dict(found.arguments)}


def _unreadable(kept: KeptJob) -> tuple[str, ...]:
    """Files of its history that are damaged, or newer than this program."""
    try:
        return tuple(getattr(read_history(kept.store), "unreadable", ()))
    except StorageError as error:
        return (str(error),)


def in_list(kept: KeptJob) -> JsonObject:
    """As the stream of all jobs tells them."""
    status = status_of(kept)
    return {
        **in_list_of(status["jid"], status["name"], status["state"], status["last-checkpoint"]),
        "guarantee": None,
        "started_at": status["start-time"],
        "diagnosis": diagnosis(kept),
        "records_in_per_second": None,
        "lag_records": None,
        "lag_seconds": None,
        "restarts": None,
    }


def in_list_of(jid: str, name: str, state: str, last: dict[str, Any] | None) -> JsonObject:
    """`last`: the newest completed checkpoint, as Flink tells it."""
    checkpoint = last and {
        "id": last["id"],
        "at": last["trigger_timestamp"],
        "duration_ms": last["end_to_end_duration"],
        "new_bytes": last["checkpointed_size"],
        "full_bytes": last["state_size"],
    }
    return {"jid": jid, "name": name, "state": state, "last_checkpoint": checkpoint or None}


def _started(status: dict[str, Any]) -> int:
    return -1 if status["start-time"] is None else int(status["start-time"])


def _times(status: dict[str, Any]) -> JsonObject:
    return {"start-time": _started(status), "end-time": -1, "duration": 0}
