"""The contracts of functions that are called with whole batches and remember something."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import pyarrow as pa

from stillframe.api.checkpoints import HearsOfCheckpoints
from stillframe.api.timers import Timers


class StatefulFunction(HearsOfCheckpoints):
    """What a `KeyedFunction` and a `TwoInputFunction` have in common.

    One object is made on an executor for each subtask, at every start; all its methods are called
    there, by one thread, between two of which anything may be snapshotted. Whatever must survive a
    failure goes through `snapshot` and `restore`; anything else it keeps is lost, except timers,
    which are kept for it. The classic mistake is to change, after `snapshot`, an Arrow buffer that
    it answered.
    """

    def open(self, timers: Timers) -> None:
        """Keep `timers`, if the function wants any. Called once, before all other methods.

        Timers that a checkpoint holds are there when the first record comes, not yet here.
        """

    def on_event_timers(self, fired: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Event time has passed these timers: answer what follows.

        `fired` has the key columns and `time`, a timestamp in UTC. Called in ascending order of
        times, with at most 1,024 rows and with no key twice: so a later timer of the same key can
        still be deleted here. Records that come after the watermark wait until all are fired;
        checkpoints do not. The end of all records fires whatever is left.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers of event time but has no on_event_timers:"
            " write it"
        )

    def on_processing_timers(self, fired: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The clock on the wall has passed these timers: answer what follows.

        As `on_event_timers`; never early, late if the subtask is busy, and after a failure as soon
        as the job runs again. When all records have ended, those still to come are dropped.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers of processing time but has no"
            " on_processing_timers: write it"
        )

    def finish(self) -> Iterable[pa.RecordBatch]:
        """All records have come: answer what is still to be said about the keys kept here.

        Called at most once, after the last timer, and only where records are parted by key.
        Afterwards the state counts as empty, no timer fires, and `snapshot` is not called any more.
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


class KeyedFunction(StatefulFunction, ABC):
    """What `stream.groupBy(...).process(...)` calls with the batches of the stream.

    A subtask gets all records of its keys, and its state is rows that have the key columns: on
    restore each row goes to the subtask that owns its key.
    """

    @abstractmethod
    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take records, of any of this subtask's keys; answer what follows from them."""


class TwoInputFunction(StatefulFunction, ABC):
    """What `stream.connect(other, ...)` calls with the batches of both streams.

    Connected by key, a subtask gets all records of its keys from both streams, and its state is
    rows that have the key columns: on restore each row goes to the subtask that owns its key.
    Connected to a broadcast stream, every subtask gets all of the second stream and a part of the
    first; its state is what it has learnt from the second stream, a whole copy in each subtask,
    and it has no timers.
    """

    @abstractmethod
    def process_first(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take records of the stream that was connected; answer what follows from them.

        Nothing is promised about which of the streams comes first.
        """

    @abstractmethod
    def process_second(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take records of the other stream; answer what follows from them."""
