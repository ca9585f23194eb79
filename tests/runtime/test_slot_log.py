"""What a slot logs is in its process's stderr with its names, and warnings are told the driver."""

from __future__ import annotations

import logging

from stillframe.logs import About
from stillframe.protocol.messages import Said, message_to_json, report_from_json
from stillframe.runtime.slot_log import logging_as_slot

log = logging.getLogger("stillframe")


def test_a_line_goes_to_stderr_and_a_warning_to_the_driver_too(capsys):
    with logging_as_slot(About("views", 2, slot=1), as_json=False) as slot_log:
        log.info("running")
        log.warning("late")
        (said,) = slot_log.said()
        assert list(slot_log.said()) == [], "it is told once"
    log.warning("of nobody")

    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("Z ")[2] for line in lines[:2]] == [
        "INFO views, attempt 2, slot 1: running",
        "WARNING views, attempt 2, slot 1: late",
    ]
    assert [(line.level, line.text) for line in said.lines] == [(logging.WARNING, "late")]
    assert not any("attempt 2" in line for line in lines[2:]), "the worker is another's now"


def test_of_very_many_warnings_the_driver_is_told_the_newest(capsys):
    with logging_as_slot(About("views", 2, slot=1), as_json=True) as slot_log:
        for number in range(1_000):
            log.warning("warning %d", number)
        (said,) = slot_log.said()

    assert len(said.lines) == 100
    assert said.lines[-1].text == "warning 999"
    assert isinstance(said, Said)
    assert report_from_json(message_to_json(said)) == said
