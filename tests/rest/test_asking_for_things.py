"""Checkpoints, savepoints, stops, cancels and rescalings that are asked for over HTTP."""

from __future__ import annotations

import threading

import pytest

from stillframe.coordinator.located import locate
from stillframe.rest.operations import KEPT_MAX, RUNNING_MAX, Operations
from stillframe.rest.refusals import Refused

ANY_ID = "0123456789abcdef0123456789abcdef"


def begun(said) -> str:
    """The number to ask with."""
    assert said.status == 202, said.text
    return said.json["request-id"]


def test_a_checkpoint_is_taken_and_its_number_told(driver):
    query = driver.start()

    number = begun(driver.client.change("POST", "/jobs/counts/checkpoints", {}))

    taken = driver.client.outcome(f"/jobs/counts/checkpoints/{number}")
    assert taken == {"checkpointId": query.summary.last_checkpoint}


def test_a_body_may_be_left_out_where_nothing_in_it_is_needed(driver):
    driver.start()

    number = begun(driver.client.change("POST", "/jobs/counts/checkpoints"))

    assert "checkpointId" in driver.client.outcome(f"/jobs/counts/checkpoints/{number}")


def test_a_savepoint_is_taken_and_the_job_runs_on(driver):
    query = driver.start()
    directory = str(driver.home / "savepoint")

    number = begun(
        driver.client.change("POST", "/jobs/counts/savepoints", {"target-directory": directory})
    )

    assert driver.client.outcome(f"/jobs/counts/savepoints/{number}") == {"location": directory}
    assert locate(directory).manifest.kind == "savepoint"
    assert query.isActive


def test_a_savepoint_that_cannot_be_taken_is_told_and_the_job_runs_on(driver):
    query = driver.start()
    taken = driver.home / "taken"
    taken.mkdir()
    (taken / "letter").write_text("dear")

    number = begun(
        driver.client.change("POST", "/jobs/counts/savepoints", {"target-directory": str(taken)})
    )

    cause = driver.client.outcome(f"/jobs/counts/savepoints/{number}")["failure-cause"]
    assert cause["class"] == "StillframeError"
    assert cause["stack-trace"].startswith(f"{taken} is not empty: give a directory")
    assert query.isActive


@pytest.mark.parametrize("drain", [False, True])
def test_a_job_is_stopped_with_a_savepoint(driver, drain):
    query = driver.start()
    directory = str(driver.home / "savepoint")
    body = {"targetDirectory": directory, "drain": drain}

    number = begun(driver.client.change("POST", "/jobs/counts/stop", body))

    assert driver.client.outcome(f"/jobs/counts/savepoints/{number}") == {"location": directory}
    assert query.summary.outcome == ("finished" if drain else "stopped")


def test_a_job_is_stopped_without_a_savepoint(driver):
    query = driver.start()

    number = begun(driver.client.change("POST", "/jobs/counts/stop"))

    assert driver.client.outcome(f"/jobs/counts/savepoints/{number}") == {"location": None}
    assert query.summary.outcome == "stopped"


def test_a_savepoint_with_cancel_job_stops_the_job(driver):
    query = driver.start()
    body = {"target-directory": str(driver.home / "savepoint"), "cancel-job": True}

    number = begun(driver.client.change("POST", "/jobs/counts/savepoints", body))

    assert "location" in driver.client.outcome(f"/jobs/counts/savepoints/{number}")
    assert query.summary.outcome == "stopped"


def test_a_job_is_cancelled(driver):
    query = driver.start()

    said = driver.client.change("PATCH", "/jobs/counts?mode=cancel")

    assert (said.status, said.json) == (202, {})
    query.awaitTermination(60)
    assert driver.client.get("/jobs/counts")["state"] == "CANCELED"


def test_a_job_is_rescaled_and_its_downtime_told(driver):
    query = driver.start()

    number = begun(driver.client.change("PATCH", "/jobs/counts/rescaling?parallelism=1"))

    told = driver.client.outcome(f"/jobs/counts/rescaling/{number}")
    assert (told["parallelism-before"], told["parallelism"]) == (2, 1)
    assert told["downtime-ms"] >= 0
    job = driver.client.get("/jobs/counts")
    assert [vertex["parallelism"] for vertex in job["vertices"]] == [1, 1]
    driver.let_finish(query)
    assert query.summary.outcome == "finished"


def test_a_parallelism_that_cannot_be_is_told_and_the_job_runs_on(driver):
    query = driver.start()

    number = begun(driver.client.change("PATCH", "/jobs/counts/rescaling?parallelism=1000"))

    cause = driver.client.outcome(f"/jobs/counts/rescaling/{number}")["failure-cause"]
    assert "1000" in cause["stack-trace"]
    assert query.isActive


# --- twice, too late, of another job


def test_asked_for_twice_under_the_same_number_it_is_done_once(driver):
    driver.start()
    body = {"target-directory": str(driver.home / "savepoint"), "triggerId": ANY_ID}

    first = begun(driver.client.change("POST", "/jobs/counts/savepoints", body))
    second = begun(driver.client.change("POST", "/jobs/counts/savepoints", body))

    assert first == second == ANY_ID
    assert "location" in driver.client.outcome(f"/jobs/counts/savepoints/{ANY_ID}")
    again = begun(driver.client.change("POST", "/jobs/counts/savepoints", body))
    assert "location" in driver.client.outcome(f"/jobs/counts/savepoints/{again}"), (
        "a second savepoint would have found the directory taken"
    )


