"""Aggregates that Spark computes, with a small aggregate in Python in Spark's place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import StillframeError
from stillframe.key_groups import Positions
from stillframe.runtime.kept_columns import KeptColumns, columns_of_aggregates
from stillframe.state.accumulators import accumulators_of
from stillframe.state.aggregates import AggregateTable
from stillframe.state.partials import PartialAggregates

READ = pa.struct([("_1", pa.int64()), ("_2", pa.bool_())])
SCHEMA = pa.schema([("key", pa.string()), ("read", READ)])


@dataclass(frozen=True)
class Spread:
    """The difference between the largest and the smallest number; -1 of no number."""

    version: str = "4.3"
    buffers: pa.DataType = pa.struct([("low", pa.int64()), ("high", pa.int64())])  # noqa: RUF009

    def partial(self, groups: Positions, columns: Sequence[pa.Array]) -> tuple[Positions, pa.Array]:
        numbers, counts = (each.to_pylist() for each in columns)
        rows = zip(groups.tolist(), numbers, counts, strict=True)
        return self._put_together([(g, n, n) if c else (g, None, None) for g, n, c in rows])

    def merged(self, groups: Positions, buffers: pa.Array) -> tuple[Positions, pa.Array]:
        rows = zip(groups.tolist(), buffers.to_pylist(), strict=True)
        return self._put_together([(group, b["low"], b["high"]) for group, b in rows])

    def final(self, groups: Positions, buffers: pa.Array) -> tuple[Positions, pa.Array]:
        made = [-1 if b["low"] is None else b["high"] - b["low"] for b in buffers.to_pylist()]
        return groups[::-1], pa.array(made[::-1])

    def _put_together(
        self, rows: list[tuple[int, int | None, int | None]]
    ) -> tuple[Positions, pa.Array]:
        """In another order than groups came in, as Spark may."""
        groups = sorted({group for group, _, _ in rows}, reverse=True)
        made = []
        for wanted in groups:
            numbers = [
                n for group, *both in rows for n in both if group == wanted and n is not None
            ]
            made.append({"low": min(numbers, default=None), "high": max(numbers, default=None)})
        return np.array(groups, dtype=np.int64), pa.array(made, self.buffers)


def call(version: str = "4.3") -> AggregateCall:
    return AggregateCall("by_spark", "read", "spread(n)", pa.int64(), (Spread(version),))


CALLS = (call(), AggregateCall("count", None, "count", pa.int64()))


def rows(*values: tuple[str, int | None, bool]) -> pa.RecordBatch:
    read = [{"_1": number, "_2": counts} for _, number, counts in values]
    return pa.RecordBatch.from_pydict({"key": [key for key, _, _ in values], "read": read}, SCHEMA)


FIRST = rows(("a", 5, True), ("b", 1, True), ("a", 9, True), ("c", 7, False), ("a", None, True))
SECOND = rows(("a", -2, True), ("b", 100, False), ("d", 3, True), ("b", 4, True))
SPREADS = {"a": 11, "b": 3, "c": -1, "d": 0}


def spreads(made: pa.RecordBatch) -> dict[str, int]:
    return dict(zip(*(made.column(name).to_pylist() for name in ("key", "spread(n)")), strict=True))


def table() -> AggregateTable:
    return AggregateTable(SCHEMA, ("key",), CALLS, 8)


def test_what_spark_accumulates_of_batches_is_put_together() -> None:
    running = table()
    assert spreads(running.update(FIRST)) == {"a": 4, "b": 0, "c": -1}
    assert spreads(running.update(SECOND)) == {"a": 11, "b": 3, "d": 0}
    assert spreads(running.results()) == SPREADS


def test_a_batch_that_was_combined_before_the_exchange_counts_as_its_records() -> None:
    combiner = PartialAggregates(SCHEMA, ("key",), CALLS)
    many = pa.Table.from_batches([FIRST, SECOND] * 300).combine_chunks().to_batches()[0]
    partials = combiner.combine(many)
    assert partials.num_rows == len(SPREADS)
    running = table()
    running.merge(partials)
    running.merge(pa.Table.from_batches([partials, partials]).combine_chunks().to_batches()[0])
    assert spreads(running.results()) == SPREADS


def test_a_table_goes_on_from_its_snapshot() -> None:
    running, restored = table(), table()
    running.take_in(FIRST, partial=False)
    for _, kept in running.freeze().batches_by_key_group():
        restored.restore(kept)
    restored.take_in(SECOND, partial=False)
    assert spreads(restored.results()) == SPREADS


def test_two_panes_are_put_together_and_neither_is_changed() -> None:
    [spread, _] = accumulators_of(SCHEMA, CALLS)
    one, other = (
        np.array(values, np.object_)
        for values in (
            [{"low": 1, "high": 2}, None, {"low": 3, "high": 3}, None],
            [{"low": 0, "high": 1}, {"low": 5, "high": 6}, None, None],
        )
    )
    [both] = spread.combined([one], [other])
    assert spread.result([both]).to_pylist() == [2, 1, 0, -1]
    assert one[0] == {"low": 1, "high": 2}


def test_a_snapshot_of_another_version_of_spark_is_refused() -> None:
    """Its buffers are Spark's own, and only that version reads them."""
    kept = columns_of_aggregates(SCHEMA, [call("4.2")])
    now = columns_of_aggregates(SCHEMA, [call("4.3")])
    before = pa.schema([SCHEMA.field("key"), *(each for value in kept for each in value.fields)])
    schema = pa.schema([SCHEMA.field("key"), *(each for value in now for each in value.fields)])
    state = KeptColumns(schema, "spreads", values=now)
    rows_before = pa.RecordBatch.from_pydict({name: [None] for name in before.names}, before)
    with pytest.raises(StillframeError, match=r"of Spark 4\.2"):
        state.fitted(rows_before)
