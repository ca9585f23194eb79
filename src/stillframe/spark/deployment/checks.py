"""What must be true of a Spark session before a job is started on it, each told in one sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import SparkConf, cloudpickle
from pyspark.sql import SparkSession

from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.config import parse_flag
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.logical import Read, Write
from stillframe.graph.plan import Plan, describe
from stillframe.spark.deployment.capacity import Room

_ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
)
_DISK_ENCRYPTION = "spark.io.encryption.enabled"
_OTHER_PYTHON = re.compile(
    r"PYTHON_VERSION_MISMATCH\] Python in worker has different version: (\S+) than that in driver:"
    r" ([^\s,]+)"
)
_WAYS_TO_A_PYTHON = (
    "set PYSPARK_PYTHON to a Python that every executor has with the same packages, or ship one"
    " with --archives (docs/cluster.md)"
)

_WITHOUT_EFFECT: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "spark.sql.streaming.multipleWatermarkPolicy": (
        lambda value: value.lower() != "min",
        "event time has come as far as in the slowest of several streams",
    ),
    "spark.sql.streaming.stateStore.providerClass": (
        lambda value: "RocksDB" in value,
        "the option stateBackend says where state is kept",
    ),
}
"""Of Spark's settings: which values mean something, and what holds here."""
log = logging.getLogger("stillframe")

Versions = Mapping[str, str | None]


def refuse_unfit_settings(conf: SparkConf) -> None:
    """Settings under which a job could not run, or not as the user was promised."""
    refuse_dynamic_allocation(conf)
    refuse_encryption(conf)


def warn_of_settings(spark: SparkSession) -> None:
    """Name what the session says about streams of Spark's and has no effect on ours."""
    for setting, (is_meant, instead) in _WITHOUT_EFFECT.items():
        value = spark.conf.get(setting, None)
        if value is not None and is_meant(value):
            log.warning("the setting %s=%s has no effect: %s", setting, value, instead)


def refuse_times_in_orc(spark: SparkSession, schema: pa.Schema) -> None:
    """Such times have no zone: to Spark they are those of its Java's clock, to Arrow UTC's."""
    jvm: Any = spark._jvm
    zone = str(jvm.java.util.TimeZone.getDefault().getID())
    times = [field.name for field in schema if "timestamp" in str(field.type)]
    if times and zone not in ("UTC", "GMT", "Etc/UTC", "Z"):
        raise BuildError(
            f"column {times[0]} is a time, and ORC has times without a zone, which Spark takes for"
            f" those of its Java's clock, {zone}: start Java with -Duser.timezone=UTC, or use"
            " Parquet"
        )


def refuse_dynamic_allocation(conf: SparkConf) -> None:
    if _is_on(conf, "spark.dynamicAllocation.enabled"):
        raise StartRefused(
            "spark.dynamicAllocation.enabled is true, but slots are tasks of a barrier stage, which"
            " Spark refuses to run under dynamic allocation: set it to false for this application"
        )


def refuse_encryption(conf: SparkConf) -> None:
    for setting in _ENCRYPTION:
        if _is_on(conf, setting):
            raise StartRefused(
                f"{setting} is true, but Stillframe does not encrypt the traffic between slots yet:"
                " run the job on a session without it, in a network you trust"
            )
    if _is_on(conf, _DISK_ENCRYPTION):
        raise StartRefused(
            f"{_DISK_ENCRYPTION} is true, but Stillframe does not encrypt the files that slots"
            " write to local disk (RocksDB, spilled and restored state): run the job on a session"
            " without it, with local disks that the system encrypts"
        )


def _is_on(conf: SparkConf, setting: str) -> bool:
    """As Spark reads it: in any case, with spaces around it."""
    return parse_flag(setting, conf.get(setting, "false") or "false")


def refuse_too_few_slots(slots: int, runs_spark_jobs: bool, room: Room) -> None:
    """A barrier stage that does not fit waits in silence, and so do Spark jobs without a core."""
    if room.fits(slots, runs_spark_jobs):
        return
    beside = room.beside(runs_spark_jobs)
    wanted = f"{slots + beside} core{'s' if slots + beside > 1 else ''}"
    parts = f" ({slots} slots and {beside} for Spark jobs)" if beside else ""
    held = ", ".join(f"{each.job!r} holds {each.slots}" for each in room.held)
    lower = room.slots_free - beside
    advice = [
        f"lower the parallelism to {lower}" if lower > 0 else "",
        "stop one of these jobs" if held else "",
        "give Spark more cores",
    ]
    raise StartRefused(
        f"the job needs {wanted}{parts} at the same time, but Spark has {room.total}"
        f"{f' and {held}' if held else ''}: {', or '.join(filter(None, advice))}"
    )


