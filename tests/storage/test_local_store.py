"""What only a local store has: the disk, its order of flushes, addresses, clear sentences.

What all stores have in common is in `test_store_contract`.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import stillframe
from stillframe.errors import BuildError, StorageError
from stillframe.storage.files import RealFiles
from stillframe.storage.local import LocalStore
from stillframe.storage.store import Store, open_store

SOURCES = str(Path(next(iter(stillframe.__path__))).parent)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


def everything_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_writer_that_fails_halfway_leaves_nothing(store: Store, tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 1_000_000
        raise ValueError("the state could not be encoded")

    with pytest.raises(ValueError, match="could not be encoded"):
        store.write("chk-1/a", chunks())

    assert everything_below(tmp_path) == ["root", "root/chk-1"]


def test_a_writer_killed_halfway_leaves_nothing_that_a_listing_shows(
    store: Store, tmp_path: Path
) -> None:
    script = """
        import os, signal, sys
        from stillframe.storage.store import open_store
        def chunks():
            yield b"x" * 1_000_000
            os.kill(os.getpid(), signal.SIGKILL)
            yield b"never"
        open_store(sys.argv[1]).write("chk-1/a", chunks())
    """
    assert run_python(script, store.address).returncode == -9

    assert store.list("chk-1") == []
    store.write("chk-1/a", [b"by the next attempt"])
    store.delete_directory("chk-1")
    assert everything_below(tmp_path) == ["root"]


@pytest.fixture
def system_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was flushed and linked, in order; a temporary name is told as `.tmp`."""
    calls: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def short(path: str | Path) -> str:
        name = os.path.relpath(path, tmp_path)
        return re.sub(r"\.tmp-\w+", ".tmp", name)

    def fsync(descriptor: int) -> None:
        calls.append("flush " + short(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        calls.append(f"link {short(source)} {short(target)}")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    return calls


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name what is open")
def test_contents_and_every_new_name_are_flushed_in_the_order_that_survives_a_power_cut(
    store: Store, system_calls: list[str]
) -> None:
    store.write("job/chk-1/a", [b"a"])
    store.create_if_absent("job/chk-1/b", b"b")

    assert system_calls == [
        "flush ..",
        "flush .",
        "flush root",
        "flush root/job",
        "flush root/job/chk-1/.tmp",
        "link root/job/chk-1/.tmp root/job/chk-1/a",
        "flush root/job/chk-1",
        "flush root/job/chk-1/.tmp",
        "link root/job/chk-1/.tmp root/job/chk-1/b",
        "flush root/job/chk-1",
    ]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name what is open")
def test_the_name_of_a_root_that_was_there_is_flushed_for_whoever_made_it_and_died(
    store: Store, tmp_path: Path, system_calls: list[str]
) -> None:
    (tmp_path / "root").mkdir()
    store.create_if_absent("entry", b"1")

    assert system_calls[0] == "flush ."


def test_a_place_that_may_not_be_flushed_is_no_hindrance_if_it_was_there(
    tmp_path: Path,
) -> None:
    class Guarded(RealFiles):
        def flush_directory(self, directory: str) -> None:
            if directory == str(tmp_path.parent):
                raise PermissionError(errno.EACCES, "not yours")
            super().flush_directory(directory)

    store = LocalStore(tmp_path, Guarded())

    assert store.create_if_absent("entry", b"1")


class SettledPlaces(RealFiles):
    """Notes which directories were flushed."""

    def __init__(self) -> None:
        self.flushed: list[str] = []

    def flush_directory(self, directory: str) -> None:
        super().flush_directory(directory)
        self.flushed.append(directory)


def test_settling_flushes_a_directory_and_one_that_is_gone_needs_none(tmp_path: Path) -> None:
    files = SettledPlaces()
    store = LocalStore(tmp_path, files)
    store.write("job/a", [b"a"])
    files.flushed.clear()

    for directory in ("", "job", "gone"):
        store.settle(directory)

    assert files.flushed == [str(tmp_path), str(tmp_path / "job")]


def test_a_relative_address_is_made_absolute_for_other_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert open_store("chk").address == str(tmp_path / "chk")


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("FILE://localhost/a/b", "/a/b"),
        ("file:///a%20b#1?c", "/a b#1?c"),
        ("/a%20b", "/a%20b"),
    ],
)
def test_an_address_is_a_path_or_a_file_url(address: str, path: str) -> None:
    assert open_store(address).address == path


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs://bucket/x", "on 'gs', which is not supported: give a path, or a file://, s3://"),
        ("file://elsewhere/x", "names the machine 'elsewhere'"),
        (" ", "is empty"),
    ],
)
def test_an_address_that_nobody_can_open_is_refused(address: str, said: str) -> None:
    with pytest.raises(BuildError, match=said):
        open_store(address)


