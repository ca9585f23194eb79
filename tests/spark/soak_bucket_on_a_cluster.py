"""Machines whose only shared storage is a bucket; only `make soak` has the time for it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from spark_cluster import START_SECONDS_MAX, Cluster, Events

JOB = Path(__file__).parent / "jobs" / "page_views_in_a_bucket.py"
JOB_SECONDS_MAX = 240.0

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.s3, pytest.mark.slow]


def refuse_without_namespaces() -> None:
    apart = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        tried = subprocess.run(apart, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare command")
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.decode().strip()}")


@pytest.mark.timeout(400)
def test_machines_that_share_nothing_but_a_bucket_run_a_job_and_lose_a_slot(
    tmp_path: Path, free_port: int, s3_port: int, s3_bucket: str
) -> None:
    refuse_without_namespaces()
    cluster = Cluster(tmp_path, free_port)
    cluster.start_workers_apart()
    given = (s3_bucket, f"http://127.0.0.1:{s3_port}", str(tmp_path))
    with cluster.submit(str(JOB), *given) as job:
        try:
            events = Events(job)
            position, running = events.after(0, "SlotsRunning", JOB_SECONDS_MAX)
            position, _ = events.after(position, "CheckpointCompleted", JOB_SECONDS_MAX)
            os.kill(running["pids"][0], signal.SIGKILL)
            verdict = events.after(position, "Verdict", JOB_SECONDS_MAX)[1]
            assert job.wait(START_SECONDS_MAX) == 0
        finally:
            job.kill()
            cluster.stop()
    assert verdict["restarts"] >= 1
    assert verdict["is_exact"]
    assert verdict["counts_are_exact"]
    assert verdict["left"] == []
    assert verdict["files_seen"] == [2, 2, 2, 2], "of two tasks each that share a machine"
    assert not verdict["writes_to_the_driver_s"]
