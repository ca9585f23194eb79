"""The programs of latency and of recovery, small: what they answer, and that they check it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stillframe.bench.programs as programs

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = {
    "variant": "",
    "parallelism": 2,
    "backend": "heap",
    "incremental": True,
    "checkpoint_interval_ms": 500,
    "mode": "aligned",
    "seconds": 1,
}


def result_of(program: str, directory: Path, **params) -> dict:
    path = Path(next(iter(programs.__path__))) / f"{program}.py"
    given = json.dumps(COMMON | params | {"directory": str(directory)})
    run = subprocess.run([sys.executable, path, given], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    word, _, answer = run.stdout.strip().splitlines()[-1].partition(" ")
    assert word == "RESULT"
    return json.loads(answer)


@pytest.mark.soak
def test_the_latency_program_measures_each_record_behind_the_count(tmp_path):
    result = result_of("stillframe_latency", tmp_path, workload="latency", rate=1000, keys=10)

    assert result["counted"] == result["records"] > 1000
    latency = result["latency_ms"]
    assert 900 <= latency["samples"] < result["records"], "the first seconds do not count"
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p999"] <= latency["max"]
    assert result["checkpoints"]["completed"] > 1


@pytest.mark.parametrize("backend", ["heap", pytest.param("rocksdb", marks=pytest.mark.soak)])
def test_the_recovery_program_kills_a_slot_and_tells_when_the_output_was_right_again(
    tmp_path, backend
):
    size = 1_000_000
    result = result_of(
        "stillframe_recovery", tmp_path, workload="recovery", backend=backend, state_bytes=size
    )

    assert result["state_bytes"] > size
    recovery = result["recovery"]
    assert 0 < result["recovery_s"] == recovery["first_output_s"] <= recovery["output_of_all_s"]
    assert sum(recovery["parts"].values()) == pytest.approx(recovery["output_of_all_s"], abs=0.01)
    assert min(recovery["parts"].values()) >= 0
    assert recovery["restart_delay_s"] >= 0.9
