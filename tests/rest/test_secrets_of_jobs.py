"""What passes through a job, its states and its log, is told to those alone who have the token."""

from __future__ import annotations

import json
import logging

import pytest
from served_jobs import TOKEN

from stillframe.cli.main import main
from stillframe.logs import About, slot_log

STATE = "/jobs/counts/state"
ANY_ID = "0123456789abcdef0123456789abcdef"


def ask(driver, path):
    said = driver.client.ask("GET", path, token=TOKEN)
    assert said.status == 200, said.text
    return said.json


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", STATE),
        ("GET", "/jobs/counts/logs"),
        ("POST", "/jobs/counts/diffs"),
        ("GET", f"/jobs/counts/diffs/{ANY_ID}"),
    ],
)
def test_without_the_token_nothing_is_told_on_this_machine_either(quiet, method, path):
    driver, _ = quiet

    assert driver.client.ask(method, path, {}).status == 401


def test_the_token_is_in_no_line_of_the_log_and_in_no_answer(quiet, caplog):
    driver, _ = quiet
    for name in (None, "stillframe", "uvicorn", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    logging.getLogger("stillframe.rest").debug("it is heard")
    asked = [
        ("GET", "/jobs/counts/logs", None, 200),
        ("GET", f"/jobs/counts/logs?token={TOKEN}", None, 400),
        ("GET", "/nothing", None, 404),
        ("POST", "/jobs/counts/diffs", {"a": "b"}, 400),
        ("POST", "/jobs/counts/diffs", b"{torn", 400),
        ("GET", f"/jobs/counts/diffs/{ANY_ID}", None, 404),
    ]

    said = [driver.client.ask(method, path, body, TOKEN) for method, path, body, _ in asked]
    wrong = f"{TOKEN}-and-more"
    refused = [driver.client.ask(method, path, body, wrong) for method, path, body, _ in asked]

    assert [each.status for each in said] == [status for *_, status in asked]
    assert {each.status for each in refused} <= {400, 401, 404}
    assert not [each for each in [*said, *refused] if TOKEN in f"{each.headers}{each.text}"]
    assert "it is heard" in caplog.text
    assert TOKEN not in caplog.text


def test_a_key_is_found_while_the_job_runs(counting):
    driver, _, (_, newest) = counting

    found = ask(driver, f"{STATE}?uid=count&key=app-1")

    assert found["checkpoint"] == newest
    assert [row["key"] for row in found["rows"]] == [{"app_id": "app-1"}]
    assert found["rows"][0]["value"]["count"] == 30
    assert found["rows"][0]["key_group"] == found["key_group"]
    assert found["subtask"] in (0, 1)


def test_two_checkpoints_are_compared(counting, until):
    driver, _, (first, second) = counting
    said = driver.client.change("POST", "/jobs/counts/diffs", {"a": first, "b": second})
    assert said.status == 202, said.text

    path = f"/jobs/counts/diffs/{said.json['request-id']}"
    until(lambda: ask(driver, path)["status"]["id"] == "COMPLETED")
    (state,) = ask(driver, path)["operation"]["states"]

    assert (state["uid"], state["changed"], state["added"], state["gone"]) == ("count", 0, 0, 0)


def test_the_command_shows_the_same_rows(counting, capsys):
    """In this process; what is asked over HTTP runs it in another one."""
    driver, _, (first, _) = counting
    place = f"{driver.location}/counts/chk-{first}-1"

    def said(*options):
        assert main(["inspect", place, "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    (state,) = said("--states")["states"]
    assert (state["uid"], state["operator"]) == ("count", "aggregate count(*) by app_id")
    rows = said("--operator=count", "--rows=3")
    assert (len(rows["rows"]), rows["more"], rows["key_group"]) == (3, True, None)
    assert said("--key=nobody")["rows"] == []
    assert main(["inspect", place, "--operator=nobody"]) == 1
    assert "there is no such state: say which" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_refused(quiet):
    driver, _ = quiet

    said = driver.client.ask("GET", f"{STATE}?checkpoint=999", token=TOKEN)

    assert said.status == 409
    assert said.error == "job 'counts' has no checkpoint 999 that is complete and retained"


# --- the log ---


def test_the_log_has_events_and_what_slots_have_said(quiet):
    driver, query = quiet
    of = About("counts", 2, slot=1)
    slot_log.handle(
        slot_log.makeRecord("x", logging.WARNING, "", 0, "late", (), None, extra=of.extra())
    )

    lines = ask(driver, "/jobs/counts/logs")["lines"]

    texts = [line["text"] for line in lines]
    completed = f"checkpoint {query.summary.last_checkpoint} complete"
    assert [text for text in texts if text.startswith(completed)]
    assert [line["number"] for line in lines] == sorted(line["number"] for line in lines)
    assert [
        (line["text"], line["level"], line["attempt"])
        for line in ask(driver, "/jobs/counts/logs?slot=1")["lines"]
    ] == [("late", "WARNING", 2)]
    last = lines[-1]["number"]
    before = ask(driver, f"/jobs/counts/logs?level=INFO&before={last}")["lines"]
    assert last not in [line["number"] for line in before]
