"""Processes are waited for: children, strangers, those that have ended, those that do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stillframe import processes
from stillframe.processes import await_ended, kill

WAIT_SECONDS_MAX = 60.0
STARTS_ANOTHER = """\
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture(params=["watched", "looked at"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "looked at":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("this system gives no descriptors for processes")
    return str(request.param)


class Started:
    """A process that waits for its end."""

    def __init__(self, code: str = "import signal; print(0, flush=True); signal.pause()") -> None:
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        self.said = int(self.process.stdout.readline())


@pytest.fixture
def start() -> Iterator[type[Started]]:
    made: list[Started] = []

    class Kept(Started):
        def __init__(self, *code: str) -> None:
            super().__init__(*code)
            made.append(self)

    yield Kept
    for each in made:
        with each.process:
            each.process.kill()


def test_those_that_end_are_waited_for_and_no_longer(start):
    first, second = start(), start()
    began = time.monotonic()
    kill(first.pid)
    second.process.terminate()

    assert await_ended([first.pid, second.pid], WAIT_SECONDS_MAX) == []
    assert time.monotonic() - began < WAIT_SECONDS_MAX / 2


def test_those_that_do_not_end_are_told_when_time_is_up(start):
    ends, stays = start(), start()
    kill(ends.pid)

    assert await_ended([stays.pid, ends.pid, stays.pid], 0.3) == [stays.pid]
    assert stays.process.poll() is None


def test_whoever_does_not_want_to_wait_is_told_how_it_is(start):
    runs = start()

    assert await_ended([runs.pid], 0.0) == [runs.pid]
    kill(runs.pid)
    runs.process.wait(WAIT_SECONDS_MAX)
    assert await_ended([runs.pid], 0.0) == []
    assert await_ended([], 0.0) == []


def test_a_child_of_somebody_else_is_waited_for_too(start):
    parent = start(STARTS_ANOTHER)
    stranger = parent.said
    assert await_ended([stranger], 0.1) == [stranger]
    kill(stranger)

    assert await_ended([stranger], WAIT_SECONDS_MAX) == []


def test_a_process_that_its_parent_has_not_noticed_has_ended(start, way):
    if way == "looked at":
        pytest.skip("who only looks sees it like one that runs")
    parent = start(STARTS_ANOTHER)
    parent.process.send_signal(signal.SIGSTOP)
    kill(parent.said)

    assert await_ended([parent.said], WAIT_SECONDS_MAX) == []


def test_no_descriptor_is_left_open(start, way):
    runs = start()
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    await_ended([runs.pid], 0.0)

    assert not before or os.listdir("/proc/self/fd") == before


def test_as_a_script_it_kills_those_that_stay_and_ends_with_the_code(start):
    polite, stubborn = start(), start()
    polite.process.terminate()
    command = [sys.executable, "-I", "-S", processes.__file__, "7", "0.2"]
    ended = subprocess.run(
        [*command, str(polite.pid), str(stubborn.pid)], timeout=WAIT_SECONDS_MAX, check=False
    )

    assert ended.returncode == 7
    assert stubborn.process.wait(WAIT_SECONDS_MAX) == -signal.SIGKILL
    assert polite.process.wait(WAIT_SECONDS_MAX) == -signal.SIGTERM
