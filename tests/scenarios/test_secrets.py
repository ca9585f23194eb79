"""A secret that somebody's error has in its text is told to nobody, of each kind of code."""

from __future__ import annotations

from collections import Counter

import pytest
from user_code_kinds import KINDS, RECORDS, Tells, plan_of, said

from stillframe.errors import DataError, JobFailed
from stillframe.secrets import Secret

VALUE = "it's-hunter-2"


def assert_hidden(running, home, caplog):
    told = [str(failure.to_json()) + str(failure) for failure in running.query.failures]
    told += [caplog.text, str(running.query.status), str(running.query.exception())]
    assert "no login as " in told[0]
    assert not [text for text in told if "hunter-2" in text]
    files = [file for file in home.rglob("*") if file.is_file()]
    assert not [file for file in files if b"hunter-2" in file.read_bytes()]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_may_heal_is_told_without_it(kind, page_views, caplog):
    trouble = Tells(ConnectionError, once=page_views.gate("raised"), secret=Secret(VALUE))
    running = page_views.start(plan_of(kind, page_views.home, trouble))
    running.finish()

    assert said(page_views.home) == Counter(range(RECORDS))
    assert_hidden(running, page_views.home, caplog)


@pytest.mark.parametrize("kind", ["source", "sink", "sink that prepares", "sink that commits"])
def test_an_error_of_ours_that_a_connector_raises_is_told_without_it(kind, page_views, caplog):
    trouble = Tells(DataError, secret=Secret(VALUE))
    running = page_views.start(plan_of(kind, page_views.home, trouble))
    with pytest.raises(JobFailed, match="no login as"):
        running.finish()

    assert_hidden(running, page_views.home, caplog)
