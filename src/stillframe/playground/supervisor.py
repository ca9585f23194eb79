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
import secrets
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stillframe.cli.client import DriverClient
from stillframe.clock import SystemClock
from stillframe.errors import StillframeError, StorageError
from stillframe.playground import processes
from stillframe.playground.checkpoints import JOB, Checkpoints, savepoint_at
from stillframe.playground.driver_process import JOB_FILE, DriverProcess
from stillframe.playground.following import Following, JobNow
from stillframe.playground.scoreboard import Prediction, Score, Scoreboard
from stillframe.playground.truth import Counts, Positions, Truth, click_source
from stillframe.rest.registry import registered_jobs
from stillframe.runtime.scratch import Scratch
from stillframe.testing.faults import write_faults

Mode = Literal["exactly-once", "at-least-once"]
VIEWS = Path(__file__).with_name("views.py")
_OPERATION_SECONDS_MAX = 300.0
"""As long as all else is waited for: a machine may be slow."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the job is started with."""

    mode: Mode = "exactly-once"
    version: int = 1
    parallelism: int = 2
    interval_seconds: float = 5.0


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
        self.driver = DriverProcess(self.root, self.master, self.token, self.following)
        self._savepoints = 0
        self.timers: list[threading.Timer] = []
        """Of slots that stand still."""
        self.flipped: tuple[Path, bytes] | None = None
        """A file of which a byte is another, and what was in it."""

    # --- beginning and end ---

    def start(self) -> None:
        """Start the driver and the job, and return when it has committed a checkpoint."""
        (self.root / JOB_FILE).write_text(VIEWS.read_text())
        self._write_faults()
        self.driver.start()
        self.start_job()
        self.await_score("the first committed checkpoint")

    def start_job(self, **options: Any) -> None:
        """Start the job with the settings of now, and these options; waits until slots run."""
        now, before = self.now, self.now.attempt
        now.has_ended, now.refused, now.failure, now.blame = False, None, None, None
        self.driver.tell(self._given(options))

        def runs() -> bool | None:
            self.driver.refuse_if_ended()
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

    def close(self) -> None:
        """End everything that was started and remove every file. May be called twice."""
        self.following.leave()
        for timer in self.timers:
            timer.cancel()
        processes.thaw(self.now.pids)
        self.driver.end()
        self._scratch.remove()

    @property
    def now(self) -> JobNow:
        """Where the job is, as the driver has last told."""
        return self.following.now

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
            self.driver.refuse_if_ended()
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

    def naive_doubled(self) -> int:
        with self._lock:
            return self._world.board.doubled()

    def _new_world(self, number: int, base: Positions) -> _World:
        output = self._output(number)
        return _World(number, Scoreboard(self.truth, self.checkpoints, output, base))

    def _output(self, number: int) -> Path:
        return self.root / f"out-{number}"

    # --- asking the driver, as anybody could ---

    def client(self) -> DriverClient:
        """The driver's HTTP API; it is announced as soon as the job has begun."""
        pid = self.driver.pid

        def address() -> str | None:
            self.driver.refuse_if_ended()
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
        now = self.now

        def ended() -> bool | None:
            self.driver.refuse_if_ended()
            return True if now.has_ended else None

        self.following.wait("the job ends", ended)

    def rescale(self, parallelism: int) -> str:
        client = self.client()
        asked = client.patch("jobs", JOB, "rescaling", parallelism=str(parallelism))
        client.await_operation("jobs", JOB, "rescaling", asked["request-id"])
        self.settings = replace(self.settings, parallelism=parallelism)
        return str(self.now.rescaled)

    def is_storing(self) -> bool:
        """Whether all parts of a checkpoint have come to the driver that is not complete yet."""
        told = self.client().get("jobs", JOB, "checkpoints")["history"]
        return any(
            each["status"] == "IN_PROGRESS"
            and each["num_acknowledged_subtasks"] == each["num_subtasks"]
            for each in told
        )

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
        if not self.now.has_ended:
            self.stop()
        self.settings = replace(self.settings, **settings)
        with self._lock:
            base = savepoint_at(savepoint).positions
            self._world = self._new_world(self._world.number + 1, base)
        self.start_job(fresh="true", restoreFrom=savepoint)

    # --- what breaks it ---

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
            pids = self.now.pids
            if pids and slot >= len(pids):
                raise StillframeError(f"there is no slot {slot}: the job has {len(pids)}")
            return pids[slot] if pids else None

        return self.following.wait(f"slot {slot} runs", pid)

    def await_attempt(self, attempt: int) -> None:
        now = self.now

        def runs() -> bool | None:
            self.driver.refuse_if_ended()
            if now.has_ended:
                raise StillframeError(f"the job has ended: {now.failure}")
            return True if now.is_running and now.attempt >= attempt else None

        self.following.wait(f"attempt {attempt} runs", runs)

    # --- for `with` ---

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
