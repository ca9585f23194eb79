"""The table of all requests: both what is done with them and what the OpenAPI document says of
them is made from it, so that the two cannot differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from stillframe.protocol.rings import JOB_POINTS_MAX
from stillframe.rest import control, shapes
from stillframe.rest.control import Handler
from stillframe.rest.log_ring import LEVELS
from stillframe.rest.refusals import Refused
from stillframe.rest.schemas import (
    FLAG,
    ID,
    Schema,
    described,
    one_of,
    parsed,
    record,
    required_if,
)

PARALLELISM_MAX = 32_768
CHECKPOINTS_SHOWN_MAX = 500
_NUMBER_MAX = 2**53 - 1
"""The largest whole number that every reader of JSON has."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of a request's address, behind the `?`."""

    name: str
    schema: Schema
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request, and how it is answered."""

    method: str
    path: str
    summary: str
    handler: Handler
    answer: Schema
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    body: Schema | None = None
    tells_secrets: bool = False
    """Whether the answer holds what passes through a job, and not only how it runs."""

    @property
    def changes(self) -> bool:
        """Whether it does something to a job."""
        return self.method != "GET"

    @property
    def needs_token(self) -> bool:
        """On this machine too."""
        return self.changes or self.tells_secrets

    @property
    def parts(self) -> list[str]:
        return self.path.split("/")[1:]

    @property
    def path_names(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    def matches(self, parts: list[str]) -> bool:
        return len(parts) == len(self.parts) and all(
            _is_name(expected) or part == expected
            for part, expected in zip(parts, self.parts, strict=True)
        )

    def path_values(self, parts: list[str]) -> Mapping[str, str | int]:
        """What stands in the places that have a name; refused if it does not fit."""
        texts = {
            expected.strip("{}"): part
            for part, expected in zip(parts, self.parts, strict=True)
            if _is_name(expected)
        }
        return {name: parsed(text, PATH_SCHEMAS[name], name) for name, text in texts.items()}


def _is_name(part: str) -> bool:
    return part.startswith("{")


PATH_SCHEMAS: Mapping[str, Schema] = {
    "jobid": described(
        {"type": "string", "minLength": 1}, "The job's id, 32 hexadecimal digits, or its name."
    ),
    "checkpointid": described(
        {"type": "integer", "minimum": 1, "maximum": _NUMBER_MAX}, "A checkpoint's number."
    ),
    "vertexid": described(ID, "A task's id, as GET /jobs/{jobid} tells it."),
    "triggerid": described(ID, "What the request was answered with."),
}
_MOMENT = described(
    {"type": "integer", "minimum": 0, "maximum": _NUMBER_MAX}, "Milliseconds since 1970."
)
_TRIGGER_ID = described(
    ID,
    "32 hexadecimal digits that the client chooses; asked for again under the same, it is done"
    " once.",
)
_DIRECTORY = described(
    {
        "type": "string",
        "maxLength": 4096,
        "pattern": r"^(/|[A-Za-z][A-Za-z0-9+.\-]+:/)[^\u0000-\u001f\u007f]*$",
    },
    "An absolute path, or a URL, of a directory that is not there yet.",
)
_CHECKPOINT_ID: Schema = {"type": "integer", "minimum": 1, "maximum": _NUMBER_MAX}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 4096, "pattern": r"^[^\u0000]*$"}
_UID = described(_NAME, "Only states of this operator.")
_FORMAT = described(one_of("CANONICAL"), "All savepoints are canonical.")

ROUTES = (
    Route("GET", "/jobs", "All jobs of this driver", control.list_jobs, shapes.JOBS),
    Route(
        "GET", "/jobs/overview", "All jobs, in a line each", control.overview_of_jobs,
        shapes.OVERVIEW,
    ),
    Route(
        "GET", "/events", "All jobs as they change, until you close it", control.events_of_all,
        shapes.EVENT_STREAM,
    ),
    Route("GET", "/jobs/{jobid}", "One job", control.job_details, shapes.JOB),
    Route(
        "PATCH", "/jobs/{jobid}", "Cancel the job: end it now", control.cancel_job,
        shapes.NOTHING, 202, (Parameter("mode", one_of("cancel"), is_required=True),),
    ),
    Route(
        "GET", "/jobs/{jobid}/events", "What happens to it, as it happens, until you close it",
        control.job_events, shapes.EVENT_STREAM,
        parameters=(
            Parameter("watch", described(ID, "A task whose subtasks are to be told too.")),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/diagnosis", "What it waits for, in one sentence",
        control.job_diagnosis, shapes.DIAGNOSIS,
    ),
    Route(
        "GET", "/jobs/{jobid}/figures", "What its tasks do now", control.job_figures,
        shapes.FIGURES,
        parameters=(
            Parameter(
                "window",
                described(
                    {"type": "integer", "minimum": 1, "maximum": JOB_POINTS_MAX},
                    "Seconds: what it did in them is told too, a point for each.",
                ),
            ),
            Parameter("vertex", described(ID, "Only this task, in the window.")),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/vertices/{vertexid}", "One task and its subtasks",
        control.vertex_details, shapes.VERTEX,
    ),
    Route(
        "GET", "/jobs/{jobid}/vertices/{vertexid}/subtasks/metrics",
        "Metrics of a task over all its subtasks; which there are, unless some are asked for",
        control.vertex_metrics, shapes.METRICS,
        parameters=(
            Parameter(
                "get",
                described(
                    {"type": "string", "maxLength": 4096, "pattern": "^[A-Za-z]+(,[A-Za-z]+)*$"},
                    "Names of metrics, with commas between them.",
                ),
            ),
            Parameter(
                "agg",
                described(
                    {
                        "type": "string",
                        "pattern": "^(min|max|avg|sum|skew)(,(min|max|avg|sum|skew)){0,4}$",
                    },
                    "min, max, avg, sum or skew, with commas between them.",
                ),
            ),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/vertices/{vertexid}/backpressure",
        "How much its subtasks wait for what is behind them", control.vertex_backpressure,
        shapes.BACKPRESSURE,
    ),
    Route(
        "GET", "/jobs/{jobid}/vertices/{vertexid}/watermarks", "How far event time is in it",
        control.vertex_watermarks, shapes.WATERMARKS,
    ),
    Route(
        "GET", "/jobs/{jobid}/logs", "The last lines of the driver's log about it, oldest first",
        control.job_logs, shapes.LOGS,
        parameters=(
            Parameter(
                "slot",
                described(
                    {"type": "integer", "minimum": 0, "maximum": PARALLELISM_MAX},
                    "Only lines of this slot.",
                ),
            ),
            Parameter("level", described(one_of(*LEVELS), "Only lines as grave as this.")),
            Parameter(
                "before",
                described(
                    {"type": "integer", "minimum": 1, "maximum": _NUMBER_MAX},
                    "Only lines before this number.",
                ),
            ),
        ),
        tells_secrets=True,
    ),
    Route(
        "GET", "/jobs/{jobid}/state",
        "The states of a checkpoint; of one of them, the first rows, or those of a key",
        control.job_state, shapes.STATE,
        parameters=(
            Parameter("checkpoint", described(_CHECKPOINT_ID, "The newest, unless given.")),
            Parameter("uid", _UID),
            Parameter("state", described(_NAME, "The state's name, where it has several.")),
            Parameter("key", described(_NAME, "A value, or a JSON list of several columns.")),
        ),
        tells_secrets=True,
    ),
    Route(
        "POST", "/jobs/{jobid}/diffs", "Compare the states of two checkpoints",
        control.begin_difference, shapes.REQUEST, 202,
        body=record(
            {
                "a": described(_CHECKPOINT_ID, "The checkpoint before."),
                "b": described(_CHECKPOINT_ID, "The checkpoint after."),
                "uid": _UID,
                "triggerId": _TRIGGER_ID,
            },
            optional=("uid", "triggerId"),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/diffs/{triggerid}", "What two checkpoints differ in",
        control.difference_status, shapes.DIFFERENCE_OPERATION, tells_secrets=True,
    ),
    Route(
        "GET", "/jobs/{jobid}/attempts", "How its attempts came up, newest first",
        control.attempts, shapes.ATTEMPTS,
    ),
    Route("GET", "/jobs/{jobid}/config", "The job's settings", control.job_config, shapes.CONFIG),
    Route(
        "GET", "/jobs/{jobid}/exceptions", "Its failures, newest first",
        control.job_exceptions, shapes.EXCEPTIONS,
        parameters=(
            Parameter(
                "maxExceptions",
                {"type": "integer", "minimum": 1, "maximum": control.EXCEPTIONS_MAX},
            ),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints", "Its checkpoints, newest first",
        control.checkpoints, shapes.CHECKPOINTS,
        parameters=(
            Parameter("limit", {"type": "integer", "minimum": 1, "maximum": CHECKPOINTS_SHOWN_MAX}),
            Parameter("before", PATH_SCHEMAS["checkpointid"]),
            Parameter("status", one_of("in_progress", "completed", "failed")),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/series",
        "Its checkpoints in columns, the oldest first", control.checkpoint_series, shapes.SERIES,
        parameters=(Parameter("from", _MOMENT), Parameter("to", _MOMENT)),
    ),
    Route(
        "POST", "/jobs/{jobid}/checkpoints", "Take a checkpoint now",
        control.trigger_checkpoint, shapes.REQUEST, 202,
        body=record(
            {
                "checkpointType": described(one_of("CONFIGURED"), "As the job takes all others."),
                "triggerId": _TRIGGER_ID,
            },
            optional=("checkpointType", "triggerId"),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/config", "How it takes checkpoints",
        control.checkpoint_config, shapes.CHECKPOINT_CONFIG,
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/details/{checkpointid}", "One checkpoint, task by task",
        control.checkpoint_details, shapes.CHECKPOINT,
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/details/{checkpointid}/barriers",
        "When its barriers came, subtask by subtask", control.checkpoint_barriers, shapes.BARRIERS,
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/details/{checkpointid}/operators",
        "What it holds, operator by operator", control.checkpoint_operators, shapes.HELD,
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/details/{checkpointid}/subtasks/{vertexid}",
        "One task's part of a checkpoint, subtask by subtask",
        control.subtask_details, shapes.SUBTASKS,
    ),
    Route(
        "GET", "/jobs/{jobid}/checkpoints/{triggerid}",
        "What became of a checkpoint that was asked for",
        control.checkpoint_status, shapes.CHECKPOINT_OPERATION,
    ),
    Route(
        "POST", "/jobs/{jobid}/savepoints", "Take a savepoint; the job runs on",
        control.trigger_savepoint, shapes.REQUEST, 202,
        body=record(
            {
                "target-directory": _DIRECTORY,
                "cancel-job": described(FLAG, "Whether the job is to end with it."),
                "formatType": _FORMAT,
                "triggerId": _TRIGGER_ID,
            },
            optional=("cancel-job", "formatType", "triggerId"),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/savepoints/{triggerid}",
        "What became of a savepoint or a stop that was asked for",
        control.savepoint_status, shapes.SAVEPOINT_OPERATION,
    ),
    Route(
        "POST", "/jobs/{jobid}/stop", "Stop the job, with a savepoint or without",
        control.stop_job, shapes.REQUEST, 202,
        body=record(
            {
                "targetDirectory": described(
                    _DIRECTORY,
                    "An absolute path, or a URL, of a directory that is not there yet; without"
                    " it the job stops with its last checkpoint.",
                ),
                "drain": described(
                    FLAG, "Whether the sources end first, so that windows and timers fire."
                ),
                "formatType": _FORMAT,
                "triggerId": _TRIGGER_ID,
            },
            optional=("targetDirectory", "drain", "formatType", "triggerId"),
        )
        | required_if("drain", "targetDirectory"),
    ),
    Route(
        "PATCH", "/jobs/{jobid}/rescaling", "Go on with another parallelism",
        control.rescale_job, shapes.REQUEST, 202,
        (
            Parameter(
                "parallelism",
                {"type": "integer", "minimum": 1, "maximum": PARALLELISM_MAX},
                is_required=True,
            ),
            Parameter("triggerId", _TRIGGER_ID),
        ),
    ),
    Route(
        "GET", "/jobs/{jobid}/rescaling/{triggerid}",
        "What became of a rescaling that was asked for",
        control.rescaling_status, shapes.RESCALING_OPERATION,
    ),
)  # fmt: skip
DOCUMENT_PATH = "/openapi.json"
METRICS_PATH = "/metrics"


def split_path(path: str) -> list[str]:
    """The parts of a path; a name may have a `/` of its own, if it is written as %2F."""
    try:
        return [unquote(part, errors="strict") for part in path.split("/")[1:]]
    except UnicodeDecodeError as error:
        raise Refused(400, f"the path {path[:200]!r} is not valid UTF-8") from error


def routes_at(parts: list[str], more: Sequence[Route] = ()) -> list[Route]:
    """All routes of a path, whatever their method: /jobs/overview is no job's."""
    found = [route for route in (*ROUTES, *more) if route.matches(parts)]
    if not found:
        return []
    most = min(len(route.path_names) for route in found)
    return [route for route in found if len(route.path_names) == most]


def allowed_methods(routes: list[Route]) -> list[str]:
    methods = {route.method for route in routes}
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))
