"""The same page wherever it comes from: a driver, `stillframe history` beside it, and after it."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.request
from pathlib import Path

import pytest
from eyes import JOB, FlowingDriver, OpenEyes, job_route

from stillframe.coordinator.query import Query
from stillframe.rest.history_server import HistoryServer
from stillframe.rest.registry import DRIVER_FILE

pytestmark = pytest.mark.browser

OWN_TOKEN = "a-token-of-the-history"
_AGE = "(await import('/page/live.js')).clock.value.ms - Date.now()"


def until_answered(root: Path) -> float:
    """Seconds from nothing to what a driver that is gone has left."""
    began = time.monotonic()
    with contextlib.closing(HistoryServer(str(root), 0, OWN_TOKEN, frozenset())) as history:
        for path in ("/jobs/overview", f"/jobs/{JOB}", f"/jobs/{JOB}/checkpoints"):
            assert json.load(urllib.request.urlopen(f"{history.url}{path}", timeout=30))
        return time.monotonic() - began


def test_history_shows_what_the_driver_shows_and_what_a_killed_driver_has_left(
    driver: FlowingDriver, query: Query, eyes: OpenEyes, tmp_path: Path
) -> None:
    with contextlib.closing(HistoryServer(driver.location, 0, OWN_TOKEN, frozenset())) as history:
        texts = [
            urllib.request.urlopen(f"{url}/page/main.js", timeout=30).read()
            for url in (driver.url, history.url)
        ]
        assert texts[0] == texts[1]
        shown = []
        for url, token in ((driver.url, None), (history.url, OWN_TOKEN)):
            with eyes(url) as tab:
                tab.open("/", **({} if token is None else {"token": token}))
                tab.sees("tbody tr", JOB)
                tab.page.evaluate(f"location.hash = '#{job_route(JOB)}'")
                tab.is_live()
                tab.sees(".happened")
                assert tab.sees(".sentence[data-code]")
                shown.append(
                    [
                        tab.page.locator(each).all_text_contents()
                        for each in (
                            "h2",
                            ".tile dt",
                            ".tabs a",
                            ".orders button",
                            "svg .node-name",
                        )
                    ]
                )
        assert shown[0] == shown[1]

    # A driver that is killed leaves its files, and word of where it was.
    root = tmp_path / "left"
    shutil.copytree(driver.location, root, symlinks=True)
    place = next(root.glob(f"{JOB}*"))
    word = json.loads((place / DRIVER_FILE).read_text())
    (place / DRIVER_FILE).write_text(json.dumps(word | {"url": "http://127.0.0.1:9", "pid": 1}))
    assert min(until_answered(root) for _ in range(3)) <= 1.0, "others use this machine too"
    with (
        contextlib.closing(HistoryServer(str(root), 0, OWN_TOKEN, frozenset())) as history,
        eyes(history.url) as tab,
    ):
        tab.open("/", token=OWN_TOKEN)
        assert "no driver" in tab.sees("tbody tr", JOB)
        tab.open(job_route(JOB), token=OWN_TOKEN)
        assert "No driver runs it" in tab.sees(".sentence[data-code=no-driver]")
        assert tab.page.locator(".orders button").count() == 0
        assert "from its files" in tab.sees(".live")
        assert abs(tab.page.evaluate(f"async () => {_AGE}")) < 60_000
        tab.pictures("no-driver")
        tab.open(job_route(JOB, "checkpoints"), token=OWN_TOKEN)
        told = urllib.request.urlopen(f"{history.url}/jobs/{JOB}/checkpoints", timeout=30)
        counts = json.load(told)["counts"]
        assert tab.sees("[data-count=completed] strong") == str(counts["completed"])
        tab.sees(".chart canvas")
        tab.page.locator("tbody tr a").first.click()
        tab.sees("[data-fact=took]", "ms")
        tab.pictures("no-driver-checkpoint")
        said = {
            "recovery": "never failed",
            "state": "aggregates (50 rows",
            "logs": "Slots send warnings",
            "settings": str(root),
        }
        for view, text in said.items():
            tab.open(job_route(JOB, view), token=OWN_TOKEN)
            tab.sees("main", text)
            tab.pictures(f"no-driver-{view}")
