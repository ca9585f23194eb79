"""States of handles on local disk: a write buffer in front, RocksDB behind.

Theory of operation
-------------------
What a program writes goes into a buffer of Python objects, one for each state. At a barrier the
buffers are swapped for empty ones, and become a *part*: that is all the synchronous part of a
snapshot does. Parts stand in a line. They are written into the database in their order, later and
in the background, by `FrozenRowStates.link`, which hard-links the database as soon as its own part
is in and before anything newer is. Reading looks into the buffer, then into the parts from the
newest to the oldest, then into the database; a part leaves the line when all of it is written.

Buffers and parts together have a limit. A buffer that has reached a third of it between two
barriers becomes a part as well, and is written piece by piece, as the loop goes on. While a
snapshot waits to be linked that must not happen. So when the limit is reached, the loop makes room:
it links the snapshot itself, to a directory beside the database, where `link` finds it, and writes
all parts. A link that is under way is waited for.

A hand goes round the database and gives up what has expired.

Rules of this file
------------------
1. The loop thread calls everything but `link` and `release`.
2. The database is written under `_in_order`, and the line of parts is changed under `_in_line`,
   which is held for moments only: freezing never waits for the disk.
3. A part does not change once it stands in the line. Writing it twice is as good as once.
4. What goes to the database around the buffers (`restore`, `drop`, another schema) comes after
   `settle`: nothing older is left to be written, and every snapshot that waits has been linked.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from stillframe.api.processors import Reduction
from stillframe.errors import BuildError, StartRefused, StorageError
from stillframe.key_groups import Positions
from stillframe.state.backends import Backend, Declared, ListTable, MapTable, Table, ValueTable
from stillframe.state.disk import METADATA, PIECE_BYTES, Changes, Disk, DiskMemory
from stillframe.state.disk_entries import (
    HEAD_BYTES,
    NUMBER_BYTES,
    TAKEN_MS,
    RowsOnDisk,
    number_bytes,
    span,
)
from stillframe.state.disk_layout import (
    Layout,
    TableOnDisk,
    key_schema_of,
    layout_of,
    say_layout,
    say_table,
    tables_of,
    unsay_table,
)
from stillframe.state.disk_reductions import PagedReductions, PagesOnDisk
from stillframe.state.disk_tables import DiskLists, DiskMaps, DiskTableOfKind, DiskValues, Part
from stillframe.state.evolution import fitted_to
from stillframe.state.key_names import GROUP_BYTES, KeyNames

_BUFFER_BYTES_MAX = 16 << 20
_BUFFERS_IN_LIMIT = 3
"""One that is filled, one that is written meanwhile, and one more at a barrier."""
_NAMES_SHARE = 8
"""Such a part of the memory is for names of keys."""
_SWEPT_ENTRIES = 256
"""How many entries are looked at for expired rows, between two batches."""
_LAST_NUMBER = METADATA + b"number:"
_PAST_NUMBERS = METADATA + b"number;"

DiskTable = DiskTableOfKind[Any] | PagedReductions
TableT = TypeVar("TableT", bound=DiskTable)


class DiskBackend(Backend[bytes]):
    """All states of one operator in one subtask, on local disk."""

    def __init__(
        self,
        key_schema: pa.Schema,
        max_parallelism: int,
        directory: Path,
        memory: DiskMemory,
        buffer_bytes_max: int | None = None,
    ) -> None:
        """Goes on with the database in the directory, or begins one."""
        if buffer_bytes_max is None:
            buffer_bytes_max = min(memory.limit_bytes // 4, _BUFFER_BYTES_MAX)
        self.key_schema = pa.schema([pa.field(field.name, field.type) for field in key_schema])
        self.max_parallelism = max_parallelism
        names_bytes_max = buffer_bytes_max // _NAMES_SHARE
        self.names = KeyNames(self.key_schema, max_parallelism, names_bytes_max)
        self.disk = Disk.open(directory, memory)
        self.parts: tuple[Part, ...] = ()
        """Those that are not written yet, the oldest first."""
        self._directory = directory
        self._buffer_bytes_max = buffer_bytes_max
        self._buffered_bytes = 0
        self._tables: dict[str, DiskTable] = {}
        self._in_order = threading.Lock()
        self._in_line = threading.Lock()
        self._waiting: list[FrozenRowStates] = []
        """Snapshots that are not linked yet, the oldest first."""
        self._hand = b""
        self._at_hand: Callable[[], Sequence[bytes]] = tuple
        """The keys of the batch, or of the timers, that were asked for last."""
        try:
            self._take_up()
        except BaseException:
            self.disk.close()
            raise

    def _take_up(self) -> None:
        """Learn what the database holds."""
        self._refuse_other_database()
        self._on_disk = {table.name: table for table in tables_of(self.disk)}
        said = [key for key, _ in self.disk.scan(_LAST_NUMBER, _PAST_NUMBERS)]
        self._said_numbers = said
        last = max((int.from_bytes(key[-NUMBER_BYTES:], "big") for key in said), default=0)
        self._numbers = itertools.count(last + 1)
        self._begun_number = last
        """Of the newest part of which anything is in the database."""

    def _refuse_other_database(self) -> None:
        layout = layout_of(self.disk)
        if layout is None:
            changes = Changes()
            say_layout(changes, Layout.ROWS, self.key_schema)
            self.disk.write(changes)
        elif layout is not Layout.ROWS:
            raise StartRefused(
                f"the state was written as {layout} by another kind of operator, and this one keeps"
                " rows: give it another uid, or start over"
            )
        elif not key_schema_of(self.disk).equals(self.key_schema):
            raise StartRefused(
                f"the state was kept by the keys {_listed(key_schema_of(self.disk))}, and the"
                f" stream is grouped by {_listed(self.key_schema)} now: group by what it was, or"
                " start over"
            )

    # --- keys

    def keys_of(self, columns: Sequence[pa.Array]) -> tuple[Positions, Sequence[bytes]]:
        numbers, names = self.names.of(columns)
        self._at_hand = partial(_named, numbers, names)
        return numbers, names

    def columns_of(self, keys: Sequence[bytes]) -> list[pa.Array]:
        self._at_hand = lambda: keys
        return self.names.columns(keys)

    def keys_at_hand(self) -> Sequence[bytes]:
        return self._at_hand()

    # --- states

    def values(self, declared: Declared) -> ValueTable[bytes]:
        return self._declared(DiskValues(self, declared))

    def lists(self, declared: Declared) -> ListTable[bytes]:
        return self._declared(DiskLists(self, declared))

    def maps(self, declared: Declared) -> MapTable[bytes]:
        return self._declared(DiskMaps(self, declared))

    def reduced(self, declared: Declared, functions: Sequence[Reduction]) -> PagedReductions:
        return self._declared(PagedReductions(self, declared, functions))

    @property
    def tables(self) -> Sequence[Table[bytes]]:
        return list(self._tables.values())

    def drop(self, name: str) -> None:
        if name not in self._on_disk:
            return
        self.settle()  # an older snapshot still has it
        found = self._on_disk.pop(name)
        self._tables.pop(name, None)
        changes = self._without(found.table_id)
        unsay_table(changes, name)
        self._write_around([changes])

    def _without(self, id_: bytes) -> Changes:
        changes = Changes()
        for group in range(self.max_parallelism):
            changes.delete_range(*span(group, id_))
        return changes

    def _declared(self, table: TableT) -> TableT:
        name = table.declared.name
        if name in self._tables:
            raise BuildError(f"State variable with name {name} has already been defined: rename it")
        known = {**self._on_disk, **self._tables}
        known.pop(name, None)
        if same := [other for other in known if known[other].table_id == table.table_id]:
            raise BuildError(
                f"states {name} and {same[0]} cannot be told apart on disk: rename one"
            )
        self._tables[name] = table  # before it fits, so that what it takes over can be written
        try:
            self._fit(table)
        except BaseException:
            del self._tables[name]
            raise
        return table

    def _fit(self, table: DiskTable) -> None:
        """Let what the database holds of this state be what the program declares."""
        declared, found = table.declared, self._on_disk.get(table.declared.name)
        schema = declared.snapshot_schema(self.key_schema)
        is_paged = isinstance(table, PagedReductions)
        if (
            found is not None
            and found.is_paged == is_paged
            and found.snapshot_schema.equals(schema, check_metadata=True)
        ):
            return
        self.settle()
        if found is not None:
            self._take_over(found, table)
        changes = Changes()
        say_table(changes, declared.name, schema, table.table_id if is_paged else None)
        self._write_around([changes])
        self._on_disk[declared.name] = TableOnDisk(
            table.table_id, declared.name, schema, is_paged=is_paged
        )

    def _take_over(self, found: TableOnDisk, table: DiskTable) -> None:
        rows: RowsOnDisk | PagesOnDisk = PagesOnDisk(self.disk, found)
        if not found.is_paged:
            rows = RowsOnDisk(self.disk, found, self.key_schema, None)
        if isinstance(table, PagedReductions):
            for _, batch in rows.batches_by_key_group():
                table.restore(batch)
            self.settle()
        else:
            self._write_around(self._rewritten(table, rows))
        if found.table_id != table.table_id:
            self._write_around([self._without(found.table_id)])

    def _rewritten(
        self, table: DiskTableOfKind[Any], rows: RowsOnDisk | PagesOnDisk
    ) -> Iterator[Changes]:
        by_group = itertools.groupby(rows.batches_by_key_group(), lambda each: each[0])
        for group, batches in by_group:
            fitted = [fitted_to(table.declared, each, self.key_schema) for _, each in batches]
            changes = Changes()
            changes.delete_range(*span(group, table.table_id))
            yield changes
            for batch in fitted:
                yield from table.restored(batch, next(self._numbers))

    def restore(self, table: DiskTableOfKind[Any], batch: pa.RecordBatch) -> None:
        self.settle()  # what was appended before it comes before it
        fitted = fitted_to(table.declared, batch, self.key_schema)
        self._write_around(table.restored(fitted, next(self._numbers)))

    def _write_around(self, pieces: Iterable[Changes]) -> None:
        """Write to the database at once; all that is older has been written."""
        with self._in_order:
            self._begun_number = next(self._numbers)
            for changes in pieces:
                self.disk.write(changes)
            self.disk.write(self._number_said(next(self._numbers)))

    # --- snapshots

    def freeze_all(self, now_ms: int) -> FrozenRowStates:
        """What is there now: the synchronous part of a snapshot."""
        part = self._part()
        frozen = FrozenRowStates(self, part.number, now_ms)
        with self._in_line:
            self._waiting.append(frozen)
        return frozen

    def _part(self) -> Part:
        """Put what the buffers hold at the end of the line."""
        size_bytes = sum(table.buffered_bytes() for table in self._tables.values())
        buffers = {name: table.swapped() for name, table in self._tables.items()}
        part = Part(next(self._numbers), buffers, size_bytes)
        self._buffered_bytes = 0
        with self._in_line:
            self.parts = (*self.parts, part)
        return part

    def link(self, frozen: FrozenRowStates, directory: Path) -> None:
        with self._in_order:
            if frozen.staged is not None:
                shutil.move(frozen.staged, directory)
                frozen.staged = None
            else:
                self._link(frozen, directory)
            with self._in_line:
                older = [each for each in self._waiting if each.number <= frozen.number]
                self._waiting = [each for each in self._waiting if each.number > frozen.number]
        for each in older:  # void, but for this one
            each.unstage()

    def _link(self, frozen: FrozenRowStates, directory: Path) -> None:
        if self._begun_number > frozen.number:
            raise StorageError(
                f"snapshot {frozen.number} of the states in {self._directory} cannot be taken"
                f" any more, as {self._begun_number} has been written: take a new one"
            )
        self._write_until(frozen.number)
        changes = Changes()
        changes.put(TAKEN_MS, frozen.now_ms.to_bytes(8, "big", signed=True))
        self.disk.write(changes)
        self.disk.link(directory)

    def release(self, frozen: FrozenRowStates) -> None:
        with self._in_line:
            self._waiting = [each for each in self._waiting if each is not frozen]
        frozen.unstage()

    # --- writing parts

    def _write_until(self, number: int) -> None:
        """Write the parts up to this one; `_in_order` is held."""
        while self.parts and self.parts[0].number <= number:
            while self._write_piece(self.parts[0]):
                pass

    def _write_piece(self, part: Part) -> bool:
        """Write a little of the first part; False: that was all of it. `_in_order` is held."""
        self._begun_number = max(self._begun_number, part.number)
        if part.pieces is None:
            part.pieces = self._pieces(part)
        try:
            changes = next(part.pieces, None)
            if changes is not None:
                self.disk.write(changes)
                return True
        except BaseException:
            part.pieces = None  # from its beginning, the next time
            raise
        with self._in_line:
            self.parts = self.parts[1:]
        part.drain()
        return False

    def _pieces(self, part: Part) -> Iterator[Changes]:
        yield self._number_said(part.number)
        for name, buffer in part.buffers.items():
            if buffer:
                yield from self._tables[name].written(buffer, part.number)

    def _number_said(self, number: int) -> Changes:
        """So that whoever goes on with the database counts on from here."""
        changes = Changes()
        for said in self._said_numbers:
            changes.delete(said)
        self._said_numbers = [_LAST_NUMBER + number_bytes(number)]
        changes.put(self._said_numbers[0], b"")
        return changes

    @property
    def share_bytes_max(self) -> int:
        """What the buffers of all states with entries may have, and each state with pages."""
        paged = sum(isinstance(table, PagedReductions) for table in self._tables.values())
        return self._buffer_bytes_max // (1 + paged)

    def settle(self) -> None:
        """Write all there is, and link before that what waits to be linked."""
        if not self.parts and not any(table.has_unwritten for table in self._tables.values()):
            return
        self._part()
        self._write_line()

    def _write_line(self) -> None:
        """Write all parts, and link before that what waits to be linked."""
        with self._in_order:
            for frozen in list(self._waiting):
                if self._is_awaited(frozen):
                    staged = self._directory.with_name(f"{self._directory.name}-{frozen.number}")
                    shutil.rmtree(staged, ignore_errors=True)
                    self._link(frozen, staged)
                    frozen.staged = staged
            if self.parts:
                self._write_until(self.parts[-1].number)

    def _is_awaited(self, frozen: FrozenRowStates) -> bool:
        """Whether it is still to be linked, and can be."""
        return frozen.staged is None and self._begun_number <= frozen.number

    def _holds_back(self) -> bool:
        """Whether nothing newer may be written, as a snapshot waits to be linked."""
        return any(map(self._is_awaited, self._waiting))

    # --- between two batches

    def tidy(self, now_ms: int) -> None:
        self._sweep(now_ms)
        for table in self._tables.values():
            if isinstance(table, PagedReductions):
                table.tidy()
        before = self._buffered_bytes
        self._buffered_bytes = sum(table.buffered_bytes() for table in self._tables.values())
        added = max(0, self._buffered_bytes - before)
        limit = max(0, self.share_bytes_max - self.names.remembered_bytes)
        if self._buffered_bytes + sum(part.size_bytes for part in self.parts) > limit:
            self._write_line()
        if self._buffered_bytes > limit // _BUFFERS_IN_LIMIT and not self._holds_back():
            self._part()
        self._write_some(added)

    def _write_some(self, added_bytes: int) -> None:
        """Write as much as was added and more, unless that is to be done by a link."""
        if not self.parts or not self._in_order.acquire(blocking=False):
            return
        try:
            for _ in range(1 + added_bytes // PIECE_BYTES):
                if not self.parts or self._holds_back():
                    break
                self._write_piece(self.parts[0])
        finally:
            self._in_order.release()

    def _sweep(self, now_ms: int) -> None:
        if not any(table.declared.expires for table in self._tables.values()):
            return
        by_id = {
            table.table_id: table
            for table in self._tables.values()
            if table.declared.expires and not isinstance(table, PagedReductions)
        }
        parts = self.parts
        entries = list(itertools.islice(self.disk.scan(self._hand, METADATA), _SWEPT_ENTRIES))
        expired = [
            (table, key)
            for key, value in entries
            if (table := by_id.get(key[GROUP_BYTES:HEAD_BYTES])) is not None
            and table.has_expired(key, value, now_ms, parts)
        ]
        if self.parts is not parts:
            return  # one has moved to the database, which may hold newer rows than were read
        for table, key in expired:
            table.give_up(key, now_ms)
        self._hand = entries[-1][0] + b"\0" if len(entries) == _SWEPT_ENTRIES else b""

    def close(self) -> None:
        with self._in_order, self._in_line:
            self.disk.close()
            self._tables.clear()
            self.parts = ()


class FrozenRowStates:
    """All states as they were at the barrier."""

    def __init__(self, backend: DiskBackend, number: int, now_ms: int) -> None:
        self._backend = backend
        self.number = number
        """Of the last part that belongs to it."""
        self.now_ms = now_ms
        self.staged: Path | None = None
        """Where it has been linked to ahead of time."""

    def link(self, directory: Path) -> None:
        """Make this directory, which must not be there, a database of it. Called once, if at all,
        by any thread; refused if a later snapshot has been linked."""
        self._backend.link(self, directory)

    def release(self) -> None:
        """It will not be linked, or has been. May be called twice, by any thread."""
        self._backend.release(self)

    def unstage(self) -> None:
        if self.staged is not None:
            shutil.rmtree(self.staged, ignore_errors=True)
            self.staged = None


def _named(numbers: Positions, names: Sequence[bytes]) -> list[bytes]:
    """Of keys with numbers, each once."""
    return [names[number] for number in np.unique(numbers).tolist()]


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
