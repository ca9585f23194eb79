"""The source contract: splits with positions, read without blocking, rewound after a failure.

A source is a frozen description that travels to the executors inside the plan. At the very first
start of a job the driver asks it for its splits; from then on splits and their positions are
operator state: they are in every checkpoint, and a restored job reads on from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import pyarrow as pa

from stillframe.clock import Clock
from stillframe.ids import SubtaskIndex
from stillframe.json_values import JsonObject


@dataclass(frozen=True, slots=True)
class Split:
    """One independently readable part of a source and how far it has been read.

    `position` is whatever the source needs to read on from there (JSON, so that people can read
    it in a checkpoint's metadata).
    """

    id: str
    position: JsonObject


@dataclass(frozen=True, slots=True)
class NothingYet:
    """No records right now; ask again when woken, or after this long at the latest."""

    retry_seconds: float


@dataclass(frozen=True, slots=True)
class EndOfData:
    """All splits have been read to their end; there will never be more."""


Polled: TypeAlias = pa.RecordBatch | NothingYet | EndOfData


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a reader may know about where it runs."""

    subtask: SubtaskIndex
    parallelism: int
    clock: Clock
    feed: Iterator[pa.RecordBatch] | None = None
    """The rows that Spark itself hands to this slot, where the job is fed by a DataFrame."""
    columns: tuple[str, ...] | None = None
    """The columns that the job reads, None for all; a reader may leave the others out."""


class SourceReader(ABC):
    """Reads some splits inside a slot's loop. Called by the loop thread only."""

    @abstractmethod
    def poll(self) -> Polled:
        """The next records, if there are any now.

        Called whenever the task has room. Must not block and should take a few milliseconds at
        most: a barrier waits for it. The classic mistake is to move the position before the
        batch has been returned.
        """

    @abstractmethod
    def splits(self) -> list[Split]:
        """Every split given to `open`, ended ones too, positioned after the last *returned* batch.

        Called at each barrier, between two calls of `poll`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, also after a failure."""


class BlockingReader(ABC):
    """Reads some splits in a thread of its own, for readers that may have to wait for bytes."""

    @abstractmethod
    def read(self) -> Iterator[tuple[Split, pa.RecordBatch]]:
        """Batch after batch, each with its split positioned *after* that batch.

        Iterated by one background thread that stays a few batches ahead; the runtime keeps the
        position of what was really emitted. The end of the iterator is the end of the data.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, when `read` is no longer being iterated."""


class Source(ABC):
    """A frozen, picklable description of where records come from."""

    rewindable: ClassVar[bool] = True
    """Whether a position given to `open` is honoured; without it exactly-once cannot be had."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of every batch its readers return, all of them if the job reads all."""

    @abstractmethod
    def splits(self, parallelism: int) -> list[Split]:
        """All splits at their beginning. Called on the driver, once in the life of a job."""

    @abstractmethod
    def open(
        self, splits: Sequence[Split], context: SourceContext
    ) -> SourceReader | BlockingReader:
        """A reader of these splits, from their positions on. Called on an executor, per attempt.

        `splits` may be empty: the reader then ends at once.
        """

    @abstractmethod
    def describe(self) -> str:
        """A few words for `explain()`: the kind and where it reads from."""
