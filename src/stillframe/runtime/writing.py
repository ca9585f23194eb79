"""A sink in a chain: it writes during the epoch, prepares at the barrier, commits at completion."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sinks import (
    Committable,
    Committer,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
)
from stillframe.errors import Unavailable, UserCodeError
from stillframe.ids import CheckpointId, Epoch, Mark
from stillframe.protocol.commits import Commit, PendingCommits
from stillframe.protocol.manifests import OperatorSnapshot, PendingCommit
from stillframe.protocol.outside import retry_after_seconds
from stillframe.runtime.operators import Background, StatefulOperator
from stillframe.runtime.row_functions import in_batch
from stillframe.storage.store import Store
from stillframe.user_code import calling, fail

_COMMITTABLES_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SinkWork:
    """One call of a sink in the background."""

    what: str
    """What it is about, in words."""


class Writing(StatefulOperator):
    """A sink: it writes during the epoch, prepares at the barrier, commits at completion."""

    def __init__(
        self,
        context: SinkContext,
        sink: Sink,
        writer: SinkWriter,
        restored: Sequence[PendingCommit],
    ) -> None:
        self.uid = context.uid
        self.name = f"sink {sink.describe()}"
        self.commits_here = not sink.commits_at_coordinator
        self.records_written = 0
        self.bytes_written = 0
        self.awaits: str | None = None
        """What the sink waits for before it commits again, in a sentence."""
        self._subtask = context.subtask
        self._writer = writer
        self._pending = PendingCommits(restored, is_whole=sink.is_whole, writer=context.writer)
        self._committer: Committer | None = None
        if self.commits_here:
            self._committer = sink.open_committer(context.committing)
        self._at_work: dict[int, SinkWork] = {}

    @property
    def at_work(self) -> dict[int, SinkWork]:
        """The threads that prepare or commit now, by their ids."""
        return dict(self._at_work)

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """In the background, where a watch looks for calls that do not return."""
        thread = threading.get_ident()
        self._at_work[thread] = SinkWork(what)
        try:
            with calling(self.name, what, operator=self.uid):
                yield
        finally:
            del self._at_work[thread]

    @property
    def committer(self) -> Committer:
        assert self._committer is not None, "this sink commits at the coordinator"
        return self._committer

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        self.records_written += batch.num_rows
        self.bytes_written += batch.nbytes
        try:
            self._writer.write(batch)
        except (Exception, SystemExit) as error:
            fail(self.name, error, *in_batch(batch), operator=self.uid)
        return ()

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        what = f"what it has for checkpoint {checkpoint_id}"
        with calling(self.name, what, operator=self.uid):
            prepare = self._writer.rotate(checkpoint_id)

        def prepared() -> Sequence[Committable]:
            with self._calling(what):
                committables = prepare()
            self._check(committables)
            return committables

        return prepared

    def _check(self, committables: Sequence[Committable]) -> None:
        """They are kept in the metadata of the checkpoint, which everybody reads."""
        try:
            length_bytes = sum(len(json.dumps(each, allow_nan=False)) for each in committables)
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"{self.name} has prepared a committable that is not JSON ({error}): make it of"
                " text, finite numbers, booleans, lists and objects"
            ) from error
        if length_bytes > _COMMITTABLES_BYTES_MAX:
            raise UserCodeError(
                f"{self.name} has prepared committables of {length_bytes:,} bytes for one epoch,"
                f" more than {_COMMITTABLES_BYTES_MAX:,}: keep rows in files, such as those of"
                " SinkContext.staging, and only the names of these in committables"
            )

    def commit(self, epoch: Epoch, commit: Commit) -> None:
        """Make visible what was prepared, and forget what is settled. Called in the background."""
        with self._calling(f"epoch {epoch}"):
            if commit.prepared:
                self.committer.commit(epoch, parts_of(commit.prepared))
            if commit.settled:
                self.committer.forget(commit.settled)

    def commit_patiently(self, epoch: Epoch, commit: Commit, wait: Callable[[float], bool]) -> bool:
        """Commit, again and again while the other system cannot be reached.

        `wait` says whether it was told meanwhile to give up; then the answer is False. For how long
        this may go on is for the coordinator to say, who waits for the sinks of all slots.
        """
        for failures in itertools.count(1):
            try:
                self.commit(epoch, commit)
            except Unavailable as error:
                self.awaits = f"{error}; tried {failures} times to commit epoch {epoch}"
                if wait(retry_after_seconds(failures)):
                    break
            else:
                self.awaits = None
                return True
        return False

    def described(
        self, checkpoint_id: CheckpointId, written: Sequence[Committable]
    ) -> OperatorSnapshot:
        commits = self._pending.on_prepared(checkpoint_id, written)
        return OperatorSnapshot(self.uid, self._subtask, commits=commits)

    def on_complete(self, checkpoint_id: CheckpointId) -> Commit:
        """What to commit here, now that this checkpoint is complete."""
        return self._pending.on_complete(checkpoint_id)

    def on_committed(self, checkpoint_id: CheckpointId) -> None:
        self._pending.on_committed(checkpoint_id)

    def close(self) -> None:
        self._writer.close()
        if self._committer is not None:
            self._committer.close()


def parts_of(pending: Iterable[PendingCommit]) -> list[Prepared]:
    """What is prepared, by who prepared it and for which checkpoint, in the order of these."""
    parts: dict[Mark, list[Committable]] = {}
    for each in pending:
        assert each.writer is not None, "who holds it has prepared it, or knows who did"
        parts.setdefault(Mark(each.writer, each.checkpoint_id), []).append(each.committable)
    return [Prepared(mark, tuple(committables)) for mark, committables in parts.items()]
