"""The heap as a backend: states as Python objects, frozen by reference.

Theory of operation
-------------------
Keys are kept once, as columns, and have numbers (`KeyIndex`). A state has a place for each number,
in chunks of 1,024 places; an empty place holds None. To freeze a state is to copy the list of its
chunks, a thousandth of its keys, and to count an *era* further: before the first change of a chunk
in a new era it is copied, so that what was frozen keeps the old one. What a place holds is never
changed itself, except in ways that no frozen state can see:

- of a value state, the row;
- of a list, a Python list and how many of its elements count: appending makes it longer and puts
  the new count into the place, while a frozen place goes on counting fewer;
- of a map, a dict and the era in which it was made: in a later era it is copied before it changes.

Where rows expire, each is kept with the time at which it does.

Numbers are not used again. When there are many more than keys with state, all is built anew,
between two batches.

Rules of this file
------------------
1. One thread changes; a frozen table is read by one background thread.
2. Nothing that a chunk holds is changed in place, but for the two exceptions above.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.api.processors import Reduction
from stillframe.errors import BuildError
from stillframe.key_groups import Positions, fixed_width_values, key_groups_of
from stillframe.state.aggregates import by_key_group
from stillframe.state.backends import (
    EXPIRES,
    EXPIRES_TYPE,
    USER_KEY,
    VALUE,
    Backend,
    Declared,
    ListTable,
    MapTable,
    Table,
    ValueTable,
)
from stillframe.state.evolution import fitted_to
from stillframe.state.heap_reductions import HeapReductions
from stillframe.state.key_index import FrozenKeyIndex, KeyIndex
from stillframe.state.rows import Row
from stillframe.state.slices import Pace, Slice, batches_of

_GROUP = pa.field("__key_group", pa.int32())
_CHUNK_LOG2 = 10
_CHUNK = 1 << _CHUNK_LOG2
_MASK = _CHUNK - 1
_NUMBERS_MIN = 16_384
"""With fewer numbers than this it is not worth looking for unused ones."""
_NUMBERS_PER_KEY_MAX = 4
_SWEPT_KEYS = 256
"""How many keys of a state are looked at for expired rows, between two batches."""

Entry = TypeVar("Entry")
Kept = tuple[Row, int | None]
"""A row, and when it expires."""


class Places(Generic[Entry]):
    """A place for each number; all of them can be frozen at once."""

    def __init__(self) -> None:
        self._chunks: list[list[Entry | None]] = []
        self._eras: list[int] = []
        self.era = 0
        self.occupied = 0
        self.version = 0

    def get(self, number: int) -> Entry | None:
        place = number >> _CHUNK_LOG2
        if place >= len(self._chunks):
            return None
        return self._chunks[place][number & _MASK]

    def put(self, number: int, entry: Entry | None) -> None:
        self.version += 1
        place = number >> _CHUNK_LOG2
        while place >= len(self._chunks):
            self._chunks.append([None] * _CHUNK)
            self._eras.append(self.era)
        chunk = self._chunks[place]
        if self._eras[place] != self.era:
            chunk = self._chunks[place] = chunk.copy()
            self._eras[place] = self.era
        at = number & _MASK
        self.occupied += (entry is not None) - (chunk[at] is not None)
        chunk[at] = entry

    def freeze(self) -> list[list[Entry | None]]:
        """The chunks as they are: none of them changes any more."""
        self.era += 1
        return self._chunks.copy()

    def entries(self) -> Iterator[tuple[int, Entry]]:
        return entries_of(self._chunks)

    def span(self, first: int, count: int) -> list[tuple[int, Entry]]:
        """What is in so many places from this one on, round about."""
        size = len(self._chunks) << _CHUNK_LOG2
        numbers = [(first + n) % size for n in range(min(count, size))]
        found = [(number, self.get(number)) for number in numbers]
        return [(number, entry) for number, entry in found if entry is not None]


def numbers_in(chunks: Sequence[list[Any]]) -> Positions:
    """Those whose places are not empty."""
    found = [_places_in(chunk) + (n << _CHUNK_LOG2) for n, chunk in enumerate(chunks)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _places_in(chunk: list[Any]) -> Positions:
    if all(chunk):  # seen at once; a row of no values is no truth, but as good
        return np.arange(len(chunk))
    return np.array([at for at, entry in enumerate(chunk) if entry is not None], np.int64)


def entries_of(chunks: Sequence[list[Entry | None]]) -> Iterator[tuple[int, Entry]]:
    for place, chunk in enumerate(chunks):
        base = place << _CHUNK_LOG2
        for at, entry in enumerate(chunk):
            if entry is not None:
                yield base + at, entry


class RowsOfKeys(NamedTuple):
    """The rows of some keys, one key after the other."""

    counts: list[int]
    """How many rows each of the keys has."""
    rows: Sequence[Row]
    expires: Sequence[int | None] = ()
    """When each row does, where rows expire."""
    user_keys: Sequence[Row] = ()
    """Of each row, in a map."""


class HeapBackend(Backend[int]):
    """All states of one operator in one subtask, on the heap."""

    def __init__(
        self, key_schema: pa.Schema, max_parallelism: int, numbers_min: int = _NUMBERS_MIN
    ) -> None:
        # Null is a key, whatever the input says.
        self.key_schema = pa.schema([pa.field(field.name, field.type) for field in key_schema])
        self.max_parallelism = max_parallelism
        self._numbers_min = numbers_min
        self._index = self._no_keys()
        self._tables: dict[str, HeapTable] = {}

    # --- keys

    def keys_of(self, columns: Sequence[pa.Array]) -> tuple[Positions, Sequence[int]]:
        numbers = self._index.rows_of(columns)
        return numbers, range(len(self._index))

    def columns_of(self, keys: Sequence[int]) -> list[pa.Array]:
        rows = np.fromiter(keys, dtype=np.int64, count=len(keys))
        return [column.take(rows) for column in self._index.freeze().columns]

    def frozen_keys(self) -> FrozenKeyIndex:
        return self._index.freeze()

    @property
    def numbers(self) -> int:
        """How many keys have a number, those without state among them."""
        return len(self._index)

    # --- states

    def values(self, declared: Declared) -> ValueTable[int]:
        return self._declared(HeapValues(self, declared))

    def lists(self, declared: Declared) -> ListTable[int]:
        return self._declared(HeapLists(self, declared))

    def maps(self, declared: Declared) -> MapTable[int]:
        return self._declared(HeapMaps(self, declared))

    def reduced(self, declared: Declared, functions: Sequence[Reduction]) -> HeapReductions:
        return self._declared(HeapReductions(self, declared, functions))

    def drop(self, name: str) -> None:
        self._tables.pop(name, None)

    @property
    def tables(self) -> Sequence[HeapTable]:
        return list(self._tables.values())

    def tidy(self, now_ms: int) -> dict[int, int] | None:
        for table in self._tables.values():
            table.sweep(now_ms, _SWEPT_KEYS)
        return self._take_numbers_back()

    def close(self) -> None:
        self._tables.clear()

    def _declared(self, table: TableT) -> TableT:
        name = table.declared.name
        if name in self._tables:
            raise BuildError(f"State variable with name {name} has already been defined: rename it")
        self._tables[name] = table
        return table

    def _no_keys(self) -> KeyIndex:
        return KeyIndex([field.type for field in self.key_schema], slots_log2=8)

    def _take_numbers_back(self) -> dict[int, int] | None:
        """Build all anew of what is there, when that is little beside what was."""
        numbers = self.numbers
        occupied = sum(table.occupied for table in self._tables.values())
        if numbers <= self._numbers_min or numbers <= _NUMBERS_PER_KEY_MAX * occupied:
            return None
        kept = {n for table in self._tables.values() for n in table.occupied_numbers()}
        old = sorted(kept)
        columns = self.columns_of(old)
        self._index = self._no_keys()
        new = self._index.rows_of(columns).tolist() if old else []
        renamed = dict(zip(old, new, strict=True))
        for table in self._tables.values():
            table.renumber(renamed)
        return renamed


class _HeapTable(Table[int], Generic[Entry]):
    """What the three kinds have in common."""

    def __init__(self, backend: HeapBackend, declared: Declared) -> None:
        self.declared = declared
        self.places: Places[Entry] = Places()
        self._backend = backend
        self._swept = 0

    @property
    def version(self) -> int:
        if self.settle is not None:
            self.settle()
        return self.places.version

    @property
    def occupied(self) -> int:
        """How many keys have something here."""
        return self.places.occupied

    def occupied_numbers(self) -> Iterator[int]:
        return (number for number, _ in self.places.entries())

    def clear(self, key: int) -> None:
        if self.places.get(key) is not None:
            self.places.put(key, None)

    def sweep(self, now_ms: int, keys_max: int) -> None:
        """Take the next so many keys, and give up what has expired of them."""
        if not self.declared.expires or not self.places.occupied:
            return
        for number, entry in self.places.span(self._swept, keys_max):
            left = self.unexpired(entry, now_ms)
            if left is not entry:
                self.places.put(number, left)
        self._swept += keys_max

    def freeze(self, now_ms: int) -> FrozenHeapTable:
        """What is there now: the synchronous part of a snapshot."""
        if self.settle is not None:
            self.settle()
        return FrozenHeapTable(self, self._backend, self.places.freeze(), now_ms)

    def restore(self, batch: pa.RecordBatch) -> None:
        batch = fitted_to(self.declared, batch, self._backend.key_schema)
        numbers, _ = self._backend.keys_of(batch.columns[: len(self._backend.key_schema)])
        rows = self.declared.value.from_arrow(batch.column(VALUE))
        expires: list[int | None] = [None] * len(rows)
        if self.declared.expires:
            expires = batch.column(EXPIRES).cast(pa.int64()).to_pylist()
        self.take_back(numbers.tolist(), list(zip(rows, expires, strict=True)), batch)

    def renumber(self, renamed: dict[int, int]) -> None:
        old, self.places = self.places, Places()
        self.places.version = old.version
        for number, entry in old.entries():
            self.places.put(renamed[number], self.of_era(entry, self.places.era))
        self._swept = 0

    def of_era(self, entry: Entry, era: int) -> Entry:
        """The entry where eras are counted anew; what was frozen may still hold it."""
        return entry

    @abstractmethod
    def unexpired(self, entry: Entry, now_ms: int) -> Entry | None:
        """What is left of it: itself, if nothing has expired."""

    @abstractmethod
    def rows_of(self, entries: list[Entry], now_ms: int) -> RowsOfKeys:
        """Their rows that have not expired."""

    @abstractmethod
    def take_back(self, numbers: list[int], kept: list[Kept], batch: pa.RecordBatch) -> None:
        """Rows of a snapshot, and the keys they belong to."""


HeapTable = _HeapTable[Any] | HeapReductions
TableT = TypeVar("TableT", bound=HeapTable)


class HeapValues(_HeapTable[Any], ValueTable[int]):
    """A place holds the row; where rows expire, the row and when."""

    def get(self, key: int, now_ms: int) -> Row | None:
        entry = self.places.get(key)
        if entry is None or not self.declared.expires:
            return entry
        row, expires_ms = entry
        return row if expires_ms is None or expires_ms > now_ms else None

    def put(self, key: int, row: Row, expires_ms: int | None) -> None:
        self.places.put(key, (row, expires_ms) if self.declared.expires else row)

    def unexpired(self, entry: Any, now_ms: int) -> Any:
        _, expires_ms = entry
        return entry if expires_ms is None or expires_ms > now_ms else None

    def rows_of(self, entries: list[Any], now_ms: int) -> RowsOfKeys:
        if not self.declared.expires:
            return RowsOfKeys([1] * len(entries), entries)
        counts = [int(at is None or at > now_ms) for _, at in entries]
        return _of_kept(counts, list(itertools.compress(entries, counts)))

    def take_back(self, numbers: list[int], kept: list[Kept], batch: pa.RecordBatch) -> None:
        for number, (row, expires_ms) in zip(numbers, kept, strict=True):
            self.put(number, row, expires_ms)


class HeapLists(_HeapTable[tuple[list[Kept], int]], ListTable[int]):
    """A place holds a list of rows and times, and how many of them count."""

    def get(self, key: int, now_ms: int) -> Sequence[Row]:
        entry = self.places.get(key)
        return [] if entry is None else [row for row, _ in self._alive(entry, now_ms)]

    def put(self, key: int, rows: Sequence[Row], expires_ms: int | None) -> None:
        kept = [(row, expires_ms) for row in rows]
        self.places.put(key, (kept, len(kept)) if kept else None)

    def append(self, key: int, rows: Sequence[Row], expires_ms: int | None) -> None:
        added = [(row, expires_ms) for row in rows]
        if not added:
            return
        kept, count = self.places.get(key) or ([], 0)
        # What is frozen counts only what was there; nobody else appends to this list.
        assert len(kept) == count, "a list longer than its count is no longer the newest"
        kept.extend(added)
        self.places.put(key, (kept, len(kept)))

    def entries(self, now_ms: int) -> Iterator[tuple[int, Sequence[Row]]]:
        for number, entry in self.places.entries():
            if alive := self._alive(entry, now_ms):
                yield number, [row for row, _ in alive]

    def _alive(self, entry: tuple[list[Kept], int], now_ms: int) -> list[Kept]:
        kept, count = entry
        rows = kept[:count]
        if not self.declared.expires:
            return rows
        return [each for each in rows if each[1] is None or each[1] > now_ms]

    def unexpired(
        self, entry: tuple[list[Kept], int], now_ms: int
    ) -> tuple[list[Kept], int] | None:
        alive = self._alive(entry, now_ms)
        if len(alive) == entry[1]:
            return entry
        return (alive, len(alive)) if alive else None

    def rows_of(self, entries: list[tuple[list[Kept], int]], now_ms: int) -> RowsOfKeys:
        found = [self._alive(entry, now_ms) for entry in entries]
        return _of_kept(list(map(len, found)), list(itertools.chain.from_iterable(found)))

    def take_back(self, numbers: list[int], kept: list[Kept], batch: pa.RecordBatch) -> None:
        for number, (row, expires_ms) in zip(numbers, kept, strict=True):
            self.append(number, [row], expires_ms)


MapEntry = tuple[dict[Row, Kept], int]


class HeapMaps(_HeapTable[MapEntry], MapTable[int]):
    """A place holds a dict of rows and times, and the era in which it was made."""

    def get(self, key: int, user_key: Row, now_ms: int) -> Row | None:
        entry = self.places.get(key)
        found = None if entry is None else entry[0].get(user_key)
        if found is None:
            return None
        row, expires_ms = found
        return row if expires_ms is None or expires_ms > now_ms else None

    def put(self, key: int, user_key: Row, row: Row, expires_ms: int | None) -> None:
        rows = self._own(key)
        rows[user_key] = (row, expires_ms)
        self.places.put(key, (rows, self.places.era))

    def remove(self, key: int, user_key: Row) -> None:
        entry = self.places.get(key)
        if entry is None or user_key not in entry[0]:
            return
        rows = self._own(key)
        del rows[user_key]
        self.places.put(key, (rows, self.places.era) if rows else None)

    def items(self, key: int, now_ms: int) -> Iterator[tuple[Row, Row]]:
        entry = self.places.get(key)
        if entry is None:
            return iter(())
        alive = self._alive(entry, now_ms)
        return iter([(user_key, row) for user_key, (row, _) in alive.items()])

    def _own(self, key: int) -> dict[Row, Kept]:
        """The key's dict, of which no frozen table knows."""
        entry = self.places.get(key)
        if entry is None:
            return {}
        rows, era = entry
        return rows if era == self.places.era else rows.copy()

    def _alive(self, entry: MapEntry, now_ms: int) -> dict[Row, Kept]:
        if not self.declared.expires:
            return entry[0]
        return {
            user_key: kept
            for user_key, kept in entry[0].items()
            if kept[1] is None or kept[1] > now_ms
        }

    def of_era(self, entry: MapEntry, era: int) -> MapEntry:
        return (entry[0].copy(), era)

    def unexpired(self, entry: MapEntry, now_ms: int) -> MapEntry | None:
        alive = self._alive(entry, now_ms)
        if len(alive) == len(entry[0]):
            return entry
        return (alive, self.places.era) if alive else None

    def rows_of(self, entries: list[MapEntry], now_ms: int) -> RowsOfKeys:
        found = [self._alive(entry, now_ms) for entry in entries]
        kept = [each for rows in found for each in rows.values()]
        user_keys = list(itertools.chain.from_iterable(found))
        return _of_kept(list(map(len, found)), kept)._replace(user_keys=user_keys)

    def take_back(self, numbers: list[int], kept: list[Kept], batch: pa.RecordBatch) -> None:
        assert self.declared.user_key is not None, "a map without user keys"
        user_keys = self.declared.user_key.from_arrow(batch.column(USER_KEY))
        for number, user_key, (row, expires_ms) in zip(numbers, user_keys, kept, strict=True):
            self.put(number, user_key, row, expires_ms)


