"""The commands of the README, typed in their order as a newcomer would."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
WAIT_SECONDS_MAX = 120.0


def commands() -> list[list[str]]:
    """Of the block that begins with `stillframe run`."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [each for each in blocks if each.startswith("stillframe run ")]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


class Terminal:
    """A shell in a directory of its own, which has nothing but the examples in it."""

    def __init__(self, home: Path) -> None:
        self._home = home
        shutil.copytree(ROOT / "examples", home / "examples")

    def _arguments(self, command: list[str]) -> list[str]:
        assert command[0] == "stillframe"
        return [sys.executable, "-m", "stillframe.cli.main", *command[1:]]

    def type(self, command: list[str]) -> str:
        done = subprocess.run(
            self._arguments(command),
            cwd=self._home,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, command: list[str]) -> Iterator[list[str]]:
        """In a terminal of its own until it is stopped; the lines that it has said so far."""
        said: list[str] = []
        with subprocess.Popen(
            self._arguments(command), cwd=self._home, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            reading = threading.Thread(target=self._read, args=(process.stderr, said))
            reading.start()
            try:
                yield said
                assert process.wait(WAIT_SECONDS_MAX) == 0, "".join(said)
            finally:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGTERM)
                reading.join()

    def _read(self, lines: IO[str], said: list[str]) -> None:
        said.extend(iter(lines.readline, ""))


def until_said(said: list[str], words: str) -> None:
    for _ in range(round(WAIT_SECONDS_MAX / 0.05)):
        if any(words in line for line in said):
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{words!r} was not said: {''.join(said)}")


@pytest.mark.spark
def test_the_commands_of_the_readme_work_in_the_order_in_which_they_are_written(tmp_path):
    terminal = Terminal(tmp_path)
    run, listing, status, stop, inspect = commands()

    with terminal.running(run) as said:
        until_said(said, "slots running")
        assert "page-views  RUNNING" in terminal.type(listing)
        assert re.search(r"^State +RUNNING$", terminal.type(status), re.MULTILINE)
        assert terminal.type(stop) == f"{tmp_path}/savepoints/monday\n"
    assert said[0].startswith("starting Spark (")
    assert "state windows" in terminal.type(inspect)
