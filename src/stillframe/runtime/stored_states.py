"""The keyed states of a snapshot, one subtask's part after the other, without the program.

Whoever looks at a snapshot from outside (a DataFrame, a savepoint made of it) goes through here, so
that there is one place that knows in which forms a subtask's state is stored: as rows in a file or
in the metadata, or as a database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from stillframe.errors import SnapshotDamaged
from stillframe.ids import OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import (
    DiskState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorSnapshot,
)
from stillframe.protocol.savepoints import with_files_moved
from stillframe.runtime.restoring import read_file
from stillframe.runtime.state_files import described_file
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.storage.store import Store


@dataclass(frozen=True, slots=True)
class StatePart:
    """What one subtask holds of one state. Picklable: it is read on an executor."""

    uid: OperatorUid
    subtask: SubtaskIndex
    name: str
    stored: KeyedState | DiskState
    """A database holds other states as well."""
    is_copy: bool = False
    """Whether every subtask has all of it; then its key groups mean nothing."""

    @property
    def rows(self) -> int | None:
        """None where nobody has counted them."""
        return self.stored.rows if isinstance(self.stored, KeyedState) else None

    @property
    def length_bytes(self) -> int:
        """Of a database: of all states that are in it."""
        if isinstance(self.stored, KeyedState):
            return self.stored.file.length_bytes
        return sum(each.file.length_bytes for each in self.stored.files)

    @property
    def key_groups(self) -> int:
        """How many of them may have rows."""
        if self.is_copy:
            return 0
        if isinstance(self.stored, KeyedState):
            return len(set(self.stored.key_groups))  # one may have several batches
        return self.stored.stop_key_group - self.stored.first_key_group


def state_parts(store: Store, manifest: Manifest, uid: OperatorUid) -> dict[str, list[StatePart]]:
    """By name; of what every subtask has a copy of, only the first one's."""
    found: dict[str, list[StatePart]] = {}
    in_databases: list[str] | None = None
    for snapshot in manifest.snapshots_of(uid):
        for keyed in snapshot.keyed:
            part = StatePart(uid, snapshot.subtask, keyed.name, keyed)
            found.setdefault(keyed.name, []).append(part)
        for keyed in snapshot.broadcast:
            copy = StatePart(uid, snapshot.subtask, keyed.name, keyed, is_copy=True)
            found.setdefault(keyed.name, [copy])
        if snapshot.disk is not None:
            # All subtasks declare the same states; to fetch one database is enough.
            in_databases = in_databases or _names_in(store, snapshot.disk)
            for name in in_databases:
                part = StatePart(uid, snapshot.subtask, name, snapshot.disk)
                found.setdefault(name, []).append(part)
    return dict(sorted(found.items()))


def holds_state(manifest: Manifest, uid: OperatorUid) -> bool:
    return any(any(snapshot.files()) for snapshot in manifest.snapshots_of(uid))


def schema_of(store: Store, part: StatePart) -> pa.Schema:
    """The columns of the part as it is stored, with what they say of themselves."""
    if isinstance(part.stored, DiskState):
        from stillframe.runtime.disk import fetched
        from stillframe.state.disk_reading import tables_in

        with fetched(store, part.stored, None) as database:
            tables = {table.name: table.snapshot_schema for table in tables_in(database)}
        return tables[part.name]
    buffer = read_file(store, part.stored.file)
    try:
        return pa.ipc.open_file(buffer).schema
    except pa.ArrowInvalid as error:
        raise SnapshotDamaged(
            f"{part.stored.file.path} of {buffer.size} bytes is not an Arrow file ({error})"
        ) from error


def batches_of(
    store: Store, part: StatePart, max_parallelism: int, wanted: int | None = None
) -> Iterator[tuple[int | None, pa.RecordBatch]]:
    """The rows of the part, checked, with the key group they belong to, if to one.

    `wanted`: only those of this key group, and those that belong to none.
    """
    if isinstance(part.stored, DiskState):
        yield from _in_database(store, part.stored, part.name, wanted)
        return
    keyed = part.stored
    buffer = read_file(store, keyed.file)
    batches = read_keyed_snapshot(buffer, keyed.key_groups, range(max_parallelism))
    for key_group, batch in zip(keyed.key_groups, batches, strict=True):
        if part.is_copy or wanted in (None, key_group):
            yield (None if part.is_copy else key_group), batch


def copied(
    source: Store, manifest: Manifest, target: Store, new_path: Callable[[], str]
) -> Manifest:
    """All state of the manifest in files of the target, each checked when it was read.

    A database is written as rows, the form that all backends read.
    """
    done: dict[FileHandle, FileHandle] = {}

    def copy(file: FileHandle) -> FileHandle:
        if file not in done:  # several channels share one
            data = source.read_verified(file.path, file.length_bytes, file.crc32)
            path = new_path()
            written = target.write(path, [data])
            done[file] = FileHandle(path, written.length_bytes, written.crc32)
        return done[file]

    return _databases_as_rows(source, with_files_moved(manifest, copy), target, new_path)


def _databases_as_rows(
    source: Store, manifest: Manifest, target: Store, new_path: Callable[[], str]
) -> Manifest:
    def as_rows(snapshot: OperatorSnapshot) -> OperatorSnapshot:
        if snapshot.disk is None:
            return snapshot
        from stillframe.runtime.disk import fetched
        from stillframe.state.disk_reading import tables_in

        with fetched(source, snapshot.disk, None) as database:
            written = tuple(
                described_file(table.name, write_keyed_snapshot(target, new_path(), table))
                for table in tables_in(database)
            )
        return replace(snapshot, keyed=(*snapshot.keyed, *written), disk=None)

    return replace(manifest, snapshots=tuple(map(as_rows, manifest.snapshots)))


def _names_in(store: Store, disk: DiskState) -> list[str]:
    from stillframe.runtime.disk import fetched
    from stillframe.state.disk_reading import tables_in

    with fetched(store, disk, None) as database:
        return [table.name for table in tables_in(database)]


def _in_database(
    store: Store, disk: DiskState, name: str, wanted: int | None
) -> Iterator[tuple[int | None, pa.RecordBatch]]:
    from stillframe.runtime.disk import fetched
    from stillframe.state.disk_reading import tables_in

    with fetched(store, disk, None) as database:
        for table in tables_in(database):
            if table.name == name:
                groups = None if wanted is None else range(wanted, wanted + 1)
                yield from table.batches_by_key_group(groups)
