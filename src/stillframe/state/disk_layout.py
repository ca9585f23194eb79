"""What a database says of itself, so that it can be read without the program that wrote it.

All of it is under keys that start with `METADATA`: how entries are laid out (`rows` of handles, or
`pages` of aggregates), the columns of the key, and for each table its name and the columns of its
snapshots. Tables are told apart by a few bytes that are made of their name, as databases of several
subtasks must agree on them without having met.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from stillframe.errors import SnapshotDamaged
from stillframe.state.disk import METADATA, Changes, Disk

TABLE_ID_BYTES = 4

_LAYOUT = METADATA + b"layout"
_KEY_SCHEMA = METADATA + b"key schema"
_TABLE = METADATA + b"table:"
_PAST_TABLES = METADATA + b"table;"
_NAME = b"name"
_PAGES = b"pages"
"""In the description of a table whose rows are in pages: what its entries are found by."""


class Layout(StrEnum):
    """How the entries of a database are to be read."""

    ROWS = "rows"
    PAGES = "pages"


@dataclass(frozen=True)
class TableOnDisk:
    """A table of a database, as the database describes it."""

    table_id: bytes
    name: str
    snapshot_schema: pa.Schema
    is_paged: bool = False
    """Whether its rows are in pages, in a database that has others beside it."""


def table_id(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=TABLE_ID_BYTES).digest()


def say_layout(changes: Changes, layout: Layout, key_schema: pa.Schema) -> None:
    changes.put(_LAYOUT, layout.encode())
    changes.put(_KEY_SCHEMA, key_schema.serialize().to_pybytes())


def pages_id(name: str, snapshot_schema: pa.Schema) -> bytes:
    """What pages are found by: never that of rows, nor that of pages with other columns, so that
    one can be written while the other is read."""
    return table_id(f"{name}\0{snapshot_schema}")


def say_table(
    changes: Changes, name: str, snapshot_schema: pa.Schema, pages: bytes | None = None
) -> None:
    """`pages` is their id, if that is how the table is kept beside others."""
    said: dict[bytes, bytes] = {**(snapshot_schema.metadata or {}), _NAME: name.encode()}
    if pages is not None:
        said[_PAGES] = pages
    described = snapshot_schema.with_metadata(said)
    changes.put(_TABLE + table_id(name), described.serialize().to_pybytes())


def unsay_table(changes: Changes, name: str) -> None:
    changes.delete(_TABLE + table_id(name))


def layout_of(disk: Disk) -> Layout | None:
    """None: nothing has been written yet."""
    said = disk.get(_LAYOUT)
    if said is None:
        return None
    try:
        return Layout(said.decode())
    except ValueError:
        raise SnapshotDamaged(
            f"the state database in {disk.directory} has the layout {said!r}, which this version"
            " does not know: use the version that wrote it"
        ) from None


def key_schema_of(disk: Disk) -> pa.Schema:
    said = disk.get(_KEY_SCHEMA)
    if said is None:
        raise SnapshotDamaged(
            f"the state database in {disk.directory} does not say what its keys are:"
            " restore a checkpoint"
        )
    return pa.ipc.read_schema(pa.py_buffer(said))


def tables_of(disk: Disk) -> list[TableOnDisk]:
    """By name."""
    found = []
    for key, said in disk.scan(_TABLE, _PAST_TABLES):
        schema = pa.ipc.read_schema(pa.py_buffer(said))
        metadata = dict(schema.metadata)
        name, pages = metadata.pop(_NAME).decode(), metadata.pop(_PAGES, None)
        id_, kept = pages or key[len(_TABLE) :], schema.with_metadata(metadata)
        found.append(TableOnDisk(id_, name, kept, is_paged=pages is not None))
    return sorted(found, key=lambda table: table.name)
