"""What the options of `postgres`, `mysql` and `jdbc` say: which server, which table, and how.

The names are those of Spark's JDBC writer; what it lacks is ours. Nothing here imports a driver, so
that a session which never writes to a database does not pay for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import pyarrow as pa

from stillframe.config import parse_flag
from stillframe.errors import BuildError
from stillframe.options import Options
from stillframe.secrets import Secret

Dialect = Literal["postgres", "mysql"]

SINK_OPTIONS = (
    "url",
    "dbtable",
    "user",
    "password",
    "upsertKeys",
    "deleteColumn",
    "createTable",
    "createTableColumnTypes",
    "markTable",
    "onRefused",
)
WITHOUT_EFFECT = ("batchsize", "isolationLevel", "numPartitions", "queryTimeout")
"""Spark's, about things that are done in another way here."""

_SCHEMES: Mapping[str, Dialect] = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
}
_PORTS: Mapping[Dialect, int] = {"postgres": 5432, "mysql": 3306}
_DRIVERS: Mapping[str, Dialect] = {
    "org.postgresql.driver": "postgres",
    "com.mysql.jdbc.driver": "mysql",
    "com.mysql.cj.jdbc.driver": "mysql",
    "org.mariadb.jdbc.driver": "mysql",
}
_OF_JAVA = frozenset(
    {
        "allowpublickeyretrieval", "autoreconnect", "cacheprepstmts", "characterencoding",
        "connectiontimezone", "preparethreshold", "prepstmtcachesize", "prepstmtcachesqllimit",
        "rewritebatchedinserts", "rewritebatchedstatements", "servertimezone", "stringtype",
        "tcpkeepalive", "tinyint1isbit", "usecompression", "useserverprepstmts", "useunicode",
        "zerodatetimebehavior",
    }
)  # fmt: skip
"""What an address of JDBC may say that only concerns Java's driver."""
_NAME = r"\w[\w$]*"
_ONE = rf'(?:({_NAME})|"([^"%]+)"|`([^`%]+)`)'
_NAMED = re.compile(rf"{_ONE}(?:\.{_ONE})?")
_TYPE = re.compile(r"[A-Za-z][\w ]*(\(\s*\d+\s*(,\s*\d+\s*)?\))?[\w ]*")


