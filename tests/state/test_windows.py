"""Windowed aggregates, against a model that keeps every record of every window."""

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
from stillframe.api.windows import Window
from stillframe.errors import BuildError
from stillframe.key_groups import hash_row, key_group_range
from stillframe.state import partials
from stillframe.state import windows as windows_module
from stillframe.state.panes import PANE, WindowedPartials, with_panes
from stillframe.state.partials import is_partial
from stillframe.state.reached import BEGINNING_US
from stillframe.state.window_rows import output_schema
from stillframe.state.windows import WindowTables

MAX_PARALLELISM = 8
UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.string()), ("t", UTC), ("v", pa.int64()), ("s", pa.string())])
CALLS = (
    AggregateCall("count", None, "count", pa.int64()),
    AggregateCall("sum", "v", "sum(v)", pa.int64()),
    AggregateCall("min", "v", "min(v)", pa.int64()),
    AggregateCall("avg", "v", "avg(v)", pa.float64()),
    AggregateCall("max", "s", "max(s)", pa.string()),
)
TEN = Window("t", 10, 10)
TEN_EVERY_TWO = Window("t", 10, 2)


def batch_of(*rows: tuple) -> pa.RecordBatch:
    """Rows of key, time, and a value that may be left out."""
    filled = [(*row, 1, None)[:4] if len(row) == 2 else (*row, None)[:4] for row in rows]
    columns = [list(column) for column in zip(*filled, strict=True)] if rows else [[]] * 4
    arrays = [
        pa.array(column, pa.int64()).cast(UTC) if name == "t" else pa.array(column, type_)
        for column, name, type_ in zip(columns, SCHEMA.names, SCHEMA.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def tables_of(
    window: Window, emits_closed: bool = True, keys: tuple = ("k",), calls: tuple = CALLS
) -> WindowTables:
    return WindowTables(SCHEMA, keys, calls, window, MAX_PARALLELISM, emits_closed=emits_closed)


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


def counts(batches: object) -> list[tuple]:
    return [row[:4] for row in rows_of(batches)]


def added(tables: WindowTables, watermark_us: int | None, *rows: tuple) -> list[tuple]:
    return counts(tables.add(with_panes(batch_of(*rows), TEN), watermark_us).outputs)


# --- stories


@pytest.mark.parametrize("window", [Window("t", 10, 11), Window("t", 10, 0), Window("t", -1, -1)])
def test_windows_that_cannot_be_are_refused(window: Window) -> None:
    with pytest.raises(BuildError, match="cannot be"):
        tables_of(window)


def test_a_window_is_emitted_once_when_time_has_come_to_its_end() -> None:
    tables = tables_of(TEN)
    assert added(tables, None, ("a", 1), ("b", 2), ("a", 9), ("a", 10)) == []

    assert counts(tables.close(9)) == []
    assert sorted(counts(tables.close(10))) == [(0, 10, "a", 2), (0, 10, "b", 1)]
    assert counts(tables.close(19)) == []
    assert counts(tables.close(1_000)) == [(10, 20, "a", 1)]
    assert tables.pane_count == 0


def test_windows_that_close_together_are_emitted_in_the_order_of_time() -> None:
    tables = tables_of(TEN)
    added(tables, None, ("a", 95), ("a", -3), ("a", 41))
    assert counts(tables.close(100)) == [(-10, 0, "a", 1), (40, 50, "a", 1), (90, 100, "a", 1)]


def test_in_update_mode_a_batch_answers_the_windows_it_touched() -> None:
    tables = tables_of(TEN, emits_closed=False)
    assert added(tables, None, ("a", 1), ("b", 2)) == [(0, 10, "a", 1), (0, 10, "b", 1)]
    assert added(tables, None, ("a", 12), ("a", 3)) == [(0, 10, "a", 2), (10, 20, "a", 1)]
    assert list(tables.close(10)) == []
    assert tables.pane_count == 1


def test_a_row_is_late_when_its_last_window_has_closed() -> None:
    tables = tables_of(TEN)
    list(tables.close(10))
    answer = tables.add(with_panes(batch_of(("a", 9), ("a", 10), ("b", -4)), TEN), 10)
    assert answer.late_rows == 2
    assert counts(tables.close(20)) == [(10, 20, "a", 1)]


def test_a_row_late_for_some_of_its_windows_counts_in_the_others() -> None:
    tables = tables_of(TEN_EVERY_TWO)
    tables.add(with_panes(batch_of(("a", 4), ("a", 11)), TEN_EVERY_TWO), None)
    assert counts(tables.close(11)) == [(start, start + 10, "a", 1) for start in (-4, -2, 0)]
    late = tables.add(with_panes(batch_of(("a", 5), ("a", 1)), TEN_EVERY_TWO), 11)
    assert late.late_rows == 1
    assert counts(tables.close(16)) == [(2, 12, "a", 3), (4, 14, "a", 3), (6, 16, "a", 1)]


def test_overlapping_windows_answer_what_was_touched_in_update_mode() -> None:
    tables = tables_of(TEN_EVERY_TWO, emits_closed=False)
    tables.add(with_panes(batch_of(("a", 8), ("b", 8)), TEN_EVERY_TWO), None)
    found = tables.add(with_panes(batch_of(("a", 13)), TEN_EVERY_TWO), 15).outputs
    expected = [(4, 14), (6, 16), (8, 18), (10, 20), (12, 22)]
    assert counts(found) == [
        (start, end, "a", 2 if start <= 8 else 1) for start, end in expected if end > 15
    ]


def test_without_keys_there_is_one_row_for_each_window() -> None:
    tables = tables_of(TEN, keys=())
    tables.add(with_panes(batch_of(("a", 1), ("b", 2), ("b", 33)), TEN), None)
    assert [row[:3] for row in rows_of(tables.close(50))] == [(0, 10, 2), (30, 40, 1)]


def test_without_aggregates_there_are_the_keys_of_each_window() -> None:
    tables = tables_of(TEN_EVERY_TWO, calls=())
    tables.add(with_panes(batch_of(("a", 1), ("b", 3), ("a", 2)), TEN_EVERY_TWO), None)
    assert sorted(rows_of(tables.close(6))) == [
        (-8, 2, "a"),
        *((s, s + 10, k) for s in (-6, -4) for k in "ab"),
    ]


def test_the_window_comes_first_then_keys_then_aggregates() -> None:
    schema = output_schema(SCHEMA, ["k"], CALLS[:1])
    assert schema.names == ["window", "k", "count"]
    assert schema.field("window").type == pa.struct([("start", UTC), ("end", UTC)])
    tables = tables_of(TEN, calls=CALLS[:1])
    tables.add(with_panes(batch_of(("a", 1)), TEN), None)
    [made] = tables.close(10)
    assert made.schema == schema
    assert made.column(0)[0].as_py()["end"] == datetime.datetime.fromtimestamp(0, datetime.UTC) + (
        datetime.timedelta(microseconds=10)
    )


def test_the_end_of_time_closes_everything() -> None:
    tables = tables_of(TEN_EVERY_TWO)
    far = 253_402_300_799_000_000  # the end of the year 9999
    tables.add(with_panes(batch_of(("a", 1), ("a", far)), TEN_EVERY_TWO), None)
    assert len(counts(tables.close(2**63 - 1))) == 10
    assert len(tables) == 0


def test_an_emitted_batch_does_not_change_afterwards() -> None:
    tables = tables_of(TEN_EVERY_TWO)
    tables.add(with_panes(batch_of(("a", 4)), TEN_EVERY_TWO), None)
    made = list(tables.close(6))
    before = rows_of(made)
    tables.add(with_panes(batch_of(("a", 4), ("b", 4)), TEN_EVERY_TWO), 6)
    list(tables.close(20))
    assert rows_of(made) == before


# --- what is freed


def test_closed_windows_leave_nothing_behind() -> None:
    tables = tables_of(TEN, calls=CALLS[:1])
    windows, bytes_held = 0, []
    for begin in range(0, 200_000, 1_000):
        rows = [(key, time) for time in range(begin, begin + 1_000, 10) for key in "ab"]
        tables.add(with_panes(batch_of(*rows), TEN), begin)
        windows += len(rows_of(tables.close(begin + 990))) // 2
        assert tables.pane_count == 1
        bytes_held.append(tables.state_bytes)
    assert windows == 19_999
    assert len(set(bytes_held[1:])) == 1


@pytest.mark.parametrize("window", [TEN, TEN_EVERY_TWO])
def test_keys_that_never_come_again_are_forgotten(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows_module, "_NUMBERS_MIN", 64)
    tables = tables_of(window)
    emitted = []
    for step in range(300):
        rows = [(f"{step}-{i}", 10 * step + i) for i in range(10)]
        tables.add(with_panes(batch_of(*rows), window), 10 * step - 20)
        emitted += counts(tables.close(10 * step - 10))
        assert len(tables._index) <= 4 * 30 + 10
    emitted += counts(tables.close(10**6))
    each = window.size_us // window.slide_us
    assert len(emitted) == 3_000 * each == len({row[:3] for row in emitted})


# --- before the exchange


@pytest.mark.parametrize("window", [TEN, TEN_EVERY_TWO])
@pytest.mark.parametrize("span", [3, 60, 10**9])
@pytest.mark.parametrize("keys", [("k",), (), ("k", "s")])
def test_combined_batches_give_what_records_give(
    window: Window, span: int, keys: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials, "_RECORDS_MIN", 500)
    random = np.random.default_rng(span)
    rows = [
        (
            f"key-{random.integers(3)}",
            int(random.integers(span)),
            int(random.integers(9)),
            "ab"[i % 2],
        )
        for i in range(600)
    ]
    rows[7] = ("key-1", None, 3)
    batch = batch_of(*rows)
    combiner = WindowedPartials(SCHEMA, keys, CALLS, window)
    combined = combiner.combine(batch)
    assert combined.schema.names[: len(keys) + 1] == [*keys, PANE]
    assert is_partial(combined) == (span < 10**9)

    answers = []
    for each in (with_panes(batch, window), combined):
        tables = tables_of(window, keys=keys)
        tables.add(each, None)
        answers.append(sorted(rows_of(tables.close(2**62)), key=str))
    assert answers[0] == answers[1]


# --- against the model


@dataclass
class Model:
    """Every window with the records it has taken; nothing is shared between windows."""

    window: Window
    emits_closed: bool
    taken: dict[tuple[int, str | None], list[tuple]] = field(default_factory=dict)
    watermark_us: int = BEGINNING_US
    late_rows: int = 0

    def starts(self, time: int) -> list[int]:
        last = time - (time - self.window.start_us) % self.window.slide_us
        return list(range(last, time - self.window.size_us, -self.window.slide_us))

    def add(self, rows: list[tuple]) -> dict[tuple, list]:
        touched = set()
        for key, time, value, text in rows:
            if time is None:
                continue
            size = self.window.size_us
            open_ = [s for s in self.starts(time) if s + size > self.watermark_us]
            self.late_rows += not open_
            for start in open_:
                self.taken.setdefault((start, key), []).append((value, text))
                touched.add((start, key))
        return {} if self.emits_closed else {at: self.values(at) for at in touched}

    def close(self, watermark_us: int) -> dict[tuple, list]:
        self.watermark_us = max(watermark_us, self.watermark_us)
        due = [at for at in self.taken if at[0] + self.window.size_us <= watermark_us]
        closed = {at: self.values(at) for at in due}
        for at in due:
            del self.taken[at]
        return closed if self.emits_closed else {}

    def values(self, at: tuple) -> list:
        values = [value for value, _ in self.taken[at] if value is not None]
        texts = [text for _, text in self.taken[at] if text is not None]
        mean = sum(values) / len(values) if values else None
        extremes = [sum(values), min(values), mean] if values else [None] * 3
        return [len(self.taken[at]), *extremes, max(texts) if texts else None]


def by_window(batches: object, window: Window) -> dict[tuple, list]:
    rows = rows_of(batches)
    assert all(end - start == window.size_us for start, end, *_ in rows)
    found = {(start, key): list(values) for start, _, key, *values in rows}
    assert len(found) == len(rows), "a window came twice"
    return found


WINDOWS = st.builds(
    lambda size, slide, start: Window("t", max(size, slide), min(size, slide), start),
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(-7, 7),
)
ROWS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["a", "b", "", "a longer key"]),
        st.none() | st.integers(-60, 60) | st.sampled_from([-(10**15), 10**15]),
        st.none() | st.integers(-5, 5),
        st.none() | st.sampled_from(["x", "y"]),
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

    def __init__(self, window: Window, emits_closed: bool, combines: bool) -> None:
        self._window = window
        self._emits_closed = emits_closed
        self._combines = combines
        self.late_rows = 0
        self.watermark_us: int | None = None
        self.tables = [tables_of(window, emits_closed)]

    def add(self, rows: list[tuple]) -> list[pa.RecordBatch]:
        made = []
        for subtask, tables in enumerate(self.tables):
            batch = batch_of(*(row for row in rows if self._subtask_of(row[0]) == subtask))
            if self._combines:
                combiner = WindowedPartials(SCHEMA, ["k"], CALLS, self._window)
                late = tables.add(combiner.combine(batch), self.watermark_us)
            else:
                late = tables.add(with_panes(batch, self._window), self.watermark_us)
            self.late_rows += late.late_rows
            made += late.outputs
        return made

    def close(self, watermark_us: int) -> list[pa.RecordBatch]:
        if self.watermark_us is None or watermark_us > self.watermark_us:
            self.watermark_us = watermark_us
        return [batch for tables in self.tables for batch in tables.close(watermark_us)]

    def rescale(self, parallelism: int) -> None:
        frozen = [tables.freeze() for tables in self.tables]
        self.add([("a", 10**16, 1, None)])  # what comes after the freeze is not in it
        batches = [found for each in frozen for found in each.batches_by_key_group()]
        for each in frozen:
            each.release()
        self.tables = [tables_of(self._window, self._emits_closed) for _ in range(parallelism)]
        for subtask, tables in enumerate(self.tables):
            owned = key_group_range(subtask, parallelism, MAX_PARALLELISM)
            for group, batch in batches:
                if group in owned:
                    tables.restore(batch)
            tables.resume(self.watermark_us)

    def _subtask_of(self, key: str | None) -> int:
        group = hash_row([key], [pa.string()]) % MAX_PARALLELISM
        return group * len(self.tables) // MAX_PARALLELISM


@pytest.mark.parametrize("emits_closed", [True, False])
@settings(max_examples=tries(250), deadline=None)
@given(window=WINDOWS, steps=STEPS, combines=st.booleans())
def test_any_job_answers_what_the_model_answers(
    emits_closed: bool, window: Window, steps: list, combines: bool
) -> None:
    model, subtasks = Model(window, emits_closed), Subtasks(window, emits_closed, combines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partials, "_RECORDS_MIN", 4)
        patch.setattr(windows_module, "_NUMBERS_MIN", 0)
        for what, given_ in [*steps, ("close", 10**17)]:
            if what == "rescale":
                subtasks.rescale(given_)
                continue
            if what == "add":
                made, expected = subtasks.add(given_), model.add(given_)
            else:
                watermark_us = max(given_, model.watermark_us)
                made, expected = subtasks.close(watermark_us), model.close(watermark_us)
            assert by_window(made, window) == expected
    assert combines or subtasks.late_rows == model.late_rows
    assert all(tables.pane_count == 0 for tables in subtasks.tables)


# --- subtasks that had come differently far


def test_after_a_restore_no_window_is_emitted_again_for_keys_that_were_ahead() -> None:
    """Two subtasks, of which one had seen a watermark that the barrier overtook on the other."""
    ahead, behind = tables_of(TEN_EVERY_TWO), tables_of(TEN_EVERY_TWO)
    halves = [key_group_range(subtask, 2, MAX_PARALLELISM) for subtask in range(2)]
    keys = [_key_in(half) for half in halves]
    for tables, key in zip((ahead, behind), keys, strict=True):
        tables.add(with_panes(batch_of((key, 1), (key, 9)), TEN_EVERY_TWO), None)
    emitted = counts(ahead.close(8)) + counts(behind.close(4))

    both = tables_of(TEN_EVERY_TWO)
    for tables in (ahead, behind):
        for _, batch in tables.freeze().batches_by_key_group():
            both.restore(batch)
    both.resume(4, [(halves[0].start, halves[0].stop, 8)])
    # Under way when the barrier came: late for the one, not for the other.
    under_way = with_panes(batch_of(*((key, -1) for key in keys)), TEN_EVERY_TWO)
    assert both.add(under_way, 4).late_rows == 1
    emitted += counts(both.close(10**6))

    assert len(emitted) == len({row[:3] for row in emitted})
    of_key = {key: {row[:2]: row[3] for row in emitted if row[2] == key} for key in keys}
    assert of_key[keys[0]].keys() == of_key[keys[1]].keys()
    differing = {at for at, count in of_key[keys[0]].items() if of_key[keys[1]][at] != count}
    assert differing == {(-4, 6), (-2, 8)}


def _key_in(groups: range) -> str:
    names = (f"key-{number}" for number in range(100))
    return next(n for n in names if hash_row([n], [pa.string()]) % MAX_PARALLELISM in groups)


def test_a_frozen_window_is_as_it_was() -> None:
    tables = tables_of(TEN_EVERY_TWO)
    tables.add(with_panes(batch_of(("a", 1), ("b", 3)), TEN_EVERY_TWO), None)
    frozen = tables.freeze()
    tables.add(with_panes(batch_of(("a", 1), ("c", 1), ("c", 31)), TEN_EVERY_TWO), None)
    list(tables.close(100))

    rows = [row for _, batch in frozen.batches_by_key_group() for row in batch.to_pylist()]
    assert sorted((row["k"], row[PANE], row["count"]) for row in rows) == [("a", 0, 1), ("b", 2, 1)]
    assert len(frozen) == 2
    frozen.release()
    frozen.release()


def test_a_version_tells_whether_a_snapshot_would_hold_the_same() -> None:
    tables = tables_of(TEN)
    tables.add(with_panes(batch_of(("a", 1)), TEN), None)
    first = tables.version
    tables.add(with_panes(batch_of(), TEN), None)
    list(tables.close(5))
    tables.add(with_panes(batch_of(("a", -100)), TEN), 5)
    assert tables.version == first
    list(tables.close(10))
    assert tables.version != first
