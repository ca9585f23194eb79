"""The sink contract: write during the epoch, prepare at the barrier, commit when it is complete.

A sink is a frozen description that travels to the executors inside the plan. Its writers run in
the slots. What a writer has prepared is described by *committables*: small JSON objects that
travel in the acknowledgement, are kept in the checkpoint's metadata, and are all that is needed to
make the prepared records visible, from any machine, also after everything else has died.

Who writes to another system, such as a database or a message log, need not do this by hand:
`TransactionalSink` stages the epoch and has one transaction of that system write it with a mark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import pyarrow as pa

from stillframe.api.formats import Format, not_made_of_options
from stillframe.ids import Attempt, CheckpointId, Epoch, Mark, OperatorUid, SubtaskIndex, Writer
from stillframe.json_values import JsonObject
from stillframe.options import Options

Committable = JsonObject

SinkGuarantee = Literal["exactly-once", "at-least-once", "at-most-once", "nothing is kept"]


class Staging(Protocol):
    """Files of a job's sinks beside its checkpoints, wherever these are. Called by any thread.

    A name is `<directory>/<file>`; each sink has a directory of its own.
    """

    @property
    def has_network(self) -> bool:
        """Whether what is written is sent to an object storage or HDFS."""

    def directory(self, uid: OperatorUid) -> str: ...

    def write(self, name: str, chunks: Iterable[pa.Buffer]) -> JsonObject:
        """Make a new file; when it returns the file is durable. Answers what `read` needs."""

    def read(self, written: JsonObject) -> pa.Buffer:
        """The whole file, if it is as it was written; otherwise `SnapshotDamaged`."""

    def note(self, name: str) -> None:
        """Make an empty file; that there is one already is fine."""

    def delete(self, name: str) -> None:
        """That it is gone already is fine."""

    def delete_unfinished(self, directory: str) -> None:
        """Remove what writers that died have begun. One that is still at it fails."""

    def names(self, directory: str) -> Set[str]:
        """All that is there, each as `<directory>/<file>`."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Who a writer is; every name it gives to something outside carries all of it."""

    job: str
    attempt: Attempt
    uid: OperatorUid
    subtask: SubtaskIndex
    incarnation: str = ""
    staging: Staging | None = None
    """None where the job keeps no checkpoints."""
    accepts_missing: frozenset[str] = frozenset()
    """For its committer."""

    @property
    def committing(self) -> CommitterContext:
        return CommitterContext(self.job, self.staging, self.accepts_missing, self.attempt)

    @property
    def writer(self) -> Writer:
        return Writer(self.incarnation, self.uid, self.subtask)


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """For whom a committer commits."""

    job: str = ""
    staging: Staging | None = None
    """None where the job keeps no checkpoints, so that there is nothing to commit."""
    accepts_missing: frozenset[str] = frozenset()
    """Output that is gone and that the job goes on without, as `name:rows`: acceptMissingOutput."""
    attempt: Attempt | None = None
    """In which it commits, in a slot; None on the driver."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one writer has prepared for one checkpoint, and the mark it is known by."""

    mark: Mark
    committables: tuple[Committable, ...]


def committables_of(prepared: Iterable[Prepared]) -> list[Committable]:
    """All of them, in their order, whoever prepared them."""
    return [each for part in prepared for each in part.committables]


class SinkWriter(ABC):
    """Takes the records of one sink subtask, in one attempt. Called by the loop thread only."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take these records into the current epoch. Nobody outside may see them yet.

        What the other system could refuse is checked here (size, types, keys): after the
        checkpoint is complete there is no way back.
        """

    @abstractmethod
    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        """End the epoch at this barrier and begin the next one; called between two writes.

        Must be quick: a swap of buffers. The function it returns does the slow part (close,
        fsync, prepare) on a background thread, once, and answers the committables of the ended
        epoch, possibly none; the acknowledgement waits for it. `write` is called meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop what was not rotated and give everything back. Called once, also after a failure."""


