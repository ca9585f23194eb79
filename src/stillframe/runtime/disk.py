"""The databases of a slot: where they work, how a checkpoint gets their files, how they come back.

Theory of operation
-------------------
A checkpoint of a database begins with a reference to what it holds in memory (`freeze`, on the loop
thread). In the background that is written, the files of the database are hard-linked into a
directory of the checkpoint's own, and those that no completed checkpoint has are copied to the
store. A file of sorted rows never changes under its name, so most are only referred to
(`protocol/sharing`); the few small ones that do change are copied each time.

A restore copies the files back. Where the key groups are the same the database goes on with these
very files; otherwise it takes its own key groups out of each of them.

Working directories are worth nothing once their attempt is over: the next one on the same machine
removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from stillframe.config import StateSettings
from stillframe.errors import StorageError
from stillframe.graph.logical import Aggregate, Operator, Transform
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.protocol.manifests import (
    DiskFile,
    DiskState,
    DiskTable,
    FileHandle,
    KeyedState,
    OperatorSnapshot,
)
from stillframe.protocol.sharing import SharedFiles
from stillframe.runtime.operators import (
    Background,
    StatefulOperator,
    folded_into,
)
from stillframe.runtime.restoring import read_file
from stillframe.runtime.scratch import scratch_directory
from stillframe.runtime.state_files import described_file
from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.disk_reading import DiskTable as TableInDirectory
from stillframe.state.disk_reading import tables_in
from stillframe.state.snapshots import FrozenRows, kind_of, schema_text, write_keyed_snapshot
from stillframe.storage.paths import database_path, quoted_name, state_path
from stillframe.storage.savepoint import is_in_savepoint
from stillframe.storage.store import Store

_CHUNK_BYTES = 4 * 1024 * 1024
_SORTED_ROWS = ".sst"
"""How files end that never change under their name."""


def has_database(operator: Operator) -> bool:
    """Whether an operator keeps its state in a database, where databases are wanted."""
    match operator:
        case Transform():
            return True
        case Aggregate():
            return operator.window is None
        case _:
            return False


class DiskRoom:
    """Where the databases of one slot work in one attempt, and the memory they share."""

    def __init__(
        self,
        directory: Path,
        memory: DiskMemory,
        buffer_bytes_max: int,
        *,
        is_incremental: bool = True,
    ) -> None:
        self.directory = directory
        self.memory = memory
        self.buffer_bytes_max = buffer_bytes_max
        """For each database: what may wait in front of it."""
        self._is_incremental = is_incremental

    @classmethod
    def open(
        cls,
        settings: StateSettings,
        job: str,
        store_address: str | None,
        attempt: Attempt,
        slot: SlotIndex,
        databases: int,
    ) -> DiskRoom:
        """Make it, and remove what older attempts of the same job have left on this machine."""
        home = _home(settings.directory, job, store_address)
        directory = home / f"{attempt}-{slot}-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise StorageError(
                f"no working files can be made in {home} ({error}): set stateDirectory to a"
                " directory of every executor's machine that can be written"
            ) from error
        _remove_older(home, attempt)
        # Half of the memory is RocksDB's own, half is for what waits in front of it.
        half_bytes = settings.rocksdb_bytes_max // 2
        memory, buffer_bytes_max = DiskMemory(half_bytes), half_bytes // max(1, databases)
        return cls(directory, memory, buffer_bytes_max, is_incremental=settings.is_incremental)

    def open_database(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        owned: range,
        store: Store | None,
        disks: Sequence[DiskState],
    ) -> tuple[Path, DatabaseSnapshots]:
        """Where the database of an operator is, with what a checkpoint holds of it; and how it is
        snapshotted."""
        place = self.directory / f"{quoted_name(uid, 'operator uid')}-{subtask}"
        directory, links = place / "database", place / "links"
        links.mkdir(parents=True)
        shared = restore_database(store, disks, owned, directory, self.memory)
        snapshots = DatabaseSnapshots(
            uid, subtask, attempt, owned, store, links, shared, is_incremental=self._is_incremental
        )
        return directory, snapshots

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _home(directory: str | None, job: str, store_address: str | None) -> Path:
    """Where all attempts of a job work. Another job of the same name has another store."""
    spark_directories = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    root = directory or spark_directories[0] or tempfile.gettempdir()
    identity = hashlib.sha256(f"{store_address}\0{job}".encode()).hexdigest()[:16]
    return Path(root) / f"stillframe-{identity}"


def _remove_older(home: Path, attempt: Attempt) -> None:
    for child in home.iterdir():
        of = re.match(r"([0-9]+)-", child.name, re.ASCII)
        if of is not None and int(of[1]) < attempt:
            shutil.rmtree(child, ignore_errors=True)


class FrozenDatabase(Protocol):
    """A database as it was at the barrier."""

    def link(self, directory: Path) -> None:
        """Write what is not on disk yet, and hard-link all files into a new directory."""

    def release(self) -> None:
        """Give the memory back. May be called twice."""


@dataclass(frozen=True, slots=True)
class WrittenDatabase:
    """What a checkpoint holds of a database: its files, or its rows in the form all can read."""

    disk: DiskState | None = None
    keyed: tuple[KeyedState, ...] = ()


class DatabaseSnapshots:
    """The checkpoints of one operator's database. Called by the loop thread."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        owned: range,
        store: Store | None,
        scratch: Path,
        restored: Mapping[str, FileHandle],
        *,
        is_incremental: bool,
    ) -> None:
        """`scratch` is for links, on the file system of the database; `restored`: see `restore`."""
        self._uid = uid
        self._subtask = subtask
        self._attempt = attempt
        self._owned = owned
        self._store = store
        self._scratch = scratch
        self._is_incremental = is_incremental
        self._shared: SharedFiles[FileHandle] = SharedFiles(restored)
        self._tables: tuple[DiskTable, ...] | None = None

    def snapshot(
        self, checkpoint_id: CheckpointId, frozen: FrozenDatabase, savepoint: Store | None = None
    ) -> Callable[[], WrittenDatabase]:
        """The function it answers is run in the background, if at all."""
        referable = self._shared.on_snapshot(checkpoint_id) if savepoint is None else {}
        store = savepoint or self._store
        assert store is not None, "a snapshot was asked for without a place to keep it"
        directory = self._scratch / f"{checkpoint_id}-{uuid.uuid4().hex[:8]}"

        def write() -> WrittenDatabase:
            try:
                frozen.link(directory)
                if self._is_incremental and savepoint is None:
                    return self._copied(store, checkpoint_id, directory, referable)
                return self._as_rows(store, checkpoint_id, directory)
            finally:
                frozen.release()
                shutil.rmtree(directory, ignore_errors=True)

        return write

    def described(self, checkpoint_id: CheckpointId, written: WrittenDatabase) -> OperatorSnapshot:
        files = written.disk.files if written.disk is not None else ()
        self._shared.on_written(
            checkpoint_id, {each.name: each.file for each in files if _never_changes(each.name)}
        )
        return OperatorSnapshot(self._uid, self._subtask, keyed=written.keyed, disk=written.disk)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._shared.on_completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._shared.on_aborted(checkpoint_id)

    def _copied(
        self,
        store: Store,
        checkpoint_id: CheckpointId,
        directory: Path,
        referable: Mapping[str, FileHandle],
    ) -> WrittenDatabase:
        files: list[DiskFile] = []
        with _deleted_on_failure(store) as copied:
            for local in sorted(directory.iterdir()):
                handle = referable.get(local.name)
                if handle is None:
                    place = (checkpoint_id, self._uid, self._subtask, self._attempt)
                    path = database_path(*place, local.name)
                    written = store.write(path, _chunks(local))
                    copied.append(path)
                    handle = FileHandle(path, written.length_bytes, written.crc32)
                files.append(DiskFile(local.name, handle))
            tables = self._described_tables(directory)
        owned = (self._owned.start, self._owned.stop)
        return WrittenDatabase(DiskState(*owned, tuple(files), tables))

    def _described_tables(self, directory: Path) -> tuple[DiskTable, ...]:
        """Looked at once: all are declared before the first row."""
        if self._tables is None:
            self._tables = tuple(
                DiskTable(
                    table.name, schema_text(table.snapshot_schema), kind_of(table.snapshot_schema)
                )
                for table in tables_in(directory)
            )
        return self._tables

    def _as_rows(
        self, store: Store, checkpoint_id: CheckpointId, directory: Path
    ) -> WrittenDatabase:
        keyed: list[KeyedState] = []
        with _deleted_on_failure(store) as copied:
            for table in tables_in(directory):
                rows = _RowsReadOnce(table)
                if rows.are_none:
                    continue  # as of the heap, what is empty has no file
                place = (checkpoint_id, self._uid, self._subtask, self._attempt)
                path = state_path(*place, table.name)
                written = write_keyed_snapshot(store, path, rows)
                copied.append(path)
                keyed.append(described_file(table.name, written))
        return WrittenDatabase(keyed=tuple(keyed))


