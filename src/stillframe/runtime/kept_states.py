"""Where the states of a program are kept, and how they come into a checkpoint.

On the heap every state has a file of its own, which is not written again while the state has not
changed. On disk all of them are one database. In both cases there may be rows of states that the
program does not declare any more: those are carried along, as files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.runtime.disk import DatabaseSnapshots
from stillframe.runtime.operators import Background
from stillframe.runtime.state_files import Freeze, StateFiles
from stillframe.state.backends import Backend
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.heap import HeapBackend
from stillframe.storage.store import Store


class KeptStates(ABC):
    """The states of one operator in one subtask. Called by the loop thread only."""

    backend: Backend[Any]

    @abstractmethod
    def snapshot(
        self,
        checkpoint_id: CheckpointId,
        carried: Mapping[str, Freeze],
        now_ms: int,
        savepoint: Store | None = None,
    ) -> Background:
        """The synchronous part; `carried` are rows to store besides."""

    @abstractmethod
    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        """What the acknowledgement says, made of what the background part answered."""

    @abstractmethod
    def completed(self, checkpoint_id: CheckpointId) -> None: ...

    @abstractmethod
    def aborted(self, checkpoint_id: CheckpointId) -> None: ...


class StatesOnHeap(KeptStates):
    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        store: Store | None,
        backend: HeapBackend,
    ) -> None:
        self.backend = self._heap = backend
        self._uid, self._subtask = uid, subtask
        self._files = StateFiles(uid, subtask, attempt, store)

    def snapshot(
        self,
        checkpoint_id: CheckpointId,
        carried: Mapping[str, Freeze],
        now_ms: int,
        savepoint: Store | None = None,
    ) -> Background:
        writes = [
            self._files.write(
                checkpoint_id,
                table.declared.name,
                table.version,
                partial(table.freeze, now_ms),
                savepoint,
            )
            for table in self._heap.tables
        ]
        writes += self._files.write_carried(checkpoint_id, carried, savepoint)
        return lambda: self._files.write_all(checkpoint_id, writes, lambda: None, savepoint)

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        files, _ = written
        keyed = self._files.written(checkpoint_id, files)
        return OperatorSnapshot(self._uid, self._subtask, keyed=keyed)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._files.completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._files.aborted(checkpoint_id)


class StatesOnDisk(KeptStates):
    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        store: Store | None,
        backend: DiskBackend,
        snapshots: DatabaseSnapshots,
    ) -> None:
        self.backend = self._disk = backend
        self._files = StateFiles(uid, subtask, attempt, store)
        self._snapshots = snapshots

    def snapshot(
        self,
        checkpoint_id: CheckpointId,
        carried: Mapping[str, Freeze],
        now_ms: int,
        savepoint: Store | None = None,
    ) -> Background:
        frozen = self._disk.freeze_all(now_ms)
        write_database = self._snapshots.snapshot(checkpoint_id, frozen, savepoint)
        writes = self._files.write_carried(checkpoint_id, carried, savepoint)
        return lambda: self._files.write_all(checkpoint_id, writes, write_database, savepoint)

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        files, database = written
        carried = self._files.written(checkpoint_id, files)
        snapshot = self._snapshots.described(checkpoint_id, database)
        return replace(snapshot, keyed=(*snapshot.keyed, *carried))

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._snapshots.completed(checkpoint_id)
        self._files.completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._snapshots.aborted(checkpoint_id)
        self._files.aborted(checkpoint_id)
