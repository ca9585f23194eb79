"""A session on a cluster is there before its executors are; a job waits for them, within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark import SparkConf

from stillframe.spark.capacity import awaited, slots_expected
from stillframe.testing.clock import ManualClock

PATIENCE_SECONDS = 30.0


def slots_at(clock: ManualClock, *arrivals: tuple[float, int]) -> Callable[[], int]:
    """A cluster on which so many slots there are from each of these moments on."""
    began = clock.monotonic_seconds()

    def now() -> int:
        here = [0, *(slots for at, slots in arrivals if clock.monotonic_seconds() - began >= at)]
        return here[-1]

    return now


def wait(expected: int | None, *arrivals: tuple[float, int]) -> tuple[int, float]:
    """How many slots were found, and after how long."""
    clock = ManualClock()
    began = clock.monotonic_seconds()
    cluster = slots_at(clock, *arrivals)
    found = awaited(cluster, expected, PATIENCE_SECONDS, clock, clock.advance)
    return found, clock.monotonic_seconds() - began


def test_a_job_that_fits_does_not_wait() -> None:
    assert wait(4, (0, 8)) == (8, 0)


def test_a_job_waits_for_the_last_executor_it_needs_and_for_no_more() -> None:
    found, after = wait(4, (1, 2), (9, 4), (20, 6))
    assert (found, round(after)) == (4, 9)


def test_patience_ends_and_the_job_is_told_what_there_is() -> None:
    found, after = wait(4, (1, 2))
    assert (found, round(after)) == (2, 30)


def test_where_nobody_knows_how_many_will_come_it_waits_until_no_more_do() -> None:
    found, after = wait(None, (5, 2), (6, 4))
    assert (found, round(after)) == (4, 8)


def test_where_none_ever_comes_patience_ends_too() -> None:
    found, after = wait(None)
    assert (found, round(after)) == (0, 30)


@pytest.mark.parametrize(
    ("settings", "needed", "expected"),
    [
        ({}, 3, 3),
        ({}, None, None),
        ({"spark.cores.max": "8"}, None, 8),
        ({"spark.cores.max": "8", "spark.task.cpus": "2"}, None, 4),
        ({"spark.executor.instances": "3", "spark.executor.cores": "2"}, None, 6),
        ({"spark.executor.instances": "3"}, None, 3),
        # What will never be there is not waited for: the job is refused at once.
        ({"spark.cores.max": "2"}, 3, 2),
        ({"spark.executor.instances": "9"}, 3, 3),
    ],
)
def test_what_is_worth_waiting_for(
    settings: dict[str, str], needed: int | None, expected: int | None
) -> None:
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    assert slots_expected(conf, needed) == expected
