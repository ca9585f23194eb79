"""The playground as a person uses it: one process, driven over HTTP, ended by Ctrl-C.

The tour from its first to its last step is in `make soak`; here are three steps of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from stillframe.cli.last_steps import descendants_of
from stillframe.errors import StorageError
from stillframe.playground.checkpoints import Checkpoints
from stillframe.playground.scoreboard import Scoreboard
from stillframe.playground.tour import Result
from stillframe.playground.truth import Truth, click_source
from stillframe.processes import await_ended

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
STEP_SECONDS_MAX = 600.0
"""A step starts jobs several times, and others use the machine: seconds here are minutes there."""


@dataclass
class Playing:
    process: subprocess.Popen[str]
    root: Path
    url: str
    token: str

    def ask(self, path: str, body: dict[str, Any] | None = None, token: str = "") -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def refusal(self, path: str, body: dict[str, Any], token: str = "") -> int:
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.ask(path, body, token)
        with refused.value:
            return refused.value.code

    def step(self, number: int) -> dict[str, Any]:
        """Run one step of the tour; what came of it."""
        self.ask("/playground/tour", {"step": number}, self.token)

        def result() -> dict[str, Any] | None:
            told = self.ask("/playground")
            is_over = told["busy"] is None
            return told["tour"]["steps"][number - 1]["result"] if is_over else None

        return self.await_answer(result)

    def await_answer(self, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + STEP_SECONDS_MAX
        while not (found := ask()):
            assert time.monotonic() < deadline, self.ask("/playground")
            threading.Event().wait(0.1)
        return found


@pytest.fixture(scope="module")
def playing(request: pytest.FixtureRequest) -> Iterator[Playing]:
    command = [
        *(sys.executable, "-m", "stillframe", "playground", "--json"),
        *("--master", "local[4]", "--checkpoint-interval", "1"),
    ]
    failed_before = request.session.testsfailed
    told: dict[str, Any] = {}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONFAULTHANDLER": "1"}
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said = json.loads(line)
            told[said["kind"]] = said
            if said["kind"] == "page":
                break
        assert "page" in told, told
        page = told["page"]
        yield Playing(process, Path(told["start"]["directory"]), page["url"], page["token"])
    finally:
        below = descendants_of(process.pid)
        has_failed = "page" not in told or request.session.testsfailed > failed_before
        if has_failed and "start" in told and process.poll() is None:
            _show_where_it_is(process.pid, Path(told["start"]["directory"]))
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in await_ended(below, 30.0):
            os.kill(pid, signal.SIGKILL)


def _show_where_it_is(supervisor: int, root: Path) -> None:
    """What every thread of the supervisor and its driver does, and the driver's log."""
    drivers = [
        pid
        for pid in descendants_of(supervisor)
        if b"stillframe.playground.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in [*drivers, supervisor]:  # both say it as their last word
        os.kill(pid, signal.SIGABRT)
        await_ended([pid], 10.0)
    print((root / "driver.log").read_text(errors="replace")[-40_000:])


def test_the_board_is_exact_and_says_up_to_which_checkpoint(playing):
    told = playing.ask("/playground")
    assert told["score"]["exact"]
    assert told["score"]["ours"]["rows"] > 0
    assert told["score"]["checkpoint"] >= 1
    assert told["executor_off"]
    assert told["settings"]["mode"] == "exactly-once"


def test_the_page_shows_the_job_of_its_driver(playing):
    def state() -> str:
        (job,) = playing.ask("/jobs/overview")["jobs"]
        assert job["name"] == "page-views"
        return str(job["state"])

    # A driver that is busy is asked for some seconds, and its files are shown instead.
    wait_until(lambda: state() == "RUNNING")
    for path in ("/", "/page/playground.js"):
        with urllib.request.urlopen(f"{playing.url}{path}", timeout=30) as answer:
            assert answer.status == 200


@pytest.mark.browser
def test_a_person_sees_the_board_and_breaks_the_job_by_keyboard_alone(playing, eyes):
    with eyes(playing.url) as tab:
        page = tab.page
        tab.open("/playground", token=playing.token)
        tab.sees(".board")

        def shown(figure):
            return page.locator(f"[data-figure={figure}]").inner_text()

        def is_the_boards():
            """As long as no newer checkpoint is committed between the two."""
            score = playing.ask("/playground")["score"]
            told = {name: score[name] for name in ("ours", "naive")}
            return (
                f"checkpoint {score['checkpoint']}," in page.locator(".board").inner_text()
                and shown("ours") == f"{told['ours']['rows']:,} exact ✓"
                and shown("naive").startswith(f"{told['naive']['rows']:,} 0 lost, ")
                and shown("state") == "exact ✓"
                and all(f"{app} {of['state']:,} = ✓" in page.locator(".apps").inner_text()
                        for app, of in score["apps"].items())
            )  # fmt: skip

        wait_until(is_the_boards)
        commands = page.locator(".breaks code").all_inner_texts()
        assert [f"kill -9 {pid}" for pid in playing.ask("/playground")["slots"]] == commands[:2]
        assert page.locator("[data-break=executor]").is_disabled()
        assert "one process" in tab.sees(".breaks", "Kill executor")
        tab.picture("playground")

        before = playing.ask("/playground")["attempt"]
        page.locator("[data-break=slot-1]").focus()
        page.keyboard.press("Enter")
        assert "if the job goes back to checkpoint" in tab.sees("p[lang=en]", "kill_slot:")
        tab.sees(".board", f"attempt {before + 1}.")
        assert shown("ours").endswith("exact ✓")

        page.locator("[data-step='1'] button").focus()
        page.keyboard.press("Enter")
        result = tab.sees("[data-step='1'] .result")
        assert "as predicted" in result
        assert "exact at checkpoint" in result
        tab.picture("playground-step")

        # The whole tour: from button to button, in the order of its steps.
        steps = playing.ask("/playground")["tour"]["steps"]
        page.locator("[data-tour=all]:enabled").focus()
        reached: list[str] = []
        while len(reached) < 60 and "12" not in reached:
            page.keyboard.press("Tab")
            reached += page.evaluate(
                "[document.activeElement.closest('[data-step] > button')?.parentElement"
                ".dataset.step ?? '']"
            )
        wanted = [str(each["number"]) for each in steps if not each["off"]]
        assert [each for each in reached if each] == wanted
        for width, scheme in itertools.product((1440, 320), ("light", "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            tab.axe_finds_nothing()
        page.get_by_role("button", name="切换为中文").press("Enter")
        names = ["app", "page", "views", "Stillframe", "UTC", "PID"]
        assert tab.latin_words(set(names)) == []


def test_nothing_is_broken_without_the_token(playing):
    assert playing.refusal("/playground/actions", {"action": "kill_driver"}) == 401
    assert playing.refusal("/playground/tour", {"step": 1}) == 401
    unknown = {"action": "kill_everything"}
    assert playing.refusal("/playground/actions", unknown, playing.token) == 400


def test_the_naive_sink_doubles_what_was_predicted_and_ours_nothing(playing):
    result = playing.step(3)
    assert result["is_right"], result
    assert "ours +0" in result["observed"]


def test_counts_go_wrong_without_alignment_as_predicted_and_are_exact_after_the_savepoint(playing):
    result = playing.step(7)
    assert result["is_right"], result
    assert "+" in result["predicted"]


@pytest.mark.browser
def test_a_board_that_is_told_a_wrong_truth_is_red(playing, eyes):
    checkpoints = Checkpoints(playing.root / "checkpoints")
    newest = playing.ask("/playground")["score"]["checkpoint"]
    output = max(playing.root.glob("out-*"))
    wrong = Scoreboard(Truth(click_source(seed=1)), checkpoints, output, {})

    def score() -> Any:
        retained = checkpoints.retained()
        with contextlib.suppress(StorageError):  # there are newer ones: it has just been deleted
            return wrong.look(retained[0]) if retained[0] >= newest else None

    found = playing.await_answer(score)
    assert not found.is_exact
    assert found.surplus
    # This output begins at the savepoint of the step before: from the start on much is missing.
    assert found.ours.lost > 0
    # As the page would be told of it.
    told = playing.ask("/playground") | {"score": found.to_json()}
    told["tour"]["steps"][0]["result"] = asdict(Result("exact", "WRONG", False))
    with eyes(playing.url) as tab:
        tab.page.route("**/playground", lambda route: route.fulfill(json=told))
        tab.open("/playground", token=playing.token)
        for figure in ("ours", "state"):
            assert "✕" in tab.sees(f"[data-figure={figure}] .verdict.bad")
        assert "not as predicted ✕" in tab.sees("[data-step='1'] .problem .verdict.bad")
        tab.picture("playground-wrong")


def test_ctrl_c_leaves_no_process_port_or_directory_behind(playing):
    below = descendants_of(playing.process.pid)
    assert below
    playing.process.send_signal(signal.SIGINT)
    assert playing.process.wait(120) == 130
    assert await_ended(below, 60.0) == []
    assert not playing.root.exists()
    assert not playing.root.with_suffix(".lock").exists()
    host, port = playing.url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
