"""Working directories, and what becomes of those whose process was killed."""

import subprocess
import sys
from pathlib import Path

from stillframe.runtime.scratch import scratch_directory

HOLDING = """
import sys
from pathlib import Path
from stillframe.runtime.scratch import scratch_directory

with scratch_directory(Path(sys.argv[1])) as directory:
    (directory / "database").write_text("large")
    print(directory, flush=True)
    sys.stdin.read()
"""


def holding(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that is at work in a directory below."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_directory_goes_when_the_work_is_done(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as directory:
        (directory / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    process, left = holding(tmp_path)
    end(process)
    assert (left / "database").exists()

    with scratch_directory(tmp_path) as directory:
        assert not left.exists()
        assert directory.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_process_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    process, used = holding(tmp_path)
    try:
        with scratch_directory(tmp_path):
            assert (used / "database").exists()
        assert (used / "database").exists()
    finally:
        end(process)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "stillframe-notes.lock").write_text("mine")
    (tmp_path / "stillframe-notes").mkdir()

    with scratch_directory(tmp_path):
        pass

    assert len(list(tmp_path.iterdir())) == 2
