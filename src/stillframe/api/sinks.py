"""The sink contract: write during the epoch, prepare at the barrier, commit when it is complete.

A sink is a frozen description that travels to the executors inside the plan. Its writers run in
the slots. What a writer has prepared is described by *committables*: small JSON objects that
travel in the acknowledgement, are kept in the checkpoint's metadata, and are all that is needed to
make the prepared records visible, from any machine, also after everything else has died.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pyarrow as pa

from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject

Committable = JsonObject

SinkGuarantee = Literal["exactly-once", "at-least-once", "at-most-once", "nothing is kept"]


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Who a writer is; every name it gives to something outside carries all of it."""

    job: str
    attempt: Attempt
    uid: OperatorUid
    subtask: SubtaskIndex


class SinkWriter(ABC):
    """Takes the records of one sink subtask, in one attempt. Called by the loop thread only."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take these records into the current epoch. Nobody outside may see them yet."""

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
    def commit(self, epoch: Epoch, committables: Sequence[Committable]) -> None:
        """Make these visible; those that already are, are left alone.

        Called only when the checkpoint that holds them is complete. Where the sink commits in
        the slots, `committables` are those of one subtask; where it commits at the coordinator,
        those of all subtasks, once per epoch, in the order of epochs.
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

    def close(self) -> None:  # noqa: B027 - most committers hold nothing
        """Give everything back. Called once."""


class Sink(ABC):
    """A frozen, picklable description of where records go."""

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
    def open_committer(self) -> Committer:
        """A committer. Called on the driver, and on executors unless `commits_at_coordinator`."""

    @abstractmethod
    def describe(self) -> str:
        """A few words for `explain()`: the kind and where it writes to."""
