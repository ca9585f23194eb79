"""The rows of one side of a join, kept until nothing of the other side can match them.

Theory of operation
-------------------
Rows lie in *chunks*, each sorted by the hash of its rows' keys. A batch that comes is sorted the
same way, looks its hashes up in every chunk of the other side with one search, and becomes a chunk
of its own side. Four chunks of one level are merged into one of the next, so there are few; but
none grows beyond a share of all rows, so that chunks, which were filled one after the other, die
one after the other.

A row is forgotten by its event time. Of a chunk that event time has come to, the order of its rows
by time is made, once; then those that are over are always the next few of that order. They stay
where they are until their chunk is merged, until they are half of it, or all.

Equal hashes do not prove equal keys: pairs are compared by their keys, except where there is one
key of fixed width, whose hash is its own.

Rules of this file:
- a chunk's rows never change, only which of them have been matched and how many are over; so a
  frozen view is references, and a copy of the flags;
- no row in here has a null key: it can match nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.key_groups import (
    Flags,
    Positions,
    WordColumn,
    Words,
    fixed_width_values,
    hash_key_columns,
    key_column,
    key_groups_of,
    validity,
)
from stillframe.state.aggregates import by_key_group, plain
from stillframe.state.key_places import keyed_by

Moments = npt.NDArray[np.int64]
RowPairs = tuple[Positions, Positions]
"""Rows of a probe, and for each the row that it meets."""

_CHUNKS_MERGED = 4
_SHARE_OF_ROWS = 4
"""No merged chunk holds more than this part of all rows, unless that is little."""
_LITTLE_ROWS = 1 << 16
_CHUNKS_MAX = 64
_CHUNK_BYTES_MAX = 1 << 28
_PAIRS_PER_ROW_MAX = 4
"""Above it, the rows of one key are searched by their times, and not all looked at."""
PAIRS_MAX = 1 << 17
"""Made at a time, unless one row has more."""
MATCHED = "matched"
_MOMENT_MIN, _MOMENT_MAX = -(2**63), 2**63 - 1
_WORD_MAX = 2**64 - 1


def moments_of(column: pa.Array) -> tuple[Moments, Flags | None]:
    """Event times in microseconds, and which are there; None: all."""
    if column.type != pa.timestamp("us") and getattr(column.type, "unit", None) != "us":
        column = column.cast(pa.timestamp("us"), safe=False)
    return fixed_width_values(column), validity(column)


def later_by(times: Moments, by_us: int) -> Moments:
    """The times moved by so much, no further than numbers reach."""
    if by_us >= 0:
        return np.minimum(times, _MOMENT_MAX - by_us) + by_us
    return np.maximum(times, _MOMENT_MIN - by_us) + by_us


@dataclass(frozen=True, slots=True)
class TimeRange:
    """How much later the matching rows of the other side may be, at least and at most."""

    from_us: int | None
    to_us: int | None


class SortedRows:
    """Rows sorted by the hash of their keys: a batch that came, or a chunk of those that did."""

    def __init__(self, batch: pa.RecordBatch, hashes: Words, times: Moments | None) -> None:
        """All of the same length, and sorted by the hashes already."""
        self.batch = batch
        self.times = times
        is_first = np.ones(len(hashes), dtype=np.bool_)
        is_first[1:] = hashes[1:] != hashes[:-1]
        first = np.flatnonzero(is_first)
        self.distinct: Words = hashes if len(first) == len(hashes) else hashes[first]
        """The different hashes, sorted; `starts` says where the rows of each begin, and all end."""
        self.starts: Positions = np.append(first, len(hashes))

    @classmethod
    def of(cls, batch: pa.RecordBatch, hashes: Words, times: Moments | None) -> SortedRows:
        order = np.argsort(hashes)
        return cls(
            batch.take(pa.array(order)), hashes[order], None if times is None else times[order]
        )

    def __len__(self) -> int:
        return len(self.batch)

    def at(self, rows: Positions) -> SortedRows:
        """Some of the rows, which are given in their order."""
        times = None if self.times is None else self.times[rows]
        return SortedRows(self.batch.take(pa.array(rows)), self.hashes()[rows], times)

    def hashes(self) -> Words:
        return np.repeat(self.distinct, np.diff(self.starts))

    @cached_property
    def _directory(self) -> tuple[int, Positions, Words]:
        """By the first bits of a hash, where those that begin with them begin among the different.

        It finds a hash four times as fast as a binary search. Beside it the hashes, with a last one
        that none is above.
        """
        bits = max(len(self.distinct).bit_length(), 1)
        heads = (self.distinct >> np.uint64(64 - bits)).view(np.int64)
        begins = np.zeros((1 << bits) + 1, dtype=np.int64)
        np.cumsum(np.bincount(heads, minlength=1 << bits), out=begins[1:])
        return bits, begins, np.append(self.distinct, np.uint64(_WORD_MAX))

    def find(self, hashes: Words) -> tuple[Positions, Flags]:
        """Where each hash is among the different ones, and whether it is there."""
        bits, begins, above = self._directory
        at = begins.take((hashes >> np.uint64(64 - bits)).view(np.int64))
        found = above.take(at)
        met: Flags = found == hashes
        waiting = np.flatnonzero(found < hashes)
        while len(waiting):
            at[waiting] += 1
            found, sought = above.take(at[waiting]), hashes[waiting]
            met[waiting] = found == sought
            waiting = waiting[found < sought]
        met &= at < len(self.distinct)
        return at, met

    def matching(self, probe: SortedRows, within: TimeRange) -> Iterator[RowPairs]:
        """Pairs of rows of the probe and rows in here with equal hashes and times in the range."""
        at, met = self.find(probe.distinct)
        if not met.any():
            return
        counts = np.diff(probe.starts)
        is_met, keys = np.repeat(met, counts), np.repeat(at, counts)
        if probe.times is None or self.times is None or within == _ANY_TIME:
            yield from self._with_each(np.flatnonzero(is_met), keys)
            return
        sizes = self.starts[at[met] + 1] - self.starts[at[met]]
        if int((counts[met] * sizes).sum()) <= _PAIRS_PER_ROW_MAX * len(probe):
            found = self._with_each(np.flatnonzero(is_met), keys)
        else:
            found = self._with_those_in_range(probe, is_met, keys, within)
        for mine, there in found:
            yield _in_range(mine, there, probe.times, self.times, within)

    def _with_each(self, rows: Positions, keys: Positions) -> Iterator[RowPairs]:
        """These rows of a probe with each row of their keys, which are given for all its rows."""
        return _expanded(rows, self.starts[keys[rows]], self.starts[keys[rows] + 1])

    def _with_those_in_range(
        self, probe: SortedRows, is_met: Flags, keys: Positions, within: TimeRange
    ) -> Iterator[RowPairs]:
        assert probe.times is not None
        rows = probe._by_key_and_time.order  # to search in order is five times as fast
        rows = rows[is_met[rows]]
        sought = self._by_key_and_time
        begins, ends = sought.narrowed(keys[rows], probe.times[rows], within)
        for mine, there in _expanded(rows, begins, ends):
            yield mine, sought.order[there]

    @cached_property
    def _by_key_and_time(self) -> _ByKeyAndTime:
        assert self.times is not None
        return _ByKeyAndTime(self.starts, self.times)


class _ByKeyAndTime:
    """Rows in the order of their keys and, of each key, of their times.

    Both are one number, so that one search finds where the range of a key begins. Where that would
    be too large a number, times are told apart less exactly.
    """

    def __init__(self, starts: Positions, times: Moments) -> None:
        keys = len(starts) - 1
        oldest, newest = int(times.min()), int(times.max())
        self._coarse = 0
        while keys * ((newest - oldest >> self._coarse) + 3) >= 2**62:
            self._coarse += 1
        self._begin = oldest >> self._coarse
        self._span = (newest >> self._coarse) - self._begin + 1
        places = self._places(np.repeat(np.arange(keys), np.diff(starts)), times)
        self.order: Positions = np.argsort(places)
        self._sorted = places[self.order]

    def _places(self, keys: Positions, times: Moments) -> Positions:
        since: Moments = np.clip(times >> self._coarse, self._begin, self._begin + self._span)
        places: Positions = keys * (self._span + 1) + (since - self._begin)
        return places

    def narrowed(
        self, keys: Positions, times: Moments, within: TimeRange
    ) -> tuple[Positions, Positions]:
        """Where in the order the rows of each key begin and end that are in the range of a time."""
        since, until = keys * (self._span + 1), (keys + 1) * (self._span + 1)
        if within.from_us is not None:
            since = self._places(keys, later_by(times, within.from_us))
        if within.to_us is not None:
            until = self._places(keys, later_by(times, within.to_us)) + 1
        begins = np.searchsorted(self._sorted, since)
        return begins, np.maximum(begins, np.searchsorted(self._sorted, until))


_ANY_TIME = TimeRange(None, None)


def _expanded(rows: Positions, begins: Positions, ends: Positions) -> Iterator[RowPairs]:
    """Each row with each place from its begin to its end, so many pairs at a time."""
    counts = ends - begins
    before = np.cumsum(counts) - counts
    cuts = [0, len(rows)]
    if len(rows) and before[-1] + counts[-1] > PAIRS_MAX:
        parts = before // PAIRS_MAX
        cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(rows)]
    for start, stop in pairwise(cuts):
        count = counts[start:stop]
        total = int(count.sum())
        if total:
            shift = np.repeat(begins[start:stop] - (before[start:stop] - before[start]), count)
            yield np.repeat(rows[start:stop], count), shift + np.arange(total)


def _in_range(
    rows: Positions, there: Positions, times: Moments, other_times: Moments, within: TimeRange
) -> RowPairs:
    mine, others = times[rows], other_times[there]
    kept: Flags = np.ones(len(rows), dtype=np.bool_)
    if within.from_us is not None:
        kept &= others >= later_by(mine, within.from_us)
    if within.to_us is not None:
        kept &= others <= later_by(mine, within.to_us)
    return rows[kept], there[kept]


class _Chunk:
    """Sorted rows, which of them have been matched, and how many are over."""

    def __init__(self, rows: SortedRows, matched: Flags, level: int = 0) -> None:
        self.rows = rows
        self.matched = matched
        self.level = level
        times = rows.times
        self.oldest_us = int(times.min()) if times is not None else _MOMENT_MAX
        self.newest_us = int(times.max()) if times is not None else _MOMENT_MAX
        self.over = 0
        """So many of `by_time` are over."""

    def __len__(self) -> int:
        return len(self.rows)

    def is_in_reach(self, times: Moments | None, within: TimeRange) -> bool:
        """Whether any of these times has any row of the chunk in its range."""
        if times is None or self.rows.times is None:
            return True
        is_too_old = (
            within.from_us is not None and self.newest_us < int(times.min()) + within.from_us
        )
        is_too_new = within.to_us is not None and self.oldest_us > int(times.max()) + within.to_us
        return not (is_too_old or is_too_new)

    @cached_property
    def by_time(self) -> tuple[Positions, Moments]:
        """The rows by time, and their times."""
        assert self.rows.times is not None
        order = np.argsort(self.rows.times)
        return order, self.rows.times[order]

    def expire(self, before_us: int) -> Positions:
        """The rows that are over now and were not yet."""
        order, times = self.by_time
        start, self.over = self.over, int(np.searchsorted(times, before_us))
        if self.over < len(times):
            self.oldest_us = int(times[self.over])
        return order[start : self.over]

    def alive(self, forgets_matched: bool) -> Flags:
        return _alive(self, self.matched, self.over, forgets_matched)


def _alive(chunk: _Chunk, matched: Flags, over: int, forgets_matched: bool) -> Flags:
    is_alive: Flags = ~matched if forgets_matched else np.ones(len(chunk), dtype=np.bool_)
    if over:
        is_alive[chunk.by_time[0][:over]] = False
    return is_alive


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of a batch that came, and the rows of the other side they meet, pair by pair."""

    places: Positions
    """In the batch, which is sorted."""
    others: pa.RecordBatch
    _parts: Sequence[tuple[_Chunk, Positions]]
    _changed: Callable[[], None]

    def mark(self, kept: Flags) -> None:
        """Note that the rows of the other side in these pairs have been matched."""
        start = 0
        for chunk, rows in self._parts:
            chunk.matched[rows[kept[start : start + len(rows)]]] = True
            start += len(rows)
        self._changed()

    def first_of_each_other(self, kept: Flags) -> Flags:
        """As `mark`; of the kept pairs, one for each row that had not been matched before."""
        first: Flags = np.zeros(len(kept), dtype=np.bool_)
        start = 0
        for chunk, rows in self._parts:
            is_new = kept[start : start + len(rows)] & ~chunk.matched[rows]
            here = np.flatnonzero(is_new)
            new, at = np.unique(rows[here], return_index=True)
            chunk.matched[new] = True
            first[start + here[at]] = True
            start += len(rows)
        self._changed()
        return first


