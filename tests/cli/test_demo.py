"""The demo as a newcomer runs it, and what it says when the proof fails."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from stillframe.cli.comparison import Comparison
from stillframe.cli.demo import JOB_FILE, Demo, _conclude, _say_failed
from stillframe.cli.lines import Lines
from stillframe.runtime.scratch import Scratch

EXACT = Comparison(records=1_000, apps=10, lost=0, duplicated=0, differences=())
EVENTS = [
    r"attempt \d+ starts from the beginning",
    r"waiting for 2 slots.*",
    r"slots running: 0 \(pid \d+\), 1 \(pid \d+\)",
    r"checkpoint \d+ complete, \d+ ms, [\d.]+ [KM]?B",
    r"checkpoint \d+ failed: .*",
    r"kill -9 slot \d+ \(pid \d+\)",
    r"attempt \d+ failed: .*; restarting in 0.1 s",
    r"restored checkpoint \d+, replaying from partition-.*",
    r"job finished",
]


@pytest.fixture
def chosen(tmp_path: Path) -> Demo:
    return Demo(records=1_000, kills=3, parallelism=2, seed=7, scratch=Scratch(tmp_path))


def concluded(chosen: Demo, found: Comparison, kills_done: int) -> tuple[bool, list[str]]:
    out = io.StringIO()
    is_pass = _conclude(chosen, found, kills_done, Lines(as_json=False, out=out))
    return is_pass, out.getvalue().splitlines()


def test_an_exact_output_ends_in_the_promised_line(chosen):
    assert concluded(chosen, EXACT, 3) == (
        True,
        [
            "exactly-once: PASS  1000 records, 10 apps, 3 kills survived, 0 lost, 0 duplicated",
        ],
    )


def test_a_difference_ends_in_a_line_that_says_fail_after_the_difference_itself(chosen, tmp_path):
    found = Comparison(1_000, 10, lost=2, duplicated=1, differences=("click 5 is missing",))
    is_pass, said = concluded(chosen, found, 3)
    assert not is_pass
    assert said[0] == "click 5 is missing"
    assert str(tmp_path) in said[1]
    assert "stillframe demo --records=1000 --kills=3 --parallelism=2 --seed=7" in said[1]
    assert said[-1].startswith(
        "exactly-once: FAIL  1000 records, 10 apps, 3 kills survived, 2 lost"
    )


def test_a_wrong_count_alone_is_a_fail(chosen):
    found = Comparison(1_000, 10, lost=0, duplicated=0, differences=("a count is wrong",))
    is_pass, said = concluded(chosen, found, 3)
    assert not is_pass
    assert said[-1].startswith("exactly-once: FAIL  ")


def test_fewer_kills_than_promised_are_no_proof(chosen):
    is_pass, said = concluded(chosen, EXACT, 2)
    assert not is_pass
    assert "after 2 of 3 kills" in said[-1]


def test_a_job_that_fails_is_a_fail(chosen):
    out = io.StringIO()
    assert not _say_failed(chosen, "job 'page-views' failed", Lines(as_json=False, out=out))
    assert out.getvalue().splitlines()[-1] == "exactly-once: FAIL  job 'page-views' failed"


def test_the_job_lasts_long_enough_for_its_kills(chosen, tmp_path):
    assert chosen.records / chosen.records_per_second == pytest.approx(16.0)
    more = Demo(records=1_000, kills=10, parallelism=4, seed=7, scratch=Scratch(tmp_path))
    assert more.records / more.records_per_second > 40


def test_the_job_file_is_short_and_an_ordinary_script():
    script = JOB_FILE.read_text()
    assert len(script.splitlines()) < 40
    assert "SparkSession.builder" in script


def test_the_transcript_of_the_readme_has_the_lines_that_the_demo_prints():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (shown,) = re.findall(r"^```\n(starting Spark.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    lines = [line for line in shown.splitlines()[1:-2] if line != "…"]
    for line in lines:
        assert any(re.fullmatch(event, line) for event in EVENTS), line
    not_always = (r"waiting for", r"checkpoint \d+ failed")
    for event in EVENTS:
        if not event.startswith(not_always):
            assert any(re.fullmatch(event, line) for line in lines), event


@pytest.mark.spark
def test_the_demo_kills_a_slot_and_proves_that_nothing_was_lost(command, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "stillframe-demo-killed").mkdir()  # of one that nobody holds the lock of any more
    (tmp_path / "stillframe-demo-killed.lock").touch()
    done = command("demo", "--records", "300000", "--kills", "1", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    before, after = done.stdout.split("starting Spark")
    assert "still = stillframe.on(spark)" in before
    lines = after.splitlines()[1:]
    assert (
        lines[-1]
        == "exactly-once: PASS  300000 records, 1000 apps, 1 kills survived, 0 lost, 0 duplicated"
    )
    for line in lines[:-2]:
        assert any(re.fullmatch(event, line) for event in EVENTS), line
    story = "\n".join(lines)
    assert re.search(r"complete.*kill -9 slot.*failed.*restored checkpoint.*PASS", story, re.S)
    assert not list(tmp_path.glob("stillframe-demo-*"))