def _of_kept(counts: list[int], kept: list[Kept]) -> RowsOfKeys:
    return RowsOfKeys(counts, [row for row, _ in kept], [expires_ms for _, expires_ms in kept])


class FrozenHeapTable:
    """A state as it was at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        table: _HeapTable[Any],
        backend: HeapBackend,
        chunks: list[list[Any]],
        now_ms: int,
    ) -> None:
        self.snapshot_schema = table.declared.snapshot_schema(backend.key_schema)
        self._table = table
        self._keys = backend.frozen_keys()
        self._max_parallelism = backend.max_parallelism
        self._chunks = chunks
        self._count = table.places.occupied
        self._now_ms = now_ms

    def __len__(self) -> int:
        return self._count

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups.

        Columns are made of many groups at once and cut afterwards: a group may have a few rows
        only, and every call for it may wait for Python's lock.
        """
        numbers = numbers_in(self._chunks)
        groups = key_groups_of(self._keys.hashes.take(numbers), self._max_parallelism)
        order, _ = by_key_group(groups, self._max_parallelism)
        numbers, groups = numbers[order], groups[order]
        for batch in batches_of(self._slices(numbers), partial(self._batch, numbers, groups)):
            yield from _cut_by_group(batch, self.snapshot_schema)

    def release(self) -> None:
        self._chunks = []
        self._count = 0

    def _slices(self, numbers: Positions) -> Iterator[Slice]:
        """Keys are named by their places among the numbers."""
        first, pace = 0, Pace()
        while first < len(numbers):
            stop = min(first + pace.entries, len(numbers))
            made = self._slice(range(first, stop), numbers[first:stop].tolist())
            yield made
            pace.saw(made)
            first = stop

    def _slice(self, places: range, numbers: list[int]) -> Slice:
        chunks, declared = self._chunks, self._table.declared
        entries = [chunks[number >> _CHUNK_LOG2][number & _MASK] for number in numbers]
        found = self._table.rows_of(entries, self._now_ms)
        user_keys = declared.user_key and declared.user_key.to_arrow(found.user_keys)
        values = declared.value.to_arrow(found.rows)
        return Slice(places, found.counts, values, found.expires, user_keys)

    def _batch(
        self, numbers: Positions, groups: npt.NDArray[np.int32], made: Slice
    ) -> pa.RecordBatch:
        """With the key group of each row behind the columns of the snapshot."""
        places = np.repeat(np.array(made.keys), made.counts)
        columns = [column.take(numbers[places]) for column in self._keys.columns]
        if made.user_keys is not None:
            columns.append(made.user_keys)
        columns.append(made.values)
        if self._table.declared.expires:
            columns.append(pa.array(made.expires, pa.int64()).cast(EXPIRES_TYPE))
        schema = self.snapshot_schema.append(_GROUP)
        return pa.RecordBatch.from_arrays([*columns, pa.array(groups[places])], schema=schema)


def _cut_by_group(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
    groups = fixed_width_values(batch.columns[-1])
    rows = pa.RecordBatch.from_arrays(batch.columns[:-1], schema=schema)
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    for start, stop in itertools.pairwise(starts):
        yield int(groups[start]), rows.slice(start, stop - start)
