"""The store contract, the same for every store: whole files or none, one winner, damage seen."""

from __future__ import annotations

import os
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
from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.storage.store import Store, Written, open_store

SOURCES = str(Path(next(iter(stillframe.__path__))).parent)
LARGE_BYTES = 20_000_000
"""More than one part of what goes up in parts."""

EVERY = [
    "local",
    pytest.param("s3", marks=pytest.mark.s3),
    pytest.param("hdfs", marks=pytest.mark.hdfs),
]


@pytest.fixture(params=EVERY)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if kind == "s3":
        request.getfixturevalue("s3_environment")
        return open_store(f"s3://{request.getfixturevalue('s3_bucket')}/root")
    if kind == "hdfs":
        return open_store(f"{request.getfixturevalue('hdfs_root')}/root")
    return open_store(str(tmp_path / "root"))


def test_what_was_written_is_read_back_and_verified(store: Store) -> None:
    chunks = [b"ab", bytearray(b"cd"), memoryview(b"ef"), pa.py_buffer(b"gh"), b""]

    written = store.write("chk-1/state.arrow", chunks)

    assert written == Written(8, zlib.crc32(b"abcdefgh"))
    assert store.read("chk-1/state.arrow") == b"abcdefgh"
    assert store.read_verified("chk-1/state.arrow", 8, written.crc32).to_pybytes() == b"abcdefgh"


def test_a_large_file_is_read_back_and_verified(store: Store) -> None:
    pieces = [bytes([n]) * (LARGE_BYTES // 7) for n in range(7)]

    written = store.write("shared/1/large", iter(pieces))

    whole = b"".join(pieces)
    assert written == Written(len(whole), zlib.crc32(whole))
    assert store.read_verified("shared/1/large", *_recorded(written)).equals(pa.py_buffer(whole))


def _recorded(written: Written) -> tuple[int, int]:
    return written.length_bytes, written.crc32


def test_the_bytes_of_a_typed_memoryview_are_counted_and_not_its_elements(store: Store) -> None:
    numbers = memoryview(b"\x01\x00\x00\x00\x02\x00\x00\x00").cast("i")

    assert store.write("numbers", [numbers]).length_bytes == 8


def test_an_empty_file_is_a_file(store: Store) -> None:
    written = store.write("empty", [])

    assert written == Written(0, 0)
    assert store.read_verified("empty", 0, 0).size == 0
    assert store.list("") == ["empty"]


@pytest.mark.parametrize("second_bytes", [6, LARGE_BYTES])
def test_an_existing_file_is_not_overwritten(store: Store, second_bytes: int) -> None:
    store.write("chk-1/a", [b"first"])

    with pytest.raises(StorageError, match=r"chk-1/a.*never overwritten"):
        store.write("chk-1/a", [b"s" * second_bytes])

    assert store.read("chk-1/a") == b"first"
    assert store.list("chk-1") == ["a"]


@pytest.mark.parametrize("before_bytes", [1_000, LARGE_BYTES])
def test_a_writer_that_fails_halfway_leaves_nothing(store: Store, before_bytes: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * before_bytes
        raise ValueError("the state could not be encoded")

    with pytest.raises(ValueError, match="could not be encoded"):
        store.write("chk-1/a", chunks())

    assert store.list("chk-1") == []
    store.write("chk-1/a", [b"by the next attempt"])


def test_a_writer_killed_halfway_leaves_nothing_that_a_listing_shows(store: Store) -> None:
    script = f"""
        import os, signal, sys
        from stillframe.storage.store import open_store
        def chunks():
            yield b"x" * {LARGE_BYTES}
            os.kill(os.getpid(), signal.SIGKILL)
            yield b"never"
        open_store(sys.argv[1]).write("chk-1/a", chunks())
    """
    assert run_python(script, store.address).returncode == -9

    assert store.list("chk-1") == []
    store.write("chk-1/a", [b"by the next attempt"])
    store.delete_directory("chk-1")
    assert store.list("") == []


def test_only_the_first_creator_of_a_name_wins(store: Store) -> None:
    assert store.create_if_absent("log/1", b"mine")
    assert not store.create_if_absent("log/1", b"yours")
    assert not store.create_if_absent("log/1", b"mine"), "the same contents do not make it mine"

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


@pytest.mark.parametrize("now", [b"01234", b"0123456789+", b""])
def test_a_file_of_another_length_is_reported_as_damaged(store: Store, now: bytes) -> None:
    recorded = Written(10, zlib.crc32(b"0123456789"))
    store.write("chk-1/a", [now])

    wrong = rf"root/chk-1/a is damaged: it has {len(now)} bytes where 10"
    with pytest.raises(SnapshotDamaged, match=wrong):
        store.read_verified("chk-1/a", *_recorded(recorded))


def test_one_flipped_bit_is_reported_with_both_checksums(store: Store) -> None:
    recorded = Written(10, zlib.crc32(b"0123456789"))
    store.write("a", [b"0123456788"])

    expected = f"root/a is damaged.*{zlib.crc32(b'0123456788'):08x} where {recorded.crc32:08x}"
    with pytest.raises(SnapshotDamaged, match=expected):
        store.read_verified("a", *_recorded(recorded))


@pytest.mark.parametrize("length_bytes", [1, LARGE_BYTES])
def test_a_missing_file_is_reported_as_damaged(store: Store, length_bytes: int) -> None:
    with pytest.raises(SnapshotDamaged, match="root/chk-9/gone is missing"):
        store.read_verified("chk-9/gone", length_bytes, 1)
    with pytest.raises(SnapshotDamaged, match="root/chk-9/gone is missing"):
        store.read("chk-9/gone")


def test_a_listing_is_sorted_and_empty_where_there_is_nothing(store: Store) -> None:
    assert store.list("") == []
    assert store.list("log") == []

    for name in ("log/b", "log/a", "chk-1/x", "chk-10/x"):
        store.write(name, [b""])

    assert store.list("log") == ["a", "b"]
    assert store.list("chk-1") == ["x"], "chk-10 is another directory"
    assert store.list("") == ["chk-1", "chk-10", "log"]


def test_quoted_names_and_those_of_other_scripts_are_kept(store: Store) -> None:
    names = ["a%20b", "a%2Fb", "größe", "状态", "x-1.arrow"]
    for name in names:
        store.write(f"shared/1/{name}", [name.encode()])

    assert store.list("shared/1") == sorted(names)
    for name in names:
        assert store.read(f"shared/1/{name}") == name.encode()


def test_a_listing_of_many_files_is_whole(store: Store) -> None:
    for number in range(30):
        store.create_if_absent(f"log/{number:020d}", b"")

    assert len(store.list("log")) == 30
    store.delete_directory("log")
    assert store.list("log") == []


def test_deleting_what_is_gone_is_fine(store: Store) -> None:
    store.write("chk-1/a", [b"a"])
    store.write("chk-10/a", [b"a"])

    for _ in range(2):
        store.delete("chk-1/a")
        store.delete_directory("chk-1")
    store.delete_unfinished("chk-1")
    store.settle("chk-1")

    assert store.list("") == ["chk-10"]


def test_a_directory_that_was_deleted_is_made_again(store: Store) -> None:
    store.write("chk-1/a", [b"old"])
    store.below("chk-1").delete("a")
    store.delete_directory("chk-1")

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
    assert job.address == f"{store.address}/page-views"


def test_its_address_and_settings_open_the_same_store_again(store: Store) -> None:
    job = store.below("page-views")
    job.write("chk-1/a", [b"a"])

    assert open_store(job.address, job.settings).read("chk-1/a") == b"a"


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
