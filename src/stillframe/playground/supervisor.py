"""The supervisor: starts the driver and the job, breaks them, and keeps the board.

Theory of operation. The driver is a child process with a Spark session that outlives a restart of
its job. A change of mode or version stops the job with its last checkpoint and starts it again with
other settings. To go back to a savepoint is to begin a new *world*: the same job with an output
directory of its own, whose board begins at the savepoint's positions.

Rules of this file
------------------
1. Nothing here is in the way of a record: it only sends signals, writes `faults.json`, and asks the
   driver over HTTP as anybody could.
2. What was started is ended by `close`, whatever else failed: processes first, then files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stillframe.cli.client import DriverClient
from stillframe.cli.last_steps import descendants_of
from stillframe.clock import SystemClock
from stillframe.errors import StillframeError, StorageError
from stillframe.playground import processes
from stillframe.playground.checkpoints import JOB, Checkpoints, savepoint_at
from stillframe.playground.following import Following
from stillframe.playground.scoreboard import Prediction, Score, Scoreboard
from stillframe.playground.truth import Counts, Positions, Truth, click_source
from stillframe.processes import await_ended
from stillframe.rest.registry import registered_jobs
from stillframe.runtime.scratch import Scratch
from stillframe.testing.faults import write_faults

Mode = Literal["exactly-once", "at-least-once"]
VIEWS = Path(__file__).with_name("views.py")
_OPERATION_SECONDS_MAX = 60.0
_END_SECONDS_MAX = 20.0
_SETTLED_SECONDS = 0.5
"""A checkpoint of which all parts had come before the slots stood still is stored by then."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the job is started with."""

    mode: Mode = "exactly-once"
    version: int = 1
    parallelism: int = 2
    interval_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill before which the slots stood still, so that what follows could be counted."""

    prediction: Prediction
    attempt: int
    """That began after it."""
    naive_doubled: int
    """Before it."""
    reached: Positions
    """What sinks had shown up to."""


@dataclass(slots=True)
class _World:
    number: int
    board: Scoreboard
    scores: list[Score] = field(default_factory=list)


class Supervisor:
    """One playground, from `start` to `close`. Every member may be used from any thread."""

    def __init__(self, settings: Settings | None = None, master: str | None = None) -> None:
        chosen, self.no_executor = processes.master_here()
        if master is not None and master != chosen:
            chosen, self.no_executor = master, "Spark runs in one process here"
        self.master = chosen
        self.settings = settings or Settings()
        self.token = secrets.token_urlsafe(32)
        self.following = Following(self._on_committed)
        self.faults: dict[str, Any] = {}
        self._scratch = Scratch(purpose="playground")
        self.root = self._scratch.directory
        self.checkpoints = Checkpoints(self.root / "checkpoints")
        self.truth = Truth(click_source())
        self._lock = threading.RLock()
        """Held while the board is looked at or changed."""
        self._world = self._new_world(1, {})
        self._driver: subprocess.Popen[str] | None = None
        self._savepoints = 0
        self._timers: list[threading.Timer] = []
        self._flipped: tuple[Path, bytes] | None = None

    # --- beginning and end ---

    def start(self) -> None:
        """Start the driver and the job, and return when it has committed a checkpoint."""
        (self.root / "views.py").write_text(VIEWS.read_text())
        self._write_faults()
        self.start_driver()
        self.start_job()
        self.await_score("the first committed checkpoint")

    def start_driver(self) -> None:
        """Another one, if the last has ended."""
        home = _spark_home(self.root)
        log = open(self.root / "driver.log", "ab")  # noqa: SIM115 - the child's, closed below
        try:
            self._driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "stillframe.playground.driver"),
                    *(self.master, str(self.root), str(self.root / "views.py")),
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
                    "STILLFRAME_TOKEN": self.token,
                },
            )
        finally:
            log.close()
        assert self._driver.stdout is not None
        threading.Thread(
            target=self.following.read,
            args=(self._driver.stdout, self._driver.pid),
            name="stillframe-playground-driver",
            daemon=True,
        ).start()

    def start_job(self, **options: Any) -> None:
        """Start the job with the settings of now, and these options; waits until slots run."""
        now = self.following.now
        before = now.attempt
        now.has_ended, now.refused, now.failure, now.blame = False, None, None, None
        self._command(self._given(options))

        def runs() -> bool | None:
            if now.refused is not None:
                raise StillframeError(f"the job does not start: {now.refused}")
            if now.has_ended:
                raise StillframeError(f"the job does not run: {now.failure}")
            return True if now.is_running and now.attempt > before else None

        self.following.wait("the job's slots run", runs)

    def _given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        settings = self.settings
        return {
            "output": str(self._output(self._world.number)),
            "faults": str(self.root / "faults.json"),
            "seed": 0,
            "version": settings.version,
            "options": {
                "checkpointLocation": str(self.root / "checkpoints"),
                "checkpointInterval": f"{settings.interval_seconds:g} seconds",
                "checkpointMode": settings.mode,
                "checkpointTimeout": "60 seconds",
                "parallelism": settings.parallelism,
                "restartInitialBackoff": "200 ms",
                "restartMaxBackoff": "2 seconds",
                "restartSameErrorMax": "infinite",
                "restartSameCrashMax": "infinite",
                **options,
            },
        }

    def _command(self, given: dict[str, Any]) -> None:
        assert self._driver is not None
        told = self._driver.stdin
        assert told is not None
        try:
            told.write(json.dumps(given) + "\n")
            told.flush()
        except OSError as error:
            raise StillframeError(f"the driver has ended ({error}): see driver.log") from error

    def close(self) -> None:
        """End everything that was started and remove every file. May be called twice."""
        self.following.leave()
        for timer in self._timers:
            timer.cancel()
        processes.thaw(self.following.now.pids)
        driver = self._driver
        if driver is not None:
            below = descendants_of(driver.pid)
            with contextlib.suppress(OSError):
                assert driver.stdin is not None
                driver.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(_END_SECONDS_MAX)
            driver.kill()
            driver.wait()
            left = await_ended(below, 1.0)
            processes.kill_all(left)
            await_ended(left, _END_SECONDS_MAX)
            self._driver = None
        self._scratch.remove()

    # --- the board ---

    @property
    def score(self) -> Score | None:
        """The newest; None before the first committed checkpoint of this world."""
        with self._lock:
            return self._world.scores[-1] if self._world.scores else None

    def _on_committed(self, checkpoint_id: int) -> None:
        with self._lock:
            # One that is no longer retained is followed by another.
            with contextlib.suppress(StorageError):
                self._world.scores.append(self._world.board.look(checkpoint_id))
            del self._world.scores[:-100]
        self.following.changed()

    def predict(self, checkpoint_id: int | None = None) -> Prediction:
        with self._lock:
            return self._world.board.predict(checkpoint_id)

    def await_score(self, what: str, since: int | None = None, attempt: int = 0) -> Score:
        """The board of the first checkpoint that is committed from now on, or after `since`, in
        this attempt or a later one."""
        score = self.score
        after = since if since is not None else score.checkpoint if score is not None else 0

        def newest() -> Score | None:
            found = self.score
            is_it = found is not None and found.checkpoint > after and found.attempt >= attempt
            return found if is_it else None

        return self.following.wait(what, newest)

    def truth_at(self, positions: Positions) -> Counts:
        with self._lock:
            return self.truth.counts(positions)

    def reached(self) -> dict[int, int]:
        """By partition: what sinks have shown up to now."""
        with self._lock:
            self._world.board.refresh()
            return self._world.board.reached()

    def _new_world(self, number: int, base: Positions) -> _World:
        output = self._output(number)
        return _World(number, Scoreboard(self.truth, self.checkpoints, output, base))

    def _output(self, number: int) -> Path:
        return self.root / f"out-{number}"

    # --- asking the driver, as anybody could ---

    def client(self) -> DriverClient:
        """The driver's HTTP API; it is announced as soon as the job has begun."""
        pid = self.following.now.driver

        def address() -> str | None:
            found = [job.url for job in registered_jobs() if job.pid == pid and job.name == JOB]
            return found[-1] if found else None

        url = self.following.wait("the driver is announced", address, 30.0)
        return DriverClient(url, self.token, _OPERATION_SECONDS_MAX, SystemClock(), time.sleep)

    def checkpoint(self) -> int:
        """Take one now; its number."""
        client = self.client()
        number = client.post("jobs", JOB, "checkpoints")["request-id"]
        return int(client.await_operation("jobs", JOB, "checkpoints", number)["checkpointId"])

    def stop(self) -> str:
        """Stop the job with a savepoint, behind which nothing is shown; its address."""
        client = self.client()
        self._savepoints += 1
        place = str(self.root / "savepoints" / f"sp-{self._savepoints}")
        number = client.post("jobs", JOB, "stop", body={"targetDirectory": place})["request-id"]
        client.await_operation("jobs", JOB, "savepoints", number)
        self.await_end()
        return place

    def await_end(self) -> None:
        now = self.following.now
        self.following.wait("the job ends", lambda: True if now.has_ended else None)

    def rescale(self, parallelism: int) -> str:
        client = self.client()
        asked = client.patch("jobs", JOB, "rescaling", parallelism=str(parallelism))
        client.await_operation("jobs", JOB, "rescaling", asked["request-id"])
        self.settings = replace(self.settings, parallelism=parallelism)
        return str(self.following.now.rescaled)

    def completed_since_first_start(self) -> int:
        """Checkpoints, whichever driver took them."""
        return int(self.client().get("jobs", JOB, "checkpoints")["counts"]["completed"])

    def metrics(self) -> str:
        """What the driver's `/metrics` answers."""
        with urllib.request.urlopen(f"{self.client().url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    # --- changes that start the job again ---

    def with_settings(self, **settings: Any) -> Settings:
        return replace(self.settings, **settings)

    def change(self, **settings: Any) -> None:
        """Other settings, from where the job is."""
        self.stop()
        self.settings = replace(self.settings, **settings)
        self.start_job()

    def go_back(self, savepoint: str, **settings: Any) -> None:
        """Stop the job if it runs, and begin a new world with a savepoint."""
        if not self.following.now.has_ended:
            self.stop()
        self.settings = replace(self.settings, **settings)
        with self._lock:
            base = savepoint_at(savepoint).positions
            self._world = self._new_world(self._world.number + 1, base)
        self.start_job(fresh="true", restoreFrom=savepoint)

    # --- breaking ---

    def set_faults(self, **faults: Any) -> None:
        """These in `faults.json`, beside those that are there; None takes one away."""
        self.faults = {
            name: value for name, value in {**self.faults, **faults}.items() if value is not None
        }
        self._write_faults()

    def _write_faults(self) -> None:
        write_faults(str(self.root / "faults.json"), self.faults)

    def slot_pid(self, slot: int) -> int:
        def pid() -> int | None:
            pids = self.following.now.pids
            if pids and slot >= len(pids):
                raise StillframeError(f"there is no slot {slot}: the job has {len(pids)}")
            return pids[slot] if pids else None

        return self.following.wait(f"slot {slot} runs", pid)

    def kill_slot(self, slot: int) -> Kill:
        """Kill a slot with everything counted before: see `Kill`. Returns in the next attempt.

        All slots stand still while what the sinks show is counted; the one is killed; the others
        are too, as soon as the driver has noticed, because they are cut off and only stand there.
        """
        victim = self.slot_pid(slot)
        pids = self.following.now.pids
        attempt = self.following.now.attempt
        processes.freeze(pids)
        try:
            prediction = self._settled_prediction()
            with self._lock:
                reached = self._world.board.reached()
                doubled = self._world.board.doubled()
            processes.kill_all([victim])
            self._await_failed(attempt)
        finally:
            processes.kill_all(pids)
        self.await_attempt(attempt + 1)
        restored = self.following.now.restored_from
        if restored != prediction.checkpoint:
            raise StillframeError(
                f"checkpoint {restored} completed after the prediction for"
                f" {prediction.checkpoint} was made: repeat the step"
            )
        return Kill(prediction, attempt + 1, doubled, reached)

    def _settled_prediction(self) -> Prediction:
        """Of the newest checkpoint, when no newer one is on its way any more."""
        prediction, since = self.predict(), time.monotonic()

        def settled() -> Prediction | None:
            nonlocal prediction, since
            newest = self.checkpoints.retained()[-1]
            if newest != prediction.checkpoint:
                prediction, since = self.predict(), time.monotonic()
            is_settled = time.monotonic() > since + _SETTLED_SECONDS
            return prediction if is_settled else None

        return self.following.wait("no checkpoint is being stored", settled)

    def kill_executor(self, slot: int = 0) -> int:
        """Kill the executor of a slot, and with it all slots that it runs; its process."""
        if self.no_executor is not None:
            raise StillframeError(self.no_executor)
        attempt = self.following.now.attempt
        pid = processes.executor_of(self.slot_pid(slot))
        processes.kill_all([pid])
        self._await_failed(attempt)
        self.await_attempt(attempt + 1)
        return pid

    def freeze_slot(self, slot: int, seconds: float) -> int:
        """Have a slot stand still for some seconds; its process."""
        pid = self.slot_pid(slot)
        processes.freeze([pid])
        self._timers.append(processes.thaw_later([pid], seconds))
        return pid

    def kill_driver(self) -> int:
        """Kill the driver, then start another that goes on with the job; the one that was killed.

        Its slots end by themselves, and so does its JVM.
        """
        assert self._driver is not None
        pid, below = self._driver.pid, descendants_of(self._driver.pid)
        attempt = self.following.now.attempt
        self._driver.kill()
        self._driver.wait()
        self.following.wait(
            "the driver's processes are gone",
            lambda: True if not await_ended(below, 0.0) else None,
        )
        self.start_driver()
        self.start_job()
        self.await_attempt(attempt + 1)
        return pid

    def _await_failed(self, attempt: int) -> None:
        now = self.following.now
        self.following.wait(
            f"the driver notices that attempt {attempt} is broken",
            lambda: True if now.attempt > attempt or not now.is_running else None,
        )

    def await_attempt(self, attempt: int) -> None:
        now = self.following.now

        def runs() -> bool | None:
            if now.has_ended:
                raise StillframeError(f"the job has ended: {now.failure}")
            return True if now.is_running and now.attempt >= attempt else None

        self.following.wait(f"attempt {attempt} runs", runs)

    # --- damage ---

    def newest(self) -> int:
        """The newest checkpoint."""
        return self.checkpoints.retained()[-1]

    def break_newest(self, slot: int) -> Path:
        """Flip a byte of the newest checkpoint and kill a slot before there is a newer one."""
        pids = self.following.now.pids
        victim = self.slot_pid(slot)
        processes.freeze(pids)
        try:
            self._settled_prediction()
            path = self.flip_byte()
            processes.kill_all([victim])
            self._await_failed(self.following.now.attempt)
        finally:
            processes.kill_all(pids)
        self.await_end()
        return path

    def flip_byte(self) -> Path:
        """Alter one byte of a state file of the newest checkpoint; the file."""
        path = self.checkpoints.state_file(self.newest())
        data = path.read_bytes()
        at = len(data) // 2
        self._flipped = (path, data)
        path.chmod(0o644)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        return path

    def flip_back(self) -> None:
        if self._flipped is not None:
            path, data = self._flipped
            self._flipped = None
            path.write_bytes(data)

    # --- for `with` ---

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


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
