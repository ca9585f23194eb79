"""Maps keys to dense row numbers, for a whole batch of keys at a time.

Theory of operation: an open-addressing table of row numbers (plus one; 0 is an empty place), found
by the high bits of the key's 64-bit hash, with linear probing. The low bits are of no use here:
all keys of one subtask share some of them, because they chose its key groups. Each round of a
lookup handles all keys that are still undecided: those that meet their own row are done, those
that meet an empty place claim it (the first of several claimants wins, the others look again),
the rest go one place further.

Equal hashes do not prove equal keys, so a match is compared with the stored key, except for a
single fixed-width column, where the hash is a bijection and only null needs the comparison.

The table is replaced by a larger one long before it is full: the new one is filled a slice per
batch, from the stored hashes, while the old one goes on serving, so no batch waits for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.key_groups import (
    NULL_HASH,
    BytesColumn,
    Flags,
    KeyColumn,
    Positions,
    WordColumn,
    Words,
    fixed_width_values,
    hash_key_columns,
    is_text,
    key_column,
    keys_repeat,
    stored_dtype,
    words_at,
)
from stillframe.state.columns import AppendOnly, Array, arranged
from stillframe.state.known_keys import KnownKeys

_FIRST_SLOTS_LOG2 = 16
_LOAD_TO_START_GROWING = 0.3
_LOAD_MAX = 0.7
_GROWTH_STEP_PER_ROW = 2
"""Rows moved to the new table per row looked up: it is ready before the old one is too full."""

_WORD_BYTES = 8
_LONG_BYTES = 4096
"""From here on a key is compared and copied by itself: numpy's steps per word, and its positions of
eight bytes for each byte, cost more than one Python call."""


# --- stored keys, one class per form


class StoredKeys(Protocol):
    """One key column of all rows, append-only."""

    @property
    def nbytes(self) -> int: ...

    def append(self, column: Any, positions: Positions) -> None:
        """Store the keys at these positions of the column as the next rows."""

    def equal(self, column: Any, positions: Positions, rows: Positions) -> Flags:
        """Which keys at `positions` of the column equal the stored keys at `rows`."""

    def freeze(self) -> FrozenKeys: ...


ArrangedKeys = Callable[[int, int], pa.Array]
"""What is between two places of a key column whose rows are put there (`columns.arranged`)."""


class FrozenKeys(Protocol):
    """One key column as it was, by reference."""

    def take(self, rows: Positions) -> pa.Array: ...

    def arranged(self, places: Positions) -> ArrangedKeys: ...


class StoredWords:
    """Keys of a fixed-width type."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._words = AppendOnly(np.uint64)
        self._valid = AppendOnly(np.bool_)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes + self._valid.nbytes

    def append(self, column: WordColumn, positions: Positions) -> None:
        self._words.append(column.words[positions])
        self._valid.append(_valid_at(column.valid, positions))

    def equal(self, column: WordColumn, positions: Positions, rows: Positions) -> Flags:
        same: Flags = self._words.rows.take(rows) == column.words[positions]
        same &= self._valid.rows.take(rows) == _valid_at(column.valid, positions)
        return same

    def freeze(self) -> FrozenKeys:
        return FrozenWords(self._type, self._words.rows, self._valid.rows)


class FrozenWords:
    def __init__(self, type_: pa.DataType, words: Array, valid: Array) -> None:
        self._type = type_
        self._words = words
        self._valid = valid

    def take(self, rows: Positions) -> pa.Array:
        return arrow_of_words(self._words.take(rows), self._valid.take(rows), self._type)

    def arranged(self, places: Positions) -> ArrangedKeys:
        words, valid = arranged(self._words, places), None
        if not self._valid.all():
            valid = arranged(self._valid, places)

        def between(start: int, stop: int) -> pa.Array:
            known = None if valid is None else valid[start:stop]
            return arrow_of_words(words[start:stop], known, self._type)

        return between


def arrow_of_words(words: Words, valid: Flags | None, type_: pa.DataType) -> pa.Array:
    """Back from 64-bit words to a column of the declared type."""
    kind = np.float64 if pt.is_floating(type_) else np.int64
    values = words.view(kind).astype(stored_dtype(type_), copy=False)
    return fixed_width_array(values, valid, type_)


def fixed_width_array(values: Array, valid: Flags | None, type_: pa.DataType) -> pa.Array:
    """An Arrow column of numpy values, which are kept by reference where there can be."""
    mask = None if valid is None or valid.all() else ~valid
    if mask is None and not pt.is_boolean(type_):
        return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])
    plain = pa.array(values, mask=mask)
    return plain if plain.type == type_ else plain.view(type_)