class _RowsReadOnce(FrozenRows):
    """The rows of a table: whether there are any is known by the first batch, and that is kept
    until it is asked for."""

    def __init__(self, table: TableInDirectory) -> None:
        self._schema = table.snapshot_schema
        self._batches = table.batches_by_key_group()
        self._first = list(itertools.islice(self._batches, 1))
        self.are_none = not self._first

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        while self._first:
            yield self._first.pop()
        yield from self._batches


@contextlib.contextmanager
def _deleted_on_failure(store: Store) -> Iterator[list[str]]:
    """The files that are put into this list are deleted again if not all of them can be written."""
    written: list[str] = []
    try:
        yield written
    except BaseException:
        for path in written:
            with contextlib.suppress(StorageError):
                store.delete(path)
        raise


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            yield chunk


def _never_changes(name: str) -> bool:
    return name.endswith(_SORTED_ROWS)


class AggregatingOnDisk(StatefulOperator):
    """Running aggregates per key, kept as pages of a database."""

    def __init__(
        self, table: PagedAggregates, snapshots: DatabaseSnapshots, *, emits_all: bool = False
    ) -> None:
        self._table = table
        self._snapshots = snapshots
        self._emits_all = emits_all

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        changed = folded_into(self._table, batch)
        return () if self._emits_all else (changed,)

    def on_barrier(self) -> Iterable[pa.RecordBatch]:
        return self._table.results() if self._emits_all else ()

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        return self._snapshots.snapshot(checkpoint_id, self._table.freeze(), savepoint)

    def described(self, checkpoint_id: CheckpointId, written: WrittenDatabase) -> OperatorSnapshot:
        return self._snapshots.described(checkpoint_id, written)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._snapshots.completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._snapshots.aborted(checkpoint_id)

    def close(self) -> None:
        self._table.close()


