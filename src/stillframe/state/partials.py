"""Partial aggregates: what one batch adds to each of its keys, found before the batch is sent on.

Theory of operation
-------------------
A batch of 65,536 clicks on 1,000 apps changes at most 1,000 running counts. So the sender groups
each batch on its own and sends one row per key: the key, and what the aggregates have accumulated
over its records, in the form that snapshots have too. The receiver merges such rows as it would
fold records in. Nothing is kept from one batch to the next, so there is nothing to checkpoint.

Grouping costs about as much as it saves where nearly every record has a key of its own. So a
sample is looked at first, and a batch whose keys hardly repeat is sent as it is, without the
columns nobody reads. Which of the two a batch is, is said in its schema.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import Positions, Words, fixed_width_values
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.aggregates import Layout, canonical, plain
from stillframe.state.folding import Touched

_MARK = {b"stillframe": b"partial aggregates"}
_RECORDS_MIN = 2048
"""In a batch that is smaller there is little to save."""
_SAMPLE_ROWS = 1024
_FEW_KEYS_SHARE = 0.5
"""More keys than that share of a batch's records are not worth to be combined."""
_SHORT_DISTINCT_MAX = 920
"""So many different short strings in the sample are expected of some 5,000 in all."""
_SHORT_BYTES_MAX = 8
"""Such a string is one word of 64 bits: eight bytes, or fewer with their number as the last."""
_BYTES_OF_LENGTH = np.array([(1 << 8 * n) - 1 for n in range(_SHORT_BYTES_MAX + 1)], np.uint64)
_LAST_BYTE_SHIFT = np.uint64(56)
_PLACES = 1 << 14
"""Of short strings: room for many more than are worth to be combined, in the processor's cache."""
_PLACES_SHIFT = np.uint64(64 - 14)
_SPREAD = np.uint64(0x9E37_79B9_7F4A_7C15)
_APART_SHARE_MAX = 4
"""If more than one record of so many has met another on its place, there are too many keys."""
_PLACES_PER_RECORD_MAX = 4
"""So many possible pairs of keys are numbered by a column with a place for each."""


def is_partial(batch: pa.RecordBatch) -> bool:
    """Whether the rows are partial aggregates; otherwise they are records."""
    return bool(batch.schema.metadata == _MARK)


class PartialAggregates:
    """Makes the partial aggregates of one aggregation, batch by batch."""

    def __init__(
        self, input_schema: pa.Schema, keys: Sequence[str], calls: Sequence[AggregateCall]
    ) -> None:
        self._input_schema = input_schema
        self._keys = tuple(keys)
        self._calls = tuple(calls)
        inputs = [call.input for call in calls if call.input is not None]
        self.columns_read = list(dict.fromkeys([*keys, *inputs]))
        """Keys first."""
        layout = Layout(key_fields_of(input_schema, keys), accumulators_of(input_schema, calls))
        self._schema = layout.snapshot_schema.with_metadata(_MARK)

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The partial aggregates of the batch if they are few, else the records; keys first."""
        keys = [batch.column(key) for key in self._keys]
        if not seem_to_repeat(keys, batch.num_rows):
            return batch.select(self.columns_read)
        groups = _ByKey([canonical(key) for key in keys], batch.num_rows)
        if 2 * groups.count > batch.num_rows:
            return batch.select(self.columns_read)
        return self.made_of(batch, groups)

    def on_watermark(self, time_us: int) -> None:
        """What a batch adds to a key does not depend on event time."""

    def made_of(self, batch: pa.RecordBatch, groups: Groups) -> pa.RecordBatch:
        """The partial aggregates of these groups of the batch's records."""
        columns = groups.keys()
        # New ones for each batch: what one remembers of a batch must not reach the next.
        for accumulator in accumulators_of(self._input_schema, self._calls):
            parts = [
                np.full(groups.count, spec.initial, spec.dtype) for spec in accumulator.columns
            ]
            with np.errstate(all="ignore"):  # infinities and NaN are values
                accumulator.fold(parts, groups, accumulator.input_of(batch))
            columns += accumulator.to_snapshot(parts)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class Groups(Touched):
    """The records of a batch in groups: a table whose rows are the batch's own, all touched."""

    count: int

    @property
    def groups(self) -> Positions:
        return self.rows

    @abstractmethod
    def keys(self) -> list[pa.Array]:
        """The key columns of the groups."""

    def first_of(self, keys: Sequence[pa.Array]) -> list[pa.Array]:
        """Of each group the values in its first record."""
        first_records = np.empty(self.count, dtype=np.int64)
        # Of several writes to one place the last stays.
        first_records[self.rows[::-1]] = np.arange(len(self.rows))[::-1]
        first = pa.array(first_records)
        return [plain(key.take(first)) for key in keys]


class _ByKey(Groups):
    def __init__(self, keys: Sequence[pa.Array], record_count: int) -> None:
        self._keys = keys
        numbered = numbered_by(keys, record_count)
        self.rows = numbered.numbers
        self.count = numbered.count
        self.distinct = np.arange(self.count)
        self._values = numbered.values

    def keys(self) -> list[pa.Array]:
        return [self._values] if len(self._keys) == 1 else self.first_of(self._keys)


def seem_to_repeat(keys: Sequence[pa.Array], record_count: int) -> bool:
    """Whether it is worth a try to combine the records of a batch."""
    if record_count < _RECORDS_MIN:
        return False
    sample = [key.slice(0, _SAMPLE_ROWS) for key in keys]
    key_count_max = _FEW_KEYS_SHARE * record_count
    # What is expected of so many keys that come equally often.
    distinct_max = key_count_max * (1 - math.exp(-_SAMPLE_ROWS / key_count_max))
    return numbered_by(sample, _SAMPLE_ROWS).count <= distinct_max


