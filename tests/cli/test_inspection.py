"""`stillframe inspect` on checkpoints of a job that has really run."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path

import pytest

from stillframe.cli.main import main
from stillframe.coordinator.located import locate, write_savepoint
from stillframe.protocol.savepoints import as_savepoint
from stillframe.runtime.stored_states import copied
from stillframe.storage.local import LocalStore


@pytest.fixture
def home(tmp_path: Path, small_job) -> Path:
    small_job(tmp_path)
    return tmp_path


def job_directory(home: Path) -> Path:
    return home / "chk" / "page-views"


def checkpoint_number(path: Path) -> int:
    return int(path.name.split("-")[1])


def newest(home: Path) -> Path:
    return max(job_directory(home).glob("chk-*"), key=checkpoint_number)


def state_file(home: Path) -> Path:
    return min(job_directory(home).glob(f"shared/*/*-{checkpoint_number(newest(home))}.arrow"))


def test_a_job_is_told_with_its_checkpoints_operators_states_and_positions(home, capsys):
    assert main(["inspect", str(job_directory(home)), "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert "job page-views in" in said
    assert "finished, attempt 1 from the beginning" in said
    assert f"checkpoint {checkpoint_number(newest(home))}: complete, attempt 1, epoch" in said
    assert "[clicks]  2 subtasks" in said
    assert 'position {"id": "partition-00000", "position": {"next": 250}}' in said
    assert "10 rows" in said
    assert "(app_id string, count int64)" in said
    assert said.count('{"app_id": "app-') == 2
    assert "DAMAGED" not in said


def test_machines_get_the_same_as_json(home, capsys):
    assert main(["inspect", str(newest(home)), "--json", "--rows", "100"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert job["job"] == "page-views"
    assert job["outcome"] == "finished"
    (checkpoint,) = job["checkpoints"]
    assert checkpoint["status"] == "complete"
    assert checkpoint["state_bytes"] > 0
    operators = {operator["uid"]: operator for operator in checkpoint["operators"]}
    assert set(operators) == {"clicks", "count", "write"}
    (state,) = operators["count"]["states"]
    assert state["rows"] == 10
    assert sum(row["count"] for row in state["sample"]) == 1_000
    assert len(operators["clicks"]["items"]) == 4


def test_state_that_is_kept_in_the_metadata_is_told_like_any_other(tmp_path, small_job, capsys):
    said = {}
    for backend in ("fs", "memory"):
        small_job(tmp_path / backend, stateBackend=backend)
        path = str(newest(tmp_path / backend))
        assert main(["inspect", path, "--json", "--rows", "100"]) == 0
        (job,) = json.loads(capsys.readouterr().out)
        (checkpoint,) = job["checkpoints"]
        operators = {operator["uid"]: operator for operator in checkpoint["operators"]}
        said[backend] = checkpoint["state_bytes"], operators["count"]["states"]

    assert said["memory"] == said["fs"]
    assert said["memory"][1][0]["rows"] == 10
    assert not list(job_directory(tmp_path / "memory").glob("shared/*/*"))


def test_the_states_in_a_database_are_told_with_their_rows(tmp_path, small_job, capsys):
    small_job(tmp_path, stateBackend="rocksdb")
    assert main(["inspect", str(newest(tmp_path)), "--json", "--rows", "100"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    (checkpoint,) = job["checkpoints"]
    (count,) = (each for each in checkpoint["operators"] if each["uid"] == "count")

    (state,) = count["states"]
    assert (state["name"], state["rows"]) == ("aggregates", 10)
    assert sum(row["count"] for row in state["sample"]) == 1_000
    assert state["bytes"] > 0


def test_a_damaged_file_of_a_database_is_named(tmp_path, small_job, capsys):
    small_job(tmp_path, stateBackend="rocksdb")
    damaged = next(job_directory(tmp_path).glob("shared/*/*.sst-*.db"))
    damaged.write_bytes(damaged.read_bytes()[:-1])

    assert main(["inspect", str(newest(tmp_path))]) == 1
    assert damaged.name in capsys.readouterr().out


def test_a_savepoint_is_told_like_a_checkpoint(tmp_path, small_job, capsys):
    small_job(tmp_path, stateBackend="rocksdb")
    found, names = locate(str(job_directory(tmp_path))), count()
    store = LocalStore(tmp_path / "savepoint")
    savepoint = as_savepoint(found.manifest)
    made = copied(found.store, savepoint, store, lambda: f"state/{next(names)}.arrow")
    write_savepoint(store, made)

    assert main(["inspect", str(tmp_path / "savepoint"), "--rows", "1"]) == 0
    said = capsys.readouterr().out
    assert "savepoint" in said
    assert "state aggregates: 10 rows" in said

    next(tmp_path.glob("savepoint/state/*")).write_bytes(b"rot")
    assert main(["inspect", str(tmp_path / "savepoint")]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_a_location_with_several_jobs_is_told_job_by_job(home, small_job, capsys):
    small_job(home, "second job")
    assert main(["inspect", str(home / "chk")]) == 0
    said = capsys.readouterr().out
    assert "job page-views in" in said
    assert "job second job in" in said


def test_an_altered_state_file_is_named(home, capsys):
    damaged = state_file(home)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert main(["inspect", str(newest(home))]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED: " in said
    assert damaged.name in said


def test_a_missing_state_file_is_named(home, capsys):
    missing = state_file(home)
    missing.unlink()
    assert main(["inspect", str(job_directory(home))]) == 1
    assert missing.name in capsys.readouterr().out


def test_torn_metadata_is_named(home, capsys):
    metadata = newest(home) / "_metadata"
    metadata.write_bytes(metadata.read_bytes()[:-10])
    assert main(["inspect", str(job_directory(home)), "--json"]) == 1
    (job,) = json.loads(capsys.readouterr().out)
    assert "_metadata" in job["checkpoints"][-1]["damage"][0]


def test_a_damaged_job_log_is_named(home, capsys):
    last = max((job_directory(home) / "log").iterdir())
    last.write_bytes(b"{}")
    assert main(["inspect", str(job_directory(home))]) == 1
    said = capsys.readouterr().out
    assert last.name in said
    assert "unknown, there is no job log beside it" in said


def test_a_checkpoint_that_the_log_does_not_know_is_not_complete_and_not_damaged(home, capsys):
    left_over = job_directory(home) / "chk-77-1"
    shutil.copytree(newest(home), left_over)
    (left_over / "_metadata").write_text("half")
    assert main(["inspect", str(left_over)]) == 0
    assert "checkpoint 77: not complete, attempt 1, no readable metadata" in capsys.readouterr().out


def test_a_directory_without_any_of_this_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "neither a job log nor checkpoints" in capsys.readouterr().err


def test_another_attempt_s_checkpoint_of_the_same_number_is_not_complete(home, capsys):
    shutil.copytree(
        newest(home), newest(home).with_name(f"chk-{checkpoint_number(newest(home))}-9")
    )
    assert main(["inspect", str(job_directory(home))]) == 0
    said = capsys.readouterr().out
    assert "not complete, attempt 9" in said
    assert f"in checkpoint {checkpoint_number(newest(home))} of attempt 1:" in said
