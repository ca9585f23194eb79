"""PostgreSQL, MySQL and MariaDB as sinks: rows are added, or replace those with the same keys.

Theory of operation
-------------------
Rows are staged with the checkpoint (`transactional.py`). When it is complete, one ordinary
transaction of the database loads them and updates the row of their writer in a table of marks, in
the same database. `begin` locks that row first, so that of two committers one waits for the other
and then finds its mark. Nothing is open on the server between two checkpoints.

Rows with keys are exact in the same way. What they leave is also right if somebody restores an
older checkpoint: the keys that are written again get their values again.

What each database does in its own way is in `postgres_session.py` and `mysql_session.py`. This file
imports no driver.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.sinks import Sink, SinkContext, SinkWriter, Target
from stillframe.connectors.database_options import (
    Address,
    Dialect,
    Table,
    address_of,
    table_of,
)
from stillframe.connectors.database_session import Column, LoginRefused, Session
from stillframe.connectors.transactional import (
    OnRefused,
    StagingWriter,
    TransactionalSink,
    required_staging,
)
from stillframe.errors import BuildError, DataError, StartRefused, Unavailable
from stillframe.ids import Writer
from stillframe.options import Options

log = logging.getLogger("stillframe")

_ASK_AGAIN_SECONDS = 10.0


def postgres_from_options(options: Options, schema: pa.Schema) -> Sink:
    """What `writeStream.format("postgres").option(…)` asks for."""
    return _from_options(options, schema, "postgres")


def mysql_from_options(options: Options, schema: pa.Schema) -> Sink:
    """What `writeStream.format("mysql").option(…)` asks for, of MySQL or MariaDB."""
    return _from_options(options, schema, "mysql")


def jdbc_from_options(options: Options, schema: pa.Schema) -> Sink:
    """What `writeStream.format("jdbc").option(…)` asks for: its url says of which database."""
    return _from_options(options, schema, None)


def _from_options(options: Options, schema: pa.Schema, wanted: Dialect | None) -> DatabaseSink:
    address = address_of(options, wanted)
    table = table_of(options, schema, address.dialect)
    refused = options.get("onRefused", "fail").lower()
    if refused not in ("fail", "go on"):
        raise BuildError(f"option onRefused is 'fail' or 'go on', not {refused!r}")
    on_refused: OnRefused = "fail" if refused == "fail" else "go on"
    return DatabaseSink(address, table, on_refused)


@dataclass(frozen=True)
class DatabaseSink(TransactionalSink):
    """Rows show in the table with each checkpoint, each once, whatever is killed."""

    marks_expire: ClassVar[bool] = True
    """Not by themselves, but a table is easily emptied."""

    address: Address
    table: Table
    on_refused: OnRefused = "fail"

    def open_session(self) -> Session:
        if self.address.dialect == "postgres":
            from stillframe.connectors.postgres_session import PostgresSession

            return PostgresSession(self.address, self.table)
        from stillframe.connectors.mysql_session import MysqlSession

        return MysqlSession(self.address, self.table)

    def open_target(self) -> Target:
        from stillframe.connectors.database_target import DatabaseTarget

        return DatabaseTarget(self.table, self.open_session)

    def open_writer(self, context: SinkContext) -> SinkWriter:
        staging = required_staging(context.staging, self)
        return StagingWriter(staging, context, _Refusing(self).check_batch)

    def check_start(self) -> None:
        try:
            with closing(self.open_session()) as session:
                session.check_start()
        except (DataError, LoginRefused, Unavailable) as error:
            raise StartRefused(str(error)) from None

    def mark_in_words(self, writer: Writer) -> str:
        return f"row of writer {writer} in table {self.table.marks}"

    def describe(self) -> str:
        return f"{self.address.dialect} table {self.table.name} at {self.address}"

    @property
    def tied_to(self) -> str:
        return f"{self.address.dialect} {self.address.database} {self.table.name}"


@dataclass
class _Refusing:
    """Finds at once what the database would refuse when the checkpoint is complete."""

    sink: DatabaseSink
    columns: dict[str, Column] = field(default_factory=dict)
    asked_at: float | None = None

    def check_batch(self, batch: pa.RecordBatch) -> None:
        table = self.sink.table
        for key in table.keys:
            if batch.column(key).null_count:
                raise DataError(
                    f"a row has no {key}, by which it is to replace others in table {table.name}:"
                    " filter such rows out, or correct upsertKeys"
                )
        self._ask()
        if not self.columns:
            return
        if table.delete_column is not None:
            goes = pc.fill_null(batch.column(table.delete_column), False)
            batch = batch.filter(pc.invert(goes))
        for name, column in self.columns.items():
            said = _refusal(batch.column(name), column)
            if said is not None:
                raise DataError(
                    f"column {name} has {said}, and column {column.name} of table {table.name} is"
                    f" {column.shown}{'' if column.takes_null else ' not null'}: correct the rows,"
                    " or alter the table"
                )

    def _ask(self) -> None:
        """Records do not wait for the database: what is refused later is kept aside."""
        now = time.monotonic()
        if self.columns or (self.asked_at and now < self.asked_at + _ASK_AGAIN_SECONDS):
            return
        self.asked_at = now
        try:
            with closing(self.sink.open_session()) as session:
                found = session.found()
            self.columns = {} if found is None else dict(found.columns)
        except (DataError, LoginRefused, Unavailable) as error:
            log.warning("rows for %s are not checked: %s", self.sink.describe(), error)


def _refusal(values: pa.Array, column: Column) -> str | None:
    if values.null_count and not column.takes_null:
        return "a null"
    if column.whole is not None and pa.types.is_integer(values.type):
        ends = pc.min_max(values).as_py()
        for number in (ends["min"], ends["max"]):
            if number is not None and number not in column.whole:
                return f"the number {number}"
    longest_max = column.characters_max
    if longest_max is not None and pa.types.is_string(values.type):
        # A text has no more characters than bytes, and those need not be counted.
        over = values.filter(pc.greater(pc.binary_length(values), longest_max))
        longest = pc.max(pc.utf8_length(over)).as_py() or 0
        if longest > longest_max:
            return f"a text of {longest} characters"
    return None