def test_a_file_where_a_directory_should_be_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"not a directory")

    for act in (
        lambda: store.write("chk-1/a", [b""]),
        lambda: store.create_if_absent("log/1", b""),
        lambda: store.read("chk-1/a"),
        lambda: store.list("log"),
        lambda: store.delete("chk-1/a"),
        lambda: store.delete_directory("chk-1"),
    ):
        with pytest.raises(StorageError, match=rf"cannot \w+ {tmp_path}/root.*") as raised:
            act()
        assert "\n" not in str(raised.value)


def test_a_directory_where_a_file_should_be_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "root/chk-1/a").mkdir(parents=True)

    with pytest.raises(StorageError, match=r"cannot read .*chk-1/a: it is a directory"):
        store.read("chk-1/a")
    with pytest.raises(StorageError, match=r"cannot delete .*chk-1/a"):
        store.delete("chk-1/a")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a /proc to be refused by")
def test_a_place_where_nobody_may_create_is_named() -> None:
    with pytest.raises(StorageError, match="cannot write /proc/stillframe/a: "):
        open_store("/proc/stillframe").write("a", [b""])


def test_permission_denied_is_said(tmp_path: Path) -> None:
    """Root may write anywhere, so another user tries."""
    (tmp_path / "root").mkdir(mode=0o500)
    script = """
        import os, sys
        from stillframe.storage.store import open_store
        from stillframe.errors import StorageError
        store = open_store(sys.argv[1])
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            store.write("chk-1/a", [b"x"])
        except StorageError as error:
            print(error)
    """
    ran = run_python(script, str(tmp_path / "root"))

    assert f"cannot write {tmp_path}/root/chk-1/a: permission denied" in ran.stdout, ran.stderr


def start_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": SOURCES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with start_python(script, *arguments) as process:
        output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_said_and_leaves_nothing_half_written(small_disk: Path) -> None:
    store = open_store(str(small_disk))
    kept = store.write("chk-1/a", [b"a" * 100_000])

    with pytest.raises(StorageError, match=r"cannot write .*chk-2/a: no space left on device"):
        store.write("chk-2/a", [b"b" * 100_000] * 10)
    with pytest.raises(StorageError, match=r"cannot create .*log/1: no space left on device"):
        store.create_if_absent("log/1", b"c" * 1_000_000)

    assert everything_below(small_disk) == ["chk-1", "chk-1/a", "chk-2", "log"]
    assert store.read_verified("chk-1/a", kept.length_bytes, kept.crc32).size == 100_000
    assert store.create_if_absent("log/1", b"small enough")


def test_what_dead_writers_left_is_removed_and_files_stay(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("shared/1/a", [b"x"])
    (tmp_path / "shared" / "1" / ".tmp-half").write_bytes(b"x")

    store.delete_unfinished("shared/1")
    store.delete_unfinished("shared/none")

    assert everything_below(tmp_path) == ["shared", "shared/1", "shared/1/a"]


def test_a_limit_on_file_sizes_is_said_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = f"""
        import resource, sys
        from stillframe.storage.store import open_store
        from stillframe.errors import StorageError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))
        try:
            open_store(sys.argv[1]).write("chk-1/a", [b"x" * 60_000] * 10)
        except StorageError as error:
            print(error)
    """
    ran = run_python(script, str(tmp_path))

    assert "no space left on device" in ran.stdout, ran.stderr
    assert everything_below(tmp_path) == ["chk-1"]
