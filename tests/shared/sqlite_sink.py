"""A real system with transactions that needs no server: rows and marks in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from stillframe.api.sinks import Target
from stillframe.connectors.transactional import OnRefused, TransactionalSink
from stillframe.errors import Unavailable
from stillframe.ids import CheckpointId, Mark, Writer


@dataclass(frozen=True)
class SqliteSink(TransactionalSink):
    """Appends the first two columns, `id` and another, to the table `rows`; no negative ids."""

    path: str
    on_refused: OnRefused = "fail"

    def open_target(self) -> Target:
        return SqliteTarget(self.path)

    def describe(self) -> str:
        return f"sqlite {self.path}"


@dataclass(frozen=True)
class SqliteSinkOnDriver(SqliteSink):
    commits_at_coordinator: ClassVar[bool] = True


class SqliteTarget(Target):
    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(
            path, timeout=0.5, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("create table if not exists rows (id integer, key integer)")
        self._connection.execute(
            "create table if not exists marks (writer text primary key, checkpoint integer)"
        )

    def begin(self, writer: Writer) -> CheckpointId | None:
        try:
            self._connection.execute("begin immediate")  # nobody else writes from here on
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the database is locked: {error}") from error
        found = self._connection.execute(
            "select checkpoint from marks where writer = ?", [str(writer)]
        ).fetchone()
        return None if found is None else CheckpointId(found[0])

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        for batch in rows:
            good = [value >= 0 for value in batch.column("id").to_pylist()]
            if not all(good):
                refuse(batch.filter(pa.array([not each for each in good])), "a negative id")
                batch = batch.filter(pa.array(good))
            columns = [column.to_pylist() for column in batch.columns[:2]]
            inserted = "insert into rows values (?, ?)"
            self._connection.executemany(inserted, zip(*columns, strict=True))
        self._connection.execute(
            "insert or replace into marks values (?, ?)", [str(mark.writer), mark.checkpoint_id]
        )
        self._connection.execute("commit")

    def abandon(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("rollback")

    def close(self) -> None:
        self._connection.close()


def rows_in(path: str) -> list[tuple[int, int]]:
    """Everything that is visible there, sorted."""
    connection = sqlite3.connect(path)
    try:
        return sorted(connection.execute("select id, key from rows").fetchall())
    except sqlite3.OperationalError:  # nothing was ever written
        return []
    finally:
        connection.close()