class Committer(ABC):
    """Makes prepared records visible. Every call may be repeated, from anywhere, after a crash."""

    @abstractmethod
    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        """Make these visible; those that already are, are left alone.

        Called only when the checkpoint that holds them is complete, on a background thread. Where
        the sink commits in the slots, it gets what one subtask holds: its own work, and after a
        change of the parallelism that of former subtasks, each part with the mark of the one who
        prepared it. Of one writer, parts come in the order of their checkpoints, and no later one
        is committed anywhere before an earlier one. Where the sink commits at the coordinator, it
        gets one part with the work of all subtasks, once per epoch, in the order of epochs.

        `Unavailable` is tried again in place for a while; anything else ends the attempt. The
        classic mistake is to look at the epoch, which may come again with other records, instead
        of the mark.
        """

    def forget(self, committables: Sequence[Committable]) -> None:  # noqa: B027 - most note nothing
        """Drop what was noted of these: no checkpoint holds them any more that a restart begins
        with, so that nobody asks to commit them again.

        Called after `commit` of a later checkpoint, on the same thread, where the sink commits in
        the slots. It is not promised: what a crash leaves is for `sweep`.
        """

    @abstractmethod
    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        """Remove what attempts before `older_than` left behind, but not what `keep` still needs.

        Called on the driver: at start, after the first completed checkpoint and at the end of
        the job. Finding nothing is normal.
        """

    def end_writers(  # noqa: B027 - most leave nothing behind that has their name
        self, uid: OperatorUid, needed: Set[Writer]
    ) -> None:
        """Remove what another system remembers of writers of this sink that are not `needed`.

        Needed are those that write now, and those whose output a retained checkpoint holds. Called
        on the driver while the job runs, once in an attempt, when the checkpoints of the attempts
        before are gone. What cannot be removed then is left for the next attempt.
        """

    def close(self) -> None:  # noqa: B027 - most committers hold nothing
        """Give everything back. Called once."""


class Sink(Format, ABC):
    """A frozen, picklable description of where records go."""

    @classmethod
    def from_options(cls, options: Options, schema: pa.Schema) -> Sink:
        """The sink that `writeStream.format(cls).option(...)` describes.

        Called on the driver, before the job starts; it writes nothing yet. `schema` is that of
        the stream. What it raises is told as a `BuildError`.
        """
        raise not_made_of_options(cls, "writeStream")

    commits_at_coordinator: ClassVar[bool] = False
    """Whether one committer on the driver gets all subtasks' committables of an epoch at once."""

    makes_visible: ClassVar[bool] = True
    """False only for a sink that keeps nothing: then an epoch may be repeated unseen."""

    guarantee: SinkGuarantee = "exactly-once"
    """What the outside sees of each record, whatever fails, when the sources can rewind."""

    weakness: str | None = None
    """Why that is not exactly-once, in words that follow those of `describe`; people read it when
    the job starts."""

    is_whole: bool = False
    """Whether every epoch brings everything anew: one that failed is of no use to the next."""

    @property
    def tied_to(self) -> str | None:
        """What the records go to, such as a directory or a table, in words that do not change.

        After a change of the job, what was prepared is committed by the sink that is tied to the
        same, if its uid is not given. None: to nothing that has a name; then the stream that the
        sink is on says which one it is.
        """
        return self.describe()

    @abstractmethod
    def open_writer(self, context: SinkContext) -> SinkWriter:
        """A writer for one subtask. Called on an executor, per attempt."""

    @abstractmethod
    def open_committer(self, context: CommitterContext) -> Committer:
        """A committer. Called on the driver, and on executors unless `commits_at_coordinator`."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for `explain()`: the kind and where it writes to."""


# --- Sinks whose target has transactions -----------------------------------------------------


class Target(ABC):
    """The other system, as one committer of a `TransactionalSink` reaches it.

    Opened in a slot, or on the driver where the sink commits at the coordinator; used by one thread
    at a time, not always the same. Raise `Unavailable` (or a `ConnectionError`, a `TimeoutError`)
    where a later try may succeed: then everything from `begin` on is tried again.
    """

    @abstractmethod
    def begin(self, writer: Writer) -> CheckpointId | None:
        """Shut out whoever else commits for this writer, *then* look for its newest mark.

        None: there is none. Called before each part. The order is what makes the sink exact: a
        slot that was given up may be committing the same part at this moment. After `begin` its
        transaction is either done, so that its mark is seen here, or can never be done. A lock on
        the mark's row does it, or a producer's id that fences older ones. The classic mistake is
        to read the mark first.
        """

    @abstractmethod
    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        """One transaction: these rows and this mark, or neither.

        Called at most once after a `begin` for the same writer, whose older mark it replaces. When
        it returns, rows and mark are durable. Rows that the other system will never take are given
        to `refuse` with the reason, *before* the transaction is committed, and left out of it:
        they are kept aside and told. The classic mistake is to write the mark in a transaction of
        its own.
        """

    def forget(self, writer: Writer) -> None:  # noqa: B027 - a mark takes little room
        """Shut out whoever commits for this writer, then remove its mark: it never writes again.

        Called where a sink says that its marks expire, and not between `begin` and `write`.
        """

    def incarnations(self, uid: OperatorUid) -> Set[str]:
        """Of jobs that have marks of a sink with this uid here, to be told.

        Called where a sink says that its marks expire, and not between `begin` and `write`.
        """
        return frozenset()

    def abandon(self) -> None:  # noqa: B027 - most hold nothing between the two
        """Nothing is written after this `begin`, or the write has failed. Must not raise."""

    def close(self) -> None:  # noqa: B027 - many hold nothing
        """Give everything back. Called once."""
