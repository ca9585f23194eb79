"""What docs/rest-api.md says is true: its commands run, its table is the code's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stillframe.coordinator.located import locate
from stillframe.rest.routes import DOCUMENT_PATH, METRICS_PATH, ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "rest-api.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_command_of_the_page_runs(driver, tmp_path, monkeypatch, until):
    """As one script, in order, by somebody whose home is empty but for the registry."""
    monkeypatch.delenv("STILLFRAME_REGISTRY")
    monkeypatch.setenv("HOME", str(tmp_path))
    query = driver.start("page-views", parallelism="2")
    until(lambda: any((tmp_path / ".stillframe" / "jobs").glob("*.json")))
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    environment = {key: os.environ[key] for key in ("HOME", "PATH")}

    ran = subprocess.run(
        ["bash", "-eux", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert query.summary.outcome == "stopped"
    for day in ("monday", "tuesday"):
        assert locate(str(tmp_path / "savepoints" / day)).manifest.job == "page-views"


def test_the_table_of_requests_is_the_codes():
    told = re.findall(r"^\| `([A-Z]+) (/[^`]*)` \|", PAGE.read_text(), re.MULTILINE)

    assert told == [
        ("GET", "/"),
        ("GET", DOCUMENT_PATH),
        ("GET", METRICS_PATH),
        *((route.method, route.path) for route in ROUTES),
    ]
