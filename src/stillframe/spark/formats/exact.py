"""`foreachBatch` made exactly-once: functions that are known to be, and a write that is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from stillframe.connectors.database_sink import DatabaseSink
from stillframe.errors import DataError
from stillframe.ids import Mark, OperatorUid, Writer
from stillframe.spark.formats.choosing import chosen_sink
from stillframe.spark.formats.ours import option_text


@dataclass(frozen=True, slots=True)
class exactly_once:  # noqa: N801 - it reads as what it says of a function
    """Say of a function for `foreachBatch` that it ignores what it has seen.

    The last epoch may be handed to it again after a failure, with the same mark. If all that it
    does is done once whatever comes again, say so, and the job is exactly-once. Nobody can check
    it. What helps: a write by Spark with `mark.delta_options`, `stillframe.write_jdbc`, and
    whatever replaces the same rows by the same.
    """

    function: Callable[..., None]

    def __call__(self, *given: Any, **named: Any) -> None:
        self.function(*given, **named)


def write_jdbc(rows: DataFrame, mark: Mark, **options: Any) -> None:
    """Write these rows to a table of PostgreSQL, MySQL or MariaDB, unless they were.

    For functions of `foreachBatch`, which are called on the driver; the rows pass through its
    memory. `options` are those of `writeStream.format("jdbc")`. Rows and mark are written in one
    transaction. Each table has a mark of its own, so write once to each of them.
    """
    table = rows.toArrow()
    given = {name: option_text(value) for name, value in options.items()}
    conf = rows.sparkSession.conf
    made = chosen_sink("jdbc").made(given, table.schema, lambda name: conf.get(name, None))
    assert isinstance(made, DatabaseSink)
    if made.table.is_created:
        made.check_start()
    of = mark.writer
    writer = Writer(of.incarnation, OperatorUid(f"{of.uid}/{made.table.name}"), of.subtask)
    with closing(made.open_target()) as target:
        newest = target.begin(writer)
        if newest is None or newest < mark.checkpoint_id:
            target.write(Mark(writer, mark.checkpoint_id), iter(table.to_batches()), _refuse)


def _refuse(rows: pa.RecordBatch, reason: str) -> None:
    raise DataError(f"the table refuses {rows.num_rows} rows: {reason}")
