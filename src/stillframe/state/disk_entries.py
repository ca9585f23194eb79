"""Entries of rows in a database: how their keys are made, and read without the program.

The key of an entry is the key group, the state, the key (`key_names`), and then

- of a value, nothing: the entry is the row;
- of a list, a number: the entry is some rows of it, and those with higher numbers come after it;
- of a map, the user key: the entry is the row.

Where rows expire, each has the time at which it does beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from stillframe.state.backends import EXPIRES, EXPIRES_TYPE, USER_KEY, VALUE, Kind
from stillframe.state.disk import METADATA, Disk, group_prefix
from stillframe.state.disk_layout import TABLE_ID_BYTES, TableOnDisk, key_schema_of, tables_of
from stillframe.state.key_names import GROUP_BYTES, KeyNames
from stillframe.state.row_codec import RowCodec
from stillframe.state.rows import Row, RowType

HEAD_BYTES = GROUP_BYTES + TABLE_ID_BYTES
NUMBER_BYTES = 8
TAKEN_MS = METADATA + b"taken"
"""When the snapshot was taken that a database was linked for."""
_BATCH_ROWS_MAX = 1 << 16

Kept = tuple[Row, int | None]
"""A row, and when it expires."""


def unexpired(kept: Iterable[Kept], now_ms: int) -> list[Kept]:
    return [each for each in kept if each[1] is None or each[1] > now_ms]


def number_bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def after(prefix: bytes) -> bytes:
    """The first key that does not start so."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])


def span(group: int, id_: bytes) -> tuple[bytes, bytes]:
    """From where to where the entries of a state are in a key group."""
    first = group_prefix(group) + id_
    return first, after(first)


def entries_of(disk: Disk, id_: bytes, wanted: range | None) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a state in these key groups, or in all."""
    for group in groups_of(disk, id_, wanted):
        yield from disk.scan(*span(group, id_))


def groups_of(disk: Disk, id_: bytes, wanted: range | None) -> Iterator[int]:
    """The key groups in which a state has entries; those without are passed over at once."""
    group, stop = (0, METADATA) if wanted is None else (wanted.start, group_prefix(wanted.stop))
    while found := next(disk.scan(group_prefix(group) + id_, stop), None):
        key, _ = found
        group = int.from_bytes(key[:GROUP_BYTES], "big")
        if key[GROUP_BYTES:HEAD_BYTES] == id_:
            yield group
        if key[GROUP_BYTES:HEAD_BYTES] >= id_:
            group += 1


class RowsOnDisk:
    """A state in a database, as rows of a snapshot; what had expired by then is left out."""

    def __init__(
        self, disk: Disk, table: TableOnDisk, key_schema: pa.Schema, taken_ms: int | None
    ) -> None:
        self.name = table.name
        self.snapshot_schema = table.snapshot_schema
        self._disk = disk
        self._id = table.table_id
        self._taken_ms = taken_ms
        self._names = KeyNames(key_schema, max_parallelism=1)
        schema = table.snapshot_schema
        self._kind = Kind(schema.metadata[b"kind"].decode())
        self._value = RowType(pa.schema(list(schema.field(VALUE).type)))
        self._codec = RowCodec(self._value.schema)
        self._expires = EXPIRES in schema.names
        self._user_key = RowType(pa.schema([]))
        if self._kind is Kind.MAP:
            self._user_key = RowType(pa.schema(list(schema.field(USER_KEY).type)))
        self._user_codec = RowCodec(self._user_key.schema)

    def batches_by_key_group(
        self, wanted: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        for group in groups_of(self._disk, self._id, wanted):
            for batch in self._batches(self._disk.scan(*span(group, self._id))):
                yield group, batch

    def _batches(self, entries: Iterator[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
        rows = _Gathered()
        for key, value in entries:
            rows.add(*self._split(key), self._rows_in(value))
            if len(rows.kept) >= _BATCH_ROWS_MAX:
                yield self._batch(rows)
                rows = _Gathered()
        if rows.kept:
            yield self._batch(rows)

    def _split(self, key: bytes) -> tuple[bytes, bytes]:
        """The name of the key, and what comes after it."""
        end = len(key)
        if self._kind is Kind.LIST:
            end -= NUMBER_BYTES
        if self._kind is Kind.MAP:
            end = HEAD_BYTES + self._names.length(key, HEAD_BYTES)
        return key[:GROUP_BYTES] + key[HEAD_BYTES:end], key[end:]

    def _rows_in(self, value: bytes) -> list[Kept]:
        kept = self._decode(value)
        return kept if self._taken_ms is None else unexpired(kept, self._taken_ms)

    def _decode(self, value: bytes) -> list[Kept]:
        codec = self._codec
        if self._expires:
            return codec.all_kept(value) if self._kind is Kind.LIST else [codec.kept(value)]
        rows = codec.rows(value) if self._kind is Kind.LIST else [codec.row(value)]
        return [(row, None) for row in rows]

    def _batch(self, rows: _Gathered) -> pa.RecordBatch:
        repeated = np.repeat(np.arange(len(rows.names)), rows.counts)
        columns = [column.take(repeated) for column in self._names.columns(rows.names)]
        if self._kind is Kind.MAP:
            user_keys = [self._user_codec.row(each) for each in rows.rests]
            columns.append(self._user_key.to_arrow(user_keys).take(repeated))
        columns.append(self._value.to_arrow([row for row, _ in rows.kept]))
        if self._expires:
            expires = pa.array([expires_ms for _, expires_ms in rows.kept], pa.int64())
            columns.append(expires.cast(EXPIRES_TYPE))
        return pa.RecordBatch.from_arrays(columns, schema=self.snapshot_schema)


class _Gathered:
    """Entries on their way into a batch."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.rests: list[bytes] = []
        self.counts: list[int] = []
        self.kept: list[Kept] = []

    def add(self, name: bytes, rest: bytes, kept: list[Kept]) -> None:
        self.names.append(name)
        self.rests.append(rest)
        self.counts.append(len(kept))
        self.kept += kept


class LinkedRows:
    """A state in a linked database, which is opened whenever it is read."""

    def __init__(self, directory: Path, opened: Callable[[Path], Disk], table: TableOnDisk) -> None:
        self.name = table.name
        self.snapshot_schema = table.snapshot_schema
        self._directory = directory
        self._opened = opened
        self._table = table

    def batches_by_key_group(
        self, wanted: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        disk = self._opened(self._directory)
        try:
            taken = disk.get(TAKEN_MS)
            taken_ms = None if taken is None else int.from_bytes(taken, "big", signed=True)
            rows = RowsOnDisk(disk, self._table, key_schema_of(disk), taken_ms)
            yield from rows.batches_by_key_group(wanted)
        finally:
            disk.close()


def row_tables(disk: Disk, opened: Callable[[Path], Disk]) -> list[LinkedRows]:
    """The states of a database with an entry for each row; each opens its directory when it is
    read."""
    entries = [table for table in tables_of(disk) if not table.is_paged]
    return [LinkedRows(disk.directory, opened, table) for table in entries]
