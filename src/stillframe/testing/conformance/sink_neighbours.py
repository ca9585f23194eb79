"""Another sink that writes to the same place, of the same job or of another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stillframe.api.sinks import (
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
)
from stillframe.ids import CheckpointId, Epoch, Mark
from stillframe.testing.conformance.checkpoints import UID
from stillframe.testing.conformance.outside import Outside
from stillframe.testing.conformance.promises import Diary, keeping
from stillframe.testing.conformance.sink_slots import COMMITS, PREPARES

_ITS_FIRST = CheckpointId(1)


class Neighbour:
    """It has prepared a row for a checkpoint that is complete, and commits it when told so.

    Nothing fails for it. What others do meanwhile must not reach it.
    """

    def __init__(
        self,
        sink: Sink,
        writer: SinkWriter,
        open_committer: Callable[[CommitterContext], Committer],
        context: SinkContext,
        outside: Outside,
        diary: Diary,
    ) -> None:
        self._at_coordinator = sink.commits_at_coordinator
        self._open_committer = open_committer
        self.context = context
        self._outside = outside
        self._diary = diary
        self._who = who = "another job" if context.uid == UID else "another sink of the job"
        batch, self._rows = outside.batch(1, f"written by {who}")
        diary.tell(f"{who} has row {self._rows[0]} prepared in the same place, for a commit later")
        with keeping(PREPARES, "preparing"):
            writer.write(batch)
            self._committables = tuple(writer.rotate(_ITS_FIRST)())
            writer.close()
        outside.may_show(self._rows)

    def commit(self) -> None:
        self._diary.tell(f"{self._who} commits row {self._rows[0]}")
        writer = self.context.writer
        if self._at_coordinator:
            writer = replace(writer, subtask=None)
        prepared = Prepared(Mark(writer, _ITS_FIRST), self._committables)
        committer = self._open_committer(self.context.committing)
        with keeping(COMMITS, "commit"):
            committer.commit(Epoch(0), [prepared])
            committer.close()
        self._outside.must_show(self._rows)
