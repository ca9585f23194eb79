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
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from stillframe.api.functions import KeyedFunction, TwoInputFunction
    from stillframe.api.processors import KeyProcessor, KeyStates
    from stillframe.api.sources import (
        BlockingReader,
        Discovered,
        EndOfData,
        NothingYet,
        Source,
        SourceContext,
        SourceReader,
        Split,
        SplitEnumerator,
    )
    from stillframe.api.stream_functions import StreamFunction, SubtaskStates
    from stillframe.api.timers import Timers
    from stillframe.coordinator.query import Query
    from stillframe.spark.savepoints import Savepoint
    from stillframe.spark.session import Still

__version__ = "0.1.0"

__all__ = [
    "BlockingReader",
    "BuildError",
    "DataError",
    "Discovered",
    "EndOfData",
    "Fenced",
    "JobFailed",
    "KeyProcessor",
    "KeyStates",
    "KeyedFunction",
    "NothingYet",
    "Query",
    "Savepoint",
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
    "Timers",
    "TwoInputFunction",
    "UnknownOption",
    "UserCodeError",
    "__version__",
    "from_generator",
    "on",
    "register",
]

_OF_SOURCES = (
    "BlockingReader",
    "Discovered",
    "EndOfData",
    "NothingYet",
    "Source",
    "SourceContext",
    "SourceReader",
    "Split",
    "SplitEnumerator",
)


def on(spark: SparkSession) -> Still:
    """Stillframe on this Spark session: where streams are read and jobs are started."""
    from stillframe.spark.session import Still

    return Still(spark)


def from_generator(
    function: Callable[..., Any],
    schema: Any,
    *,
    splits: Sequence[str] | None = None,
    name: str | None = None,
) -> Source:
    """A source from a generator that yields rows with positions: `still.stream(from_generator(…))`.

    `function(position)` is called on an executor at every start, with None at first and then with
    the last position that a checkpoint has. It yields `(row, position)`: the row as a tuple, dict
    or named tuple of the schema, or a whole `RecordBatch`; and where to go on *after* it, any JSON
    value. It must yield the same rows after the same position each time. With `splits`, names of
    parts that are read side by side and spread over the slots, it is `function(split, position)`.

    Where there is nothing now it yields None: what was gathered goes on, other splits have their
    turn, and it is asked again. The end of the generator is the end of its split, for good. It runs
    in a thread of its own, so it may wait; while it does, rows that it has yielded may wait too.
    The classic mistake is to yield the position *of* the row: after a failure it comes twice.

    `schema` is a DDL string, a `StructType` or an Arrow schema; `name` is for people and for going
    on after a change of the job, the function's own name unless it is given.
    """
    from functools import partial

    from stillframe.connectors.generator import GeneratorSource
    from stillframe.runtime.key_processing import schema_given
    from stillframe.runtime.row_functions import batch_of, fitted, name_of

    def of_spark(given: Any) -> Any:
        from stillframe.spark.types import to_arrow_schema

        return to_arrow_schema(given)

    called = name or name_of(function)
    found = schema_given(f"generator {called}", schema, of_spark)
    names = None if splits is None else tuple(splits)
    if names is not None and (not names or len(set(names)) < len(names)):
        raise BuildError(f"splits of generator {called} are different names, not {splits!r}")
    fits = {"schema": found, "function": called}
    return GeneratorSource(
        function, called, names, found, partial(batch_of, **fits), partial(fitted, **fits)
    )


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
    if name in _OF_SOURCES:
        from stillframe.api import sources

        return getattr(sources, name)
    if name == "Timers":
        from stillframe.api.timers import Timers

        return Timers
    if name == "Savepoint":
        from stillframe.spark.savepoints import Savepoint

        return Savepoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
