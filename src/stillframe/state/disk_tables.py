"""The three kinds of state on disk: what their buffers hold, and how that becomes entries.

Rules of this file: see `disk_rows`. Reading looks into the buffer, then into the parts from the
newest to the oldest, then into the database. The line of parts is looked at before the database: a
part leaves it, and is emptied, when the database has it, so nothing is missed, but a part may be
met twice, which matters to lists.
"""

from __future__ import annotations

import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from stillframe.key_groups import Positions
from stillframe.state.backends import (
    EXPIRES,
    USER_KEY,
    VALUE,
    Declared,
    ListTable,
    MapTable,
    Table,
    ValueTable,
)
from stillframe.state.disk import PIECE_BYTES, Changes, Disk
from stillframe.state.disk_entries import (
    HEAD_BYTES,
    NUMBER_BYTES,
    after,
    entries_of,
    number_bytes,
    unexpired,
)
from stillframe.state.disk_layout import table_id
from stillframe.state.disk_pages import FrozenFront
from stillframe.state.key_names import GROUP_BYTES, KeyNames
from stillframe.state.row_codec import RowCodec
from stillframe.state.rows import Row

_PLACE_BYTES = 64
"""What a key occupies in a dict beside its name, on average and at worst 80: a third to two thirds
of the places are free."""
_SAMPLED_KEYS = 8
_SAMPLED_VALUES = 64
_HELD_BYTES_PER_BYTE = 1.25
"""An allocator holds more than it has given out: pages of which a part is free."""

Buffered = TypeVar("Buffered")


class _Nothing:
    """What a buffer answers that knows nothing of a key."""


_NOTHING: Any = _Nothing()


@dataclass(eq=False)
class Part:
    """What was written between two barriers."""

    number: int
    buffers: Mapping[str, Any]
    """By the name of the state: a dict, or what has changed in the columns of one, or nothing."""
    size_bytes: int = 0
    """What it occupies, roughly."""
    pieces: Iterator[Changes] | None = None
    """The rest of it, once it has begun to be written."""

    def drain(self) -> None:
        """Give the memory back, little by little: to free all of it at once would stop all threads
        for some ten milliseconds."""
        self.pieces = None
        for buffer in self.buffers.values():
            if not isinstance(buffer, dict):
                _release(buffer)
                continue
            while buffer:
                buffer.popitem()


def _release(changes: FrozenFront | None) -> None:
    if changes is not None:
        changes.release()


class Owner(Protocol):
    """What a state asks of the backend it belongs to."""

    key_schema: pa.Schema
    names: KeyNames
    disk: Disk
    parts: tuple[Part, ...]

    def keys_of(self, columns: Sequence[pa.Array]) -> tuple[Positions, Sequence[bytes]]: ...

    def restore(self, table: DiskTableOfKind[Any], batch: pa.RecordBatch) -> None: ...


def object_bytes(value: Any) -> int:
    """What a frozen value occupies, with all that is in it; of a long one roughly."""
    size_bytes = (sys.getsizeof(value) + 15) & ~15
    if isinstance(value, tuple) and value:
        looked_at = value[:_SAMPLED_VALUES]
        size_bytes += sum(map(object_bytes, looked_at)) * len(value) // len(looked_at)
    return size_bytes


