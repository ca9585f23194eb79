"""The job's record, event by event."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.protocol.joblog import (
    Beginning,
    Claim,
    CompletedCheckpoint,
    JobRecord,
    attempt_started,
    cancelled,
    checkpoint_completed,
    claim_settled,
    decode_record,
    encode_record,
    ended,
    epoch_committed,
)

SINK = OperatorUid("table")


def completed(record: JobRecord, checkpoint_id: int) -> CompletedCheckpoint:
    return CompletedCheckpoint(
        CheckpointId(checkpoint_id), record.next_epoch, record.attempt, 0xABCD, 1234
    )


def with_checkpoints(*ids: int, retained_max: int = 10) -> JobRecord:
    record = attempt_started(None, None)
    for checkpoint_id in ids:
        record, _ = checkpoint_completed(record, completed(record, checkpoint_id), retained_max)
    return record


def ids(checkpoints: tuple[CompletedCheckpoint, ...]) -> list[int]:
    return [kept.checkpoint_id for kept in checkpoints]


def test_a_new_job_begins_with_attempt_one_and_nothing_behind_it() -> None:
    record = attempt_started(None, None)

    assert (record.sequence, record.attempt, record.outcome) == (1, 1, "running")
    assert record.newest is None
    assert (record.next_epoch, record.last_checkpoint_id) == (0, 0)


def test_ids_seen_on_disk_are_never_used_again() -> None:
    assert attempt_started(None, None, CheckpointId(4)).last_checkpoint_id == 4

    record = with_checkpoints(5)
    assert attempt_started(record, CheckpointId(5), CheckpointId(9)).last_checkpoint_id == 9
    assert attempt_started(record, CheckpointId(5), CheckpointId(3)).last_checkpoint_id == 5


def test_epochs_are_dense_although_checkpoint_ids_have_gaps() -> None:
    record = with_checkpoints(1, 4, 9)

    assert [kept.epoch for kept in record.checkpoints] == [0, 1, 2]
    assert (record.next_epoch, record.last_checkpoint_id) == (3, 9)


def test_the_oldest_checkpoints_are_dropped_beyond_the_retained_number() -> None:
    record = with_checkpoints(1, 2)

    after, dropped = checkpoint_completed(record, completed(record, 3), retained_max=2)
    assert (ids(after.checkpoints), ids(dropped)) == ([2, 3], [1])

    after, dropped = checkpoint_completed(after, completed(after, 4), retained_max=1)
    assert (ids(after.checkpoints), ids(dropped)) == ([4], [2, 3])


def test_a_restart_goes_on_from_the_newest_checkpoint_with_the_next_attempt() -> None:
    record = attempt_started(with_checkpoints(1, 2), CheckpointId(2))

    assert (record.attempt, record.restored_from, record.next_epoch) == (2, 2, 2)
    assert ids(record.checkpoints) == [1, 2]
    assert record.sequence == 4


def test_a_restart_from_an_older_checkpoint_forgets_the_newer_ones_and_their_epochs() -> None:
    record = epoch_committed(with_checkpoints(1, 2, 3), SINK, Epoch(2))

    record = attempt_started(record, CheckpointId(2))

    assert ids(record.checkpoints) == [1, 2]
    assert record.next_epoch == 2
    assert record.committed_epoch_by_sink == {SINK: 1}
    assert record.last_checkpoint_id == 3


def test_a_restart_from_the_beginning_forgets_everything_but_the_used_numbers() -> None:
    record = attempt_started(epoch_committed(with_checkpoints(1, 2), SINK, Epoch(0)), None)

    assert (record.checkpoints, record.next_epoch, record.restored_from) == ((), 0, None)
    assert record.committed_epoch_by_sink == {}
    assert (record.attempt, record.last_checkpoint_id) == (2, 2)


def test_a_restart_keeps_what_was_committed_and_not_more() -> None:
    record = epoch_committed(with_checkpoints(1, 2, 3), SINK, Epoch(0))

    assert attempt_started(record, CheckpointId(3)).committed_epoch_by_sink == {SINK: 0}


def test_a_checkpoint_that_is_not_retained_cannot_be_restored() -> None:
    with pytest.raises(AssertionError, match="checkpoint 1 is not retained"):
        attempt_started(with_checkpoints(1, 2, retained_max=1), CheckpointId(1))


def test_a_checkpoint_of_another_attempt_does_not_complete() -> None:
    record = with_checkpoints(1)
    old = completed(record, 2)

    with pytest.raises(AssertionError, match="another attempt"):
        checkpoint_completed(attempt_started(record, CheckpointId(1)), old, 2)


def test_an_epoch_committed_twice_or_late_changes_nothing() -> None:
    record = epoch_committed(with_checkpoints(1, 2, 3), SINK, Epoch(1))

    assert epoch_committed(record, SINK, Epoch(1)) is record
    assert epoch_committed(record, SINK, Epoch(0)) is record
    assert epoch_committed(record, SINK, Epoch(2)).committed_epoch_by_sink == {SINK: 2}


def test_an_epoch_is_not_committed_before_its_checkpoint_is_complete() -> None:
    with pytest.raises(AssertionError, match="after its checkpoint is complete"):
        epoch_committed(with_checkpoints(1), SINK, Epoch(1))


def test_a_job_ends_once() -> None:
    record = ended(with_checkpoints(1), "finished")

    assert (record.outcome, record.event, record.sequence) == ("finished", "ended", 3)
    assert ended(record, "finished") is record
    with pytest.raises(AssertionError):
        ended(record, "failed")
    with pytest.raises(AssertionError):
        checkpoint_completed(record, completed(record, 2), 2)


def test_a_job_that_ended_may_start_again() -> None:
    record = attempt_started(ended(with_checkpoints(1), "cancelled"), CheckpointId(1))

    assert (record.outcome, record.attempt) == ("running", 2)


def test_every_event_moves_the_sequence_by_one() -> None:
    record = with_checkpoints(1)
    after = [
        attempt_started(record, CheckpointId(1)),
        checkpoint_completed(record, completed(record, 2), 2)[0],
        epoch_committed(record, SINK, Epoch(0)),
        ended(record, "failed"),
    ]

    assert [next_record.sequence for next_record in after] == [3] * 4


def test_a_record_survives_its_own_encoding() -> None:
    record = epoch_committed(with_checkpoints(1, 2), SINK, Epoch(1))
    record = dataclasses.replace(record, written_at_ms=17, written_by="host:1")
    restored = attempt_started(record, CheckpointId(2))

    assert decode_record(encode_record(record)) == record
    assert decode_record(encode_record(restored)) == restored


def test_an_altered_record_is_damaged() -> None:
    data = encode_record(with_checkpoints(1)).replace(b'"attempt":1', b'"attempt":2')

    with pytest.raises(SnapshotDamaged, match="entry 2 is damaged"):
        decode_record(data, "entry 2")


def test_a_record_of_a_newer_format_is_refused_with_both_versions() -> None:
    document = json.loads(encode_record(with_checkpoints()))
    document["format_version"] = 3

    with pytest.raises(StorageError, match=r"version 3, but .* up to 2"):
        decode_record(json.dumps(document).encode())


def test_ids_are_the_plain_numbers_they_were() -> None:
    record = decode_record(encode_record(with_checkpoints(6)))

    assert record.newest == CompletedCheckpoint(CheckpointId(6), Epoch(0), Attempt(1), 0xABCD, 1234)
    assert record.checkpoint(CheckpointId(6)) == record.newest
    assert record.checkpoint(CheckpointId(5)) is None


def test_a_cancelled_job_has_no_checkpoints_left_unless_it_keeps_them() -> None:
    record = with_checkpoints(1, 2)

    gone, keeping = (cancelled(record, keeps_checkpoints=keeps) for keeps in (False, True))

    assert (gone.outcome, gone.event, gone.checkpoints) == ("cancelled", "ended", ())
    assert (keeping.outcome, ids(keeping.checkpoints)) == ("cancelled", [1, 2])
    assert gone.sequence == keeping.sequence == record.sequence + 1
    assert gone.last_checkpoint_id == 2


def test_a_job_that_begins_anew_uses_no_number_twice() -> None:
    record = epoch_committed(with_checkpoints(1, 2), SINK, Epoch(1))
    over = cancelled(record, keeps_checkpoints=False)

    anew = attempt_started(over, None, is_anew=True)
    again = attempt_started(anew, None)

    for begun in (anew, again):
        assert begun.outcome == "running"
        assert begun.checkpoints == ()
        assert begun.next_epoch == 2, "the epochs before are committed under their numbers"
        assert begun.committed_epoch_by_sink == {SINK: 1}
        assert begun.last_checkpoint_id == 2
    assert (anew.attempt, again.attempt) == (2, 3)
    with_one, _ = checkpoint_completed(again, completed(again, 3), 2)
    assert attempt_started(with_one, CheckpointId(3)).next_epoch == 3


def test_a_claim_is_remembered_until_it_is_settled() -> None:
    claim = Claim("/savepoints/monday", 0xAB)
    begun = attempt_started(None, None, claim=claim)
    complete, _ = checkpoint_completed(begun, completed(begun, 1), 2)
    restarted = attempt_started(complete, CheckpointId(1))

    assert [each.claim for each in (begun, complete, restarted)] == [claim] * 3
    assert decode_record(encode_record(restarted)) == restarted
    settled = claim_settled(restarted)
    assert settled.claim is None
    assert attempt_started(settled, CheckpointId(1)).claim is None


def test_where_sources_begin_is_remembered_until_a_checkpoint_is_complete() -> None:
    source = OperatorUid("views")
    beginning = Beginning("kafka topic views", ({"id": "views-0", "position": {"offset": 7}},))
    begun = attempt_started(None, None, beginnings={source: beginning})

    assert decode_record(encode_record(begun)).beginnings == {source: beginning}
    complete, _ = checkpoint_completed(begun, completed(begun, 1), 1)
    assert complete.beginnings == {}


def test_who_begins_with_something_else_claims_nothing_any_more() -> None:
    begun = attempt_started(None, None, claim=Claim("/savepoints/monday", 0xAB))

    assert attempt_started(begun, None).claim is None
    assert cancelled(begun, keeps_checkpoints=True).claim is None, "it was never made the job's own"


def test_records_without_the_newer_fields_are_read() -> None:
    record = with_checkpoints(1)
    body = json.loads(encode_record(record))["body"]

    assert not {"first_epoch", "claim", "beginnings"} & body.keys(), "as they were always written"
    anew = attempt_started(record, None, is_anew=True)
    assert decode_record(encode_record(anew)).first_epoch == 1
