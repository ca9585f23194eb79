"""Windows that a batch has changed, against a merge of each window's panes from scratch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.api.aggregates import AggregateCall
from stillframe.key_groups import Positions
from stillframe.state import changed_windows
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.aggregates import AggregateTable, Layout
from stillframe.state.changed_windows import Changed, ChangedWindows, LookedUp, Touches
from stillframe.state.columns import Array
from stillframe.state.window_rows import numbers_in

SCHEMA = pa.schema([("number", pa.int64()), ("v", pa.int64()), ("name", pa.string())])
CALLS = (
    AggregateCall("count", None, "count", pa.int64()),
    AggregateCall("sum", "v", "sum", pa.int64()),
    AggregateCall("min", "v", "min", pa.int64()),
    AggregateCall("max", "name", "max", pa.string()),
    AggregateCall("avg", "v", "avg", pa.float64()),
)
Record = tuple[int, int | None]
"""The number of a key, and a value."""
Row = tuple[int, int | None, int | None, str | None, float | None]
NUMBERS = 6


def table_of(records: list[Record]) -> AggregateTable:
    table = AggregateTable(SCHEMA, ["number"], CALLS, 8, 0)
    numbers, values = ([record[place] for record in records] for place in (0, 1))
    names = [None if value is None else f"{value:+}" for value in values]
    columns = [pa.array(numbers, pa.int64()), pa.array(values, pa.int64()), pa.array(names)]
    table.update(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return table


def layout() -> Layout:
    return Layout(key_fields_of(SCHEMA, ["number"]), accumulators_of(SCHEMA, CALLS))


def row_of(values: list[int | None]) -> Row:
    there = [value for value in values if value is not None]
    if not there:
        return len(values), None, None, None, None
    names = [f"{value:+}" for value in there]
    return len(values), sum(there), min(there), max(names), sum(there) / len(there)


def rows_in(changed: Changed) -> Iterator[tuple[tuple[int, int], Row]]:
    ends = np.repeat(changed.ends_us, [len(each) for each in changed.places]).tolist()
    numbers = changed.asked[np.concatenate(changed.places)].tolist()
    results = [
        each.result(changed.parts[where]).to_pylist() for each, where in layout().each_in_memory()
    ]
    yield from zip(zip(ends, numbers, strict=True), zip(*results, strict=True), strict=True)


RECORDS = st.lists(
    st.tuples(st.integers(0, NUMBERS - 1), st.none() | st.integers(-99, 99)),
    min_size=1,
    max_size=8,
)
PANES = st.dictionaries(st.integers(0, 24), RECORDS, min_size=1, max_size=14)


@settings(deadline=None, max_examples=tries(200))
@given(
    panes=PANES,
    size=st.integers(2, 7),
    cells=st.sampled_from([1, 16, 1 << 20]),
    rows=st.sampled_from([1, 5, 1 << 15]),
    data=st.data(),
)
def test_each_window_answers_the_touched_keys_with_all_its_panes(
    panes: dict[int, list[Record]], size: int, cells: int, rows: int, data: st.DataObject
) -> None:
    touched = {
        pane: data.draw(st.lists(st.sampled_from([n for n, _ in records]), min_size=1))
        for pane, records in panes.items()
        if data.draw(st.booleans())
    }
    tables = {pane: table_of(records) for pane, records in panes.items()}
    ends = sorted({end for pane in touched for end in range(pane + 1, pane + size + 1)})
    expected = {}
    for end in ends:
        inside = [pane for pane in panes if end - size <= pane < end]
        for number in {n for pane in inside for n in touched.get(pane, [])}:
            values = [v for pane in inside for n, v in panes[pane] if n == number]
            expected[end, number] = row_of(values)

    def held(pane: int, looked_up: LookedUp) -> tuple[Positions, list[Array]]:
        table = tables[pane]
        return looked_up.found_among(numbers_in(table.keys()), table.parts())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changed_windows, "_CELLS_MAX", cells)
        patched.setattr(changed_windows, "_ROWS_MAX", rows)
        numbers = {pane: np.array(each) for pane, each in touched.items()}
        windows = ChangedWindows(layout(), size, sorted(panes), held)
        answered = [row for each in windows.values(ends, numbers, NUMBERS) for row in rows_in(each)]
    assert len(answered) == len(expected)
    assert dict(answered) == expected


@pytest.mark.parametrize("asked", [[0, 2, 5], [7], [0, 2, 5, 7]])
def test_keys_are_found_by_looking_at_all_as_by_hashing(asked: list[int]) -> None:
    table = table_of([(2, 20), (7, 70), (0, 1), (2, 10), (4, 4)])
    looked_up = LookedUp(np.array(asked), 8)
    found = []
    for places, parts in (
        looked_up.found_in(table),
        looked_up.found_among(numbers_in(table.keys()), table.parts()),
    ):
        order = np.argsort(places)
        found.append((places[order].tolist(), [array[order].tolist() for array in parts]))
    assert found[0] == found[1]
    assert [asked[place] for place in found[0][0]] == sorted(set(asked) & {0, 2, 4, 7})


def test_a_window_answers_the_keys_touched_in_its_own_panes() -> None:
    touches = Touches({0: np.array([1, 0]), 10: np.array([2]), 20: np.array([1])})
    assert touches.between(0, 20).tolist() == [0, 1, 2]
    assert touches.between(5, 20).tolist() == [2]
    assert touches.between(5, 20) is touches.between(6, 20)
    assert touches.between(10, 30).tolist() == [1, 2]
    assert touches.between(30, 40).tolist() == []
