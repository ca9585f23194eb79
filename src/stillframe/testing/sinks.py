"""Sinks that are slow or broken on demand, around a sink that really writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
)
from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.testing.sources import Gate


@dataclass(frozen=True)
class GatedSink(Sink):
    """Writes to `sink`, but prepares and commits only while a gate lets it.

    The first time a gate is found closed, `reached` is opened: then the test knows that a slot
    stands there. With `breaks` a closed gate is not waited for: it is an error.
    """

    sink: Sink
    prepare: Gate | None = None
    commit: Gate | None = None
    reached: Gate | None = None
    breaks: bool = False

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _GatedWriter(self, self.sink.open_writer(context))

    def open_committer(self, context: CommitterContext) -> Committer:
        return _GatedCommitter(self, self.sink.open_committer(context))

    def describe(self) -> str:
        return self.sink.describe()

    @property
    def tied_to(self) -> str | None:
        return self.sink.tied_to

    def pass_through(self, gate: Gate | None, doing: str) -> None:
        """Return when the gate is open."""
        if gate is None or gate.is_open:
            return
        if self.reached is not None:
            self.reached.open()
        if self.breaks:
            raise StorageError(f"the gate {gate.path} is closed while {doing}: open it")
        gate.await_open()


class _GatedWriter(SinkWriter):
    def __init__(self, gated: GatedSink, writer: SinkWriter) -> None:
        self._gated = gated
        self._writer = writer

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write(batch)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        prepare = self._writer.rotate(checkpoint_id)

        def prepare_behind_the_gate() -> Sequence[Committable]:
            self._gated.pass_through(self._gated.prepare, "preparing")
            return prepare()

        return prepare_behind_the_gate

    def close(self) -> None:
        self._writer.close()


class _GatedCommitter(Committer):
    def __init__(self, gated: GatedSink, committer: Committer) -> None:
        self._gated = gated
        self._committer = committer

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        self._gated.pass_through(self._gated.commit, "committing")
        self._committer.commit(epoch, prepared)

    def forget(self, committables: Sequence[Committable]) -> None:
        self._committer.forget(committables)

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        self._committer.sweep(job, uid, older_than, keep)

    def close(self) -> None:
        self._committer.close()
