"""Ctrl-C in a program or notebook that has started jobs: they run on.

PySpark answers SIGINT by cancelling every Spark job of the application, slots included: a job whose
handle somebody only stopped waiting for would lose its slots and restart itself. From the first
start on, all Spark jobs are cancelled but those that run slots. (`stillframe run` has its own way
with signals, see `cli/signals`.)
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn

from pyspark import SparkContext
from pyspark.sql import SparkSession

from stillframe.spark.deployment.stage import slot_groups

_PYSPARKS = "SparkContext._do_init.<locals>.signal_handler"


def spare_slots(spark: SparkSession) -> None:
    """Have Ctrl-C cancel all Spark jobs but slots, where PySpark would cancel all."""
    if threading.current_thread() is not threading.main_thread():
        return  # nobody else may set a handler, and PySpark did not either
    if getattr(signal.getsignal(signal.SIGINT), "__qualname__", None) != _PYSPARKS:
        return
    context = spark.sparkContext

    def on_interrupt(number: int, frame: FrameType | None) -> NoReturn:
        try:
            _cancel_all_but_slots(context)
        finally:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)


def _cancel_all_but_slots(context: SparkContext) -> None:
    tracker = context.statusTracker()
    slots = {job for group in slot_groups() for job in tracker.getJobIdsForGroup(group)}
    for job in tracker.getActiveJobsIds():
        if job not in slots:
            context._jsc.sc().cancelJob(job)