class StoredBytes:
    """Keys of variable length: all their bytes one after the other, and where each ends."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._bytes = AppendOnly(np.uint8)
        self._ends = AppendOnly(np.int64)
        self._ends.append(np.zeros(1, dtype=np.int64))
        self._valid = AppendOnly(np.bool_)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes + self._ends.nbytes + self._valid.nbytes

    def append(self, column: BytesColumn, positions: Positions) -> None:
        lengths = column.lengths[positions]
        end = int(self._ends.rows[-1])
        self._bytes.append(joined_bytes(column.padded, column.starts[positions], lengths))
        self._ends.append(end + np.cumsum(lengths))
        self._valid.append(_valid_at(column.valid, positions))

    def equal(self, column: BytesColumn, positions: Positions, rows: Positions) -> Flags:
        ends = self._ends.rows
        starts, lengths = ends.take(rows), column.lengths[positions]
        same: Flags = ends.take(rows + 1) - starts == lengths
        same &= self._valid.rows.take(rows) == _valid_at(column.valid, positions)
        compared = np.flatnonzero(same & (lengths > 0))
        # Word by word, and only those that are equal so far and not at their end.
        stored, others = self._padded(), column.starts[positions]
        begin = 0
        while len(compared) and begin < _LONG_BYTES:
            remaining = lengths[compared] - begin
            ours = words_at(stored, starts[compared] + begin, remaining)
            equal_here = ours == words_at(column.padded, others[compared] + begin, remaining)
            same[compared[~equal_here]] = False
            compared = compared[equal_here & (remaining > _WORD_BYTES)]
            begin += _WORD_BYTES
        for at in compared.tolist():
            length, here, there = int(lengths[at]), int(starts[at]), int(others[at])
            same[at] = np.array_equal(
                stored[here : here + length], column.padded[there : there + length]
            )
        return same

    def freeze(self) -> FrozenKeys:
        return FrozenBytes(self._type, self._bytes.rows, self._ends.rows, self._valid.rows)

    def _padded(self) -> npt.NDArray[np.uint8]:
        return self._bytes.rows_and_padding(_WORD_BYTES)


class FrozenBytes:
    def __init__(self, type_: pa.DataType, data: Array, ends: Array, valid: Array) -> None:
        self._type = type_
        self._valid = valid
        wide = pa.large_string() if is_text(type_) else pa.large_binary()
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        self._all = pa.Array.from_buffers(wide, len(valid), buffers)

    def take(self, rows: Positions) -> pa.Array:
        valid = self._valid.take(rows)
        indices = pa.array(rows, mask=None if valid.all() else ~valid)
        taken = self._all.take(indices)
        if pt.is_decimal128(self._type):
            return taken.cast(pa.binary(16)).view(self._type)
        return taken.cast(self._type)

    def arranged(self, places: Positions) -> ArrangedKeys:
        order = arranged(np.arange(len(places)), places)
        return lambda start, stop: self.take(order[start:stop])


def _valid_at(valid: Flags | None, positions: Positions) -> Flags:
    return np.ones(len(positions), dtype=np.bool_) if valid is None else valid[positions]


def joined_bytes(data: Array, starts: Positions, lengths: Positions) -> Array:
    """The bytes that begin at each start, one after the other."""
    ends = np.cumsum(lengths)
    if len(ends) and ends[-1] > _LONG_BYTES * len(ends):
        runs = zip(starts.tolist(), lengths.tolist(), strict=True)
        return np.concatenate([data[start : start + length] for start, length in runs])
    shift = np.repeat(starts - (ends - lengths), lengths)
    return data[shift + np.arange(len(shift))]


def _stored_keys(type_: pa.DataType) -> StoredKeys:
    prepared = key_column(pa.array([], type_))
    return StoredWords(type_) if isinstance(prepared, WordColumn) else StoredBytes(type_)


# --- the table


class _Slots:
    """Places for row numbers plus one; 0 is empty."""

    def __init__(self, slots_log2: int) -> None:
        self.size_log2 = slots_log2
        self.mask = (1 << slots_log2) - 1
        self._shift = np.uint64(64 - slots_log2)
        self.places: npt.NDArray[np.int32] = np.zeros(1 << slots_log2, dtype=np.int32)

    def home(self, hashes: Words) -> Positions:
        return (hashes >> self._shift).view(np.int64)

    def put(self, hashes: Words, numbers: npt.NDArray[np.int32]) -> None:
        """Give each number a place; they are all different and not there yet."""
        places, at = self.places, self.home(hashes)
        while len(at):
            free = places.take(at) == 0
            places[at[free]] = numbers[free]
            homeless = places.take(at) != numbers
            at = (at[homeless] + 1) & self.mask
            numbers = numbers[homeless]


class KeyIndex:
    """Dense row numbers 0, 1, 2, … for keys; a batch gives those it saw first the next ones."""

    def __init__(
        self,
        types: Sequence[pa.DataType],
        hash_of: Callable[[Sequence[KeyColumn]], Words] = hash_key_columns,
        slots_log2: int = _FIRST_SLOTS_LOG2,
    ) -> None:
        self._stored = [_stored_keys(type_) for type_ in types]
        self._hash_of = hash_of
        self._hash_is_exact = (
            hash_of is hash_key_columns
            and len(types) == 1
            and isinstance(self._stored[0], StoredWords)
        )
        self._encodes = len(types) == 1 and not self._hash_is_exact
        self._hashes = AppendOnly(np.uint64)
        self._hashes.append(np.zeros(1, dtype=np.uint64))  # of the empty place: no row
        self._slots = _Slots(slots_log2)
        self._next_slots: _Slots | None = None
        self._moved_rows = 0
        self._known = KnownKeys(self._rows_of_columns)

    def __len__(self) -> int:
        return len(self._hashes) - 1

    @property
    def nbytes(self) -> int:
        tables = [self._slots, *([self._next_slots] if self._next_slots else [])]
        slots = sum(table.places.nbytes for table in tables)
        stored = sum(keys.nbytes for keys in self._stored)
        return slots + self._hashes.nbytes + stored + self._known.nbytes

    def rows_of(self, columns: Sequence[pa.Array], hashes: Words | None = None) -> Positions:
        """The row of each key; keys not seen before get the next ones.

        `hashes`, if they are known already, are those of `hash_columns`. Without any column all
        keys are the same, and only the hashes tell how many there are.
        """
        if hashes is None:
            return self._known.numbers_of(columns).astype(np.int64, copy=False)
        return self._rows_of([key_column(column) for column in columns], hashes)

    def _rows_of_columns(self, columns: Sequence[pa.Array]) -> Positions:
        if self._encodes and keys_repeat(columns[0]):
            return self._rows_of_encoded(columns[0])
        prepared = [key_column(column) for column in columns]
        return self._rows_of(prepared, self._hash_of(prepared))

    def append(self, columns: Sequence[pa.Array]) -> None:
        """Give keys that are all different and not here yet the next rows, in their order.

        `rows_of` keeps no order among the new keys of one batch.
        """
        prepared = [key_column(column) for column in columns]
        hashes = self._hash_of(prepared)
        self._make_room(len(hashes))
        self._slots.put(hashes, np.arange(1, len(hashes) + 1, dtype=np.int32) + len(self))
        self._hashes.append(hashes)
        for keys, column in zip(self._stored, prepared, strict=True):
            keys.append(column, np.arange(len(hashes)))

    def find(self, columns: Sequence[pa.Array], hashes: Words) -> Positions:
        """The row of each key, -1 for those that are not here; `hashes` as for `rows_of`."""
        prepared = [key_column(column) for column in columns]
        at = self._slots.home(hashes)
        rows = np.full(len(hashes), -1, dtype=np.int64)
        waiting = np.arange(len(hashes))
        while len(waiting):
            found = self._slots.places.take(at).astype(np.int64)
            matches = self._matches(prepared, waiting, hashes[waiting], found, exact=False)
            rows[waiting[matches]] = found[matches] - 1
            further = (found != 0) & ~matches
            waiting, at = waiting[further], (at[further] + 1) & self._slots.mask
        return rows

    def hashes_from(self, row: int) -> Words:
        """Of this row's key and all that came after it."""
        return self._hashes.rows[row + 1 :]

    def freeze(self) -> FrozenKeyIndex:
        """By reference; keys that come later do not show in it."""
        return FrozenKeyIndex(self._hashes.rows[1:], [keys.freeze() for keys in self._stored])

    def _rows_of_encoded(self, column: pa.Array) -> Positions:
        """Look up each different key once; a batch usually repeats them."""
        encoded = column
        if not pt.is_dictionary(column.type) or column.null_count:
            encoded = _decoded(column).dictionary_encode(null_encoding="encode")
        indices = fixed_width_values(encoded.indices)
        dictionary = encoded.dictionary
        used = np.zeros(len(dictionary), dtype=np.bool_)
        used[indices] = True
        if used.all():
            prepared = [key_column(dictionary)]
            return self._rows_of(prepared, self._hash_of(prepared)).take(indices)
        # A dictionary that travelled with a part of its column names keys that are not here.
        rows = np.zeros(len(dictionary), dtype=np.int64)
        present = np.flatnonzero(used)
        prepared = [key_column(dictionary.take(pa.array(present)))]
        rows[present] = self._rows_of(prepared, self._hash_of(prepared))
        return rows.take(indices)

    def _rows_of(self, columns: Sequence[KeyColumn], hashes: Words) -> Positions:
        self._make_room(len(hashes))
        exact = self._hash_is_exact and not bool((hashes == np.uint64(NULL_HASH)).any())
        places, mask = self._slots.places, self._slots.mask
        at = self._slots.home(hashes)
        found = places.take(at).astype(np.int64)
        matches = self._matches(columns, None, hashes, found, exact)
        rows = found - 1
        waiting = np.flatnonzero(~matches)
        at, found = at[waiting], found[waiting]
        while len(waiting):
            # Here: everyone in `waiting` has not met its own row at `at`, where it saw `found`.
            claimants = np.flatnonzero(found == 0)
            claimed = at[claimants]
            if len(claimants):
                self._insert_first_claimants(columns, hashes, rows, waiting, at, claimants)
            at = (at + 1) & mask
            at[claimants] = claimed  # they look again at the place they claimed
            found = places.take(at).astype(np.int64)
            matches = self._matches(columns, waiting, hashes[waiting], found, exact)
            rows[waiting[matches]] = found[matches] - 1
            unmatched = ~matches
            waiting, at, found = waiting[unmatched], at[unmatched], found[unmatched]
        return rows

    def _matches(
        self,
        columns: Sequence[KeyColumn],
        positions: Positions | None,
        hashes: Words,
        found: Positions,
        exact: bool,
    ) -> Flags:
        """Which keys (those at `positions`, or all) are the ones stored where they looked."""
        matches: Flags = self._hashes.rows.take(found) == hashes
        matches &= found != 0
        if exact:
            return matches
        hits = np.flatnonzero(matches)
        at = hits if positions is None else positions[hits]
        hit_rows = found[hits] - 1
        for keys, column in zip(self._stored, columns, strict=True):
            matches[hits] &= keys.equal(column, at, hit_rows)
        return matches

    def _insert_first_claimants(
        self,
        columns: Sequence[KeyColumn],
        hashes: Words,
        rows: Positions,
        waiting: Positions,
        at: Positions,
        claimants: Positions,
    ) -> None:
        """Of those that claim one empty place, the first gets it as a new row."""
        places, claimed = self._slots.places, at[claimants]
        tickets = np.arange(1, len(claimants) + 1, dtype=np.int32)
        places[claimed[::-1]] = tickets[::-1]  # of several writes to one place the last stays
        winners = np.flatnonzero(places.take(claimed) == tickets)
        positions = waiting[claimants[winners]]
        numbers = np.arange(len(self) + 1, len(self) + 1 + len(winners), dtype=np.int32)
        places[claimed[winners]] = numbers
        rows[positions] = numbers - 1
        self._hashes.append(hashes[positions])
        for keys, column in zip(self._stored, columns, strict=True):
            keys.append(column, positions)

    # --- growth

    def _make_room(self, coming: int) -> None:
        self._grow_a_slice(_GROWTH_STEP_PER_ROW * coming)
        if len(self) + coming > _LOAD_MAX * (self._slots.mask + 1):
            self._grow_at_once(coming)
        if self._next_slots is None and len(self) > _LOAD_TO_START_GROWING * self._slots.mask:
            self._next_slots = _Slots(self._slots.size_log2 + 1)
            self._moved_rows = 0

    def _grow_a_slice(self, rows_max: int) -> None:
        if self._next_slots is None:
            return
        begin, end = self._moved_rows + 1, min(self._moved_rows + rows_max, len(self)) + 1
        numbers = np.arange(begin, end, dtype=np.int32)
        self._next_slots.put(self._hashes.rows[begin:end], numbers)
        self._moved_rows = end - 1
        if self._moved_rows == len(self):
            self._slots, self._next_slots = self._next_slots, None

    def _grow_at_once(self, coming: int) -> None:
        """For a batch that is large beside the table: there is little to move then."""
        size_log2 = self._slots.size_log2
        while len(self) + coming > _LOAD_MAX * (1 << size_log2):
            size_log2 += 1
        self._next_slots = _Slots(size_log2)
        self._moved_rows = 0
        self._grow_a_slice(len(self))


class FrozenKeyIndex:
    """The keys as they were: their hashes and their columns."""

    def __init__(self, hashes: Words, columns: Sequence[FrozenKeys]) -> None:
        self.hashes = hashes
        self.columns = columns


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pt.is_dictionary(column.type) else column
