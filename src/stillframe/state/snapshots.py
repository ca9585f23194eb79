"""Keyed snapshots as files: Arrow's IPC file format, one record batch per key group that has rows;
several if it has many.

Any Arrow reader can open them. Which batch is which key group is not in the file but in what
`write_keyed_snapshot` answers, which the checkpoint's metadata keeps; a restore then reads the
batches of its own key groups and touches no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from stillframe.errors import SnapshotDamaged
from stillframe.storage.store import Chunk, Store

_LONG_BYTES = 64 << 10
"""Pieces of a file that are shorter are put together, others are handed on as they are."""


class FrozenRows(Protocol):
    """Rows as they were at the barrier, which can be had by key group."""

    @property
    def snapshot_schema(self) -> pa.Schema: ...

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups; those of one
        may come in several batches."""


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    """A keyed snapshot that is durable, and all that is needed to read it again."""

    path: str
    length_bytes: int
    crc32: int
    key_groups: tuple[int, ...]
    """The key group of each record batch of the file, ascending."""
    rows: int
    schema_text: str
    """The columns, for people."""
    data: bytes | None = field(default=None, repr=False)
    """As the store answered it: the snapshot itself, if there is no file."""
    kind: str = ""
    """What the rows are, where their columns do not tell (`kind_of`)."""


def write_keyed_snapshot(store: Store, path: str, frozen: FrozenRows) -> WrittenSnapshot:
    """Sort the frozen rows by key group and write them; runs on a background thread.

    The frozen table is not released: that is for who froze it.
    """
    file = _SnapshotFile(frozen)
    written = store.write(path, file.chunks())
    return WrittenSnapshot(
        path=path,
        length_bytes=written.length_bytes,
        crc32=written.crc32,
        key_groups=tuple(file.key_groups),
        rows=file.rows,
        schema_text=schema_text(frozen.snapshot_schema),
        data=written.data,
        kind=kind_of(frozen.snapshot_schema),
    )


def read_keyed_snapshot(
    buffer: pa.Buffer, key_groups: Sequence[int], wanted: range
) -> Iterator[pa.RecordBatch]:
    """The batches of the wanted key groups, without a copy; they keep the buffer alive.

    `key_groups` are those of the `WrittenSnapshot`.
    """
    try:
        reader = pa.ipc.open_file(buffer)
    except pa.ArrowInvalid as error:
        raise SnapshotDamaged(
            f"a keyed snapshot of {buffer.size} bytes is not an Arrow file ({error}):"
            " restore an older checkpoint"
        ) from error
    if reader.num_record_batches != len(key_groups):
        raise SnapshotDamaged(
            f"a keyed snapshot holds {reader.num_record_batches} key groups where its metadata"
            f" names {len(key_groups)}: restore an older checkpoint"
        )
    for index, key_group in enumerate(key_groups):
        if key_group in wanted:
            yield reader.get_batch(index)


class _SnapshotFile:
    """The file in the making: its bytes, key group by key group, and what has been put in."""

    def __init__(self, frozen: FrozenRows) -> None:
        self._frozen = frozen
        self.key_groups: list[int] = []
        self.rows = 0

    def chunks(self) -> Iterator[Chunk]:
        pieces = _Pieces()
        # Arrow writes a dozen pieces for each batch, most of some bytes, and to hand on one of them
        # takes Python's lock, for which a busy loop is waited for.
        sink = pa.BufferedOutputStream(pa.PythonFile(pieces, mode="w"), _LONG_BYTES)
        with pa.ipc.new_file(sink, self._frozen.snapshot_schema) as file:
            for key_group, batch in self._frozen.batches_by_key_group():
                file.write_batch(batch)
                self.key_groups.append(key_group)
                self.rows += batch.num_rows
                yield from pieces.taken()
        sink.flush()
        yield from pieces.taken()


class _Pieces:
    """A file to write to, whose bytes are handed on as soon as a key group is in."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Chunk] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        self._pieces.append(data)
        return len(data)

    def taken(self) -> list[Chunk]:
        """Long ones are no copies of what is in the batch."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self.closed = True


def with_kind(schema: pa.Schema, kind: str) -> pa.Schema:
    """The schema, saying what the rows are, where their columns do not tell."""
    return schema.with_metadata({**(schema.metadata or {}), b"kind": kind.encode()})


def kind_of(schema: pa.Schema) -> str:
    """What the rows are, as a snapshot says: a state of a program (value, list, map), or windows of
    some length; nothing of others."""
    return str((schema.metadata or {}).get(b"kind", b"").decode())


def schema_text(schema: pa.Schema) -> str:
    """The columns, for people."""
    return ", ".join(f"{field.name} {field.type}" for field in schema)
