"""Rows of aggregates kept in a database as pages of a few hundred keys.

Theory of operation
-------------------
Every key has a place: its key group, then the high bits of its hash, in one 64-bit word. A page is
a range of places within one key group, named by where it begins; the directory, a sorted column of
these beginnings, finds the page of any key. Pages start as one for each key group and are divided
when they are written with too many rows.

A page is stored as a base, which had all its rows, and a few deltas, each with the rows that were
changed or added after it; of several rows of one key the last counts. So a page of which little
changed costs little to write, and nobody needs to have read it. When the deltas become many or
large, a new base takes the place of all. Each of them is one entry of the database:

    place where the page begins (8 bytes, its first two are the key group; where the database has
    other tables as well, which one it is comes behind these two), number (1 byte)
    -> an Arrow record batch without its schema, then how many keys the page has, and how many rows
       all its entries have (4 bytes each)

Rules of this file
------------------
1. One thread at a time writes; `PageStore` does not look after that. It may be another one than
   the one that reads.
2. The directory and the database change together, under `lock`. Who reads holds it from looking
   at the directory until the entries are read.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pyarrow as pa

from stillframe.errors import SnapshotDamaged
from stillframe.key_groups import (
    NO_COLUMNS_HASH,
    Flags,
    Positions,
    Words,
    hash_columns,
    key_groups_of,
)
from stillframe.state.aggregates import key_index
from stillframe.state.columns import runs
from stillframe.state.disk import METADATA, PIECE_BYTES, Changes, Disk, group_prefix
from stillframe.state.disk_entries import entries_of
from stillframe.state.disk_layout import Layout, say_layout, say_table, tables_of
from stillframe.state.key_names import GROUP_BYTES
from stillframe.state.key_places import key_places

PAGE_ROWS_MAX = 512
"""A page that is written with more is divided."""
DELTAS_MAX = 32
_DELTA_SHARE_MAX = 4
"""A delta has less than one of so many rows of its page."""
_ROWS_PER_KEY_MAX = 2
"""So many rows may the entries of a page have."""
_ROWS_READ_AT_ONCE = 65_536
_ROWS_WRITTEN_AT_ONCE = 8_192
"""Fewer, because a write to the database holds Python's lock."""
_KEY_GROUP_SHIFT = 48

