"""The page-view job under spark-submit on a real cluster: a standalone master and two workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spark_cluster import START_SECONDS_MAX, Cluster, Events

JOB = Path(__file__).parent / "jobs" / "page_views_to_table.py"
JOB_SECONDS_MAX = 240.0

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def cluster(tmp_path: Path, free_port: int) -> Iterator[Cluster]:
    running = Cluster(tmp_path, free_port)
    yield running
    running.stop()


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
    for attempt in verdict["attempts"][:-1]:
        moments = [at for at in attempt["phases"].values() if at is not None]
        assert moments == sorted(moments)
        assert attempt["phases"]["noticed"] is not None
        assert attempt["phases"]["caught_up"] is not None
        assert attempt["replayed"] >= 0
    # What slots say stands in the logs of their executors, where Spark's pages show it.
    logs = [path.read_text() for path in (tmp_path / "work").glob("app-*/*/stderr")]
    for slot in (0, 1):
        assert any(
            re.search(rf" INFO .*, attempt 2, slot {slot}: running on ", log) for log in logs
        )


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


@pytest.mark.soak
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
