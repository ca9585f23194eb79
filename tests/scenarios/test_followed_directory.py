"""A directory that is followed: files come while the job runs, and each is read once."""

import os
from collections import Counter

import pyarrow.parquet as pq
import pytest

from stillframe.connectors.cleaning import Cleaning
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.files import Following
from stillframe.connectors.parquet import ParquetSource
from stillframe.coordinator.history import AttemptFailed, AttemptStarted, CheckpointCommitted

ROWS = 100
WAIT_SECONDS_MAX = 60.0


class Directory:
    """Files of a hundred clicks each, put in place whole, as a good writer does."""

    def __init__(self, page_views):
        self.page_views = page_views
        self.home = page_views.home / "incoming"
        self.home.mkdir()
        self.files = 0
        self.following = Following(0.05)

    def source(self):
        schema = self.page_views.batch(0).schema
        return ParquetSource(str(self.home), schema, self.following)

    def put(self, files=1):
        for _ in range(files):
            batch = self.page_views.batch(self.files * ROWS, ROWS)
            hidden = self.home / f".f{self.files}.parquet"
            with pq.ParquetWriter(hidden, batch.schema) as writer:
                writer.write_batch(batch)
            os.rename(hidden, self.home / f"f{self.files}.parquet")
            self.files += 1

    def check_each_row_is_there_once(self):
        ids = Counter(pq.read_table(self.page_views.home / "clicks")["id"].to_pylist())
        assert ids == Counter(range(self.files * ROWS))
        told = Counter()
        for row in pq.read_table(self.page_views.home / "counts").to_pylist():
            told[row["app_id"]] = max(told[row["app_id"]], row["count"])
        assert told == Counter(f"app-{i % 17}" for i in range(self.files * ROWS))


def start(page_views, directory):
    return page_views.start(page_views.plan(directory.source()))


def read_what_is_there(page_views, directory, parallelism=2, **options):
    """Run the job once, as `trigger(availableNow=True)` does."""
    plan = page_views.plan(directory.source(), parallelism)
    running = page_views.start(plan, available_now=True, **options)
    assert running.query.awaitTermination(WAIT_SECONDS_MAX)
    assert running.query.summary.outcome == "stopped"
    return running


def see_all(page_views, directory, running, until):
    """Wait until every row of every file can be seen, and one more checkpoint has added nothing."""
    until(lambda: page_views.clicks_visible() >= directory.files * ROWS)
    running.query.processAllAvailable()
    directory.check_each_row_is_there_once()


def test_files_that_come_while_the_job_runs_are_read_once(page_views, until):
    directory = Directory(page_views)
    directory.put(3)
    running = start(page_views, directory)
    see_all(page_views, directory, running, until)
    directory.put(2)
    see_all(page_views, directory, running, until)
    running.query.stop()

    directory.check_each_row_is_there_once()
    assert running.query.summary.outcome == "stopped"


def test_a_directory_may_be_empty_when_the_job_starts(page_views, until):
    directory = Directory(page_views)
    running = start(page_views, directory)
    running.wait(CheckpointCommitted)
    directory.put()

    see_all(page_views, directory, running, until)


def test_a_kill_neither_loses_nor_doubles_a_file_that_was_found(page_views, until):
    directory = Directory(page_views)
    directory.put(5)
    running = start(page_views, directory)
    for attempt in (1, 2, 3):
        until(lambda: page_views.clicks_visible() >= 100)
        directory.put(5)
        running.kill(slot=attempt % 2, attempt=attempt)
        running.wait(AttemptStarted, attempt=attempt + 1)
        directory.put(2)

    see_all(page_views, directory, running, until)
    assert running.attempts()[-1].restored_from is not None


def test_a_job_that_is_started_again_reads_only_what_has_come_since(page_views, until):
    directory = Directory(page_views)
    directory.put(4)
    first = start(page_views, directory)
    see_all(page_views, directory, first, until)
    first.query.stop()
    directory.put(3)
    second = page_views.start(page_views.plan(directory.source(), parallelism=3))
    see_all(page_views, directory, second, until)

    assert second.job.history.records_of_attempt().records_in == 3 * ROWS


def test_what_an_enumerator_raises_ends_the_job_with_a_sentence(page_views):
    directory = Directory(page_views)
    running = start(page_views, directory)
    running.wait(CheckpointCommitted)
    partition = directory.home / "day=1"
    partition.mkdir()
    (partition / "a").write_text("x")

    failed = running.wait(AttemptFailed)
    assert "partition column day, which is not declared" in failed.reason
    running.job.join(20)
    assert running.query.exception() is not None


# --- a job that stops when it has read what was there ---


@pytest.mark.parametrize("interval", ["200 ms", None])
def test_night_after_night_a_job_reads_what_has_come_and_stops(page_views, interval):
    directory = Directory(page_views)
    for night, files in enumerate([3, 0, 2]):
        directory.put(files)
        running = read_what_is_there(
            page_views, directory, parallelism=1 + night % 2, checkpointInterval=interval
        )
        assert running.job.history.records_of_attempt().records_in == files * ROWS

    directory.check_each_row_is_there_once()


def test_a_kill_in_the_night_neither_loses_nor_doubles_a_row(page_views, until):
    directory = Directory(page_views)
    directory.put(40)
    plan = page_views.plan(directory.source())
    running = page_views.start(plan, available_now=True, checkpointInterval="20 ms")
    until(lambda: page_views.clicks_visible() >= 100 or not running.job.is_alive())
    running.kill(slot=0)
    assert running.query.awaitTermination(WAIT_SECONDS_MAX)
    directory.put(3)
    read_what_is_there(page_views, directory)

    directory.check_each_row_is_there_once()


def test_what_comes_after_the_start_is_left_for_the_next_one(page_views):
    directory = Directory(page_views)
    directory.put(1)
    read_what_is_there(page_views, directory)
    directory.put(1)
    assert page_views.clicks_visible() == ROWS
    read_what_is_there(page_views, directory)

    directory.check_each_row_is_there_once()


def test_a_job_that_kept_nothing_ends_with_what_was_there(page_views):
    directory = Directory(page_views)
    directory.put(2)
    plan = page_views.plan(directory.source(), around_clicks=lambda sink: DiscardSink())
    running = page_views.start(
        plan, available_now=True, checkpointLocation=None, checkpointInterval=None
    )
    assert running.query.awaitTermination(WAIT_SECONDS_MAX)

    assert running.query.summary.outcome == "finished"
    assert running.job.history.records_of_attempt().records_in == 2 * ROWS


def test_files_that_were_read_are_archived_when_a_checkpoint_is_complete(page_views, until):
    directory = Directory(page_views)
    archive = page_views.home / "archive"
    directory.following = Following(0.05, cleaning=Cleaning(str(archive)))
    directory.put(3)
    running = start(page_views, directory)
    see_all(page_views, directory, running, until)
    running.kill(slot=0)
    directory.put(2)
    see_all(page_views, directory, running, until)
    until(lambda: not list(directory.home.glob("*.parquet")))
    running.query.stop()

    assert sorted(file.name for file in archive.rglob("*.parquet")) == [
        f"f{number}.parquet" for number in range(5)
    ]