@dataclass(frozen=True)
class Address:
    """A database, and who we are there."""

    dialect: Dialect
    host: str
    port: int
    database: str
    user: str | None = None
    password: Secret | None = None
    settings: tuple[tuple[str, str], ...] = ()
    """What follows the question mark of the address."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.database}"


@dataclass(frozen=True)
class TableName:
    schema: str | None
    """In MySQL, a database. None: the one that the server takes for it."""
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name


@dataclass(frozen=True)
class Table:
    """Where rows go to, and what becomes of them there."""

    name: TableName
    schema: pa.Schema
    """Of the stream."""
    marks: TableName
    keys: tuple[str, ...] = ()
    """Rows replace those with the same keys; without any they are added."""
    delete_column: str | None = None
    """Rows for which it is true remove those with the same keys."""
    is_created: bool = False
    """Whether a table that is missing is created."""
    created_types: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> pa.Schema:
        """Those that are written."""
        return pa.schema([field for field in self.schema if field.name != self.delete_column])


def address_of(options: Options, wanted: Dialect | None) -> Address:
    """The one of option url; `wanted` None: it says itself what it is."""
    text = options.get("url", "").strip()
    if not text:
        example = "postgresql://host:5432/shop" if wanted == "postgres" else "mysql://host/shop"
        raise BuildError(f"a database sink needs the option url, such as '{example}'")
    url = _split(text)
    dialect = _SCHEMES.get(url.scheme)
    if dialect is None or (wanted is None and not text.lower().startswith("jdbc:")):
        raise BuildError(
            f"option url is {text!r}, which is no address of PostgreSQL, MySQL or MariaDB: say"
            " jdbc:postgresql://host:5432/shop, or jdbc:mysql://host:3306/shop"
        )
    if wanted is not None and wanted != dialect:
        raise BuildError(
            f"option url is {text!r}, which is no address for format({wanted!r}): say"
            f" format({dialect!r}), or correct the address"
        )
    _refuse_driver(options, dialect)
    try:
        port = url.port or _PORTS[dialect]
    except ValueError:
        raise BuildError(f"option url is {text!r}, whose port is no number") from None
    database = unquote(url.path.strip("/"))
    if not url.hostname or not database or "/" in database:
        raise BuildError(
            f"option url is {text!r}, and it has to name one server and one database: say"
            f" {url.scheme}://host:{_PORTS[dialect]}/shop"
        )
    said = dict(parse_qsl(url.query, keep_blank_values=True))
    user = options.get("user") or said.pop("user", None) or url.username
    password = options.secret("password") if "password" in options else None
    kept = tuple((name, value) for name, value in said.items() if name.lower() not in _OF_JAVA)
    return Address(dialect, url.hostname, port, database, user, password, kept)


def _split(text: str) -> SplitResult:
    begins = "jdbc:"
    try:
        return urlsplit(text[len(begins) :] if text.lower().startswith(begins) else text)
    except ValueError:
        raise BuildError(f"option url is {text!r}, which is no address") from None


def _refuse_driver(options: Options, dialect: Dialect) -> None:
    driver = options.get("driver")
    if driver is not None and _DRIVERS.get(driver.strip().lower()) != dialect:
        raise BuildError(
            f"option driver is {driver!r}, which does not belong to the url: leave it out, rows are"
            " written without Java"
        )


def table_of(options: Options, schema: pa.Schema, dialect: Dialect) -> Table:
    """The table that the options name, for a stream of this schema."""
    name = _table_name(options["dbtable"], "dbtable", dialect)
    marks = _table_name(options.get("markTable", "stillframe_marks"), "markTable", dialect)
    if marks.schema is None:
        marks = TableName(name.schema, marks.name)
    keys = _names_of(options.get("upsertKeys", ""), schema, "upsertKeys")
    deleted = _names_of(options.get("deleteColumn", ""), schema, "deleteColumn")
    if deleted and (len(deleted) > 1 or not pa.types.is_boolean(schema.field(deleted[0]).type)):
        raise BuildError(
            f"option deleteColumn is {options['deleteColumn']!r}, and has to be one column that is"
            " true or false"
        )
    if deleted and (not keys or deleted[0] in keys):
        raise BuildError(
            "option deleteColumn needs option upsertKeys, with other columns: rows are deleted by"
            " their keys"
        )
    for field in schema:
        kind_of(field)
    return Table(
        name,
        schema,
        marks,
        keys,
        deleted[0] if deleted else None,
        parse_flag("createTable", options.get("createTable", "false")),
        _created_types(options.get("createTableColumnTypes", ""), schema),
    )


def _table_name(text: str, option: str, dialect: Dialect) -> TableName:
    found = _NAMED.fullmatch(text.strip())
    if found is None:
        raise BuildError(
            f"option {option} is {text!r}, and has to name a table, such as counts or shop.counts;"
            " a name with other signs is put in quotes"
        )
    fold = str.lower if dialect == "postgres" else str
    plain, *quoted = found.groups()[:3]
    first = fold(plain) if plain else next(filter(None, quoted))
    plain, *quoted = found.groups()[3:]
    second = fold(plain) if plain else next(filter(None, quoted), None)
    return TableName(None, first) if second is None else TableName(first, second)


def _names_of(text: str, schema: pa.Schema, option: str) -> tuple[str, ...]:
    """Columns of the stream, in any spelling."""
    spelled = {name.lower(): name for name in schema.names}
    found = []
    for name in filter(None, map(str.strip, text.split(","))):
        if name.lower() not in spelled:
            raise BuildError(
                f"option {option} names a column {name}, and the stream has"
                f" {', '.join(schema.names)}"
            )
        found.append(spelled[name.lower()])
    return tuple(dict.fromkeys(found))


def _created_types(text: str, schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    """As Spark has it: `name VARCHAR(64), price DECIMAL(10, 2)`."""
    found = []
    for each in filter(None, map(str.strip, re.split(r",(?![^(]*\))", text))):
        name, _, type_ = each.partition(" ")
        [column] = _names_of(name.strip('"`'), schema, "createTableColumnTypes") or [""]
        if not _TYPE.fullmatch(type_.strip()):
            raise BuildError(
                f"option createTableColumnTypes has {each!r}, which is no name with a type, such as"
                " name VARCHAR(64)"
            )
        found.append((column, type_.strip()))
    return tuple(found)


# --- Types ------------------------------------------------------------------------------------

Kind = Literal[
    "integer", "float", "double", "decimal", "text", "bytes", "truth", "date", "moment", "local"
]
"""What a column of a stream holds, for a database. A moment has a time zone, a local time none."""


def kind_of(field: pa.Field) -> Kind:
    """Raises `BuildError` for what no column of a database takes."""
    type_ = field.type
    kinds: dict[Kind, bool] = {
        "integer": pa.types.is_signed_integer(type_),
        "float": pa.types.is_float32(type_),
        "double": pa.types.is_float64(type_),
        "decimal": pa.types.is_decimal(type_),
        "text": pa.types.is_string(type_),
        "bytes": pa.types.is_binary(type_),
        "truth": pa.types.is_boolean(type_),
        "date": pa.types.is_date32(type_),
        "moment": pa.types.is_timestamp(type_) and type_.tz is not None,
        "local": pa.types.is_timestamp(type_) and type_.tz is None,
    }
    for kind, holds in kinds.items():
        if holds:
            return kind
    raise BuildError(
        f"column {field.name} is {type_}, which a database has no column for: cast it, or make a"
        " text of it with to_json"
    )
