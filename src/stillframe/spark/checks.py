"""What must be true of a Spark session before a job is started on it, each told in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, cloudpickle
from pyspark.sql import SparkSession

from stillframe.errors import StartRefused
from stillframe.graph.plan import Plan, describe

_ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
)


def refuse_unfit_settings(conf: SparkConf) -> None:
    """Settings under which a job could not run, or not as the user was promised."""
    refuse_dynamic_allocation(conf)
    refuse_encryption(conf)


def refuse_dynamic_allocation(conf: SparkConf) -> None:
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise StartRefused(
            "spark.dynamicAllocation.enabled is true, but slots are tasks of a barrier stage, which"
            " Spark refuses to run under dynamic allocation: set it to false for this application"
        )


def refuse_encryption(conf: SparkConf) -> None:
    for setting in _ENCRYPTION:
        if conf.get(setting, "false") == "true":
            raise StartRefused(
                f"{setting} is true, but Stillframe does not encrypt the traffic between slots yet:"
                " run the job on a session without it, in a network you trust"
            )


def refuse_too_few_slots(wanted: int, beside: int, available: int) -> None:
    """A barrier stage that does not fit waits in silence, and so do Spark jobs without a core."""
    if wanted > available:
        raise StartRefused(
            f"the job needs {wanted} slots at the same time and Spark has {available}: lower the"
            " parallelism or give Spark more cores"
        )
    if wanted + beside > available:
        raise StartRefused(
            f"the job needs {wanted} slots and {beside} more core for the Spark jobs it starts"
            f" beside them, and Spark has {available}: lower the parallelism to"
            f" {available - beside} or give Spark more cores"
        )


def refuse_unfit_executors(spark: SparkSession, slots: int) -> None:
    """Compare what the executors have with what the driver has, by a small Spark job."""
    probe = _probe()
    found = spark.sparkContext.parallelize(range(slots), slots).map(probe).collect()
    for there in found:
        refuse_other_versions(probe(None), there)


def refuse_other_versions(here: Mapping[str, str | None], there: Mapping[str, str | None]) -> None:
    """`here` is the driver, `there` an executor, each with its versions and its host."""
    for what in ("python", "stillframe", "pyarrow"):
        wanted, seen = here[what], there[what]
        if seen is None:
            raise StartRefused(
                f"{what} is not installed on executor host {there['host']}: install {what} {wanted}"
                " there"
            )
        if seen != wanted:
            raise StartRefused(
                f"executor host {there['host']} has {what} {seen} and the driver has {wanted}:"
                " install the same version on both"
            )


_PROBE_SOURCE = """
def versions(_):
    import importlib, platform, socket
    found = {"host": socket.gethostname()}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for package in ("stillframe", "pyarrow"):
        try:
            found[package] = importlib.import_module(package).__version__
        except ImportError:
            found[package] = None
    return found
"""


def _probe() -> Callable[[object], dict[str, str | None]]:
    """A function made from its source, so that it travels to executors whole.

    A function of this module would be looked up there in the very package whose absence it is to
    report.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(_PROBE_SOURCE, namespace)
    probe: Callable[[object], dict[str, str | None]] = namespace["versions"]
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
