"""MySQL and MariaDB: rows go in by LOAD DATA LOCAL if the server takes it, else by INSERT of many.

Both are made of whole columns. PyMySQL carries them.

LOAD DATA LOCAL lets a server ask for a file of this machine, by whatever name it likes. The only
one it gets is the memory that we have named to it, see `_Connection`. What LOAD DATA does not take
it skips with a warning, so after a warning the rows are undone and tried by INSERT.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pymysql

from stillframe.connectors.database_options import Kind
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
from stillframe.connectors.database_texts import as_lines, as_values
from stillframe.errors import DataError, Unavailable

log = logging.getLogger("stillframe")

_ANSWER_SECONDS_MAX = 300
_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_DELETED_AT_ONCE = 1_000
"""Beyond some thousands MySQL no longer looks for keys one by one, and reads the whole table."""

_REFUSED = {
    1048,  # null
    1062, 1586,  # a key that is there already
    1153,  # larger than a packet
    1216, 1452,  # no such row in another table
    1264, 1265, 1292, 1300, 1364, 1366, 1367, 1406, 1690,  # data
    1644,  # what a trigger raises
    3140, 3819, 4025,  # JSON and checks
}  # fmt: skip
_LOGIN = {1045, 1251, 1698, 1820, 1862, 3118, 4151}
"""Who we are; passwords that have expired, accounts that are locked."""
_FINAL = {1044, 1049, 1054, 1064, 1103, 1142, 1143, 1227}
"""Which database, what is asked for."""
_NO_TABLE = 1146
_LOADS = "allowLoadLocalInfile"
_AUTHORITIES = "serverSslCert"
_STATEMENT_BYTES_MAX = 64 << 10
"""Of an INSERT: for one of a megabyte MySQL needs a third more of the processor's time."""
_SILENT = range(2000, 2100)
"""Of the client: there is no connection, or no longer."""


class _Connection(pymysql.connections.Connection):  # type: ignore[misc]
    """Sends the server no file but the one that was named to it."""

    file: str | None = None
    """That one, for as long as the server may ask for it."""
    _begins_an_answer = False

    def _create_ssl_ctx(self, given: Any) -> ssl.SSLContext:
        """Where nobody is checked, without reading all whom this machine trusts: it takes longer
        than the rest of a connection."""
        return given if isinstance(given, ssl.SSLContext) else _encryption(ssl.CERT_NONE, False)

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        self._begins_an_answer = True
        return super()._read_query_result(unbuffered)

    def _read_packet(self, *given: Any) -> Any:
        # Further on, a packet that begins with the same byte is a row that begins with a null.
        begins, self._begins_an_answer = self._begins_an_answer, False
        packet = super()._read_packet(*given)
        if begins and packet.is_load_local_packet():
            asked = packet.get_all_data()[1:].decode(errors="replace")
            if asked != self.file:
                raise DataError(
                    f"MySQL at {self.host}:{self.port} asks for the file {asked!r} of this machine,"
                    " which it was not told of: do not trust this server"
                )
        return packet


