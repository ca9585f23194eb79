"""The API exercised from its own description by a fuzzer: what fits the description is done, what
does not is refused, every answer is as described, and the job does not notice."""

from __future__ import annotations

import uuid
import zlib
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode

from stillframe.rest.openapi import document

TOKEN = "a-token-for-these-tests"
ENDED_BY = {"cancel_job": "doomed", "stop_job": "halted"}
"""The jobs that requests of these kinds are about: the others want one that runs."""

description = document(reading_needs_token=False)
described = schemathesis.openapi.from_dict(description).exclude(
    operation_id=["events_of_all", "job_events"]  # they do not end: see test_events.py
)


@pytest.fixture(scope="module")
def known(quiet):
    """What is there, so that not everything that is asked about is unknown."""
    driver, query = quiet
    for name in ENDED_BY.values():
        driver.start(name)
    number = driver.client.change("POST", "/jobs/counts/checkpoints").json["request-id"]
    driver.client.outcome(f"/jobs/counts/checkpoints/{number}")
    vertices = driver.client.get("/jobs/counts")["vertices"]
    return {
        "jobid": query.name,
        "checkpointid": query.summary.last_checkpoint,
        "vertexid": vertices[0]["id"],
        "triggerid": number,
    }


def test_the_description_is_the_one_that_is_served(quiet):
    driver, _ = quiet

    assert driver.client.get("/openapi.json") == description


@pytest.mark.parametrize("needs_token", [False, True])
def test_the_description_is_valid(needs_token):
    schemathesis.openapi.from_dict(document(reading_needs_token=needs_token)).validate()


def name_what_is_there(case: Any, known: dict[str, Any]) -> None:
    """Three times of four, where the fuzzer meant the path to be right."""
    part = case.meta.components.get(ParameterLocation.PATH)
    if part is None or part.mode is not GenerationMode.POSITIVE:
        return
    job = ENDED_BY.get(case.operation.definition.raw["operationId"], known["jobid"])
    for name, value in case.path_parameters.items():
        if zlib.crc32(str(value).encode()) % 4:
            case.path_parameters[name] = job if name == "jobid" else known[name]


def could_be_written(directory: str) -> bool:
    body = description["paths"]["/jobs/{jobid}/savepoints"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]["properties"]["target-directory"]
    return jsonschema_rs.is_valid(schema, directory)


def keep_inside(case: Any, home: Any) -> None:
    """Savepoints that could be taken go below the test's own directory, and end no other job."""
    if not isinstance(case.body, dict):
        return
    for name in ("target-directory", "targetDirectory"):
        given = case.body.get(name)
        if isinstance(given, str) and could_be_written(given):
            case.body[name] = f"{home}/{uuid.uuid4().hex}"
    if case.body.get("cancel-job") is True and "jobid" in case.path_parameters:
        case.path_parameters["jobid"] = "doomed"


@pytest.mark.slow
@described.parametrize()
@hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_every_request_of_the_description_is_answered_as_described(case, quiet, known):
    driver, query = quiet
    name_what_is_there(case, known)
    keep_inside(case, driver.home)

    case.call_and_validate(
        driver.server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
    )

    assert query.isActive
