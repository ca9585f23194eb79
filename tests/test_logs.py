"""A log line is one line, and says what it is about."""

from __future__ import annotations

import json
import logging

import pytest

from stillframe.coordinator.history import AttemptFailed, History
from stillframe.logs import About, LogLines
from stillframe.rest.log_ring import LogRing


def record(text, of=None):
    made = logging.LogRecord("stillframe", logging.INFO, "", 0, text, (), None)
    made.created = 1763370000.123
    if of is not None:
        made.stillframe = of
    return made


AROUND = About("page-views", 3, slot=1)
OF = About(checkpoint=18, task="count")


def test_a_line_names_its_job_attempt_checkpoint_task_and_slot():
    line = LogLines(as_json=False, around=AROUND).format(record("it is slow", OF))

    assert line == (
        "2025-11-17T09:00:00.123Z INFO page-views, attempt 3, checkpoint 18, task count, slot 1:"
        " it is slow"
    )


def test_as_json_it_has_a_field_for_each():
    line = LogLines(as_json=True, around=AROUND).format(record("it is slow", OF))

    assert json.loads(line) == {
        "at": "2025-11-17T09:00:00.123Z",
        "level": "INFO",
        "job": "page-views",
        "attempt": 3,
        "checkpoint": 18,
        "task": "count",
        "slot": 1,
        "text": "it is slow",
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_what_has_several_lines_is_one(as_json):
    line = LogLines(as_json=as_json).format(record("one\ntwo"))

    assert "\n" not in line
    assert "one" in line
    assert "two" in line


def test_an_event_is_logged_with_what_it_is_about(caplog):
    history = History("page-views")
    with caplog.at_level(logging.INFO, "stillframe.events"):
        history.tell(AttemptFailed(2, "slot 0 was lost", 1.0))

    (logged,) = caplog.records
    assert logged.stillframe == About("page-views", 2)
    assert logged.levelno == logging.WARNING


def test_the_ring_has_the_newest_lines_of_a_job_and_those_of_nobody():
    ring = LogRing(lines_max=3)
    for job in ("other", None, "mine", "other", "mine"):
        ring.add(0, logging.INFO, About(job), f"of {job}")

    assert [line.text for line in ring.newest_first("mine")] == ["of mine", "of mine"]
    assert [line.text for line in ring.newest_first("other")] == ["of other"]


def test_listening_to_the_log_hides_no_warning(capsys, monkeypatch):
    """Python shows warnings on stderr only while there is no handler."""
    log, ring = logging.getLogger("stillframe.alone"), LogRing()
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [ring])

    log.warning("look here")

    assert [line.text for line in ring.newest_first("any")] == ["look here"]
    assert capsys.readouterr().err == "look here\n"
