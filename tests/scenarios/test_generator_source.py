"""A source from a Python generator under kills and with another parallelism."""

from collections import Counter
from functools import partial

import pyarrow.parquet as pq
from generated_clicks import ROWS, SPLITS, click_source

from stillframe import from_generator
from stillframe.coordinator.history import AttemptFailed, SlotsRunning


def check_each_is_there_once(page_views):
    ids = Counter(pq.read_table(page_views.home / "clicks")["id"].to_pylist())
    assert ids == Counter(range(len(SPLITS) * ROWS))


def test_kills_and_a_rescale_neither_lose_nor_double_a_row(page_views, until):
    plan = partial(page_views.plan, click_source())
    running = page_views.start(plan(2), plan, checkpointInterval="30 ms")
    for attempt in (1, 2):
        running.wait(SlotsRunning, attempt=attempt)
        seen = page_views.clicks_visible()
        until(lambda seen=seen: page_views.clicks_visible() > seen or not running.job.is_alive())
        running.kill(slot=attempt % 2, attempt=attempt)
    running.wait(SlotsRunning, attempt=3)
    running.query.rescale(3)
    running.finish()

    check_each_is_there_once(page_views)


def never_json(position):
    yield (1, "app"), {1, 2}
    while True:
        yield None


def test_a_position_that_is_no_json_ends_the_job_with_a_sentence(page_views):
    source = from_generator(never_json, "id long, app_id string")
    running = page_views.start(page_views.plan(source))
    failed = running.wait(AttemptFailed)

    assert failed.reason == (
        "source generator never_json: the position of split 'generator' is not JSON (Object of type"
        " set is not JSON serializable): use texts, numbers, booleans, None, lists and dicts"
    )
    assert failed.restart_seconds is None
