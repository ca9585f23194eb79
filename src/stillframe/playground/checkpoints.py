"""A completed checkpoint of the job, as the board needs it: read from its files alone, as
`stillframe inspect` reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from stillframe.clock import SystemClock
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import StorageError
from stillframe.ids import CheckpointId, OperatorUid
from stillframe.playground.truth import Counts, Positions
from stillframe.protocol.manifests import Manifest, decode_manifest
from stillframe.runtime.stored_states import batches_of, state_parts
from stillframe.storage.paths import SAVEPOINT_METADATA, job_directory
from stillframe.storage.store import Store, open_store

JOB = "page-views"
SOURCE, COUNT, NEWEST = OperatorUid("clicks"), OperatorUid("count"), OperatorUid("newest")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one holds of the clicks and their counts."""

    checkpoint_id: int
    attempt: int
    positions: Positions
    counts: Counts
    operators: tuple[str, ...]


class Checkpoints:
    """Of the playground's job. Reads only."""

    def __init__(self, location: Path) -> None:
        self._location = location

    @property
    def store(self) -> Store:
        return open_store(str(self._location)).below(job_directory(JOB))

    def retained(self) -> list[int]:
        """Oldest first."""
        record = JobLog(self.store, JOB, SystemClock()).read()
        return [] if record is None else [each.checkpoint_id for each in record.checkpoints]

    def manifest(self, checkpoint_id: int) -> Manifest:
        """Of one that is retained."""
        record = JobLog(self.store, JOB, SystemClock()).read()
        found = None if record is None else record.checkpoint(CheckpointId(checkpoint_id))
        if found is None:
            raise StorageError(f"no checkpoint {checkpoint_id} is retained in {self._location}")
        return Snapshots(self.store).read_manifest(found)

    def read(self, checkpoint_id: int) -> Checkpoint:
        return _of(self.store, self.manifest(checkpoint_id))

    def read_newest(self) -> Checkpoint:
        """The job goes on meanwhile: one that is deleted while it is read has newer ones."""
        newest = self._newest()
        while True:
            try:
                return self.read(newest)
            except StorageError:
                before, newest = newest, self._newest()
                if newest == before:
                    raise

    def _newest(self) -> int:
        retained = self.retained()
        if not retained:
            raise StorageError(f"no checkpoint is retained in {self._location}")
        return retained[-1]

    def state_file(self, checkpoint_id: int) -> Path:
        """A file with counts in it, which a checkpoint needs."""
        for snapshot in self.manifest(checkpoint_id).snapshots_of(COUNT):
            for state in snapshot.keyed:
                return Path(self.store.address) / state.file.path
        raise StorageError(f"checkpoint {checkpoint_id} has no file with counts")


def savepoint_at(address: str) -> Checkpoint:
    store = open_store(address)
    where = f"{address}/{SAVEPOINT_METADATA}"
    return _of(store, decode_manifest(store.read(SAVEPOINT_METADATA), where))


def _of(store: Store, manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        manifest.checkpoint_id,
        manifest.attempt,
        _positions(manifest),
        _counts(store, manifest),
        tuple(each.uid for each in manifest.operators),
    )


def _positions(manifest: Manifest) -> dict[int, int]:
    found: dict[int, int] = {}
    for snapshot in manifest.snapshots_of(SOURCE):
        for item in snapshot.items:
            assert isinstance(item, dict)
            position = item["position"]
            assert isinstance(position, dict)
            found[int(str(item["id"]).removeprefix("partition-"))] = int(str(position["next"]))
    return found


def _counts(store: Store, manifest: Manifest) -> Counter[str]:
    """The key is the first column and the count the last."""
    counts: Counter[str] = Counter()
    for parts in state_parts(store, manifest, COUNT).values():
        for part in parts:
            for _, batch in batches_of(store, part, manifest.max_parallelism):
                apps, values = batch.column(0).to_pylist(), batch.columns[-1].to_pylist()
                for app, count in zip(apps, values, strict=True):
                    counts[app] += count
    return counts
