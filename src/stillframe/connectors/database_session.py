"""One connection to a database: what PostgreSQL and MySQL have in common, and what each must say.

Rules of this file
------------------
1. A session is opened for one thing (a check, or one transaction) and closed after it: nothing is
   held on the server between two checkpoints, and no connection grows old.
2. Whatever a driver raises is understood at once, by `understood`: `Refused` for rows that the
   database does not take, `Unavailable` for what may heal, `LoginRefused` for what another attempt
   may have another answer to, `DataError` for what will not heal.
3. The mark's row is locked before it is read, and stays locked until the transaction is over. One
   that holds it and does nothing is ended by the server after `IDLE_SECONDS_MAX`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from stillframe.connectors.database_options import Address, Kind, Table, TableName, kind_of
from stillframe.errors import DataError, StillframeError, Unavailable

CHUNK_BYTES_MAX = 8 << 20
CONNECT_SECONDS_MAX = 5
LOCK_SECONDS_MAX = 10
IDLE_SECONDS_MAX = 60
"""How long a transaction of ours may say nothing: behind it a process stands still."""
_NO_MARK = -1
"""A row that is there only to be locked, until its transaction writes a mark."""


class Refused(DataError):
    """The database does not take these rows; one or more of them. `code` is of the kind of it."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class LoginRefused(StillframeError):
    """Not this user, or not with this password. It may have expired: the next attempt of a job
    reads a password of the environment or a file again."""


class NoSuchTable(DataError):
    """A statement named a table that is not there."""


@dataclass(frozen=True, slots=True)
class Column:
    """One of the table's."""

    name: str
    type: str
    """As the database names it, without its length."""
    shown: str
    """The same with all that belongs to it."""
    takes_null: bool
    is_filled: bool
    """Whether the database has a value for it where none is given."""
    is_generated: bool
    """Whether it takes no other value than its own."""
    characters_max: int | None = None
    scale: int | None = None
    whole: range | None = None
    """The numbers that a column of integers takes."""
    folds: str | None = None
    """How it compares texts, where different ones are the same to it."""


@dataclass(frozen=True, slots=True)
class FoundTable:
    columns: Mapping[str, Column]
    """By the name of the stream's column."""
    missing: tuple[str, ...]
    """Columns of the stream that the table does not have."""
    others: tuple[Column, ...]
    """Columns of the table that the stream does not have."""
    unique: tuple[frozenset[str], ...]
    """Sets of columns, by the table's names, of which no two rows may have the same values."""


