"""Jobs are found through small files, and files of processes that are gone go too."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stillframe.errors import JobFailed, StillframeError
from stillframe.rest import announcing
from stillframe.rest.registry import (
    DRIVER_FILE,
    find,
    read_driver_file,
    register,
    registered_jobs,
    registry_directory,
    remove_driver_file,
    this_process,
    unregister,
    write_driver_file,
)
from stillframe.storage.store import open_store

JID = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch):
    """An empty one for each test."""
    monkeypatch.setenv("STILLFRAME_REGISTRY", str(tmp_path / "registry" / "jobs"))
    return tmp_path / "registry" / "jobs"


@pytest.fixture
def job():
    return this_process(JID, "counts", "http://127.0.0.1:1", "a-token", "/chk", 1_000)


def test_a_job_is_registered_for_its_owner_alone_and_found_by_name_or_id(job, registry):
    register(job)

    assert registered_jobs() == [job]
    dashed = f"{JID[:8]}-{JID[8:12]}-{JID[12:16]}-{JID[16:20]}-{JID[20:]}"
    assert find("counts") == find(JID) == find(dashed) == job
    assert stat.S_IMODE(registry.stat().st_mode) == 0o700
    (file,) = registry.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == (f"{JID}.json", 0o600)
    told = json.loads(file.read_text())
    assert {name: told[name] for name in ("jid", "name", "url", "token", "pid")} == {
        "jid": JID,
        "name": "counts",
        "url": "http://127.0.0.1:1",
        "token": "a-token",
        "pid": os.getpid(),
    }


def test_without_the_variable_it_is_below_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("STILLFRAME_REGISTRY")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert registry_directory() == tmp_path / ".stillframe" / "jobs"


def test_without_a_home_directory_nothing_is_registered_and_nothing_breaks(monkeypatch, job):
    monkeypatch.delenv("STILLFRAME_REGISTRY")
    monkeypatch.setattr(Path, "home", _no_home)

    with pytest.raises(OSError, match="set STILLFRAME_REGISTRY"):
        register(job)
    assert registered_jobs() == []
    with pytest.raises(StillframeError, match="STILLFRAME_REGISTRY, which is not set; none runs"):
        find("counts")


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_job_that_has_ended_is_no_longer_there(job, registry):
    register(job)
    unregister(job)
    unregister(job)

    assert registered_jobs() == []
    assert list(registry.iterdir()) == []


def test_a_driver_leaves_the_file_of_its_successor_alone(job):
    register(job)
    successor = replace(job, url="http://127.0.0.1:2")
    register(successor)

    unregister(job)

    assert registered_jobs() == [successor]


def test_the_file_of_a_process_that_was_killed_is_swept_by_who_reads(job, registry):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    register(replace(job, pid=ended.pid))

    assert registered_jobs() == []
    assert list(registry.iterdir()) == []


def test_a_later_process_of_the_same_number_is_not_taken_for_the_driver(job, registry):
    register(replace(job, process_started="1"))

    assert registered_jobs() == []
    assert list(registry.iterdir()) == []


def test_the_file_of_another_machine_is_left_alone(job, registry):
    register(replace(job, host="elsewhere.example", pid=2**22 + 1))

    assert [each.host for each in registered_jobs()] == ["elsewhere.example"]
    assert len(list(registry.iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '"x"', "{}", '{"jid": 7}', "[" * 50_000, "\x00\xff"],
)
def test_a_file_that_cannot_be_read_is_passed_over(job, registry, text):
    register(job)
    (registry / f"{'f' * 32}.json").write_text(text)
    (registry / "letter").write_text("dear")

    assert registered_jobs() == [job]


@pytest.mark.parametrize("field", ["pid", "url", "token", "started-at-ms"])
def test_a_file_with_a_field_of_another_kind_is_passed_over(job, registry, field):
    register(job)
    told = json.loads((registry / f"{JID}.json").read_text())
    (registry / f"{JID}.json").write_text(json.dumps(told | {field: [7]}))

    assert registered_jobs() == []


def test_a_link_to_somewhere_else_is_not_followed(job, registry, tmp_path):
    register(job)
    (registry / f"{JID}.json").rename(tmp_path / "elsewhere.json")
    (registry / f"{JID}.json").symlink_to(tmp_path / "elsewhere.json")

    assert registered_jobs() == []


def test_what_a_driver_left_half_written_is_swept_when_it_is_old(job, registry):
    register(job)
    new, old = registry / ".new.tmp", registry / ".old.tmp"
    for path in (new, old):
        path.write_text("{")
    os.utime(old, (time.time() - 7200, time.time() - 7200))

    registered_jobs()

    assert new.exists()
    assert not old.exists()


def test_two_jobs_of_a_name_are_told_apart_by_their_ids(job):
    other = replace(job, jid="f" * 32, started_at_ms=2_000)
    register(job)
    register(other)

    with pytest.raises(StillframeError, match=f"2 jobs are named 'counts'.*{JID} at http"):
        find("counts")
    assert find("f" * 32) == other


def test_jobs_without_checkpoints_share_an_id_but_not_a_file(job, registry):
    """Any number of processes may run one, and they are not the same job."""
    register(replace(job, checkpoint_location=None))

    assert [file.name for file in registry.iterdir()] == [f"{JID}-{os.getpid()}.json"]


@pytest.mark.parametrize("is_empty", [True, False])
def test_who_is_not_there_is_said_with_who_is(job, is_empty):
    if not is_empty:
        register(job)

    with pytest.raises(StillframeError, match="no job named 'nobody' is registered in") as error:
        find("nobody")
    assert str(error.value).endswith("none runs" if is_empty else "these run: counts")


# --- beside the checkpoints


def test_the_jobs_directory_tells_where_its_driver_is_but_not_the_token(job, tmp_path):
    store = open_store(str(tmp_path))
    write_driver_file(store, replace(job, url="http://127.0.0.1:2"))
    write_driver_file(store, job)

    assert read_driver_file(store) == replace(job, token=None)
    assert "a-token" not in (tmp_path / DRIVER_FILE).read_text()


def test_a_driver_leaves_what_its_successor_wrote_alone(job, tmp_path):
    store = open_store(str(tmp_path))
    successor = replace(job, url="http://127.0.0.1:2")
    write_driver_file(store, successor)

    remove_driver_file(store, job)
    assert read_driver_file(store) == replace(successor, token=None)
    remove_driver_file(store, successor)
    assert read_driver_file(store) is None


def test_a_directory_that_tells_nothing_or_nonsense_tells_of_no_driver(tmp_path):
    store = open_store(str(tmp_path / "not-there"))
    assert read_driver_file(store) is None
    store.create_if_absent(DRIVER_FILE, b"{")
    assert read_driver_file(store) is None


# --- by a driver


def test_a_job_is_announced_while_it_runs(driver, until):
    query = driver.start()
    directory = open_store(driver.location).below("counts")
    until(lambda: read_driver_file(directory) is not None)

    found = find("counts")
    assert (found.url, found.token) == (driver.server.url, driver.server.token)
    assert (found.checkpoint_location, found.pid) == (driver.location, os.getpid())
    assert read_driver_file(directory) == replace(found, token=None)

    query.stop()
    driver.server.withdraw(60)
    assert registered_jobs() == []
    assert read_driver_file(directory) is None


def test_a_job_that_is_started_again_is_announced_when_its_last_run_is_no_longer(
    driver, monkeypatch, until
):
    done: list[str] = []
    again = threading.Event()

    def note_register(job):
        done.append("register")
        if done.count("register") == 2:
            again.set()
        register(job)

    def slow_unregister(job):
        again.wait(0.5)  # as long as a storage may take
        unregister(job)
        done.append("unregister")

    monkeypatch.setattr(announcing, "register", note_register)
    monkeypatch.setattr(announcing, "unregister", slow_unregister)
    driver.start().stop()
    driver.start()

    until(lambda: done.count("register") == 2)
    assert done[:3] == ["register", "unregister", "register"]


def test_what_a_killed_driver_left_half_written_is_removed(driver, until):
    directory = Path(driver.location) / "counts"
    directory.mkdir(parents=True)
    (directory / ".tmp-half").write_text("{")

    driver.start()

    until(lambda: (directory / DRIVER_FILE).exists())
    assert not (directory / ".tmp-half").exists()


def test_a_driver_that_may_not_run_the_job_announces_nothing(driver, until):
    driver.start()
    until(lambda: len(registered_jobs()) == 1)
    first = find("counts")

    query, begin = driver.prepare("counts")
    begin()
    with pytest.raises(JobFailed, match="another driver runs it"):
        query.awaitTermination(60)

    assert registered_jobs() == [first]


def test_a_job_runs_all_the_same_where_nothing_can_be_written(driver, monkeypatch, caplog, until):
    monkeypatch.setenv("STILLFRAME_REGISTRY", "/dev/null/registry")

    query = driver.start()

    until(lambda: "cannot be entered into the registry" in caplog.text)
    driver.let_finish(query)
    assert query.summary.outcome == "finished"
