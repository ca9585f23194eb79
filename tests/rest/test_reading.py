"""What a driver tells of its jobs, in Flink's words, and that its own description is true of it."""

from __future__ import annotations

import os
import re

import jsonschema_rs
import pytest

from stillframe.config import job_option_names
from stillframe.errors import JobFailed

READABLE = [
    "/jobs",
    "/jobs/overview",
    "/jobs/{jobid}",
    "/jobs/{jobid}/diagnosis",
    "/jobs/{jobid}/figures",
    "/jobs/{jobid}/figures?window=60",
    "/jobs/{jobid}/vertices/{vertexid}",
    "/jobs/{jobid}/vertices/{vertexid}/subtasks/metrics",
    "/jobs/{jobid}/vertices/{vertexid}/subtasks/metrics?get=numRecordsIn,busyTimeMsPerSecond",
    "/jobs/{jobid}/vertices/{vertexid}/backpressure",
    "/jobs/{jobid}/vertices/{vertexid}/watermarks",
    "/jobs/{jobid}/config",
    "/jobs/{jobid}/exceptions",
    "/jobs/{jobid}/checkpoints",
    "/jobs/{jobid}/checkpoints/config",
    "/jobs/{jobid}/checkpoints/details/{checkpointid}",
    "/jobs/{jobid}/checkpoints/details/{checkpointid}/operators",
    "/jobs/{jobid}/checkpoints/details/{checkpointid}/subtasks/{vertexid}",
]


@pytest.fixture
def known(quiet):
    """What stands for each name in a path."""
    driver, query = quiet
    jid = query.id.replace("-", "")
    vertices = driver.client.get(f"/jobs/{jid}")["vertices"]
    checkpoint = query.summary.last_checkpoint
    return {"jobid": jid, "checkpointid": checkpoint, "vertexid": vertices[0]["id"]}


def test_jobs_are_listed_with_their_state(quiet, known):
    driver, query = quiet

    assert driver.client.get("/jobs") == {"jobs": [{"id": known["jobid"], "status": "RUNNING"}]}
    (line,) = driver.client.get("/jobs/overview")["jobs"]
    assert (line["name"], line["state"], line["end-time"]) == (query.name, "RUNNING", -1)
    assert line["tasks"]["total"] == line["tasks"]["running"] > 0
    assert line["duration"] >= 0


@pytest.mark.parametrize("path", READABLE)
def test_every_answer_is_as_the_document_describes_it(quiet, known, path):
    driver, _ = quiet
    described = driver.client.get("/openapi.json")["paths"][path.partition("?")[0]]
    described = described["get"]["responses"]["200"]
    schema = described["content"]["application/json"]["schema"]

    answer = driver.client.get(path.format(**known))

    jsonschema_rs.validate(schema, answer)


def test_a_job_is_found_by_its_id_with_dashes_or_without_and_by_its_name(quiet, known):
    driver, query = quiet

    told = [
        driver.client.get(f"/jobs/{each}")["jid"]
        for each in (known["jobid"], known["jobid"].upper(), query.id, query.name)
    ]

    assert set(told) == {known["jobid"]}


def test_a_name_with_a_slash_is_written_with_its_code(driver):
    query, _ = driver.prepare("clicks/by app")

    assert driver.client.get("/jobs/clicks%2Fby%20app")["name"] == query.name


def test_a_job_tells_its_tasks_and_what_flows_between_them(quiet, known):
    driver, query = quiet

    job = driver.client.get(f"/jobs/{known['jobid']}")

    assert [vertex["parallelism"] for vertex in job["vertices"]] == [2, 2]
    first, second = job["plan"]["nodes"]
    assert first["inputs"] == []
    assert [(each["id"], each["ship_strategy"]) for each in second["inputs"]] == [
        (first["id"], "HASH")
    ]
    own = job["stillframe"]
    assert own["slot-pids"] == list(query.slot_pids)
    assert (own["outcome"], own["attempts"], own["restarts"]) == ("running", 2, 1)
    assert own["guarantee"] == query.guarantee().word


def test_checkpoints_are_told_with_flinks_figures(quiet, known):
    driver, query = quiet

    told = driver.client.get(f"/jobs/{known['jobid']}/checkpoints")

    assert told["counts"]["completed"] >= 2
    assert told["latest"]["savepoint"]["checkpoint_type"] == "SAVEPOINT"
    newest = told["latest"]["completed"]
    assert newest["num_subtasks"] == newest["num_acknowledged_subtasks"] == 4
    details = driver.client.get(f"/jobs/{known['jobid']}/checkpoints/details/{newest['id']}")
    assert set(details["tasks"]) >= {known["vertexid"]}
    parts = driver.client.get(
        f"/jobs/{known['jobid']}/checkpoints/details/{newest['id']}/subtasks/{known['vertexid']}"
    )
    assert [part["index"] for part in parts["subtasks"]] == [0, 1]
    assert query.summary.last_checkpoint is not None