class Session(ABC):
    """Used by one thread, but for `loading`. Every method may raise what rule 2 says."""

    product: ClassVar[str]
    quote: ClassVar[str]
    beginning: ClassVar[str] = "begin"
    marks_columns: ClassVar[str]
    fitting: ClassVar[Mapping[Kind, frozenset[str]]]
    """The types of columns that take a kind without changing it."""
    created: ClassVar[Mapping[Kind, str]]
    """The type of a column that is created for a kind."""
    created_keys: ClassVar[Mapping[Kind, str]] = {}
    """The same of a key, where it is another."""
    created_with: ClassVar[str] = ""

    def __init__(self, address: Address, table: Table) -> None:
        self.address = address
        self.table = table
        with self.understanding():
            self._connection = self.connect()

    # --- What a dialect says ---

    @property
    @abstractmethod
    def chunk_bytes_max(self) -> int:
        """How much is loaded at once."""

    @abstractmethod
    def connect(self) -> Any:
        """A connection of the driver's, for which each statement is a transaction of its own until
        it says `begin`."""

    @abstractmethod
    def understood(self, error: Exception) -> Exception:
        """What is raised for an error of the driver's."""

    @abstractmethod
    def found(self) -> FoundTable | None:
        """What the database says of the table; None: there is none."""

    @abstractmethod
    def add_mark(self, writer: str) -> None:
        """A row for this writer, if there is none; waits for one who is about to add it."""

    @abstractmethod
    def get_ready(self) -> None:
        """Learn what has to be known of the table before rows are loaded. Once, within the
        transaction."""

    @abstractmethod
    def loading(self, rows: pa.RecordBatch) -> Callable[[], None]:
        """Adds these when it is called. Until then the database hears nothing of them: what takes
        time is done now, in whichever thread asks."""

    @abstractmethod
    def merge(self, rows: pa.RecordBatch) -> None:
        """Put these in the place of those with the same keys, no two of which are the same."""

    @abstractmethod
    def delete(self, keys: pa.RecordBatch) -> None:
        """Remove the rows with these keys, if they are there."""

    def refusal(self, found: FoundTable) -> str | None:
        """What else is wrong with the table, in words, for this database."""
        return None

    # --- Statements ---

    @contextmanager
    def understanding(self) -> Iterator[None]:
        try:
            yield
        except StillframeError:
            raise
        except Exception as error:
            raise self.understood(error) from error

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with self.understanding(), self._connection.cursor() as cursor:
            cursor.execute(statement, values or None)  # without values, a % is a sign like others
            return list(cursor.fetchall()) if cursor.description else []

    def named(self, name: TableName | str) -> str:
        """As it is written in a statement."""
        if isinstance(name, TableName):
            parts = [name.schema, name.name] if name.schema else [name.name]
            return ".".join(map(self.named, parts))
        return f"{self.quote}{name.replace(self.quote, self.quote * 2)}{self.quote}"

    def listed(self, names: Sequence[str]) -> str:
        return ", ".join(map(self.named, names))

    def close(self) -> None:
        """What was begun and not committed is undone."""
        self._connection.close()

    # --- A transaction with a mark ---

    def begin(self, writer: str) -> int | None:
        """Begin a transaction that alone has this writer's mark; answers the mark."""
        try:
            return self._begun(writer)
        except NoSuchTable:
            self.execute("rollback")
            self.create_marks()
            return self._begun(writer)

    def _begun(self, writer: str) -> int | None:
        self.execute(self.beginning)
        found = self._locked(writer)
        if found is None:
            self.add_mark(writer)
            found = self._locked(writer)
        if found is None:
            raise Unavailable(f"the mark of {writer} is being removed from {self.table.marks}")
        return None if found == _NO_MARK else found

    def _locked(self, writer: str) -> int | None:
        statement = f"select checkpoint_id from {self.named(self.table.marks)} where writer = %s"
        rows = self.execute(f"{statement} for update", writer)
        return int(rows[0][0]) if rows else None

    def commit(self, writer: str, checkpoint_id: int) -> None:
        """With this mark."""
        marks = self.named(self.table.marks)
        self.execute(
            f"update {marks} set checkpoint_id = %s, committed_at = current_timestamp"
            " where writer = %s",
            checkpoint_id,
            writer,
        )
        self.execute("commit")

    def forget(self, writer: str) -> None:
        """Remove its mark, when nobody is at it."""
        self.begin(writer)
        self.execute(f"delete from {self.named(self.table.marks)} where writer = %s", writer)
        self.execute("commit")

    def writers(self, uid: str) -> list[str]:
        """That have a mark, at least those of this sink."""
        like = re.sub(r"\W", "_", uid)  # which stands for any one character
        statement = f"select writer from {self.named(self.table.marks)} where writer like %s"
        return [str(writer) for (writer,) in self.execute(statement, f"%/{like}/%")]

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        self.execute("savepoint here")
        try:
            yield
        except Refused:
            self.execute("rollback to savepoint here")
            raise
        self.execute("release savepoint here")

    # --- Before the start ---

    def check_start(self) -> None:
        """Create what is missing and may be created; raise a `DataError` for what does not fit."""
        found = self.found()
        if found is None and self.table.is_created:
            self.execute(self._create_statement())
            found = self.found()
        if found is None:
            raise DataError(
                f"table {self.table.name} does not exist in {self.product} at {self.address}:"
                " create it, or set option createTable to true"
            )
        said = misfit(self, found) or self.refusal(found)
        if said is not None:
            raise DataError(said)
        try:
            self.execute(f"select writer from {self.named(self.table.marks)} where writer = ''")
        except NoSuchTable:
            self.create_marks()

    def create_marks(self) -> None:
        self.execute(f"create table if not exists {self.named(self.table.marks)}"
                     f" ({self.marks_columns}) {self.created_with}")  # fmt: skip

    def _create_statement(self) -> str:
        given, keys = dict(self.table.created_types), self.table.keys
        lines = [
            f"{self.named(field.name)} {given.get(field.name) or self._created_type(field)}"
            + (" not null" if field.name in keys else "")
            for field in self.table.columns
        ]
        if keys:
            lines.append(f"primary key ({self.listed(keys)})")
        name = self.named(self.table.name)
        return f"create table if not exists {name} ({', '.join(lines)}) {self.created_with}"

    def _created_type(self, field: pa.Field) -> str:
        kind = kind_of(field)
        if kind == "decimal":
            return f"numeric({field.type.precision}, {field.type.scale})"
        if kind == "integer" and field.type.bit_width <= 32:
            return "smallint" if field.type.bit_width <= 16 else "integer"
        of_keys = self.created_keys if field.name in self.table.keys else {}
        return of_keys.get(kind) or self.created[kind]

    def matched(
        self, columns: Sequence[Column], unique: Iterable[Iterable[str]], fold: Callable[[str], str]
    ) -> FoundTable:
        """With the stream's columns found among these."""
        by_name = {fold(column.name): column for column in columns}
        names = self.table.columns.names
        found = {name: by_name[fold(name)] for name in names if fold(name) in by_name}
        taken = {column.name for column in found.values()}
        return FoundTable(
            found,
            tuple(name for name in names if name not in found),
            tuple(column for column in columns if column.name not in taken),
            tuple(map(frozenset, unique)),
        )


# --- What does not fit ------------------------------------------------------------------------


def misfit(session: Session, found: FoundTable) -> str | None:
    """Why the stream's rows cannot go to this table, in words; None: they can."""
    table = session.table
    of = f"of table {table.name}"
    for name in found.missing:
        has = ", ".join(each.name for each in (*found.columns.values(), *found.others))
        return f"table {table.name} has no column {name}: it has {has}; add it, or do not select it"
    for other in found.others:
        if not other.takes_null and not other.is_filled:
            return (
                f"column {other.name} {of} is not null and has no default, and the stream has no"
                " such column: select it, or give the table a default"
            )
    for field in table.columns:
        column = found.columns[field.name]
        if column.is_generated:
            return f"column {column.name} {of} is generated, and takes no values: do not select it"
        if not _fits(session, field, column):
            return (
                f"column {field.name} is {field.type}, which column {column.name} {of} does not"
                f" take as it is, being {column.shown}: cast the one, or alter the other"
            )
    keys = {found.columns[name].name for name in table.keys}
    if keys and keys not in found.unique:
        return (
            f"table {table.name} has no primary key or unique index of just the columns"
            f" {', '.join(table.keys)}, by which rows are replaced: create one, or correct"
            " upsertKeys"
        )
    return None


def _fits(session: Session, field: pa.Field, column: Column) -> bool:
    kind = kind_of(field)
    if column.type not in session.fitting[kind]:
        return False
    # A number with more places than the column would be rounded without a word.
    return kind != "decimal" or column.scale is None or field.type.scale <= column.scale
