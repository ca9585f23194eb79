"""Sessions, against a model that keeps every record of every open session."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import SessionWindow
from stillframe.errors import BuildError
from stillframe.key_groups import hash_row, key_group_range
from stillframe.state import partials
from stillframe.state import sessions as sessions_module
from stillframe.state.partials import is_partial
from stillframe.state.sessions import SessionPartials, SessionTable
from stillframe.state.spans import END, START, Spans, joined, joined_in_batch, with_spans
from stillframe.state.window_rows import output_schema
from stillframe.state.windows import Added

MAX_PARALLELISM = 8
UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [("k", pa.string()), ("t", UTC), ("v", pa.int64()), ("s", pa.string()), ("gap", pa.int64())]
)
CALLS = (
    AggregateCall("sum", "v", "sum(v)", pa.int64()),
    AggregateCall("min", "v", "min(v)", pa.int64()),
    AggregateCall("avg", "v", "avg(v)", pa.float64()),
    AggregateCall("max", "s", "max(s)", pa.string()),
    AggregateCall("count", None, "count", pa.int64()),
)
COUNT = CALLS[-1:]
FIVE = SessionWindow("t", 5)
OWN = SessionWindow("t", "gap")


def batch_of(*rows: tuple) -> pa.RecordBatch:
    """Rows of key, time, and a value, a text and a gap that may be left out."""
    filled = [(*row, *(1, None, 5)[len(row) - 2 :]) for row in rows]
    columns = [list(column) for column in zip(*filled, strict=True)] if rows else [[]] * 5
    arrays = [
        pa.array(column, pa.int64()).cast(UTC) if name == "t" else pa.array(column, type_)
        for column, name, type_ in zip(columns, SCHEMA.names, SCHEMA.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def table_of(
    window: SessionWindow = FIVE, keys: tuple = ("k",), calls: tuple = COUNT
) -> SessionTable:
    return SessionTable(SCHEMA, keys, calls, window, MAX_PARALLELISM)


def rows_of(batches: object) -> list[tuple]:
    """Start, end, keys, aggregates of each row."""
    found = []
    for batch in batches:
        assert batch.num_rows
        window = batch.column(0)
        bounds = [window.field(name).cast(pa.int64()).to_pylist() for name in ("start", "end")]
        columns = [column.to_pylist() for column in batch.columns[1:]]
        found += zip(*bounds, *columns, strict=True)
    return found


def add(table: SessionTable, watermark_us: int | None, *rows: tuple) -> Added:
    added = table.add(batch_of(*rows), watermark_us)
    assert added.outputs == []
    return added


# --- stories


def test_a_session_lasts_while_records_come_within_the_gap() -> None:
    table = table_of()
    add(table, None, ("a", 0), ("a", 3), ("b", 3), ("a", 7), ("a", 20))
    assert rows_of(table.close(7)) == []
    assert rows_of(table.close(12)) == [(3, 8, "b", 1), (0, 12, "a", 3)]
    assert rows_of(table.close(24)) == []
    assert rows_of(table.close(25)) == [(20, 25, "a", 1)]
    assert len(table) == 0


def test_a_record_where_a_session_ends_goes_on_with_it_and_a_later_one_does_not() -> None:
    table = table_of()
    add(table, None, ("a", 0), ("a", 5), ("b", 0), ("b", 6))
    assert sorted(rows_of(table.close(100))) == [
        (0, 5, "b", 1), (0, 10, "a", 2), (6, 11, "b", 1),
    ]  # fmt: skip


def test_it_does_not_matter_in_how_many_batches_records_come_or_in_which_order() -> None:
    times = [0, 4, 9, 20, 23, 26, 40]
    random = np.random.default_rng(3)
    for _ in range(20):
        table = table_of()
        for time in random.permutation(times).tolist():
            add(table, None, ("a", time))
        assert rows_of(table.close(100)) == [(0, 14, "a", 3), (20, 31, "a", 3), (40, 45, "a", 1)]


def test_a_record_joins_the_sessions_on_both_sides_of_it() -> None:
    table = table_of(calls=CALLS)
    add(table, None, ("a", 0, 7, "x"), ("a", 10, 2, "y"), ("a", 30))
    assert len(table) == 3
    add(table, None, ("a", 5, None))
    assert len(table) == 2
    [first, _] = rows_of(table.close(100))
    assert first == (0, 15, "a", 9, 2, 4.5, "y", 3)


def test_one_record_with_a_long_gap_joins_many_sessions() -> None:
    table = table_of(OWN)
    add(table, None, *(("a", 10 * i) for i in range(10)))
    assert len(table) == 10
    add(table, None, ("a", 3, 1, None, 1_000))
    assert rows_of(table.close(10_000)) == [(0, 1_003, "a", 11)]


def test_a_short_gap_within_a_long_one_does_not_end_the_session() -> None:
    table = table_of(OWN)
    add(table, None, ("a", 0, 1, None, 100), ("a", 10, 1, None, 2), ("a", 50, 1, None, 2))
    add(table, None, ("a", 90, 1, None, 2))
    assert rows_of(table.close(99)) == []
    assert rows_of(table.close(100)) == [(0, 100, "a", 4)]


def test_records_without_a_time_or_with_no_gap_are_in_no_session() -> None:
    table = table_of(OWN)
    gaps = [("a", None), *(("a", 1, 1, None, gap) for gap in (None, 0, -3))]
    assert add(table, 100, *gaps).late_rows == 0
    assert len(table) == 0
    assert with_spans(batch_of(("a", None), ("b", 7)), FIVE).to_pydict()[END] == [12]


def test_a_record_is_late_when_its_own_span_has_ended() -> None:
    """Also where a session is open that it would have been a part of: as Spark has it."""
    table = table_of()
    add(table, None, ("a", 8))
    assert add(table, 10, ("a", 5), ("b", 5), ("a", 6)).late_rows == 2
    assert rows_of(table.close(20)) == [(6, 13, "a", 2)]


def test_a_record_in_the_time_of_a_session_that_has_closed_begins_another() -> None:
    table = table_of()
    add(table, None, ("a", 0), ("a", 4))
    assert rows_of(table.close(9)) == [(0, 9, "a", 2)]
    assert add(table, 9, ("a", 5)).late_rows == 0
    assert rows_of(table.close(10)) == [(5, 10, "a", 1)]


def test_late_records_are_given_back_as_they_came() -> None:
    records = batch_of(("a", 5, 3, "x"), ("a", 6), ("b", 1, 4))
    added = table_of().add(records, 10)
    assert (added.late_rows, added.late) == (2, records.take(pa.array([0, 2])))


def test_without_keys_there_are_the_sessions_of_everything() -> None:
    table = table_of(keys=())
    add(table, None, ("a", 1), ("b", 2), ("b", 33))
    assert rows_of(table.close(50)) == [(1, 7, 2), (33, 38, 1)]


def test_without_aggregates_there_are_the_keys_of_each_session() -> None:
    table = table_of(calls=())
    add(table, None, ("a", 1), ("b", 3), ("a", 2))
    assert rows_of(table.close(50)) == [(1, 7, "a"), (3, 8, "b")]


def test_null_is_a_key() -> None:
    table = table_of()
    add(table, None, (None, 1), ("a", 2), (None, 3))
    assert rows_of(table.close(50)) == [(2, 7, "a", 1), (1, 8, None, 2)]


def test_the_session_comes_first_then_keys_then_aggregates() -> None:
    table = table_of()
    add(table, None, ("a", 1))
    [made] = table.close(10)
    assert made.schema == table.output_schema == output_schema(SCHEMA, ["k"], COUNT)
    assert made.column(0)[0].as_py()["end"] == datetime.datetime.fromtimestamp(0, datetime.UTC) + (
        datetime.timedelta(microseconds=6)
    )


def test_times_at_the_ends_of_time_are_sessions_too() -> None:
    table = table_of()
    last, first = 2**63 - 3, -(2**63) + 1
    add(table, None, *((key, time) for key in "ab" for time in (last, first, 0)))
    assert rows_of(table.close(2**63 - 1)) == [
        *((first, first + 5, key, 1) for key in "ab"),
        *((0, 5, key, 1) for key in "ab"),
        *((last, 2**63 - 1, key, 1) for key in "ab"),
    ]


def test_all_that_is_open_can_be_asked_for() -> None:
    table = table_of()
    add(table, None, ("a", 1), ("b", 1), ("b", 30))
    before = rows_of(table.everything())
    assert before == [(1, 6, "a", 1), (1, 6, "b", 1), (30, 35, "b", 1)]
    assert rows_of(table.everything()) == before
    list(table.close(10))
    assert rows_of(table.everything()) == before[2:]


def test_an_emitted_batch_does_not_change_afterwards() -> None:
    table = table_of()
    add(table, None, ("a", 4), ("b", 9))
    made = list(table.close(10))
    before = rows_of(made)
    add(table, 10, ("a", 7), ("b", 9))
    list(table.close(100))
    assert rows_of(made) == before


@pytest.mark.parametrize("gap", [0, -1])
def test_a_gap_that_is_none_is_refused(gap: int) -> None:
    for make in (table_of, lambda window: SessionPartials(SCHEMA, ["k"], COUNT, window)):
        with pytest.raises(BuildError, match="cannot be"):
            make(SessionWindow("t", gap))


def test_a_column_of_gaps_is_one_of_microseconds() -> None:
    with pytest.raises(BuildError, match="int64 of microseconds, not string"):
        table_of(SessionWindow("t", "s"))


def test_what_is_not_a_timestamp_has_no_session() -> None:
    with pytest.raises(BuildError, match="not of int64"):
        with_spans(batch_of(("a", 1)), SessionWindow("v", 5))


# --- joining


def spans(*rows: tuple[int, int, int]) -> Spans:
    return Spans(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


@settings(max_examples=tries(300), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(-30, 30) | st.sampled_from([-(2**62), 2**62]),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_spans_that_touch_are_joined_whatever_else_there_is(rows: list) -> None:
    numbers = sorted({key for key, _, _ in rows})
    records = spans(*((numbers.index(key), start, start + gap) for key, start, gap in rows))
    for join in (joined, joined_in_batch):
        parts, found = join(records, len(numbers))
        made = list(zip(*(c.tolist() for c in (found.keys, found.starts, found.ends)), strict=True))
        for key, start, end in made:
            others = [(s, e) for k, s, e in made if k == key and (s, e) != (start, end)]
            assert all(e < start or s > end for s, e in others)
        for place, part in enumerate(parts.tolist()):
            key, start, end = made[part]
            assert key == records.keys[place]
            assert start <= records.starts[place] < records.ends[place] <= end
        for part, (_, start, end) in enumerate(made):
            mine = records.at(parts == part)
            assert (start, end) == (mine.starts.min(), mine.ends.max())
            # Nowhere between can it be cut.
            assert all(
                ((mine.starts <= cut) & (mine.ends >= cut)).any() for cut in mine.ends.tolist()
            )
            later = [cut for cut in mine.ends.tolist() if cut < end]
            assert all(((mine.starts <= cut) & (mine.ends > cut)).any() for cut in later)
        assert len(set(made)) == len(made)


# --- what is freed


def test_closed_sessions_leave_nothing_behind() -> None:
    table = table_of()
    closed, bytes_held = 0, []
    for begin in range(0, 2_000_000, 1_000):
        rows = [(key, time) for time in range(begin, begin + 1_000, 100) for key in "abcdefghij"]
        add(table, begin, *rows)
        closed += len(rows_of(table.close(begin + 950)))
        assert len(table) == 0
        bytes_held.append(table.state_bytes)
    assert closed == 200_000
    assert max(bytes_held) == max(bytes_held[:400])


def test_keys_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_ROWS_MIN", 64)
    table = table_of()
    emitted = []
    for step in range(300):
        add(table, 10 * step - 20, *((f"{step}-{i}", 10 * step + i) for i in range(10)))
        emitted += rows_of(table.close(10 * step - 10))
        assert len(table._index) <= 4 * 30 + 64
    emitted += rows_of(table.close(10**6))
    assert len(emitted) == 3_000 == len({row[:3] for row in emitted})


def test_a_sum_is_as_wide_as_one_session_needs() -> None:
    """What closed sessions have summed up does not count, even where it passes 64 bits."""
    table = table_of(calls=CALLS[:1])
    for step in range(40):
        add(table, None, ("a", 10 * step, 2**60), ("a", 10 * step + 1, -(2**60) + step))
        [(_, _, _, total)] = rows_of(table.close(10 * step + 9))
        assert total == step


# --- many sessions


def test_those_that_end_next_are_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_NEXT_MIN", 8)
    random = np.random.default_rng(5)
    table, model = table_of(calls=CALLS), Model(is_dynamic=False, watermark_us=0)
    watermark_us = 0
    for _ in range(200):
        ahead_us = random.integers(-10, 500, 40).tolist()
        rows = [(f"{n}", watermark_us + ahead, 1, None, 5) for n, ahead in enumerate(ahead_us)]
        add(table, watermark_us, *rows)
        model.add(rows)
        watermark_us += int(random.integers(0, 60))
        assert sorted(rows_of(table.close(watermark_us)), key=repr) == model.close(watermark_us)
    assert len(table) > 100


# --- before the exchange


def combined(window: SessionWindow, watermark_us: int | None, batch: pa.RecordBatch, **given):
    combiner = SessionPartials(SCHEMA, given.get("keys", ("k",)), CALLS, window)
    if watermark_us is not None:
        combiner.on_watermark(watermark_us)
    return combiner.combine(batch)


@pytest.mark.parametrize("window", [FIVE, OWN, SessionWindow("t", 10**7)])
@pytest.mark.parametrize("span", [3, 60_000, 10**9])
@pytest.mark.parametrize("keys", [("k",), (), ("k", "s")])
def test_combined_batches_give_what_records_give(
    window: SessionWindow, span: int, keys: tuple
) -> None:
    random = np.random.default_rng(span)
    times = random.integers(-span, span, 5_000).tolist()
    rows = [
        (f"k{i % 7}", None if i % 31 == 0 else time, i % 11 or None, "xyz"[i % 3], i % 9 * 100)
        for i, time in enumerate(times)
    ]
    watermark_us = -span + span // 20
    records = batch_of(*rows)
    sent = combined(window, watermark_us, records, keys=keys)
    assert is_partial(sent) == (
        span == 3 or window.gap == 10**7 or (window is OWN and span < 10**6)
    )
    tables = [table_of(window, keys, CALLS) for _ in range(2)]
    late = [
        table.add(batch, watermark_us).late_rows
        for table, batch in zip(tables, (records, sent), strict=True)
    ]
    assert late[0] == late[1]
    found = [sorted(rows_of(table.close(2**62))) for table in tables]
    assert found[0] == found[1]


def test_records_that_may_be_late_are_not_joined_with_others_before_they_leave() -> None:
    """Else it would depend on what else is in the batch whether they count."""
    rows = [("a", time) for time in (0, 1, 4, 8, 8, 8, 8, 9)] * 500
    sent = combined(FIVE, 6, batch_of(*rows))
    assert is_partial(sent)
    counted = zip(*(sent.to_pydict()[name] for name in (START, END, "count")), strict=True)
    assert sorted(counted)[-2:] == [(1, 6, 1), (4, 14, 3_000)]
    table = table_of(calls=CALLS)
    assert table.add(sent, 6).late_rows == 1_000
    assert [row[:3] for row in rows_of(table.close(100))] == [(4, 14, "a")]


def test_nothing_is_combined_before_it_is_known_what_may_be_late() -> None:
    records = batch_of(*[("a", 1)] * 5_000)
    assert not is_partial(combined(FIVE, None, records))
    assert combined(FIVE, 0, records).num_rows == 1


# --- the model


@dataclass
class Open:
    start: int
    end: int
    rows: list[tuple]


@dataclass
class Model:
    """Every open session, with its records one by one."""

    is_dynamic: bool
    watermark_us: int = -(10**18)
    late_rows: int = 0
    open: dict = field(default_factory=dict)

    def add(self, rows: list[tuple]) -> None:
        for key, time, value, text, gap in rows:
            gap = gap if self.is_dynamic else 5
            if time is None or gap is None or gap <= 0:
                continue
            if time + gap <= self.watermark_us:
                self.late_rows += 1
            else:
                self._take(key, Open(time, time + gap, [(value, text)]))

    def _take(self, key: str | None, made: Open) -> None:
        apart = []
        for other in self.open.get(key, []):
            if other.end < made.start or other.start > made.end:
                apart.append(other)
            else:
                bounds = min(made.start, other.start), max(made.end, other.end)
                made = Open(*bounds, made.rows + other.rows)
        self.open[key] = [*apart, made]

    def close(self, watermark_us: int) -> list[tuple]:
        self.watermark_us = watermark_us
        closed = []
        for key, sessions in self.open.items():
            closed += [
                (each.start, each.end, key, *self.values(each.rows))
                for each in sessions
                if each.end <= watermark_us
            ]
            self.open[key] = [each for each in sessions if each.end > watermark_us]
        return sorted(closed, key=repr)

    @staticmethod
    def values(rows: list[tuple]) -> list:
        values = [value for value, _ in rows if value is not None]
        texts = [text for _, text in rows if text is not None]
        mean = sum(values) / len(values) if values else None
        extremes = [sum(values), min(values), mean] if values else [None] * 3
        return [*extremes, max(texts) if texts else None, len(rows)]


ROWS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["a", "b", "", "a longer key"]),
        st.none() | st.integers(-60, 60) | st.sampled_from([-(10**15), 10**15]),
        st.none() | st.integers(-5, 5),
        st.none() | st.sampled_from(["x", "y"]),
        st.none() | st.integers(-1, 30),
    ),
    max_size=12,
)
STEPS = st.lists(
    st.tuples(st.just("add"), ROWS)
    | st.tuples(st.just("close"), st.integers(-60, 90))
    | st.tuples(st.just("rescale"), st.integers(1, 4)),
    max_size=12,
)


class Subtasks:
    """Several tables, each with the key groups of one subtask."""

    def __init__(self, window: SessionWindow, combines: bool) -> None:
        self._window = window
        self._combines = combines
        self.late_rows = 0
        self.watermark_us: int | None = None
        self.tables = [table_of(window, calls=CALLS)]

    def add(self, rows: list[tuple]) -> None:
        for subtask, table in enumerate(self.tables):
            batch = batch_of(*(row for row in rows if self._subtask_of(row[0]) == subtask))
            if self._combines:
                batch = combined(self._window, self.watermark_us, batch)
            self.late_rows += table.add(batch, self.watermark_us).late_rows

    def close(self, watermark_us: int) -> list[tuple]:
        self.watermark_us = watermark_us
        return sorted(
            (row for table in self.tables for row in rows_of(table.close(watermark_us))), key=repr
        )

    def rescale(self, parallelism: int) -> None:
        frozen = [table.freeze() for table in self.tables]
        late_rows = self.late_rows
        self.add([("a", time, 1, None, 500) for time in (-50, 0, 50)])  # this is not in it
        if self.watermark_us is not None:
            self.close(self.watermark_us + 20)
            self.watermark_us -= 20
        self.late_rows = late_rows
        batches = [found for each in frozen for found in each.batches_by_key_group()]
        assert sum(batch.num_rows for _, batch in batches) == sum(map(len, frozen))
        for each in frozen:
            each.release()
        self.tables = [table_of(self._window, calls=CALLS) for _ in range(parallelism)]
        for subtask, table in enumerate(self.tables):
            owned = key_group_range(subtask, parallelism, MAX_PARALLELISM)
            for group, batch in batches:
                if group in owned:
                    table.restore(batch)
            table.resume(self.watermark_us)

    def _subtask_of(self, key: str | None) -> int:
        group = hash_row([key], [pa.string()]) % MAX_PARALLELISM
        return group * len(self.tables) // MAX_PARALLELISM


@settings(max_examples=tries(500), deadline=None)
@given(
    steps=STEPS, combines=st.booleans(), is_dynamic=st.booleans(), rows_min=st.sampled_from([0, 64])
)
def test_any_job_answers_what_the_model_answers(
    steps: list, combines: bool, is_dynamic: bool, rows_min: int
) -> None:
    model, subtasks = Model(is_dynamic), Subtasks(OWN if is_dynamic else FIVE, combines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partials, "_RECORDS_MIN", 4)
        patch.setattr(sessions_module, "_ROWS_MIN", rows_min)
        patch.setattr(sessions_module, "_NEXT_MIN", 2)
        for what, given_ in [*steps, ("close", 10**17)]:
            if what == "rescale":
                subtasks.rescale(given_)
            elif what == "add":
                subtasks.add(given_)
                model.add(given_)
            else:
                watermark_us = max(given_, model.watermark_us)
                assert subtasks.close(watermark_us) == model.close(watermark_us)
            assert sum(map(len, subtasks.tables)) == sum(map(len, model.open.values()))
    assert subtasks.late_rows == model.late_rows


# --- checkpoints


def test_after_a_restore_keys_that_were_ahead_take_no_record_that_was_late() -> None:
    """Two subtasks, of which one had seen a watermark that the barrier overtook on the other."""
    ahead, behind = table_of(), table_of()
    halves = [key_group_range(subtask, 2, MAX_PARALLELISM) for subtask in range(2)]
    keys = [_key_in(half) for half in halves]
    for table, key in zip((ahead, behind), keys, strict=True):
        add(table, None, (key, 1), (key, 9))
    assert rows_of(ahead.close(8)) == [(1, 6, keys[0], 1)]

    both = table_of()
    for table in (ahead, behind):
        for _, batch in table.freeze().batches_by_key_group():
            both.restore(batch)
    both.resume(4, [(halves[0].start, halves[0].stop, 8)])
    # Under way when the barrier came: late for the one, not for the other.
    assert add(both, 4, *((key, 2) for key in keys)).late_rows == 1
    found = rows_of(both.close(8))
    assert found == [(1, 7, keys[1], 2)]
    assert add(both, 8, *((key, 5) for key in keys)).late_rows == 0
    assert sorted(rows_of(both.close(100))) == sorted((5, 14, key, 2) for key in keys)


def _key_in(groups: range) -> str:
    names = (f"key-{number}" for number in range(100))
    return next(n for n in names if hash_row([n], [pa.string()]) % MAX_PARALLELISM in groups)


def test_frozen_sessions_are_as_they_were() -> None:
    table = table_of()
    add(table, None, ("a", 1), ("b", 3), ("b", 20))
    frozen = table.freeze()
    add(table, None, ("a", 4), ("c", 1), ("b", 8), ("b", 13), ("b", 15))
    list(table.close(100))

    rows = [row for _, batch in frozen.batches_by_key_group() for row in batch.to_pylist()]
    assert sorted(tuple(row.values()) for row in rows) == [
        ("a", 1, 6, 1), ("b", 3, 8, 1), ("b", 20, 25, 1),
    ]  # fmt: skip
    assert len(frozen) == 3
    frozen.release()
    frozen.release()


def test_a_version_tells_whether_a_snapshot_would_hold_the_same() -> None:
    table = table_of()
    add(table, None, ("a", 1))
    first = table.version
    add(table, None)
    list(table.close(5))
    add(table, 5, ("a", -100))
    assert table.version == first
    list(table.close(6))
    assert table.version != first
