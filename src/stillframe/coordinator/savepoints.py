"""The savepoint that somebody asked for: where it goes, and how they hear what became of it.

A savepoint belongs to whoever asked for it. Nothing of it is in the job's directory or its log; if
it fails, its own directory is emptied again and the job goes on as if nobody had asked. One with
which the job ends is written when everything before it is committed, and the job ends at once: it
never exists while the job may still commit something.

The job's thread never waits for the directory: it is looked at, written and emptied by letters
(`coordinator/ports`, `LedgerPort`). Whoever asked hears that it failed when it has been emptied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stillframe.coordinator.ledger_mail import (
    SavepointEmptied,
    SavepointOpened,
    SavepointRefused,
    SavepointStored,
    StoreFailed,
)
from stillframe.coordinator.located import write_savepoint
from stillframe.coordinator.ports import LedgerPort
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

    def __init__(self, open_store: OpenStore, port: LedgerPort) -> None:
        self._open_store = open_store
        self._port = port
        self._wanted: SavepointWanted | None = None
        self._store: Store | None = None
        """Where it goes, once that is known to be empty."""
        self._numbers: set[CheckpointId] = set()
        self._emptying: dict[str, tuple[SavepointWanted, SavepointFailed]] = {}
        """By address: failed, and whoever asked does not know yet."""

    def begin(self, wanted: SavepointWanted) -> None:
        """It may be taken if `SavepointOpened` comes; otherwise the person is told why not."""
        if self._wanted is not None:
            reason = f"a savepoint into {self.address} is being taken: wait until it is there"
            wanted.on_outcome(SavepointFailed(reason))
            return
        self._wanted = wanted
        self._port.write(partial(_opened, self._open_store, wanted.address))

    def on_opened(self, store: Store) -> Then:
        """It can be taken; what the job does with it."""
        assert self._wanted is not None
        self._store = store
        return self._wanted.then

    def on_refused(self, reason: str) -> None:
        self._tell(SavepointFailed(reason))

    def postpone(self) -> SavepointWanted:
        """Nothing was done for it; somebody will ask again."""
        assert self._wanted is not None
        wanted, self._wanted = self._wanted, None
        return wanted

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        """Whether this is the number of a savepoint."""
        return checkpoint_id in self._numbers

    def on_triggered(self, checkpoint_id: CheckpointId) -> str:
        """It has this number; answers its address."""
        self._numbers.add(checkpoint_id)
        return self.address

    def store(self, manifest: Manifest, check_newest: Callable[[], None]) -> None:
        """Have the metadata written, the last thing."""
        assert self._store is not None
        # Whoever has taken the job over goes on, and commits what this one would say again.
        check = check_newest if self.is_last else None
        self._port.write(partial(_stored, self._store, manifest, check))

    def on_stored(self) -> None:
        self._tell(SavepointTaken(self.address))

    def on_failed(self, reason: str) -> None:
        """It was given up."""
        self._give_up(f"the savepoint into {self.address} failed: {reason}")

    def on_broken(self, reason: str) -> None:
        """The attempt is over before that."""
        if self._wanted is not None:
            self._give_up(f"the savepoint into {self.address} was not taken: {reason}")

    def on_emptied(self, address: str) -> None:
        """Nothing of it is left, as far as that could be deleted."""
        told = self._emptying.pop(address, None)
        if told is not None:
            wanted, failed = told
            wanted.on_outcome(failed)

    def on_port_closed(self) -> None:
        """Nothing more is carried out: whoever was to hear of it when it is hears of it now."""
        for address in list(self._emptying):
            self.on_emptied(address)

    @property
    def is_last(self) -> bool:
        """Whether the job is to end with it."""
        return self._wanted is not None and self._wanted.then != "go on"

    @property
    def address(self) -> str:
        assert self._wanted is not None
        return self._wanted.address if self._store is None else self._store.address

    def _give_up(self, reason: str) -> None:
        if self._store is None:
            self._tell(SavepointFailed(reason))
            return
        store, wanted = self._store, self._wanted
        self._store = self._wanted = None
        assert wanted is not None
        self._emptying[store.address] = (wanted, SavepointFailed(reason))
        self._port.delete(partial(_emptied, store))

    def _tell(self, outcome: SavepointOutcome) -> None:
        wanted, self._wanted, self._store = self._wanted, None, None
        if wanted is not None:
            wanted.on_outcome(outcome)


# --- letters ---


def _opened(open_store: OpenStore, address: str) -> SavepointOpened | SavepointRefused:
    try:
        store = open_store(address)
        if store.list(""):
            return SavepointRefused(
                f"{store.address} is not empty: give a directory for the savepoint that is not"
                " there yet"
            )
        store.write(_PROBE, [b""])  # who cannot write hears it before anything is stopped
        store.delete(_PROBE)
    except StillframeError as error:
        return SavepointRefused(str(error))
    return SavepointOpened(store)


def _stored(
    store: Store, manifest: Manifest, check_newest: Callable[[], None] | None
) -> SavepointStored | StoreFailed:
    """A `StorageError` means that there is none."""
    try:
        if check_newest is not None:
            check_newest()
        write_savepoint(store, as_savepoint(manifest))
    except StorageError as error:
        return StoreFailed(manifest.checkpoint_id, str(error))
    return SavepointStored(manifest.checkpoint_id)


def _emptied(store: Store) -> SavepointEmptied:
    with contextlib.suppress(StorageError):
        for child in store.list(""):
            store.delete_directory(child)
    return SavepointEmptied(store.address)
