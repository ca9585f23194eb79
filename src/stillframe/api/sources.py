"""The source contract: splits with positions, read without blocking, rewound after a failure.

A source is a frozen description that travels to the executors inside the plan. At the very first
start of a job the driver asks it for its splits; from then on splits and their positions are
operator state: they are in every checkpoint, and a restored job reads on from there.

Where splits come and go while the job runs (files of a followed directory, partitions that are
added), the source has an enumerator on the driver, which is asked for new splits again and again;
the coordinator hands each of them to one reader.

When a checkpoint is complete, its readers and its enumerator are told (`on_checkpoint_complete`),
so that a queue can be acknowledged, offsets committed, files let go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import pyarrow as pa

from stillframe.api.formats import Format, not_made_of_options
from stillframe.clock import Clock
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.options import Options


@dataclass(frozen=True, slots=True)
class Split:
    """One independently readable part of a source and how far it has been read.

    `position` is whatever the source needs to read on from there: a dict of JSON values with texts
    as keys, so that people can read it in a checkpoint's metadata. It must read back from JSON as
    it was, so no tuples and no numbers as keys, and take a megabyte at most. The classic mistakes
    are to change a dict that was handed out, instead of making a new one, and to collect in it all
    that was ever read: it is in every checkpoint.
    """

    id: str
    position: JsonObject


@dataclass(frozen=True, slots=True)
class NothingYet:
    """No records right now; ask again when woken, or after this long at the latest."""

    retry_seconds: float


@dataclass(frozen=True, slots=True)
class EndOfData:
    """All splits given so far have been read to their end; of these, there will never be more.

    If more splits may still be discovered, the reader is simply polled again when some have come.
    """


Polled: TypeAlias = pa.RecordBatch | NothingYet | EndOfData

ReadItem: TypeAlias = tuple[Split, pa.RecordBatch | None] | None
"""What `BlockingReader.read` yields."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a reader is behind what is there to be read."""

    records: int
    """How many it has not given yet; 0 at the end."""
    seconds: float | None
    """How long ago the newest record that it gave was written; 0 at the end, None if unknown."""


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
    grouped_by: tuple[str, ...] = ()
    """Those of them that records are only grouped by: they may come as dictionaries of values."""


