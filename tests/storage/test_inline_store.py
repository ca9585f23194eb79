"""What is written is answered and kept nowhere; what is too long is refused, with the way out."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.errors import NotDone
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.storage.inline import InlineStore
from stillframe.storage.paths import CHANNELS, state_path
from stillframe.storage.store import Store, open_store

COUNTS = state_path(
    CheckpointId(7), OperatorUid("count by app"), SubtaskIndex(3), Attempt(2), "x-y"
)


@pytest.fixture
def behind(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def store(behind: Store) -> Store:
    return InlineStore(behind, length_bytes_max=8)


def test_what_is_written_is_in_the_answer_and_not_in_a_file(store: Store, tmp_path: Path) -> None:
    written = store.write(COUNTS, [b"ab", bytearray(b"cd"), memoryview(b"ef"), pa.py_buffer(b"gh")])

    assert written.data == b"abcdefgh"
    assert (written.length_bytes, written.crc32) == (8, zlib.crc32(b"abcdefgh"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_too_long_names_the_state_its_length_and_the_alternatives(store: Store) -> None:
    with pytest.raises(NotDone) as refused:
        store.write(COUNTS, [b"abcdefgh", b"i", b"j"])

    assert str(refused.value) == (
        "state 'x-y' of operator 'count by app' in subtask 3 takes 10 bytes, more than the 8 that"
        " stateBackend=memory keeps in an acknowledgement: set stateBackend=fs or"
        " stateBackend=rocksdb, or a larger memoryStateMax"
    )


def test_records_under_way_that_are_too_long_are_not_called_a_state(store: Store) -> None:
    path = state_path(CheckpointId(7), OperatorUid("read"), SubtaskIndex(0), Attempt(2), CHANNELS)

    with pytest.raises(
        NotDone, match="what was under way around operator 'read' in subtask 0 takes"
    ):
        store.write(path, [b"123456789"])


def test_no_more_than_the_limit_is_held_of_what_is_too_long(store: Store) -> None:
    alive: list[int] = []

    class Piece(bytes):
        def __new__(cls) -> Piece:
            alive.append(1)
            return super().__new__(cls, b"1234")

        def __del__(self) -> None:
            alive.pop()

    def pieces() -> Iterator[Piece]:
        for _ in range(100):
            assert len(alive) <= 3, "two of them fit"
            yield Piece()

    with pytest.raises(NotDone, match="takes 400 bytes"):
        store.write(COUNTS, pieces())


def test_everything_else_is_done_by_the_store_behind(store: Store, behind: Store) -> None:
    older = behind.write("shared/1/old-1.arrow", [b"of before"])
    assert store.create_if_absent("log/1", b"entry")

    assert (store.address, store.settings) == (behind.address, behind.settings)
    assert store.read("log/1") == b"entry"
    assert store.list("log") == ["1"]
    read = store.read_verified("shared/1/old-1.arrow", older.length_bytes, older.crc32)
    assert read.to_pybytes() == b"of before"
    store.delete_unfinished("shared/1")
    store.delete("shared/1/old-1.arrow")
    store.delete_directory("log")
    store.settle("")
    assert (behind.list("shared/1"), behind.list("log")) == ([], [])
    below = store.below("job")
    assert below.address == behind.below("job").address
    assert below.write(COUNTS, [b"small"]).data == b"small"
