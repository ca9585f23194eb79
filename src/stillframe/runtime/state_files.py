"""The files of one operator in one subtask: what a checkpoint writes, shares or refers to.

A state has a name and a version. What has not changed since the last completed checkpoint is not
written again but referred to (`protocol/sharing`). A savepoint stands on its own: all of it is
written to its own place, and no checkpoint ever refers to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import FileHandle, KeyedState
from stillframe.protocol.sharing import Sharing
from stillframe.state.snapshots import FrozenRows, WrittenSnapshot, write_keyed_snapshot
from stillframe.storage.paths import number_of_file, state_path
from stillframe.storage.store import Store


class FrozenState(FrozenRows, Protocol):
    """State as it was at the barrier."""

    def __len__(self) -> int: ...

    def release(self) -> None:
        """Give the memory back."""


States = tuple[KeyedState, ...]
Freeze = Callable[[], FrozenState]
Named = tuple[str, States]
Write = Callable[[], Named]


def described_file(state: str, written: WrittenSnapshot) -> KeyedState:
    handle = FileHandle(written.path, written.length_bytes, written.crc32, written.data)
    return KeyedState(
        state, handle, written.key_groups, written.rows, written.schema_text, kind=written.kind
    )


class StateFiles:
    """States as files, by their names. Called by the loop thread, but for what it answers."""

    def __init__(
        self, uid: OperatorUid, subtask: SubtaskIndex, attempt: Attempt, store: Store | None
    ) -> None:
        self._place = (uid, subtask, attempt)
        self._store = store
        self._sharing: dict[str, Sharing[States]] = {}

    def write(
        self,
        checkpoint_id: CheckpointId,
        name: str,
        version: int,
        freeze: Freeze,
        savepoint: Store | None = None,
    ) -> Write:
        """Answers, in the background, the name and the file; none where there are no rows."""
        if savepoint is None:
            sharing = self._sharing.setdefault(name, Sharing())
            held = sharing.on_snapshot(checkpoint_id, version)
            if held is not None:
                return lambda: (name, held)
        return self.write_anew(checkpoint_id, name, freeze(), savepoint)

    def write_anew(
        self,
        checkpoint_id: CheckpointId,
        name: str,
        frozen: FrozenState,
        savepoint: Store | None = None,
    ) -> Write:
        """As `write`, of what may have changed, but nobody can tell."""
        if not len(frozen):
            frozen.release()
            return lambda: (name, ())
        store, path = savepoint or self._store, state_path(checkpoint_id, *self._place, name)
        assert store is not None, "a snapshot was asked for without a place to keep it"

        def write() -> Named:
            try:
                return name, (described_file(name, write_keyed_snapshot(store, path, frozen)),)
            finally:
                frozen.release()

        return write

    def write_carried(
        self,
        checkpoint_id: CheckpointId,
        carried: Mapping[str, Freeze],
        savepoint: Store | None = None,
    ) -> list[Write]:
        """As `write`, of rows that never change."""
        return [
            self.write(checkpoint_id, name, 0, freeze, savepoint)
            for name, freeze in carried.items()
        ]

    def write_all(
        self,
        checkpoint_id: CheckpointId,
        writes: Sequence[Write],
        then: Callable[[], Any],
        savepoint: Store | None = None,
    ) -> tuple[list[Named], Any]:
        """In the background: all of these and what comes `then`, or nothing is left of them."""
        named: list[Named] = []
        try:
            for write in writes:
                named.append(write())
            return named, then()
        except BaseException:
            self._discard(savepoint or self._store, checkpoint_id, named)
            raise

    def _discard(
        self, store: Store | None, checkpoint_id: CheckpointId, named: Sequence[Named]
    ) -> None:
        paths = [state.file.path for _, states in named for state in states]
        for path in paths:
            if store is not None and number_of_file(path) == checkpoint_id:
                with contextlib.suppress(StorageError):
                    store.delete(path)

    def written(self, checkpoint_id: CheckpointId, named: Sequence[Named]) -> States:
        """What the snapshot holds, of what was answered in the background."""
        for name, states in named:
            if name in self._sharing:
                self._sharing[name].on_written(checkpoint_id, states)
        return tuple(state for _, states in named for state in states)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        for sharing in self._sharing.values():
            sharing.on_completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        for sharing in self._sharing.values():
            sharing.on_aborted(checkpoint_id)
