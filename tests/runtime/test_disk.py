"""A database of a slot: what its checkpoints store, how it comes back, what is left of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.config import StateSettings
from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.key_groups import hash_batch, key_group_range, key_groups_of
from stillframe.protocol.manifests import DiskState, OperatorSnapshot
from stillframe.runtime.disk import AggregatingOnDisk, DiskRoom, rows_of_databases
from stillframe.runtime.operators import files_written
from stillframe.runtime.restoring import read_file
from stillframe.state.disk import Disk
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.local import LocalStore
from stillframe.storage.store import Chunk, Written

GROUPS = 12
SCHEMA = pa.schema([("user", pa.int64())])
COUNT = AggregateCall("count", None, "count", pa.int64())
UID = OperatorUid("counts")
ONE, TWO, THREE = map(CheckpointId, (1, 2, 3))


def users(*ranges: range) -> pa.RecordBatch:
    return pa.record_batch([pa.array([u for each in ranges for u in each], pa.int64())], SCHEMA)


def settings(directory: Path, *, is_incremental: bool = True) -> StateSettings:
    return StateSettings("rocksdb", is_incremental=is_incremental, directory=str(directory))


class Slots:
    """The slots of one attempt, each with the counts of its users."""

    def __init__(self, tmp: Path, store: LocalStore, attempt: int, parallelism: int) -> None:
        self._tmp, self._store = tmp, store
        self._attempt = Attempt(attempt)
        self.parallelism = parallelism
        self.operators: list[AggregatingOnDisk] = []
        self._rooms: list[DiskRoom] = []

    def open(self, disks: Iterable[DiskState] = (), *, is_incremental: bool = True) -> None:
        disks = list(disks)
        for index in range(self.parallelism):
            room = DiskRoom.open(
                settings(self._tmp / "work", is_incremental=is_incremental),
                "job",
                self._store.address,
                self._attempt,
                SlotIndex(index),
                1,
            )
            owned = key_group_range(index, self.parallelism, GROUPS)
            mine = [
                each
                for each in disks
                if each.first_key_group < owned.stop and owned.start < each.stop_key_group
            ]
            place = (UID, SubtaskIndex(index), self._attempt)
            directory, snapshots = room.open_database(*place, owned, self._store, mine)
            table = PagedAggregates(
                SCHEMA, ["user"], [COUNT], GROUPS, Disk.open(directory, room.memory), owned, 1 << 30
            )
            self.operators.append(AggregatingOnDisk(table, snapshots))
            self._rooms.append(room)

    def process(self, batch: pa.RecordBatch) -> dict[int, int]:
        """The new counts of all users in the batch."""
        groups = key_groups_of(hash_batch(batch, ["user"]), GROUPS)
        counts: dict[int, int] = {}
        for index, operator in enumerate(self.operators):
            owned = key_group_range(index, self.parallelism, GROUPS)
            mine = batch.filter(pa.array([group in owned for group in groups.tolist()]))
            for made in operator.process(mine):
                counts |= dict(
                    zip(made["user"].to_pylist(), made["count"].to_pylist(), strict=True)
                )
        return counts

    def snapshot(self, checkpoint_id: CheckpointId) -> list[OperatorSnapshot]:
        return [
            operator.described(checkpoint_id, operator.snapshot(checkpoint_id)())
            for operator in self.operators
        ]

    def completed(self, checkpoint_id: CheckpointId) -> None:
        for operator in self.operators:
            operator.completed(checkpoint_id)

    def close(self) -> None:
        for operator, room in zip(self.operators, self._rooms, strict=True):
            operator.close()
            room.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@contextmanager
def running(
    tmp_path: Path,
    store: LocalStore,
    attempt: int,
    parallelism: int = 1,
    disks: Iterable[DiskState] = (),
    *,
    is_incremental: bool = True,
) -> Iterator[Slots]:
    slots = Slots(tmp_path, store, attempt, parallelism)
    slots.open(disks, is_incremental=is_incremental)
    try:
        yield slots
    finally:
        slots.close()


def bytes_written(checkpoint_id: CheckpointId, snapshots: list[OperatorSnapshot]) -> int:
    return sum(file.length_bytes for file in files_written(checkpoint_id, snapshots))


def disks_of(snapshots: list[OperatorSnapshot]) -> list[DiskState]:
    return [each.disk for each in snapshots if each.disk is not None]


def counts_in(batches: Iterable[pa.RecordBatch]) -> dict[int, int]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return {row["user"]: next(v for k, v in row.items() if k != "user") for row in rows}


def test_a_checkpoint_stores_only_the_files_that_no_completed_one_has(tmp_path, store):
    with running(tmp_path, store, attempt=1) as slots:
        slots.process(users(range(50_000)))
        first = slots.snapshot(ONE)
        slots.completed(ONE)
        slots.process(users(range(10)))
        second = slots.snapshot(TWO)

        assert bytes_written(TWO, second) < bytes_written(ONE, first) / 10
        assert set(disks_of(first)[0].files) & set(disks_of(second)[0].files)


def test_what_was_stored_for_a_checkpoint_that_failed_is_stored_again(tmp_path, store):
    with running(tmp_path, store, attempt=1) as slots:
        slots.process(users(range(1_000)))
        first = slots.snapshot(ONE)
        slots.operators[0].aborted(ONE)
        for file in files_written(ONE, first):
            store.delete(file.path)
        second = slots.snapshot(TWO)

    read = counts_in(
        batch for _, batch in rows_of_databases(store, disks_of(second), range(GROUPS))
    )
    assert read == dict.fromkeys(range(1_000), 1)


def test_a_database_for_the_same_key_groups_goes_on_with_the_files_of_its_checkpoint(
    tmp_path, store
):
    with running(tmp_path, store, attempt=1, parallelism=2) as slots:
        slots.process(users(range(50_000)))
        snapshots = slots.snapshot(ONE)
    with running(tmp_path, store, 2, 2, disks_of(snapshots)) as slots:
        slots.completed(ONE)
        assert slots.process(users(range(3), range(50_000, 50_002))) == {
            **dict.fromkeys(range(3), 2),
            **dict.fromkeys(range(50_000, 50_002), 1),
        }
        assert bytes_written(TWO, slots.snapshot(TWO)) < bytes_written(ONE, snapshots) / 10


def test_counts_survive_any_change_of_parallelism(tmp_path, store):
    disks: list[DiskState] = []
    for attempt, parallelism in enumerate([2, 3, 1, 4, 12], start=1):
        with running(tmp_path, store, attempt, parallelism, disks) as slots:
            counts = slots.process(users(range(500)))
            assert counts == dict.fromkeys(range(500), attempt)
            disks = disks_of(slots.snapshot(CheckpointId(attempt)))


def test_who_keeps_state_on_the_heap_reads_the_rows_of_databases(tmp_path, store):
    with running(tmp_path, store, attempt=1, parallelism=2) as slots:
        slots.process(users(range(500), range(100)))
        disks = disks_of(slots.snapshot(ONE))

    parts = [
        counts_in(
            batch
            for name, batch in rows_of_databases(store, disks, key_group_range(i, 3, GROUPS))
            if name == "aggregates"
        )
        for i in range(3)
    ]
    assert sum(map(len, parts)) == 500
    assert parts[0] | parts[1] | parts[2] == {u: 2 if u < 100 else 1 for u in range(500)}


def test_a_full_checkpoint_holds_rows_that_every_backend_can_read(tmp_path, store):
    with running(tmp_path, store, attempt=1, is_incremental=False) as slots:
        slots.process(users(range(500)))
        [snapshot] = slots.snapshot(ONE)

    [keyed] = snapshot.keyed
    assert snapshot.disk is None
    assert (keyed.name, keyed.rows) == ("aggregates", 500)
    rows = read_keyed_snapshot(read_file(store, keyed.file), keyed.key_groups, range(GROUPS))
    assert counts_in(rows) == dict.fromkeys(range(500), 1)


class FullStore(LocalStore):
    """Has room for some files, and no more."""

    room_files = 2

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        if not self.room_files:
            raise StorageError(f"{path} cannot be written (No space left on device)")
        self.room_files -= 1
        return super().write(path, chunks)


def test_a_checkpoint_that_cannot_be_stored_leaves_nothing_and_the_next_one_is_whole(tmp_path):
    store = FullStore(tmp_path / "store")
    with running(tmp_path, store, attempt=1) as slots:
        slots.process(users(range(1_000)))
        write = slots.operators[0].snapshot(ONE)
        with pytest.raises(StorageError, match="No space left"):
            write()
        assert store.list("shared/1") == []

        store.room_files = 100
        disks = disks_of(slots.snapshot(TWO))

    read = counts_in(batch for _, batch in rows_of_databases(store, disks, range(GROUPS)))
    assert len(read) == 1_000


def test_a_damaged_file_is_noticed_before_the_database_is_opened(tmp_path, store):
    with running(tmp_path, store, attempt=1) as slots:
        slots.process(users(range(1_000)))
        disks = disks_of(slots.snapshot(ONE))
    table = next(each for each in disks[0].files if each.name.endswith(".sst"))
    path = tmp_path / "store" / table.file.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    slots = Slots(tmp_path, store, attempt=2, parallelism=1)
    with pytest.raises(SnapshotDamaged, match=r"\.sst-1\.db"):
        slots.open(disks)


def test_working_files_of_older_attempts_are_removed_and_no_others(tmp_path, store):
    def room(job: str, attempt: int) -> DiskRoom:
        place = (job, store.address, Attempt(attempt), SlotIndex(0), 1)
        return DiskRoom.open(settings(tmp_path), *place)

    dead, other, newer = room("clicks", 3), room("sales", 1), room("clicks", 9)
    assert not dead.directory.exists()
    late = room("clicks", 4)

    assert all(each.directory.exists() for each in (late, other, newer))
    newer.close()
    assert not newer.directory.exists()


def test_a_directory_that_cannot_be_written_is_named_with_the_setting(tmp_path, store):
    (tmp_path / "file").write_text("")
    place = ("job", store.address, Attempt(1), SlotIndex(0), 1)
    with pytest.raises(StorageError, match=r"no working files can be made in .*set stateDirectory"):
        DiskRoom.open(settings(tmp_path / "file"), *place)
