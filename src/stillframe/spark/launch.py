"""Starts a job: checks the session, makes the plan, hands it to a coordinator on this driver."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from stillframe.clock import SystemClock
from stillframe.config import JobConfig
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.guarantees import best_guarantee_of, guarantee_of, refuse_weaker
from stillframe.graph.logical import Lookup, Node, Operator, Write, walk
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import OperatorUid
from stillframe.rest.serving import serve
from stillframe.runtime.unfit_states import unfit_states
from stillframe.spark import listeners, streams
from stillframe.spark.deployment import checks, temporary
from stillframe.spark.deployment.capacity import (
    Held,
    Room,
    is_local,
    slots_max,
    slots_soon,
    tasks_active,
)
from stillframe.spark.deployment.interrupts import spare_slots
from stillframe.spark.deployment.memory import too_little_overhead
from stillframe.spark.deployment.stage import SparkDeployment
from stillframe.spark.frames.sources import resolve_frames
from stillframe.spark.frames.spooled_streams import (
    is_read_by_spark,
    resolve_leaves,
    stop_when_ended,
)
from stillframe.spark.listeners import SparkQuery
from stillframe.spark.refreshing import Refreshing, Tables, refresh_seconds
from stillframe.storage.paths import job_directory, quoted_name
from stillframe.storage.places import address_of, place_of

log = logging.getLogger("stillframe")

_LOOPBACK = "127.0.0.1"
_EXIT_SECONDS_MAX = 10.0
_active: dict[tuple[str, str], tuple[Job, Query]] = {}
_beginning: set[tuple[str, str]] = set()
"""Those of them that listeners are being told of; their jobs run next."""
_active_lock = threading.Lock()
_observers: list[Callable[[Query], None]] = []


def observe_starts(observer: Callable[[Query], None]) -> None:
    """Have `observer` told of every query of this process, before its job begins."""
    _observers.append(observer)


@dataclass(frozen=True, slots=True)
class _Rehearsal:
    look: Callable[[Plan, JobConfig], Query]
    scratch: str


_rehearsals: list[_Rehearsal] = []


@contextlib.contextmanager
def rehearse(look: Callable[[Plan, JobConfig], Query], scratch: str) -> Iterator[None]:
    """Start no job meanwhile, but hand each plan to `look`; files go to `scratch`, if there are
    any."""
    _rehearsals.append(_Rehearsal(look, scratch))
    try:
        yield
    finally:
        _rehearsals.pop()


def start(spark: SparkSession, name: str, sinks: Sequence[Node], config: JobConfig) -> Query:
    """Start the job and return at once; what cannot work is refused here."""
    checks.refuse_without_spark(spark)
    with _active_lock:
        _refuse_running(config.checkpoint_location, name)
    _refuse_without_checkpoints(sinks, config)
    _use_this_python(spark)
    checks.refuse_unfit_settings(spark.sparkContext.getConf())
    checks.warn_of_settings(spark)
    # Before DataFrames are copied into files: of what runs nothing is left behind.
    refuse_weaker(best_guarantee_of((node.operator for node in walk(sinks)), config), config)
    refresh = refresh_seconds(sinks, config)
    runs_spark_jobs = refresh is not None or any(_runs_spark_jobs(n.operator) for n in walk(sinks))
    room = _room(spark, slots_max(spark))
    if not _rehearsals:
        taken = room.total - room.slots_free + room.beside(runs_spark_jobs)
        room = _room(spark, slots_soon(spark, _needed(sinks, config, taken)))
    available, beside = room.slots_now, room.beside(runs_spark_jobs)

    def spool(uid: OperatorUid) -> str:
        if _rehearsals:
            return f"{_rehearsals[-1].scratch}/{quoted_name(uid, 'operator uid')}"
        if config.checkpoint_location is None:
            raise StartRefused(
                f"a DataFrame of job {name!r} has to be written to files first, because Spark does"
                " not give its rows in the same order each time: set checkpointLocation"
            )
        place = f"{job_directory(name)}/spool/{quoted_name(uid, 'operator uid')}"
        return f"{config.checkpoint_location}/{place}"

    slots_left = max(1, available - beside)
    reached = _spool_settings(config)
    sinks = resolve_leaves(sinks, spool, config)
    resolved = resolve_frames(spark, sinks, config.parallelism, spool, slots_left, reached)
    slots = resolved.parallelism or config.parallelism or max(1, available - 2)
    tables = Tables(resolved.sinks, refresh)
    plan = build_plan(name, tables.graph, slots, config.max_parallelism)
    if _rehearsals:
        return _rehearsals[-1].look(plan, config)
    checks.refuse_unsendable(plan)
    checks.refuse_too_few_slots(plan.slots, runs_spark_jobs, room)
    for end in checks.ends_of(plan):
        end.check_start()
    too_little = too_little_overhead(spark.sparkContext.getConf(), plan, config)
    if too_little is not None:
        log.warning("%s", too_little)
    if not _runs_here(spark) or checks.brings_own_ends(plan):
        checks.refuse_unfit_executors(spark, plan.slots, plan)
    deployment = SparkDeployment(
        spark, resolved.feed, slot_host=_LOOPBACK if is_local(spark) else None
    )

    def replan(parallelism: int) -> Plan:
        if resolved.feed is not None and parallelism != slots:
            raise StartRefused(
                f"a DataFrame feeds job {name!r}, each of its {slots} partitions into one slot, so"
                " their number cannot change while it runs: write the DataFrame to files and read"
                " those, then the job can be rescaled"
            )
        other = build_plan(name, tables.graph, parallelism, config.max_parallelism)
        refuse_weaker(guarantee_of(other, config), config)
        here = _room(spark, slots_max(spark), without=job)
        checks.refuse_too_few_slots(other.slots, runs_spark_jobs, here)
        return other

    job = Job(
        plan,
        config,
        deployment,
        driver_address(spark),
        SystemClock(),
        replan,
        slots,
        unfit_states,
    )
    spare_slots(spark)
    _end_stage_bar(spark)
    query = _start_once(job, spark, room)
    if refresh is not None:
        Refreshing(job, tables, refresh).start()
    return query


def _spool_settings(config: JobConfig) -> Mapping[str, str]:
    """How what is written below the checkpoint location is reached, also from an executor."""
    if config.checkpoint_location is None:
        return {}
    try:
        address = address_of(config.checkpoint_location)
    except BuildError:  # a store that is no place of files: who needs one is told
        return {}
    return place_of(address, config.storage_settings).settings


def _room(spark: SparkSession, total: int, without: Job | None = None) -> Room:
    with _active_lock:
        return _room_beside(spark, total, without)


def _room_beside(spark: SparkSession, total: int, without: Job | None = None) -> Room:
    """What the other jobs of this process, which has one Spark application, leave of it."""
    others = [
        query
        for place, (job, query) in _active.items()
        if _is_running(place, query) and job is not without
    ]
    held = [Held(each.name, each.plan.slots, _runs_spark_jobs_of(each.plan)) for each in others]
    ours = sum(len(query.slot_pids) for job, query in _active.values())
    return Room(total, held, busy=max(0, tasks_active(spark) - ours))


def _start_once(job: Job, spark: SparkSession, room: Room) -> Query:
    """One job of a name and place at a time in this process; the job log guards against others."""
    location, name = job.config.checkpoint_location, job.plan.job
    with _active_lock:
        _refuse_running(location, name)
        # Once more: another may have been started meanwhile.
        here = _room_beside(spark, room.total)
        checks.refuse_too_few_slots(job.plan.slots, _runs_spark_jobs_of(job.plan), here)
        query = SparkQuery(job)
        place = location or query.runId, name
        _active[place] = (job, query)
        _beginning.add(place)
    # Without the lock: a listener that is told of this query may start another one.
    try:
        stop_when_ended(query, job.plan)
        temporary.remove_when_ended(query)
        serve(query)
        streams.follow(query)
        for observer in _observers:
            observer(query)
        job.start()
    except BaseException:
        with _active_lock:
            del _active[place]
        raise
    finally:
        _beginning.discard(place)
    return query


def _is_running(place: tuple[str, str], query: Query) -> bool:
    return place in _beginning or query.isActive


def _refuse_running(location: str | None, name: str) -> None:
    place = location or "", name
    if place in _active and _is_running(place, _active[place][1]):
        raise StartRefused(
            f"job {name!r} is running already in {location}: still.streams.get({name!r}) is its"
            " handle; stop it first to start it again, or give this one another queryName"
        )


@atexit.register
def _stop_what_runs() -> None:
    """End the jobs of a script that ends, while Spark is still there to end their slots.

    Otherwise Spark would tell of every slot that lost its driver, each with a page of Java.
    """
    with _active_lock:
        jobs = [job for job, query in _active.values() if query.isActive]
    for job in jobs:
        job.request_stop()
    deadline = time.monotonic() + _EXIT_SECONDS_MAX
    for job in jobs:
        job.join(max(0.0, deadline - time.monotonic()))
    listeners.await_told(max(0.0, deadline - time.monotonic()))
    temporary.remove_all()


def _refuse_without_checkpoints(sinks: Sequence[Node], config: JobConfig) -> None:
    """Whatever a sink prepares is committed by a checkpoint, the last one of a bounded job too."""
    if config.checkpoint_interval_seconds is not None:
        return
    for node in sinks:
        if isinstance(node.operator, Write) and node.operator.sink.makes_visible:
            raise StartRefused(
                f"the sink {node.operator.sink.describe()} commits in two phases, the second when"
                " a checkpoint is complete, and checkpoints are off: set checkpointInterval and"
                " checkpointLocation"
            )


def _needed(sinks: Sequence[Node], config: JobConfig, taken: int) -> int | None:
    """How many cores Spark must have for the job beside those that are taken, if it says so."""
    if config.parallelism is None:
        return None
    return max(config.parallelism, *(node.parallelism or 0 for node in walk(sinks))) + taken


def _runs_spark_jobs(operator: Operator) -> bool:
    match operator:
        case Write(sink=sink):
            return sink.commits_at_coordinator
        case Lookup(refresh_seconds=seconds):
            return seconds is not None
        case _:
            return is_read_by_spark(operator)


def _runs_spark_jobs_of(plan: Plan) -> bool:
    return any(_runs_spark_jobs(each.operator) for _, each in plan.operators())


def _use_this_python(spark: SparkSession) -> None:
    """On a local master workers are ours: the driver's own interpreter has what they need."""
    if is_local(spark) and "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        spark.sparkContext.pythonExec = sys.executable


def _runs_here(spark: SparkSession) -> bool:
    """Whether slots run the driver's own interpreter, so that nothing they have can differ."""
    return is_local(spark) and spark.sparkContext.pythonExec == sys.executable


def _end_stage_bar(spark: SparkSession) -> None:
    """The stage of the slots never gets on: its bar would stand over every line until the end."""
    bar: Any = spark.sparkContext._jsc.sc().progressBar()
    if bar.isDefined():
        bar.get().stop()


def driver_address(spark: SparkSession) -> DriverAddress:
    """Where slots find the coordinator."""
    if is_local(spark):
        return DriverAddress(_LOOPBACK)
    conf = spark.sparkContext.getConf()
    host = conf.get("spark.driver.host")
    assert host is not None, "a running SparkContext has told where its driver is"
    return DriverAddress(host, bind_host=conf.get("spark.driver.bindAddress", host))
