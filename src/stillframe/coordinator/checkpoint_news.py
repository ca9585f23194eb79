"""What is told of the checkpoints of one attempt: to listeners at once, to the statistics for good.

`coordinator/history` has events for whoever listens to the running job, `coordinator/recorder` the
figures that people ask for later; whoever takes checkpoints tells both here, in one sentence.
"""

from __future__ import annotations

from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    OperatorFigures,
    SavepointCompleted,
)
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.recorder import shapes_of
from stillframe.graph.plan import Task
from stillframe.ids import CheckpointId, OperatorUid
from stillframe.protocol.figures import Moment, Triggered
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.manifests import Manifest, SubtaskTimings
from stillframe.protocol.statistics import TriggeredType
from stillframe.storage.paths import checkpoint_directory

_POSITIONS_MAX = 100
"""Of one source: the last hundred checkpoints are kept in memory."""


class CheckpointNews:
    """Tells what becomes of checkpoints and savepoints. Used by the job's thread alone."""

    def __init__(self, parts: JobParts) -> None:
        self._history = parts.history
        self._recorder = parts.recorder
        self._now = parts.now
        self._shapes = shapes_of(parts.plan)
        self._attempt = parts.ledger.attempt
        self._store_address = parts.ledger.store_address

    def on_triggered(self, checkpoint_id: CheckpointId, triggered_as: TriggeredType) -> Moment:
        """Answers when that was."""
        now = self._now()
        self._recorder.on_triggered(
            Triggered(checkpoint_id, self._attempt, triggered_as, self._shapes, now)
        )
        return now

    def on_acknowledged(
        self, checkpoint_id: CheckpointId, task: Task, timings: SubtaskTimings
    ) -> None:
        self._recorder.on_acknowledged(checkpoint_id, task, timings, self._now())

    def on_completed(
        self, manifest: Manifest, completed: CompletedCheckpoint, triggered_at_seconds: float
    ) -> None:
        metadata_bytes = completed.manifest_length_bytes
        self._recorder.on_completed(
            manifest.checkpoint_id, self._path_of(completed), metadata_bytes, self._now()
        )
        records = self._history.records_of_attempt()
        self._history.tell(
            CheckpointCompleted(
                checkpoint_id=manifest.checkpoint_id,
                epoch=manifest.epoch,
                attempt=self._attempt,
                triggered_at_ms=manifest.triggered_at_ms,
                duration_ms=(self._now().monotonic_seconds - triggered_at_seconds) * 1000,
                state_bytes=manifest.state_bytes() + metadata_bytes,
                timings=manifest.timings,
                records_in=records.records_in,
                records_out=records.records_out,
                records_late=records.records_late,
                watermark_us=records.watermark_us,
                operators=tuple(_figures_of(each, manifest) for each in _uids_in(manifest)),
            )
        )

    def on_committed(self, checkpoint_id: CheckpointId) -> None:
        self._history.tell(CheckpointCommitted(checkpoint_id))

    def on_savepoint_completed(self, manifest: Manifest, address: str) -> None:
        checkpoint_id = manifest.checkpoint_id
        self._recorder.on_completed(checkpoint_id, address, 0, self._now())
        self._history.tell(SavepointCompleted(checkpoint_id, address, manifest.state_bytes()))

    def on_aborted(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._recorder.on_aborted(checkpoint_id, reason, self._now())
        self._history.tell(CheckpointFailed(checkpoint_id, reason))

    def _path_of(self, completed: CompletedCheckpoint) -> str:
        directory = checkpoint_directory(completed.checkpoint_id, completed.attempt)
        return f"{self._store_address}/{directory}"


def _uids_in(manifest: Manifest) -> list[OperatorUid]:
    return list(dict.fromkeys(snapshot.uid for snapshot in manifest.snapshots))


def _figures_of(uid: OperatorUid, manifest: Manifest) -> OperatorFigures:
    parts = manifest.snapshots_of(uid)
    is_counted = all(part.disk is None for part in parts)
    positions = tuple(item for part in parts for item in part.items if "position" in item)
    return OperatorFigures(
        uid,
        sum(state.rows for part in parts for state in part.keyed) if is_counted else None,
        sum(file.length_bytes for part in parts for file in part.files()),
        positions if len(positions) <= _POSITIONS_MAX else None,
    )