def test_failures_are_told_with_what_the_job_recovered_from(quiet, known):
    driver, _ = quiet

    told = driver.client.get(f"/jobs/{known['jobid']}/exceptions")

    (entry,) = told["exceptionHistory"]["entries"]
    assert told["root-exception"] == entry["stacktrace"] != ""
    assert (entry["attempt"], entry["recovered-by-attempt"]) == (1, 2)
    assert told["exceptionHistory"]["truncated"] is False


def test_settings_are_told_under_their_option_names_and_no_secret_is_among_them(driver):
    settings = {"fs.s3a.secret.key": "a-secret-that-nobody-may-see"}
    driver.prepare("counts", parallelism="2", **settings)

    told = driver.client.ask("GET", "/jobs/counts/config")

    execution = told.json["execution-config"]
    assert execution["restart-strategy"] == "fixed-delay"
    assert execution["user-config"]["restartDelay"] == "0.02"
    assert set(execution["user-config"]) <= set(job_option_names())
    assert "nobody-may-see" not in told.text
    config = driver.client.get("/jobs/counts/checkpoints/config")
    assert (config["mode"], config["interval"]) == ("exactly_once", 3_600_000)
    assert config["tolerable_failed_checkpoints"] == 10


def test_a_job_that_has_ended_is_still_told_of(driver):
    query = driver.start()
    driver.let_finish(query)

    job = driver.client.get("/jobs/counts")

    assert (job["state"], job["stillframe"]["outcome"]) == ("FINISHED", "finished")
    assert job["end-time"] >= job["start-time"]
    assert job["isStoppable"] is False


def test_of_many_jobs_that_have_ended_the_last_twenty_are_kept(driver):
    def end(name):
        query, begin = driver.prepare(name, checkpointLocation="/dev/null/nowhere")
        begin()
        with pytest.raises(JobFailed):
            query.awaitTermination(60)

    for number in range(23):
        end(f"job-{number}")
    driver.prepare("the-next")

    names = [job["name"] for job in driver.client.get("/jobs/overview")["jobs"]]
    assert names == [*(f"job-{number}" for number in range(3, 23)), "the-next"]


def test_a_job_started_again_takes_the_place_of_the_one_that_ended(driver):
    first = driver.start()
    first.stop()
    second = driver.start()

    (line,) = driver.client.get("/jobs/overview")["jobs"]

    assert line["state"] == "RUNNING"
    assert driver.client.get("/jobs/counts")["stillframe"]["run-id"] == second.runId


def test_the_document_names_every_path_once_and_who_needs_the_token(quiet):
    driver, _ = quiet

    document = driver.client.get("/openapi.json")

    assert document["openapi"].startswith("3.1")
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    ids = [operation["operationId"] for _, _, operation in operations]
    assert len(set(ids)) == len(ids) == 35
    for method, path, operation in operations:
        tells_secrets = path.endswith(("/logs", "/state", "/diffs/{triggerid}"))
        assert bool(operation["security"]) == (method != "get" or tells_secrets)
        named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))


def test_head_is_answered_as_get_without_the_body(quiet):
    driver, _ = quiet

    got, head = driver.client.ask("GET", "/jobs"), driver.client.ask("HEAD", "/jobs")

    assert (head.status, head.text) == (200, "")
    assert head.headers["Content-Length"] == got.headers["Content-Length"] == str(len(got.text))


def test_several_clients_are_answered_at_once_and_on_one_connection_each(quiet):
    import http.client
    from concurrent.futures import ThreadPoolExecutor

    driver, _ = quiet

    def ask_often(_):
        connection = http.client.HTTPConnection("127.0.0.1", driver.server.port, timeout=60)
        try:
            answers = []
            for path in ("/jobs", "/jobs/nobody", "/jobs/counts") * 5:
                connection.request("GET", path)
                own_port = connection.sock.getsockname()[1]
                answer = connection.getresponse()
                answer.read()
                answers.append((answer.status, own_port))
            return answers
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(ask_often, range(4)):
            assert [status for status, _ in answers] == [200, 404, 200] * 5
            assert len({port for _, port in answers}) == 1


def test_the_answer_tells_nothing_of_the_interpreter(quiet):
    driver, _ = quiet

    said = driver.client.ask("GET", "/jobs")

    assert said.headers["Server"] == "stillframe"
    assert not any(name.lower().startswith("access-control") for name in said.headers)
    assert os.path.sep + "site-packages" not in said.text