class DiskTableOfKind(Table[bytes], Generic[Buffered]):
    """What the three kinds have in common."""

    key_bytes_beside = 0
    """What a key occupies in the buffer beside its name and rows."""
    row_bytes_beside = 0
    """What a row occupies in the buffer beside itself."""

    def __init__(self, backend: Owner, declared: Declared) -> None:
        self.declared = declared
        self.table_id = table_id(declared.name)
        self.buffer: dict[bytes, Buffered] = {}
        self.codec = RowCodec(declared.value.schema)
        self._decode: Callable[[bytes], Any] = self.codec.kept
        if not declared.expires:
            self._decode = self.codec.row
        self._backend = backend
        self._version = 0
        self._rows = 0
        """How many rows the buffer holds."""
        self._row_bytes = 0.0

    @property
    def version(self) -> int:
        if self.settle is not None:
            self.settle()
        return self._version

    @property
    def has_unwritten(self) -> bool:
        if self.settle is not None:
            self.settle()
        return bool(self.buffer)

    def restore(self, batch: pa.RecordBatch) -> None:
        self._version += 1
        self._backend.restore(self, batch)

    def swapped(self) -> dict[bytes, Buffered]:
        """What the buffer holds; it is another one from now on."""
        if self.settle is not None:
            self.settle()
        buffer, self.buffer = self.buffer, {}
        self._rows = 0
        return buffer

    def buffered_bytes(self) -> int:
        """What the buffer occupies, roughly; the newest keys and rows stand for the others."""
        if not self.buffer:
            return 0
        newest = list(itertools.islice(reversed(self.buffer.items()), _SAMPLED_KEYS))
        key_bytes = sum(object_bytes(key) for key, _ in newest) / len(newest)
        row_bytes = sum(object_bytes(self.sample(entry)) for _, entry in newest) / len(newest)
        # Smoothed, as rows may differ; rows that only grow are followed within some batches.
        weight = 1 / 8 if self._row_bytes else 1
        self._row_bytes += (row_bytes - self._row_bytes) * weight
        of_keys = len(self.buffer) * (key_bytes + _PLACE_BYTES + self.key_bytes_beside)
        of_rows = self._rows * (self._row_bytes + self.row_bytes_beside)
        return int((of_keys + of_rows) * _HELD_BYTES_PER_BYTE)

    def place(self, key: bytes) -> bytes:
        """What the keys of all entries of this key start with."""
        return key[:GROUP_BYTES] + self.table_id + key[GROUP_BYTES:]

    def layers(self, key: bytes, parts: tuple[Part, ...]) -> Iterator[Buffered]:
        """What is buffered of this key, from the newest to the oldest."""
        if (entry := self.buffer.get(key, _NOTHING)) is not _NOTHING:
            yield entry
        for part in reversed(parts):
            buffer: dict[bytes, Buffered] = part.buffers.get(self.declared.name, {})
            if (entry := buffer.get(key, _NOTHING)) is not _NOTHING:
                yield entry

    def written(self, buffer: dict[bytes, Buffered], number: int) -> Iterator[Changes]:
        """The buffer, in pieces."""
        changes = Changes()
        for key, entry in buffer.items():
            self.write(changes, self.place(key), entry, number)
            if changes.size_bytes > PIECE_BYTES:
                yield changes
                changes = Changes()
        yield changes

    def restored(self, batch: pa.RecordBatch, number: int) -> Iterator[Changes]:
        """Rows of a snapshot, in pieces."""
        numbers, names = self._backend.keys_of(batch.columns[: len(self._backend.key_schema)])
        kept: list[Any] = self.declared.value.from_arrow(batch.column(VALUE))
        if self.declared.expires:
            expires = batch.column(EXPIRES).cast(pa.int64()).to_pylist()
            kept = list(zip(kept, expires, strict=True))
        entries = self.entries_restored([names[n] for n in numbers.tolist()], kept, batch)
        return self.written(entries, number)

    def alive(self, kept: Any, now_ms: int) -> Row | None:
        """The row, if it has not expired."""
        if kept is None or not self.declared.expires:
            return kept  # type: ignore[no-any-return]
        row, expires_ms = kept
        return row if expires_ms is None or expires_ms > now_ms else None

    def kept(self, row: Row, expires_ms: int | None) -> Any:
        return (row, expires_ms) if self.declared.expires else row

    def delete_all(self, changes: Changes, place: bytes) -> None:
        """One by one: ranges that were deleted make every later read slower."""
        for key, _ in self._backend.disk.scan(place, after(place)):
            changes.delete(key)

    @abstractmethod
    def write(self, changes: Changes, place: bytes, entry: Buffered, number: int) -> None:
        """What is buffered of one key."""

    @abstractmethod
    def entries_restored(
        self, keys: list[bytes], kept: list[Any], batch: pa.RecordBatch
    ) -> dict[bytes, Buffered]:
        """Rows of a snapshot as a buffer would hold them."""

    @abstractmethod
    def sample(self, entry: Buffered) -> Any:
        """One row of it, if there is one."""

    @abstractmethod
    def has_expired(self, key: bytes, value: bytes, now_ms: int, parts: tuple[Part, ...]) -> bool:
        """Whether rows of this entry of the database have, and nothing newer is buffered."""

    @abstractmethod
    def give_up(self, key: bytes, now_ms: int) -> None:
        """Forget what has expired of this entry of the database."""


