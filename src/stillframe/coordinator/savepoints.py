"""The savepoint that somebody asked for: where it goes, and how they hear what became of it.

A savepoint belongs to whoever asked for it. Nothing of it is in the job's directory or its log; if
it fails, its own directory is emptied again and the job goes on as if nobody had asked. One with
which the job ends is written when everything before it is committed, and the job ends at once: it
never exists while the job may still commit something.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from stillframe.coordinator.located import write_savepoint
from stillframe.errors import StillframeError, StorageError
from stillframe.ids import CheckpointId
from stillframe.protocol.checkpoints import Then
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.savepoints import as_savepoint
from stillframe.storage.store import Store

OpenStore = Callable[[str], Store]

_PROBE = "_writable"


@dataclass(frozen=True, slots=True)
class SavepointFailed:
    """There is no savepoint, and this is why; if the job was to end with it, it goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class SavepointTaken:
    """It is complete; if the job was to end with it, it ends now."""

    address: str


SavepointOutcome = SavepointTaken | SavepointFailed


@dataclass(frozen=True, slots=True)
class SavepointWanted:
    """A person asks for a savepoint, and is told what became of it, on the job's thread."""

    address: str
    then: Then
    on_outcome: Callable[[SavepointOutcome], None]


class Savepoints:
    """The savepoints of one attempt, one at a time. Used by the job's thread alone."""

    def __init__(self, open_store: OpenStore) -> None:
        self._open_store = open_store
        self._wanted: SavepointWanted | None = None
        self._store: Store | None = None
        self._numbers: set[CheckpointId] = set()

    def begin(self, wanted: SavepointWanted) -> bool:
        """Whether it may be taken; if not, the person knows why, and nothing has changed."""
        try:
            if self._wanted is not None:
                raise StorageError(
                    f"a savepoint into {self.address} is being taken: wait until it is there"
                )
            self._store = self._emptied(wanted.address)
        except StillframeError as error:
            wanted.on_outcome(SavepointFailed(str(error)))
            return False
        self._wanted = wanted
        return True

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        """Whether this is the number of a savepoint."""
        return checkpoint_id in self._numbers

    def on_triggered(self, checkpoint_id: CheckpointId) -> str:
        """It has this number; answers its address."""
        self._numbers.add(checkpoint_id)
        return self.address

    def store(self, manifest: Manifest) -> None:
        """Write the metadata, the last thing; a `StorageError` means that there is none."""
        assert self._store is not None
        write_savepoint(self._store, as_savepoint(manifest))
        self._tell(SavepointTaken(self.address))

    def on_failed(self, reason: str) -> None:
        """It was given up."""
        self._empty()
        self._tell(SavepointFailed(f"the savepoint into {self.address} failed: {reason}"))

    def on_broken(self, reason: str) -> None:
        """The attempt is over before that."""
        if self._wanted is not None:
            self._empty()
            what = f"the savepoint into {self.address} was not taken"
            self._tell(SavepointFailed(f"{what}: {reason}"))

    @property
    def is_last(self) -> bool:
        """Whether the job is to end with it."""
        return self._wanted is not None and self._wanted.then != "go on"

    @property
    def address(self) -> str:
        assert self._store is not None
        return self._store.address

    def _tell(self, outcome: SavepointOutcome) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted.on_outcome(outcome)

    def _emptied(self, address: str) -> Store:
        store = self._open_store(address)
        if store.list(""):
            raise StorageError(
                f"{store.address} is not empty: give a directory for the savepoint that is not"
                " there yet"
            )
        store.write(_PROBE, [b""])  # who cannot write hears it before anything is stopped
        store.delete(_PROBE)
        return store

    def _empty(self) -> None:
        assert self._store is not None
        with contextlib.suppress(StorageError):
            for child in self._store.list(""):
                self._store.delete_directory(child)
