"""Reducing state with a name on local disk: columns in front, pages behind, beside other states.

Theory of operation
-------------------
A state is kept as the running aggregates are (`disk_pages`): a front of columns for keys that were
looked at lately, and pages of a few hundred keys (`pages`), in the database that the operator has
for all its states. What has changed in the front since the last barrier is a *part* like those of
the others (`disk_rows`), which goes into the pages in its turn. The front goes on holding its rows,
so nobody looks into parts. A front that has grown too large is started over once all parts are
written.

`get` wants one key at a time, and to look for one key in columns costs as much as for many: so
those of the whole batch are looked for together, when the first of them is asked for.

A key that was cleared has a row that says so, in the front and in what is written behind a page;
when a page is written as a whole such rows are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from stillframe.api.processors import Reduction
from stillframe.key_groups import Positions
from stillframe.state.aggregates import AggregateTable
from stillframe.state.backends import VALUE, Declared
from stillframe.state.columns import Array
from stillframe.state.disk import Changes, Disk
from stillframe.state.disk_entries import entries_of
from stillframe.state.disk_layout import TableOnDisk, pages_id, tables_of
from stillframe.state.disk_pages import Front, FrozenFront
from stillframe.state.evolution import fitted_to
from stillframe.state.key_names import GROUP_BYTES, KeyNames
from stillframe.state.key_places import key_places
from stillframe.state.pages import DELTAS_MAX, PageStore, hashes_of, newest_rows, rows_of_entries
from stillframe.state.reductions import PRESENT, ReducedColumns, stored_field
from stillframe.state.rows import Row

_DELTAS_MAX_IF_READ_SOON = 1
"""As in `disk_pages`: of pages that are read again and again."""
_ROW_BYTES_GUESSED = 150
"""Of a row in the front, before any front has been full."""


class Owner(Protocol):
    """What the state asks of the backend it belongs to."""

    key_schema: pa.Schema
    max_parallelism: int
    disk: Disk
    names: KeyNames

    @property
    def share_bytes_max(self) -> int:
        """How large the front may become."""

    def keys_at_hand(self) -> Sequence[bytes]:
        """Those that are going to be asked for, if any is."""

    def settle(self) -> None:
        """Write all there is, and link before that what waits to be linked."""


class _Front(Front):
    """What a state asks of the columns in front of its pages."""

    def places_to_change(self, keys: Sequence[pa.Array], count: int) -> Positions:
        return self._touched(keys, count).rows

    def places_to_read(self, keys: Sequence[pa.Array], count: int) -> Positions:
        known = len(self)
        rows = self._rows_of(keys, count)
        if len(self) > known:
            self._mark_new(known, self._look_for(known))
        return rows

    @property
    def arrays(self) -> Sequence[Array]:
        return self._columns.arrays

    @property
    def has_changed(self) -> bool:
        return bool(self._changed.any())

    def freeze_changes(self) -> FrozenFront:
        count = len(self)
        # Of a key that came and went since the last time no page knows anything.
        nowhere = self._fresh[:count] & ~self.arrays[-1][:count]
        self._changed[:count] &= ~nowhere
        frozen = super().freeze_changes()
        self._fresh[:count] = nowhere
        return frozen


class PagedReductions(ReducedColumns[bytes]):
    """The columns and pages of one state."""

    def __init__(self, backend: Owner, declared: Declared, functions: Sequence[Reduction]) -> None:
        super().__init__(declared, functions)
        self.snapshot_schema = declared.snapshot_schema(backend.key_schema)
        self.table_id = pages_id(declared.name, self.snapshot_schema)
        self._backend = backend
        keys, self._key_schema = backend.key_schema.names, backend.key_schema
        schema = pa.schema([*backend.key_schema, *self.reductions.schema])
        self._what = (schema, keys, self.reductions.calls, backend.max_parallelism)
        empty = AggregateTable(*self._what)
        self._page_schema, self._bytes_when_empty = empty.snapshot_schema, empty.state_bytes
        self._pages = PageStore(
            backend.disk,
            declared.name,
            empty.snapshot_schema,
            len(keys),
            backend.max_parallelism,
            range(backend.max_parallelism),
            self.table_id,
            PRESENT,
        )
        self._deltas_max = DELTAS_MAX
        self._begin(_ROW_BYTES_GUESSED)

    def _begin(self, row_bytes: int) -> None:
        rows_max = (self._backend.share_bytes_max - self._bytes_when_empty) // row_bytes
        self._front = _Front(*self._what, self._pages, rows_max)
        self._places: dict[bytes, int] = {}
        """Where the keys of this batch are in the front, once one was asked for."""

    # --- the columns

    @property
    def arrays(self) -> Sequence[Array]:
        return self._front.arrays

    def kept(self, key: bytes) -> Row | None:
        at = self._places.get(key)
        if at is None:
            at = self._look_for(key)
        return self.reductions.read(self._front.arrays, at)

    def _look_for(self, key: bytes) -> int:
        keys = list(self._backend.keys_at_hand())
        at = self._find(keys).get(key)
        return self._find([key])[key] if at is None else at

    def _find(self, keys: list[bytes]) -> dict[bytes, int]:
        if keys:
            at = self._front.places_to_read(self._backend.names.columns(keys), len(keys))
            self._places.update(zip(keys, at.tolist(), strict=True))
        return self._places

    def places_to_change(self, keys: Sequence[bytes]) -> Positions:
        return self._front.places_to_change(self._backend.names.columns(keys), len(keys))

    # --- between batches

    def tidy(self) -> None:
        """A front that is too large is started over."""
        self.fold_some()
        self._places.clear()
        if self._front.state_bytes > self._backend.share_bytes_max:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._deltas_max = _DELTAS_MAX_IF_READ_SOON
        self._backend.settle()
        rows = max(1, len(self._front))
        self._begin(max(1, (self._front.state_bytes - self._bytes_when_empty) // rows))

    # --- parts

    @property
    def has_unwritten(self) -> bool:
        return self.has_gathered or self._front.has_changed

    def buffered_bytes(self) -> int:
        """Beside the front, which has its own limit."""
        return 0

    def swapped(self) -> FrozenFront | None:
        """What has changed since the last time, if anything has."""
        self.fold()
        return self._front.freeze_changes() if self._front.has_changed else None

    def written(self, changes: FrozenFront, number: int) -> Iterator[Changes]:
        """Each step writes a little, by itself: pages and their directory change together."""
        for _ in self._pages.written_by_pieces(changes, self._deltas_max):
            yield Changes()

    # --- from a checkpoint

    def restore(self, batch: pa.RecordBatch) -> None:
        self.fold()
        batch = fitted_to(self.declared, batch, self._key_schema)
        keys = batch.columns[: len(self._key_schema)]
        columns = [*keys, *self.reductions.columns_of(batch.column(VALUE))]
        self._front.restore(pa.RecordBatch.from_arrays(columns, schema=self._page_schema))
        self._version += 1
        if self._front.state_bytes > self._backend.share_bytes_max:
            self._begin_anew()


# --- reading without the program


class PagesOnDisk:
    """A state in the pages of a database, as rows of a snapshot."""

    def __init__(self, disk: Disk, table: TableOnDisk) -> None:
        self.name = table.name
        self.snapshot_schema = table.snapshot_schema
        self._disk = disk
        self._id = table.table_id
        self._key_count = len(key_places(table.snapshot_schema) or ())
        fields = list(table.snapshot_schema)[: self._key_count]
        self._value_fields = list(table.snapshot_schema.field(VALUE).type)
        fields += [pa.field(stored_field(field.name), field.type) for field in self._value_fields]
        self._page_schema = pa.schema([*fields, pa.field(PRESENT, pa.bool_())])

    def batches_by_key_group(
        self, wanted: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups."""
        entries = entries_of(self._disk, self._id, wanted)
        for prefix, of_group in itertools.groupby(entries, lambda entry: entry[0][:GROUP_BYTES]):
            batch = self._newest([value for _, value in of_group])
            if batch.num_rows:
                yield int.from_bytes(prefix, "big"), batch

    def _newest(self, values: Sequence[bytes]) -> pa.RecordBatch:
        batch = rows_of_entries(values, self._page_schema)
        newest = newest_rows(batch, self._key_count, hashes_of(batch, self._key_count))
        batch = batch.take(pa.array(newest))
        present = np.array(batch.column(PRESENT).fill_null(False))
        columns = batch.filter(pa.array(present)).columns
        values_ = columns[self._key_count : -1]
        rows = pa.StructArray.from_arrays(values_, fields=self._value_fields)
        kept = [*columns[: self._key_count], rows]
        return pa.RecordBatch.from_arrays(kept, schema=self.snapshot_schema)


class LinkedPages:
    """The same in a linked database, which is opened whenever it is read."""

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
            yield from PagesOnDisk(disk, self._table).batches_by_key_group(wanted)
        finally:
            disk.close()


def paged_tables(disk: Disk, opened: Callable[[Path], Disk]) -> list[LinkedPages]:
    """The states of a database of rows that are in pages; each opens its directory when read."""
    paged = [table for table in tables_of(disk) if table.is_paged]
    return [LinkedPages(disk.directory, opened, table) for table in paged]
