"""What comes too late is read by those who ask for it; what is whole is emitted at barriers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import WINDOW, Window
from stillframe.graph.logical import Aggregate, Late, Project
from stillframe.graph.plan import PlannedOperator
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.chain import Chain
from stillframe.runtime.operators import Aggregating, Passing, RunningOperator
from stillframe.runtime.windowing import Windowing, window_tables, windowed_partials
from stillframe.state import partials
from stillframe.state.aggregates import AggregateTable

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("at", UTC), ("note", pa.int64())])
COUNT = (AggregateCall("count", None, "count", pa.int64()),)
LATEST = (AggregateCall("max", "note", "latest", pa.int64()),)
GROUPS = 8


class Noting(RunningOperator):
    """Notes what it gets and how far time has come."""

    def __init__(self) -> None:
        self.got: list[dict] = []
        self.times_us: list[int] = []

    def process(self, batch: pa.RecordBatch) -> tuple:
        self.got += batch.to_pylist()
        return ()

    def on_watermark(self, time_us: int) -> tuple:
        self.times_us.append(time_us)
        return ()


class Windows:
    """A windowed aggregate with a reader of its rows and, if wanted, one of what is late."""

    def __init__(self, aggregate: Aggregate, *, reads_late: bool = True) -> None:
        self.aggregate = aggregate
        self.made, self.late = Noting(), Noting()
        tables = window_tables(SCHEMA, aggregate, GROUPS, SubtaskState(), ())
        place = (OperatorUid("windows"), SubtaskIndex(0), Attempt(1))
        self.windowing = Windowing(*place, tables, None, emits_all=aggregate.emits_all)
        followers = ((1,), (), (3,), ()) if not reads_late else ((1, 2), (), (3,), ())
        kinds = (aggregate, Project(()), Late(), Project(()))
        planned = [
            PlannedOperator(OperatorUid("any"), kind, SCHEMA, SCHEMA, chained, ())
            for kind, chained in zip(kinds, followers, strict=True)
        ]
        operators = [self.windowing, self.made, Passing(), self.late]
        self.chain = Chain(planned, operators, {})

    def add(self, *rows: tuple[str, int | None]) -> None:
        self.chain.process(records(*rows))

    def windows_made(self) -> list[tuple[int, str, int]]:
        made, self.made.got = self.made.got, []
        return sorted(
            (int(row[WINDOW]["start"].timestamp() * 1e6), row["key"], row["count"]) for row in made
        )


def records(*rows: tuple[str, int | None]) -> pa.RecordBatch:
    keys, times = [row[0] for row in rows], [row[1] for row in rows]
    at = pa.array(times, pa.int64()).cast(UTC)
    notes = pa.array(range(len(rows)), pa.int64())
    return pa.record_batch([pa.array(keys, pa.string()), at, notes], schema=SCHEMA)


def tumbling(**more: bool) -> Aggregate:
    return Aggregate(("key",), COUNT, Window("at", 10, 10), **more)


@pytest.mark.parametrize("emits_closed", [True, False])
def test_late_records_come_as_they_were_with_all_their_columns(emits_closed: bool) -> None:
    windows = Windows(tumbling(emits_closed=emits_closed))
    windows.add(("a", 3))
    windows.chain.advance(20)
    windows.add(("a", 25), ("b", 5), ("c", None), ("a", 19))
    assert windows.late.got == records(("", 0), ("b", 5), ("", 0), ("a", 19)).to_pylist()[1::2]
    assert all(row["key"] != "b" for row in windows.made.got)
    windows.add(("a", 26))
    assert len(windows.late.got) == 2, "each comes once"


def test_late_records_that_are_read_are_not_counted_as_dropped() -> None:
    read, dropped = Windows(tumbling()), Windows(tumbling(), reads_late=False)
    for windows in (read, dropped):
        windows.chain.advance(20)
        windows.add(("b", 5), ("a", 19), ("a", 21))
    assert (read.chain.late_rows, dropped.chain.late_rows) == (0, 2)
    assert not dropped.late.got


def test_time_does_not_go_to_the_late_ones_which_it_has_passed_but_its_end_does() -> None:
    windows = Windows(tumbling())
    windows.chain.advance(20)
    windows.chain.end_time()
    assert windows.made.times_us == [19, END_OF_TIME_US]
    assert windows.late.times_us == [END_OF_TIME_US]


@pytest.mark.parametrize("calls", [COUNT, LATEST, (*LATEST, *COUNT)])
@pytest.mark.parametrize("latest", [11, 55])
def test_of_combined_rows_the_records_they_are_made_of_are_counted(
    monkeypatch: pytest.MonkeyPatch, calls: tuple[AggregateCall, ...], latest: int
) -> None:
    monkeypatch.setattr(partials, "_RECORDS_MIN", 0)
    aggregate = Aggregate(("key",), calls, Window("at", 10, 10))
    windows = Windows(aggregate, reads_late=False)
    windows.chain.advance(10)
    many = records(*[("a", 1)] * 30, *[("b", 2)] * 10, *[("a", latest)] * 5)
    combined = windowed_partials(SCHEMA, aggregate).combine(many)
    assert partials.is_partial(combined)
    assert combined.num_rows == 3
    windows.chain.process(combined)
    assert windows.chain.late_rows == 40
    (made,) = windows.made.got
    assert (made["key"], made.get("latest", 44), made.get("count", 5)) == ("a", 44, 5)


# --- the whole result ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slide", "starts"),
    [(10, {1: [0], 12: [10], 3: [0]}), (5, {1: [-5, 0], 12: [5, 10], 3: [-5, 0]})],
)
def test_all_windows_are_emitted_at_each_barrier_and_only_then(
    slide: int, starts: dict[int, list[int]]
) -> None:
    windows = Windows(Aggregate(("key",), COUNT, Window("at", 10, slide), emits_all=True))
    windows.add(("a", 1), ("a", 12))
    windows.chain.advance(1000)
    assert windows.windows_made() == []
    first = [(start, "a", 1) for start in sorted(starts[1] + starts[12])]
    for _ in range(2):
        windows.chain.end_epoch()
        assert windows.windows_made() == first

    windows.add(("b", 3))
    windows.chain.end_epoch()
    assert windows.windows_made() == sorted([*first, *((start, "b", 1) for start in starts[3])])
    assert (windows.chain.late_rows, windows.late.got) == (0, []), "nothing is late"


def test_without_windows_the_whole_result_is_every_key() -> None:
    made = Noting()
    table = AggregateTable(SCHEMA, ("key",), COUNT, GROUPS)
    place = (OperatorUid("count"), SubtaskIndex(0), Attempt(1))
    counting = Aggregating(*place, table, None, emits_all=True)
    planned = [
        PlannedOperator(OperatorUid("any"), Project(()), SCHEMA, SCHEMA, chained, ())
        for chained in ((1,), ())
    ]
    chain = Chain(planned, [counting, made], {})
    chain.process(records(("a", 1), ("b", 1), ("a", 1)))
    assert made.got == []
    chain.end_epoch()
    assert made.got == [{"key": "a", "count": 2}, {"key": "b", "count": 1}]