# --- the way back


def restore_database(
    store: Store | None,
    disks: Sequence[DiskState],
    owned: range,
    directory: Path,
    memory: DiskMemory,
) -> Mapping[str, FileHandle]:
    """Make the database in this directory; which files of the store it goes on with."""
    if len(disks) == 1 and range(disks[0].first_key_group, disks[0].stop_key_group) == owned:
        _fetch(store, disks[0], directory)
        return {
            each.name: each.file
            for each in disks[0].files
            # The snapshot of another job may be deleted once this one has a checkpoint.
            if _never_changes(each.name) and not is_in_savepoint(each.file.path)
        }
    if not disks:
        return {}
    disk = Disk.open(directory, memory)
    try:
        for part in disks:
            with fetched(store, part, directory.parent) as source:
                disk.copy_groups(source, _overlap(part, owned))
    finally:
        disk.close()
    return {}


def rows_of_databases(
    store: Store | None, disks: Sequence[DiskState], owned: range
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of these key groups, and the state they belong to, for who keeps no database."""
    for part in disks:
        with fetched(store, part) as source:
            for table in tables_in(source):
                for _, batch in table.batches_by_key_group(_overlap(part, owned)):
                    yield table.name, batch


def _overlap(disk: DiskState, owned: range) -> range:
    return range(max(disk.first_key_group, owned.start), min(disk.stop_key_group, owned.stop))


@contextlib.contextmanager
def fetched(store: Store | None, disk: DiskState, parent: Path | None = None) -> Iterator[Path]:
    """A copy of a database of a checkpoint, to look into, for as long as it takes."""
    with scratch_directory(parent) as directory:
        _fetch(store, disk, directory / "database")
        yield directory / "database"


def _fetch(store: Store | None, disk: DiskState, directory: Path) -> None:
    directory.mkdir(parents=True)
    for each in disk.files:
        (directory / Path(each.name).name).write_bytes(read_file(store, each.file))
