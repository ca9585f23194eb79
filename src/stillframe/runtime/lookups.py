"""A join with a table that does not change, as an operator: no state, each batch on its own.

Theory of operation: the rows of the table are sorted by key once, when the operator is made, so
that the rows of a key are next to each other. A batch is looked up as a whole; each of its records
is repeated as often as its key has rows, and the rows are taken beside it. The condition, if there
is one, is then evaluated on all these pairs at once. A batch whose records have very many matches
is worked off in parts.

A null equals nothing: a row of the table without a key is left out, a record without one has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stillframe.evaluator.beside import Evaluator
from stillframe.graph.logical import Lookup
from stillframe.key_groups import Flags, Positions, hash_columns
from stillframe.runtime.expressions import evaluate
from stillframe.runtime.operators import RunningOperator
from stillframe.state.aggregates import plain
from stillframe.state.key_index import KeyIndex
from stillframe.texts import refuse_bad_text

PAIRS_MAX = 131_072
"""So many pairs are made at a time; more only if a single record has them."""


class LookingUp(RunningOperator):
    """Pairs each record with the rows of the table that match it."""

    def __init__(
        self, operator: Lookup, schema: pa.Schema, evaluator: Evaluator | None = None
    ) -> None:
        assert isinstance(operator.table, pa.Table), "the table is read before the plan is made"
        self._how = operator.how
        self._keys = operator.keys
        self._condition = operator.condition
        self._evaluator = evaluator
        self._schema = schema
        self._rows = one_batch(operator.table)
        refuse_bad_text(self._rows, "the table of a join", "clean it with Spark's make_valid_utf8")
        self._index = _RowsByKey(
            [self._rows.column(key) for key in operator.table_keys], self._rows.num_rows
        )

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        matches = self._index.matches_of([batch.column(key) for key in self._keys], batch.num_rows)
        if self._condition is None and self._how in ("semi", "anti"):
            yield self._kept(batch, matches.counts > 0)
            return
        for begin, end in matches.parts(PAIRS_MAX):
            part = batch.slice(begin, end - begin)
            yield self._joined(part, *self._index.pairs(matches.slice(begin, end)))

    def _joined(self, batch: pa.RecordBatch, left: Positions, right: Positions) -> pa.RecordBatch:
        """Of these pairs those that meet the condition, and what the kind of join makes of them."""
        if self._condition is not None and len(left):
            pairs = paired(batch, self._rows, left, right)
            is_met = evaluate(self._condition, pairs, self._evaluator).fill_null(False)
            kept: Flags = is_met.to_numpy(zero_copy_only=False)
            left, right = left[kept], right[kept]
        if self._how in ("semi", "anti", "left"):
            is_matched = np.zeros(batch.num_rows, dtype=np.bool_)
            is_matched[left] = True
            if self._how != "left":
                return self._kept(batch, is_matched)
            left, right = with_unmatched(is_matched, left, right)
        return paired(batch, self._rows, left, right, self._schema)

    def _kept(self, batch: pa.RecordBatch, is_matched: Flags) -> pa.RecordBatch:
        return batch.filter(pa.array(is_matched if self._how == "semi" else ~is_matched))


@dataclass(frozen=True, slots=True)
class _Matches:
    """For each record, where its rows begin among those sorted by key, and how many there are."""

    begins: Positions
    counts: Positions

    def slice(self, begin: int, end: int) -> _Matches:
        return _Matches(self.begins[begin:end], self.counts[begin:end])

    def parts(self, pairs_max: int) -> Iterator[tuple[int, int]]:
        """Runs of records that have about so many matches together."""
        until = np.cumsum(self.counts)
        begin = 0
        while begin < len(until):
            before = int(until[begin - 1]) if begin else 0
            end = max(int(np.searchsorted(until, before + pairs_max, side="right")), begin + 1)
            yield begin, end
            begin = end


class _RowsByKey:
    """Which rows of a table have which keys."""

    def __init__(self, keys: list[pa.Array], count: int) -> None:
        self._index = KeyIndex([key.type for key in keys]) if keys else None
        kept = np.flatnonzero(_has_no_null(keys, count))
        numbers = np.zeros(count, dtype=np.int64)
        if self._index is not None:
            numbers = self._index.rows_of([key.take(pa.array(kept)) for key in keys])
        order = np.argsort(numbers, kind="stable")
        self._rows = kept.take(order)
        numbered = len(self._index) if self._index is not None else 1
        self._begins = np.searchsorted(numbers.take(order), np.arange(numbered + 1))

    def matches_of(self, keys: list[pa.Array], count: int) -> _Matches:
        numbers = np.zeros(count, dtype=np.int64)
        if self._index is not None:
            numbers = self._index.find(keys, hash_columns(keys))
        is_found = numbers >= 0  # a null is not: no row of the index has one
        numbers = np.where(is_found, numbers, 0)
        if len(self._begins) == 1:  # no row has a key
            return _Matches(numbers, np.zeros(count, dtype=np.int64))
        begins = self._begins.take(numbers)
        counts = np.where(is_found, self._begins.take(numbers + 1) - begins, 0)
        return _Matches(begins, counts)

    def pairs(self, matches: _Matches) -> tuple[Positions, Positions]:
        """Positions of records and of rows, pair by pair, by record."""
        counts = matches.counts
        left = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(counts) - counts
        places = np.repeat(matches.begins - before, counts) + np.arange(len(left))
        return left, self._rows.take(places)


def _has_no_null(keys: list[pa.Array], count: int) -> Flags:
    flags = np.ones(count, dtype=np.bool_)
    for key in keys:
        if key.null_count:
            flags &= np.asarray(key.is_valid())
    return flags


def with_unmatched(
    is_matched: Flags, left: Positions, right: Positions
) -> tuple[Positions, Positions]:
    """The pairs, and each unmatched record beside -1, in the order of the records."""
    alone = np.flatnonzero(~is_matched)
    if not len(alone):
        return left, right
    left = np.concatenate([left, alone])
    right = np.concatenate([right, np.full(len(alone), -1)])
    order = np.argsort(left, kind="stable")
    return left.take(order), right.take(order)


def paired(
    first: pa.RecordBatch,
    second: pa.RecordBatch,
    left: Positions,
    right: Positions,
    schema: pa.Schema | None = None,
) -> pa.RecordBatch:
    """The columns of both at these positions; of the second null where the position is -1."""
    is_absent = right < 0
    indices = pa.array(right, mask=is_absent if is_absent.any() else None)
    is_whole = len(left) == first.num_rows and bool((left == np.arange(len(left))).all())
    columns = first.columns if is_whole else first.take(pa.array(left)).columns
    columns = [*columns, *(column.take(indices) for column in second.columns)]
    if schema is None:
        names = [*first.schema.names, *second.schema.names]
        return pa.RecordBatch.from_arrays(columns, names)
    return pa.RecordBatch.from_arrays(list(map(plain, columns)), schema=schema)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """All rows in one batch, each column in one piece."""
    columns: Iterable[pa.Array] = (
        column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        for column in table.columns
    )
    return pa.RecordBatch.from_arrays(list(columns), schema=table.schema)