Fit = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Makes rows of a snapshot fit, or raises `StartRefused`."""

_COUNTS = struct.Struct("<II")
_NUMBERS = [bytes((number,)) for number in range(256)]


def places_of(hashes: Words, max_parallelism: int) -> Words:
    groups = key_groups_of(hashes, max_parallelism).astype(np.uint64)
    places: Words = groups << np.uint64(_KEY_GROUP_SHIFT) | hashes >> np.uint64(16)
    return places


def hashes_of(batch: pa.RecordBatch, key_count: int) -> Words:
    """Of rows of a snapshot, whose keys come first."""
    if not key_count:
        return np.full(batch.num_rows, NO_COLUMNS_HASH, dtype=np.uint64)
    return hash_columns(batch.columns[:key_count])


def newest_rows(batch: pa.RecordBatch, key_count: int, hashes: Words) -> Positions:
    """Of each key the last row, by first appearance of the keys."""
    keys = batch.columns[:key_count]
    index = key_index([key.type for key in keys], batch.num_rows)
    numbers = index.rows_of(keys, hashes)
    newest = np.empty(len(index), dtype=np.int64)
    newest[numbers] = np.arange(len(numbers))  # of several writes to one place the last stays
    return newest


# --- entries


def entry_key(place: int, number: int, table: bytes = b"") -> bytes:
    """`table` is what follows the key group where a database has other tables as well."""
    said = place.to_bytes(8, "big")
    return said[:GROUP_BYTES] + table + said[GROUP_BYTES:] + bytes((number,))


def _entry(batch: pa.RecordBatch, keys_in_page: int, rows_in_page: int) -> bytes:
    rows: bytes = batch.serialize().to_pybytes()
    return rows + _COUNTS.pack(keys_in_page, rows_in_page)


def rows_of_entries(values: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """All their rows, in their order."""
    # What follows the rows is passed over by Arrow.
    return one_batch([pa.ipc.read_record_batch(value, schema) for value in values], schema)


def one_batch(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    # Tables are put together in half the time that single columns take.
    together = pa.Table.from_batches(batches, schema).combine_chunks()
    columns = [column.chunk(0) for column in together.columns] if len(together) else None
    if columns is None:
        columns = [pa.array([], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- which pages there are


class Directory:
    """The pages: where each begins, how many entries it has, how many keys and rows are in them."""

    def __init__(
        self,
        bounds: Words,
        entries: Positions,
        keys: Positions,
        rows: Positions,
        end: int,
        table: bytes,
    ) -> None:
        self.table = table
        self.bounds = bounds
        """Replaced when pages are divided, never changed: who holds it holds it as it was."""
        self._end = np.uint64(end)
        self.entries = entries
        self.keys = keys
        self.rows = rows

    @classmethod
    def of(cls, disk: Disk, owned: range, table: bytes) -> Directory:
        """What these key groups have in the database; where there is nothing, an empty page."""
        pages = {group << _KEY_GROUP_SHIFT: (0, 0, 0) for group in owned}
        for key, value in _entries_of(disk, owned, table):
            place = int.from_bytes(key[:GROUP_BYTES] + key[GROUP_BYTES + len(table) : -1], "big")
            pages[place] = key[-1] + 1, *_COUNTS.unpack(value[-_COUNTS.size :])
        bounds = np.array(sorted(pages), dtype=np.uint64)
        numbers = np.array([pages[place] for place in sorted(pages)], dtype=np.int64)
        entries, keys, rows = numbers.reshape(-1, 3).T.copy()
        return cls(bounds, entries, keys, rows, owned.stop << _KEY_GROUP_SHIFT, table)

    def pages_of(self, places: Words) -> Positions:
        return np.searchsorted(self.bounds, places, side="right") - 1

    def entry_keys(self, pages: Positions) -> list[bytes]:
        """Of all entries of these pages, in their order."""
        places = self.bounds[pages].astype(">u8").tobytes()
        return [
            places[start : start + GROUP_BYTES]
            + self.table
            + places[start + GROUP_BYTES : start + 8]
            + number
            for start, count in zip(
                range(0, len(places), 8), self.entries[pages].tolist(), strict=True
            )
            for number in _NUMBERS[:count]
        ]

    def entry_key(self, place: int, number: int) -> bytes:
        return entry_key(place, number, self.table)

    def stops_of(self, pages: Positions) -> Words:
        """Where the place is that each of these pages does not reach."""
        return np.append(self.bounds, self._end)[pages + 1]

    def insert(self, bounds: Words, keys: Positions) -> None:
        """New pages, each of one entry."""
        at = np.searchsorted(self.bounds, bounds)
        self.bounds = np.insert(self.bounds, at, bounds)
        self.entries = np.insert(self.entries, at, 1)
        self.keys = np.insert(self.keys, at, keys)
        self.rows = np.insert(self.rows, at, keys)


def _entries_of(disk: Disk, owned: range, table: bytes) -> Iterator[tuple[bytes, bytes]]:
    if table:
        return entries_of(disk, table, owned)
    return disk.scan(group_prefix(owned.start), group_prefix(owned.stop))


@dataclass(frozen=True, slots=True)
class Held:
    """The pages someone has all rows of, among those with these bounds."""

    bounds: Words
    flags: Flags

    def among(self, bounds: Words) -> Held:
        """The same, now that some pages have been divided: who had a page has its parts."""
        if bounds is self.bounds:
            return self
        before = np.searchsorted(self.bounds, bounds, side="right") - 1
        return Held(bounds, self.flags.take(before))

    def also(self, pages: Positions) -> Held:
        flags = self.flags.copy()
        flags[pages] = True
        return Held(self.bounds, flags)


# --- writing


class ChangedRows(Protocol):
    """Rows, some of which have changed since they were last written."""

    @property
    def hashes(self) -> Words:
        """Of the key of each row."""

    @property
    def changed(self) -> Flags: ...

    @property
    def fresh(self) -> Flags:
        """Which of the changed ones have no row in the database yet."""

    @property
    def held(self) -> Held:
        """The pages all rows of which are here."""

    @property
    def order(self) -> RowOrder:
        """Of all rows; kept by whoever has them, because the next write will want it too."""

    def take(self, rows: Positions) -> pa.RecordBatch: ...


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Row numbers by place."""

    rows: Positions
    places: Words

    @classmethod
    def of(cls, rows: Positions, places: Words) -> _Sorted:
        order = np.argsort(places)
        return cls(rows.take(order), places.take(order))

    def starts(self, bounds: Words) -> Positions:
        return np.searchsorted(self.places, bounds)

    def those(self, wanted: Flags) -> _Sorted:
        """The rows that are flagged."""
        if wanted.all():
            return self
        at = np.flatnonzero(wanted.take(self.rows))
        return _Sorted(self.rows.take(at), self.places.take(at))

    def between(self, bounds: Words, stops: Words) -> _Sorted:
        """Those within any of these ranges of places, which are in ascending order."""
        starts, ends = self.starts(bounds), self.starts(stops)
        if (starts[1:] == ends[:-1]).all():
            whole = slice(starts[0], ends[-1])
            return _Sorted(self.rows[whole], self.places[whole])
        within = runs(starts, ends - starts)
        return _Sorted(self.rows.take(within), self.places.take(within))


