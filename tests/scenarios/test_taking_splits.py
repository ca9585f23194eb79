"""One reader for all endless partitions of a subtask, which come while the job runs."""

from collections import Counter
from functools import partial

import pyarrow.parquet as pq
import pytest
from partition_logs import Logs

from stillframe.coordinator.history import AttemptStarted, SlotsRunning

WAIT_SECONDS_MAX = 60.0


@pytest.fixture
def logs(page_views):
    return Logs(page_views.home / "logs")


def start(page_views, logs, parallelism=2, **options):
    plan = partial(page_views.plan, logs.source())
    return page_views.start(plan(parallelism), plan, **options)


def see_all(page_views, logs, running, until):
    until(lambda: page_views.clicks_visible() >= logs.written)
    running.query.processAllAvailable()
    check_each_is_there_once(page_views, logs)


def check_each_is_there_once(page_views, logs):
    ids = Counter(pq.read_table(page_views.home / "clicks")["id"].to_pylist())
    assert ids == Counter(range(logs.written))
    told = Counter()
    for row in pq.read_table(page_views.home / "counts").to_pylist():
        told[row["app_id"]] = max(told[row["app_id"]], row["count"])
    assert told == Counter(f"app-{i % 17}" for i in range(logs.written))


def test_partitions_that_never_end_and_come_while_the_job_runs_are_read_once_through_kills(
    page_views, logs, until
):
    for name in "abc":
        logs.append(name, 1_000)
    running = start(page_views, logs)
    for attempt, new in ((1, "de"), (2, "f"), (3, "g")):
        seen = page_views.clicks_visible()
        until(lambda seen=seen: page_views.clicks_visible() > seen)
        for name in "abc" + new:
            logs.append(name, 700)
        running.kill(slot=attempt % 2, attempt=attempt)
        running.wait(AttemptStarted, attempt=attempt + 1)
        logs.append(f"after-{attempt}", 300)

    see_all(page_views, logs, running, until)
    assert running.attempts()[-1].restored_from is not None


def test_a_rescale_hands_them_to_other_readers_at_their_positions(page_views, logs, until):
    for name in "abcd":
        logs.append(name, 1_000)
    running = start(page_views, logs)
    for parallelism in (4, 1, 3):
        until(lambda: page_views.clicks_visible() > 0)
        logs.append("a", 500)
        running.query.rescale(parallelism)
        logs.append(f"new-{parallelism}", 500)
        attempt = len(running.attempts())
        running.kill(slot=0, attempt=attempt)
        logs.append("b", 500)
        running.wait(SlotsRunning, attempt=attempt + 1)

    see_all(page_views, logs, running, until)


def test_night_after_night_a_job_reads_to_where_they_end_now_and_stops(page_views, logs):
    for night, names in enumerate(["ab", "", "bc", "a"]):
        for name in names:
            logs.append(name, 1_000)
        plan = page_views.plan(logs.source(), parallelism=1 + night % 2)
        running = page_views.start(plan, available_now=True)
        assert running.query.awaitTermination(WAIT_SECONDS_MAX)
        assert running.query.summary.outcome == "stopped"
        read = running.job.history.records_of_attempt().records_in
        assert read == len(names) * 1_000

    check_each_is_there_once(page_views, logs)
