"""Where the states of a program are kept, and how they come into a checkpoint.

On the heap every state has a file of its own, which is not written again while the state has not
changed. On disk all of them are one database. In both cases there may be rows of states that the
program does not declare any more: those are carried along, as files.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import KeyedState, OperatorSnapshot
from stillframe.protocol.sharing import Sharing
from stillframe.runtime.disk import DatabaseSnapshots
from stillframe.runtime.operators import Background, FrozenState, described_file
from stillframe.state.backends import Backend
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.heap import HeapBackend
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.paths import number_of_file, state_path
from stillframe.storage.store import Store

States = tuple[KeyedState, ...]
Freeze = Callable[[], FrozenState]
Write = Callable[[], tuple[str, States]]


class KeptStates(ABC):
    """The states of one operator in one subtask. Called by the loop thread only."""

    backend: Backend[Any]

    @abstractmethod
    def snapshot(
        self, checkpoint_id: CheckpointId, carried: Mapping[str, Freeze], now_ms: int
    ) -> Background:
        """The synchronous part; `carried` are rows to store besides."""

    @abstractmethod
    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        """What the acknowledgement says, made of what the background part answered."""

    @abstractmethod
    def completed(self, checkpoint_id: CheckpointId) -> None: ...

    @abstractmethod
    def aborted(self, checkpoint_id: CheckpointId) -> None: ...


class StateFiles:
    """Keyed states of one operator as files, by their names."""

    def __init__(
        self, uid: OperatorUid, subtask: SubtaskIndex, attempt: Attempt, store: Store | None
    ) -> None:
        self._place = (uid, subtask, attempt)
        self._store = store
        self._sharing: dict[str, Sharing[States]] = {}

    def write(self, checkpoint_id: CheckpointId, name: str, version: int, freeze: Freeze) -> Write:
        """Answers, in the background, the name and the file; none where there are no rows."""
        held = self._sharing.setdefault(name, Sharing()).on_snapshot(checkpoint_id, version)
        if held is not None:
            return lambda: (name, held)
        assert self._store is not None, "a snapshot was asked for without a place to keep it"
        store, path = self._store, state_path(checkpoint_id, *self._place, name)
        frozen = freeze()

        def write() -> tuple[str, States]:
            try:
                if not len(frozen):
                    return name, ()
                return name, (described_file(name, write_keyed_snapshot(store, path, frozen)),)
            finally:
                frozen.release()

        return write

    def write_carried(
        self, checkpoint_id: CheckpointId, carried: Mapping[str, Freeze]
    ) -> list[Write]:
        """As `write`, of rows that never change."""
        return [self.write(checkpoint_id, name, 0, freeze) for name, freeze in carried.items()]

    def write_all(
        self, checkpoint_id: CheckpointId, writes: Sequence[Write], then: Callable[[], Any]
    ) -> tuple[list[tuple[str, States]], Any]:
        """In the background: all of these and what comes `then`, or nothing is left of them."""
        named: list[tuple[str, States]] = []
        try:
            for write in writes:
                named.append(write())
            return named, then()
        except BaseException:
            self._discard(checkpoint_id, named)
            raise

    def _discard(self, checkpoint_id: CheckpointId, named: list[tuple[str, States]]) -> None:
        paths = [state.file.path for _, states in named for state in states]
        for path in paths:
            if self._store is not None and number_of_file(path) == checkpoint_id:
                with contextlib.suppress(StorageError):
                    self._store.delete(path)

    def written(self, checkpoint_id: CheckpointId, named: Sequence[tuple[str, States]]) -> States:
        """What the snapshot holds, of what was answered in the background."""
        for name, states in named:
            self._sharing[name].on_written(checkpoint_id, states)
        return tuple(state for _, states in named for state in states)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        for sharing in self._sharing.values():
            sharing.on_completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        for sharing in self._sharing.values():
            sharing.on_aborted(checkpoint_id)


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
        self, checkpoint_id: CheckpointId, carried: Mapping[str, Freeze], now_ms: int
    ) -> Background:
        writes = [
            self._files.write(
                checkpoint_id,
                table.declared.name,
                table.version,
                partial(table.freeze, now_ms),
            )
            for table in self._heap.tables
        ]
        writes += [
            self._files.write(checkpoint_id, name, 0, rows) for name, rows in carried.items()
        ]
        return lambda: self._files.write_all(checkpoint_id, writes, lambda: None)

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
        self, checkpoint_id: CheckpointId, carried: Mapping[str, Freeze], now_ms: int
    ) -> Background:
        write_database = self._snapshots.snapshot(checkpoint_id, self._disk.freeze_all(now_ms))
        writes = self._files.write_carried(checkpoint_id, carried)
        return lambda: self._files.write_all(checkpoint_id, writes, write_database)

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
