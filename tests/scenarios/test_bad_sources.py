"""Sources that break their contract: the job ends, with a sentence that names source and split."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from partition_logs import LogSource

from stillframe import JobFailed, Split
from stillframe.coordinator.history import AttemptFailed


@dataclass(frozen=True)
class Broken(LogSource):
    """Its first splits, or its reader's items, are wrong."""

    first: tuple[Split, ...] = ()
    items: tuple[object, ...] = ()

    discovery_interval_seconds = None

    def splits(self, parallelism):
        return list(self.first)

    def open(self, splits, context):
        reader = super().open((), context)
        items = iter(self.items if splits else ())
        reader.read = lambda: items
        return reader


def failure_of(page_views, source):
    running = page_views.start(page_views.plan(source, parallelism=1))
    running.job.join(60)
    assert running.query.summary.outcome == "failed"
    return running, str(running.query.exception())


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (Split("a", {"at": {1}}), "the position of split 'a' is not JSON (Object of type set"),
        (Split("a", {"at": (1,)}), "the position of split 'a' reads back from JSON as another"),
        (Split("a", {"at": "x" * 2_000_000}), "the position of split 'a' takes 2000010 bytes"),
        (Split(7, {}), "a split has the id 7: give it a text"),
    ],
)
def test_a_bad_first_split_ends_the_job_before_a_slot_runs(page_views, split, says):
    source = Broken(str(page_views.home), first=(split,))
    running, said = failure_of(page_views, source)

    assert f"source logs {page_views.home}: {says}" in said
    assert not running.attempts()


def test_an_error_of_splits_is_told_as_one_of_the_source(page_views):
    source = Broken(str(page_views.home), first=None)
    running, said = failure_of(page_views, source)

    assert f"source logs {page_views.home} raised TypeError: 'NoneType' object is not iter" in said
    assert not running.attempts()


def test_a_reader_that_yields_what_it_was_not_given_ends_the_job(page_views):
    first, other = Split("a", {"offset": 0}), Split("b", {"offset": 0})
    source = Broken(str(page_views.home), first=(first,), items=((other, page_views.batch(0)),))
    running, said = failure_of(page_views, source)

    assert "yielded split 'b', which it was not given" in said
    failed = [event for event in running.told if isinstance(event, AttemptFailed)][-1]
    assert failed.restart_seconds is None
    assert isinstance(running.query.exception(), JobFailed)