class RowOrder:
    """The rows of a table by place, worked out anew only when there are more of them.

    A third of what it costs to write a table of which every row has changed.
    """

    def __init__(self) -> None:
        self._sorted = _Sorted(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64))

    @property
    def size_bytes(self) -> int:
        return self._sorted.rows.nbytes + self._sorted.places.nbytes

    def of(self, hashes: Words, places_of: Callable[[Words], Words]) -> _Sorted:
        """Of the table these are the hashes of: rows are added to it, none ever goes."""
        if len(self._sorted.rows) != len(hashes):
            self._sorted = _Sorted.of(np.arange(len(hashes)), places_of(hashes))
        return self._sorted


class PageStore:
    """The pages of one subtask in its database."""

    def __init__(
        self,
        disk: Disk,
        name: str,
        schema: pa.Schema,
        key_count: int,
        max_parallelism: int,
        owned: range,
        table: bytes = b"",
        present: str | None = None,
        fit: Fit | None = None,
    ) -> None:
        """`table` is what the entries have behind their key group if the database has others too;
        whoever gives it says what is in the database. Rows whose column `present` is not true are
        left out of pages that are written as a whole. `fit` makes rows fit that were kept with
        other columns."""
        self._disk = disk
        self._schema = schema
        self._key_count = key_count
        self._max_parallelism = max_parallelism
        self.lock = threading.Lock()
        self._present = schema.get_field_index(present) if present else -1
        if not table:
            self._begin(name, owned, fit)
        self.directory = Directory.of(disk, owned, table)

    def _begin(self, name: str, owned: range, fit: Fit | None) -> None:
        """Say what is here, and give up key groups that others own by now: else they would be in
        two snapshots."""
        stored = {table.name: table.snapshot_schema for table in tables_of(self._disk)}
        changes = Changes()
        changes.delete_range(group_prefix(0), group_prefix(owned.start))
        changes.delete_range(group_prefix(owned.stop), METADATA)
        self._disk.write(changes)
        if not stored.get(name, self._schema).equals(self._schema):
            assert fit is not None, f"the columns of {name} have changed and nobody can fit them"
            self._fit_entries(stored[name], fit)
        changes = Changes()
        say_layout(changes, Layout.PAGES, pa.schema(list(self._schema)[: self._key_count]))
        say_table(changes, name, self._schema)
        self._disk.write(changes)

    def _fit_entries(self, stored: pa.Schema, fit: Fit) -> None:
        """The job keeps other columns by now: write again what was kept; raises if it does not
        fit."""
        changes = Changes()
        for key, value in self._disk.scan(group_prefix(0), METADATA):
            batch = pa.ipc.read_record_batch(value, stored)
            changes.put(key, _entry(fit(batch), *_COUNTS.unpack(value[-_COUNTS.size :])))
            if changes.size_bytes > PIECE_BYTES:
                self._disk.write(changes)
                changes = Changes()
        self._disk.write(changes)

    @property
    def key_count(self) -> int:
        """How many keys there are in all pages."""
        return int(self.directory.keys.sum())

    def places_of(self, hashes: Words) -> Words:
        return places_of(hashes, self._max_parallelism)

    def held_by_nobody(self) -> Held:
        """All rows of a page that has no entries are wherever one looks."""
        return Held(self.directory.bounds, self.directory.entries == 0)

    def stored(self, pages: Positions) -> pa.RecordBatch:
        """The rows of these pages; of several of one key the last counts."""
        keys = self.directory.entry_keys(pages)
        values = self._disk.get_all(keys)
        if None in values:
            raise SnapshotDamaged(
                f"the state database in {self._disk.directory} has lost page"
                f" {keys[values.index(None)].hex()}: restart the job from its latest checkpoint"
            )
        return rows_of_entries(cast(list[bytes], values), self._schema)

    def sifted(self, pages: Positions, passed: Callable[[Words], Positions]) -> pa.RecordBatch:
        """As `stored`, of rows whose hashes pass: `passed` tells which of several do."""
        batches = []
        for some in self.some_at_a_time(pages):
            stored = self.stored(some)
            batches.append(stored.take(pa.array(passed(hashes_of(stored, self._key_count)))))
        return one_batch(batches, self._schema)

    def some_at_a_time(self, pages: Positions) -> Iterator[Positions]:
        """The pages in runs that are good to be read or written at once."""
        before = np.cumsum(self.directory.rows[pages]) // _ROWS_READ_AT_ONCE
        return iter(np.split(pages, np.flatnonzero(np.diff(before)) + 1))

    def all_with(self, front: ChangedRows) -> Iterator[pa.RecordBatch]:
        """All rows there are, some at a time; those of the front count."""
        rows = _Sorted.of(np.arange(len(front.hashes)), self.places_of(front.hashes))
        bounds = self.directory.bounds[:1]
        while len(bounds):
            with self.lock:
                first = int(self.directory.pages_of(bounds)[0])
                some = next(self.some_at_a_time(np.arange(first, len(self.directory.bounds))))
                stops = self.directory.stops_of(some[-1:])
                following = self.directory.bounds[some[-1] + 1 :][:1]
                stored = self.stored(some)
            held = front.take(rows.between(bounds, stops).rows)
            yield self._newest([stored, held])[0]
            bounds = following

    def merged(self, pages: Positions, changed: pa.RecordBatch) -> tuple[pa.RecordBatch, Words]:
        """All rows of these pages with those that have changed, by place, and their places."""
        return self._newest([self.stored(pages), changed])

    def _newest(self, batches: Sequence[pa.RecordBatch]) -> tuple[pa.RecordBatch, Words]:
        """The last row of each key, by place, and their places."""
        batch = one_batch(batches, self._schema)
        hashes = hashes_of(batch, self._key_count)
        newest = newest_rows(batch, self._key_count, hashes)
        rows = _Sorted.of(newest, self.places_of(hashes.take(newest)))
        return batch.take(pa.array(rows.rows)), rows.places

    def apply(self, prepared: _Prepared) -> None:
        with self.lock:
            self._disk.write(prepared.changes)
            prepared.change_directory()

    def write(self, rows: ChangedRows, deltas_max: int = DELTAS_MAX) -> None:
        """Bring the changed ones into the database; no page gets more deltas than that."""
        for _ in self.written_by_pieces(rows, deltas_max):
            pass

    def written_by_pieces(self, rows: ChangedRows, deltas_max: int) -> Iterator[None]:
        """The same, a little with each step."""
        changed = np.flatnonzero(rows.changed)
        if len(changed):
            yield from _Writing(self, rows, changed, deltas_max).pieces()

    def those_present(
        self, batch: pa.RecordBatch, places: Words, bounds: Words
    ) -> tuple[pa.RecordBatch, Words]:
        """All rows of pages that begin there, without those that are void; but none gets empty."""
        if self._present < 0:
            return batch, places
        present = np.array(batch.column(self._present).fill_null(False))
        if present.all():
            return batch, places
        present[np.searchsorted(places, bounds)] = True
        return batch.filter(pa.array(present)), places[present]


