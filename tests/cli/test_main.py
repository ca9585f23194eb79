"""The command as a stranger meets it: help, version, mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stillframe
from stillframe.cli.main import main


def test_help_tells_a_stranger_what_this_is(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "survive kill -9 with every record counted once" in said
    for command in ("demo", "doctor", "run", "inspect"):
        assert f"stillframe {command}" in said


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    assert "first steps" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"stillframe {stillframe.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["demo", "--kills", "-1"], "'-1'"),
        (["demo", "--kills", "some"], "'some' is not a whole number"),
        (["demo", "--records", "0"], "'0' is not a whole number of at least 1"),
        (["demo", "--", "more"], "demo takes no arguments after --"),
        (["run"], "JOB.py"),
        (["run", "job.py", "--set", "parallelism"], "'parallelism' is not of the form KEY=VALUE"),
        (["run", "job.py", "--restore", "oldest"], "'oldest' is neither 'latest' nor"),
        (["run", "job.py", "--restore", "0"], "'0' is neither 'latest' nor"),
    ],
)
def test_a_command_that_is_not_understood_ends_with_2_and_says_why(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_failure_is_one_sentence_on_stderr_and_exit_code_1(capsys, tmp_path):
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("stillframe: ")
    assert said.err.count("\n") == 1
    assert "is no directory" in said.err


def test_with_debug_a_failure_shows_where_it_comes_from(capsys, tmp_path):
    assert main(["inspect", "--debug", str(tmp_path / "nothing")]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_command_starts_without_waiting_for_pyspark_or_pyarrow():
    script = "import sys, stillframe.cli.main; print({'pyspark', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_module_can_be_run_like_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "stillframe", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"stillframe {stillframe.__version__}\n"
