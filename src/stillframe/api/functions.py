"""The contract of a function over two streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import pyarrow as pa


class TwoInputFunction(ABC):
    """What `stream.connect(other, ...)` calls with the batches of both streams.

    One object is made on an executor for each subtask, at every start; all its methods are called
    there, by one thread, between two of which anything may be snapshotted. Whatever must survive a
    failure goes through `snapshot` and `restore`; anything else it keeps is lost. The classic
    mistake is to change, after `snapshot`, an Arrow buffer that it answered.

    Connected by key, a subtask gets all records of its keys from both streams, and its state is
    rows that have the key columns: on restore each row goes to the subtask that owns its key.
    Connected to a broadcast stream, every subtask gets all of the second stream and a part of the
    first; its state is what it has learnt from the second stream, a whole copy in each subtask.
    """

    @abstractmethod
    def process_first(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take records of the stream that was connected; answer what follows from them.

        Nothing is promised about which of the streams comes first.
        """

    @abstractmethod
    def process_second(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take records of the other stream; answer what follows from them."""

    def finish(self) -> Iterable[pa.RecordBatch]:
        """Both streams have ended: answer what is still to be said about the keys kept here.

        Called at most once, and only where the streams are connected by key. Afterwards the state
        counts as empty and `snapshot` is not called any more.
        """
        return ()

    def snapshot(self) -> pa.RecordBatch | pa.Table | None:
        """All there is to remember, as rows with the key columns. Called at each barrier.

        Must be quick: records wait meanwhile. None: nothing.
        """
        return None

    def restore(self, batch: pa.RecordBatch) -> None:
        """Remember these rows. Called before any record, any number of times, in no order."""
        raise NotImplementedError(
            f"{type(self).__name__} has a snapshot but no restore: write both or none"
        )
