"""What a run of the tests says at its end: a test that was skipped has proved nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STORY = """
import pytest

def test_one_that_runs(): pass

@pytest.mark.skipif(True, reason="there is no such machine")
def test_one_that_needs_a_machine(): pass

@pytest.mark.parametrize("of", [1, 2])
def test_two_that_look_first(of): pytest.skip("only root may do that")
"""


def last_line_of(directory: Path, *arguments: str) -> str:
    """What the tests of a directory say last, with the conftest of these."""
    shutil.copy(Path(__file__).parent / "conftest.py", directory)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    shared = {"PYTHONPATH": str(Path(__file__).parent / "shared")}
    ran = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **shared},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_last_line_says_what_was_skipped_and_why(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_story.py").write_text(STORY)

    assert last_line_of(tmp_path, "-n", workers) == (
        "skipped: test_story.py::test_one_that_needs_a_machine (there is no such machine);"
        " test_story.py::test_two_that_look_first[1] and 1 more (only root may do that)"
    )


def test_where_nothing_was_skipped_the_last_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "test_story.py").write_text("def test_one_that_runs(): pass")

    assert last_line_of(tmp_path, "-n", "0") == "skipped: nothing"
