"""Jobs whose driver is a process of its own, so that a story kills it like its slots.

What a driver is asked while it runs it finds in a file, line by line: a number rescales the job,
`stop` ends it when all that was there is committed. Where its slots run it writes to another.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

KILLS, SEED = (int(os.environ.get(f"STILLFRAME_KILL{each}", "4")) for each in ("S", "_SEED"))
"""A multiple of four; `make soak` asks for more."""
IS_LONG = KILLS > 4
WAIT_SECONDS_MAX = 300.0 if IS_LONG else 90.0
OPTIONS = {"checkpointInterval": "150 ms", "restartDelay": "20 ms", "restartAttempts": "1000"}


class DrivenJob:
    """Started by the same command again and again, with whatever parallelism behind it."""

    def __init__(self, home: Path, name: str, command: Sequence[str], **environment: str) -> None:
        self.home, self.name = home, name
        self._command, self._environment = command, {**os.environ, **environment}
        self._slots, self._asked = home / "slots", home / "asked"
        self._driver: subprocess.Popen[bytes] | None = None

    # --- its life ---

    def start(self, parallelism: int) -> None:
        self._slots.unlink(missing_ok=True)
        self._asked.write_text("")
        with (self.home / "said").open("ab") as log:
            self._driver = subprocess.Popen(
                [*self._command, str(parallelism)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def ask(self, words: object) -> None:
        """Nobody answers: the driver may be killed before it has read it."""
        with self._asked.open("a") as asked:
            asked.write(f"{words}\n")

    def kill(self, victim: str, random: Random) -> None:
        """A `slot` or the `driver`, at a drawn moment."""
        threading.Event().wait(random.random() * 0.4)
        if victim == "slot":
            self.wait_until(lambda: self._kill_slot(random))
        else:
            self._kill_driver()

    def _kill_driver(self) -> None:
        assert self._driver is not None
        code = self._driver.poll()
        assert code is None, f"it had ended with {code}: {self.said}"
        self.close()

    def _kill_slot(self, random: Random) -> bool:
        """One of those that run now, if any do."""
        with suppress(FileNotFoundError, ProcessLookupError):
            pids = json.loads(self._slots.read_text())
            self._slots.unlink()  # the next ones are others
            os.kill(random.choice(pids), signal.SIGKILL)
            return True
        return False

    def finish(self) -> None:
        """Wait for a good end."""
        assert self._driver is not None
        assert self._driver.wait(WAIT_SECONDS_MAX) == 0, self.said

    def close(self) -> None:
        """End all of its processes; slots on Spark's workers are none of them."""
        if self._driver is None:
            return
        for pid in session_of(self._driver.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._driver.wait()

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
            ended = None if self._driver is None else self._driver.poll()
            assert not ended, f"its driver ended with {ended}: {self.said}"
            assert time.monotonic() < deadline, f"not in {WAIT_SECONDS_MAX:g} s: {self.said}"
            threading.Event().wait(0.02)

    def left_behind(self) -> set[str]:
        """What is beside the checkpoints in the end, but for notes of marks."""
        job = self.home / "chk" / self.name
        files = [*job.glob("prepared/*/*"), *job.glob("staged/**/*"), *job.rglob(".tmp-*")]
        names = {each.name for each in files if each.is_file()}
        return {name for name in names if not name.startswith("marked-")}


def session_of(leader: int) -> list[int]:
    """The processes of a session; one that has ended has none any more."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(ValueError, ProcessLookupError):
            if os.getsid(int(name)) == leader:
                found.append(int(name))
    return found


# --- In the driver -------------------------------------------------------------------------------


def serve(query: Any, home: Path) -> None:
    """Until the job ends."""
    from stillframe.coordinator.history import SlotsRunning

    def note(event: object) -> None:
        print(f"{os.getpid()} {time.monotonic():.2f} {event}", flush=True)
        if isinstance(event, SlotsRunning):
            note_slots(event.pids)

    def note_slots(pids: Sequence[int]) -> None:
        (home / "slots.new").write_text(json.dumps(pids))
        (home / "slots.new").rename(home / "slots")

    query.add_listener(note)
    if query.slot_pids:
        note_slots(query.slot_pids)
    threading.Thread(target=_obey, args=(query, home / "asked"), daemon=True).start()
    query.awaitTermination()


def _obey(query: Any, asked: Path) -> None:
    from stillframe.errors import StillframeError

    done = 0
    while query.isActive:
        for words in asked.read_text().splitlines()[done:]:
            done += 1
            try:
                if words == "stop":
                    query.processAllAvailable()
                    return query.stop()
                query.rescale(int(words), timeout=WAIT_SECONDS_MAX)
            except StillframeError as error:  # a kill may come in its way
                print(error, flush=True)
        threading.Event().wait(0.05)


def on_plain_processes(home: Path, name: str, plan: Callable[[int], object]) -> DrivenJob:
    """The plan is pickled, so what makes it lies in a module of this directory."""
    (home / "plan").write_bytes(pickle.dumps(plan))
    return DrivenJob(home, name, [sys.executable, __file__, str(home)])


def _drive(home: Path, parallelism: int) -> None:
    from stillframe.clock import SystemClock
    from stillframe.config import job_config
    from stillframe.coordinator.job import Job
    from stillframe.coordinator.query import Query
    from stillframe.coordinator.running import DriverAddress
    from stillframe.runtime.unfit_states import unfit_states
    from stillframe.testing.processes import ProcessDeployment

    plan = pickle.loads((home / "plan").read_bytes())
    given = job_config({"checkpointLocation": str(home / "chk"), **OPTIONS})
    address, clock = DriverAddress("127.0.0.1"), SystemClock()
    job = Job(plan(parallelism), given, ProcessDeployment(), address, clock, plan,
              unfit_states=unfit_states)  # fmt: skip
    query = Query(job)
    job.start()
    serve(query, home)


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), int(sys.argv[2]))
