"""The job log's entries: what is complete, and which attempt is alive.

Theory of operation
-------------------
A job's life is a numbered sequence of entries. Each entry holds the *whole* record as it stands
after its event, so the entry with the highest number alone tells everything: nothing is replayed,
and older entries may be thrown away. An entry comes into being by creating its number, which only
one driver can do; so the log is also the fence between two drivers of one job.

Rules of this file
------------------
1. Pure: record and event in, next record out. `coordinator/job_log.py` writes them.
2. A checkpoint is complete when an entry says so, not when its metadata file is there.
3. Checkpoint ids are never used twice, not even those of checkpoints that failed; epochs are dense
   and rewind when an older checkpoint is restored, but never to before the job last started over:
   what was committed under their numbers stays.
4. A job that was cancelled and has no checkpoint left is not started again unasked.
5. The incarnation is drawn when the log begins and is in every entry: what a sink notes in another
   system carries it, so that another job of the same name, or one whose log was lost, is not taken
   for this one.
6. If the log is damaged, a person may have the job start over all the same: above every number that
   any file shows, because what was committed under these numbers stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import (
    JsonFields,
    decode_document,
    decode_fields,
    encode_document,
)

RECORD_VERSION = 2

Event = Literal["attempt-started", "checkpoint-completed", "epoch-committed", "ended"]
FinalOutcome = Literal["finished", "cancelled", "failed"]
Outcome = Literal["running", "finished", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A complete checkpoint, and what its metadata file must look like."""

    checkpoint_id: CheckpointId
    epoch: Epoch
    attempt: Attempt
    manifest_crc32: int
    manifest_length_bytes: int

    def to_json(self) -> JsonObject:
        return {
            "checkpoint_id": self.checkpoint_id,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "manifest_crc32": self.manifest_crc32,
            "manifest_length_bytes": self.manifest_length_bytes,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> CompletedCheckpoint:
        fields = JsonFields(value)
        return cls(
            checkpoint_id=CheckpointId(fields.integer("checkpoint_id")),
            epoch=Epoch(fields.integer("epoch")),
            attempt=Attempt(fields.integer("attempt")),
            manifest_crc32=fields.integer("manifest_crc32"),
            manifest_length_bytes=fields.integer("manifest_length_bytes"),
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A snapshot from elsewhere that the job owns, to be deleted when it has one of its own."""

    address: str
    """Of the savepoint, or of the checkpoint's own directory."""
    manifest_crc32: int
    """Of its metadata file: another snapshot may lie there by the time it is deleted."""

    def to_json(self) -> JsonObject:
        return {"address": self.address, "manifest_crc32": self.manifest_crc32}

    @classmethod
    def from_json(cls, value: JsonObject) -> Claim:
        fields = JsonFields(value)
        return cls(fields.text("address"), fields.integer("manifest_crc32"))


@dataclass(frozen=True, slots=True)
class Beginning:
    """The splits of a source as they were when the job first began."""

    tied_to: str
    """What the source reads: another one of the same uid begins by itself."""
    splits: tuple[JsonObject, ...]

    def to_json(self) -> JsonObject:
        return {"tied_to": self.tied_to, "splits": list(self.splits)}

    @classmethod
    def from_json(cls, value: JsonObject) -> Beginning:
        fields = JsonFields(value)
        return cls(fields.text("tied_to"), fields.parts("splits", lambda split: split))


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Where a job stands after one entry of its log."""

    sequence: int
    event: Event
    attempt: Attempt
    checkpoints: tuple[CompletedCheckpoint, ...] = ()
    """The retained ones, oldest first."""
    last_checkpoint_id: CheckpointId = NO_CHECKPOINT
    """The highest id known to have been used, failed checkpoints included; go on above it."""
    next_epoch: Epoch = Epoch(0)  # noqa: RUF009 - a NewType call is an int, immutable
    committed_epoch_by_sink: Mapping[OperatorUid, Epoch] = field(default_factory=dict)
    """The newest epoch that each sink is known to have committed. Of one that commits in the slots
    it is known later: with the next checkpoint, or when the job has stopped."""
    outcome: Outcome = "running"
    restored_from: CheckpointId | None = None
    """What this attempt started from; None: from the beginning."""
    first_epoch: Epoch = Epoch(0)  # noqa: RUF009
    """That of the first checkpoint since the job last started over."""
    claim: Claim | None = None
    """What the job began with and has to delete once it has a checkpoint of its own."""
    incarnation: str = ""
    """Empty before the first attempt, and in logs of older versions."""
    beginnings: Mapping[OperatorUid, Beginning] = field(default_factory=dict)
    """Where sources begin that would begin elsewhere if asked again. A checkpoint says it better,
    so there are none after the next one."""
    written_at_ms: int = 0
    written_by: str = ""
    """The driver, for people and for telling two drivers apart; filled in when it is written."""

    @property
    def newest(self) -> CompletedCheckpoint | None:
        """The newest completed checkpoint."""
        return self.checkpoints[-1] if self.checkpoints else None

    def checkpoint(self, checkpoint_id: CheckpointId) -> CompletedCheckpoint | None:
        """The retained checkpoint of this id."""
        found = (kept for kept in self.checkpoints if kept.checkpoint_id == checkpoint_id)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Shown:
    """Numbers that a file shows to have been used."""

    attempt: Attempt = Attempt(0)  # noqa: RUF009
    checkpoint_id: CheckpointId = NO_CHECKPOINT
    epoch: Epoch | None = None


def record_in_place_of(damaged_sequence: int, shown: Iterable[Shown]) -> JobRecord:
    """What stands for an entry that cannot be read: nothing but the highest numbers there were.

    Every epoch is that of a checkpoint, and no two have the same, so there have been no more epochs
    than checkpoints.
    """
    seen = [Shown(), *shown]
    last_checkpoint_id = max(each.checkpoint_id for each in seen)
    epochs = [each.epoch + 1 for each in seen if each.epoch is not None]
    return JobRecord(
        sequence=damaged_sequence,
        event="ended",
        attempt=max(each.attempt for each in seen),
        last_checkpoint_id=last_checkpoint_id,
        next_epoch=Epoch(max([last_checkpoint_id, *epochs])),
        outcome="failed",
    )


def attempt_started(
    record: JobRecord | None,
    restored_from: CheckpointId | None,
    last_checkpoint_id: CheckpointId = NO_CHECKPOINT,
    *,
    is_anew: bool = False,
    claim: Claim | None = None,
    incarnation: str = "",
    beginnings: Mapping[OperatorUid, Beginning] | None = None,
) -> JobRecord:
    """A new attempt begins, from a retained checkpoint or (None) from the beginning.

    Checkpoints newer than the one restored leave the record: they are not part of this attempt's
    past. `last_checkpoint_id` is the highest id the caller ever triggered or saw on disk. `is_anew`
    says that the job leaves behind all it was, `claim` that it begins with a snapshot it owns.
    `incarnation` is what the log is to have if it has none yet, `beginnings` where sources begin of
    which the restored checkpoint knows nothing.
    """
    if record is None:
        assert restored_from is None, "a job without a log has no checkpoint"
        return JobRecord(
            1,
            "attempt-started",
            Attempt(1),
            last_checkpoint_id=last_checkpoint_id,
            claim=claim,
            incarnation=incarnation,
            beginnings=beginnings or {},
        )
    assert restored_from is None or not is_anew, "who starts over restores nothing of the job's own"
    kept = _up_to(record, restored_from)
    first_epoch = record.next_epoch if is_anew else record.first_epoch
    next_epoch = Epoch(kept[-1].epoch + 1 if kept else first_epoch)
    return replace(
        record,
        sequence=record.sequence + 1,
        event="attempt-started",
        attempt=Attempt(record.attempt + 1),
        checkpoints=kept,
        last_checkpoint_id=max(record.last_checkpoint_id, last_checkpoint_id),
        next_epoch=next_epoch,
        committed_epoch_by_sink=_rewound(record.committed_epoch_by_sink, next_epoch),
        outcome="running",
        restored_from=restored_from,
        first_epoch=first_epoch,
        claim=claim if restored_from is None else record.claim,
        incarnation=record.incarnation or incarnation,
        beginnings=beginnings or {},
    )


def checkpoint_completed(
    record: JobRecord, completed: CompletedCheckpoint, retained_max: int
) -> tuple[JobRecord, tuple[CompletedCheckpoint, ...]]:
    """A checkpoint is complete; the second answer are those no longer retained, to be deleted.

    Delete them only when the new record has been written.
    """
    assert retained_max >= 1
    assert record.outcome == "running", f"the job has {record.outcome}"
    assert completed.attempt == record.attempt, "a checkpoint of another attempt"
    assert completed.epoch == record.next_epoch, "epochs are dense"
    newest = record.newest
    assert newest is None or completed.checkpoint_id > newest.checkpoint_id
    checkpoints = (*record.checkpoints, completed)
    after = replace(
        record,
        sequence=record.sequence + 1,
        event="checkpoint-completed",
        checkpoints=checkpoints[-retained_max:],
        last_checkpoint_id=max(record.last_checkpoint_id, completed.checkpoint_id),
        next_epoch=Epoch(completed.epoch + 1),
        beginnings={},
    )
    return after, checkpoints[:-retained_max]


def epoch_committed(record: JobRecord, uid: OperatorUid, epoch: Epoch) -> JobRecord:
    """A sink has made this epoch, and with it all before, visible.

    Told a second time, or of an older epoch, the answer is the same record: nothing to write.
    """
    assert epoch < record.next_epoch, "an epoch is committed after its checkpoint is complete"
    committed = record.committed_epoch_by_sink.get(uid)
    if committed is not None and epoch <= committed:
        return record
    return replace(
        record,
        sequence=record.sequence + 1,
        event="epoch-committed",
        committed_epoch_by_sink={**record.committed_epoch_by_sink, uid: epoch},
    )


def committed_everywhere(
    record: JobRecord, uids: Iterable[OperatorUid], checkpoint_id: CheckpointId
) -> JobRecord:
    """All sinks have committed this checkpoint. Not an entry of its own: the next one says it."""
    completed = record.checkpoint(checkpoint_id)
    if completed is None:
        return record
    known = record.committed_epoch_by_sink
    newer = {uid: Epoch(max(completed.epoch, known.get(uid, -1))) for uid in uids}
    return replace(record, committed_epoch_by_sink={**known, **newer})


def stopped(record: JobRecord) -> JobRecord:
    """The job has stopped and may go on: what is known of it by now is written down."""
    return replace(record, sequence=record.sequence + 1, event="epoch-committed")


def ended(record: JobRecord, outcome: FinalOutcome) -> JobRecord:
    """The job is over; told the same a second time, the answer is the same record."""
    if record.outcome == outcome:
        return record
    assert record.outcome == "running", f"the job has {record.outcome} already"
    return replace(record, sequence=record.sequence + 1, event="ended", outcome=outcome)


def cancelled(record: JobRecord, *, keeps_checkpoints: bool) -> JobRecord:
    """The job is over because somebody said so; what it may keep is all that is left of it.

    Delete the others only when the new record has been written. What was claimed and never
    followed by a checkpoint of the job's own stays where it is.
    """
    over = ended(record, "cancelled")
    claim = over.claim if over.checkpoints else None
    return replace(over, checkpoints=over.checkpoints if keeps_checkpoints else (), claim=claim)


def claim_settled(record: JobRecord) -> JobRecord:
    """What was claimed has been deleted. Not an entry of its own: the next one says it."""
    return replace(record, claim=None)


def _up_to(
    record: JobRecord, restored_from: CheckpointId | None
) -> tuple[CompletedCheckpoint, ...]:
    if restored_from is None:
        return ()
    assert record.checkpoint(restored_from), f"checkpoint {restored_from} is not retained"
    return tuple(kept for kept in record.checkpoints if kept.checkpoint_id <= restored_from)


def _rewound(
    committed: Mapping[OperatorUid, Epoch], next_epoch: Epoch
) -> Mapping[OperatorUid, Epoch]:
    """Epochs from `next_epoch` on will hold other records, so they do not count as committed."""
    if next_epoch == 0:
        return {}
    return {uid: Epoch(min(epoch, next_epoch - 1)) for uid, epoch in committed.items()}


def encode_record(record: JobRecord) -> bytes:
    """The bytes of one entry."""
    body: JsonObject = {
        "sequence": record.sequence,
        "event": record.event,
        "attempt": record.attempt,
        "checkpoints": [kept.to_json() for kept in record.checkpoints],
        "last_checkpoint_id": record.last_checkpoint_id,
        "next_epoch": record.next_epoch,
        "committed_epoch_by_sink": {
            str(uid): int(epoch) for uid, epoch in record.committed_epoch_by_sink.items()
        },
        "outcome": record.outcome,
        "restored_from": record.restored_from,
        "written_at_ms": record.written_at_ms,
        "written_by": record.written_by,
        "incarnation": record.incarnation,
        # Not said of most.
        **({"first_epoch": record.first_epoch} if record.first_epoch else {}),
        **({"claim": record.claim.to_json()} if record.claim is not None else {}),
        **({"beginnings": _to_json(record.beginnings)} if record.beginnings else {}),
    }
    return encode_document(body, RECORD_VERSION, f"entry {record.sequence} of the job log")


def _to_json(beginnings: Mapping[OperatorUid, Beginning]) -> JsonObject:
    return {str(uid): beginning.to_json() for uid, beginning in beginnings.items()}


def decode_record(data: bytes, where: str = "a job log entry") -> JobRecord:
    """The record in these bytes; damage and newer versions are told as for a manifest."""
    _, body = decode_document(data, RECORD_VERSION, where)
    return decode_fields(lambda: _record(JsonFields(body)), where)


def _beginnings(value: JsonObject) -> Mapping[OperatorUid, Beginning]:
    fields = JsonFields(value)
    return {OperatorUid(uid): Beginning.from_json(fields.object(uid)) for uid in value}


def _record(fields: JsonFields) -> JobRecord:
    event, outcome = fields.text("event"), fields.text("outcome")
    if event not in get_args(Event) or outcome not in get_args(Outcome):
        raise ValueError(f"event {event!r} with outcome {outcome!r}")
    restored_from = fields.integer_or_none("restored_from")
    uids = fields.object("committed_epoch_by_sink")
    committed = JsonFields(uids)
    return JobRecord(
        sequence=fields.integer("sequence"),
        event=cast(Event, event),
        attempt=Attempt(fields.integer("attempt")),
        checkpoints=fields.parts("checkpoints", CompletedCheckpoint.from_json),
        last_checkpoint_id=CheckpointId(fields.integer("last_checkpoint_id")),
        next_epoch=Epoch(fields.integer("next_epoch")),
        committed_epoch_by_sink={OperatorUid(uid): Epoch(committed.integer(uid)) for uid in uids},
        outcome=cast(Outcome, outcome),
        restored_from=None if restored_from is None else CheckpointId(restored_from),
        first_epoch=Epoch(fields.integer_if_any("first_epoch") or 0),
        claim=fields.part_if_any("claim", Claim.from_json),
        incarnation=fields.text_if_any("incarnation") or "",
        beginnings=fields.part_if_any("beginnings", _beginnings) or {},
        written_at_ms=fields.integer("written_at_ms"),
        written_by=fields.text("written_by"),
    )
