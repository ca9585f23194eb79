"""The job's directory, seen from the driver."""

from dataclasses import replace
from random import Random

import pytest

from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import SnapshotDamaged
from stillframe.protocol.manifests import Manifest
from stillframe.storage.store import open_store
from stillframe.testing.simulation.storage import Disk, simulated_store
from stillframe.testing.simulation.world import World


def manifest(checkpoint_id, attempt=1):
    return Manifest(
        "views", attempt, checkpoint_id, checkpoint_id, "checkpoint", 0, 0, 128, (), (), ()
    )


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


@pytest.fixture
def snapshots(store):
    return Snapshots(store)


def directories(store):
    return sorted(name for name in store.list("") if name.startswith("chk-"))


def test_a_manifest_is_read_back_as_it_was_written(snapshots):
    completed = snapshots.write_manifest(manifest(3))

    assert snapshots.read_manifest(completed) == manifest(3)
    assert (completed.checkpoint_id, completed.epoch, completed.attempt) == (3, 3, 1)


def test_what_the_log_did_not_record_is_damage(snapshots):
    completed = snapshots.write_manifest(manifest(3))

    with pytest.raises(SnapshotDamaged):
        snapshots.read_manifest(replace(completed, manifest_crc32=1))
    with pytest.raises(SnapshotDamaged):
        snapshots.read_manifest(replace(completed, checkpoint_id=4))


def test_two_attempts_with_the_same_number_do_not_meet(snapshots):
    mine, theirs = (snapshots.write_manifest(manifest(3, attempt)) for attempt in (1, 2))

    snapshots.delete(3, 1)

    with pytest.raises(SnapshotDamaged):
        snapshots.read_manifest(mine)
    assert snapshots.read_manifest(theirs).attempt == 2


def test_the_highest_number_counts_what_never_completed(snapshots, store):
    assert snapshots.highest_id() == 0
    snapshots.write_manifest(manifest(3))
    store.write("chk-12-1/left-over.arrow", [b"x"])
    store.write("chk-x/who-knows", [b"x"])
    assert snapshots.highest_id() == 12

    store.write("shared/1/count-0-counts-14.arrow", [b"x"])
    assert snapshots.highest_id() == 14


def test_a_sweep_spares_what_is_kept_what_is_newer_and_what_is_not_ours(snapshots, store):
    kept = snapshots.write_manifest(manifest(3))
    for name in ("chk-2-1", "chk-3-2", "chk-4-2", "chk-5-3", "log", "notes"):
        store.write(f"{name}/file", [b"x"])

    snapshots.sweep([kept], set(), attempt=2)

    assert directories(store) == ["chk-3-1", "chk-5-3"]
    assert {"log", "notes"} <= set(store.list(""))


def test_deleting_twice_is_fine(snapshots):
    snapshots.write_manifest(manifest(3))
    snapshots.delete(3, 1)
    snapshots.delete(3, 1)

    assert snapshots.highest_id() == 0


def shared_files(store):
    return [
        f"{attempt}/{name}"
        for attempt in store.list("shared")
        for name in store.list(f"shared/{attempt}")
    ]


def test_a_sweep_takes_shared_files_that_no_kept_checkpoint_needs(snapshots, store):
    for name in ("1/a-0-s-3.arrow", "1/b-0-s-3.arrow", "2/a-0-s-4.arrow", "3/a-0-s-5.arrow"):
        store.write(f"shared/{name}", [b"x"])
    store.write("shared/notes/file", [b"x"])

    snapshots.sweep([], {"shared/1/b-0-s-3.arrow"}, attempt=2)

    assert shared_files(store) == ["1/b-0-s-3.arrow", "3/a-0-s-5.arrow", "notes/file"]


def test_a_sweep_that_does_not_know_what_is_needed_leaves_shared_files_alone(snapshots, store):
    store.write("chk-2-1/_metadata", [b"x"])
    store.write("shared/1/a-0-s-2.arrow", [b"x"])

    snapshots.sweep([], None, attempt=1)

    assert directories(store) == []
    assert shared_files(store) == ["1/a-0-s-2.arrow"]


def test_a_sweep_takes_what_a_crash_left_half_written(snapshots, store, tmp_path):
    for attempt in (1, 2, 3):
        store.write(f"shared/{attempt}/a-0-s-{attempt}.arrow", [b"x"])
        (tmp_path / "shared" / str(attempt) / ".tmp-half").write_bytes(b"x")

    snapshots.sweep([], {"shared/2/a-0-s-2.arrow"}, attempt=2)

    left = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert left == ["shared/2/a-0-s-2.arrow", "shared/3/.tmp-half", "shared/3/a-0-s-3.arrow"]


def test_what_the_last_sweep_deleted_does_not_come_back_with_the_power():
    for seed in range(20):
        disk = Disk()
        store = simulated_store(World(seed), disk, lambda operation, path: None)
        snapshots = Snapshots(store)
        kept = snapshots.write_manifest(manifest(3))
        snapshots.write_manifest(manifest(2))
        for path in ("shared/1/a-0-s-2.arrow", "shared/2/a-0-s-2.arrow", "shared/2/a-0-s-3.arrow"):
            store.write(path, [b"state"])
        snapshots.delete(2, 1)

        snapshots.sweep([kept], {"shared/2/a-0-s-3.arrow"}, attempt=2)
        snapshots.settle()
        disk.lose_power(Random(seed))

        left = [path for path in disk.paths() if not path.startswith("chk-3-1/")]
        assert left == ["shared/2/a-0-s-3.arrow"]
