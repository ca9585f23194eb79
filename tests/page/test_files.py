"""What a browser gets, without a browser: complete, small, unchanged, and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args

import pytest

import stillframe
from stillframe.clock import SystemClock
from stillframe.protocol.diagnosis import Code
from stillframe.rest.api import Answer, Api, Request
from stillframe.rest.jobs import ServedJobs
from stillframe.rest.operations import Operations

PAGE = Path(stillframe.__file__).parent / "page"
ROOT = Path(__file__).parent.parent.parent
OWN = sorted(PAGE.glob("*.js"))
CATALOGUES = {name: json.loads((PAGE / f"{name}.json").read_text()) for name in ("en", "zh")}
BYTES_MAX = 150_000


def asked(path: str, method: str = "GET", bind_host: str = "127.0.0.1") -> Answer:
    jobs = ServedJobs(SystemClock(), lambda _job, _event: None)
    api = Api(jobs, Operations(), "a-token", bind_host, bind_host == "127.0.0.1")
    answer = api.answer(Request(method, path, host="127.0.0.1:1"))
    assert isinstance(answer, Answer)
    return answer


def test_the_page_is_small() -> None:
    files = [path for path in PAGE.rglob("*") if path.is_file()]

    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= BYTES_MAX


def test_vendored_files_are_those_that_were_fetched() -> None:
    lines = (PAGE / "vendor" / "SHA256SUMS").read_text().splitlines()
    told = {name: digest for digest, name in (line.split() for line in lines)}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (PAGE / "vendor").iterdir()
        if path.name != "SHA256SUMS"
    }

    assert found == told


def test_both_languages_have_the_same_words_with_the_same_places() -> None:
    def places(words: dict[str, str]) -> dict[str, set[str]]:
        return {key: set(re.findall(r"\{(\w+)\}", text)) for key, text in words.items()}

    assert places(CATALOGUES["en"]) == places(CATALOGUES["zh"])


def test_every_word_that_is_asked_for_is_there() -> None:
    texts = [path.read_text() for path in OWN]
    keys = {key for text in texts for key in re.findall(r"\b(?:t|words)\('([^']+)'", text)}

    assert keys - CATALOGUES["en"].keys() == set()


def test_every_sentence_of_a_job_has_words() -> None:
    assert {f"diagnosis.{code}" for code in get_args(Code)} <= CATALOGUES["zh"].keys()


@pytest.mark.parametrize(
    "pattern", [r"innerHTML", r"\beval\(", r"new Function", r"\sstyle=", r"document\.cookie"]
)
def test_nothing_of_our_own_makes_markup_or_code_of_text(pattern: str) -> None:
    found = [
        path.name for path in [*OWN, PAGE / "index.html"] if re.search(pattern, path.read_text())
    ]

    assert found == []


def test_the_page_is_served_with_what_browsers_have_to_know() -> None:
    answer = asked("/")

    assert (answer.status, answer.body) == (200, (PAGE / "index.html").read_text())
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert policy.endswith("frame-ancestors 'none'; require-trusted-types-for 'script'")
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_all_its_files_are_served_and_no_others() -> None:
    names = [
        path.relative_to(PAGE).as_posix()
        for path in PAGE.rglob("*")
        if path.is_file() and path.name not in ("index.html", "SHA256SUMS")
    ]

    assert {name: asked(f"/page/{name}").status for name in names} == dict.fromkeys(names, 200)
    for other in (
        "/page/",
        "/page/../rest/api.py",
        "/page/%2e%2e/rest/api.py",
        "/page//etc/passwd",
    ):
        assert asked(other).status == 404, other
    assert asked("/", method="POST").status == 405


def test_a_driver_on_all_addresses_gives_the_page_to_everybody_and_jobs_to_nobody() -> None:
    assert asked("/page/main.js", bind_host="0.0.0.0").status == 200
    assert asked("/jobs", bind_host="0.0.0.0").status == 401


def test_the_wheel_has_all_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        inside = set(packed.namelist())

    files = [path for path in PAGE.rglob("*") if path.is_file()]
    assert {f"stillframe/page/{path.relative_to(PAGE).as_posix()}" for path in files} <= inside
