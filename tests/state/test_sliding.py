"""The two stacks of overlapping windows, against a merge of each window's panes from scratch."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.api.aggregates import AggregateCall
from stillframe.state.accumulators import accumulators_of, key_fields_of
from stillframe.state.aggregates import AggregateTable, Layout
from stillframe.state.sliding import PaneParts, Sliding
from stillframe.state.window_rows import numbers_in

SCHEMA = pa.schema([("number", pa.int64()), ("v", pa.int64())])
CALLS = (
    AggregateCall("count", None, "count", pa.int64()),
    AggregateCall("min", "v", "min", pa.int64()),
)
Records = list[tuple[int, int]]
"""The number of a key, and a value."""


def table_of(records: Records) -> AggregateTable:
    table = AggregateTable(SCHEMA, ["number"], CALLS, 8, 0)
    columns = [[record[place] for record in records] for place in (0, 1)]
    arrays = [pa.array(column, pa.int64()) for column in columns]
    table.update(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return table


def pane_of(start_us: int, records: Records) -> PaneParts:
    table = table_of(records)
    return PaneParts(start_us, numbers_in(table.keys()), table.parts())


def layout() -> Layout:
    return Layout(key_fields_of(SCHEMA, ["number"]), accumulators_of(SCHEMA, CALLS))


def values_of(sliding: Sliding) -> dict[int, tuple[int, int]]:
    """Count and minimum of each key."""
    numbers, parts = sliding.merged()
    results = [each.result(parts[where]).to_pylist() for each, where in layout().each_in_memory()]
    rows = list(zip(*results, strict=True))
    assert len(set(numbers.tolist())) == len(numbers) == len(rows)
    return dict(zip(numbers.tolist(), rows, strict=True))


def truth_of(panes: list[Records]) -> dict[int, tuple[int, int]]:
    values: dict[int, list[int]] = {}
    for number, value in (record for records in panes for record in records):
        values.setdefault(number, []).append(value)
    return {number: (len(found), min(found)) for number, found in values.items()}


RECORDS = st.lists(st.tuples(st.integers(0, 9), st.integers(-99, 99)), min_size=1, max_size=12)


@settings(deadline=None)
@given(panes=st.lists(RECORDS, max_size=12), size=st.integers(1, 6))
def test_a_window_is_the_merge_of_its_panes(panes: list[Records], size: int) -> None:
    sliding = Sliding(layout())
    for end, records in enumerate(panes, 1):
        sliding.append(pane_of(end - 1, records))
        sliding.drop_before(end - size)
        assert values_of(sliding) == truth_of(panes[max(end - size, 0) : end])
    sliding.drop_before(len(panes))
    assert values_of(sliding) == {}


@settings(deadline=None)
@given(panes=st.lists(RECORDS, max_size=12), size=st.integers(1, 6), step=st.integers(2, 4))
def test_panes_may_come_several_at_a_time(panes: list[Records], size: int, step: int) -> None:
    sliding = Sliding(layout())
    for begin in range(0, len(panes), step):
        for start in range(begin, min(begin + step, len(panes))):
            sliding.append(pane_of(start, panes[start]))
        end = min(begin + step, len(panes))
        sliding.drop_before(end - size)
        assert values_of(sliding) == truth_of(panes[max(end - size, 0) : end])


def test_a_window_that_was_answered_stays_as_it_was() -> None:
    sliding = Sliding(layout())
    sliding.append(pane_of(0, [(1, 5)]))
    _, parts = sliding.merged()
    before = [array.tolist() for array in parts]
    sliding.append(pane_of(1, [(1, 3)]))
    assert [array.tolist() for array in parts] == before
