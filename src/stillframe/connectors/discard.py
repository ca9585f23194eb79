"""A sink that forgets every record at once: for benchmarks, and to run a job for its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid


@dataclass(frozen=True, slots=True)
class DiscardSink(Sink):
    """Nothing becomes visible, so nothing can be seen twice."""

    makes_visible: ClassVar[bool] = False
    guarantee = "nothing is kept"

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _DiscardingWriter()

    def open_committer(self, context: CommitterContext) -> Committer:
        return NothingToCommit()

    def describe(self) -> str:
        return "noop"


class _DiscardingWriter(SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        """Let it go."""

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        return tuple

    def close(self) -> None:
        """Nothing is held."""


class NothingToCommit(Committer):
    """For sinks whose rows are never prepared."""

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        """There never is anything."""

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        """Nothing is ever left behind."""
