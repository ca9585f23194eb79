"""Which pane a time is in, and what travels with its pane."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import Window
from stillframe.errors import BuildError, DataError
from stillframe.state.panes import PANE, WindowedPartials, panes_of, with_panes
from stillframe.state.partials import is_partial

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.string()), ("t", UTC)])
COUNT = AggregateCall("count", None, "count", pa.int64())
TEN = Window("t", 10, 10)
TEN_EVERY_TWO = Window("t", 10, 2)


def batch_of(*rows: tuple[str, int | None]) -> pa.RecordBatch:
    """Rows of key and time."""
    keys, times = ([row[place] for row in rows] for place in (0, 1))
    return pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.string()), pa.array(times, pa.int64()).cast(UTC)], schema=SCHEMA
    )


@pytest.mark.parametrize(
    ("window", "time", "pane"),
    [
        (TEN, 0, 0),
        (TEN, 9, 0),
        (TEN, 10, 10),
        (TEN, -1, -10),
        (TEN, -10, -10),
        (TEN_EVERY_TWO, 5, 4),
        (TEN_EVERY_TWO, -5, -6),
        (Window("t", 10, 4), 5, 4),
        (Window("t", 10, 4), 7, 6),
        (Window("t", 10, 10, 3), 2, -7),
        (Window("t", 10, 10, -3), 7, 7),
        (Window("t", 10, 5, 1), 0, -4),
    ],
)
def test_a_time_is_in_one_pane(window: Window, time: int, pane: int) -> None:
    assert panes_of(pa.array([time]).cast(UTC), window).tolist() == [pane]


@pytest.mark.parametrize("type_", [pa.timestamp("us"), pa.timestamp("us", "Asia/Kolkata"), UTC])
def test_the_zone_of_a_timestamp_does_not_move_it(type_: pa.DataType) -> None:
    assert panes_of(pa.array([25]).view(type_), TEN).tolist() == [20]


def test_coarser_and_finer_timestamps_are_times_too() -> None:
    hour = Window("t", 3_600_000_000, 3_600_000_000)
    for unit, times in [("s", [-1, 3_600]), ("ms", [-1, 3_600_000]), ("ns", [-1, 3_600 * 10**9])]:
        found = panes_of(pa.array(times, pa.timestamp(unit)), hour)
        assert found.tolist() == [-3_600_000_000, 3_600_000_000]


def test_what_is_not_a_timestamp_has_no_pane() -> None:
    with pytest.raises(BuildError, match="not of int64"):
        panes_of(pa.array([1]), TEN)


def test_a_record_without_a_time_is_in_no_window() -> None:
    assert with_panes(batch_of(("a", None), ("b", 11)), TEN).to_pydict()[PANE] == [10]


@pytest.mark.parametrize("rows", [[], [("a", None)], [("a", 5)], [("a", 5), ("a", 55)]])
def test_small_batches_are_sent_as_they_are_with_their_panes(rows: list) -> None:
    combiner = WindowedPartials(SCHEMA, (), (COUNT,), TEN)
    combined = combiner.combine(batch_of(*rows))
    assert not is_partial(combined)
    assert combined.column(PANE).to_pylist() == [t // 10 * 10 for _, t in rows if t is not None]
    assert combined.column(PANE).type == pa.int64()


@pytest.mark.parametrize("time", [2**63 - 1, 2**63 - 12, -(2**63), -(2**63) + 9])
@pytest.mark.parametrize("window", [TEN, TEN_EVERY_TWO, Window("t", 10, 10, 3)])
def test_a_time_whose_windows_no_timestamp_can_say_is_refused(window, time):
    for take in (WindowedPartials(SCHEMA, ["k"], [COUNT], window).combine, with_window(window)):
        with pytest.raises(DataError, match=r"ARITHMETIC_OVERFLOW.*filter it out"):
            take(batch_of(("a", 5), ("a", time)))


def with_window(window):
    return lambda batch: with_panes(batch, window)
