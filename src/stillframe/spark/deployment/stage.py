"""Slots as the tasks of a Spark barrier stage."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakSet

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from stillframe.errors import telling_line
from stillframe.graph.launch import Deployment, RunningSlots, SlotLaunch
from stillframe.spark.deployment import checks
from stillframe.spark.deployment.capacity import shortage, tasks_active
from stillframe.spark.deployment.entry import RESULT_SCHEMA, SlotEntry


class SparkDeployment(Deployment):
    """Submits each attempt as one Spark job: all its slots start together or not at all."""

    def __init__(self, spark: SparkSession, feed: DataFrame | None, slot_host: str | None) -> None:
        """`feed`: its partitions go to the slots. `slot_host` None: where Spark says they are."""
        self._spark = spark
        self._feed = feed
        self._slot_host = slot_host

    def launch(self, launch: SlotLaunch, on_ended: Callable[[str | None], None]) -> RunningSlots:
        checks.refuse_without_spark(self._spark)
        slots = launch.plan.slots
        frame = self._feed if self._feed is not None else self._spark.range(0, slots, 1, slots)
        entry = SlotEntry(launch, self._slot_host, is_fed=self._feed is not None)
        name = f"{launch.plan.job} attempt {launch.attempt}"
        stage = _BarrierStage(self._spark, name, slots)
        stage.start(frame, entry, on_ended)
        return stage

    def shortage(self) -> str | None:
        return _told(lambda: shortage(self._spark, 1))

    def works(self) -> bool:
        slots = sum(stage.slots for stage in list(_running))
        return (_told(lambda: tasks_active(self._spark)) or 0) > slots


Answer = TypeVar("Answer")

_running: WeakSet[_BarrierStage] = WeakSet()


def slot_groups() -> list[str]:
    """The job groups of Spark jobs that run slots."""
    return [stage.group for stage in list(_running)]


class _BarrierStage(RunningSlots):
    def __init__(self, spark: SparkSession, description: str, slots: int) -> None:
        self._spark = spark
        self.slots = slots
        self._context = spark.sparkContext
        self.group = f"stillframe-{uuid.uuid4()}"
        _running.add(self)
        self._description = description
        self._ended = threading.Event()

    def start(
        self, frame: DataFrame, entry: SlotEntry, on_ended: Callable[[str | None], None]
    ) -> None:
        def run() -> None:
            reason: str | None = None
            try:
                # Not by interrupting: a task that is interrupted ends at once and leaves its worker
                # to itself. Otherwise Spark kills a worker that does not end within some seconds.
                self._context.setJobGroup(self.group, self._description, interruptOnCancel=False)
                # A plain collect: a shuffle behind it would let Spark rerun the stage by itself.
                frame.mapInArrow(entry, RESULT_SCHEMA, barrier=True).collect()
            except (PySparkException, Py4JError, OSError) as error:
                reason = _in_one_sentence(error)
            except Exception as error:  # whatever it is, the job must hear that its slots are gone
                reason = f"{type(error).__name__}: {error}"
            finally:
                self._ended.set()
                _running.discard(self)
                on_ended(reason)

        InheritableThread(target=run, name=f"stillframe-{self._description}", daemon=True).start()

    def wait_for(self) -> str | None:
        return _told(lambda: None if self._has_begun() else shortage(self._spark, self.slots))

    def _has_begun(self) -> bool:
        """Whether its tasks run, so that only their workers are still on their way."""
        tracker = self._context.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self.group))
        stages = (stage for job in jobs if job is not None for stage in job.stageIds)
        return any(stage.numActiveTasks > 0 for stage in map(tracker.getStageInfo, stages) if stage)

    def cancel(self) -> None:
        if self._ended.is_set() or self._context._jsc is None:
            return
        with suppress(Py4JError, OSError):  # a JVM that is gone has no job left to cancel
            self._context.cancelJobGroup(self.group)


def _told(ask: Callable[[], Answer | None]) -> Answer | None:
    """What Spark answers; a session that is gone is told by the attempt, not here."""
    try:
        return ask()
    except (PySparkException, Py4JError, OSError, AttributeError):
        return None


def _in_one_sentence(error: Exception) -> str:
    text = str(error)
    missing = re.findall(r"ModuleNotFoundError: No module named '([^']+)'", text)
    if missing:
        return _unshipped(missing[-1])
    said = telling_line(text) or type(error).__name__
    return f"the Spark job that runs the slots failed: {said[:500]}"


def _unshipped(module: str) -> str:
    """The workers unpickle the job's functions, and a function of a module is only its name."""
    return (
        f"the workers cannot import the module {module!r}: ship it with"
        " spark.sparkContext.addPyFile(...) or --py-files, install it in the Python of every"
        " executor, or write the function in the job's own file"
    )
