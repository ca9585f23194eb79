"""The ledger and the files on its store: what is deleted, when, and what never is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stillframe.coordinator.ledger import Ledger
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import FileHandle, KeyedState, Manifest, OperatorSnapshot
from stillframe.storage.paths import metadata_path, state_path
from stillframe.storage.store import Store, open_store
from stillframe.testing.clock import ManualClock

UID = OperatorUid("count")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def driver(store: Store, retained_max: int = 1) -> Ledger:
    """A ledger as a driver has it that starts or goes on with the job."""
    ledger = Ledger(store, "views", retained_max, ManualClock())
    record = ledger.read()
    newest = record.newest if record is not None else None
    ledger.begin_attempt(ledger.read_manifest(newest) if newest is not None else None)
    return ledger


def written(ledger: Ledger, store: Store, checkpoint_id: int) -> FileHandle:
    """A state file, written for this checkpoint."""
    path = state_path(
        CheckpointId(checkpoint_id), UID, SubtaskIndex(0), Attempt(ledger.attempt), "aggregates"
    )
    stored = store.write(path, [b"state of %d" % checkpoint_id])
    return FileHandle(path, stored.length_bytes, stored.crc32)


def acknowledged(ledger: Ledger, checkpoint_id: int, file: FileHandle) -> FileHandle:
    ledger.note_used(CheckpointId(checkpoint_id))
    ledger.note_acknowledged(CheckpointId(checkpoint_id), [file])
    return file


def complete(ledger: Ledger, checkpoint_id: int, file: FileHandle) -> None:
    acknowledged(ledger, checkpoint_id, file)
    keyed = KeyedState("aggregates", file, (0,), 1, "n int64")
    snapshot = OperatorSnapshot(UID, SubtaskIndex(0), keyed=(keyed,))
    ledger.complete(
        Manifest(
            job="views",
            attempt=ledger.attempt,
            checkpoint_id=CheckpointId(checkpoint_id),
            epoch=ledger.next_epoch,
            kind="checkpoint",
            triggered_at_ms=0,
            completed_at_ms=0,
            max_parallelism=128,
            operators=(),
            snapshots=(snapshot,),
        )
    )


def shared(store: Store) -> list[str]:
    return [
        f"shared/{attempt}/{name}"
        for attempt in store.list("shared")
        for name in store.list(f"shared/{attempt}")
    ]


def test_a_dropped_checkpoint_leaves_the_files_that_a_newer_one_refers_to(store: Store) -> None:
    ledger = driver(store)
    first = written(ledger, store, 1)
    complete(ledger, 1, first)
    complete(ledger, 2, first)
    assert "chk-1-1" not in store.list("")
    assert shared(store) == [first.path]

    third = written(ledger, store, 3)
    complete(ledger, 3, third)
    assert shared(store) == [third.path]


def test_a_failed_checkpoint_takes_its_own_files_and_nobody_elses(store: Store) -> None:
    ledger = driver(store)
    first = written(ledger, store, 1)
    complete(ledger, 1, first)
    acknowledged(ledger, 2, first)
    acknowledged(ledger, 2, written(ledger, store, 2))

    ledger.discard(CheckpointId(2))

    assert shared(store) == [first.path]


def test_what_is_acknowledged_after_the_checkpoint_failed_is_deleted(store: Store) -> None:
    ledger = driver(store)
    ledger.note_used(CheckpointId(1))
    ledger.discard(CheckpointId(1))

    ledger.note_acknowledged(CheckpointId(1), [written(ledger, store, 1)])

    assert shared(store) == []


def test_a_driver_that_takes_over_knows_who_needs_what(store: Store) -> None:
    before = driver(store)
    first = written(before, store, 1)
    complete(before, 1, first)
    complete(before, 2, first)
    left_over = written(before, store, 3)

    after = driver(store)
    assert left_over.path in shared(store)
    after.sweep(Attempt(after.attempt - 1))
    assert shared(store) == [first.path]

    complete(after, 4, written(after, store, 4))
    assert shared(store) == [f"shared/{after.attempt}/count-0-aggregates-4.arrow"]


def test_a_sweep_takes_nothing_a_damaged_checkpoint_might_need_and_says_so(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = driver(store, retained_max=2)
    first = written(before, store, 1)
    complete(before, 1, first)
    second = written(before, store, 2)
    complete(before, 2, second)
    (tmp_path / metadata_path(CheckpointId(1), Attempt(1))).write_bytes(b"damaged")

    after = driver(store, retained_max=2)
    with caplog.at_level(logging.WARNING, "stillframe"):
        after.sweep(Attempt(1))

    assert shared(store) == [first.path, second.path]
    assert "the shared files of job views are not swept" in caplog.text


def test_a_checkpoint_that_refers_to_a_file_nobody_holds_is_never_completed(store: Store) -> None:
    ledger = driver(store)
    first = written(ledger, store, 1)
    complete(ledger, 1, first)
    complete(ledger, 2, written(ledger, store, 2))

    with pytest.raises(AssertionError, match="refers to files that may be deleted"):
        complete(ledger, 3, first)


def test_the_files_of_an_older_layout_go_with_their_checkpoints_directory(store: Store) -> None:
    ledger = driver(store)
    stored = store.write("chk-1-1/count-0-aggregates.arrow", [b"x"])
    file = FileHandle("chk-1-1/count-0-aggregates.arrow", stored.length_bytes, stored.crc32)
    complete(ledger, 1, file)
    assert store.list("chk-1-1") == ["_metadata", "count-0-aggregates.arrow"]

    complete(ledger, 2, written(ledger, store, 2))
    assert store.list("chk-1-1") == []


def test_that_all_sinks_have_committed_is_told_by_the_next_entry_and_when_the_job_stops(
    store: Store,
) -> None:
    def told() -> tuple[int, dict[str, int]]:
        record = Ledger(store, "views", 1, ManualClock()).read()
        assert record is not None
        return record.sequence, {str(k): int(v) for k, v in record.committed_epoch_by_sink.items()}

    ledger, sink = driver(store), OperatorUid("out")
    complete(ledger, 1, written(ledger, store, 1))
    entries, committed = told()
    assert committed == {}

    ledger.note_committed_everywhere([sink], CheckpointId(1))
    assert told() == (entries, {}), "not an entry of its own"
    complete(ledger, 2, written(ledger, store, 2))
    assert told() == (entries + 1, {"out": 0})
    ledger.note_committed_everywhere([sink], CheckpointId(2))
    ledger.check_newest()
    ledger.note_stopped()
    assert told() == (entries + 2, {"out": 1})
    ledger.note_stopped()
    assert told() == (entries + 2, {"out": 1}), "there is nothing new to say"