class DiskValues(DiskTableOfKind[Any], ValueTable[bytes]):
    """The buffer holds the row, with when it expires; or None: there is none any more."""

    def get(self, key: bytes, now_ms: int) -> Row | None:
        kept = self.buffer.get(key, _NOTHING)
        if kept is _NOTHING:
            kept = self._older(key)
        return self.alive(kept, now_ms)

    def _older(self, key: bytes) -> Any:
        # The line before the database: a part leaves it only when the database has it.
        if parts := self._backend.parts:
            for kept in self.layers(key, parts):
                return kept
        data = self._backend.disk.get(self.place(key))
        return None if data is None else self._decode(data)

    def put(self, key: bytes, row: Row, expires_ms: int | None) -> None:
        self._version += 1
        self.buffer[key] = self.kept(row, expires_ms)
        self._rows = len(self.buffer)

    def clear(self, key: bytes) -> None:
        self._version += 1
        self.buffer[key] = None
        self._rows = len(self.buffer)

    def write(self, changes: Changes, place: bytes, entry: Any, number: int) -> None:
        if entry is None:
            changes.delete(place)
        else:
            changes.put(place, self.codec.encode(entry))

    def entries_restored(
        self, keys: list[bytes], kept: list[Any], batch: pa.RecordBatch
    ) -> dict[bytes, Any]:
        return dict(zip(keys, kept, strict=True))

    def sample(self, entry: Any) -> Any:
        return entry

    def has_expired(self, key: bytes, value: bytes, now_ms: int, parts: tuple[Part, ...]) -> bool:
        name = key[:GROUP_BYTES] + key[HEAD_BYTES:]
        newer = next(self.layers(name, parts), _NOTHING)
        return newer is _NOTHING and self.alive(self._decode(value), now_ms) is None

    def give_up(self, key: bytes, now_ms: int) -> None:
        self.clear(key[:GROUP_BYTES] + key[HEAD_BYTES:])


class _Tail:
    """Rows at the end of a list, or all of it."""

    __slots__ = ("is_whole", "kept")

    def __init__(self, is_whole: bool, kept: list[Any]) -> None:
        self.is_whole = is_whole
        self.kept = kept