def refuse_unfit_executors(
    spark: SparkSession, slots: int, plan: Plan | None = None
) -> list[Versions]:
    """Compare what the executors have with what the driver has, by a small Spark job.

    Of a plan, they must have the classes of its sources and sinks. Answers what each task has seen.
    """
    probe = _probe()
    ends = {} if plan is None else _pickled_ends(plan)
    try:
        tasks = spark.sparkContext.parallelize([ends] * slots, slots)
        found = tasks.map(probe).collect()
    except Exception as error:
        reason = no_python_that_fits(str(error))
        if reason is None:
            raise
        raise StartRefused(reason) from error
    for there in found:
        refuse_other_versions(probe({}), there)
        refuse_missing_ends(there)
    return found


def brings_own_ends(plan: Plan) -> bool:
    """Whether it has a source or sink of another package, which the slots have to import."""
    modules = [type(end).__module__.partition(".")[0] for end in ends_of(plan)]
    return any(module not in ("stillframe", "__main__") for module in modules)


def refuse_missing_ends(there: Versions) -> None:
    """`there` is an executor, which has told which source or sink it could not make, and why."""
    if there["missing"] is not None:
        raise StartRefused(
            f"{there['missing']} on executor host {there['host']} for {there['executable']}:"
            " install its package there in the version that the driver has, or ship it with"
            " spark.sparkContext.addPyFile(...) or --py-files"
        )


def ends_of(plan: Plan) -> Iterator[Source | Sink]:
    for _, planned in plan.operators():
        match planned.operator:
            case Read(source=end) | Write(sink=end):
                yield end


def _pickled_ends(plan: Plan) -> dict[str, bytes]:
    pickler: Any = cloudpickle
    return {f"the class {type(end).__name__}": pickler.dumps(end) for end in ends_of(plan)}


def no_python_that_fits(said_by_spark: str) -> str | None:
    """In our words, if executors could not even begin to run Python as the driver does."""
    if found := re.search(r'Cannot run program "([^"]+)"', said_by_spark):
        return (
            f"executors cannot run {found[1]}, which PYSPARK_PYTHON or spark.pyspark.python names"
            f" (python3 if neither is set): {_WAYS_TO_A_PYTHON}"
        )
    if found := _OTHER_PYTHON.search(said_by_spark):
        return (
            f"executors run Python {found[1]} and the driver runs Python {found[2]}:"
            f" {_WAYS_TO_A_PYTHON}"
        )
    return None


def refuse_other_versions(here: Versions, there: Versions) -> None:
    """`here` is the driver, `there` an executor: versions, host and path of the Python."""
    for what in ("python", "stillframe", "pyarrow"):
        wanted, seen = here[what], there[what]
        if seen is None:
            raise StartRefused(
                f"{what} is not installed on executor host {there['host']} for"
                f" {there['executable']}: install {what} {wanted} there, or {_WAYS_TO_A_PYTHON}"
            )
        if seen != wanted:
            raise StartRefused(
                f"executor host {there['host']} has {what} {seen} and the driver has {wanted}:"
                f" install the same version for {there['executable']}, or {_WAYS_TO_A_PYTHON}"
            )


_PROBE_SOURCE = """
def versions(ends):
    import importlib, pickle, platform, socket, sys
    found = {"host": socket.gethostname(), "executable": sys.executable}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for package in ("stillframe", "pyarrow"):
        try:
            found[package] = importlib.import_module(package).__version__
        except ImportError:
            found[package] = None
    found["missing"] = None
    for name, pickled in ends.items() if found["stillframe"] else ():
        try:
            pickle.loads(pickled)
        except (ImportError, AttributeError) as error:
            found["missing"] = f"{name} cannot be imported ({error})"
    return found
"""


def _probe() -> Callable[[Mapping[str, bytes]], Versions]:
    """A function made from its source, so that it travels to executors whole.

    A function of this module would be looked up there in the very package whose absence it is to
    report.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(_PROBE_SOURCE, namespace)
    probe: Callable[[Mapping[str, bytes]], Versions] = namespace["versions"]
    return probe


def refuse_without_spark(spark: SparkSession) -> None:
    """Raise if the session, or the JVM behind it, has ended.

    No further attempt could succeed then, and PySpark itself would only say `AssertionError`, or
    that None has no attribute.
    """
    context: Any = spark.sparkContext
    try:
        is_stopped = context._jsc is None or context._jsc.sc().isStopped()
        gone = "its session was stopped" if is_stopped else None
    except (Py4JError, OSError) as error:
        gone = f"its Java process does not answer ({type(error).__name__})"
    if gone is not None:
        raise StartRefused(
            f"Spark is gone, {gone}: start the job again in a new session; it goes on from its"
            " last completed checkpoint"
        )


def refuse_unsendable(plan: Plan) -> None:
    """Raise if an operator does not survive the way to an executor, and so never would."""
    pickler: Any = cloudpickle  # PySpark's own copy, without types
    for _, planned in plan.operators():
        try:
            pickler.dumps(planned.operator)
        except Exception as error:  # a user's object may raise anything
            raise StartRefused(
                f"{describe(planned.operator)} cannot be sent to executors: {error}; let the"
                " function make such objects itself, when it is called"
            ) from error
