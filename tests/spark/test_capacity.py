"""A session on a cluster is there before its executors are; a job waits for them, within bounds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import SparkConf

from stillframe.errors import StartRefused
from stillframe.spark.deployment.capacity import Held, Room, awaited, slots_expected, tasks_active
from stillframe.spark.deployment.checks import refuse_too_few_slots
from stillframe.testing.clock import ManualClock
from stillframe.testing.sources import Gate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still

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


# --- several jobs of one session ------------------------------------------------------------------


def test_what_is_free_is_what_neither_other_jobs_nor_spark_itself_use() -> None:
    room = Room(8, [Held("a", 2, False), Held("b", 3, True)], busy=1)
    assert (room.slots_free, room.slots_now) == (3, 2)
    assert room.fits(2, runs_spark_jobs=True), "one core serves the Spark jobs of all jobs"
    assert not room.fits(3, runs_spark_jobs=False), "the core of b's Spark jobs is not for slots"


def test_a_job_for_which_others_leave_no_room_is_refused_with_their_names() -> None:
    room = Room(4, [Held("a", 2, True), Held("b", 1, True)])
    with pytest.raises(
        StartRefused,
        match=r"needs 3 cores \(2 slots and 1 for Spark jobs\) at the same time, but Spark has 4"
        r" and 'a' holds 2, 'b' holds 1: stop one of these jobs, or give Spark more cores",
    ):
        refuse_too_few_slots(2, False, room)


@pytest.mark.spark
@pytest.mark.slow
def test_jobs_of_one_session_share_its_cores_and_one_too_many_is_refused(
    still: Still, tmp_path: Path
) -> None:
    """Each started with a parallelism of its own would leave no core to foreachBatch of either."""
    epochs: dict[str, threading.Semaphore] = {}

    def start(name: str) -> Query:
        epochs[name] = came = threading.Semaphore(0)

        def count(frame: DataFrame, epoch: int) -> None:
            frame.count()
            came.release()

        clicks = still.readStream.format("clicks").options(recordsPerSecond=1_000).load()
        writer = clicks.writeStream.queryName(name).foreachBatch(count)
        writer = writer.option("checkpointLocation", str(tmp_path / name))
        return writer.option("checkpointInterval", "300 ms").start()

    first, second = start("first"), start("second")
    try:
        assert (first.parallelism, second.parallelism) == (2, 1)
        assert all(epochs[name].acquire(timeout=90) for name in ("first", "second") * 2)
        with pytest.raises(StartRefused, match=r"'first' holds 2, 'second' holds 1: stop one"):
            start("third")
    finally:
        first.stop()
        second.stop()


@pytest.mark.spark
@pytest.mark.slow
def test_a_job_that_waits_for_cores_says_so_and_starts_when_they_are_free(
    still: Still, tmp_path: Path
) -> None:
    """Other Spark jobs come and go, so a job is not refused because of them."""
    gate = Gate(str(tmp_path / "gate"))
    told: queue.Queue[str] = queue.Queue()
    context = still.spark.sparkContext
    busy = threading.Thread(
        target=lambda: context.parallelize(range(4), 4).foreach(lambda _: gate.await_open(200))
    )
    busy.start()
    try:
        while tasks_active(still.spark) < 4:
            threading.Event().wait(0.1)
        clicks = still.readStream.format("clicks").options(records=100).load()
        writer = clicks.writeStream.format("noop").queryName("waits")
        query = writer.option("parallelism", 2).start()
        query.add_listener(lambda event: told.put(str(event)))
        while "waiting for 2 slots" not in (said := told.get(timeout=60)):
            pass
        assert "Spark has 4 cores and 4 of them are busy, but 2 cores are needed" in said
        assert query.status["message"] == said
    finally:
        gate.open()
        busy.join(60)
    assert query.awaitTermination(90)
