"""Entries of rows in a database: how their keys are made, and read without the program.

The key of an entry is the key group, the state, the key (`key_names`), and then

- of a value, nothing: the entry is the row;
- of a list, a number: the entry is some rows of it, and those with higher numbers come after it;
- of a map, the user key: the entry is the row.

Where rows expire, each has the time at which it does beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.key_groups import Positions
from stillframe.state.backends import EXPIRES, EXPIRES_TYPE, USER_KEY, VALUE, Kind
from stillframe.state.disk import METADATA, Disk, group_prefix
from stillframe.state.disk_layout import TABLE_ID_BYTES, TableOnDisk, key_schema_of, tables_of
from stillframe.state.key_names import GROUP_BYTES, KeyNames
from stillframe.state.row_codec import RowCodec
from stillframe.state.rows import Row, RowType
from stillframe.state.slices import SLICE_BYTES_MAX, SLICE_ENTRIES_MAX, Slice, batches_of

HEAD_BYTES = GROUP_BYTES + TABLE_ID_BYTES
NUMBER_BYTES = 8
TAKEN_MS = METADATA + b"taken"
"""When the snapshot was taken that a database was linked for."""

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
        self._expires = EXPIRES in schema.names
        self._decoded = RowCodec(self._value.schema).entries_decoder(
            in_lists=self._kind is Kind.LIST, expire=self._expires
        )
        self._user_key = RowType(pa.schema([]))
        if self._kind is Kind.MAP:
            self._user_key = RowType(pa.schema(list(schema.field(USER_KEY).type)))
        self._user_keys_decoded = RowCodec(self._user_key.schema).entries_decoder()

    def batches_by_key_group(
        self, wanted: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        for group in groups_of(self._disk, self._id, wanted):
            for batch in batches_of(self._slices(group), self._batch):
                yield group, batch

    def _slices(self, group: int) -> Iterator[Slice]:
        bounds = (SLICE_ENTRIES_MAX, SLICE_BYTES_MAX)
        for entries in self._disk.scan_slices(*span(group, self._id), *bounds):
            keys, values = zip(*entries, strict=True)
            yield self._slice(keys, self._decoded(values))

    def _slice(self, keys: Sequence[bytes], kept: list[Any]) -> Slice:
        counts = [1] * len(keys)
        if self._kind is Kind.LIST:
            counts = list(map(len, kept))
            kept = list(itertools.chain.from_iterable(kept))
        if not self._expires:
            return Slice(keys, counts, self._value.to_arrow(kept), keys_bytes=_size_bytes(keys))
        rows, expires = zip(*kept, strict=True) if kept else ((), ())
        values = self._value.to_arrow(rows)
        return Slice(keys, counts, values, expires, keys_bytes=_size_bytes(keys))

    def _batch(self, made: Slice) -> pa.RecordBatch:
        columns, ends = self._names.columns_at(HEAD_BYTES, made.keys)
        if self._kind is Kind.MAP:
            columns.append(self._user_keys(made.keys, ends))
        if self._kind is Kind.LIST:
            repeated = np.repeat(np.arange(len(made.keys)), made.counts)
            columns = [column.take(repeated) for column in columns]
        columns.append(made.values)
        if self._expires:
            columns.append(pa.array(made.expires, pa.int64()).cast(EXPIRES_TYPE))
        return self._unexpired(pa.RecordBatch.from_arrays(columns, schema=self.snapshot_schema))

    def _user_keys(self, keys: Sequence[bytes], ends: Positions) -> pa.Array:
        rests = [key[end:] for key, end in zip(keys, ends.tolist(), strict=True)]
        parts = [
            self._user_key.to_arrow(self._user_keys_decoded(rests[at : at + SLICE_ENTRIES_MAX]))
            for at in range(0, len(rests), SLICE_ENTRIES_MAX)
        ]
        return pa.concat_arrays(parts)

    def _unexpired(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._expires or self._taken_ms is None:
            return batch
        expires_ms = batch.column(EXPIRES).cast(pa.int64())
        return batch.filter(pc.fill_null(pc.greater(expires_ms, self._taken_ms), True))


def _size_bytes(keys: Sequence[bytes]) -> int:
    """Roughly: the last one stands for all."""
    return len(keys) * len(keys[-1])


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
