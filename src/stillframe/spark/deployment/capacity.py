"""How many slots a session has room for, once the executors that are on their way are there, and
how much of that is taken.

A session on a cluster answers as soon as its master has heard of it, which is before its executors
have come: a job that looked at once would find room for none of its slots. Spark's own jobs wait in
a queue then; a barrier stage that does not fit is refused, so waiting is up to us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import SparkConf
from pyspark.sql import SparkSession

from stillframe.clock import Clock, SystemClock

_PATIENCE = "spark.scheduler.maxRegisteredResourcesWaitingTime"
"""How long Spark itself waits for executors, where it is told to."""
_LOOK_SECONDS = 0.1
_SETTLED_SECONDS = 2.0

Pause = Callable[[float], None]


def slots_max(spark: SparkSession) -> int:
    """How many tasks can run at the same time on what Spark has now."""
    context = spark.sparkContext._jsc.sc()
    profile = context.resourceProfileManager().defaultResourceProfile()
    return int(context.maxNumConcurrentTasks(profile))


@dataclass(frozen=True, slots=True)
class Held:
    """What a running job of this session needs for as long as it runs."""

    job: str
    slots: int
    runs_spark_jobs: bool
    """Whether it also starts Spark jobs on the driver, such as those of foreachBatch."""


@dataclass(frozen=True, slots=True)
class Room:
    """The cores of a session. One of them is enough for the Spark jobs of all its jobs: they come
    and go. The slots of a job stay."""

    total: int
    held: Sequence[Held] = ()
    """By the other jobs."""
    busy: int = 0
    """With tasks of Spark that are no job's slots; they end by themselves."""

    @property
    def slots_free(self) -> int:
        """How many cores no other job's slots have."""
        return self.total - sum(each.slots for each in self.held)

    @property
    def slots_now(self) -> int:
        """Those of them that Spark does not use at the moment."""
        return max(0, self.slots_free - self.busy)

    def beside(self, runs_spark_jobs: bool) -> int:
        """How many cores are kept for Spark jobs, if this job runs some or does not."""
        return int(runs_spark_jobs or any(each.runs_spark_jobs for each in self.held))

    def fits(self, slots: int, runs_spark_jobs: bool) -> bool:
        return slots + self.beside(runs_spark_jobs) <= self.slots_free


def tasks_active(spark: SparkSession) -> int:
    """How many tasks run now, slots among them."""
    tracker = spark.sparkContext.statusTracker()
    stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def shortage(spark: SparkSession, cores_needed: int) -> str | None:
    """Why tasks that need so many free cores at the same time have to wait; None: they need not."""
    total, active = slots_max(spark), tasks_active(spark)
    if total - active >= cores_needed:
        return None
    return (
        f"Spark has {_cores(total)} and {active} of them {'is' if active == 1 else 'are'} busy, but"
        f" {_cores(cores_needed)} {'is' if cores_needed == 1 else 'are'} needed: wait until other"
        " Spark jobs of this application end, or give Spark more cores"
    )


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def is_local(spark: SparkSession) -> bool:
    master = str(spark.sparkContext.master)
    return master == "local" or master.startswith("local[")


def slots_soon(spark: SparkSession, needed: int | None) -> int:
    """As `slots_max`, when there are as many as `needed`, or as the session has asked its cluster
    for; or when Spark itself would wait no longer."""
    if is_local(spark):
        return slots_max(spark)
    conf: Any = spark.sparkContext._jsc.sc().conf()
    patience_seconds = float(conf.getTimeAsMs(_PATIENCE, "30s")) / 1000
    expected = slots_expected(spark.sparkContext.getConf(), needed)
    return awaited(lambda: slots_max(spark), expected, patience_seconds)


def slots_expected(conf: SparkConf, needed: int | None) -> int | None:
    """How many it is worth waiting for; None: nobody knows."""
    known = [slots for slots in (needed, _slots_asked_for(conf)) if slots is not None]
    return min(known, default=None)


def _slots_asked_for(conf: SparkConf) -> int | None:
    """What the session has told YARN or Kubernetes (executors), or a standalone master (cores)."""
    task_cores = number_of(conf, "spark.task.cpus") or 1
    executors, cores = (
        number_of(conf, "spark.executor.instances"),
        number_of(conf, "spark.cores.max"),
    )
    if executors is not None:
        return executors * ((number_of(conf, "spark.executor.cores") or 1) // task_cores)
    return None if cores is None else cores // task_cores


def number_of(conf: SparkConf, name: str) -> int | None:
    """A setting that is a whole number, if it is set."""
    value = conf.get(name)
    return None if value is None else int(value)


def awaited(
    slots_now: Callable[[], int],
    expected: int | None,
    patience_seconds: float,
    clock: Clock | None = None,
    pause: Pause = time.sleep,
) -> int:
    """How many there are when they are as many as expected, or patience ends.

    Where nobody knows what to expect: when there are some, and no more have come for a while.
    """
    clock = clock or SystemClock()
    began = changed = clock.monotonic_seconds()
    slots = slots_now()
    while True:
        now = clock.monotonic_seconds()
        has_settled = slots > 0 and now - changed >= _SETTLED_SECONDS
        is_enough = has_settled if expected is None else slots >= expected
        if is_enough or now - began >= patience_seconds:
            return slots
        pause(_LOOK_SECONDS)
        before, slots = slots, slots_now()
        if slots != before:
            changed = clock.monotonic_seconds()