class MysqlSession(Session):
    product = "MySQL"
    chunk_bytes_max = CHUNK_BYTES_MAX
    quote = "`"
    marks_columns = (
        "writer varchar(700) character set utf8mb4 collate utf8mb4_bin primary key,"
        " checkpoint_id bigint not null,"
        " committed_at timestamp not null default current_timestamp"
    )
    fitting: ClassVar[Mapping[Kind, frozenset[str]]] = {
        "integer": frozenset({*_BITS, "decimal", "double"}),
        "float": frozenset({"float", "double"}),
        "double": frozenset({"double"}),
        "decimal": frozenset({"decimal"}),
        "text": frozenset(
            {
                "char",
                "varchar",
                "tinytext",
                "text",
                "mediumtext",
                "longtext",
                "json",
                "enum",
                "set",
                "uuid",
                "inet4",
                "inet6",
            }
        ),
        "bytes": frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}),
        "truth": frozenset({"tinyint"}),
        "date": frozenset({"date"}),
        "moment": frozenset({"timestamp", "datetime"}),
        "local": frozenset({"datetime"}),
    }
    created: ClassVar[Mapping[Kind, str]] = {
        "integer": "bigint",
        "float": "float",
        "double": "double",
        "text": "longtext character set utf8mb4",
        "bytes": "longblob",
        "truth": "boolean",
        "date": "date",
        "moment": "datetime(6)",
        "local": "datetime(6)",
    }
    created_keys: ClassVar[Mapping[Kind, str]] = {
        "text": "varchar(255) character set utf8mb4 collate utf8mb4_bin",
        "bytes": "varbinary(255)",
    }
    created_with = "engine = InnoDB"

    _bytes_max: int | None = None
    _server_takes_files: bool | None = None

    def connect(self) -> Any:
        at = self.address
        connection = _Connection(
            host=at.host,
            port=at.port,
            database=at.database,
            user=at.user,
            password="" if at.password is None else at.password.reveal(),
            charset="utf8mb4",
            connect_timeout=CONNECT_SECONDS_MAX,
            read_timeout=_ANSWER_SECONDS_MAX,
            write_timeout=_ANSWER_SECONDS_MAX,
            autocommit=True,
            local_infile=self._may_load_files(),
            max_allowed_packet=1 << 30,  # the server's own limit is asked for
            init_command=(
                # Nothing is cut off or replaced, and a backslash escapes.
                "set sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00',"
                # Of rows, and of whole tables: for those MariaDB waits a day, and MySQL a year.
                f" innodb_lock_wait_timeout = {LOCK_SECONDS_MAX},"
                f" lock_wait_timeout = {LOCK_SECONDS_MAX},"
                f" wait_timeout = {IDLE_SECONDS_MAX}, net_read_timeout = {IDLE_SECONDS_MAX}"
            ),
            **_settings(at.settings),
        )
        # Without locks on what lies between rows. Older MariaDB has no variable of this name.
        connection.query("set session transaction isolation level read committed")
        return connection

    def understood(self, error: Exception) -> Exception:
        if not isinstance(error, pymysql.MySQLError):
            return error
        number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        said = str(error.args[-1]) if error.args else type(error).__name__
        at = f"MySQL at {self.address}"
        if number == _NO_TABLE:
            return NoSuchTable(
                f"{at} has no such table ({said}): create it, then start the job again, it goes on"
            )
        if number in _REFUSED:
            return Refused(f"{number} {_constraint_in(said)}", said)
        if number in _LOGIN | _FINAL or isinstance(error, pymysql.ProgrammingError):
            refused = LoginRefused if number in _LOGIN else DataError
            return refused(
                f"{at} refuses what the sink for table {self.table.name} asks ({said}): correct the"
                " options url, user and password, or what this user may do there"
            )
        if number in _SILENT or number == 0:
            return Unavailable(
                f"{at} cannot be reached ({said}): start it, or correct the option url"
            )
        return Unavailable(f"{at} cannot do what is asked of it now ({said})")

    def found(self) -> FoundTable | None:
        columns = [_column(*row) for row in self.execute(_COLUMNS, *self._place())]
        if not columns:
            return None
        unique: dict[str, set[str]] = {}
        for index, column in self.execute(_UNIQUE, *self._place()):
            unique.setdefault(index, set()).add(column)
        return self.matched(columns, unique.values(), str.lower)

    def refusal(self, found: FoundTable) -> str | None:
        table = self.table
        [(engine, has_transactions)] = self.execute(_ENGINE, *self._place())
        if has_transactions != "YES":
            return (
                f"table {table.name} has the engine {engine}, which has no transactions: alter it"
                " to InnoDB"
            )
        keys = {found.columns[name].name for name in table.keys}
        numbered = {column.name for column in found.others if column.is_filled}
        for names in found.unique if keys else ():
            if names != keys and not names & numbered:
                return (
                    f"table {table.name} has a second unique index, of"
                    f" {', '.join(sorted(names))}, by which MySQL would replace rows too: drop it,"
                    " or make upsertKeys of its columns"
                )
        for name in table.keys:
            if (folds := found.columns[name].folds) is not None:
                log.warning(
                    "column %s of table %s compares texts by %s, to which A and a are the same key:"
                    " alter it to collate utf8mb4_bin if they are not",
                    name,
                    table.name,
                    folds,
                )
        return None

    def _place(self) -> tuple[str, str]:
        return self.table.name.schema or self.address.database, self.table.name.name

    def add_mark(self, writer: str) -> None:
        self.execute(
            f"insert ignore into {self.named(self.table.marks)} (writer, checkpoint_id)"
            " values (%s, -1)",
            writer,
        )

    # --- Rows ---

    def get_ready(self) -> None:
        """Rows go as texts, whatever the columns are."""

    def loading(self, rows: pa.RecordBatch) -> Callable[[], None]:
        # Whether the server takes files is asked when the first rows are loaded, not here.
        made = as_lines(rows) if self._server_takes_files else None
        return partial(self._load, rows, made)

    def _load(self, rows: pa.RecordBatch, made: memoryview | None) -> None:
        if rows.num_rows > 1 and self._loads_files(rows.schema):
            self._load_file(rows, made or as_lines(rows))
        else:
            self._insert(rows, b"")

    def _may_load_files(self) -> bool:
        is_off = dict(self.address.settings).get(_LOADS, "").lower() == "false"
        return not is_off and hasattr(os, "memfd_create")

    def _loads_files(self, schema: pa.Schema) -> bool:
        # Bytes are no text of any character set.
        if not self._may_load_files() or any(map(pa.types.is_binary, schema.types)):
            return False
        if self._server_takes_files is None:
            self._server_takes_files = self.execute("select @@local_infile") == [(1,)]
        return self._server_takes_files

    def _load_file(self, rows: pa.RecordBatch, lines: memoryview) -> None:
        """Out of memory, by the name that it has as an open file of this process."""
        file = os.memfd_create("stillframe")
        try:
            with open(file, "wb", closefd=False) as written:
                written.write(lines)
            os.lseek(file, 0, os.SEEK_SET)
            name = f"/proc/self/fd/{file}"
            self._connection.file = name
            with self.understanding(), self._connection.cursor() as cursor:
                taken = cursor.execute(
                    f"load data local infile '{name}' into table {self.named(self.table.name)}"
                    f" character set utf8mb4 ({self.listed(rows.schema.names)})"
                )
                if taken != rows.num_rows or cursor.warning_count:
                    raise Refused("warned", "LOAD DATA has skipped or changed rows")
        finally:
            self._connection.file = None
            os.close(file)

    def merge(self, rows: pa.RecordBatch) -> None:
        names = [self.named(name) for name in rows.schema.names]
        changed = [n for n in names if n not in map(self.named, self.table.keys)] or names[:1]
        updates = ", ".join(f"{name} = values({name})" for name in changed)
        self._insert(rows, f" on duplicate key update {updates}".encode())

    def delete(self, keys: pa.RecordBatch) -> None:
        names = self.listed(keys.schema.names)
        begins = f"delete from {self.named(self.table.name)} where ({names}) in ("
        for at in range(0, keys.num_rows, _DELETED_AT_ONCE):
            self._send(begins, as_values(keys.slice(at, _DELETED_AT_ONCE)), b")")

    def _insert(self, rows: pa.RecordBatch, ends: bytes) -> None:
        begins = (
            f"insert into {self.named(self.table.name)} ({self.listed(rows.schema.names)}) values "
        )
        step = max(1, rows.num_rows * _STATEMENT_BYTES_MAX // max(rows.nbytes, 1))
        for at in range(0, rows.num_rows, step):
            self._send(begins, as_values(rows.slice(at, step)), ends)

    def _packet_bytes_max(self) -> int:
        if self._bytes_max is None:
            [(self._bytes_max,)] = self.execute("select @@max_allowed_packet")
        return self._bytes_max

    def _send(self, begins: str, values: memoryview, ends: bytes) -> None:
        statement = b"".join((begins.encode(), values, ends))
        bytes_max = self._packet_bytes_max()
        if len(statement) >= bytes_max:  # beyond it the server hangs up
            raise Refused("1153", f"a row is larger than max_allowed_packet, which is {bytes_max}")
        with self.understanding():
            self._connection.query(statement)


_COLUMNS = """
select column_name, data_type, column_type, is_nullable, column_default, extra,
  character_maximum_length, numeric_scale, collation_name
from information_schema.columns where table_schema = %s and table_name = %s
order by ordinal_position
"""
_UNIQUE = """
select index_name, column_name from information_schema.statistics
where table_schema = %s and table_name = %s and non_unique = 0
"""
_ENGINE = """
select t.engine, e.transactions from information_schema.tables t
  left join information_schema.engines e on e.engine = t.engine
where table_schema = %s and table_name = %s
"""


def _column(
    name: str,
    type_: str,
    shown: str,
    nullable: str,
    default: str | None,
    extra: str,
    characters: int | None,
    scale: int | None,
    collation: str | None,
) -> Column:
    bits, unsigned = _BITS.get(type_), "unsigned" in shown
    return Column(
        name,
        type_,
        shown,
        takes_null=nullable == "YES",
        is_filled=default is not None or "auto_increment" in extra,
        is_generated="VIRTUAL GENERATED" in extra or "STORED GENERATED" in extra,
        characters_max=characters if type_ in ("char", "varchar") else None,
        scale=scale if type_ == "decimal" else None,
        whole=_whole(bits, unsigned) if bits else None,
        folds=collation if collation and not collation.endswith("_bin") else None,
    )


def _whole(bits: int, unsigned: bool) -> range:
    return range(2**bits) if unsigned else range(-(2 ** (bits - 1)), 2 ** (bits - 1))


def _constraint_in(said: str) -> str:
    """The last name in quotes: of a key, a column or a constraint."""
    named = re.findall(r"'([^']*)'|`([^`]*)`", said)
    return "".join(named[-1]) if named else ""


def _settings(given: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """What Java's address says about encryption; the file of certificates as MariaDB's has it."""
    found: dict[str, Any] = {}
    authorities = dict(given).get(_AUTHORITIES)
    for name, value in given:
        match name.lower(), value.lower():
            case ("usessl", "false") | ("sslmode", "disabled" | "disable"):
                found["ssl_disabled"] = True
            case ("usessl", "true") | ("sslmode", "required" | "trust"):
                found["ssl"] = _encryption(ssl.CERT_NONE, False)
            case ("sslmode", "verify_ca" | "verify-ca"):
                found["ssl"] = _encryption(ssl.CERT_REQUIRED, False, authorities)
            case ("sslmode", "verify_identity" | "verify-full"):
                found["ssl"] = _encryption(ssl.CERT_REQUIRED, True, authorities)
            case ("sslmode", "preferred") | ("allowloadlocalinfile", _) | ("serversslcert", _):
                pass
            case _:
                raise DataError(
                    f"the address of MySQL says {name}={value}, which this sink does not know:"
                    " leave it out of option url"
                )
    return found


def _encryption(
    mode: ssl.VerifyMode, checks_host: bool, authorities: str | None = None
) -> ssl.SSLContext:
    """Not left to PyMySQL, which does not look at the host where no file of certificates is given.

    None: those who sign for this machine's other programs.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = checks_host
    context.verify_mode = mode
    if mode is ssl.CERT_REQUIRED and authorities is None:
        context.load_default_certs()
    elif mode is ssl.CERT_REQUIRED:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise DataError(
                f"the address of MySQL says {_AUTHORITIES}={authorities}, which cannot be read"
                f" ({error}): name a file of certificates as PEM"
            ) from None
    return context
