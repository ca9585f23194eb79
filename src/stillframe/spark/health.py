"""What can be found out about a Spark session by using it, for `stillframe doctor`.

Each check answers a phrase if all is well, and raises one that says what to do if it is not.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pyarrow as pa
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from stillframe.errors import StartRefused
from stillframe.spark.deployment import checks
from stillframe.spark.deployment.capacity import is_local, slots_max, slots_soon

_PATIENCE_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_BARRIER_SLOTS = 2
_HOSTS_TOLD_MAX = 20


class Doubtful(Exception):
    """Jobs run, but something is worth knowing."""


def _slots(spark: SparkSession) -> str:
    available = slots_soon(spark, None)
    if available < 1:
        raise StartRefused("Spark has no cores now: start workers or wait for executors")
    cores = os.cpu_count() or 1
    if available < 3:
        raise Doubtful(
            f"Spark runs {available} tasks at the same time: jobs that also start Spark jobs of"
            " their own (foreachBatch) need one core more than slots; use local[4] or more"
        )
    if is_local(spark):
        return f"{available} at the same time, on {cores} cores of this machine"
    return f"{available} at the same time"


def _dynamic_allocation(spark: SparkSession) -> str:
    checks.refuse_dynamic_allocation(spark.sparkContext.getConf())
    return "off, as barrier stages need it"


def _encryption(spark: SparkSession) -> str:
    checks.refuse_encryption(spark.sparkContext.getConf())
    return "Spark does not ask for it"


def _executors(spark: SparkSession) -> str:
    found = checks.refuse_unfit_executors(spark, max(1, slots_max(spark)))
    asked = os.environ.get("PYSPARK_PYTHON")
    ran = sorted({f"{each['host']} ran {each['executable']}" for each in found})
    more = f" and {len(ran) - _HOSTS_TOLD_MAX} more" if len(ran) > _HOSTS_TOLD_MAX else ""
    return (
        "the same versions of Python, stillframe and pyarrow as here; PYSPARK_PYTHON is"
        f" {asked or 'not set'}; {', '.join(ran[:_HOSTS_TOLD_MAX])}{more}"
    )


def _driver(spark: SparkSession) -> str:
    """Slots must reach a port of this process."""
    # Not with this module, which tasks import: they need nothing of what starts a job.
    from stillframe.spark.launch import driver_address

    address = driver_address(spark)
    with socket.create_server((address.bind_host or address.host, 0)) as server:
        port = server.getsockname()[1]
        reach = partial(_reach, address.host, port)
        tasks = max(1, slots_max(spark))
        answers = spark.sparkContext.parallelize(range(tasks), tasks).map(reach).collect()
    failed = sorted({answer for answer in answers if answer})
    if failed:
        raise StartRefused(
            f"a task cannot reach the driver at {address.host} ({'; '.join(failed)}): set"
            " spark.driver.host to an address that executors reach, and open its ports"
        )
    return f"tasks reach it at {address.host}"


def _reach(host: str, port: int, _: object) -> str:
    """Runs on executors: empty, or why the driver cannot be reached from there."""
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
        return ""
    except OSError as error:
        return f"from {socket.gethostname()}: {error}"


def _barrier_stage(spark: SparkSession) -> str:
    available = slots_max(spark)
    slots = min(_BARRIER_SLOTS, available)
    frame = spark.range(0, slots, 1, slots)
    ran = _within(
        spark,
        lambda: len(frame.mapInArrow(_echo, "id bigint", barrier=True).collect()),
        f"a barrier stage of {slots} tasks did not run within {_PATIENCE_SECONDS:g} s: see that"
        f" {slots} cores are free at the same time",
    )
    if ran < _BARRIER_SLOTS:
        raise Doubtful(f"{ran} slot runs, and Spark has no room for a second")
    return f"{ran} slots ran together"


def _echo(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _within(spark: SparkSession, work: Callable[[], int], too_late: str) -> int:
    """What `work`, a Spark job, answers; it is cancelled when it takes too long."""
    group = f"stillframe-doctor-{uuid.uuid4()}"
    answers: list[int] = []
    errors: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            spark.sparkContext.setJobGroup(group, "stillframe doctor", interruptOnCancel=True)
            answers.append(work())
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    InheritableThread(target=run, name="stillframe-doctor", daemon=True).start()
    if not done.wait(_PATIENCE_SECONDS):
        spark.sparkContext.cancelJobGroup(group)
        raise StartRefused(too_late)
    if errors:
        raise errors[0]
    return answers[0]


def _memory(spark: SparkSession) -> str:
    conf = spark.sparkContext.getConf()
    limit = conf.get("spark.executor.pyspark.memory")
    if limit is not None:
        raise Doubtful(
            f"spark.executor.pyspark.memory is {limit}, a limit of address space that harms Arrow's"
            " mapped files: leave it out, and size state by spark.executor.memoryOverhead"
        )
    return "no limit of address space on Python workers"


def reach_storage(spark: SparkSession, location: str) -> str:
    """Whether executors see the directory that the driver sees."""
    os.makedirs(location, exist_ok=True)
    tasks = max(1, slots_max(spark))
    seen = partial(_sees, os.path.abspath(location))
    answers = spark.sparkContext.parallelize(range(tasks), tasks).map(seen).collect()
    blind = sorted({answer for answer in answers if answer})
    if blind:
        raise StartRefused(
            f"{location} is not there, or not writable, on {', '.join(blind)}: checkpoints need a"
            " directory that all machines share"
        )
    return f"executors can write to {location}"


def _sees(location: str, _: object) -> str:
    """Runs on executors: empty, or the name of a machine that does not have the directory."""
    is_there = os.path.isdir(location) and os.access(location, os.W_OK)
    return "" if is_there else socket.gethostname()


EXECUTORS = "executors"
NEED_EXECUTORS = ("driver", "barrier stage", "shared storage")
"""Checks that run our own code in tasks."""
CHECKS: Mapping[str, Callable[[SparkSession], str]] = {
    "slots": _slots,
    "dynamic allocation": _dynamic_allocation,
    "encryption": _encryption,
    EXECUTORS: _executors,
    "driver": _driver,
    "barrier stage": _barrier_stage,
    "memory": _memory,
}
