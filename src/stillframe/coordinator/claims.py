"""A snapshot from elsewhere that the job owns: deleted when the job has a checkpoint of its own.

Theory of operation
-------------------
With `restoreMode=claim` a job owns the savepoint, or the other job's checkpoint, it begins with.
That is in the job log from the entry with which the attempt begins. Nothing of it is deleted before
a checkpoint of the job's own is complete, because until then every attempt begins with it; from
then on nobody needs it, since that checkpoint is full. A driver that dies in between is followed by
one that finds the claim in the log, with a checkpoint beside it, and deletes what is left.

Rules of this file
------------------
1. Its metadata goes last: while it is there, and is what the log says it was, the snapshot is the
   claimed one. Whatever somebody has put in its place since is left alone.
2. Only what the metadata names is deleted, and of a checkpoint only what no other one names.
"""

from __future__ import annotations

import logging
import zlib

from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.located import LocatedSnapshot
from stillframe.coordinator.savepoints import OpenStore
from stillframe.errors import SnapshotDamaged, StartRefused, StorageError
from stillframe.protocol.joblog import Claim
from stillframe.protocol.manifests import Manifest, decode_manifest
from stillframe.storage.paths import SAVEPOINT_METADATA, checkpoint_of, is_shared
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")


def claim_on(found: LocatedSnapshot) -> Claim:
    """Own this snapshot. A checkpoint of a job that may go on is refused: it would miss it."""
    if found.job_outcome == "running":
        raise StartRefused(
            f"restoreMode claim would delete {found.place}, but the log of its job says that it may"
            " go on: cancel that job with retainOnCancel, or use restoreMode no_claim"
        )
    return Claim(found.place, zlib.crc32(found.store.read(found.metadata_path)))


def settle_claim(ledger: Ledger, open_store: OpenStore) -> None:
    """Delete what the job had claimed, if it has a checkpoint of its own. What cannot be deleted
    now is left for the next checkpoint."""
    record = ledger.record
    if record is None or record.claim is None or not record.checkpoints:
        return
    if delete_claimed(record.claim, open_store):
        ledger.note_claim_settled()


def delete_claimed(claim: Claim, open_store: OpenStore) -> bool:
    """Whether it is gone; it may be asked for again."""
    try:
        _delete(claim, open_store)
    except StorageError as error:
        log.warning("the claimed snapshot %s is not deleted yet: %s", claim.address, error)
        return False
    return True


def _delete(claim: Claim, open_store: OpenStore) -> None:
    place = open_store(claim.address)
    try:
        data = place.read(SAVEPOINT_METADATA)
    except SnapshotDamaged:
        return  # it is gone already
    if zlib.crc32(data) != claim.manifest_crc32:
        log.warning("%s holds another snapshot than was claimed: it stays", claim.address)
        return
    manifest = decode_manifest(data, f"{claim.address}/{SAVEPOINT_METADATA}")
    above, _, name = claim.address.rpartition("/")
    parent = open_store(above)
    if manifest.kind == "savepoint":
        _delete_files_of_savepoint(place, manifest)
    else:
        _delete_files_of_checkpoint(parent, name, manifest)
    place.delete(SAVEPOINT_METADATA)
    if not place.list(""):
        parent.delete_directory(name)
    log.info("the claimed snapshot %s is deleted", claim.address)


def _delete_files_of_savepoint(place: Store, manifest: Manifest) -> None:
    for child in sorted({file.path.partition("/")[0] for file in manifest.files()}):
        place.delete_directory(child)


def _delete_files_of_checkpoint(job: Store, name: str, manifest: Manifest) -> None:
    """Its own directory beside the metadata, and shared files that no other checkpoint names."""
    needed: set[str] = set()
    for other in job.list(""):
        if checkpoint_of(other) is not None and other != name:
            where = f"{other}/{SAVEPOINT_METADATA}"
            try:
                needed.update(file.path for file in decode_manifest(job.read(where), where).files())
            except StorageError:
                log.warning("%s/%s cannot be read: shared files stay", job.address, where)
                return
    for file in manifest.files():
        if not is_shared(file.path) or file.path not in needed:
            job.delete(file.path)
