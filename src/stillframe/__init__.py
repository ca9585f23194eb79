"""Stateful stream jobs on PySpark with Flink's checkpoints.

    still = stillframe.on(spark)

Importing this package does not import pyspark: executors import it too, on every start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stillframe.errors import (
    BuildError,
    DataError,
    Fenced,
    JobFailed,
    OutputRefused,
    SnapshotDamaged,
    StartRefused,
    StillframeError,
    StorageError,
    Unavailable,
    UnknownOption,
    UserCodeError,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stillframe.api.functions import KeyedFunction, TwoInputFunction
    from stillframe.api.processors import KeyProcessor, KeyStates
    from stillframe.api.sinks import (
        Committer,
        CommitterContext,
        Prepared,
        Sink,
        SinkContext,
        SinkWriter,
        Target,
    )
    from stillframe.api.sources import (
        BlockingReader,
        Discovered,
        EndOfData,
        Lag,
        NothingYet,
        Source,
        SourceContext,
        SourceReader,
        Split,
        SplitEnumerator,
    )
    from stillframe.api.stream_functions import StreamFunction, SubtaskStates
    from stillframe.api.timers import Timers
    from stillframe.connectors.function_sink import to_function
    from stillframe.connectors.transactional import TransactionalSink
    from stillframe.coordinator.query import Query
    from stillframe.ids import Mark, Writer
    from stillframe.options import Options
    from stillframe.secrets import Secret
    from stillframe.spark.everywhere import everywhere, nowhere
    from stillframe.spark.formats.exact import exactly_once, write_jdbc
    from stillframe.spark.formats.generated import from_generator
    from stillframe.spark.frames.savepoints import Savepoint
    from stillframe.spark.frames.state_differences import state_difference
    from stillframe.spark.session import Still

__version__ = "0.1.0"

__all__ = [
    "BlockingReader",
    "BuildError",
    "Committer",
    "CommitterContext",
    "DataError",
    "Discovered",
    "EndOfData",
    "Fenced",
    "JobFailed",
    "KeyProcessor",
    "KeyStates",
    "KeyedFunction",
    "Lag",
    "Mark",
    "NothingYet",
    "Options",
    "OutputRefused",
    "Prepared",
    "Query",
    "Savepoint",
    "Secret",
    "Sink",
    "SinkContext",
    "SinkWriter",
    "SnapshotDamaged",
    "Source",
    "SourceContext",
    "SourceReader",
    "Split",
    "SplitEnumerator",
    "StartRefused",
    "StillframeError",
    "StorageError",
    "StreamFunction",
    "SubtaskStates",
    "Target",
    "Timers",
    "TransactionalSink",
    "TwoInputFunction",
    "Unavailable",
    "UnknownOption",
    "UserCodeError",
    "Writer",
    "__version__",
    "everywhere",
    "exactly_once",
    "from_generator",
    "nowhere",
    "on",
    "register",
    "state_difference",
    "to_function",
    "write_jdbc",
]

_BY_ROOM = {
    "api.functions": ("KeyedFunction", "TwoInputFunction"),
    "api.processors": ("KeyProcessor", "KeyStates"),
    "api.sinks": (
        "Committer",
        "CommitterContext",
        "Prepared",
        "Sink",
        "SinkContext",
        "SinkWriter",
        "Target",
    ),
    "api.sources": (
        "BlockingReader",
        "Discovered",
        "EndOfData",
        "Lag",
        "NothingYet",
        "Source",
        "SourceContext",
        "SourceReader",
        "Split",
        "SplitEnumerator",
    ),
    "api.stream_functions": ("StreamFunction", "SubtaskStates"),
    "api.timers": ("Timers",),
    "connectors.function_sink": ("to_function",),
    "connectors.transactional": ("TransactionalSink",),
    "coordinator.query": ("Query",),
    "ids": ("Mark", "Writer"),
    "options": ("Options",),
    "secrets": ("Secret",),
    "spark.everywhere": ("everywhere", "nowhere"),
    "spark.formats.exact": ("exactly_once", "write_jdbc"),
    "spark.formats.generated": ("from_generator",),
    "spark.frames.savepoints": ("Savepoint",),
    "spark.frames.state_differences": ("state_difference",),
}
"""Imported when asked for: executors have no use for a query handle, and few jobs for the rest."""
_ROOM_OF = {name: room for room, names in _BY_ROOM.items() for name in names}


def on(spark: SparkSession) -> Still:
    """Stillframe on this Spark session: where streams are read and jobs are started."""
    _refuse_other_pyspark()
    from stillframe.spark.session import Still

    return Still(spark)


def register(spark: SparkSession) -> None:
    """Have a session that runs no jobs read snapshots: `spark.read.format("stillframe")`."""
    _refuse_other_pyspark()
    from stillframe.spark.frames.snapshot_source import register

    register(spark)


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if room.startswith("spark."):
        _refuse_other_pyspark()
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)


def _refuse_other_pyspark() -> None:
    """First of all: what older versions lack is imported all over the rooms of `spark`."""
    import pyspark

    from stillframe.spark.internals import refuse_other_versions

    refuse_other_versions(pyspark.__version__)
