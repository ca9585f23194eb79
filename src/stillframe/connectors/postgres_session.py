"""PostgreSQL: rows go in by COPY, made of whole columns; psycopg 3 carries them.

They go in the binary form, which the server reads more cheaply, unless a column has a type whose
form is not known here (`numeric`, `uuid`, `jsonb`): then all of them go as texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import psycopg
import pyarrow as pa

from stillframe.connectors.database_options import Kind, TableName
from stillframe.connectors.database_session import (
    CHUNK_BYTES_MAX,
    CONNECT_SECONDS_MAX,
    IDLE_SECONDS_MAX,
    LOCK_SECONDS_MAX,
    Column,
    FoundTable,
    LoginRefused,
    NoSuchTable,
    Refused,
    Session,
)
from stillframe.connectors.database_texts import as_csv
from stillframe.connectors.postgres_binary import as_binary, takes_binary
from stillframe.errors import DataError, Unavailable

_Form = tuple[Literal["binary", "csv"], Sequence[memoryview | bytes]]
"""Rows as COPY takes them: in which form, and in pieces."""

_STAGE = TableName("pg_temp", "stillframe_stage")
_WHOLE = {"int2": 15, "int4": 31, "int8": 63}
_NUMBERS = frozenset({"int2", "int4", "int8", "numeric", "float8"})
_LENGTH_BEFORE = 4
"""What atttypmod counts too."""

_REFUSED_CLASSES = ("21", "22", "23", "44", "P0")
"""Of SQLSTATE: more than one row, data, integrity, a view's check, what a trigger raises."""
_LOGIN_CLASS = "28"
"""Who we are."""
_FINAL_CLASSES = ("0A", "3D", "3F", "42")
"""Not supported; which database, which schema, what is asked for."""
_READ_ONLY = "25006"
_NO_TABLE = "42P01"


