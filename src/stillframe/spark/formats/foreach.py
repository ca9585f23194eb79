"""`foreach`: a function that is given each row, or an object with open, process and close.

The rows of an epoch are staged, and handed over when its checkpoint is complete, in the slot that
staged them. So what has been opened with a partition and an epoch gets the same rows each time,
which Spark does not promise, and nobody sees rows that a failure takes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.types import StructType

from stillframe.api.sinks import Sink, SinkGuarantee, Target
from stillframe.connectors.transactional import TransactionalSink
from stillframe.errors import BuildError
from stillframe.ids import CheckpointId, Mark, Writer
from stillframe.options import Options
from stillframe.runtime.row_functions import name_of
from stillframe.spark.formats.data_source_sinks import rows_of
from stillframe.spark.types import from_arrow_schema


@dataclass(frozen=True)
class ForeachFormat:
    """What `writeStream.foreach(f)` means."""

    option_names: ClassVar[tuple[str, ...]] = ()
    secret_options: ClassVar[tuple[str, ...]] = ()

    f: Any

    def __post_init__(self) -> None:
        if callable(self.f):
            return
        if not callable(getattr(self.f, "process", None)):
            raise BuildError(
                "[ATTRIBUTE_NOT_CALLABLE] Attribute `process` in provided object `f` is not"
                f" callable: foreach takes a function of a row, or an object with process(row), not"
                f" {self.f!r}"
            )
        for name in ("open", "close"):
            if hasattr(self.f, name) and not callable(getattr(self.f, name)):
                raise BuildError(
                    f"[ATTRIBUTE_NOT_CALLABLE] Attribute `{name}` in provided object `f` is not"
                    " callable: make it a method"
                )

    def from_options(self, options: Options, schema: pa.Schema) -> Sink:
        try:
            pickled: bytes = cloudpickle.dumps(self.f)  # type: ignore[no-untyped-call]
        except Exception as error:  # a user's object may raise anything
            raise BuildError(
                f"what foreach was given cannot be sent to executors: {error}; let open(...) make"
                " such objects itself"
            ) from error
        named = self.f if callable(self.f) else type(self.f)
        return ForeachSink(pickled, name_of(named), from_arrow_schema(schema))


@dataclass(frozen=True)
class ForeachSink(TransactionalSink):
    guarantee: ClassVar[SinkGuarantee] = "at-least-once"  # type: ignore[misc]
    weakness: ClassVar[str | None] = (  # type: ignore[misc]
        "is given rows again after a failure, with the same partition and epoch"
    )

    pickled: bytes = field(repr=False)
    name: str
    columns: StructType

    @property
    def tied_to(self) -> None:
        return None

    def open_target(self) -> Target:
        return _ForeachTarget(self)

    def describe(self) -> str:
        return f"foreach {self.name}"


class _ForeachTarget(Target):
    """Keeps nothing between two epochs: as in Spark, each begins with a copy of what was given."""

    def __init__(self, sink: ForeachSink) -> None:
        self._sink = sink

    def begin(self, writer: Writer) -> CheckpointId | None:
        return None

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        f: Any = cloudpickle.loads(self._sink.pickled)
        each = rows_of(rows, self._sink.columns)
        if callable(f):
            for row in each:
                f(row)
        else:
            _hand_over(f, mark, each)


def _hand_over(f: Any, mark: Mark, rows: Iterator[Row]) -> None:
    """In Spark's order; the epoch is the checkpoint's number, which never goes back."""
    is_wanted = not hasattr(f, "open") or f.open(mark.writer.subtask, mark.checkpoint_id)
    error: Exception | None = None
    try:
        if is_wanted:
            for row in rows:
                f.process(row)
    except Exception as raised:
        error = raised
        raise
    finally:
        if hasattr(f, "close"):
            f.close(error)
