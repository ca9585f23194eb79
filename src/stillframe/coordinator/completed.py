"""What is told of a checkpoint that is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from stillframe.coordinator.history import CheckpointCompleted, OperatorFigures
from stillframe.ids import OperatorUid
from stillframe.protocol.joblog import CompletedCheckpoint
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import Progress
from stillframe.protocol.snapshots import EventTimes, SubtaskTimings
from stillframe.storage.paths import checkpoint_directory

_POSITIONS_MAX = 100
"""Of one source: the last hundred checkpoints are kept in memory."""


def completed(
    manifest: Manifest,
    stored: CompletedCheckpoint,
    duration_ms: float,
    records: Progress,
    store_address: str | None,
    told: Iterable[SubtaskTimings] = (),
) -> CheckpointCompleted:
    """`records`: what slots of the attempt have told last; `told`: what subtasks said with their
    parts, of which the manifest keeps less."""
    read: Counter[str] = Counter()
    times: dict[OperatorUid, EventTimes] = {}
    for part in told:
        read[part.task] += part.records_read
        for each in part.event_times:
            times[each.uid] = times[each.uid].plus(each) if each.uid in times else each
    directory = checkpoint_directory(stored.checkpoint_id, stored.attempt)
    uids = dict.fromkeys(snapshot.uid for snapshot in manifest.snapshots)
    return CheckpointCompleted(
        checkpoint_id=manifest.checkpoint_id,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        triggered_at_ms=manifest.triggered_at_ms,
        duration_ms=duration_ms,
        state_bytes=manifest.state_bytes() + stored.manifest_length_bytes,
        timings=manifest.timings,
        records_in=records.records_in,
        records_out=records.records_out,
        records_late=records.records_late,
        watermark_us=records.watermark_us,
        operators=tuple(_figures_of(uid, manifest) for uid in uids),
        path=f"{store_address}/{directory}",
        metadata_bytes=stored.manifest_length_bytes,
        records_read=tuple(read.items()),
        event_times=tuple(times.values()),
    )


def _figures_of(uid: OperatorUid, manifest: Manifest) -> OperatorFigures:
    parts = manifest.snapshots_of(uid)
    is_counted = all(part.disk is None for part in parts)
    positions = tuple(item for part in parts for item in part.items if "position" in item)
    return OperatorFigures(
        uid,
        sum(state.rows for part in parts for state in part.keyed) if is_counted else None,
        sum(file.length_bytes for part in parts for file in part.files()),
        positions if len(positions) <= _POSITIONS_MAX else None,
        tuple(dict.fromkeys(state.name for part in parts for state in part.keyed)),
        sum(len(part.commits) for part in parts),
    )
