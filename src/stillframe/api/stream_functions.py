"""The contract of functions over a stream that is not parted by keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import pyarrow as pa

from stillframe.api.checkpoints import HearsOfCheckpoints


class RowsState(Protocol):
    """Rows of a subtask, in their order; they belong to no key."""

    def get(self) -> list[Any]:
        """Named tuples with the fields of the schema."""

    def put(self, rows: Iterable[tuple[Any, ...]], /) -> None:
        """These, and none of those before."""

    def append(self, row: tuple[Any, ...], /) -> None: ...

    def extend(self, rows: Iterable[tuple[Any, ...]], /) -> None: ...

    def clear(self) -> None: ...


class CopiedState(Protocol):
    """Rows by keys, of which every subtask has the same copy."""

    def get(self, key: tuple[Any, ...], /) -> Any:
        """The row, or None where there is none."""

    def contains(self, key: tuple[Any, ...], /) -> bool: ...

    def put(self, key: tuple[Any, ...], row: tuple[Any, ...], /) -> None: ...

    def remove(self, key: tuple[Any, ...], /) -> None:
        """Forget one; there may be none."""

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All there are now, whatever is put or removed meanwhile."""

    def clear(self) -> None: ...


class SubtaskStates(ABC):
    """The states of a `StreamFunction` in one subtask, as `open` is given them.

    A state is declared once, in `open`, under a name of its own, and holds what the checkpoint has
    for this subtask from then on. Schemas, rows and times are as in `KeyStates`. All is kept in
    memory, and a state that has changed is written whole with the next checkpoint: tens of
    thousands of rows are fine, millions belong into a state with keys.
    """

    @abstractmethod
    def list(self, name: str, schema: Any) -> RowsState:
        """Rows that any subtask may have.

        When the parallelism changes, the rows of all subtasks are put end to end and dealt in turn;
        as long as it does not, every subtask keeps its own.
        """

    @abstractmethod
    def union_list(self, name: str, schema: Any) -> RowsState:
        """Rows of which every subtask is given all, those of the others too, at every restore.

        The classic mistake is to leave them in: then every subtask has them all in its next
        snapshot, and the next restore has them once more for each subtask. Put back your own part.
        """

    @abstractmethod
    def broadcast(self, name: str, key_schema: Any, value_schema: Any) -> CopiedState:
        """A map of which every subtask has the same copy, because all have learnt the same.

        That is for the function to see to: it changes the map only by what every subtask gets, or
        knows at its start. A subtask that is restored is given the copy of one former subtask.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Forget a state of an older program; there may be none.

        One that is neither declared nor deleted is carried along in every checkpoint.
        """

    @property
    @abstractmethod
    def subtask(self) -> int:
        """Which of the subtasks this is, from 0 on."""

    @property
    @abstractmethod
    def parallelism(self) -> int:
        """How many subtasks there are."""


class StreamFunction(HearsOfCheckpoints, ABC):
    """What `stream.process(...)` calls with the batches of the stream.

    One object is made on an executor for each subtask, at every start; all its methods are called
    there, by one thread, and between two of them anything may be snapshotted. One more is made
    where the job is built and its `open` and `close` are called, to find mistakes before anything
    runs. Nothing is promised about which subtask gets which record. Whatever must survive a failure
    is kept in `states`.
    Records that it holds back come behind the watermark that they came with: what follows by event
    time may find them late.
    """

    def open(self, states: SubtaskStates) -> None:
        """Declare the states and keep them. Called once, before all other methods."""

    @abstractmethod
    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take records; answer what follows from them."""

    def finish(self) -> Iterable[pa.RecordBatch]:
        """All records of this subtask have come: answer what is still to be said.

        Called at most once. Afterwards the lists count as empty: what was in them has been said.
        """
        return ()

    def close(self) -> None:
        """Give everything back. Called once, also after a failure."""
