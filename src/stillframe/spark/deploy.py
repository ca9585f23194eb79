"""Slots as the tasks of a Spark barrier stage."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from stillframe.graph.launch import Deployment, RunningSlots, SlotLaunch
from stillframe.spark import checks
from stillframe.spark.entry import RESULT_SCHEMA, SlotEntry


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
        stage = _BarrierStage(self._spark, f"{launch.plan.job} attempt {launch.attempt}")
        stage.start(frame, entry, on_ended)
        return stage


class _BarrierStage(RunningSlots):
    def __init__(self, spark: SparkSession, description: str) -> None:
        self._context = spark.sparkContext
        self._group = f"stillframe-{uuid.uuid4()}"
        self._description = description
        self._ended = threading.Event()

    def start(
        self, frame: DataFrame, entry: SlotEntry, on_ended: Callable[[str | None], None]
    ) -> None:
        def run() -> None:
            reason: str | None = None
            try:
                self._context.setJobGroup(self._group, self._description, interruptOnCancel=True)
                # A plain collect: a shuffle behind it would let Spark rerun the stage by itself.
                frame.mapInArrow(entry, RESULT_SCHEMA, barrier=True).collect()
            except (PySparkException, Py4JError, OSError) as error:
                reason = _in_one_sentence(error)
            except Exception as error:  # whatever it is, the job must hear that its slots are gone
                reason = f"{type(error).__name__}: {error}"
            finally:
                self._ended.set()
                on_ended(reason)

        InheritableThread(target=run, name=f"stillframe-{self._description}", daemon=True).start()

    def cancel(self) -> None:
        if self._ended.is_set() or self._context._jsc is None:
            return
        with suppress(Py4JError, OSError):  # a JVM that is gone has no job left to cancel
            self._context.cancelJobGroup(self._group)


def _in_one_sentence(error: Exception) -> str:
    """The telling line of what is usually a page of Java."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("stillframe.") or "Error:" in line]
    chosen = (telling or lines or [type(error).__name__])[-1 if telling else 0]
    return f"the Spark job that runs the slots failed: {chosen[:500]}"
