"""A snapshot by its address."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.located import locate, own_checkpoint, write_savepoint
from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.protocol.manifests import FileHandle, KeyedState, Manifest, OperatorSnapshot
from stillframe.storage.store import open_store
from stillframe.testing.clock import ManualClock


def manifest(checkpoint_id: int, epoch: int, attempt: int = 1) -> Manifest:
    return Manifest("views", attempt, checkpoint_id, epoch, "checkpoint", 0, 0, 16, (), ())


@pytest.fixture
def job(tmp_path: Path) -> str:
    """With the checkpoints 1, 2 and 3, of which the last two are retained."""
    address = str(tmp_path / "views")
    ledger = Ledger(open_store(address), "views", 2, ManualClock())
    ledger.read()
    ledger.begin_attempt(None)
    for number in (1, 2, 3):
        ledger.note_used(number)
        ledger.complete(manifest(number, number - 1))
    return address


def test_a_job_is_at_its_newest_checkpoint(job):
    found = locate(job)

    assert found.manifest.checkpoint_id == 3
    assert found.store.address == job


def test_a_person_may_ask_for_another_that_is_retained(job):
    assert locate(job, checkpoint=2).manifest.checkpoint_id == 2
    with pytest.raises(StorageError, match=r"has no checkpoint 1 that is .*; there are: 2, 3"):
        locate(job, checkpoint=1)


def test_a_checkpoint_has_an_address_of_its_own_and_its_files_are_the_jobs(job):
    found = locate(f"{job}/chk-2-1")

    assert found.manifest.checkpoint_id == 2
    assert found.store.address == job


def test_a_checkpoint_that_the_log_does_not_know_is_not_complete(job):
    open_store(job).write("chk-4-1/_metadata", [b"whatever"])

    with pytest.raises(StorageError, match=r"chk-4-1 is complete .* there are: chk-2-1, chk-3-1"):
        locate(f"{job}/chk-4-1")


def test_metadata_that_has_been_altered_is_told(job):
    metadata = Path(job, "chk-3-1/_metadata")
    metadata.write_bytes(metadata.read_bytes().replace(b"views", b"vines"))

    with pytest.raises(SnapshotDamaged, match="chk-3-1/_metadata"):
        locate(job)


def test_a_job_without_a_checkpoint_is_told_so(tmp_path):
    ledger = Ledger(open_store(str(tmp_path)), "views", 2, ManualClock())
    ledger.read()
    ledger.begin_attempt(None)

    with pytest.raises(StorageError, match=r"has no checkpoint that is .*; there are: none"):
        locate(str(tmp_path))


def test_a_location_names_the_jobs_below_it(job, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(StorageError, match="there are the jobs views below it"):
        locate(str(tmp_path))


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(StorageError, match="nothing is no directory"):
        locate(str(tmp_path / "nothing"))


def test_a_savepoint_is_all_in_its_directory(tmp_path):
    store = open_store(str(tmp_path / "sp"))
    write_savepoint(store, replace(manifest(7, 6), kind="savepoint"))

    found = locate(store.address)
    assert found.manifest.checkpoint_id == 7
    assert found.store.address == store.address


def test_a_job_knows_its_own_checkpoints_by_their_address(job, tmp_path):
    (tmp_path / "link").symlink_to(job)

    for own in (job, f"{job}/", f"file://{job}", str(tmp_path / "link")):
        assert own_checkpoint(own, job) == "newest"
    assert own_checkpoint(f"{job}/chk-2-1", job) == 2
    assert own_checkpoint(f"{job}/savepoints/x", job) is None
    assert own_checkpoint(f"{tmp_path}/other/chk-2-1", job) is None
    assert own_checkpoint("s3://bucket/views/chk-2-1/", "s3a://bucket/views") == 2
    assert own_checkpoint("s3://bucket/views/", job) is None


def test_the_files_that_a_half_deleted_snapshot_misses_are_told(tmp_path):
    store = open_store(str(tmp_path / "sp"))
    states = [KeyedState(name, FileHandle(f"shared/1/{name}", 1, 1), (0,), 1, "") for name in "abc"]
    snapshot = OperatorSnapshot("count", 0, keyed=tuple(states))
    write_savepoint(store, replace(manifest(7, 6), kind="savepoint", snapshots=(snapshot,)))
    store.write("shared/1/b", [b"b"])

    assert locate(store.address).missing_files() == ["shared/1/a", "shared/1/c"]
    assert locate(store.address).place == store.address


def test_a_checkpoint_says_whose_it_is_and_where_its_own_directory_is(job):
    found = locate(job)

    assert found.job_outcome == "running"
    assert found.place == f"{job}/chk-3-1"
    assert found.store.read(found.metadata_path)
