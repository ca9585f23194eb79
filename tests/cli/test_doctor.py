"""`stillframe doctor`: what it examines, and that it notices what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from stillframe.cli.doctor import Warned, _storage, examined
from stillframe.errors import StillframeError
from stillframe.storage import hdfs
from stillframe.storage.asking import Limits


def test_a_check_that_answers_is_ok_one_that_warns_warns_and_one_that_raises_is_a_problem():
    def warn() -> str:
        raise Warned("it is slow")

    def fail() -> str:
        raise ValueError("it broke\nin many places")

    assert str(examined("x", lambda: "fine")) == "ok       x: fine"
    assert str(examined("x", warn)) == "warning  x: it is slow"
    assert str(examined("x", fail)) == "problem  x: ValueError: it broke"


def test_a_place_that_takes_durable_files_is_left_as_it_was(tmp_path: Path):
    assert "takes whole and durable files" in _storage(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    _storage(tmp_path / "old")
    assert list((tmp_path / "old").iterdir()) == []


@pytest.mark.s3
def test_a_bucket_is_examined_like_a_directory(s3_bucket, s3_environment):
    location = f"s3://{s3_bucket}/checkpoints"

    assert _storage(location) == f"{location} takes whole and durable files"
    assert "no such bucket" in str(examined("storage", lambda: _storage("s3://nothing-there/x")))


def test_a_namenode_that_cannot_be_reached_is_told_in_one_sentence(free_port, monkeypatch):
    pytest.importorskip("hdfs_native")
    monkeypatch.setattr(hdfs, "Limits", lambda: Limits(request_seconds=60.0, patience_seconds=0.5))
    namenode = f"hdfs://127.0.0.1:{free_port}"

    found = examined("storage", lambda: _storage(f"{namenode}/checkpoints"))

    assert found.answer == "problem"
    assert found.text.startswith(
        f"cannot write {namenode}/checkpoints/.doctor/file: {namenode} cannot be reached; start the"
        " namenode, or correct the address"
    )


def test_a_place_that_cannot_be_written_to_is_a_problem(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StillframeError, match="file"):
        _storage(tmp_path / "file" / "below")
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(StillframeError):
            _storage(tmp_path / "locked")


@pytest.mark.spark
def test_a_machine_that_can_run_jobs_gets_a_clean_bill(command, tmp_path):
    done = command("doctor", "--checkpoint-location", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == "jobs can run here"
    assert all(line.startswith("ok ") for line in lines[:-1]), done.stdout
    checks = [line.split(":")[0].removeprefix("ok").strip() for line in lines[:-1]]
    [executors] = [line for line in lines if "executors:" in line]
    assert executors.endswith(f" ran {sys.executable}")
    assert checks == [
        "Python", "pyarrow", "Java", "storage", "Spark", "slots", "dynamic allocation",
        "encryption", "executors", "driver", "barrier stage", "memory", "shared storage",
    ]  # fmt: skip


@pytest.mark.spark
def test_a_python_that_executors_do_not_have_is_named_and_what_needs_it_is_not_tried(
    command, monkeypatch
):
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    done = command("doctor", "--master", "local[3]", "--json")
    assert done.returncode == 1
    found = {
        finding["check"]: finding["text"] for finding in map(json.loads, done.stdout.splitlines())
    }
    assert found["executors"].startswith("executors cannot run /nowhere/python")
    for check in ("driver", "barrier stage"):
        assert found[check] == "not tried, because it needs a Python on executors"


@pytest.mark.spark
def test_settings_under_which_jobs_cannot_run_are_problems(command, monkeypatch):
    monkeypatch.setenv(
        "PYSPARK_SUBMIT_ARGS",
        "--conf spark.authenticate=true --conf spark.network.crypto.enabled=true"
        " --conf spark.executor.pyspark.memory=1g"
        " pyspark-shell",
    )
    done = command("doctor", "--master", "local[1]", "--json")
    assert done.returncode == 1
    answers = {
        finding["check"]: finding["answer"] for finding in map(json.loads, done.stdout.splitlines())
    }
    assert answers["encryption"] == "problem"
    assert answers["memory"] == "warning"
    assert answers["slots"] == "warning"
    assert answers["barrier stage"] == "warning"
    assert answers["Spark"] == answers["executors"] == "ok"


@pytest.mark.spark
def test_a_session_that_does_not_start_is_told_in_one_line(command):
    done = command("doctor", "--master", "nonsense")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "no session starts on nonsense: " in line
    assert done.stderr == ""
