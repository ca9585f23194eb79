"""What became of letters to the store, told to the job's thread: a closed set, all cases named."""

from __future__ import annotations

from dataclasses import dataclass

from stillframe.ids import CheckpointId
from stillframe.protocol.joblog import Claim, CompletedCheckpoint
from stillframe.storage.store import Store


@dataclass(frozen=True, slots=True)
class Stored:
    """The log entry exists: the checkpoint is complete."""

    completed: CompletedCheckpoint
    retained: tuple[CompletedCheckpoint, ...]
    """By this entry, oldest first."""
    dropped: tuple[CompletedCheckpoint, ...]
    """No longer retained, by this entry."""
    superfluous: tuple[str, ...]
    """Entries of the log that may go."""
    claim: Claim | None
    """What the job had claimed and may delete, now that it has a checkpoint of its own."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Of a checkpoint: there certainly is no log entry. Of a savepoint: it has no metadata."""

    checkpoint_id: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class SavepointOpened:
    """Its directory is empty and can be written to."""

    store: Store


@dataclass(frozen=True, slots=True)
class SavepointRefused:
    """Nothing can be written where somebody wants a savepoint, and nothing has changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class SavepointStored:
    """Its metadata is written: the savepoint exists."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class SavepointEmptied:
    """What a savepoint that failed had written is deleted, as far as it could be."""

    address: str


@dataclass(frozen=True, slots=True)
class LedgerFailed:
    """A letter could not be carried out, for any other reason than its own answer can say.

    After `Fenced` or `Unsettled` nothing more is written, and what was to be deleted stays.
    """

    error: Exception


LedgerEvent = (
    Stored
    | StoreFailed
    | SavepointOpened
    | SavepointRefused
    | SavepointStored
    | SavepointEmptied
    | LedgerFailed
)
