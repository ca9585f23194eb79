"""A job that is cancelled: what is left of it, and how it is started again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.coordinator.history import CheckpointCommitted, SlotsRunning
from stillframe.coordinator.ledger import Ledger
from stillframe.errors import JobFailed, StillframeError, StorageError
from stillframe.testing.sources import Fail, ScriptedSource


def refusal_of(running) -> str:
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)
    return str(raised.value)


def kept_files(page_views) -> list[str]:
    """What the job has of checkpoints and their files."""
    job = Path(page_views.location) / "page-views"
    return sorted(
        str(file.relative_to(job))
        for place in ("chk-*/*", "shared/*/*")
        for file in job.glob(place)
    )


def clicks_of(page_views) -> Counter:
    return Counter(pq.read_table(page_views.home / "clicks")["id"].to_pylist())


def running_after_half(page_views, source, **options):
    """A job that has committed the first half, in a checkpoint."""
    running = page_views.start(page_views.plan(source), checkpointInterval="1 hour", **options)
    running.wait_for_records(2_000)
    running.query.checkpoint()
    running.wait(CheckpointCommitted)
    return running


@pytest.mark.parametrize("backend", ["fs", "rocksdb"])
def test_a_cancelled_job_leaves_its_output_its_savepoints_and_its_log_and_nothing_else(
    page_views, backend
):
    source = page_views.halves(page_views.gate("never"))
    running = running_after_half(page_views, source, stateBackend=backend)
    savepoint = Path(running.query.savepoint(str(page_views.home / "savepoint")))
    before = sorted(savepoint.rglob("*"))

    running.query.cancel()

    assert running.query.summary.outcome == "cancelled"
    assert running.query.exception() is None
    assert kept_files(page_views) == []
    assert list((Path(page_views.location) / "page-views" / "log").iterdir())
    assert sorted(savepoint.rglob("*")) == before
    assert page_views.clicks_visible() == 2_000


def test_started_again_it_says_what_to_do_and_changes_nothing(page_views):
    source = page_views.halves(page_views.gate("never"))
    running_after_half(page_views, source).query.cancel()
    log = Path(page_views.location) / "page-views" / "log"
    before = sorted(log.iterdir())

    again = page_views.start(page_views.plan(source))

    sentence = refusal_of(again)
    assert "it was cancelled and its checkpoints deleted" in sentence
    assert "fresh=true" in sentence
    assert again.attempts() == []
    assert sorted(log.iterdir()) == before
    assert page_views.clicks_visible() == 2_000


def test_begun_anew_it_reads_all_once_more_beside_what_was_committed(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = running_after_half(page_views, source)
    last = first.query.checkpoint()
    first.query.cancel()
    old = set(page_views.published("clicks"))
    gate.open()

    anew = page_views.start(page_views.plan(source), fresh="true")
    anew.wait(CheckpointCommitted)
    anew.finish()

    [started] = anew.attempts()
    assert (started.attempt, started.restored_from) == (2, None)
    numbers = [completed.checkpoint_id for completed in anew.query.checkpoints]
    assert min(numbers) > last, "no number is used twice"
    assert anew.query.checkpoints[0].epoch == len(first.query.checkpoints)
    assert anew.query.summary.records_in == 4_000
    assert old <= set(page_views.published("clicks")), "what was committed stays"
    twice = {i for i, times in clicks_of(page_views).items() if times == 2}
    assert len(twice) == 2_000, "the first half, of both lives"


def test_a_restart_in_its_new_life_goes_on_in_it(page_views):
    """It was asked to begin anew now, and not for every restart."""
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running_after_half(page_views, source).query.cancel()
    anew = page_views.start(page_views.plan(source), fresh="true", checkpointInterval="1 hour")
    anew.wait(SlotsRunning)
    anew.kill(slot=0, attempt=2)
    anew.wait(SlotsRunning, attempt=3)
    anew.wait_for_records(2_000)
    own = anew.query.checkpoint()
    anew.kill(slot=1, attempt=3)
    anew.wait(SlotsRunning, attempt=4)
    gate.open()
    anew.finish()

    assert [each.restored_from for each in anew.attempts()] == [None, None, own]
    assert Counter(clicks_of(page_views).values()) == {2: 2_000, 1: 2_000}


def test_a_job_that_keeps_its_checkpoints_goes_on_from_the_newest(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = running_after_half(page_views, source, retainOnCancel="true")
    last = first.query.checkpoint()
    first.query.cancel()
    assert first.query.summary.outcome == "cancelled"
    assert kept_files(page_views)
    gate.open()

    again = page_views.start(page_views.plan(source))
    again.finish()

    assert again.attempts()[0].restored_from == last
    page_views.check_exactly_once(source)


def test_a_cancelled_job_starts_from_a_savepoint_also_if_it_has_checkpoints(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = running_after_half(page_views, source, retainOnCancel="true")
    savepoint = first.query.savepoint(str(page_views.home / "savepoint"))
    first.query.cancel()
    gate.open()

    again = page_views.start(page_views.plan(source), restoreFrom=savepoint)
    again.finish()

    [started] = again.attempts()
    assert (started.restored_from, started.savepoint) == (None, savepoint)
    page_views.check_exactly_once(source)


def test_a_finished_job_begins_anew_if_a_person_wants_it(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)
    page_views.start(page_views.plan(source)).finish()

    page_views.start(page_views.plan(source)).finish()
    assert page_views.clicks_visible() == 4_000, "without that it is finished and stays so"
    page_views.start(page_views.plan(source), fresh="true").finish()

    assert Counter(clicks_of(page_views).values()) == {2: 4_000}


def test_a_job_is_cancelled_while_it_waits_to_be_restarted(page_views, until):
    source = ScriptedSource(
        page_views.batch(0).schema, ((page_views.batch(0), Fail(OSError("the cable is out"))),)
    )
    running = page_views.start(page_views.plan(source), restartDelay="1 hour")
    until(lambda: any("the cable is out" in str(event) for event in running.told))

    running.query.cancel()

    assert running.query.summary.outcome == "cancelled"
    assert "it was cancelled" in refusal_of(page_views.start(page_views.plan(source)))


def test_a_driver_that_dies_before_it_has_deleted_anything_is_followed_by_a_refusal(
    page_views, monkeypatch
):
    """The log entry comes first: nothing that is half deleted is ever restored."""
    source = page_views.halves(page_views.gate("never"))
    running = running_after_half(page_views, source)
    with monkeypatch.context() as dying:

        def die(*_):
            raise StorageError("the driver dies here")

        dying.setattr(Ledger, "sweep", die)
        with pytest.raises(JobFailed, match="the driver dies here"):
            running.query.cancel()
    assert kept_files(page_views)

    again = page_views.start(page_views.plan(source))

    assert "it was cancelled and its checkpoints deleted" in refusal_of(again)
    assert kept_files(page_views) == [], "what the first one left is swept"


def test_a_job_that_has_ended_cannot_be_cancelled_and_says_so(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = running_after_half(page_views, source)
    running.query.stop()

    with pytest.raises(StillframeError, match="has stopped before it could be cancelled"):
        running.query.cancel()

    assert kept_files(page_views)


def test_a_job_without_a_place_for_checkpoints_is_cancelled_like_any_other(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(
        page_views.plan(source), checkpointLocation=None, checkpointInterval=None
    )
    running.wait(SlotsRunning)

    running.query.cancel()

    assert running.query.summary.outcome == "cancelled"