class DiskLists(DiskTableOfKind[_Tail], ListTable[bytes]):
    """The buffer holds what was appended, or all there is."""

    key_bytes_beside = 48 + 64  # a _Tail and its list
    row_bytes_beside = 12

    def __init__(self, backend: Owner, declared: Declared) -> None:
        super().__init__(backend, declared)
        self._decode = self.codec.all_kept if declared.expires else self.codec.rows

    def get(self, key: bytes, now_ms: int) -> Sequence[Row]:
        kept = self._kept(key)
        return kept if not self.declared.expires else [row for row, _ in unexpired(kept, now_ms)]

    def put(self, key: bytes, rows: Sequence[Row], expires_ms: int | None) -> None:
        self._put(key, [self.kept(row, expires_ms) for row in rows])

    def clear(self, key: bytes) -> None:
        self._put(key, [])

    def append(self, key: bytes, rows: Sequence[Row], expires_ms: int | None) -> None:
        if not rows:
            return
        self._version += 1
        self._rows += len(rows)
        tail = self.buffer.get(key)
        if tail is None:
            tail = self.buffer[key] = _Tail(False, [])
        tail.kept.extend([self.kept(row, expires_ms) for row in rows])

    def entries(self, now_ms: int) -> Iterator[tuple[bytes, Sequence[Row]]]:
        buffered = set(self.buffer)
        for part in self._backend.parts:
            buffered.update(part.buffers.get(self.declared.name, {}))
        stored = entries_of(self._backend.disk, self.table_id, None)
        for key, entries in itertools.groupby(stored, lambda entry: entry[0][:-NUMBER_BYTES]):
            name = key[:GROUP_BYTES] + key[HEAD_BYTES:]
            kept = [] if name in buffered else [k for _, v in entries for k in self._decode(v)]
            if rows := [row for each in kept if (row := self.alive(each, now_ms)) is not None]:
                yield name, rows
        for name in buffered:
            if rows := list(self.get(name, now_ms)):
                yield name, rows

    def _put(self, key: bytes, kept: list[Any]) -> None:
        self._version += 1
        self._rows += 1 + len(kept)
        self.buffer[key] = _Tail(True, kept)

    def _kept(self, key: bytes) -> list[Any]:
        while True:
            parts = self._backend.parts
            kept = self._kept_with(key, parts)
            if self._backend.parts is parts:  # else one has moved from the line to the database
                return kept

    def _kept_with(self, key: bytes, parts: tuple[Part, ...]) -> list[Any]:
        newest_first: list[list[Any]] = []
        for tail in self.layers(key, parts):
            newest_first.append(tail.kept)
            if tail.is_whole:
                break
        else:
            place = self.place(key)
            # A part in the line may be in the database too, and must not count twice.
            stop = place + number_bytes(parts[0].number) if parts else after(place)
            stored = self._backend.disk.scan(place, stop)
            newest_first.append([kept for _, value in stored for kept in self._decode(value)])
        return [kept for tail in reversed(newest_first) for kept in tail]

    def write(self, changes: Changes, place: bytes, entry: _Tail, number: int) -> None:
        if entry.is_whole:
            self.delete_all(changes, place)
        if entry.kept:
            changes.put(place + number_bytes(number), self.codec.encode(entry.kept))

    def entries_restored(
        self, keys: list[bytes], kept: list[Any], batch: pa.RecordBatch
    ) -> dict[bytes, _Tail]:
        tails: dict[bytes, _Tail] = {}
        for key, each in zip(keys, kept, strict=True):
            if key not in tails:
                tails[key] = _Tail(False, [])
            tails[key].kept.append(each)
        return tails

    def sample(self, entry: _Tail) -> Any:
        return entry.kept[-1] if entry.kept else None

    def has_expired(self, key: bytes, value: bytes, now_ms: int, parts: tuple[Part, ...]) -> bool:
        stored = self._decode(value)
        return len(unexpired(stored, now_ms)) < len(stored)

    def give_up(self, key: bytes, now_ms: int) -> None:
        name = key[:GROUP_BYTES] + key[HEAD_BYTES:-NUMBER_BYTES]
        self._put(name, unexpired(self._kept(name), now_ms))