def test_a_stop_that_is_asked_for_again_when_it_is_done_says_so_again(driver):
    driver.start()
    body = {"targetDirectory": str(driver.home / "savepoint"), "triggerId": ANY_ID.upper()}
    begun(driver.client.change("POST", "/jobs/counts/stop", body))
    done = driver.client.outcome(f"/jobs/counts/savepoints/{ANY_ID}")

    assert begun(driver.client.change("POST", "/jobs/counts/stop", body)) == ANY_ID
    assert driver.client.outcome(f"/jobs/counts/savepoints/{ANY_ID}") == done


def test_something_else_under_the_same_number_is_refused(driver):
    driver.start()
    begun(driver.client.change("POST", "/jobs/counts/stop", {"triggerId": ANY_ID}))
    other = {"target-directory": str(driver.home / "savepoint"), "triggerId": ANY_ID}

    said = driver.client.change("POST", "/jobs/counts/savepoints", other)

    assert said.status == 409
    assert "was used for something else before" in said.error


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/jobs/counts/checkpoints", None),
        ("POST", "/jobs/counts/savepoints", {"target-directory": "/nowhere/at/all"}),
        ("POST", "/jobs/counts/stop", None),
        ("PATCH", "/jobs/counts?mode=cancel", None),
        ("PATCH", "/jobs/counts/rescaling?parallelism=3", None),
    ],
)
def test_of_a_job_that_has_ended_nothing_can_be_asked(ended, method, path, body):
    said = ended.client.change(method, path, body)

    assert (said.status, said.error) == (409, "job 'counts' has been stopped already")


def test_a_number_is_asked_about_where_it_came_from_only(driver):
    driver.start()
    driver.start("others")
    number = begun(driver.client.change("POST", "/jobs/counts/checkpoints"))

    elsewhere = [
        driver.client.ask("GET", f"/jobs/{path}/{number}")
        for path in ("others/checkpoints", "counts/savepoints", "counts/rescaling")
    ]

    assert [said.status for said in elsewhere] == [404, 404, 404]
    assert number in elsewhere[0].error


def test_a_job_without_a_place_for_checkpoints_takes_none(driver):
    driver.prepare("bare", checkpointLocation=None, checkpointInterval=None)

    said = driver.client.change("POST", "/jobs/bare/checkpoints")

    assert (said.status, said.error) == (
        409,
        "job 'bare' has no checkpointLocation, so it can take no checkpoint",
    )


# --- bounds


def test_only_so_many_operations_run_and_are_remembered():
    operations, go_on = Operations(), threading.Event()

    def begin(number: int, do=lambda: {}) -> str:
        return operations.begin("job", "checkpoint", f"{number:032x}", {}, do, lambda: None)

    for number in range(RUNNING_MAX):
        begin(number, lambda: {"waited": go_on.wait(60)})
    with pytest.raises(Refused, match="8 operations are under way") as refused:
        begin(1000)
    assert refused.value.status == 429
    assert begin(0) == "0" * 32, "one that runs is found again, not begun"
    go_on.set()

    for number in range(1000, 1000 + KEPT_MAX):
        while True:
            try:
                begin(number)
                break
            except Refused:
                threading.Event().wait(0.01)
    assert len(operations._operations) == KEPT_MAX
    with pytest.raises(Refused, match="no checkpoint of this job has the trigger id"):
        operations.find("job", "checkpoint", "0" * 32)


def test_what_has_just_ended_is_waited_for_until_somebody_has_heard_it(until):
    """At the end of a process whose only job was stopped over HTTP."""
    operations, ends = Operations(), threading.Event()

    def stop():
        return {"waited": ends.wait(60)}

    number = operations.begin("job", "savepoint", None, {}, stop, lambda: None)
    operations.begin("job", "cancel", None, {}, lambda: {}, lambda: None)
    waiting = threading.Thread(target=operations.await_heard, args=(100.0,))
    waiting.start()
    ends.set()
    until(lambda: all(each.outcome for each in operations._operations.values()))
    assert waiting.is_alive()

    operations.find("job", "savepoint", number)

    waiting.join(60)
    assert not waiting.is_alive()


def test_an_operation_that_breaks_in_an_unexpected_way_is_over_too(until):
    operations = Operations()

    def do():
        raise ZeroDivisionError("oops")

    number = operations.begin("job", "checkpoint", None, {}, do, lambda: None)
    until(lambda: operations.find("job", "checkpoint", number) is not None)

    assert operations.find("job", "checkpoint", number).reason == "ZeroDivisionError: oops"


@pytest.mark.s3
def test_a_storage_that_does_not_answer_does_not_hold_the_job_up(
    driver, gateway, s3_bucket, s3_settings
):
    """It is asked before the job hears of it: meanwhile the job takes a checkpoint elsewhere."""
    patient = {**s3_settings, "fs.s3a.connection.request.timeout": "30s"}
    query = driver.start(**patient)
    gateway.stall()
    body = {"target-directory": f"s3://{s3_bucket}/savepoint"}

    number = begun(driver.client.change("POST", "/jobs/counts/savepoints", body))
    assert gateway.stalled.wait(60)
    assert query.checkpoint() is not None

    told = driver.client.get(f"/jobs/counts/savepoints/{number}")
    assert told["status"] == {"id": "IN_PROGRESS"}
    gateway.flow()
    done = driver.client.outcome(f"/jobs/counts/savepoints/{number}")
    assert done == {"location": f"s3://{s3_bucket}/savepoint"}