class JoinRows:
    """The rows of one side in one subtask. Used by the loop thread only."""

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        time: str | None,
        max_parallelism: int,
        *,
        forgets_matched: bool = False,
    ) -> None:
        """`forgets_matched`: a row is over once it has been matched."""
        self._schema = schema
        self._keys = [schema.get_field_index(key) for key in keys]
        self._time = None if time is None else schema.get_field_index(time)
        self._max_parallelism = max_parallelism
        self._forgets_matched = forgets_matched
        self._chunks: list[_Chunk] = []
        self._version = 0
        empty = [key_column(pa.array([], schema.field(key).type)) for key in self._keys]
        self._hash_is_exact = len(empty) == 1 and isinstance(empty[0], WordColumn)

    def __len__(self) -> int:
        """How many rows there are, of which some may be over already."""
        return sum(map(len, self._chunks))

    @property
    def chunk_count(self) -> int:
        return len(self._chunks)

    @property
    def state_bytes(self) -> int:
        return sum(chunk.rows.batch.nbytes + 26 * len(chunk) for chunk in self._chunks)

    @property
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""
        return self._version

    def _changed(self) -> None:
        self._version += 1

    # --- rows that come

    def keyed(self, batch: pa.RecordBatch) -> tuple[Words, Flags | None, Moments | None]:
        """The hashes of the keys of these rows, which of them have all keys, and their times."""
        prepared = [key_column(batch.column(key)) for key in self._keys]
        has_keys: Flags | None = None
        for column in prepared:
            if column.valid is not None:
                has_keys = column.valid if has_keys is None else has_keys & column.valid
        times = None if self._time is None else moments_of(batch.column(self._time))[0]
        return hash_key_columns(prepared), has_keys, times

    def add(self, rows: SortedRows, matched: Flags) -> None:
        if len(rows):
            self._version += 1
            self._chunks.append(_Chunk(rows, matched))
            self._merge()

    def pairs(self, probe: SortedRows, keys: Sequence[int], within: TimeRange) -> Iterator[Pairs]:
        """The rows in here that rows of the other side meet; `keys` are the places of its keys."""
        parts: list[tuple[_Chunk, Positions]] = []
        places: list[Positions] = []
        waiting = 0
        for chunk in self._chunks:
            if not chunk.is_in_reach(probe.times, within):
                continue
            for mine, there in chunk.rows.matching(probe, within):
                mine, there = self._equal_keys(probe, keys, chunk, mine, there)
                if not len(mine):
                    continue
                parts.append((chunk, there))
                places.append(mine)
                waiting += len(mine)
                if waiting >= PAIRS_MAX:
                    yield self._paired(places, parts)
                    parts, places, waiting = [], [], 0
        if waiting:
            yield self._paired(places, parts)

    @property
    def key_places(self) -> Sequence[int]:
        """Where the keys are among the columns."""
        return self._keys

    def _equal_keys(
        self,
        probe: SortedRows,
        keys: Sequence[int],
        chunk: _Chunk,
        mine: Positions,
        there: Positions,
    ) -> tuple[Positions, Positions]:
        if self._forgets_matched and len(there):
            unmatched = ~chunk.matched[there]
            mine, there = mine[unmatched], there[unmatched]
        if self._hash_is_exact or not len(mine):
            return mine, there
        equal: Flags = np.ones(len(mine), dtype=np.bool_)
        for here, key in zip(self._keys, keys, strict=True):
            equal &= _equal(
                chunk.rows.batch.column(here).take(pa.array(there)),
                probe.batch.column(key).take(pa.array(mine)),
            )
        return (mine, there) if equal.all() else (mine[equal], there[equal])

    def _paired(self, places: list[Positions], parts: list[tuple[_Chunk, Positions]]) -> Pairs:
        batches = [chunk.rows.batch.take(pa.array(rows)) for chunk, rows in parts]
        return Pairs(np.concatenate(places), _joined(batches, self._schema), parts, self._changed)

    # --- rows that go

    def expire(self, before_us: int, *, emits_unmatched: bool) -> Iterator[pa.RecordBatch]:
        """Forget the rows that are older; those that were never matched, if they are wanted."""
        for chunk in self._chunks:
            if chunk.oldest_us >= before_us:
                continue
            self._version += 1
            is_whole = chunk.newest_us < before_us and not chunk.over
            if is_whole and not emits_unmatched:
                chunk.over = len(chunk)
                continue
            rows = chunk.expire(before_us)
            if emits_unmatched:
                yield from _in_batches(chunk, rows[~chunk.matched[rows]])
        self._chunks = [
            kept for chunk in self._chunks if (kept := self._compacted(chunk)) is not None
        ]

    def drain(self, *, emits_unmatched: bool) -> Iterator[pa.RecordBatch]:
        """Forget all rows; those that were never matched, if they are wanted."""
        for chunk in self._chunks:
            if emits_unmatched:
                yield from _in_batches(
                    chunk, np.flatnonzero(chunk.alive(forgets_matched=False) & ~chunk.matched)
                )
        self._version += bool(self._chunks)
        self._chunks = []

    def _compacted(self, chunk: _Chunk) -> _Chunk | None:
        """Without what is over, if that is half of it; None if that is all."""
        if chunk.over == len(chunk):
            return None
        if 2 * chunk.over < len(chunk):
            return chunk
        return self._rewritten([chunk], chunk.level)

    # --- chunks

    def _merge(self) -> None:
        if len(self._chunks) > _CHUNKS_MAX:
            self._merge_the_small()
        rows_max = max(_LITTLE_ROWS, len(self) // _SHARE_OF_ROWS)
        while len(self._chunks) >= _CHUNKS_MERGED:
            last = self._chunks[-_CHUNKS_MERGED:]
            is_level = all(chunk.level == last[-1].level for chunk in last)
            size_bytes = sum(chunk.rows.batch.nbytes for chunk in last)
            if not is_level or sum(map(len, last)) > rows_max or size_bytes > _CHUNK_BYTES_MAX:
                return
            merged = self._rewritten(last, last[-1].level + 1)
            self._chunks[-_CHUNKS_MERGED:] = [] if merged is None else [merged]

    def _merge_the_small(self) -> None:
        """What is left of chunks whose last rows are from a far future."""
        small_rows_max = sorted(map(len, self._chunks))[_CHUNKS_MAX // 2]
        small = [chunk for chunk in self._chunks if len(chunk) <= small_rows_max]
        if sum(chunk.rows.batch.nbytes for chunk in small) > _CHUNK_BYTES_MAX:
            return  # so large a state has many chunks, and columns of strings have an end
        merged = self._rewritten(small, _level_of(sum(map(len, small))))
        others = [chunk for chunk in self._chunks if len(chunk) > small_rows_max]
        self._chunks = [*([] if merged is None else [merged]), *others]

    def _rewritten(self, chunks: Sequence[_Chunk], level: int) -> _Chunk | None:
        """One chunk of the rows in these that are not over; None if there are none."""
        alive = [np.flatnonzero(chunk.alive(self._forgets_matched)) for chunk in chunks]
        parts = [
            chunk.rows.batch if len(rows) == len(chunk) else chunk.rows.batch.take(pa.array(rows))
            for chunk, rows in zip(chunks, alive, strict=True)
        ]
        pairs = list(zip(chunks, alive, strict=True))
        hashes = np.concatenate([chunk.rows.hashes()[rows] for chunk, rows in pairs])
        if not len(hashes):
            return None
        matched = np.concatenate([chunk.matched[rows] for chunk, rows in pairs])
        order = np.argsort(hashes)
        times = None
        if self._time is not None:
            known = [(c.rows.times, rows) for c, rows in pairs if c.rows.times is not None]
            times = np.concatenate([each[rows] for each, rows in known])[order]
        batch = _joined(parts, self._schema).take(pa.array(order))
        return _Chunk(SortedRows(batch, hashes[order], times), matched[order], level)

    # --- snapshots

    @property
    def snapshot_schema(self) -> pa.Schema:
        fields = [*self._schema, pa.field(_flag_name(self._schema), pa.bool_())]
        return keyed_by(pa.schema(fields), self._keys)

    def freeze(self) -> FrozenJoinRows:
        """The rows as they are now, by reference: the synchronous part of a snapshot."""
        return FrozenJoinRows(
            [(chunk, chunk.matched.copy(), chunk.over) for chunk in self._chunks],
            self.snapshot_schema,
            self._max_parallelism,
            self._forgets_matched,
        )

    def restore(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Take the rows of a snapshot back, before any others come."""
        waiting: list[pa.RecordBatch] = []
        waiting_bytes = 0
        for batch in batches:
            waiting.append(batch)
            waiting_bytes += batch.nbytes
            if waiting_bytes >= _CHUNK_BYTES_MAX:
                self._restore_chunk(waiting)
                waiting, waiting_bytes = [], 0
        if waiting:
            self._restore_chunk(waiting)

    def _restore_chunk(self, batches: Sequence[pa.RecordBatch]) -> None:
        restored = _joined(batches, self.snapshot_schema)
        matched = restored.column(len(self._schema)).to_numpy(zero_copy_only=False)
        batch = pa.RecordBatch.from_arrays(restored.columns[:-1], schema=self._schema)
        hashes, _, times = self.keyed(batch)
        order = np.argsort(hashes)
        rows = SortedRows(
            batch.take(pa.array(order)), hashes[order], None if times is None else times[order]
        )
        self._chunks.append(_Chunk(rows, matched[order], _level_of(len(rows))))


def _level_of(rows: int) -> int:
    """So that many small chunks come before it is merged again."""
    return max(0, rows.bit_length() // 2)


class FrozenJoinRows:
    """The rows as they were at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        chunks: Sequence[tuple[_Chunk, Flags, int]],
        schema: pa.Schema,
        max_parallelism: int,
        forgets_matched: bool,
    ) -> None:
        self._chunks = chunks
        self.snapshot_schema = schema
        self._max_parallelism = max_parallelism
        self._forgets_matched = forgets_matched

    def __len__(self) -> int:
        return sum(map(len, self._alive))

    @cached_property
    def _alive(self) -> list[Positions]:
        """The rows of each chunk that were not over; found in the background."""
        return [
            np.flatnonzero(_alive(chunk, matched, over, self._forgets_matched))
            for chunk, matched, over in self._chunks
        ]

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups."""
        parts = [
            (chunk.rows.batch, matched, *self._by_group(chunk, rows))
            for (chunk, matched, _), rows in zip(self._chunks, self._alive, strict=True)
        ]
        for group in range(self._max_parallelism):
            made = [
                _flagged(batch, matched, rows, self.snapshot_schema)
                for batch, matched, order, bounds in parts
                if len(rows := order[bounds[group] : bounds[group + 1]])
            ]
            if made:
                yield group, _joined(made, self.snapshot_schema)

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        self._chunks = []
        self.__dict__.pop("_alive", None)

    def _by_group(self, chunk: _Chunk, rows: Positions) -> tuple[Positions, Positions]:
        groups = key_groups_of(chunk.rows.hashes()[rows], self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        return rows[order], bounds


def _flagged(
    batch: pa.RecordBatch, matched: Flags, rows: Positions, schema: pa.Schema
) -> pa.RecordBatch:
    taken = batch.take(pa.array(rows))
    return pa.RecordBatch.from_arrays([*taken.columns, pa.array(matched[rows])], schema=schema)


def _flag_name(schema: pa.Schema) -> str:
    names = (MATCHED, *(f"{MATCHED}_{place}" for place in range(2, len(schema) + 3)))
    return next(name for name in names if name not in schema.names)


def _in_batches(chunk: _Chunk, rows: Positions) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), PAIRS_MAX):
        yield chunk.rows.batch.take(pa.array(rows[start : start + PAIRS_MAX]))


def _joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [
        pa.concat_arrays([batch.column(place) for batch in batches]) for place in range(len(schema))
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with columns that can be put beside those of others: none is a dictionary."""
    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_arrays([plain(column) for column in batch.columns], schema=schema)


def _equal(one: pa.Array, other: pa.Array) -> Flags:
    """As keys are: NaN is itself, and there are not two zeros."""
    first = key_column(one)
    if isinstance(first, WordColumn):
        second: Any = key_column(other)
        same: Flags = first.words == second.words
        return same
    equal: Flags = pc.equal(one, other).to_numpy(zero_copy_only=False)
    return equal