class PostgresSession(Session):
    product = "PostgreSQL"
    quote = '"'
    chunk_bytes_max = CHUNK_BYTES_MAX
    # What would be refused at the end of the transaction is refused at once.
    beginning = "begin; set constraints all immediate"
    marks_columns = (
        "writer text primary key, checkpoint_id bigint not null,"
        " committed_at timestamptz not null default current_timestamp"
    )
    fitting: ClassVar[Mapping[Kind, frozenset[str]]] = {
        "integer": _NUMBERS,
        "float": frozenset({"float4", "float8"}),
        "double": frozenset({"float8"}),
        "decimal": frozenset({"numeric"}),
        "text": frozenset(
            {
                "text",
                "varchar",
                "bpchar",
                "name",
                "citext",
                "json",
                "jsonb",
                "uuid",
                "xml",
                "inet",
                "cidr",
                "macaddr",
                "enum",
            }
        ),
        "bytes": frozenset({"bytea"}),
        "truth": frozenset({"bool"}),
        "date": frozenset({"date"}),
        "moment": frozenset({"timestamptz", "timestamp"}),
        "local": frozenset({"timestamp"}),
    }
    created: ClassVar[Mapping[Kind, str]] = {
        "integer": "bigint",
        "float": "real",
        "double": "double precision",
        "text": "text",
        "bytes": "bytea",
        "truth": "boolean",
        "date": "date",
        "moment": "timestamptz",
        "local": "timestamp",
    }

    def connect(self) -> Any:
        at = self.address
        usual: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS_MAX,
            "application_name": "stillframe",
        }
        connection = psycopg.connect(
            **{**usual, **_settings(at.settings)},
            host=at.host,
            port=at.port,
            dbname=at.database,
            user=at.user,
            password=None if at.password is None else at.password.reveal(),
            client_encoding="utf8",
            autocommit=True,
            prepare_threshold=None,  # a pooler may give the next statement to another server
        )
        connection.execute(
            f"set lock_timeout = '{LOCK_SECONDS_MAX}s';"
            f" set idle_in_transaction_session_timeout = '{IDLE_SECONDS_MAX}s';"
            " set tcp_keepalives_idle = 20; set tcp_keepalives_interval = 10;"
            " set tcp_keepalives_count = 3;"
            # What is committed is told to be durable, so it has to be.
            " select set_config('synchronous_commit', 'on', false)"
            " where current_setting('synchronous_commit') = 'off'"
        )
        return connection

    def understood(self, error: Exception) -> Exception:
        if not isinstance(error, psycopg.Error):
            return error
        state = error.sqlstate or ""
        said = error.diag.message_primary or str(error).partition("\n")[0]
        at = f"PostgreSQL at {self.address}"
        if state == _NO_TABLE:
            return NoSuchTable(
                f"{at} has no such table ({said}): create it, then start the job again, it goes on"
            )
        if state.startswith(_REFUSED_CLASSES):
            return Refused(f"{state} {error.diag.constraint_name}", said)
        is_login = "password authentication failed" in said or "no password supplied" in said
        is_login = is_login or state.startswith(_LOGIN_CLASS)
        if is_login or (state.startswith(_FINAL_CLASSES) and state != _READ_ONLY):
            refused = LoginRefused if is_login else DataError
            return refused(
                f"{at} refuses what the sink for table {self.table.name} asks ({said}): correct the"
                " options url, user and password, or what this user may do there"
            )
        if isinstance(error, psycopg.OperationalError) and not state:
            return Unavailable(
                f"{at} cannot be reached ({said}): start it, or correct the option url"
            )
        return Unavailable(f"{at} cannot do what is asked of it now ({said})")

    def found(self) -> FoundTable | None:
        name = self.named(self.table.name)
        [(oid,)] = self.execute("select to_regclass(%s)::oid::bigint", name)
        if oid is None:
            return None
        columns = [_column(*row) for row in self.execute(_COLUMNS, oid)]
        unique = [names for (names,) in self.execute(_UNIQUE, oid)]
        return self.matched(columns, unique, str)

    def refusal(self, found: FoundTable) -> str | None:
        [(kind,)] = self.execute(
            "select relkind::text from pg_class where oid = to_regclass(%s)",
            self.named(self.table.name),
        )
        if kind not in ("r", "p"):
            return f"{self.table.name} is no table in PostgreSQL at {self.address}: name one"
        return None

    def add_mark(self, writer: str) -> None:
        self.execute(
            f"insert into {self.named(self.table.marks)} (writer, checkpoint_id) values (%s, -1)"
            " on conflict (writer) do nothing",
            writer,
        )

    # --- Rows ---

    _types: Mapping[str, str] = MappingProxyType({})
    """Of the table's columns."""

    def get_ready(self) -> None:
        """Nobody alters the columns from here to the end of the transaction."""
        name = self.named(self.table.name)
        self.execute(f"lock table only {name} in row exclusive mode")
        columns = self.execute(_COLUMNS_OF_NAME, name)
        self._types = dict(columns)

    def loading(self, rows: pa.RecordBatch) -> Callable[[], None]:
        return partial(self._copy, self.named(self.table.name), rows.schema.names, self._form(rows))

    def _form(self, rows: pa.RecordBatch) -> _Form:
        types = [self._types.get(name, "") for name in rows.schema.names]
        if takes_binary(types):
            try:
                return "binary", as_binary(rows, types)
            except pa.ArrowInvalid:  # a value that does not fit, which the database has to tell
                pass
        return "csv", [memoryview(as_csv(rows))]

    def merge(self, rows: pa.RecordBatch) -> None:
        names, keys = rows.schema.names, self.table.keys
        self._stage(rows)
        changed = [f"{n} = excluded.{n}" for n in map(self.named, names) if n not in self._keys()]
        self.execute(
            f"insert into {self.named(self.table.name)} ({self.listed(names)})"
            f" select {self.listed(names)} from {self.named(_STAGE)}"
            f" on conflict ({self.listed(keys)})"
            f" do {'update set ' + ', '.join(changed) if changed else 'nothing'}"
        )

    def delete(self, keys: pa.RecordBatch) -> None:
        self._stage(keys)
        stage = self.named(_STAGE)
        same = " and ".join(f"t.{key} = {stage}.{key}" for key in self._keys())
        self.execute(f"delete from {self.named(self.table.name)} t using {stage} where {same}")

    def _keys(self) -> list[str]:
        return [self.named(key) for key in self.table.keys]

    def _stage(self, rows: pa.RecordBatch) -> None:
        """In a table of this session with the types of the target's columns and nothing else."""
        stage = self.named(_STAGE)
        columns = self.listed(rows.schema.names)
        self.execute(f"drop table if exists {stage}")
        self.execute(
            f"create temporary table {self.named(_STAGE.name)} on commit drop as"
            f" select {columns} from {self.named(self.table.name)} with no data"
        )
        self._copy(stage, rows.schema.names, self._form(rows))

    def _copy(self, table: str, columns: Sequence[str], form: _Form) -> None:
        format_, pieces = form
        statement = f"copy {table} ({self.listed(columns)}) from stdin (format {format_})"
        with (
            self.understanding(),
            self._connection.cursor() as cursor,
            cursor.copy(statement) as copy,
        ):
            for piece in pieces:
                copy.write(piece)


