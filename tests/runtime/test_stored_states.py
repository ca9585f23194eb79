"""The states of a snapshot, seen from outside: rows in files and in metadata, and databases."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.config import StateSettings
from stillframe.errors import SnapshotDamaged
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.protocol.manifests import (
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
)
from stillframe.runtime.disk import AggregatingOnDisk, DiskRoom
from stillframe.runtime.state_files import described_file
from stillframe.runtime.stored_states import batches_of, copied, schema_of, state_parts
from stillframe.state.aggregates import AggregateTable
from stillframe.state.disk import Disk
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.key_places import key_places
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.local import LocalStore
from stillframe.storage.store import Store

GROUPS = 8
SCHEMA = pa.schema([("user", pa.int64())])
WHAT = (SCHEMA, ["user"], [AggregateCall("count", None, "count", pa.int64())], GROUPS)
UID, SUBTASK = OperatorUid("counts"), SubtaskIndex(0)
USERS = pa.record_batch([pa.array([*range(50), *range(10)])], SCHEMA)
COUNTS = {user: 2 if user < 10 else 1 for user in range(50)}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def manifest_of(snapshots: Sequence[OperatorSnapshot]) -> Manifest:
    described = OperatorDescription(UID, "aggregate", "count by user", len(snapshots))
    return Manifest(
        job="views",
        attempt=Attempt(1),
        checkpoint_id=CheckpointId(1),
        epoch=Epoch(0),
        kind="checkpoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=GROUPS,
        operators=(described,),
        snapshots=tuple(snapshots),
    )


def as_file(store: Store, _: Path) -> OperatorSnapshot:
    table = AggregateTable(*WHAT)
    table.update(USERS)
    written = write_keyed_snapshot(store, "shared/1/counts.arrow", table.freeze())
    return OperatorSnapshot(UID, SUBTASK, keyed=(described_file("aggregates", written),))


def in_the_metadata(store: Store, tmp_path: Path) -> OperatorSnapshot:
    [state] = as_file(store, tmp_path).keyed
    data = store.read(state.file.path)
    store.delete(state.file.path)
    handle = FileHandle("only a name", len(data), zlib.crc32(data), data)
    state = KeyedState(state.name, handle, state.key_groups, state.rows, state.schema)
    return OperatorSnapshot(UID, SUBTASK, keyed=(state,))


def as_database(store: Store, tmp_path: Path) -> OperatorSnapshot:
    settings = StateSettings("rocksdb", directory=str(tmp_path / "work"))
    room = DiskRoom.open(settings, "views", store.address, Attempt(1), SlotIndex(0), 1)
    owned = range(GROUPS)
    directory, snapshots = room.open_database(UID, SUBTASK, Attempt(1), owned, store, [])
    table = PagedAggregates(*WHAT, Disk.open(directory, room.memory), owned, 1 << 30)
    operator = AggregatingOnDisk(table, snapshots)
    list(operator.process(USERS))
    described = operator.described(CheckpointId(1), operator.snapshot(CheckpointId(1))())
    operator.close()
    room.close()
    assert described.disk is not None
    return described


Stored = Callable[[Store, Path], OperatorSnapshot]


def counts_in(store: Store, manifest: Manifest) -> dict[int, int]:
    [part] = state_parts(store, manifest, UID)["aggregates"]
    found = [(g, row) for g, rows in batches_of(store, part, GROUPS) for row in rows.to_pylist()]
    assert {group for group, _ in found} <= set(range(GROUPS))
    return {row["user"]: row["count"] for _, row in found}


@pytest.mark.parametrize("stored", [as_file, in_the_metadata, as_database])
def test_a_state_is_read_the_same_however_it_is_stored(
    stored: Stored, store: LocalStore, tmp_path: Path
) -> None:
    manifest = manifest_of([stored(store, tmp_path)])

    [part] = state_parts(store, manifest, UID)["aggregates"]
    schema = schema_of(store, part)

    assert schema.names == ["user", "count"]
    assert key_places(schema) == (0,)
    assert part.rows == (None if stored is as_database else 50)
    assert part.key_groups == GROUPS
    assert part.length_bytes > 0
    assert counts_in(store, manifest) == COUNTS


@pytest.mark.parametrize("stored", [as_file, in_the_metadata, as_database])
def test_a_copy_has_all_state_as_rows_and_needs_nothing_of_where_it_came_from(
    stored: Stored, store: LocalStore, tmp_path: Path
) -> None:
    manifest = manifest_of([stored(store, tmp_path)])
    target, names = LocalStore(tmp_path / "target"), count()

    there = copied(store, manifest, target, lambda: f"state/{next(names)}")
    store.delete_directory("shared")

    assert there.snapshots[0].disk is None
    assert counts_in(target, there) == COUNTS
    assert {file.path for file in there.files()} == {f"state/{n}" for n in target.list("state")}


def test_what_every_subtask_has_a_copy_of_is_read_once(store: LocalStore, tmp_path: Path) -> None:
    copies = as_file(store, tmp_path).keyed
    snapshots = [OperatorSnapshot(UID, SubtaskIndex(i), broadcast=copies) for i in range(3)]
    manifest = manifest_of(snapshots)

    [part] = state_parts(store, manifest, UID)["aggregates"]

    groups = {group for group, _ in batches_of(store, part, GROUPS)}
    assert (part.is_copy, part.key_groups, groups) == (True, 0, {None})


def test_damage_is_noticed_and_named(store: LocalStore, tmp_path: Path) -> None:
    manifest = manifest_of([as_file(store, tmp_path)])
    file = Path(store.address, "shared/1/counts.arrow")
    file.write_bytes(file.read_bytes().replace(b"user", b"abus"))
    [part] = state_parts(store, manifest, UID)["aggregates"]

    for look in (lambda: schema_of(store, part), lambda: list(batches_of(store, part, GROUPS))):
        with pytest.raises(SnapshotDamaged, match=r"shared/1/counts\.arrow"):
            look()
