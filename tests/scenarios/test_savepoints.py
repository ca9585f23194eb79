"""A job that starts from a savepoint: once, without changing it, and never again."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.coordinator.history import CheckpointCommitted, CheckpointCompleted, SlotsRunning
from stillframe.coordinator.located import locate, write_savepoint
from stillframe.protocol.savepoints import as_savepoint
from stillframe.runtime.stored_states import copied
from stillframe.storage.store import open_store


def savepoint_of(job: str, directory: Path) -> str:
    found = locate(job)
    store, names = open_store(str(directory)), count()
    manifest = as_savepoint(found.manifest)
    made = copied(found.store, manifest, store, lambda: f"state/{next(names)}.arrow")
    write_savepoint(store, made)
    return store.address


def contents(directory: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path(directory).rglob("*") if p.is_file()}


@pytest.fixture
def half(page_views):
    """A savepoint after the first half of the clicks, and the job moved to another place."""
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    first.wait_for_records(2_000)
    first.query.checkpoint()
    first.wait(CheckpointCommitted)
    first.query.stop()
    savepoint = savepoint_of(f"{page_views.location}/page-views", page_views.home / "savepoint")
    page_views.home = page_views.home / "elsewhere"
    page_views.home.mkdir()
    page_views.location = str(page_views.home / "chk")
    return gate, source, savepoint


def last_counts(page_views) -> dict[str, int]:
    last: dict[str, int] = {}
    for row in pq.read_table(page_views.home / "counts").to_pylist():
        last[row["app_id"]] = max(row["count"], last.get(row["app_id"], 0))
    return last


def truth(source) -> dict[str, int]:
    batches = [item for script in source.scripts for item in script if hasattr(item, "column")]
    return dict(Counter(app for batch in batches for app in batch.column("app_id").to_pylist()))


@pytest.mark.parametrize("parallelism", [2, 1])
def test_a_job_goes_on_from_a_savepoint_and_leaves_it_as_it_was(page_views, half, parallelism):
    gate, source, savepoint = half
    before = contents(savepoint)
    gate.open()

    second = page_views.start(page_views.plan(source, parallelism), restoreFrom=savepoint)
    second.finish()

    assert second.query.summary.records_in == 2_000, "only the second half was read"
    assert last_counts(page_views) == truth(source), "and counted on top of the first"
    assert contents(savepoint) == before
    assert f"starts from the savepoint {savepoint}" in str(second.attempts()[0])


def test_it_is_begun_from_again_until_the_job_has_a_checkpoint_of_its_own(page_views, half):
    gate, source, savepoint = half
    plan = page_views.plan(source)
    first = page_views.start(plan, restoreFrom=savepoint, checkpointInterval="1 hour")
    first.wait(SlotsRunning, attempt=1)
    first.kill(slot=0)
    first.wait(SlotsRunning, attempt=2)
    first.query.checkpoint()
    own = first.wait(CheckpointCompleted).checkpoint_id
    first.kill(slot=1, attempt=2)
    first.wait(SlotsRunning, attempt=3)
    first.query.stop()

    gate.open()
    again = page_views.start(plan)
    again.finish()

    began = [(each.savepoint, each.restored_from) for each in first.attempts()]
    assert began == [(savepoint, None), (savepoint, None), (None, own)]
    assert [each.restored_from for each in again.attempts()] == [own]
    assert last_counts(page_views) == truth(source)


def test_its_first_checkpoint_needs_nothing_of_the_savepoint(page_views, half):
    gate, source, savepoint = half
    first = page_views.start(page_views.plan(source), restoreFrom=savepoint)
    first.wait(CheckpointCompleted)
    first.query.stop()
    for path in contents(savepoint):
        Path(path).unlink()

    gate.open()
    second = page_views.start(page_views.plan(source))
    second.finish()

    assert last_counts(page_views) == truth(source)


def test_a_savepoint_with_a_damaged_file_fails_the_job_at_once_and_names_it(page_views, half):
    _, source, savepoint = half
    damaged = sorted(Path(savepoint, "state").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

    running = page_views.start(page_views.plan(source), restoreFrom=savepoint)
    running.job.join(90)

    sentence = str(running.query.exception())
    assert f"the savepoint {savepoint} is damaged" in sentence
    assert damaged.name in sentence


def test_a_place_without_a_savepoint_is_refused(page_views, half):
    _, source, savepoint = half
    Path(savepoint, "_metadata").unlink()

    running = page_views.start(page_views.plan(source), restoreFrom=savepoint)
    running.job.join(90)

    assert "holds neither a job log nor a savepoint" in str(running.query.exception())
