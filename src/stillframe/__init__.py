"""Stateful stream jobs on PySpark with Flink's checkpoints.

    still = stillframe.on(spark)

Importing this package does not import pyspark: executors import it too, on every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stillframe.errors import (
    BuildError,
    DataError,
    Fenced,
    JobFailed,
    SnapshotDamaged,
    StartRefused,
    StillframeError,
    StorageError,
    UnknownOption,
    UserCodeError,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stillframe.api.functions import KeyedFunction, TwoInputFunction
    from stillframe.api.processors import KeyProcessor, KeyStates
    from stillframe.api.sinks import Sink
    from stillframe.api.sources import Source
    from stillframe.api.stream_functions import StreamFunction, SubtaskStates
    from stillframe.api.timers import Timers
    from stillframe.coordinator.query import Query
    from stillframe.options import Options
    from stillframe.secrets import Secret
    from stillframe.spark.savepoints import Savepoint
    from stillframe.spark.session import Still

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "DataError",
    "Fenced",
    "JobFailed",
    "KeyProcessor",
    "KeyStates",
    "KeyedFunction",
    "Options",
    "Query",
    "Savepoint",
    "Secret",
    "Sink",
    "SnapshotDamaged",
    "Source",
    "StartRefused",
    "StillframeError",
    "StorageError",
    "StreamFunction",
    "SubtaskStates",
    "Timers",
    "TwoInputFunction",
    "UnknownOption",
    "UserCodeError",
    "__version__",
    "on",
    "register",
]


def on(spark: SparkSession) -> Still:
    """Stillframe on this Spark session: where streams are read and jobs are started."""
    from stillframe.spark.session import Still

    return Still(spark)


def register(spark: SparkSession) -> None:
    """Have a session that runs no jobs read snapshots: `spark.read.format("stillframe")`."""
    from stillframe.spark.snapshot_source import register

    register(spark)


def __getattr__(name: str) -> Any:
    # Imported when asked for: executors have no use for a query handle, and few jobs for the rest.
    if name == "Query":
        from stillframe.coordinator.query import Query

        return Query
    if name in ("KeyedFunction", "TwoInputFunction"):
        from stillframe.api import functions

        return getattr(functions, name)
    if name in ("KeyProcessor", "KeyStates"):
        from stillframe.api import processors

        return getattr(processors, name)
    if name in ("StreamFunction", "SubtaskStates"):
        from stillframe.api import stream_functions

        return getattr(stream_functions, name)
    if name == "Sink":
        from stillframe.api.sinks import Sink

        return Sink
    if name == "Source":
        from stillframe.api.sources import Source

        return Source
    if name == "Options":
        from stillframe.options import Options

        return Options
    if name == "Secret":
        from stillframe.secrets import Secret

        return Secret
    if name == "Timers":
        from stillframe.api.timers import Timers

        return Timers
    if name == "Savepoint":
        from stillframe.spark.savepoints import Savepoint

        return Savepoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
