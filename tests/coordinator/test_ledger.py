"""The ledger and the files on its store: what is deleted, when, and what never is."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from letters import Letters

from stillframe.api.sinks import Committable, Committer, CommitterContext, Prepared, Sink
from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.deletions import Deletions
from stillframe.coordinator.history import History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.sinks import DriverSinks
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex, Writer
from stillframe.protocol.manifests import (
    FileHandle,
    KeyedState,
    Manifest,
    OperatorSnapshot,
    PendingCommit,
)
from stillframe.storage.paths import metadata_path, state_path
from stillframe.storage.store import Store, open_store
from stillframe.testing.clock import ManualClock

UID, OUT = OperatorUid("count"), OperatorUid("out")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


class Driver:
    """One that starts or goes on with the job, and an attempt of it."""

    def __init__(self, store: Store, retained_max: int = 1, sink: Sink | None = None) -> None:
        self.ledger = Ledger(store, "views", retained_max, ManualClock())
        record = self.ledger.read()
        newest = record.newest if record is not None else None
        restored = self.ledger.read_manifest(newest) if newest is not None else None
        self.ledger.begin_attempt(restored)
        self.attempt = self.ledger.attempt
        self.letters = Letters()
        self.deletions = Deletions(parts_of(self.ledger, sink or DiscardSink()), self.letters)
        self._store = store

    def write(self, checkpoint_id: int) -> FileHandle:
        """A state file, for this checkpoint."""
        number, subtask = CheckpointId(checkpoint_id), SubtaskIndex(0)
        path = state_path(number, UID, subtask, Attempt(self.attempt), "aggregates")
        stored = self._store.write(path, [b"state of %d" % checkpoint_id])
        return FileHandle(path, stored.length_bytes, stored.crc32)

    def acknowledge(self, checkpoint_id: int, file: FileHandle) -> None:
        self.ledger.note_used(CheckpointId(checkpoint_id))
        self.deletions.on_acknowledged(CheckpointId(checkpoint_id), [file])

    def store(self, checkpoint_id: int, file: FileHandle, holds_of: int | None = None) -> None:
        """Nothing is deleted yet. `holds_of`: a subtask of the sink whose output it holds."""
        held = [Writer("", OUT, SubtaskIndex(each)) for each in [holds_of] if each is not None]
        commits = tuple(PendingCommit(CheckpointId(checkpoint_id), {}, each) for each in held)
        self.acknowledge(checkpoint_id, file)
        keyed = KeyedState("aggregates", file, (0,), 1, "n int64")
        manifest = Manifest(
            job="views",
            attempt=self.attempt,
            checkpoint_id=CheckpointId(checkpoint_id),
            epoch=self.ledger.next_epoch,
            kind="checkpoint",
            triggered_at_ms=0,
            completed_at_ms=0,
            max_parallelism=128,
            operators=(),
            snapshots=(
                OperatorSnapshot(UID, SubtaskIndex(0), keyed=(keyed,)),
                OperatorSnapshot(OUT, SubtaskIndex(0), commits=commits),
            ),
        )
        self.deletions.check(manifest)
        self.deletions.on_stored(manifest, self.ledger.complete(manifest))

    def complete(self, checkpoint_id: int, file: FileHandle, holds_of: int | None = None) -> None:
        self.store(checkpoint_id, file, holds_of)
        self.delete()

    def delete(self) -> None:
        """What is to be deleted."""
        self.letters.carry_out(_raise)


def _raise(event: object) -> None:
    raise AssertionError(f"deletions have no answer: {event}")


def parts_of(ledger: Ledger, sink: Sink) -> JobParts:
    clicks = ClickSource(records=10)
    read = Node(Read(clicks), clicks.schema)
    write = Node(Write(sink), clicks.schema, (read,), given_uid=OUT)
    plan = build_plan("views", [write], 1)
    return JobParts(plan, JobConfig(), ManualClock(), History(), DriverSinks(plan), ledger)


def shared(store: Store) -> list[str]:
    return [
        f"shared/{attempt}/{name}"
        for attempt in store.list("shared")
        for name in store.list(f"shared/{attempt}")
    ]


def test_a_dropped_checkpoint_leaves_the_files_that_a_newer_one_refers_to(store: Store) -> None:
    driver = Driver(store)
    first = driver.write(1)
    driver.complete(1, first)
    driver.complete(2, first)
    assert "chk-1-1" not in store.list("")
    assert shared(store) == [first.path]

    third = driver.write(3)
    driver.complete(3, third)
    assert shared(store) == [third.path]


def test_what_a_dropped_checkpoint_leaves_is_there_until_its_letter_is_carried_out(
    store: Store,
) -> None:
    driver = Driver(store)
    first, second = driver.write(1), driver.write(2)
    driver.complete(1, first)
    driver.store(2, second)
    assert shared(store) == [first.path, second.path]

    driver.delete()
    assert shared(store) == [second.path]


def test_a_sweep_that_is_carried_out_late_leaves_what_was_stored_since(store: Store) -> None:
    before = Driver(store, retained_max=2)
    first = before.write(1)
    before.complete(1, first)
    left_over = before.write(2)

    after = Driver(store, retained_max=2)
    after.store(3, first)
    fourth = after.write(4)
    after.store(4, fourth)
    assert left_over.path in shared(store)
    after.delete()

    assert shared(store) == [first.path, fourth.path]


def test_a_failed_checkpoint_takes_its_own_files_and_nobody_elses(store: Store) -> None:
    driver = Driver(store)
    first = driver.write(1)
    driver.complete(1, first)
    driver.acknowledge(2, first)
    driver.acknowledge(2, driver.write(2))

    driver.deletions.on_aborted(CheckpointId(2))
    driver.delete()

    assert shared(store) == [first.path]


def test_what_is_acknowledged_after_the_checkpoint_failed_is_deleted(store: Store) -> None:
    driver = Driver(store)
    driver.ledger.note_used(CheckpointId(1))
    driver.deletions.on_aborted(CheckpointId(1))

    driver.deletions.on_acknowledged(CheckpointId(1), [driver.write(1)])
    driver.delete()

    assert shared(store) == []


def test_a_driver_that_takes_over_knows_who_needs_what(store: Store) -> None:
    before = Driver(store)
    first = before.write(1)
    before.complete(1, first)
    before.complete(2, first)
    left_over = before.write(3)

    after = Driver(store)
    assert left_over.path in shared(store)
    after.ledger.sweep(Attempt(after.attempt - 1))
    assert shared(store) == [first.path]

    after.complete(4, after.write(4))
    assert shared(store) == [f"shared/{after.attempt}/count-0-aggregates-4.arrow"]


def test_a_sweep_takes_nothing_a_damaged_checkpoint_might_need_and_says_so(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Driver(store, retained_max=2)
    first = before.write(1)
    before.complete(1, first)
    second = before.write(2)
    before.complete(2, second)
    (tmp_path / metadata_path(CheckpointId(1), Attempt(1))).write_bytes(b"damaged")

    after = Driver(store, retained_max=2)
    with caplog.at_level(logging.WARNING, "stillframe"):
        after.ledger.sweep(Attempt(1))

    assert shared(store) == [first.path, second.path]
    assert "the shared files of job views are not swept" in caplog.text


def test_a_checkpoint_that_refers_to_a_file_nobody_holds_is_never_completed(store: Store) -> None:
    driver = Driver(store)
    first = driver.write(1)
    driver.complete(1, first)
    driver.complete(2, driver.write(2))

    with pytest.raises(AssertionError, match="refers to files that may be deleted"):
        driver.complete(3, first)


def test_the_files_of_an_older_layout_go_with_their_checkpoints_directory(store: Store) -> None:
    driver = Driver(store)
    stored = store.write("chk-1-1/count-0-aggregates.arrow", [b"x"])
    file = FileHandle("chk-1-1/count-0-aggregates.arrow", stored.length_bytes, stored.crc32)
    driver.complete(1, file)
    assert store.list("chk-1-1") == ["_metadata", "count-0-aggregates.arrow"]

    driver.complete(2, driver.write(2))
    assert store.list("chk-1-1") == []


def test_that_all_sinks_have_committed_is_told_by_the_next_entry_and_when_the_job_stops(
    store: Store,
) -> None:
    def told() -> tuple[int, dict[str, int]]:
        record = Ledger(store, "views", 1, ManualClock()).read()
        assert record is not None
        return record.sequence, {str(k): int(v) for k, v in record.committed_epoch_by_sink.items()}

    driver, sink = Driver(store), OperatorUid("out")
    ledger = driver.ledger
    driver.complete(1, driver.write(1))
    entries, committed = told()
    assert committed == {}

    ledger.note_committed_everywhere([sink], CheckpointId(1))
    assert told() == (entries, {}), "not an entry of its own"
    driver.complete(2, driver.write(2))
    assert told() == (entries + 1, {"out": 0})
    ledger.note_committed_everywhere([sink], CheckpointId(2))
    ledger.check_newest()
    ledger.note_stopped()
    assert told() == (entries + 2, {"out": 1})
    ledger.note_stopped()
    assert told() == (entries + 2, {"out": 1}), "there is nothing new to say"


@dataclass(frozen=True)
class RememberedSink(DiscardSink):
    """Tells which writers are needed, whenever others are ended."""

    needed: list[list[str]] = field(default_factory=list)

    def open_committer(self, context: CommitterContext) -> Committer:
        return _Remembering(self.needed)


class _Remembering(Committer):
    def __init__(self, needed: list[list[str]]) -> None:
        self._needed = needed

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        """Nothing is asked for."""

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        """Nothing is staged."""

    def end_writers(self, uid: OperatorUid, needed: Set[Writer]) -> None:
        self._needed.append(sorted(map(str, needed)))


def test_writers_of_the_past_are_ended_when_no_retained_checkpoint_holds_their_output(
    store: Store,
) -> None:
    """Not before: a checkpoint that is damaged is passed over, and the one before is restored."""
    before = Driver(store, retained_max=2)
    before.complete(1, before.write(1))
    sink = RememberedSink()
    driver = Driver(store, retained_max=2, sink=sink)

    driver.complete(2, driver.write(2), holds_of=3)  # of a larger parallelism
    driver.complete(3, driver.write(3), holds_of=0)
    assert sink.needed == []

    for checkpoint_id in (4, 5, 6):
        driver.complete(checkpoint_id, driver.write(checkpoint_id), holds_of=0)
    assert sink.needed == [["/out/0", "/out/all"]], "once"
