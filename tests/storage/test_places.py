"""Places keep their contract: on a disk, in a bucket and on HDFS."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe.errors import BuildError
from stillframe.storage.places import Place, address_of, is_on_disk, place_of

KINDS = [
    "disk",
    pytest.param("s3", marks=pytest.mark.s3),
    pytest.param("hdfs", marks=pytest.mark.hdfs),
]


@pytest.fixture(params=KINDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "root")
    if request.param == "hdfs":
        return str(request.getfixturevalue("hdfs_root"))
    request.getfixturevalue("s3_environment")
    return f"s3://{request.getfixturevalue('s3_bucket')}/root"


@pytest.fixture
def place(root: str) -> Place:
    return place_of(root)


def written(place: Place, path: str, data: bytes = b"abc") -> str:
    draft = place.draft(path)
    draft.file.write(data)
    assert place.facts(path) is None or is_on_disk(path), "nothing counts before it is finished"
    assert draft.finish() == len(data)
    return path


def none(name: str) -> bool:
    return False


def test_a_finished_file_is_found_opened_and_read_in_pieces(place: Place, root: str) -> None:
    data = bytes(range(256)) * 40_000
    path = written(place, f"{root}/a/b%2D.bin", data)

    facts = place.facts(path)
    assert facts is not None
    assert (facts.path, facts.size_bytes) == (path, len(data))
    with place.open(path) as file:
        assert file.read(10) == data[:10]
        file.seek(5_000_000)
        assert file.read(1_000_000) == data[5_000_000:6_000_000]
        assert file.seek(-3, 2) == len(data) - 3
        assert file.read() == data[-3:]
        assert file.size_now() == len(data)
    assert [each.path for each in place.walk(root, none)] == [path]
    assert place.has_directory(f"{root}/a")


def test_a_walk_passes_over_what_it_is_told_to(place: Place, root: str) -> None:
    for name in ("x", "d/y", "_hidden/z", "d/_w"):
        written(place, f"{root}/{name}")
    found = sorted(each.path for each in place.walk(root, lambda name: name.startswith("_")))
    assert found == [f"{root}/d/y", f"{root}/x"]
    assert list(place.walk(f"{root}/nowhere", none)) == []
    assert not place.has_directory(f"{root}/nowhere")


def test_a_file_moves_and_to_repeat_it_is_harmless(place: Place, root: str) -> None:
    path = written(place, f"{root}/staged/x")
    assert place.move(path, f"{root}/k=1/x")
    assert not place.move(path, f"{root}/k=1/x")
    assert [each.path for each in place.walk(root, none)] == [f"{root}/k=1/x"]


def test_of_two_who_create_a_file_one_does(place: Place, root: str) -> None:
    assert place.create_if_absent(f"{root}/log/0", b"one")
    assert not place.create_if_absent(f"{root}/log/0", b"two")
    with place.open(f"{root}/log/0") as file:
        assert file.read() == b"one"
    assert len(list(place.walk(root, none))) == 1


def test_what_is_discarded_or_deleted_is_gone(place: Place, root: str) -> None:
    draft = place.draft(f"{root}/x")
    draft.file.write(b"abc")
    draft.discard()
    path = written(place, f"{root}/y")
    place.delete(path)
    place.delete(path)
    assert list(place.walk(root, none)) == []
    with pytest.raises(FileNotFoundError):
        place.open(path)


def test_an_address_is_written_in_one_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert address_of("x") == str(tmp_path / "x")
    assert address_of("file:///x/y") == address_of("file:/x/y") == "/x/y"
    assert address_of("s3a://b//x/y/") == address_of("s3://b/x/y") == "s3://b/x/y"
    for wrong in ("ftp://h/x", "", "s3a://key:secret@b/x", "s3:///x"):
        with pytest.raises(BuildError) as refused:
            address_of(wrong)
        assert "secret" not in str(refused.value)