class _Writing:
    """Changed rows on their way into the database."""

    def __init__(
        self, store: PageStore, front: ChangedRows, changed: Positions, deltas_max: int
    ) -> None:
        self._store = store
        self._front = front
        self._deltas_max = deltas_max
        directory = store.directory
        self._changed = self._changed_by_place(changed)
        starts = self._changed.starts(directory.bounds)
        counts = np.diff(starts, append=len(changed))
        self._pages = np.flatnonzero(counts)
        starts, counts = starts[self._pages], counts[self._pages]
        fresh = front.fresh.take(self._changed.rows)
        self._keys = directory.keys[self._pages] + np.add.reduceat(fresh, starts, dtype=np.int64)
        """How many each page will have."""
        self._as_delta = self._get_along_with_a_delta(counts)
        held = front.held.among(directory.bounds).flags[self._pages]
        self._rewritten, self._merged = held & ~self._as_delta, ~held & ~self._as_delta
        self._row_counts = np.where(self._as_delta, counts, self._keys)

    def _changed_by_place(self, changed: Positions) -> _Sorted:
        if len(changed) * _DELTA_SHARE_MAX < len(self._front.hashes):
            return _Sorted.of(changed, self._store.places_of(self._front.hashes.take(changed)))
        # Most pages will be written as a whole.
        return self._all_by_place().those(self._front.changed)

    def _get_along_with_a_delta(self, changed_counts: Positions) -> Flags:
        entries = self._store.directory.entries[self._pages]
        few: Flags = (entries > 0) & (entries <= self._deltas_max)
        few &= (changed_counts * _DELTA_SHARE_MAX < self._keys) & (self._keys <= PAGE_ROWS_MAX)
        rows = self._store.directory.rows[self._pages] + changed_counts
        few &= rows <= _ROWS_PER_KEY_MAX * self._keys
        return few

    def _all_by_place(self) -> _Sorted:
        return self._front.order.of(self._front.hashes, self._store.places_of)

    def pieces(self) -> Iterator[None]:
        # From the last page to the first: a page that is divided changes the numbers of those
        # behind it only.
        parts = np.cumsum(self._row_counts) // _ROWS_WRITTEN_AT_ONCE
        for some in reversed(np.split(np.arange(len(parts)), np.flatnonzero(np.diff(parts)) + 1)):
            self._write_some(some)
            yield

    def _write_some(self, some: Positions) -> None:
        prepared = _Prepared(self._store.directory)
        deltas = some[self._as_delta[some]]
        if len(deltas):
            rows = self._rows_in(self._changed, self._pages[deltas])
            batch = self._front.take(rows.rows)
            prepared.add_deltas(batch, rows.places, self._pages[deltas], self._keys[deltas])
        rewritten = self._pages[some[self._rewritten[some]]]
        if len(rewritten):
            rows = self._rows_in(self._all_by_place(), rewritten)
            self._add_bases(prepared, self._front.take(rows.rows), rows.places, rewritten)
        merged = self._pages[some[self._merged[some]]]
        if len(merged):
            changed = self._front.take(self._rows_in(self._changed, merged).rows)
            batch, places = self._store.merged(merged, changed)
            self._add_bases(prepared, batch, places, merged)
        self._store.apply(prepared)

    def _add_bases(
        self, prepared: _Prepared, batch: pa.RecordBatch, places: Words, pages: Positions
    ) -> None:
        bounds = self._store.directory.bounds[pages]
        prepared.add_bases(*self._store.those_present(batch, places, bounds), pages)

    def _rows_in(self, rows: _Sorted, pages: Positions) -> _Sorted:
        directory = self._store.directory
        return rows.between(directory.bounds[pages], directory.stops_of(pages))


