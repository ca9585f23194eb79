"""What the driver does at the very beginning and at the very end of a job."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stillframe.api.sources import Source, Split
from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.located import write_savepoint
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import Start, Starter
from stillframe.errors import Fenced, SnapshotDamaged, StartRefused, StorageError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import (
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
)
from stillframe.storage.paths import attempt_history_path, checkpoint_history_path, state_path
from stillframe.storage.store import Store, open_store
from stillframe.testing.clock import ManualClock


def starter(store: Store, source: Source | None = None, **options: Any) -> Starter:
    given_uid = None if source is None else "source"
    source = source or ClickSource(records=1)
    read = Node(Read(source), source.schema, given_uid=given_uid)
    plan = build_plan("views", [Node(Write(DiscardSink()), source.schema, (read,))], 1)
    clock = ManualClock()
    ledger = Ledger(store, "views", 2, clock)
    with contextlib.suppress(SnapshotDamaged):
        ledger.read()
    config = JobConfig(**options)
    return Starter(JobParts(plan, config, clock, History(), DriverSinks(plan), ledger))


def test_a_job_is_not_called_finished_before_what_nobody_needs_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    first = starter(store)
    first.begin()
    store.write(state_path(1, "count", 0, 1, "aggregates"), [b"of a checkpoint that failed"])

    def die(self: object, *args: object) -> None:
        raise StorageError("the driver dies here")

    with monkeypatch.context() as dying:
        dying.setattr(type(first._ledger), "sweep", die)
        with pytest.raises(StorageError):
            first.finish()

    successor = starter(store)
    record = successor._ledger.record
    assert record is not None
    assert record.outcome == "running", "so it goes on, and sweeps again"
    successor.begin()
    assert store.list("shared") == []


@dataclass(frozen=True)
class FromNowOn(ClickSource):
    """Begins where its records are when it is asked."""

    begins_now: ClassVar[bool] = True
    now: int = 0
    place: str = "a topic"

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("only", {"next": self.now})]

    def describe(self) -> str:
        return self.place


def begins_at(start: Start) -> Any:
    [[item]] = [part.items for part in start.state.values() if part.items]
    return item["position"]


def test_a_source_that_begins_now_is_asked_once_until_the_first_checkpoint(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = starter(store, FromNowOn(now=10))
    assert begins_at(first.begin()) == {"next": 10}

    successor = starter(store, FromNowOn(now=30))
    assert begins_at(successor.begin()) == {"next": 10}, "it was settled when the job first began"
    assert begins_at(successor.begin()) == {"next": 10}
    elsewhere = starter(store, FromNowOn(now=40, place="another topic"))
    assert begins_at(elsewhere.begin()) == {"next": 40}
    anew = starter(store, FromNowOn(now=50, place="another topic"), fresh=True)
    assert begins_at(anew.begin()) == {"next": 50}, "the job was told to forget all it was"

    assert anew._ledger.record is not None
    assert anew._ledger.record.beginnings
    complete(anew._ledger, 1)
    assert not anew._ledger.record.beginnings, "the checkpoint says it"


def complete(ledger: Ledger, checkpoint_id: int) -> None:
    ledger.note_used(CheckpointId(checkpoint_id))
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
            snapshots=(),
        )
    )


def a_life_with_a_damaged_log(store: Store, damage: str) -> None:
    """Three attempts, checkpoints up to 7 with epochs up to 3, one more that failed."""
    for number in (1, 2, 4, 7):
        driver = starter(store)
        driver._ledger.begin_attempt(None, is_anew=True)
        complete(driver._ledger, number)
    store.write(state_path(9, "count", 0, 4, "aggregates"), [b"of a checkpoint that failed"])
    log = Path(store.address) / "log"
    entries = sorted(log.iterdir())
    match damage:
        case "torn":
            entries[-1].write_bytes(entries[-1].read_bytes()[:-20])
        case "empty":
            entries[-1].write_bytes(b"")
        case "all of it":
            for entry in entries:
                entry.write_bytes(b"{}")
        case "gone":
            for entry in entries:
                entry.unlink()


DAMAGE = ["torn", "empty", "all of it", "gone"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_log_is_refused_and_the_way_on_is_named(tmp_path: Path, damage: str) -> None:
    store = open_store(str(tmp_path))
    a_life_with_a_damaged_log(store, damage)

    with pytest.raises(SnapshotDamaged) as refused:
        starter(store).is_finished()

    assert str(tmp_path / "log") in str(refused.value)
    assert "fresh=true (stillframe run --fresh)" in str(refused.value)
    assert ("is missing" if damage == "gone" else "is damaged") in str(refused.value)


@pytest.mark.parametrize("damage", DAMAGE)
def test_fresh_over_a_damaged_log_goes_on_above_every_number_that_a_file_shows(
    tmp_path: Path, damage: str
) -> None:
    store = open_store(str(tmp_path))
    a_life_with_a_damaged_log(store, damage)
    entries = len(store.list("log"))

    fresh = starter(store, fresh=True)
    assert not fresh.is_finished()
    fresh.begin()

    record = fresh._ledger.record
    assert record is not None
    assert record.attempt == 5
    assert fresh._ledger.first_free_id == 10
    assert record.next_epoch >= 4
    assert record.checkpoints == ()
    assert len(store.list("log")) == entries + 1, "what is damaged stays for who wants to look"
    assert [name for name in store.list("") if name.startswith("chk-")] == []
    assert store.list("shared") == []
    complete(fresh._ledger, 10)

    successor = starter(store)
    assert not successor.is_finished()
    assert successor.begin().restored is not None
    assert successor._ledger.attempt == 6


def test_numbers_that_only_the_history_shows_are_not_used_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    a_life_with_a_damaged_log(store, "all of it")
    store.write(attempt_history_path(Attempt(8), "begun"), [b"{}"])
    store.write(checkpoint_history_path(CheckpointId(12), Attempt(6)), [b"{}"])

    fresh = starter(store, fresh=True)
    fresh.is_finished()
    fresh.begin()

    assert fresh._ledger.attempt == 9
    assert fresh._ledger.first_free_id == 13
    assert fresh._ledger.next_epoch >= 12


def test_a_driver_that_went_on_over_a_damaged_log_is_fenced_by_another_that_did(
    tmp_path: Path,
) -> None:
    store = open_store(str(tmp_path))
    a_life_with_a_damaged_log(store, "torn")
    both = [starter(store, fresh=True) for _ in range(2)]
    for driver in both:
        driver.is_finished()

    both[0].begin()
    with pytest.raises(Fenced, match="run only one driver per job"):
        both[1].begin()


def leave_a_checkpoint_of_an_operator_that_is_gone(store: Store) -> None:
    first = starter(store)
    first.begin()
    state = KeyedState("sums", FileHandle("chk-1-1/sums", 1, 1), (0,), 1, "k string")
    manifest = Manifest(
        job="views",
        attempt=first._ledger.attempt,
        checkpoint_id=first._ledger.first_free_id,
        epoch=first._ledger.next_epoch,
        kind="checkpoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=128,
        operators=(OperatorDescription(OperatorUid("old"), "aggregate", "sum by k", 1),),
        snapshots=(OperatorSnapshot(OperatorUid("old"), SubtaskIndex(0), keyed=(state,)),),
        enumerators={OperatorUid("old"): {"state": {}, "is_last": False}},
    )
    first._ledger.note_used(manifest.checkpoint_id)
    first._ledger.complete(manifest)


def test_state_of_an_operator_that_is_gone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_a_checkpoint_of_an_operator_that_is_gone(store)

    with pytest.raises(StartRefused):
        starter(store).begin()


def test_state_of_an_operator_that_is_gone_is_left_out_with_a_warning_if_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path))
    leave_a_checkpoint_of_an_operator_that_is_gone(store)

    with caplog.at_level(logging.WARNING, "stillframe"):
        start = starter(store, allow_non_restored_state=True).begin()

    assert "the state of 'sum by k' (old) is not restored" in caplog.text
    assert {uid for uid, _ in start.state} == {each for each, _ in start.state} - {"old"}
    assert any(part.items for part in start.state.values()), "a new source begins at its beginning"


def test_a_savepoint_that_does_not_fit_is_refused_as_one(tmp_path: Path) -> None:
    manifest = Manifest(
        "",
        Attempt(1),
        CheckpointId(1),
        Epoch(0),
        "savepoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=16,
        operators=(),
        snapshots=(),
    )
    write_savepoint(open_store(str(tmp_path / "sp")), manifest)
    begun = starter(open_store(str(tmp_path / "job")), restore_from=str(tmp_path / "sp"))

    with pytest.raises(StartRefused, match=r"^the savepoint does not fit this job: it has 16 key"):
        begun.begin()
