"""A job's own store that also shows the savepoint from which the job starts."""

from __future__ import annotations

import pytest

from stillframe.errors import SnapshotDamaged
from stillframe.storage.local import LocalStore
from stillframe.storage.savepoint import StoreWithSavepoint, path_in_savepoint


@pytest.fixture
def places(tmp_path):
    own, savepoint = LocalStore(tmp_path / "own"), LocalStore(tmp_path / "savepoint")
    return own, savepoint, StoreWithSavepoint(own, savepoint)


def test_a_path_of_the_savepoint_is_read_there_and_all_others_in_the_jobs_own(places):
    own, savepoint, both = places
    there = savepoint.write("state/x", [b"there"])
    here = both.write("state/x", [b"here"])

    assert both.read("state/x") == b"here"
    assert both.read(path_in_savepoint("state/x")) == b"there"
    read = both.read_verified(path_in_savepoint("state/x"), there.length_bytes, there.crc32)
    assert read.to_pybytes() == b"there"
    assert own.read("state/x") == b"here"
    with pytest.raises(SnapshotDamaged):
        both.read_verified(path_in_savepoint("state/x"), here.length_bytes, here.crc32)


def test_it_is_opened_again_as_the_jobs_own(places):
    own, _, both = places

    assert (both.address, both.settings) == (own.address, own.settings)
    assert both.below("a").address == own.below("a").address


def test_a_savepoint_is_never_written_to_or_deleted_from(places):
    _, savepoint, both = places
    savepoint.write("state/x", [b"there"])
    path = path_in_savepoint("state/x")

    for change in (
        lambda: both.write(path_in_savepoint("y"), [b""]),
        lambda: both.create_if_absent(path_in_savepoint("y"), b""),
        lambda: both.delete(path),
        lambda: both.delete_directory(path),
    ):
        with pytest.raises(AssertionError, match="a savepoint is never changed"):
            change()
    assert savepoint.list("state") == ["x"]
