"""A job that begins with a snapshot from elsewhere: any savepoint, any checkpoint, owned or not."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.coordinator import claims
from stillframe.coordinator.history import CheckpointCommitted, CheckpointCompleted, SlotsRunning
from stillframe.errors import JobFailed, StorageError

BACKENDS = ["fs", "memory", "rocksdb"]


def refusal_of(running) -> str:
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)
    return str(raised.value)


def contents(place: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def last_counts(page_views) -> dict[str, int]:
    last: dict[str, int] = {}
    for row in pq.read_table(page_views.home / "counts").to_pylist():
        last[row["app_id"]] = max(row["count"], last.get(row["app_id"], 0))
    return last


def truth(source) -> dict[str, int]:
    batches = [item for script in source.scripts for item in script if hasattr(item, "column")]
    return dict(Counter(app for batch in batches for app in batch.column("app_id").to_pylist()))


class Half:
    """A job that has ended after the first half, and the place where another one runs."""

    def __init__(self, page_views, backend: str = "fs", outcome: str = "cancelled") -> None:
        self.gate = page_views.gate("second-half")
        self.source = page_views.halves(self.gate)
        first = page_views.start(
            page_views.plan(self.source),
            checkpointInterval="1 hour",
            stateBackend=backend,
            retainOnCancel="true",
            checkpointsRetained="3",  # the one that follows the savepoint may complete, too
        )
        first.wait_for_records(2_000)
        self.older = first.query.checkpoint()
        self.newest = first.query.checkpoint()
        first.wait(CheckpointCommitted, checkpoint_id=self.newest)
        self.savepoint = Path(first.query.savepoint(str(page_views.home / "savepoint")))
        if outcome == "cancelled":
            first.query.cancel()
        else:
            first.query.stop()
        self.job = Path(page_views.location) / "page-views"
        page_views.home = page_views.home / "elsewhere"
        page_views.home.mkdir()
        page_views.location = str(page_views.home / "chk")

    def checkpoint(self, number: int) -> Path:
        [found] = self.job.glob(f"chk-{number}-*")
        return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parallelism", [2, 3])
def test_another_job_begins_with_a_checkpoint_and_needs_nothing_of_it_later(
    page_views, backend, parallelism
):
    half = Half(page_views, backend, outcome="stopped")
    before = contents(half.job)
    plan = page_views.plan(half.source, parallelism)
    options = {"stateBackend": backend, "checkpointInterval": "1 hour"}

    second = page_views.start(plan, restoreFrom=str(half.checkpoint(half.older)), **options)
    second.wait(SlotsRunning)
    second.query.checkpoint()
    assert contents(half.job) == before, "it is left alone"
    second.query.stop()
    shutil.rmtree(half.job)
    half.gate.open()
    third = page_views.start(plan, **options)
    third.finish()

    assert second.attempts()[0].savepoint == str(half.job / f"chk-{half.older}-1")
    assert third.attempts()[0].restored_from is not None
    assert third.query.summary.records_in == 2_000, "only the second half was read"
    assert last_counts(page_views) == truth(half.source)


def test_the_directory_of_another_job_means_its_newest_checkpoint(page_views):
    half = Half(page_views)

    second = page_views.start(page_views.plan(half.source), restoreFrom=str(half.job))
    second.wait(SlotsRunning)

    assert second.attempts()[0].savepoint == str(half.job / f"chk-{half.newest}-1")


def test_its_own_checkpoint_may_be_named_by_its_path_too(page_views):
    source = page_views.halves(page_views.gate("never"))
    plan = page_views.plan(source)
    first = page_views.start(plan, checkpointInterval="1 hour")
    first.wait_for_records(2_000)
    older, _ = first.query.checkpoint(), first.query.checkpoint()
    first.query.stop()

    path = f"{page_views.location}/page-views/chk-{older}-1"
    second = page_views.start(plan, restoreFrom=path)
    second.wait(SlotsRunning)

    assert second.attempts()[0].restored_from == older
    assert second.attempts()[0].savepoint is None


def test_latest_is_the_newest_of_its_own(page_views):
    plan = page_views.plan(page_views.halves(page_views.gate("never")))
    first = page_views.start(plan, checkpointInterval="1 hour")
    first.wait_for_records(2_000)
    newest = first.query.checkpoint()
    first.query.stop()

    second = page_views.start(plan, restoreFrom="latest")
    second.wait(SlotsRunning)

    assert second.attempts()[0].restored_from == newest


@pytest.mark.parametrize("what", ["savepoint", "checkpoint"])
@pytest.mark.parametrize("backend", ["fs", "rocksdb"])
def test_a_claimed_snapshot_is_deleted_when_there_is_a_checkpoint_and_not_before(
    page_views, what, backend
):
    half = Half(page_views, backend)
    place = half.savepoint if what == "savepoint" else half.checkpoint(half.newest)
    others = contents(half.checkpoint(half.older))
    plan = page_views.plan(half.source)
    options = {"stateBackend": backend, "restoreFrom": str(place), "restoreMode": "claim"}
    second = page_views.start(plan, checkpointInterval="1 hour", **options)
    second.wait(SlotsRunning)
    before = contents(place)
    second.kill(slot=0)
    second.wait(SlotsRunning, attempt=2)
    assert contents(place) == before, "it is still needed"

    second.query.checkpoint()
    second.query.stop()

    assert not place.exists()
    assert contents(half.checkpoint(half.older)) == others
    half.gate.open()
    third = page_views.start(plan, stateBackend=backend)
    third.finish()
    assert last_counts(page_views) == truth(half.source)
    if what == "checkpoint":
        move(page_views)
        older = str(half.checkpoint(half.older))
        page_views.start(page_views.plan(half.source), restoreFrom=older).finish()
        assert last_counts(page_views) == truth(half.source), "the other checkpoint is whole"


def move(page_views) -> None:
    page_views.home = page_views.home / "once-more"
    page_views.home.mkdir()
    page_views.location = str(page_views.home / "chk")


def test_a_claim_outlives_the_driver_that_made_it(page_views, monkeypatch):
    half = Half(page_views)
    plan = page_views.plan(half.source)
    options = {"restoreFrom": str(half.savepoint), "restoreMode": "claim"}
    second = page_views.start(plan, checkpointInterval="1 hour", **options)
    second.wait(SlotsRunning)
    with monkeypatch.context() as dying:

        def die(*_):
            raise StorageError("the driver dies here")

        dying.setattr(claims, "_delete", die)
        second.query.checkpoint()
        second.query.stop()
    assert half.savepoint.exists()

    third = page_views.start(plan)
    third.wait(SlotsRunning)

    assert not half.savepoint.exists(), "though nobody speaks of it any more"


def test_a_claim_is_on_the_snapshot_and_not_on_its_directory(page_views, monkeypatch):
    half = Half(page_views)
    plan = page_views.plan(half.source)
    options = {"restoreFrom": str(half.savepoint), "restoreMode": "claim"}
    second = page_views.start(plan, checkpointInterval="1 hour", **options)
    second.wait(SlotsRunning)
    shutil.rmtree(half.savepoint)
    second.query.savepoint(str(half.savepoint))
    second.wait(CheckpointCompleted)
    second.query.checkpoint()
    second.query.stop()

    assert (half.savepoint / "_metadata").exists(), "another one was put in its place"


def test_a_job_that_was_stopped_with_a_savepoint_begins_anew_with_it_and_is_exact(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    plan = page_views.plan(source)
    first = page_views.start(plan)
    first.wait_for_records(2_000)
    savepoint = str(page_views.home / "savepoint")
    first.query.stop(savepoint=savepoint)
    gate.open()

    page_views.start(plan, restoreFrom=savepoint, fresh="true").finish()

    page_views.check_exactly_once(source)


def test_a_slot_that_dies_does_not_ask_again_where_the_job_began(page_views):
    half = Half(page_views)
    running = page_views.start(page_views.plan(half.source), restoreFrom=str(half.savepoint))
    completed = running.wait(CheckpointCompleted)
    running.kill(slot=0, attempt=completed.attempt)
    half.gate.open()
    running.finish()

    assert [started.savepoint is None for started in running.attempts()] == [False, True]
    assert last_counts(page_views) == truth(half.source)


def test_a_checkpoint_of_a_job_that_may_go_on_is_not_claimed(page_views):
    half = Half(page_views, outcome="stopped")
    before = contents(half.job)

    running = page_views.start(
        page_views.plan(half.source), restoreFrom=str(half.job), restoreMode="claim"
    )

    assert "the log of its job says that it may go on" in refusal_of(running)
    assert contents(half.job) == before


def test_a_job_that_begins_anew_with_a_savepoint_leaves_its_own_checkpoints_behind(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    plan = page_views.plan(source)
    first = page_views.start(plan, checkpointInterval="1 hour")
    first.wait_for_records(2_000)
    savepoint = first.query.savepoint(str(page_views.home / "savepoint"))
    first.wait(CheckpointCommitted, checkpoint_id=first.query.checkpoint())
    first.query.stop()
    gate.open()

    before = contents(Path(page_views.location))
    refused = page_views.start(plan, restoreFrom=savepoint)
    assert f"of its own, so it does not start from {savepoint}" in refusal_of(refused)
    assert (refused.attempts(), contents(Path(page_views.location))) == ([], before)
    anew = page_views.start(plan, restoreFrom=savepoint, fresh="true")
    anew.wait(SlotsRunning)

    assert (anew.attempts()[0].savepoint, anew.attempts()[0].restored_from) == (savepoint, None)
    anew.finish()
    assert last_counts(page_views) == truth(source)
