"""The driver as a child process: started, told what to run, and ended with all below it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillframe.cli.last_steps import descendants_of
from stillframe.errors import StillframeError, telling_line
from stillframe.playground import processes
from stillframe.playground.following import Following
from stillframe.processes import await_ended

JOB_FILE = "views.py"
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that do little: half of the processor time at their start."""
_END_SECONDS_MAX = 20.0


class DriverProcess:
    """One driver after the other, of which one runs at a time."""

    def __init__(self, root: Path, master: str, token: str, following: Following) -> None:
        self._root = root
        self._master = master
        self._token = token
        self._following = following
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Another one; returns at once, what it tells is followed."""
        home = _spark_home(self._root)
        with open(self._root / "driver.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "stillframe.playground.driver"),
                    *(self._master, str(self._root), str(self._root / JOB_FILE)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is ours: a driver that gets it too would end in the middle of its work.
                start_new_session=True,
                env={
                    **os.environ,
                    "SPARK_HOME": str(home),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "PYSPARK_PYTHON": sys.executable,
                    "STILLFRAME_TOKEN": self._token,
                    "SPARK_SUBMIT_OPTS": f"{QUICK_JVM} {os.environ.get('SPARK_SUBMIT_OPTS', '')}",
                },
            )
        threading.Thread(
            target=self._hear,
            args=(self._process,),
            name="stillframe-playground-driver",
            daemon=True,
        ).start()

    def _hear(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            self._following.read(lines, process.pid)

    @property
    def pid(self) -> int | None:
        """None: there has been none, or it was ended."""
        return None if self._process is None else self._process.pid

    def refuse_if_ended(self) -> None:
        """Whoever waits for what only a driver can tell waits in vain without one."""
        if self._process is not None and (code := self._process.poll()) is not None:
            log = self._root / "driver.log"
            last = telling_line(log.read_text(errors="replace"))
            raise StillframeError(f"the driver has ended with code {code}: {last}")

    def tell(self, given: Mapping[str, Any]) -> None:
        """Have it start the job with this."""
        assert self._process is not None
        told = self._process.stdin
        assert told is not None
        try:
            told.write(json.dumps(given) + "\n")
            told.flush()
        except OSError as error:
            log = self._root / "driver.log"
            raise StillframeError(f"the driver has ended ({error}): see {log}") from error

    def kill(self) -> tuple[int, list[int]]:
        """Kill it alone; its process, and those it leaves behind, which end by themselves."""
        assert self._process is not None
        below = descendants_of(self._process.pid)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.pid, below

    def end(self) -> None:
        """End it and all below it, by force if they do not go. May be called twice."""
        driver, self._process = self._process, None
        if driver is None:
            return
        below = descendants_of(driver.pid)
        assert driver.stdin is not None
        with contextlib.suppress(OSError):
            driver.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(_END_SECONDS_MAX)
        driver.kill()
        driver.wait()
        left = await_ended(below, 1.0)
        processes.kill_all(left)
        await_ended(left, _END_SECONDS_MAX)


def _spark_home(root: Path) -> Path:
    """Spark's own files by links: executors of a local cluster have their directories in its home,
    and these are to go with ours."""
    home = root / "spark"
    if not home.exists():
        home.mkdir()
        for each in _installed_spark().iterdir():
            if each.name != "work":
                (home / each.name).symlink_to(each)
    return home


def _installed_spark() -> Path:
    given = os.environ.get("SPARK_HOME")
    found = importlib.util.find_spec("pyspark")
    assert found is not None, "pyspark is a dependency"
    return Path(given) if given else Path(str(found.origin)).parent
