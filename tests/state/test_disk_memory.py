"""The memory of states of handles on disk: what is counted, and how much a process really takes.

The latter is measured in a process of its own, this very file run as a program: it says how many
bytes of memory it took at most beside what it had when all code had run once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stillframe.state.backends import Declared, Kind
from stillframe.state.disk import DiskMemory
from stillframe.state.disk_rows import DiskBackend, FrozenRowStates
from stillframe.state.key_names import KeyNames
from stillframe.state.rows import RowType

LIMIT_BYTES = 16 << 20
STATE_BYTES = 4 * LIMIT_BYTES
MARGIN = 1.25
"""How many times its limit a process may grow: allocators are not exact, and a batch is written as
a whole before anyone looks how much that was."""
BATCH_KEYS = 1_024
PAYLOAD_BYTES = 100
SNAPSHOT_BATCHES = 60
LINKED_LATER_BATCHES = 50
KEYS = pa.schema([("user", pa.int64())])
ROW = RowType(pa.schema([("payload", pa.binary()), ("n", pa.int64())]))
PLACE = RowType(pa.schema([("place", pa.int64())]))


@pytest.mark.slow
@pytest.mark.timeout(600)  # six seconds of work, on a machine that has them to give
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_states_four_times_as_large_as_their_memory_stay_within_it_while_links_are_late():
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=True, timeout=600
    )
    taken_bytes, stored_bytes = map(int, done.stdout.split())
    assert stored_bytes > STATE_BYTES
    assert taken_bytes < MARGIN * LIMIT_BYTES


def written_with(backend: DiskBackend, kind: Kind, users: range, rows: int) -> int:
    """Write so many rows for each of these, of all lengths; what they are said to occupy then."""
    numbers, names = backend.keys_of([pa.array(users)])
    values = backend.values(Declared("s", kind, ROW)) if kind is Kind.VALUE else None
    lists = backend.lists(Declared("s", kind, ROW)) if kind is Kind.LIST else None
    maps = backend.maps(Declared("s", kind, ROW, PLACE)) if kind is Kind.MAP else None
    for number in numbers.tolist():
        for place in range(rows):
            row = (b"x" * ((number * 37 + place) % 200 + 10), 1_000_000 + number)
            if values is not None:
                values.put(names[number], row, None)
            if lists is not None:
                lists.append(names[number], [row], None)
            if maps is not None:
                maps.put(names[number], (place,), row, None)
    (table,) = backend.tables
    return sum(table.buffered_bytes() for _ in range(20)) // 20  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "rows"), [("value", 1), ("list", 1), ("list", 20), ("map", 1), ("map", 20)]
)
def test_a_buffer_occupies_about_what_it_is_said_to(kind, rows, tmp_path):
    backend = DiskBackend(KEYS, 16, tmp_path / "db", DiskMemory(0), buffer_bytes_max=1 << 30)
    tracemalloc.start()
    try:
        said_bytes = written_with(backend, Kind(kind), range(20_000 // rows), rows)
        given_out_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    backend.close()
    # The allocator's own loss is in what is said, and not in what it has given out.
    assert given_out_bytes < said_bytes * 1.2
    assert said_bytes < given_out_bytes * 1.8


def test_keys_are_remembered_for_as_long_as_their_memory_holds_and_named_the_same_after():
    names = KeyNames(KEYS, 16, remembered_bytes_max=1 << 18)

    def names_of(first: int) -> list[bytes]:
        numbers, named = names.of([pa.array(range(first, first + 500))])
        return [named[number] for number in numbers.tolist()]

    before = names_of(0)
    for first in range(0, 50_000, 500):
        names_of(first)
        assert names.remembered_bytes < (1 << 18) + 500 * 200
    assert names_of(0) == before


def test_once_a_late_snapshot_is_linked_ahead_of_time_buffers_are_written_as_before(tmp_path):
    backend = DiskBackend(KEYS, 16, tmp_path / "db", DiskMemory(0), buffer_bytes_max=100_000)
    states = backend.values(Declared("last", Kind.VALUE, ROW))
    late = backend.freeze_all(0)
    most = 0
    for first in range(0, 10_000, 50):
        numbers, names = backend.keys_of([pa.array(range(first, first + 50))])
        for number in numbers.tolist():
            states.put(names[number], (b"", first), None)
        backend.tidy(0)
        waiting = sum(len(part.buffers["last"]) for part in backend.parts)
        most = max(most, waiting + len(states.buffer))
    assert late.staged is not None
    assert most < 700  # of 10,000
    late.link(tmp_path / "late")
    backend.close()


# --- the program


class Growing:
    """A value, a list and a map of each key, of ever new keys."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        memory = DiskMemory(limit_bytes // 2)
        self._backend = DiskBackend(KEYS, 16, directory / "db", memory, limit_bytes // 2)
        self._last = self._backend.values(Declared("last", Kind.VALUE, ROW))
        self._all = self._backend.lists(Declared("all", Kind.LIST, ROW))
        self._placed = self._backend.maps(Declared("placed", Kind.MAP, ROW, PLACE))
        self._frozen: FrozenRowStates | None = None

    def write(self, batch: int) -> None:
        self._backend.tidy(0)
        users = np.arange(batch * BATCH_KEYS, (batch + 1) * BATCH_KEYS)
        numbers, names = self._backend.keys_of([pa.array(users)])
        for number in numbers.tolist():
            row = (os.urandom(PAYLOAD_BYTES), batch)
            self._last.put(names[number], row, None)
            self._all.append(names[number], [(os.urandom(PAYLOAD_BYTES), batch)], None)
            self._placed.put(names[number], (number,), (os.urandom(PAYLOAD_BYTES), batch), None)

    def take_snapshots(self, batch: int) -> None:
        """One now and then, which is linked long after it was taken."""
        if batch % SNAPSHOT_BATCHES == 0:
            self._frozen = self._backend.freeze_all(0)
        elif batch % SNAPSHOT_BATCHES == LINKED_LATER_BATCHES and self._frozen is not None:
            self._frozen.link(self._directory / f"linked-{batch}")
            self._frozen.release()

    def close(self) -> None:
        self._backend.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_taken_bytes(directory: Path, limit_bytes: int, state_bytes: int) -> int:
    growing = Growing(directory, limit_bytes)
    before, most = resident_bytes(), 0
    for batch in range(state_bytes // (3 * PAYLOAD_BYTES * BATCH_KEYS) + 1):
        growing.write(batch)
        growing.take_snapshots(batch)
        most = max(most, resident_bytes() - before)
    growing.close()
    return most


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        # Once with little, so that what all code loads and sets aside is not counted as state.
        most_taken_bytes(Path(place) / "warm", 1 << 20, 4 << 20)
        taken_bytes = most_taken_bytes(Path(place) / "large", LIMIT_BYTES, STATE_BYTES)
        files = (Path(place) / "large" / "db").glob("*.sst")
        print(taken_bytes, sum(file.stat().st_size for file in files))


if __name__ == "__main__":
    main()