_COLUMNS = """
select attname, case when b.typtype = 'e' then 'enum' else b.typname end,
  format_type(a.atttypid, a.atttypmod), not (a.attnotnull or t.typnotnull),
  atthasdef or attidentity <> '' or t.typdefault is not null, attgenerated <> '',
  case when t.typtype = 'd' then t.typtypmod else a.atttypmod end
from pg_attribute a join pg_type t on t.oid = a.atttypid
  join pg_type b on b.oid = case when t.typtype = 'd' then t.typbasetype else t.oid end
where attrelid = %s and attnum > 0 and not attisdropped order by attnum
"""
_COLUMNS_OF_NAME = """
select attname, case when b.typtype = 'e' then 'enum' else b.typname end
from pg_attribute a join pg_type t on t.oid = a.atttypid
  join pg_type b on b.oid = case when t.typtype = 'd' then t.typbasetype else t.oid end
where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped
"""
_UNIQUE = """
select array(select attname::text from pg_attribute where attrelid = i.indrelid
             and attnum = any((i.indkey::int2[])[0:i.indnkeyatts - 1]))
from pg_index i
where indrelid = %s and indisunique and indisvalid and indimmediate
  and indpred is null and indexprs is null
"""


def _column(
    name: str, type_: str, shown: str, takes_null: bool, filled: bool, generated: bool, length: int
) -> Column:
    bits = _WHOLE.get(type_)
    has_length = length >= _LENGTH_BEFORE
    return Column(
        name,
        type_,
        shown,
        takes_null,
        filled,
        generated,
        characters_max=(
            length - _LENGTH_BEFORE if has_length and type_ in ("varchar", "bpchar") else None
        ),
        scale=_scale(length - _LENGTH_BEFORE) if has_length and type_ == "numeric" else None,
        whole=range(-(2**bits), 2**bits) if bits else None,
    )


def _scale(length: int) -> int:
    """Eleven bits of it, of which the first is the sign."""
    return (length & 0x7FF ^ 0x400) - 0x400


def _settings(given: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """libpq's names are taken as they are, some of Java's are understood."""
    found = {}
    for name, value in given:
        match name:
            case "ssl":
                found["sslmode"] = "verify-full" if value.lower() in ("", "true") else "prefer"
            case "currentSchema":
                found["options"] = f"-c search_path={value}"
            case "ApplicationName" | "loginTimeout" | "connectTimeout" | "socketTimeout":
                pass
            case _:
                found[name] = value
    return found
