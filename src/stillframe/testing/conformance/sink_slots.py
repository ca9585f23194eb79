"""One subtask of the sink under test, driven by the code that drives it in a slot."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.api.sinks import Committable, Committer, Sink, SinkContext, SinkWriter
from stillframe.ids import Attempt, CheckpointId, Epoch
from stillframe.protocol.commits import Commit
from stillframe.protocol.manifests import Manifest, OperatorSnapshot, PendingCommit
from stillframe.runtime.writing import Writing
from stillframe.testing.conformance.faults import Fault
from stillframe.testing.conformance.promises import Broken, keeping

JSON = "a committable is JSON and small: it is in the metadata of checkpoints"
PREPARES = "a writer takes records and prepares them, whatever else has happened"
COMMITS = "with what was prepared and nothing else, anybody can commit, any time after completion"
SWEEPS = "sweep may be called at any start, and finding nothing is normal"
CLOSES = "close gives everything back, also after a failure"
RETURNS = "a commit returns, also while a committer that was given up stands in its way"
HANGS_SECONDS = 20.0


class Slot:
    """A writer, what it has rotated, and what it has to commit."""

    def __init__(
        self,
        context: SinkContext,
        sink: Sink,
        open_writer: Callable[[Sink, SinkContext], SinkWriter],
        restored: Sequence[PendingCommit],
    ) -> None:
        self.context = context
        with keeping(PREPARES, "open_writer"):
            self.writer = open_writer(sink, context)
            self.writing = Writing(context, sink, self.writer, restored)
        self.rows: dict[CheckpointId, list[int]] = {}
        """By rotation, until a checkpoint is complete that holds them."""
        self.rotated_last = CheckpointId(0)
        self.unprepared: dict[CheckpointId, Callable[[], Sequence[Committable]]] = {}
        self.snapshots: dict[CheckpointId, OperatorSnapshot] = {}
        self.to_commit: deque[tuple[Epoch, Commit]] = deque()
        self._epoch_rows: list[int] = []
        self._rotated: deque[CheckpointId] = deque()
        self._prepared: dict[CheckpointId, list[Committable]] = {}

    def __str__(self) -> str:
        return f"subtask {self.context.subtask}"

    def write(self, batch: pa.RecordBatch, rows: Sequence[int]) -> None:
        self._epoch_rows += rows
        with keeping(PREPARES, "write"):
            list(self.writing.process(batch))

    def rotate(self, checkpoint_id: CheckpointId) -> None:
        self.rows[checkpoint_id], self._epoch_rows = self._epoch_rows, []
        self._rotated.append(checkpoint_id)
        self.rotated_last = checkpoint_id
        with keeping(PREPARES, "rotate"):
            self.unprepared[checkpoint_id] = self.writing.snapshot(checkpoint_id)

    def prepare(self, checkpoint_id: CheckpointId, fault: Fault) -> None:
        background = self.unprepared.pop(checkpoint_id)
        with keeping(PREPARES, "preparing", otherwise=JSON):
            committables = list(fault.during(background))
        for each in committables:
            if not isinstance(each, dict) or json.loads(json.dumps(each)) != each:
                raise Broken(JSON, f"{each!r:.200} reads back otherwise", is_plain=True)
        self._prepared[checkpoint_id] = committables
        # Answers are taken in the order of the barriers, as `Subtask.on_written` does.
        while self._rotated and self._rotated[0] in self._prepared:
            oldest = self._rotated.popleft()
            self.snapshots[oldest] = self.writing.described(oldest, self._prepared.pop(oldest))


@dataclass(slots=True, eq=False)
class Running:
    """One attempt: its slots, and its committer on the driver."""

    number: Attempt
    incarnation: str
    driver: Committer
    restored: Manifest | None
    slots: list[Slot] = field(default_factory=list)
    in_flight: list[CheckpointId] = field(default_factory=list)
    to_commit: deque[Manifest] = field(default_factory=deque)
    """Where the coordinator commits."""
    has_swept: bool = False
    _commits: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @property
    def is_settled(self) -> bool:
        """Whether all that it was restored with is committed: nothing newer may be before that."""
        restored = self.restored.checkpoint_id if self.restored else None
        left = [commit.checkpoint_id for slot in self.slots for _, commit in slot.to_commit]
        return not self.to_commit and restored not in left

    def begin_commit(self, commit: Callable[[], None], fault: Fault) -> Future[None]:
        """On a thread that makes only commits, as in a slot and on the driver."""
        return self._commits.submit(fault.during, commit)

    def close(self) -> None:
        with keeping(CLOSES, "close"):
            for slot in self.slots:
                slot.writing.close()
            self.driver.close()

    def abandon(self) -> None:
        """The schedule is over: nothing of this may stay in the process of the test."""
        self._commits.shutdown()
        with suppress(Broken):
            self.close()


def await_commit(committing: Future[None]) -> None:
    """Until it is done; raises `Broken` if it fails or never is."""
    with keeping(COMMITS, "commit"):
        try:
            committing.result(HANGS_SECONDS)
        except TimeoutError as error:
            if not committing.done():
                raise Broken(RETURNS, f"it does not in {HANGS_SECONDS:g} s") from error
            raise
