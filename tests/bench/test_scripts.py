"""The scripts in bench/ measure single parts of the engine by hand; here each runs, in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SECONDS_MAX = 240.0

TINY = {
    "checkpoints": ["--records", "200000", "--rounds", "1", "--only", "strings"],
    "commit_latency": ["--checkpoints", "3", "--slots", "1"],
    "databases": ["--rows", "2000", "--rounds", "1", "postgres"],
    "duplicates": ["--keys", "2000", "--rounds", "1"],
    "joins": ["--batches", "2", "--rounds", "1"],
    "network": ["--seconds", "0.02", "--rounds", "1"],
    "overtaking": ["--rounds", "1", "--work-mb-per-second", "0"],
    "page_views": ["--records", "400000", "--rounds", "1", "--only", "strings"],
    "simulation": ["--seeds", "2", "--rounds", "1"],
    "stateful": ["--keys", "10", "--rows", "100", "--batches", "3"],
    "windows": ["--batches", "5", "--rounds", "1", "--windows", "1000"],
}
"""What makes a script small where it can be told so."""

IN_PIECES = {
    "disk_state": """
larger_than_memory(MEGABYTE, 1000, 0.1)
handles(MEGABYTE // 4, 0.1)
curve(10_000, 1)
throughput("100 strings", app_names, 100, 1.5, 1)
""",
    "keyed_state": """
measure("100 strings, count", app_names, 100, [COUNT], 2)
measure("100 int64, count sum avg max", sparse_integers, 100, [COUNT, SUM, AVG, MAX], 2)
""",
}
"""The others: what their main does, with other numbers."""


def ran(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        cwd=BENCH,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_script_is_run_here():
    scripts = {path.stem for path in BENCH.glob("*.py")}

    assert {*TINY, *IN_PIECES} == scripts


@pytest.mark.slow
@pytest.mark.parametrize("script", TINY)
def test_a_script_still_runs(script):
    assert ran(f"{script}.py", *TINY[script])


@pytest.mark.slow
@pytest.mark.parametrize("script", IN_PIECES)
def test_a_script_without_sizes_still_runs_in_pieces(script):
    assert ran("-c", f"from {script} import *\n{IN_PIECES[script]}")
