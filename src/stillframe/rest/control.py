"""What requests ask of a job, handed to its query; whatever takes time, in the background."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stillframe.errors import StillframeError
from stillframe.ids import CheckpointId
from stillframe.json_values import JsonObject
from stillframe.protocol.checkpointing import SHOWN_MAX
from stillframe.protocol.statistics import CheckpointStatus
from stillframe.rest import answers, vertices
from stillframe.rest.jobs import ServedJob, ServedJobs
from stillframe.rest.log_ring import LEVELS, log_ring
from stillframe.rest.lookups import SECONDS_MAX, Lookups
from stillframe.rest.operations import Kind, Operations
from stillframe.rest.refusals import Refused
from stillframe.rest.streams import Stream
from stillframe.storage.store import open_store

EXCEPTIONS_MAX = 100
_ROWS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Call:
    """A request that fits its description."""

    jobs: ServedJobs
    operations: Operations
    lookups: Lookups
    path: Mapping[str, Any]
    parameters: Mapping[str, Any]
    body: Mapping[str, Any]
    last_event_id: str | None = None
    is_trusted: bool = False
    """Whether whoever asks has shown the token."""

    @property
    def job(self) -> ServedJob:
        return self.jobs.find(self.path["jobid"])

    @property
    def now_ms(self) -> int:
        return self.jobs.clock.wall_ms()


Handler = Callable[[Call], JsonObject | list[JsonObject] | Stream]

# --- reading ---


def list_jobs(call: Call) -> JsonObject:
    return {"jobs": [answers.id_and_status(job) for job in call.jobs.all()]}


def overview_of_jobs(call: Call) -> JsonObject:
    return {"jobs": [answers.overview(job, call.now_ms) for job in call.jobs.all()]}


def job_details(call: Call) -> JsonObject:
    return answers.details(call.job, call.now_ms)


def job_diagnosis(call: Call) -> JsonObject:
    return answers.diagnosis(call.job)


def job_figures(call: Call) -> JsonObject:
    given = call.parameters
    return answers.figures(call.job, given.get("window"), given.get("vertex"))


def vertex_details(call: Call) -> JsonObject:
    return vertices.details(call.job, call.path["vertexid"], call.now_ms)


def vertex_metrics(call: Call) -> list[JsonObject]:
    given = call.parameters
    names = given["get"].split(",") if "get" in given else None
    aggregates = given["agg"].split(",") if "agg" in given else vertices.AGGREGATES
    return vertices.metrics(call.job, call.path["vertexid"], names, aggregates)


def vertex_backpressure(call: Call) -> JsonObject:
    return vertices.backpressure(call.job, call.path["vertexid"])


def vertex_watermarks(call: Call) -> list[JsonObject]:
    return vertices.watermarks(call.job, call.path["vertexid"])


def job_events(call: Call) -> Stream:
    job, watch = call.job, call.parameters.get("watch")
    return Stream(
        job, None if watch is None else watch.lower(), call.last_event_id, call.is_trusted
    )


def events_of_all(call: Call) -> Stream:
    return Stream(None)


def job_logs(call: Call) -> JsonObject:
    given = call.parameters
    return answers.log_lines(
        log_ring().newest_first(call.job.name),
        given.get("slot"),
        given.get("level", LEVELS[0]),
        given.get("before"),
    )


def job_config(call: Call) -> JsonObject:
    return answers.configuration(call.job)


def job_exceptions(call: Call) -> JsonObject:
    return answers.exceptions(call.job, call.parameters.get("maxExceptions", EXCEPTIONS_MAX))


def checkpoints(call: Call) -> JsonObject:
    given = call.parameters
    status: CheckpointStatus | None = given["status"].upper() if "status" in given else None
    limit = given.get("limit", SHOWN_MAX)
    return call.job.query.checkpoint_statistics.to_json(limit, given.get("before"), status)


def checkpoint_series(call: Call) -> JsonObject:
    between = call.parameters.get("from"), call.parameters.get("to")
    return call.job.query.checkpoint_statistics.series_json(*between)


def checkpoint_barriers(call: Call) -> JsonObject:
    return answers.checkpoint(call.job, call.path["checkpointid"]).barriers_json()


def checkpoint_operators(call: Call) -> JsonObject:
    return answers.held_by_checkpoint(call.job, call.path["checkpointid"])


def attempts(call: Call) -> list[JsonObject]:
    return call.job.query.attempts


def checkpoint_config(call: Call) -> JsonObject:
    return answers.checkpoint_configuration(call.job)


def checkpoint_details(call: Call) -> JsonObject:
    return answers.checkpoint(call.job, call.path["checkpointid"]).to_json(with_tasks=True)


def subtask_details(call: Call) -> JsonObject:
    return answers.subtask_details(call.job, call.path["checkpointid"], call.path["vertexid"])


def checkpoint_status(call: Call) -> JsonObject:
    return _outcome(call, "checkpoint", "failureCause")


def savepoint_status(call: Call) -> JsonObject:
    return _outcome(call, "savepoint", "failure-cause")


def rescaling_status(call: Call) -> JsonObject:
    return _outcome(call, "rescaling", "failure-cause")


def _outcome(call: Call, kind: Kind, failure_field: str) -> JsonObject:
    outcome = call.operations.find(call.job.jid, kind, call.path["triggerid"])
    return answers.operation(outcome, failure_field)


def job_state(call: Call) -> JsonObject:
    job, given = call.job, call.parameters
    place = _place_of(job, given.get("checkpoint"))
    wanted = {"operator": given.get("uid"), "state": given.get("state"), "key": given.get("key")}
    options = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    command = ["inspect", place, *(options or ["--states"]), f"--rows={_ROWS_SHOWN}"]
    return call.lookups.run(command, job.query.config.storage_settings)


def difference_status(call: Call) -> JsonObject:
    return _outcome(call, "difference", "failure-cause")


def _place_of(job: ServedJob, number: int | None) -> str:
    """The directory of a checkpoint or savepoint; the newest checkpoint's without a number."""
    told = job.query.checkpoint_statistics
    found = told.latest_completed if number is None else told.checkpoint(CheckpointId(number))
    which = "no checkpoint" if number is None else f"no checkpoint {number}"
    if found is None or found.path is None or found.is_discarded:
        raise Refused(409, f"job {job.name!r} has {which} that is complete and retained")
    return found.path


