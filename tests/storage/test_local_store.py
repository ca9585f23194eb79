"""The local store: whole files or none, one winner, damage that is seen, clear sentences."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

import stillframe
from stillframe.errors import BuildError, SnapshotDamaged, StorageError
from stillframe.storage.files import RealFiles
from stillframe.storage.local import LocalStore
from stillframe.storage.store import Store, Written, open_store

SOURCES = str(Path(next(iter(stillframe.__path__))).parent)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "root"))


def everything_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_what_was_written_is_read_back_and_verified(store: Store) -> None:
    chunks = [b"ab", bytearray(b"cd"), memoryview(b"ef"), pa.py_buffer(b"gh")]

    written = store.write("chk-1/state.arrow", chunks)

    assert written == Written(8, zlib.crc32(b"abcdefgh"))
    assert store.read("chk-1/state.arrow") == b"abcdefgh"
    assert store.read_verified("chk-1/state.arrow", 8, written.crc32).to_pybytes() == b"abcdefgh"


def test_the_bytes_of_a_typed_memoryview_are_counted_and_not_its_elements(store: Store) -> None:
    numbers = memoryview(b"\x01\x00\x00\x00\x02\x00\x00\x00").cast("i")

    assert store.write("numbers", [numbers]).length_bytes == 8


def test_an_empty_file_is_a_file(store: Store) -> None:
    written = store.write("empty", [])

    assert written == Written(0, 0)
    assert store.read_verified("empty", 0, 0).size == 0


def test_an_existing_file_is_not_overwritten(store: Store) -> None:
    store.write("chk-1/a", [b"first"])

    with pytest.raises(StorageError, match=r"chk-1/a.*never overwritten"):
        store.write("chk-1/a", [b"second"])

    assert store.read("chk-1/a") == b"first"
    assert store.list("chk-1") == ["a"]


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


def test_only_the_first_creator_of_a_name_wins(store: Store) -> None:
    assert store.create_if_absent("log/1", b"mine")
    assert not store.create_if_absent("log/1", b"yours")

    assert store.read("log/1") == b"mine"
    assert store.list("log") == ["1"]


def contents_by(creator: int) -> bytes:
    return f"creator {creator} ".encode() * 500


def test_of_many_threads_that_create_one_name_exactly_one_wins(store: Store) -> None:
    creators, names = 8, 25
    start = threading.Barrier(creators)

    def create_all(creator: int) -> list[int]:
        mine = open_store(store.address)
        start.wait(timeout=60)
        contents = contents_by(creator)
        return [name for name in range(names) if mine.create_if_absent(f"log/{name}", contents)]

    with ThreadPoolExecutor(creators) as pool:
        won = dict(enumerate(pool.map(create_all, range(creators), timeout=60)))

    check_winners(store, won, names)


def test_of_many_processes_that_create_one_name_exactly_one_wins(store: Store) -> None:
    creators, names = 3, 25
    script = """
        import sys
        from stillframe.storage.store import open_store
        store = open_store(sys.argv[1])
        contents = f"creator {sys.argv[2]} ".encode() * 500
        print("ready", flush=True)
        sys.stdin.readline()
        for name in range(int(sys.argv[3])):
            if store.create_if_absent(f"log/{name}", contents):
                print(name)
    """
    with ExitStack() as stack:
        running = [
            stack.enter_context(start_python(script, store.address, str(creator), str(names)))
            for creator in range(creators)
        ]
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        won = dict(enumerate(race(running)))

    check_winners(store, won, names)


def race(running: list[subprocess.Popen[str]]) -> list[list[int]]:
    """Let all go at once; the names each of them has won."""
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in running]
    return [[int(name) for name in output.split()] for output in outputs]


def check_winners(store: Store, won: dict[int, list[int]], names: int) -> None:
    assert sorted(name for mine in won.values() for name in mine) == list(range(names))
    for creator, mine in won.items():
        for name in mine:
            assert store.read(f"log/{name}") == contents_by(creator)
    assert len(store.list("log")) == names


def test_a_name_appears_with_its_whole_contents_or_not_at_all(store: Store) -> None:
    whole = b"z" * 3_000_000
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.extend(len(store.read(f"log/{name}")) for name in store.list("log"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for sequence in range(5):
            store.create_if_absent(f"log/{sequence}", whole)
    finally:
        done.set()
        watcher.join(timeout=60)

    assert not watcher.is_alive()
    assert set(seen) <= {len(whole)}


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


def test_a_torn_file_is_reported_as_damaged(store: Store, tmp_path: Path) -> None:
    written = store.write("chk-1/a", [b"0123456789"])
    (tmp_path / "root/chk-1/a").write_bytes(b"01234")

    with pytest.raises(SnapshotDamaged, match=r"root/chk-1/a is damaged: it has 5 bytes where 10"):
        store.read_verified("chk-1/a", written.length_bytes, written.crc32)


def test_a_file_that_grew_is_reported_as_damaged(store: Store, tmp_path: Path) -> None:
    written = store.write("a", [b"0123456789"])
    (tmp_path / "root/a").write_bytes(b"0123456789+")

    with pytest.raises(SnapshotDamaged, match="it has 11 bytes where 10"):
        store.read_verified("a", written.length_bytes, written.crc32)


def test_one_flipped_bit_is_reported_with_both_checksums(store: Store, tmp_path: Path) -> None:
    written = store.write("a", [b"0123456789"])
    (tmp_path / "root/a").write_bytes(b"0123456788")

    expected = f"root/a is damaged.*{zlib.crc32(b'0123456788'):08x} where {written.crc32:08x}"
    with pytest.raises(SnapshotDamaged, match=expected):
        store.read_verified("a", written.length_bytes, written.crc32)


def test_a_missing_file_is_reported_as_damaged(store: Store) -> None:
    with pytest.raises(SnapshotDamaged, match="root/chk-9/gone is missing"):
        store.read_verified("chk-9/gone", 1, 1)
    with pytest.raises(SnapshotDamaged, match="root/chk-9/gone is missing"):
        store.read("chk-9/gone")


def test_a_listing_is_sorted_and_empty_where_there_is_nothing(store: Store) -> None:
    assert store.list("") == []
    assert store.list("log") == []

    for name in ("log/b", "log/a", "chk-1/x"):
        store.write(name, [b""])

    assert store.list("log") == ["a", "b"]
    assert store.list("") == ["chk-1", "log"]


def test_deleting_what_is_gone_is_fine(store: Store) -> None:
    store.write("chk-1/a", [b"a"])

    for _ in range(2):
        store.delete("chk-1/a")
        store.delete_directory("chk-1")

    assert store.list("") == []


def test_a_directory_that_was_deleted_is_made_again(store: Store) -> None:
    store.write("chk-1/a", [b"old"])
    open_store(store.address).delete_directory("chk-1")

    store.write("chk-1/a", [b"new"])

    assert store.read("chk-1/a") == b"new"


def test_a_path_cannot_leave_the_store(store: Store) -> None:
    for path in ("../a", "/etc/passwd", "a//b", "", "a/../../b"):
        with pytest.raises(AssertionError):
            store.delete_directory(path)


def test_a_store_can_be_rooted_at_one_of_its_directories(store: Store) -> None:
    job = store.below("page-views")
    job.write("chk-1/a", [b"a"])

    assert store.read("page-views/chk-1/a") == b"a"
    assert open_store(job.address).read("chk-1/a") == b"a"


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


@pytest.mark.parametrize("address", ["s3://bucket/x", "hdfs:/x", "file://elsewhere/x", " "])
def test_an_address_that_is_not_local_is_refused(address: str) -> None:
    with pytest.raises(BuildError, match=r"local director|empty"):
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
