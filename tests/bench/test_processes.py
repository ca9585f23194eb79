"""A program is run to its end or to its limit, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stillframe.bench.processes import Ended, run_program

STUBBORN_CHILD = """\
import os, signal, subprocess, sys
# In a session of its own, and deaf to polite requests.
child = subprocess.Popen(
    [sys.executable, "-c",
     "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
     "print('ready', flush=True); signal.pause()"],
    start_new_session=True, stdout=subprocess.PIPE, text=True,
)
assert child.stdout.readline() == "ready\\n"
with open("pids", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
"""


def run(code: str, directory: Path, **more: Any) -> Ended:
    return run_program(
        [sys.executable, "-c", code],
        directory=directory,
        output=directory / "out",
        errors=directory / "err",
        **{"seconds_max": 120.0, **more},
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids_in(directory: Path) -> list[int]:
    return [int(pid) for pid in (directory / "pids").read_text().split()]


def test_what_a_program_prints_is_kept_and_its_exit_code_told(tmp_path):
    ended = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", tmp_path)

    assert (ended.exit_code, ended.is_too_late, ended.left_behind) == (7, False, 0)
    assert (tmp_path / "out").read_text() == "out\n"
    assert (tmp_path / "err").read_text() == "err\n"


def test_a_program_runs_in_its_directory_with_its_environment_and_reads_nothing(tmp_path):
    environ = {**os.environ, "MARKED": "yes"}
    code = "import os, sys; print(os.getcwd(), os.environ['MARKED'], repr(sys.stdin.read()))"

    run(code, tmp_path, environ=environ)

    assert (tmp_path / "out").read_text().split() == [str(tmp_path), "yes", "''"]


def test_a_program_that_kills_itself_has_a_negative_exit_code(tmp_path):
    ended = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path)

    assert ended.exit_code == -signal.SIGKILL


def test_a_program_that_hangs_is_ended_at_its_limit_with_all_its_children(tmp_path):
    hangs = STUBBORN_CHILD + "signal.pause()\n"

    ended = run(hangs, tmp_path, seconds_max=10.0, grace_seconds=0.2)

    assert ended.is_too_late
    assert ended.left_behind == 2
    assert not [pid for pid in pids_in(tmp_path) if is_alive(pid)]


def test_a_child_that_a_program_leaves_behind_is_ended_too(tmp_path):
    ended = run(STUBBORN_CHILD, tmp_path, grace_seconds=0.2)

    assert (ended.exit_code, ended.left_behind) == (0, 1)
    assert not [pid for pid in pids_in(tmp_path) if is_alive(pid)]


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_ends_the_running_program_and_its_children(tmp_path, times):
    # The harness in a process of its own: a program that tells through a pipe that it runs.
    os.mkfifo(tmp_path / "runs")
    hangs = STUBBORN_CHILD + "open('runs', 'w').write('now')\nsignal.pause()\n"
    harness = (
        "import sys; from pathlib import Path; from stillframe.bench.processes import run_program;"
        "home = Path(sys.argv[1]);"
        "run_program([sys.executable, '-c', sys.argv[2]], directory=home, output=home / 'out',"
        " errors=home / 'err', seconds_max=300.0, grace_seconds=0.5)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", harness, str(tmp_path), hangs], stderr=subprocess.PIPE, text=True
    )
    assert (tmp_path / "runs").read_text() == "now"

    for _ in range(times):
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert "KeyboardInterrupt" in said
    assert process.returncode == -signal.SIGINT
    assert not [pid for pid in pids_in(tmp_path) if is_alive(pid)]


def test_a_program_that_does_not_exist_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_program(
            ["/no/such/program"],
            directory=tmp_path,
            output=tmp_path / "out",
            errors=tmp_path / "err",
            seconds_max=1.0,
        )
