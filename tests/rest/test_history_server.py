"""`stillframe history`: a job's driver is asked where it answers, its files where not; and nobody
is asked, or told a token, whom only a file on the store names."""

from __future__ import annotations

import contextlib

import pytest
from followed_streams import Following
from served_jobs import TOKEN

from stillframe.rest.history_server import HistoryServer
from stillframe.rest.kept_jobs import KeptJob
from stillframe.rest.passing_on import driver_of
from stillframe.rest.registry import RegisteredJob, write_driver_file

OWN_TOKEN = "a-token-of-the-history"


@pytest.fixture
def history(driver):
    """A client of one that shows what the test's own driver runs."""
    (driver.home / "chk").mkdir(exist_ok=True)
    server = HistoryServer(driver.location, 0, OWN_TOKEN, frozenset())
    with contextlib.closing(server):
        yield type(driver.client)(server)


def at(url, pid=1, host="elsewhere"):
    return RegisteredJob("0" * 32, "counts", url, None, pid, host, None, 0)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8081", "http://[::1]:8081/", "http://localhost:1"]
)
def test_a_driver_of_this_machine_may_be_asked(url):
    assert driver_of(at(url), frozenset()) is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.example:8081",
        "http://127.0.0.1.evil.example:8081",
        "http://127.0.0.1@evil.example:8081",
        "http://127.0.0.1:8081@evil.example:8081",
        "http://localhost.:8081",
        "http://2130706433:8081",
        "https://127.0.0.1:8081",
        "http://127.0.0.1:8081/jobs",
        "http://127.0.0.1",
        "http://[::1",
        "file:///etc/passwd",
        "",
    ],
)
def test_nobody_else_is_asked_or_told_a_token(url):
    assert driver_of(at(url), frozenset({"driver.example"})) is None


def test_a_host_that_was_named_at_the_start_may_be_asked():
    asked = driver_of(at("http://Driver.example:8081"), frozenset({"driver.example"}))

    assert asked is not None
    assert (asked.host, asked.port) == ("driver.example", 8081)


def test_where_a_driver_answers_it_is_asked_with_the_token_of_whoever_asks(driver, history, until):
    driver.start()
    announced(driver, until)

    assert history.get("/jobs/counts")["state"] == "RUNNING"
    assert [job["state"] for job in history.get("/jobs/overview")["jobs"]] == ["RUNNING"]
    path = "/jobs/counts/checkpoints"
    assert history.ask("POST", path).status == 401
    assert history.ask("POST", path, token="a-token-of-nobody").status == 401
    said = history.ask("POST", path, token=TOKEN)
    assert said.status == 202
    assert history.outcome(f"{path}/{said.json['request-id']}") == {"checkpointId": 1}
    # Its own token opens what this user's registry has the driver's for.
    assert history.ask("POST", path, token=OWN_TOKEN).status == 202

    with Following(history.server.port, "/jobs/counts/events", token=TOKEN) as following:
        assert following.next("hello").data["job"]["name"] == "counts"
        driver.jobs[0].request_stop()
        assert following.next("job").data["state"] == "FINISHED"
    with Following(history.server.port, "/events") as following:
        (job,) = following.next("figures").data["jobs"]
        assert job["name"] == "counts"


def announced(driver, until):
    kept = KeptJob.at(driver.location, "counts")
    until(lambda: kept.driver() is not None)
    return kept


def test_where_none_answers_its_files_tell_what_they_know(driver, history, until):
    query = driver.start(fault=driver.die_once())
    query.checkpoint()
    kept = announced(driver, until)
    driver.let_finish(query)
    until(lambda: kept.driver() is None)
    # Of a driver that is gone and took nothing back: it is another machine's, for all one knows.
    write_driver_file(kept.store, at("http://evil.example:1"))

    details = history.get("/jobs/counts")
    assert (details["state"], details["stillframe"]["attempts"]) == ("FINISHED", 2)
    assert [vertex["parallelism"] for vertex in details["vertices"]] == [2, 2]
    told = history.get("/jobs/counts/checkpoints")
    number = told["latest"]["completed"]["id"]
    vertex = details["vertices"][0]["id"]
    assert history.get(f"/jobs/counts/checkpoints/details/{number}")["status"] == "COMPLETED"
    history.get(f"/jobs/counts/checkpoints/details/{number}/subtasks/{vertex}")
    (failure,) = history.get("/jobs/counts/exceptions")["exceptionHistory"]["entries"]
    assert "slot 0" in failure["stacktrace"]
    assert history.get("/jobs/counts/diagnosis")["code"] == "ended"

    for method, path in (("GET", "/jobs/counts/config"), ("POST", "/jobs/counts/checkpoints")):
        said = history.ask(method, path, token=OWN_TOKEN)
        assert said.status == 409
        assert said.error.startswith("no driver of job 'counts' answers")
    assert history.ask("GET", "/jobs/counts/state").status == 401
    assert history.ask("GET", "/jobs/nobody").status == 404


def test_a_damaged_job_is_named_and_the_others_shown(driver, history, until):
    for name in ("good", "bad"):
        driver.let_finish(driver.start(name))
    log = driver.home / "chk" / "bad" / "log"
    for entry in log.iterdir():
        entry.write_bytes(b"torn")

    jobs = {job["name"]: job["state"] for job in history.get("/jobs/overview")["jobs"]}

    assert jobs == {"good": "FINISHED", "bad": "UNREADABLE"}
    sentence = history.get("/jobs/bad/diagnosis")["sentence"]
    assert sentence.startswith("Its files cannot be read: ")