@dataclass(frozen=True, slots=True)
class Numbered:
    """A number for each record, equal where all keys are equal."""

    numbers: Positions
    values: pa.Array
    """What each number stands for."""

    @property
    def count(self) -> int:
        return len(self.values)


def numbered_by(keys: Sequence[pa.Array], record_count: int) -> Numbered:
    """The records by their keys."""
    if not keys:
        return Numbered(np.zeros(record_count, dtype=np.int64), pa.nulls(1))
    numbered = _column_numbered(keys[0])
    for key in keys[1:]:
        other = _column_numbered(key, among_pairs_max=record_count)
        # A count is at most that of the records, so the product stays far from 64 bits.
        pairs = numbered.numbers * other.count + other.numbers
        numbered = _pairs_numbered(pairs, numbered.count * other.count)
    return numbered


def _pairs_numbered(pairs: Positions, bound: int) -> Numbered:
    """Numbers without gaps for numbers below `bound`."""
    if bound > _PLACES_PER_RECORD_MAX * len(pairs):
        return _column_numbered(pa.array(pairs))
    used = np.zeros(bound, dtype=np.bool_)
    used[pairs] = True
    return Numbered((np.cumsum(used) - 1).take(pairs), pa.array(np.flatnonzero(used)))


def _column_numbered(column: pa.Array, among_pairs_max: int = 0) -> Numbered:
    """Of a dictionary column its indices are numbered, which is quicker.

    They are taken as they are where all of the dictionary is used; and in a pair, where numbers may
    have gaps, if it has no more than `among_pairs_max` entries.

    Should the dictionary name one value twice, there are two numbers for it, and so two partial
    rows of one key in a batch. They are merged like any others.
    """
    if pt.is_dictionary(column.type):
        if not column.null_count and (
            len(column.dictionary) <= among_pairs_max or _uses_all(column)
        ):
            return Numbered(fixed_width_values(column.indices).astype(np.int64), column.dictionary)
        by_index = _column_numbered(column.indices)
        return Numbered(by_index.numbers, column.dictionary.take(by_index.values))
    if pt.is_string(column.type) and not column.null_count and _are_short_and_few(column):
        numbered = _short_strings_numbered(column)
        if numbered is not None:
            return numbered
    encoded = column.dictionary_encode(null_encoding="encode")
    return Numbered(fixed_width_values(encoded.indices).astype(np.int64), encoded.dictionary)


def _uses_all(column: pa.DictionaryArray) -> bool:
    if len(column.dictionary) > len(column):
        return False
    used = np.zeros(len(column.dictionary), dtype=np.bool_)
    used[fixed_width_values(column.indices)] = True
    return bool(used.all())


def _are_short_and_few(column: pa.Array) -> bool:
    """Whether it seems that `_short_strings_numbered` will not have to give up."""
    if len(column) < _RECORDS_MIN:
        return False
    words = _words_of(column.slice(0, _SAMPLE_ROWS))
    return words is not None and len(np.unique(words)) <= _SHORT_DISTINCT_MAX


def _short_strings_numbered(column: pa.Array) -> Numbered | None:
    """Strings of a few bytes by these bytes as one word; None if one is longer, or many differ.

    Each word has a place in a small table, where the last record with a word of that place is
    noted: if its word is another one, the two have met, and such records are numbered apart.
    """
    words = _words_of(column)
    if words is None:
        return None
    places = (words * _SPREAD >> _PLACES_SHIFT).view(np.int64)
    last = np.full(_PLACES, -1, dtype=np.int64)
    last[places] = np.arange(len(words))
    is_used = last >= 0
    numbers = (np.cumsum(is_used) - 1).take(places)
    known = last[is_used]
    apart = np.flatnonzero(words.take(last).take(places) != words)
    if len(apart):
        if len(apart) * _APART_SHARE_MAX > len(words):
            return None
        _, firsts, others = np.unique(words.take(apart), return_index=True, return_inverse=True)
        numbers[apart] = len(known) + others
        known = np.concatenate([known, apart.take(firsts)])
    return Numbered(numbers, column.take(pa.array(known)))


def _words_of(column: pa.Array) -> Words | None:
    """The bytes of each string and how many they are, in one word; None: some have too many."""
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, 4 * column.offset)
    lengths = np.diff(offsets)
    longest = int(lengths.max())
    if longest > _SHORT_BYTES_MAX:
        return None
    if longest == int(lengths.min()) == _SHORT_BYTES_MAX:  # the words are there already
        return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]].view("<u8")
    first, stop = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(stop - first + 8, dtype=np.uint8)
    if stop > first:
        padded[: stop - first] = np.frombuffer(data, np.uint8, stop - first, first)
    # Eight bytes from each place on; those behind the string are cut off.
    from_each = np.ndarray((stop - first + 1,), "<u8", padded, 0, (1,))
    words: Words = from_each[offsets[:-1] - first] & _BYTES_OF_LENGTH.take(lengths)
    if longest < _SHORT_BYTES_MAX:
        return words | lengths.astype(np.uint64) << _LAST_BYTE_SHIFT
    full = lengths == _SHORT_BYTES_MAX
    if (words[full] >> _LAST_BYTE_SHIFT < _SHORT_BYTES_MAX).any():
        return None  # a control character at the end would be taken for a length
    return np.where(full, words, words | lengths.astype(np.uint64) << _LAST_BYTE_SHIFT)
