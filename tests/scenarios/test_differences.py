"""`stillframe diff`: what two snapshots differ in, against what was written into them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from stillframe.cli.main import main


@pytest.fixture(params=["fs", "rocksdb"])
def two(page_views, request):
    """Two savepoints of one job: of 500 records, and of 1,000."""
    gate = page_views.gate("go-on")
    source = page_views.three_parts(gate, page_views.gate("never"), splits=1)
    running = page_views.start(
        page_views.plan(source), stateBackend=request.param, checkpointInterval="1 hour"
    )
    running.wait_for_records(500)
    first = running.query.savepoint(str(page_views.home / "first"))
    gate.open()
    running.wait_for_records(1_000)
    second = running.query.savepoint(str(page_views.home / "second"))
    return first, second


def counts(records):
    return Counter(f"app-{number % 17}" for number in records)


def told(capsys, *arguments):
    code = main(["diff", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)["states"]


def test_keys_that_have_changed_are_counted_and_some_shown(two, capsys):
    before, after = counts(range(500)), counts(range(1_000))

    code, [count] = told(capsys, *two, "--operator", "count", "--rows", "100")

    assert code == 1
    assert (count["added"], count["changed"], count["gone"]) == (0, 17, 0)
    seen = {
        each["key"]["app_id"]: (*each["before"].values(), *each["after"].values())
        for each in count["examples"]
    }
    assert seen == {app: (before[app], after[app]) for app in after}


def test_a_snapshot_does_not_differ_from_itself(two, capsys):
    code, states = told(capsys, two[0], two[0])

    assert code == 0
    assert all(state["added"] == state["changed"] == state["gone"] == 0 for state in states)


def test_in_words_it_is_a_line_for_each_state_and_key(two, capsys):
    assert main(["diff", *two, "--rows", "1"]) == 1

    said = capsys.readouterr().out
    assert "0 added, 17 changed, 0 gone, 0 the same" in said
    assert said.count("  ~ {'app_id': 'app-") == 1


def test_a_state_that_nobody_has_is_said(two, capsys):
    assert main(["diff", *two, "--operator", "nobody"]) != 0

    assert "neither snapshot has such a state" in capsys.readouterr().err
