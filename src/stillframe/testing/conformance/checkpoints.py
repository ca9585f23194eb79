"""A checkpoint of a job with one operator: stored, read again, and dealt out by the engine."""

from __future__ import annotations

from collections.abc import Sequence

from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.manifests import (
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
    decode_manifest,
    encode_manifest,
)
from stillframe.protocol.restore import SubtaskState, starting_state

UID = OperatorUid("tested")
_MAX_PARALLELISM = 128


def stored(
    checkpoint_id: CheckpointId,
    snapshots: Sequence[OperatorSnapshot],
    *,
    job: str = "job",
    attempt: int = 1,
    epoch: int = 0,
) -> Manifest:
    """What the checkpoint's metadata says, after it was written and read."""
    manifest = Manifest(
        job=job,
        attempt=Attempt(attempt),
        checkpoint_id=checkpoint_id,
        epoch=Epoch(epoch),
        kind="checkpoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=_MAX_PARALLELISM,
        operators=(_operator(len(snapshots)),),
        snapshots=tuple(snapshots),
    )
    return decode_manifest(encode_manifest(manifest))


def dealt(
    parallelism: int, manifest: Manifest | None, first_splits: Sequence[JsonObject] = ()
) -> list[SubtaskState]:
    """What each subtask begins with."""
    operators = [_operator(parallelism)]
    states = starting_state(operators, _MAX_PARALLELISM, manifest, {UID: first_splits})
    return [states[UID, SubtaskIndex(index)] for index in range(parallelism)]


def _operator(parallelism: int) -> OperatorDescription:
    return OperatorDescription(UID, "tested", "tested", parallelism)
