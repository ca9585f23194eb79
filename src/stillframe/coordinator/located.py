"""A snapshot by its address: a job's newest checkpoint, one of its checkpoints, or a savepoint.

The job log decides what is complete. A savepoint's directory has its own metadata, written last,
and nothing outside of it: it is complete if the metadata is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stillframe.clock import SystemClock
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import StartRefused, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.protocol.joblog import CompletedCheckpoint, JobRecord, Outcome
from stillframe.protocol.manifests import Manifest, decode_manifest, encode_manifest
from stillframe.storage.paths import (
    LOG_DIRECTORY,
    SAVEPOINT_METADATA,
    checkpoint_directory,
    checkpoint_of,
    metadata_path,
)
from stillframe.storage.store import Store, is_local_address, open_store


def refuse_checkpoints_of_spark(location: Store) -> None:
    """Asked where a job begins: who gives the location of a query of Spark's wants to go on."""
    if any(name.isdigit() for name in location.list("offsets")):
        raise StartRefused(
            f"{location.address} has the checkpoints of a query that Spark ran, from which a job"
            " of Stillframe cannot go on: give another checkpointLocation, where it begins anew"
        )


@dataclass(frozen=True, slots=True)
class LocatedSnapshot:
    """A complete snapshot, and the store that its files' paths are relative to."""

    store: Store
    manifest: Manifest
    job_outcome: Outcome | None = None
    """Of a checkpoint: what the log of its job says of the job; None where there is no log."""
    committed: Mapping[OperatorUid, Epoch] = field(default_factory=dict)
    """What it says that sinks have committed."""

    @property
    def address(self) -> str:
        return self.store.address

    @property
    def metadata_path(self) -> str:
        """In the store."""
        if self.manifest.kind == "savepoint":
            return SAVEPOINT_METADATA
        return metadata_path(self.manifest.checkpoint_id, self.manifest.attempt)

    @property
    def place(self) -> str:
        """The directory that is the savepoint's, or the checkpoint's, own."""
        if self.manifest.kind == "savepoint":
            return self.address
        own = checkpoint_directory(self.manifest.checkpoint_id, self.manifest.attempt)
        return f"{self.address}/{own}"

    def missing_files(self) -> list[str]:
        """Files that it needs and that are not there: those of one that is half deleted."""
        wanted = [file.path for file in self.manifest.files()]
        directories = {path.rpartition("/")[0] for path in wanted}
        there = {
            f"{directory}/{name}" if directory else name
            for directory in directories
            for name in self.store.list(directory)
        }
        return sorted(set(wanted) - there)


def locate(
    address: str, settings: Mapping[str, str] | None = None, checkpoint: int | None = None
) -> LocatedSnapshot:
    """What is at a job's directory (the newest, or this checkpoint), a checkpoint's or a savepoint.

    Raises `SnapshotDamaged` if its metadata is not what it was.
    """
    place = _existing(address, settings)
    above, _, name = place.address.rpartition("/")
    which = checkpoint_of(name)
    if which is not None:
        return _one_checkpoint(open_store(above, settings), *which)
    return located_in(place, checkpoint)


def located_in(place: Store, checkpoint: int | None = None) -> LocatedSnapshot:
    """What is in a job's directory, or in a savepoint's."""
    children = place.list("")
    if SAVEPOINT_METADATA in children:
        return LocatedSnapshot(place, _savepoint(place))
    if LOG_DIRECTORY in children:
        return _of_job(place, checkpoint)
    jobs = [child for child in children if LOG_DIRECTORY in _children(place, child)]
    hint = f"; there are the jobs {', '.join(jobs)} below it" if jobs else ""
    raise StorageError(
        f"{place.address} holds neither a job log nor a savepoint, since there is no"
        f" {SAVEPOINT_METADATA} in it: give a job's directory, a checkpoint (chk-7-1) or a"
        f" savepoint{hint}"
    )


def own_checkpoint(address: str, own: str) -> CheckpointId | Literal["newest"] | None:
    """What an address means for the job whose directory `own` is; None: it is from elsewhere."""
    address, own = _resolved(address), _resolved(own)
    above, _, name = address.rpartition("/")
    which = checkpoint_of(name)
    if address == own:
        return "newest"
    return which[0] if which is not None and above == own else None


def _resolved(address: str) -> str:
    """One name for one place, however it is written."""
    if is_local_address(address):
        return str(Path(open_store(address).address).resolve())
    scheme, colon, rest = address.partition(":")
    return f"{'s3' if scheme.lower() == 's3a' else scheme.lower()}{colon}{rest.rstrip('/')}"


def write_savepoint(store: Store, manifest: Manifest) -> None:
    """The metadata, when all files it names are in the store: with it there is a savepoint."""
    store.write(SAVEPOINT_METADATA, [encode_manifest(manifest)])


def _existing(address: str, settings: Mapping[str, str] | None) -> Store:
    """The store at an address; a local one is looked for, with what links lead to."""
    place = open_store(address, settings)
    if not is_local_address(address):
        return place
    path = Path(place.address).resolve()
    if not path.is_dir():
        raise StorageError(f"{path} is no directory: give a job, a checkpoint or a savepoint")
    return open_store(str(path))


def _children(place: Store, child: str) -> list[str]:
    try:
        return place.list(child)
    except StorageError:
        return []  # a file, of whatever kind


def _savepoint(place: Store) -> Manifest:
    where = f"{place.address}/{SAVEPOINT_METADATA}"
    return decode_manifest(place.read(SAVEPOINT_METADATA), where)


def _record(job: Store) -> JobRecord | None:
    return JobLog(job, job.address.rpartition("/")[2], SystemClock()).read()


def _of_job(job: Store, wanted: int | None) -> LocatedSnapshot:
    record = _record(job)
    retained = record.checkpoints if record is not None else ()
    chosen = [kept for kept in retained if wanted in (None, kept.checkpoint_id)]
    if not chosen:
        which = "no checkpoint" if wanted is None else f"no checkpoint {wanted}"
        there = ", ".join(str(kept.checkpoint_id) for kept in retained) or "none"
        raise StorageError(
            f"the job in {job.address} has {which} that is complete and retained; there are:"
            f" {there}"
        )
    assert record is not None
    return _completed(job, chosen[-1], record)


def _one_checkpoint(job: Store, checkpoint_id: CheckpointId, attempt: Attempt) -> LocatedSnapshot:
    record = _record(job)
    if record is None:  # copied somewhere, without its log
        path = metadata_path(checkpoint_id, attempt)
        return LocatedSnapshot(job, decode_manifest(job.read(path), f"{job.address}/{path}"))
    completed = record.checkpoint(checkpoint_id)
    if completed is None or completed.attempt != attempt:
        there = ", ".join(f"chk-{kept.checkpoint_id}-{kept.attempt}" for kept in record.checkpoints)
        raise StorageError(
            f"the log of the job in {job.address} does not say that"
            f" chk-{checkpoint_id}-{attempt} is complete and retained; there are: {there or 'none'}"
        )
    return _completed(job, completed, record)


def _completed(job: Store, completed: CompletedCheckpoint, record: JobRecord) -> LocatedSnapshot:
    manifest = Snapshots(job).read_manifest(completed)
    return LocatedSnapshot(job, manifest, record.outcome, record.committed_epoch_by_sink)