class SourceReader(ABC):
    """Reads some splits inside a slot's loop.

    One object for each subtask and attempt. All methods are called on an executor, by the loop
    thread only, which also runs everything behind the source: none of them may block.
    """

    @abstractmethod
    def poll(self) -> Polled:
        """The next records, if there are any now.

        Called whenever the task has room. Must not block and should take a few milliseconds at
        most: a barrier waits for it. The classic mistake is to move the position before the
        batch has been returned.
        """

    @abstractmethod
    def splits(self) -> list[Split]:
        """Every split given to the reader, positioned after the last *returned* batch.

        Called at each barrier, between two calls of `poll`. Ended ones too; only where the source
        has an enumerator, which remembers them, they may be left out.
        """

    reads_in_turn: bool = False
    """Whether a split is begun when the one before it has ended, so that one that has given
    nothing is not idle but waits."""

    def open_splits(self) -> frozenset[str] | None:
        """The ids of the splits that may still give records; None: the reader does not tell.

        Called after each `poll`, so it should be quick: answer the same object while nothing has
        changed. Event time at the reader is as far as the slowest of these, of which one that has
        given nothing yet is the slowest; of a reader that does not tell, as far as its newest
        record, so that records of a split that is read more slowly may be late. The classic
        mistake is to leave out a split that waits: its records may all be late when it is begun.
        """
        return None

    def polled_split(self) -> str | None:
        """The id of the split that the batch answered last by `poll` came from.

        Called after each `poll` that answered a batch, if `open_splits` tells. It may have ended
        with that batch.
        """
        return None

    def records_malformed(self) -> int:
        """How many records so far were not what the schema declares, dropped ones included.

        Called now and then, for `status`. Only for sources that go on after such a record.
        """
        return 0

    def awaits(self) -> str | None:
        """What has to come back before there are records again, such as a server, in a sentence.

        Called now and then, for `status`. None: nothing, though there may be no records.
        """
        return None

    def lag(self) -> Lag | None:
        """How far it is behind; None: it does not tell.

        Called twice a second, for `status`, by a thread that must not wait, also while the job has
        no room: ask another system in the background, and answer what it last said.
        """
        return None

    def add_splits(self, splits: Sequence[Split]) -> None:
        """Read these too.

        Only for sources with an enumerator, whose readers are opened without splits: called when
        some are restored or discovered, between two calls of `poll`, never twice for one split.
        The classic mistake is to answer `splits` without those that were added but not yet begun.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no add_splits, which the reader of a source with an"
            " enumerator needs"
        )

    def no_more_splits(self, *, until_now: bool) -> None:  # noqa: B027 - most need not know
        """No split comes after those that were given; called once, after the last `add_splits`.

        Only for sources with an enumerator. `until_now`: the job stops when it has read what is
        there (`trigger(availableNow=True)`), so splits that never end have to end where they end
        now. Their positions are kept, and the next start reads on from there.
        """

    def on_checkpoint_complete(  # noqa: B027 - most have nobody to tell
        self, checkpoint_id: CheckpointId, splits: Sequence[Split]
    ) -> None:
        """This checkpoint is complete; `splits` are those of this reader, as they are in it.

        From now on the job never asks for a record before these positions, so a queue may be told
        to forget it. The exception is a person who restores an older checkpoint or savepoint by
        hand: keep what such a restore needs. (And a job none of whose sinks shows anything: if its
        newest checkpoint is damaged, it goes on from the one before.)

        Called between two calls of `poll`, with ascending ids; never for a checkpoint that was
        aborted, nor for a savepoint. After a restart it is first called for the checkpoint that was
        restored, with the splits that this reader now has, since the call before the failure may
        have been lost. That it is called for every checkpoint is not promised: a crash may come
        in between, and the next call says all that the missing one would have said.

        The classic mistake is to acknowledge what was *read* by now, instead of what `splits` says.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, also after a failure."""


class BlockingReader(ABC):
    """Reads some splits in a thread of its own, for readers that may have to wait for bytes.

    One object for each subtask and attempt (of a source with an enumerator for each split, unless
    it `takes_splits`), on an executor. Each method says which of two threads calls it: the loop
    thread, which must not wait, or the reader's own, which may.
    """

    takes_splits: ClassVar[bool] = False
    """Whether one reader reads all splits of its subtask and takes more while it runs, as one
    Kafka consumer reads several partitions.

    It is opened once. Where the source has an enumerator, it is opened without splits and gets all
    of them by `add_splits`. Splits need not have an end, and stay in every checkpoint after it.
    `read` has to come back every second or so, by yielding None if nothing has come; one that does
    not for the job's `stuckTimeout` is taken for one that hangs, and the attempt is ended."""

    reads_in_turn: ClassVar[bool] = False
    """Whether `read` gives the splits one after the other, in the order in which `open` got them.
    Otherwise event time waits for all of them for as long as one has records."""

    def has_ended(self, split: Split) -> bool:
        """Whether a split at this position has no more records, as far as the position tells.

        Called by the loop thread while `read` is iterated by another, for a split that was given or
        yielded. Event time does not wait for such a split; without this, it does until the last of
        the splits has ended. The classic mistake is a split that turns out to have ended without a
        last record: yield it once more, with None, or nobody asks.
        """
        return False

    def add_splits(self, splits: Sequence[Split]) -> None:
        """Read these too.

        Only if it `takes_splits`, and the source has an enumerator. Called by the loop thread,
        while `read` is iterated by another or before it is, never twice for one split. It must not
        block: put them where `read` looks, such as a `queue.SimpleQueue`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} says that it takes splits but has no add_splits: write it"
        )

    def no_more_splits(self, *, until_now: bool) -> None:  # noqa: B027 - most need not know
        """As of a `SourceReader`; only if it `takes_splits`, also where there is no enumerator.

        Called by the loop thread as `add_splits` is. From now on `read` may end, and has to when
        all splits have ended; the reader need not end it if `has_ended` tells that of each.
        """

    def on_checkpoint_complete(  # noqa: B027 - most have nobody to tell
        self, checkpoint_id: CheckpointId, splits: Sequence[Split]
    ) -> None:
        """As of a `SourceReader`, but called by the reader's own thread: it may block.

        Between two items of `read`, also while the job has no room for the last one, and after the
        end of `read` or `interrupt` until `close`. If several checkpoints have completed meanwhile,
        only the newest is told. The classic mistake is a `read` that waits for long without
        yielding None: it is told nothing meanwhile.
        """

    def records_malformed(self) -> int:
        """As of a `SourceReader`. Called while `read` is iterated by another thread."""
        return 0

    def awaits(self) -> str | None:
        """As of a `SourceReader`. Called while `read` is iterated by another thread."""
        return None

    def lag(self, splits: Sequence[Split]) -> Lag | None:
        """As of a `SourceReader`; `splits` are positioned after what the job has taken by now.

        Called while `read` is iterated by another thread.
        """
        return None

    @abstractmethod
    def read(self) -> Iterator[ReadItem]:
        """Batch after batch, each with its split positioned *after* that batch.

        A split with None, or with an empty batch, has moved without records. None alone says that
        nothing has come: the runtime has its turn and goes on. A batch of some thousands of rows
        is a good one; each takes one handover between threads.

        Iterated once, by the reader's own thread, which stays a few batches ahead; the runtime
        keeps the position of what was really emitted. The end of the iterator is the end of the
        data; a reader that `takes_splits` may end only after `no_more_splits`.

        Where the source has an enumerator and the reader does not take splits, each split is read
        by a reader of its own, one after the other: such a split must have an end, or those behind
        it are never read.
        """

    def interrupt(self) -> None:  # noqa: B027 - whoever never waits for long needs none
        """Have `read` end soon, wherever it waits; what it still gives is not used.

        Called by the loop thread, perhaps while another iterates `read`, and before `close`. The
        classic mistake is to wait for bytes without a limit: a reader that does not end in a few
        seconds is left behind with all it holds, its connection too, until its process ends. The
        log says which one and where it waits.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, when `read` is no longer being iterated."""


@dataclass(frozen=True, slots=True)
class Discovered:
    """What an enumerator found.

    `state` is all that `Source.open_enumerator` needs to go on *after* these splits (JSON, as it
    is kept in every checkpoint's metadata); `is_last` says that there will never be more.
    """

    splits: Sequence[Split]
    state: JsonObject
    is_last: bool = False


class SplitEnumerator(ABC):
    """Finds splits while the job runs. Lives on the driver, one per attempt and source."""

    @abstractmethod
    def discover(self) -> Discovered:
        """The splits that are there now and were never answered before.

        Called by one background thread: at once when the job runs, then each
        `discovery_interval_seconds` after the last answer, not again after `is_last`. It may
        block; records flow meanwhile. What it raises ends the attempt. That a split it answered is
        read is the runtime's business, but only once it has answered: nothing is promised of one
        that is told by anything but the answer. After a failure a new enumerator is opened with
        the state of the restored checkpoint, and must find again what was found after it.

        The classic mistake is to remember outside of `state` what has been found: it is lost with
        the attempt, and splits come twice; or kept beyond it, and splits are never read.
        """

    def on_checkpoint_complete(  # noqa: B027 - most have nobody to tell
        self, checkpoint_id: CheckpointId, state: JsonObject | None, splits: Sequence[Split]
    ) -> None:
        """This checkpoint is complete: what it says has been read will not be read again.

        `state` is the enumerator's own in it, None if nothing had been asked yet; `splits` are all
        that the readers had then, in all subtasks. What `state` has found and is not among them was
        read to its end and may be let go, if the readers leave out what has ended.

        Called by the thread that calls `discover`, so it may block; otherwise as
        `SourceReader.on_checkpoint_complete`: not promised, ascending, after a restart first for
        the restored checkpoint, and only the newest if several have completed meanwhile.
        """

    def close(self) -> None:  # noqa: B027 - few hold anything
        """Give everything back. Called once, by the thread that called `discover`."""


class Source(Format, ABC):
    """A frozen, picklable description of where records come from."""

    @classmethod
    def from_options(cls, options: Options, schema: pa.Schema | None) -> Source:
        """The source that `readStream.format(cls).schema(...).option(...)` describes.

        Called on the driver, at `load`; it reads nothing yet. `schema` is None if the user has
        declared none. What it raises is told as a `BuildError`.
        """
        raise not_made_of_options(cls, "readStream")

    @property
    def is_unbounded(self) -> bool:
        """Whether there is always more to come, so that a job cannot read all that is there.

        `trigger(availableNow=True)` is refused then.
        """
        return False

    rewindable: ClassVar[bool] = True
    """Whether a position given to `open` is honoured. Without it a failure loses what was read
    since the last completed checkpoint, and the job is told to be at-most-once when it starts."""

    begins_now: ClassVar[bool] = False
    """Whether `splits` depends on when it is asked, as 'from now on' does. Its answer is then in
    the job's log before anything is read, and a job that fails before its first checkpoint begins
    where it first did."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of every batch its readers return, all of them if the job reads all."""

    @property
    def discovery_interval_seconds(self) -> float | None:
        """How often its enumerator looks for more splits; None: it has no enumerator."""
        return None

    @abstractmethod
    def splits(self, parallelism: int) -> list[Split]:
        """All splits at their beginning. Called on the driver, once in the life of a job; but until
        the first checkpoint is complete at each restart, unless the source `begins_now`.

        A source with an enumerator may answer none and leave them all to be discovered.
        """

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        """An enumerator that goes on after what it had found with this state; None: from nothing.

        Called on the driver, per attempt, when it is first asked or told something, and only where
        `discovery_interval_seconds` is not None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has a discovery interval but no open_enumerator"
        )

    @abstractmethod
    def open(
        self, splits: Sequence[Split], context: SourceContext
    ) -> SourceReader | BlockingReader:
        """A reader of these splits, from their positions on. Called on an executor, per attempt.

        `splits` may be empty: the reader then ends at once. Where the source has an enumerator
        they always are, and the reader gets all its splits by `add_splits`; a blocking reader that
        does not take splits is opened once more for each of them.
        """

    def goes_back(self, position: JsonObject, later: JsonObject) -> bool:
        """Whether `later`, of the same split, lies before `position`; the source may not know.

        Called on an executor at each barrier, with two positions in the order in which the reader
        had them. If so, the job ends with a sentence instead of reading records twice.
        """
        return False

    @abstractmethod
    def describe(self) -> str:
        """A few words for `explain()`: the kind and where it reads from."""

    @property
    def tied_to(self) -> str:
        """Where it reads from, in words that do not change.

        After a change of the job, the source that is tied to the same goes on from the positions
        that were kept, if its uid is not given.
        """
        return self.describe()