class _Prepared:
    """Entries that are ready to be written, and what they make of the directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.changes = Changes()
        self._pages: list[Positions] = []
        self._entries: list[Positions] = []
        self._keys: list[Positions] = []
        self._rows: list[Positions] = []
        self._new_bounds: list[Words] = []
        self._new_keys: list[Positions] = []

    def add_deltas(
        self, batch: pa.RecordBatch, places: Words, pages: Positions, keys: Positions
    ) -> None:
        """Each page gets those of the rows, which are sorted, that are its own."""
        bounds, entries = self._directory.bounds[pages], self._directory.entries[pages]
        starts = np.searchsorted(places, bounds)
        lengths = np.diff(starts, append=len(places))
        rows = self._directory.rows[pages] + lengths
        self._put(batch, bounds, entries, starts, lengths, keys, rows)
        self._note(pages, entries + 1, keys, rows)

    def add_bases(self, batch: pa.RecordBatch, places: Words, pages: Positions) -> None:
        """These are all rows of the pages; a page with too many is divided."""
        bounds = self._directory.bounds[pages]
        cuts = _cuts(places, np.searchsorted(places, bounds))
        lengths = np.diff(cuts, append=len(places))
        # A part begins where its first row is; but the first part where the page begins.
        first = np.searchsorted(places.take(cuts), bounds)
        cut_bounds = places.take(cuts)
        cut_bounds[first] = bounds
        new = np.ones(len(cuts), dtype=np.bool_)
        new[first] = False
        self._put(batch, cut_bounds, np.zeros_like(cuts), cuts, lengths, lengths, lengths)
        self._delete_deltas(pages)
        self._note(pages, np.ones_like(pages), lengths[first], lengths[first])
        self._new_bounds.append(cut_bounds[new])
        self._new_keys.append(lengths[new])

    def _put(
        self,
        batch: pa.RecordBatch,
        bounds: Words,
        numbers: Positions,
        starts: Positions,
        lengths: Positions,
        keys: Positions,
        rows: Positions,
    ) -> None:
        """Write an entry for each: its page, its number there, its rows, and what is in the page
        with it."""
        columns = (column.tolist() for column in (bounds, numbers, starts, lengths, keys, rows))
        for bound, number, start, length, *in_page in zip(*columns, strict=True):
            entry = _entry(batch.slice(start, length), *in_page)
            self.changes.put(self._directory.entry_key(bound, number), entry)

    def _delete_deltas(self, pages: Positions) -> None:
        with_deltas = pages[self._directory.entries[pages] > 1]
        places = self._directory.bounds[with_deltas].tolist()
        for place, count in zip(places, self._directory.entries[with_deltas].tolist(), strict=True):
            for number in range(1, count):
                self.changes.delete(self._directory.entry_key(place, number))

    def _note(self, pages: Positions, entries: Positions, keys: Positions, rows: Positions) -> None:
        self._pages.append(pages)
        self._entries.append(entries)
        self._keys.append(keys)
        self._rows.append(rows)

    def change_directory(self) -> None:
        pages = np.concatenate(self._pages)
        self._directory.entries[pages] = np.concatenate(self._entries)
        self._directory.keys[pages] = np.concatenate(self._keys)
        self._directory.rows[pages] = np.concatenate(self._rows)
        if any(map(len, self._new_bounds)):
            bounds = np.concatenate(self._new_bounds)
            self._directory.insert(bounds, np.concatenate(self._new_keys))


def _cuts(places: Words, starts: Positions) -> Positions:
    """Where the parts of pages begin that begin at `starts`: one of each that has few rows.

    Parts of the others are about half full, so that they can grow. Rows of one place stay together.
    """
    counts = np.diff(starts, append=len(places))
    parts = np.where(counts > PAGE_ROWS_MAX, 2 * counts // PAGE_ROWS_MAX, 1)
    if not (parts > 1).any():
        return starts
    number = runs(np.zeros_like(parts), parts)  # of each part within its page
    evenly = np.repeat(starts, parts) + number * np.repeat(counts, parts) // np.repeat(parts, parts)
    first_of_place = np.searchsorted(places, places.take(evenly))
    return np.unique(np.append(starts, first_of_place))


# --- reading without the program


def page_tables(disk: Disk, opened: Callable[[Path], Disk]) -> list[StoredPages]:
    """The tables of a database of pages; each opens its directory when it is read."""
    return [
        StoredPages(disk.directory, opened, table.name, table.snapshot_schema)
        for table in tables_of(disk)
    ]


class StoredPages:
    """All pages of a database, as rows of a snapshot."""

    def __init__(
        self,
        directory: Path,
        opened: Callable[[Path], Disk],
        name: str,
        snapshot_schema: pa.Schema,
    ) -> None:
        self._directory = directory
        self._opened = opened
        self.name = name
        self.snapshot_schema = snapshot_schema
        self._key_count = len(key_places(snapshot_schema) or ())

    def batches_by_key_group(
        self, wanted: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups."""
        first = group_prefix(0) if wanted is None else group_prefix(wanted.start)
        stop = METADATA if wanted is None else group_prefix(wanted.stop)
        disk = self._opened(self._directory)
        try:
            entries = disk.scan(first, stop)
            for prefix, of_group in itertools.groupby(entries, key=lambda entry: entry[0][:2]):
                values = [value for _, value in of_group]
                yield int.from_bytes(prefix, "big"), self._newest(values)
        finally:
            disk.close()

    def _newest(self, values: Sequence[bytes]) -> pa.RecordBatch:
        batch = rows_of_entries(values, self.snapshot_schema)
        rows = newest_rows(batch, self._key_count, hashes_of(batch, self._key_count))
        return batch.take(pa.array(rows))
