"""Running aggregates of more keys than fit in memory: a table in front, pages on disk behind.

Theory of operation
-------------------
The front is an ordinary table of aggregates, as quick as it is on the heap. It holds rows that
have been looked at since it was begun; the pages in the database (`pages`) hold the rest, and older
values of these. A key that is new to the front is looked for in its page, before anything is added
to it: whole pages are taken into the front as long as they fit, and then all their keys are known
to be there; where they do not fit, only the rows asked for are taken. Where the front holds all
pages whole, nothing is ever looked for.

At a barrier the front is frozen, by reference, with a flag for each row that has changed since the
last time; it goes on holding its rows. Later and elsewhere, `link` writes the changed rows into
their pages and links the database.

A front that has grown too large is written on the spot and started over. That would let changes
made after a barrier into a snapshot that is not linked yet, so such a snapshot is linked ahead of
time, to a directory beside the database, where `link` finds it.

Rules of this file
------------------
1. The loop thread calls everything but `Frozen.link` and `Frozen.release`.
2. Frozen changes are written in the order in which they were frozen, whoever writes: what comes
   later builds upon them. Writing and linking happen under `_in_order`.
3. Nothing leaves the front before it is written. So a row in the front is never older than the
   one in its page, and what a page says of a key in the front is passed over.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import StorageError
from stillframe.key_groups import Flags, Positions, Words
from stillframe.state.accumulators import key_fields_of
from stillframe.state.aggregates import AggregateTable, FrozenTable, key_index
from stillframe.state.columns import Array, with_capacity
from stillframe.state.disk import Disk
from stillframe.state.folding import Touched
from stillframe.state.pages import Fit, Held, PageStore, RowOrder, hashes_of

_DELTAS_MAX_IF_READ_SOON = 1
"""What does not fit is read again and again, and each delta is one more thing to read. Measured on
random keys over four times the memory: with 8 deltas a third as fast."""
_FRONT_SHARE = 2
"""Of the memory for the front its rows get one part of so many. The rest is for rows that are kept
twice while a snapshot of them is written, and for pages that are being read and made."""
_SIEVE_LOG2 = 20
_SIEVE_SHIFT = np.uint64(16)
_SIEVE_MASK = np.uint64((1 << _SIEVE_LOG2) - 1)
_ROW_BYTES_GUESSED = 150
"""Of a row in the front, before any front has been full."""


class PagedAggregates:
    """The running aggregates of one subtask, on disk; used as an `AggregateTable`."""

    TABLE: ClassVar[str] = "aggregates"

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        max_parallelism: int,
        disk: Disk,
        owned: range,
        front_bytes_max: int,
        fit: Fit | None = None,
    ) -> None:
        """`disk` is empty or holds what these key groups had, made to fit by `fit` where it was
        kept with other columns; it is closed with this."""
        self._what = (input_schema, tuple(keys), tuple(calls), max_parallelism)
        table = AggregateTable(*self._what)
        self._snapshot_schema, self._result_schema = table.snapshot_schema, table.result_schema
        self._disk = disk
        self._pages = PageStore(
            disk, self.TABLE, table.snapshot_schema, len(keys), max_parallelism, owned, fit=fit
        )
        self._front_bytes_max = front_bytes_max // _FRONT_SHARE
        self._bytes_when_empty = table.state_bytes
        self._front = self._new_front(_ROW_BYTES_GUESSED)
        self._keys_before_front = self._pages.key_count
        self._version = 0
        self._in_order = threading.Lock()
        self._frozen: deque[Frozen] = deque()
        """Those that wait to be written and linked, the oldest first."""
        self._ahead_numbers = itertools.count()

    def __len__(self) -> int:
        """How many keys there are."""
        return self._keys_before_front + self._front.fresh_count

    @property
    def state_bytes(self) -> int:
        """Roughly what the front occupies in memory."""
        return self._front.state_bytes

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    @property
    def result_schema(self) -> pa.Schema:
        return self._result_schema

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._snapshot_schema

    def update(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Fold the batch in; the new values of each key it touched, by first appearance."""
        results = self._front.update(batch)
        self._on_change(batch)
        return results

    def merge(self, partials: pa.RecordBatch) -> pa.RecordBatch:
        """As `update`, of rows like those of a snapshot, each made of several records."""
        results = self._front.merge(partials)
        self._on_change(partials)
        return results

    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back; before any update, each key at most once in all calls."""
        self._front.restore(batch)
        self._on_change(batch)

    def results(self) -> Iterator[pa.RecordBatch]:
        """The values of all keys, some at a time; to be had before the next change."""
        if self._front.holds_all:
            yield self._front.results()
            return
        front = self._front.frozen()
        try:
            for rows in self._pages.all_with(front):
                table = AggregateTable(*self._what)
                table.restore(rows)
                yield table.results()
        finally:
            front.release()

    def freeze(self) -> Frozen:
        """The aggregates as they are now, by reference: the synchronous part of a snapshot."""
        frozen = Frozen(self, self._front.freeze_changes(), len(self))
        self._frozen.append(frozen)
        return frozen

    def close(self) -> None:
        with self._in_order:
            self._disk.close()

    # --- the front's size

    def _on_change(self, batch: pa.RecordBatch) -> None:
        self._version += batch.num_rows > 0
        if self._front.state_bytes > self._front_bytes_max:
            self._write_front()

    def _write_front(self) -> None:
        with self._in_order:
            while self._frozen:
                self._link_ahead(self._frozen[0])
                self._frozen.popleft()
            self._pages.write(self._front.freeze_changes(), _DELTAS_MAX_IF_READ_SOON)
        self._keys_before_front = len(self)
        row_bytes = (self._front.state_bytes - self._bytes_when_empty) // max(1, len(self._front))
        self._front = self._new_front(max(1, row_bytes))

    def _new_front(self, row_bytes: int) -> Front:
        rows_max = (self._front_bytes_max - self._bytes_when_empty) // row_bytes
        return Front(*self._what, self._pages, rows_max)

    def _link_ahead(self, frozen: Frozen) -> None:
        frozen.write(self._pages)
        if not frozen.abandoned:
            database = self._disk.directory
            ahead = database.with_name(f"{database.name}.ahead-{next(self._ahead_numbers)}")
            self._disk.link(ahead)
            frozen.on_linked_ahead(ahead)

    # --- called by Frozen, on any thread

    def link(self, frozen: Frozen, directory: Path) -> None:
        with self._in_order:
            if frozen.ahead is not None:
                frozen.ahead.rename(directory)
                return
            if frozen not in self._frozen:
                raise StorageError(
                    f"the snapshot for {directory} cannot be linked any more, because a later one"
                    " has been: take another checkpoint"
                )
            while self._frozen[0] is not frozen:
                self._frozen[0].write(self._pages)
                self._frozen.popleft()
            frozen.write(self._pages)
            self._disk.link(directory)
            self._frozen.popleft()


class Frozen:
    """The aggregates as they were at a barrier, until they are linked."""

    def __init__(self, aggregates: PagedAggregates, changes: FrozenFront, key_count: int) -> None:
        self._aggregates = aggregates
        self._changes: FrozenFront | None = changes
        self._key_count = key_count
        self.abandoned = False
        """Nobody will link it; what it holds is still to be written before all that is later."""
        self.ahead: Path | None = None
        """Where it was linked before it was asked to be."""

    def __len__(self) -> int:
        """How many keys there were."""
        return self._key_count

    def link(self, directory: Path) -> None:
        """Make the directory a database with what was there at the barrier; on any thread.

        Once at most, and not after a later one has been linked: that is an error.
        """
        self._aggregates.link(self, directory)

    def release(self) -> None:
        """It will not be linked any more. May be called twice, on any thread."""
        self.abandoned = True
        self._forget_link_ahead()

    def write(self, pages: PageStore) -> None:
        """Bring the changes into their pages, if that has not been done."""
        if self._changes is not None:
            pages.write(self._changes)
            self._changes.release()
            self._changes = None

    def on_linked_ahead(self, directory: Path) -> None:
        self.ahead = directory
        if self.abandoned:
            self._forget_link_ahead()

    def _forget_link_ahead(self) -> None:
        if self.ahead is not None:
            shutil.rmtree(self.ahead, ignore_errors=True)


class FrozenFront:
    """The rows of a front as they were, and which of them had changed."""

    def __init__(
        self, table: FrozenTable, changed: Flags, fresh: Flags, held: Held, order: RowOrder
    ) -> None:
        self._table = table
        self.changed = changed
        self.fresh = fresh
        self.held = held
        self.order = order
        self._columns: list[Array] | None = None

    @property
    def hashes(self) -> Words:
        return self._table.hashes

    def take(self, rows: Positions) -> pa.RecordBatch:
        if self._columns is None:
            # Once they are copied the loop need not copy anything aside any more.
            self._columns = self._table.columns()
            self._table.release()
        return self._table.rows_at(rows, self._columns)

    def release(self) -> None:
        self._table.release()


class Front(AggregateTable):
    """A table that looks in the pages for keys that are new to it."""

    def __init__(
        self,
        input_schema: pa.Schema,
        keys: Sequence[str],
        calls: Sequence[AggregateCall],
        max_parallelism: int,
        pages: PageStore,
        rows_max: int,
    ) -> None:
        """Whole pages are taken in as long as there are no more than `rows_max` rows then."""
        types = [field.type for field in key_fields_of(input_schema, keys)]
        self._front_keys = key_index(types, None)
        super().__init__(input_schema, keys, calls, max_parallelism, index=self._front_keys)
        self._pages = pages
        self._rows_max = rows_max
        self._order = RowOrder()
        self._changed: Flags = np.zeros(0, dtype=np.bool_)
        self._fresh: Flags = np.zeros(0, dtype=np.bool_)
        self._hold(pages.held_by_nobody())
        self.fresh_count = 0
        """How many of its keys are in no page, or were not when they came."""

    @property
    def state_bytes(self) -> int:
        return super().state_bytes + self._order.size_bytes

    def _hold(self, held: Held) -> None:
        self._held = held
        self.holds_all = bool(held.flags.all())

    def restore(self, batch: pa.RecordBatch) -> None:
        known = len(self)
        super().restore(batch)
        self._mark_new(known, np.ones(len(self) - known, dtype=np.bool_))
        self._changed[known : len(self)] = True

    def freeze_changes(self) -> FrozenFront:
        """What has changed since the last time, by reference."""
        count = len(self)
        changed, fresh = self._changed[:count], self._fresh[:count]
        self._changed, self._fresh = np.zeros_like(self._changed), np.zeros_like(self._fresh)
        return FrozenFront(self.freeze(), changed, fresh, self._held, self._order)

    def frozen(self) -> FrozenFront:
        """All rows, by reference."""
        return FrozenFront(self.freeze(), self._changed, self._fresh, self._held, self._order)

    def _touched(self, keys: Sequence[pa.Array], count: int) -> Touched:
        known = len(self)
        touched = super()._touched(keys, count)
        if len(self) > known:
            self._mark_new(known, self._look_for(known))
        self._changed[touched.distinct] = True
        return touched

    def _mark_new(self, known: int, fresh: Flags) -> None:
        self._changed = with_capacity(self._changed, len(self._changed), len(self))
        self._fresh = with_capacity(self._fresh, len(self._fresh), len(self))
        self._fresh[known : known + len(fresh)] = fresh
        self.fresh_count += int(np.count_nonzero(fresh))

    def _look_for(self, known: int) -> Flags:
        """Which of the keys from row `known` on are in no page; the others get their values."""
        fresh = np.ones(len(self) - known, dtype=np.bool_)
        if not self.holds_all:
            with self._pages.lock:
                self._take_from_pages(known, fresh)
        return fresh

    def _take_from_pages(self, known: int, fresh: Flags) -> None:
        hashes = self._front_keys.hashes_from(known)
        directory = self._pages.directory
        held = self._held.among(directory.bounds)
        wanted = np.zeros(len(directory.bounds), dtype=np.bool_)
        wanted[directory.pages_of(self._pages.places_of(hashes))] = True
        pages = np.flatnonzero(wanted & ~held.flags)
        if not len(pages):
            return
        if len(self) + int(directory.keys[pages].sum()) <= self._rows_max:
            for some in self._pages.some_at_a_time(pages):
                stored = self._pages.stored(some)
                keys, hashes = self._keys_of(stored)
                self._take(stored, self._rows_of(keys, len(hashes), hashes), known, fresh)
            self._hold(held.also(pages))
        else:
            sieve = _Sieve(hashes)
            sifted = self._pages.sifted(pages, sieve.passed)
            self._take(sifted, self._front_keys.find(*self._keys_of(sifted)), known, fresh)

    def _keys_of(self, stored: pa.RecordBatch) -> tuple[list[pa.Array], Words]:
        key_count = self._layout.key_count
        return stored.columns[:key_count], hashes_of(stored, key_count)

    def _take(self, stored: pa.RecordBatch, rows: Positions, known: int, fresh: Flags) -> None:
        """Take what pages say of these rows; those before `known` hold something newer."""
        taken = np.flatnonzero(rows >= known)
        if len(taken) < len(rows):
            rows, stored = rows.take(taken), stored.take(pa.array(taken))
        self._put(rows, stored)
        asked_for = rows - known
        fresh[asked_for[asked_for < len(fresh)]] = False


class _Sieve:
    """Lets all of these hashes through, and few others.

    The bits it looks at are neither those that chose the key group nor those that chose the page,
    in which the keys of a page are alike.
    """

    def __init__(self, hashes: Words) -> None:
        self._open = np.zeros(1 << _SIEVE_LOG2, dtype=np.bool_)
        self._open[self._places(hashes)] = True

    def passed(self, hashes: Words) -> Positions:
        return np.flatnonzero(self._open.take(self._places(hashes)))

    def _places(self, hashes: Words) -> Positions:
        return (hashes >> _SIEVE_SHIFT & _SIEVE_MASK).view(np.int64)
