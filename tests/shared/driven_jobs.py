"""Jobs on plain processes whose driver is a process too, so that a story kills it like its slots.

The job's plan is pickled, so what makes it lies in a module of this directory. What the driver is
told while it runs it reads line by line: a number rescales the job, `stop` ends it when all that
was there is committed.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

KILLS, SEED = (int(os.environ.get(f"STILLFRAME_KILL{each}", "4")) for each in ("S", "_SEED"))
"""A multiple of four; `make soak` asks for more."""
IS_LONG = KILLS > 4
WAIT_SECONDS_MAX = 60.0


class DrivenJob:
    """Started by the same command again and again, with whatever parallelism."""

    def __init__(self, home: Path, name: str, plan: Callable[[int], object]) -> None:
        self.home, self.name = home, name
        (home / "plan").write_bytes(pickle.dumps(plan))
        self._driver: subprocess.Popen[bytes] | None = None
        self.drivers = self.slots_killed = 0

    # --- its life ---

    def start(self, parallelism: int) -> None:
        self.drivers += 1
        command = [sys.executable, __file__, str(self.home), self.name, str(parallelism)]
        with (self.home / "said").open("ab") as log:
            self._driver = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, words: object) -> None:
        """Nobody answers: the driver may be killed before it has read it."""
        assert self._driver is not None
        assert self._driver.stdin is not None
        with suppress(BrokenPipeError):
            self._driver.stdin.write(f"{words}\n".encode())
            self._driver.stdin.flush()

    def kill(self, victim: str, random: Random, parallelism: int) -> None:
        """At a drawn moment; a driver that was killed is started again."""
        threading.Event().wait(random.random() * 0.4)
        if victim == "slot":
            self._kill_slot(random)
        else:
            self._kill_driver()
            self.start(parallelism)

    def _kill_driver(self) -> None:
        assert self._driver is not None
        code = self._driver.poll()
        assert code is None, f"it had ended with {code}: {self.said}"
        self.close()

    def _kill_slot(self, random: Random) -> None:
        """One of those that run now, if any do."""
        with suppress(FileNotFoundError, ProcessLookupError):
            pids = json.loads((self.home / "slots").read_text())
            os.kill(random.choice(pids), signal.SIGKILL)
            self.slots_killed += 1

    def finish(self) -> None:
        """Wait for a good end."""
        assert self._driver is not None
        assert self._driver.wait(WAIT_SECONDS_MAX) == 0, self.said

    def close(self) -> None:
        if self._driver is not None:
            self._driver.kill()
            self._driver.communicate()

    # --- what it has done ---

    @property
    def said(self) -> str:
        return (self.home / "said").read_text(errors="replace")[-6000:]

    def checkpoints(self) -> int:
        """The number of the newest one that is complete."""
        found = (self.home / "chk" / self.name).glob("chk-*/_metadata")
        return max((int(each.parent.name.split("-")[1]) for each in found), default=0)

    def next_checkpoint(self) -> None:
        before = self.checkpoints()
        self.wait_until(lambda: self.checkpoints() > before)

    def wait_until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not is_so():
            assert time.monotonic() < deadline, f"not in {WAIT_SECONDS_MAX:g} s: {self.said}"
            threading.Event().wait(0.02)

    def left_behind(self) -> set[str]:
        """What is beside the checkpoints in the end, but for notes of marks."""
        job = self.home / "chk" / self.name
        files = [*job.glob("prepared/*/*"), *job.glob("staged/**/*"), *job.rglob(".tmp-*")]
        names = {each.name for each in files if each.is_file()}
        return {name for name in names if not name.startswith("marked-")}


def _drive(home: Path, name: str, parallelism: int) -> None:
    from stillframe.clock import SystemClock
    from stillframe.config import job_config
    from stillframe.coordinator.history import SlotsRunning
    from stillframe.coordinator.job import Job
    from stillframe.coordinator.query import Query
    from stillframe.coordinator.running import DriverAddress
    from stillframe.errors import StillframeError
    from stillframe.runtime.unfit_states import unfit_states
    from stillframe.testing.processes import ProcessDeployment

    def note(event: object) -> None:
        print(f"{os.getpid()} {time.monotonic():.2f} {event}", flush=True)
        if isinstance(event, SlotsRunning):
            (home / "slots.new").write_text(json.dumps(event.pids))
            (home / "slots.new").rename(home / "slots")

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "stop":
                query.processAllAvailable()
                query.stop()
                return
            try:
                query.rescale(int(line), timeout=WAIT_SECONDS_MAX)
            except StillframeError as error:  # a kill may come in its way
                print(error, flush=True)

    plan = pickle.loads((home / "plan").read_bytes())
    options = {
        "checkpointLocation": str(home / "chk"),
        "checkpointInterval": "150 ms",
        "restartDelay": "20 ms",
        "restartAttempts": "1000",
    }
    given = job_config(options)
    address, clock = DriverAddress("127.0.0.1"), SystemClock()
    job = Job(plan(parallelism), given, ProcessDeployment(), address, clock, plan,
              unfit_states=unfit_states)  # fmt: skip
    query = Query(job)
    query.add_listener(note)
    job.start()
    threading.Thread(target=obey, daemon=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