class _Some:
    """Rows of a map by encoded user key, or all there are; None: not there any more."""

    __slots__ = ("is_whole", "kept")

    def __init__(self, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.kept: dict[bytes, Any] = {}


class DiskMaps(DiskTableOfKind[_Some], MapTable[bytes]):
    """The buffer holds what was put and removed, and whether that is all there is."""

    key_bytes_beside = 48 + 144  # a _Some and its dict, with few places
    row_bytes_beside = _PLACE_BYTES + 48  # and the encoded user key

    def __init__(self, backend: Owner, declared: Declared) -> None:
        super().__init__(backend, declared)
        assert declared.user_key is not None, "a map without user keys"
        self._user_keys = declared.user_key
        self._user_key = RowCodec(declared.user_key.schema)

    def get(self, key: bytes, user_key: Row, now_ms: int) -> Row | None:
        return self.alive(self._kept(key, self._user_key.encode_key(user_key)), now_ms)

    def _kept(self, key: bytes, encoded: bytes) -> Any:
        for some in self.layers(key, self._backend.parts):
            kept = some.kept.get(encoded, _NOTHING)
            if kept is not _NOTHING:
                return kept
            if some.is_whole:
                return None
        data = self._backend.disk.get(self.place(key) + encoded)
        return None if data is None else self._decode(data)

    def put(self, key: bytes, user_key: Row, row: Row, expires_ms: int | None) -> None:
        self._change(key, self._user_key.encode_key(user_key), self.kept(row, expires_ms))

    def remove(self, key: bytes, user_key: Row) -> None:
        self._change(key, self._user_key.encode_key(user_key), None)

    def clear(self, key: bytes) -> None:
        self._version += 1
        self._rows += 1
        self.buffer[key] = _Some(True)

    def _change(self, key: bytes, encoded: bytes, kept: Any) -> None:
        self._version += 1
        some = self.buffer.get(key)
        if some is None:
            some = self.buffer[key] = _Some(False)
        before = len(some.kept)
        some.kept[encoded] = kept
        self._rows += len(some.kept) - before

    def items(self, key: bytes, now_ms: int) -> Iterator[tuple[Row, Row]]:
        found: dict[bytes, Any] = {}
        for some in self.layers(key, self._backend.parts):
            for encoded, kept in some.kept.items():
                found.setdefault(encoded, kept)
            if some.is_whole:
                break
        else:
            place = self.place(key)
            for entry, value in self._backend.disk.scan(place, after(place)):
                if entry[len(place) :] not in found:
                    found[entry[len(place) :]] = self._decode(value)
        rows = [(encoded, self.alive(kept, now_ms)) for encoded, kept in found.items()]
        return iter(
            [(self._user_key.row(encoded), row) for encoded, row in rows if row is not None]
        )

    def write(self, changes: Changes, place: bytes, entry: _Some, number: int) -> None:
        if entry.is_whole:
            self.delete_all(changes, place)
        for encoded, kept in entry.kept.items():
            if kept is None:
                changes.delete(place + encoded)
            else:
                changes.put(place + encoded, self.codec.encode(kept))

    def entries_restored(
        self, keys: list[bytes], kept: list[Any], batch: pa.RecordBatch
    ) -> dict[bytes, _Some]:
        entries: dict[bytes, _Some] = {}
        user_keys = self._user_keys.from_arrow(batch.column(USER_KEY))
        for key, user_key, each in zip(keys, user_keys, kept, strict=True):
            if key not in entries:
                entries[key] = _Some(False)
            entries[key].kept[self._user_key.encode_key(user_key)] = each
        return entries

    def sample(self, entry: _Some) -> Any:
        return next(reversed(entry.kept.values()), None)

    def has_expired(self, key: bytes, value: bytes, now_ms: int, parts: tuple[Part, ...]) -> bool:
        if self.alive(self._decode(value), now_ms) is not None:
            return False
        name, encoded = self._split(key)
        layers = self.layers(name, parts)
        return not any(some.is_whole or encoded in some.kept for some in layers)

    def give_up(self, key: bytes, now_ms: int) -> None:
        self._change(*self._split(key), None)

    def _split(self, key: bytes) -> tuple[bytes, bytes]:
        """The name of the key, and the encoded user key."""
        end = HEAD_BYTES + self._backend.names.length(key, HEAD_BYTES)
        return key[:GROUP_BYTES] + key[HEAD_BYTES:end], key[end:]
