"""The page-view job under spark-submit on a real cluster: a standalone master and two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spark_cluster import START_SECONDS_MAX, Cluster

JOB = Path(__file__).parent / "jobs" / "page_views_to_table.py"
JOB_SECONDS_MAX = 240.0

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def cluster(tmp_path: Path, free_port: int) -> Iterator[Cluster]:
    running = Cluster(tmp_path, free_port)
    yield running
    running.stop()


class Events:
    """The lines a job prints, read as they come; whoever waits for one says how long at most."""

    def __init__(self, job: subprocess.Popen[str]) -> None:
        self._changed = threading.Condition()
        self._seen: list[dict[str, Any]] = []
        self._ended = False
        self._words = deque[str](maxlen=20)
        """What else it said last: an error, if it ended by one."""
        assert job.stdout is not None
        self._lines = job.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def after(self, position: int, kind: str, seconds_max: float) -> tuple[int, dict[str, Any]]:
        """The first event of this kind from this position on, and the position behind it."""
        deadline = time.monotonic() + seconds_max
        with self._changed:
            while True:
                for index in range(position, len(self._seen)):
                    if self._seen[index]["kind"] == kind:
                        return index + 1, self._seen[index]
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind} in {seconds_max} s, but {self._seen[-10:]}"
                words = "".join(self._words)
                assert not self._ended, f"no {kind} but {self._seen[-10:]}, and an end:\n{words}"
                self._changed.wait(left)

    def _read(self) -> None:
        for line in self._lines:
            if not line.startswith("EVENT "):
                self._words.append(line)
                continue
            with self._changed:
                self._seen.append(json.loads(line.removeprefix("EVENT ")))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _kill_a_slot_then_an_executor(cluster: Cluster, events: Events) -> dict[str, Any]:
    position, _ = events.after(0, "SessionStarted", JOB_SECONDS_MAX)
    cluster.start_workers()
    position, running = events.after(position, "SlotsRunning", JOB_SECONDS_MAX)
    position, _ = events.after(position, "CheckpointCompleted", JOB_SECONDS_MAX)
    os.kill(running["pids"][1], signal.SIGKILL)

    position, restarted = events.after(position, "AttemptStarted", JOB_SECONDS_MAX)
    assert "restored checkpoint" in restarted["text"]
    position, running = events.after(position, "SlotsRunning", JOB_SECONDS_MAX)
    position, _ = events.after(position, "CheckpointCompleted", JOB_SECONDS_MAX)
    os.kill(cluster.executor_of(running["pids"][0]), signal.SIGKILL)

    position, restarted = events.after(position, "AttemptStarted", JOB_SECONDS_MAX)
    assert "restored checkpoint" in restarted["text"]
    return events.after(position, "Verdict", JOB_SECONDS_MAX)[1]


@pytest.mark.timeout(600)
def test_a_job_on_a_cluster_waits_for_workers_and_survives_the_loss_of_a_slot_and_an_executor(
    cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.submit(str(JOB), str(tmp_path / "checkpoints")) as job:
        try:
            verdict = _kill_a_slot_then_an_executor(cluster, Events(job))
            assert job.wait(START_SECONDS_MAX) == 0
        finally:
            job.kill()
    assert verdict["restarts"] >= 2
    assert (verdict["lost"], verdict["doubled"], verdict["wrong_counts"]) == (0, 0, 0)
    assert verdict["rows"] == 600_000


def packed_environment(place: Path) -> Path:
    """An archive as conda-pack makes it, as far as Spark knows: it has a `bin/python`."""
    python = place / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    archive = place.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as target:
        target.add(place / "bin", "bin")
    return archive


@pytest.mark.timeout(600)
def test_an_environment_that_is_shipped_as_an_archive_is_what_executors_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start_workers()
    archive = packed_environment(tmp_path / "environment")
    shipped = f"--conf spark.driver.host=127.0.0.1 --archives {archive}#environment pyspark-shell"

    done = subprocess.run(
        [sys.executable, "-m", "stillframe", "doctor", "--master", cluster.master, "--json"],
        env={
            **cluster.environment,
            "PYSPARK_PYTHON": "./environment/bin/python",
            "PYSPARK_SUBMIT_ARGS": shipped,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    found = {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert found["executors"]["answer"] == "ok", done.stdout
    assert "PYSPARK_PYTHON is ./environment/bin/python" in found["executors"]["text"]
    assert found["barrier stage"]["answer"] == "ok", done.stdout
