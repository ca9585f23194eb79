"""Rows in another system, an SQLite file, exactly once: kills, rescales, and while it is away."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
from functools import partial
from random import Random

import pytest
from sqlite_sink import SqliteSink, SqliteSinkOnDriver, rows_in

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted
from stillframe.coordinator.job_log import JobLog
from stillframe.errors import StillframeError
from stillframe.storage.store import open_store
from stillframe.testing.clock import ManualClock


def start(page_views, source, sink=SqliteSink, parallelism=2, **options):
    """Clicks go to the outside, counts to files as ever."""
    outside = str(page_views.home / "outside.db")
    plan = partial(page_views.plan, source, around_clicks=lambda files: sink(outside))
    return page_views.start(plan(parallelism), plan, **options)


def ids_outside(page_views):
    return [id for id, _ in rows_in(str(page_views.home / "outside.db"))]


def prepared_files(page_views):
    return [path.name for path in page_views.home.rglob("prepared/*/*")]


@pytest.mark.slow
@pytest.mark.parametrize("sink", [SqliteSink, SqliteSinkOnDriver])
def test_kills_and_rescales_lose_and_double_nothing_in_another_system(page_views, sink):
    source = ClickSource(records=40_000, records_per_second=4_000, partitions=4)
    running = start(page_views, source, sink, checkpointInterval="100 ms", restartAttempts="100")
    random = Random(11)
    for parallelism in (4, 1, 3, 2):
        running.next_checkpoint()
        if pids := running.query.slot_pids:
            threading.Event().wait(random.random() * 0.3)  # it comes from outside, at any moment
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(pids), signal.SIGKILL)
        with contextlib.suppress(StillframeError):  # a kill may come in its way
            running.query.rescale(parallelism, timeout=90)
    running.finish()

    assert ids_outside(page_views) == list(range(40_000))
    assert prepared_files(page_views) == [], "nothing is left behind"


def test_while_the_other_system_is_away_the_job_goes_on_and_says_what_it_waits_for(
    page_views, until
):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    with contextlib.closing(sqlite3.connect(page_views.home / "outside.db")) as lock:
        lock.execute("create table rows (id integer, key integer)")
        lock.execute("create table marks (writer text primary key, checkpoint integer)")
        lock.commit()
        lock.execute("begin immediate")
        running = start(page_views, source)
        until(lambda: any("tried 2 times to commit" in each for each in running.query.trouble))
        assert "the database is locked" in running.query.trouble[0]
        gate.open()
        running.wait_for_records(4_000)  # records do not wait for it
        lock.rollback()
    running.finish()

    assert ids_outside(page_views) == [*range(2_000), *range(10_000, 12_000)]
    assert not [event for event in running.told if isinstance(event, AttemptFailed)]
    assert running.query.trouble == []


def test_after_a_restart_nothing_newer_is_committed_before_what_was_restored(page_views, until):
    """Its part of one writer may be in the hands of another subtask."""
    source = ClickSource(records=20_000, records_per_second=5_000, partitions=4)
    running = start(page_views, source, checkpointInterval="100 ms", restartAttempts="100")
    running.next_checkpoint()
    with contextlib.closing(sqlite3.connect(page_views.home / "outside.db", timeout=20)) as lock:
        lock.execute("begin immediate")
        until(lambda: bool(running.query.trouble))
        completed = len(completions(running))
        running.kill(0)
        until(lambda: running.query.summary.attempts == 2 and bool(running.query.trouble))

        assert len(completions(running)) == completed, "the restored one comes first"
        lock.rollback()
    running.finish()

    assert ids_outside(page_views) == list(range(20_000))


def test_a_system_that_is_away_while_the_job_restarts_is_a_failure_like_any_other(
    page_views, until
):
    """What the driver commits first, before slots start, cannot be committed then."""
    source = ClickSource(records=20_000, records_per_second=5_000, partitions=4)
    running = start(
        page_views,
        source,
        SqliteSinkOnDriver,
        checkpointInterval="100 ms",
        restartAttempts="100",
        restartDelay="100 ms",
    )
    running.next_checkpoint()
    with contextlib.closing(sqlite3.connect(page_views.home / "outside.db", timeout=20)) as lock:
        lock.execute("begin immediate")
        until(lambda: bool(running.query.trouble))
        running.kill(0)
        until(lambda: any("database is locked" in reason for reason in failures(running)))
        lock.rollback()
    running.finish()

    assert ids_outside(page_views) == list(range(20_000))


def test_the_incarnation_stays_when_the_job_is_started_again_and_is_drawn_again_for_another(
    page_views,
):
    source = ClickSource(records=10_000_000, records_per_second=4_000, partitions=2)
    for _ in range(2):
        running = start(page_views, source)
        running.next_checkpoint()
        running.query.stop()
    assert len(marks(page_views)) == 2, "one of each subtask"

    page_views.location = str(page_views.home / "elsewhere")
    running = start(page_views, source)
    running.next_checkpoint()
    running.query.stop()

    assert len(marks(page_views)) == 4
    incarnations = {writer.partition("/")[0] for writer in marks(page_views)}
    assert incarnations == {
        JobLog(open_store(f"{location}/page-views"), "page-views", ManualClock()).read().incarnation
        for location in (page_views.home / "chk", page_views.home / "elsewhere")
    }


def failures(running):
    return [event.reason for event in running.told if isinstance(event, AttemptFailed)]


def completions(running):
    return [event for event in running.told if isinstance(event, CheckpointCompleted)]


def marks(page_views):
    with contextlib.closing(sqlite3.connect(page_views.home / "outside.db")) as outside:
        return [writer for (writer,) in outside.execute("select writer from marks")]