# --- changing ---


def trigger_checkpoint(call: Call) -> JsonObject:
    job = call.job
    if job.query.config.checkpoint_location is None:
        raise Refused(
            409, f"job {job.name!r} has no checkpointLocation, so it can take no checkpoint"
        )

    def take() -> JsonObject:
        number = job.query.checkpoint()
        if number is None:
            raise StillframeError(f"job {job.name!r} ended before the checkpoint was complete")
        return {"checkpointId": number}

    return _begin(call, job, "checkpoint", {"wanted": "checkpoint"}, take)


def trigger_savepoint(call: Call) -> JsonObject:
    if call.body.get("cancel-job", False):
        return _stop(call, call.body["target-directory"], drains=False)
    job, directory = call.job, call.body["target-directory"]

    def take() -> JsonObject:
        _reached(job, directory)
        return {"location": job.query.savepoint(directory)}

    return _begin(call, job, "savepoint", {"wanted": "savepoint", "in": directory}, take)


def stop_job(call: Call) -> JsonObject:
    directory = call.body.get("targetDirectory")
    return _stop(call, directory, call.body.get("drain", False))


def _stop(call: Call, directory: str | None, drains: bool) -> JsonObject:
    job = call.job

    def stop() -> JsonObject:
        location = None if directory is None else _reached(job, directory)
        job.query.stop(savepoint=directory, drain=drains)
        return {"location": location}

    asked: JsonObject = {"wanted": "stop", "in": directory, "drain": drains}
    return _begin(call, job, "savepoint", asked, stop)


def cancel_job(call: Call) -> JsonObject:
    job = call.job

    def cancel() -> JsonObject:
        job.query.cancel()
        return {}

    # One number for all who ask: a job is cancelled once.
    number = uuid.UUID(job.query.runId).hex
    asked: JsonObject = {"wanted": "cancel"}
    call.operations.begin(job.jid, "cancel", number, asked, cancel, job.refuse_if_ended)
    return {}


def rescale_job(call: Call) -> JsonObject:
    job, parallelism = call.job, call.parameters["parallelism"]

    def rescale() -> JsonObject:
        rescaled = job.query.rescale(parallelism)
        return {
            "parallelism-before": rescaled.before,
            "parallelism": rescaled.after,
            "downtime-ms": round(rescaled.downtime_seconds * 1000),
        }

    return _begin(call, job, "rescaling", {"parallelism": parallelism}, rescale)


def begin_difference(call: Call) -> JsonObject:
    job, given = call.job, call.body
    before, after = (_place_of(job, int(given[name])) for name in ("a", "b"))
    settings = job.query.config.storage_settings
    command = ["diff", before, after, f"--rows={_ROWS_SHOWN}"]
    if "uid" in given:
        command.append(f"--operator={given['uid']}")

    def compare() -> JsonObject:
        return call.lookups.run(command, settings, wait_seconds=SECONDS_MAX)

    asked: JsonObject = {name: given[name] for name in ("a", "b", "uid") if name in given}
    number = call.operations.begin(
        job.jid, "difference", given.get("triggerId"), asked, compare, lambda: None
    )
    return {"request-id": number}


def _begin(
    call: Call, job: ServedJob, kind: Kind, asked: JsonObject, do: Callable[[], JsonObject]
) -> JsonObject:
    trigger_id = call.body.get("triggerId") or call.parameters.get("triggerId")
    number = call.operations.begin(job.jid, kind, trigger_id, asked, do, job.refuse_if_ended)
    return {"request-id": number}


def _reached(job: ServedJob, directory: str) -> str:
    """The address of a directory whose storage answers; raises if it does not.

    Looked at here because the job's own thread would wait for a storage that is down.
    """
    store = open_store(directory, job.query.config.storage_settings)
    store.list("")
    return store.address
