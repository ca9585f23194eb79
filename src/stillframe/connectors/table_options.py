"""What the options of `delta` and `iceberg` share, and files of tables on a local disk."""

from __future__ import annotations

import os
import re

import pyarrow as pa

from stillframe.errors import BuildError
from stillframe.options import Options
from stillframe.secrets import masked
from stillframe.storage.places import address_of

_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳|[├└]─[▶>]")
_SAID_CHARACTERS_MAX = 400
_DENIED = re.compile(r"\b40[13]\b|denied|forbidden|privileges", re.IGNORECASE)
_EXPIRED = re.compile(r"expired", re.IGNORECASE)


def partition_option(options: Options, schema: pa.Schema) -> tuple[str, ...] | None:
    """The columns that `partitionBy` names; None: it is not given."""
    text = options.get("partitionBy")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in schema.names:
            raise BuildError(
                f"partitionBy names a column {name}, and the stream has {', '.join(schema.names)}"
            )
        if pa.types.is_nested(schema.field(name).type):
            raise BuildError(
                f"partitionBy names column {name}, which is {schema.field(name).type}: a table is"
                " partitioned by plain values"
            )
    return names


def refuse_type(field: pa.Field) -> None:
    """Raise `BuildError` for a column that no table has."""
    types = pa.types
    if types.is_duration(field.type) or types.is_interval(field.type) or types.is_null(field.type):
        raise BuildError(f"column {field.name} is {field.type}, which a table has no type for")


def local_or_none(address: str) -> str | None:
    """The path of what is on this machine's disks."""
    return None if "://" in address and not address.startswith("file:") else address_of(address)


def in_one_line(error: BaseException) -> str:
    """What a library has said over several lines, with arrows and in colours."""
    said = masked(" ".join(_DECORATION.sub(" ", str(error)).split()))
    return said if len(said) <= _SAID_CHARACTERS_MAX else f"{said[:_SAID_CHARACTERS_MAX]}…"


def unreachable_in_words(table: str, error: BaseException) -> str:
    """Why a table's place does not answer as it should, as far as the library's words tell it."""
    said = in_one_line(error)
    if _EXPIRED.search(said):
        return f"the credentials for {table} have expired ({said}): renew them where they come from"
    if _DENIED.search(said):
        return (
            f"{table} may not be used with these credentials ({said}): let them read, write, list"
            " and delete there"
        )
    return f"{table} cannot be reached ({said})"


def made_durable(path: str, content: pa.Buffer) -> None:
    """A new file, there also after a loss of power."""
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
