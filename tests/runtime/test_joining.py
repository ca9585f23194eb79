"""Joins of two streams, against a model that looks at every pair of rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.graph.expressions import Call, Column, Expression, Literal
from stillframe.graph.logical import Join, JoinKind, JoinSide
from stillframe.graph.plan import Edge, PlannedOperator, Rebalance
from stillframe.graph.time_bounds import time_bounds
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of, subtask_of_key_group
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.manifests import Manifest, OperatorDescription, OperatorSnapshot
from stillframe.protocol.restore import SubtaskState, starting_state
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import Watermark
from stillframe.runtime.joining import Joining
from stillframe.runtime.outputs import EdgeOutput
from stillframe.state import joins
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import open_store

UTC = pa.timestamp("us", "UTC")
UID = OperatorUid("join")
GROUPS = 8
KINDS: tuple[JoinKind, ...] = ("inner", "left", "right", "full", "semi")
Row = tuple[Any, int | None, int]
"""A key, an event time and a number."""


def schema_of(side: str, key: pa.DataType) -> pa.Schema:
    return pa.schema([(f"{side}k", key), (f"{side}t", UTC), (f"{side}n", pa.int64())])


def batch_of(schema: pa.Schema, rows: Iterable[Row]) -> pa.RecordBatch:
    listed = list(rows)
    columns = [
        pa.array([row[0] for row in listed], schema.field(0).type),
        pa.array([row[1] for row in listed], pa.int64()).cast(UTC),
        pa.array([row[2] for row in listed], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def moved(name: str, by_us: int) -> Expression:
    numbers = (pa.scalar(part, pa.int64()) for part in (0, 0, by_us))
    interval = (*map(Literal, numbers), Literal(pa.scalar("UTC")))
    return Call("add_interval", (Column(name, UTC), *interval), UTC)


def all_of(*parts: Expression) -> Expression:
    whole = parts[0]
    for part in parts[1:]:
        whole = Call("and", (whole, part), pa.bool_())
    return whole


def within(earliest_us: int | None, latest_us: int | None, *further: Expression) -> Expression:
    """The right time is so much after the left one, and what else is said."""
    bounds = []
    if earliest_us is not None:
        arguments = (moved("lt", earliest_us), Column("rt", UTC))
        bounds.append(Call("less_equal", arguments, pa.bool_()))
    if latest_us is not None:
        arguments = (Column("rt", UTC), moved("lt", latest_us))
        bounds.append(Call("less_equal", arguments, pa.bool_()))
    return all_of(*bounds, *further)


NUMBERS_RISE = Call("less_equal", (Column("ln", pa.int64()), Column("rn", pa.int64())), pa.bool_())


def join_of(how: JoinKind, condition: Expression | None) -> Join:
    bounds = time_bounds(condition, "lt", "rt")
    return Join(
        how,
        JoinSide(("lk",), "lt"),
        JoinSide(("rk",), "rt"),
        bounds.earliest_us,
        bounds.latest_us,
        condition,
    )


class Running:
    """The subtasks of a join, and the checkpoints they are asked for."""

    def __init__(
        self,
        home: Path,
        join: Join,
        key: pa.DataType,
        parallelism: int = 1,
        state: Mapping[Any, SubtaskState] | None = None,
        attempt: int = 1,
    ) -> None:
        self.schemas = (schema_of("l", key), schema_of("r", key))
        fields = [*self.schemas[0], *(() if join.how == "semi" else self.schemas[1])]
        self._home = home
        self._attempt = attempt
        self._checkpoint = 0
        self.join = join
        self._key = key
        self._store = open_store(str(home))
        self.operators = [
            self._operator(pa.schema(fields), subtask, parallelism, state or {})
            for subtask in range(parallelism)
        ]

    def _operator(
        self, schema: pa.Schema, subtask: int, parallelism: int, states: Mapping[Any, SubtaskState]
    ) -> Joining:
        state = states.get((UID, subtask), SubtaskState())
        place = (UID, SubtaskIndex(subtask), Attempt(self._attempt))
        operator = Joining(*place, self.join, self.schemas, schema, self._store, GROUPS, state)
        owned = key_group_range(subtask, parallelism, GROUPS)
        for name in {keyed.name for keyed in state.keyed}:
            operator.restore(name, self._rows(state, name, owned))
        return operator

    def _rows(self, state: SubtaskState, name: str, owned: range) -> Iterator[pa.RecordBatch]:
        for keyed in state.keyed:
            if keyed.name == name:
                file = keyed.file
                buffer = self._store.read_verified(file.path, file.length_bytes, file.crc32)
                yield from read_keyed_snapshot(buffer, keyed.key_groups, owned)

    def feed(self, side: int, rows: Iterable[Row]) -> list[tuple[Any, ...]]:
        batch = batch_of(self.schemas[side], rows)
        groups = key_groups_of(hash_columns([batch.column(0)]), GROUPS)
        owners = subtask_of_key_group(groups, len(self.operators), GROUPS)
        made: list[tuple[Any, ...]] = []
        for subtask, operator in enumerate(self.operators):
            part = batch.filter(pa.array(owners == subtask))
            process = operator.process if side == 0 else operator.process_second
            made += rows_of(process(part))
        return made

    def advance(self, time_us: int) -> list[tuple[Any, ...]]:
        return [row for each in self.operators for row in rows_of(each.on_watermark(time_us))]

    def snapshots(self) -> list[OperatorSnapshot]:
        self._checkpoint += 1
        number = CheckpointId(self._checkpoint)
        taken = [(each, each.snapshot(number)) for each in self.operators]
        described = [each.described(number, write()) for each, write in taken]
        for each in self.operators:
            each.completed(number)
        return described

    def restarted(self, parallelism: int) -> Running:
        """As a job goes on after a failure, with as many subtasks."""
        return self.restored(self.snapshots(), parallelism)

    def restored(self, described: list[OperatorSnapshot], parallelism: int) -> Running:
        described = [
            OperatorSnapshot.from_json(json.loads(json.dumps(each.to_json()))) for each in described
        ]
        operator = OperatorDescription(UID, "join", "join", parallelism)
        manifest = Manifest(
            "job", Attempt(1), CheckpointId(1), 1, "checkpoint", 0, 0, GROUPS, (), described
        )
        state = starting_state([operator], GROUPS, manifest, {})
        again = Running(self._home, self.join, self._key, parallelism, state, self._attempt + 1)
        return again

    @property
    def late_rows(self) -> int:
        return sum(each.late_rows for each in self.operators)

    @property
    def state_rows(self) -> int:
        return sum(each.state_rows for each in self.operators)


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    made = []
    for batch in batches:
        columns = [
            column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
            for column in batch.columns
        ]
        made += list(zip(*(column.to_pylist() for column in columns), strict=True))
    return made


# --- against the model


@dataclass
class Model:
    """Every row that was in time, and what must have come out in the end."""

    how: str
    earliest_us: int | None
    latest_us: int | None
    numbers_rise: bool
    sides: tuple[list[Row], list[Row]] = field(default_factory=lambda: ([], []))
    watermark_us: int | None = None
    late_rows: int = 0

    def feed(self, side: int, rows: Iterable[Row]) -> None:
        for row in rows:
            if self.watermark_us is None or row[1] is None or row[1] > self.watermark_us:
                self.sides[side].append(row)
            else:
                self.late_rows += 1

    def matches(self, left: Row, right: Row) -> bool:
        if left[0] is None or left[0] != right[0] or None in (left[1], right[1]):
            return False
        apart = right[1] - left[1]
        return (
            (self.earliest_us is None or self.earliest_us <= apart)
            and (self.latest_us is None or apart <= self.latest_us)
            and (not self.numbers_rise or left[2] <= right[2])
        )

    def result(self) -> Counter[tuple[Any, ...]]:
        lefts, rights = self.sides
        pairs = [(a, b) for a in lefts for b in rights if self.matches(a, b)]
        if self.how == "semi":
            return Counter(left for left in lefts if any(a is left for a, _ in pairs))
        made = Counter((*a, *b) for a, b in pairs)
        if self.how in ("left", "full"):
            alone = (a for a in lefts if not any(each is a for each, _ in pairs))
            made.update((*row, None, None, None) for row in alone)
        if self.how in ("right", "full"):
            alone = (b for b in rights if not any(each is b for _, each in pairs))
            made.update((None, None, None, *row) for row in alone)
        return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows do here what many do elsewhere."""
    monkeypatch.setattr(joins, "PAIRS_MAX", 3)
    monkeypatch.setattr(joins, "_LITTLE_ROWS", 24)
    monkeypatch.setattr(joins, "_CHUNKS_MAX", 6)
    monkeypatch.setattr(joins, "_PAIRS_PER_ROW_MAX", 1)


KEYS = {"number": pa.int64(), "text": pa.string(), "float": pa.float64()}
times = st.one_of(st.integers(0, 60), st.integers(0, 60), st.none())


def rows_strategy(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, int | None]]]:
    return st.lists(st.tuples(keys, times), max_size=6)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    kind = draw(st.sampled_from(sorted(KEYS)))
    values: dict[str, list[Any]] = {
        "number": [1, 2, 3, None],
        "text": ["a", "bb", "", None],
        "float": [0.5, 1.5, None],
    }
    keys = st.sampled_from(values[kind])
    step = st.one_of(
        st.tuples(st.just("left"), rows_strategy(keys)),
        st.tuples(st.just("right"), rows_strategy(keys)),
        st.tuples(st.just("time"), st.integers(0, 70)),
        st.tuples(st.just("restart"), st.integers(1, 3)),
    )
    return kind, draw(st.lists(step, max_size=25))


bounds_strategy = st.one_of(
    st.just((None, None)),
    st.tuples(st.integers(-20, 10), st.integers(0, 30)).map(lambda b: (b[0], b[0] + b[1])),
    st.integers(-20, 20).map(lambda us: (us, None)),
    st.integers(-20, 20).map(lambda us: (None, us)),
)


@pytest.mark.parametrize("how", KINDS)
@settings(max_examples=tries(150), deadline=None)
@given(script=scripts(), bounds=bounds_strategy, numbers_rise=st.booleans())
def test_whatever_comes_in_whatever_order_the_pairs_are_those_of_a_nested_loop(
    tmp_path_factory: pytest.TempPathFactory,
    how: JoinKind,
    script: tuple[str, list[tuple[str, Any]]],
    bounds: tuple[int | None, int | None],
    numbers_rise: bool,
) -> None:
    kind, steps = script
    if bounds == (None, None):  # else the model would have to know who compares times
        numbers_rise = False
    condition = (
        within(*bounds, *([NUMBERS_RISE] if numbers_rise else []))
        if any(us is not None for us in bounds)
        else None
    )
    model = Model(how, *bounds, numbers_rise)
    join = join_of(how, condition)
    running = Running(tmp_path_factory.mktemp("join"), join, KEYS[kind])
    number, late = 0, 0
    made: Counter[tuple[Any, ...]] = Counter()
    for step, given_ in [*steps, ("time", END_OF_TIME_US)]:
        if step == "time":
            made.update(running.advance(given_))
            model.watermark_us = max(given_, model.watermark_us or 0)
        elif step == "restart":
            late += running.late_rows
            running = running.restarted(given_)
        else:
            side = 0 if step == "left" else 1
            numbered = [(*row, number + place) for place, row in enumerate(given_)]
            number += len(numbered)
            if bounds == (None, None):
                numbered = [row if row[1] is not None else (row[0], 99, row[2]) for row in numbered]
            made.update(running.feed(side, numbered))
            model.feed(side, numbered)

    assert made == model.result()
    assert late + running.late_rows == model.late_rows
    assert running.state_rows == 0


# --- stories


def started(
    home: Path,
    how: JoinKind = "inner",
    condition: Expression | None = None,
    key: pa.DataType | None = None,
) -> Running:
    """Right rows match left ones up to ten microseconds after."""
    condition = within(0, 10) if condition is None else condition
    return Running(home, join_of(how, condition), pa.string() if key is None else key)


def test_a_row_meets_those_that_came_before_it_and_those_that_come_after(tmp_path: Path) -> None:
    running = started(tmp_path)
    assert running.feed(0, [("a", 5, 0)]) == []
    assert running.feed(1, [("a", 7, 1), ("a", 16, 2), ("b", 7, 3)]) == [("a", 5, 0, "a", 7, 1)]
    assert running.feed(0, [("a", 6, 4)]) == [
        ("a", 6, 4, "a", 7, 1),
        ("a", 6, 4, "a", 16, 2),
    ]


def test_an_unmatched_row_comes_out_when_nothing_can_match_it_and_not_before(
    tmp_path: Path,
) -> None:
    running = started(tmp_path, "left")
    running.feed(0, [("a", 5, 0), ("b", 8, 1)])
    assert running.advance(14) == []  # a right row at 15 would match the first
    assert running.advance(15) == [("a", 5, 0, None, None, None)]
    assert running.feed(1, [("b", 18, 2)]) == [("b", 8, 1, "b", 18, 2)]
    assert running.advance(17) == []
    assert running.state_rows == 2  # a left row at 18 would match the right one
    assert running.advance(18) == []
    assert running.state_rows == 0


def test_rows_that_came_together_come_out_one_after_the_other_and_once(tmp_path: Path) -> None:
    running = started(tmp_path, "left")
    running.feed(0, [("a", us, us) for us in range(10)])
    for us in range(10):
        assert running.advance(us + 10) == [("a", us, us, None, None, None)]
    assert running.state_rows == 0


def test_rows_of_a_side_without_a_bound_wait_for_the_end(tmp_path: Path) -> None:
    running = started(tmp_path, "full", within(0, None))
    running.feed(0, [("a", 5, 0)])
    running.feed(1, [("b", 6, 1)])
    # Nothing says how long after a left row its matches may be.
    assert running.advance(1_000_000) == [(None, None, None, "b", 6, 1)]
    assert running.advance(END_OF_TIME_US) == [("a", 5, 0, None, None, None)]


def test_null_keys_match_nothing_and_come_out_of_outer_joins_at_once(tmp_path: Path) -> None:
    running = started(tmp_path, "full")
    assert running.feed(0, [(None, 5, 0)]) == [(None, 5, 0, None, None, None)]
    assert running.feed(1, [(None, 5, 1)]) == [(None, None, None, None, 5, 1)]
    assert running.state_rows == 0


def test_a_row_without_event_time_matches_nothing_where_times_are_compared(
    tmp_path: Path,
) -> None:
    running = started(tmp_path, "left")
    assert running.feed(0, [("a", None, 0)]) == [("a", None, 0, None, None, None)]
    assert running.feed(1, [("a", None, 1)]) == []
    assert running.state_rows == 0
    assert running.late_rows == 0


@pytest.mark.parametrize("how", KINDS)
def test_a_row_that_is_not_after_the_watermark_is_dropped_and_counted(
    tmp_path: Path, how: JoinKind
) -> None:
    running = started(tmp_path, how)
    running.feed(0, [("a", 12, 0)])
    running.advance(20)
    assert running.feed(1, [("a", 20, 1)]) == []
    assert running.late_rows == 1
    made = running.feed(1, [("a", 21, 2)])
    assert [row[2] for row in made] == [0]
    assert running.late_rows == 1


def test_a_semi_join_gives_each_left_row_once(tmp_path: Path) -> None:
    running = started(tmp_path, "semi")
    running.feed(0, [("a", 5, 0), ("a", 6, 1)])
    assert running.feed(1, [("a", 7, 2), ("a", 7, 3)]) == [("a", 5, 0), ("a", 6, 1)]
    assert running.feed(1, [("a", 8, 4)]) == []
    assert running.feed(0, [("a", 7, 5), ("b", 7, 6)]) == [("a", 7, 5)]
    assert running.advance(END_OF_TIME_US) == []


def test_a_semi_join_remembers_over_a_restart_what_has_come_out(tmp_path: Path) -> None:
    running = started(tmp_path, "semi")
    running.feed(0, [("a", 5, 0), ("b", 5, 1)])
    assert running.feed(1, [("a", 7, 2)]) == [("a", 5, 0)]
    again = running.restarted(2)
    assert again.feed(1, [("a", 8, 3), ("b", 8, 4)]) == [("b", 5, 1)]


def test_a_semi_join_gives_a_row_once_however_many_match_it(tmp_path: Path) -> None:
    running = started(tmp_path, "semi")
    for _ in range(3):
        running.feed(1, [("a", 5, 0)] * 5)
    assert running.feed(0, [("a", 5, 1), ("a", 5, 2)]) == [("a", 5, 1), ("a", 5, 2)]
    again = started(tmp_path, "semi", within(0, 1))
    again.feed(0, [("a", 5, 1), ("a", 8, 2)])
    many = [("a", us, 0) for us in (4, 5, 6, 7, 8) * 4]
    assert sorted(again.feed(1, many)) == [("a", 5, 1), ("a", 8, 2)]


def test_a_match_changes_what_is_written_of_a_semi_join(tmp_path: Path) -> None:
    running = started(tmp_path, "semi")
    running.feed(0, [("a", 5, 0)])
    running.snapshots()
    assert running.feed(1, [("a", 6, 1)]) == [("a", 5, 0)]
    assert running.restarted(1).feed(1, [("a", 6, 2)]) == []


def test_not_a_number_is_a_key_and_there_are_not_two_zeros(tmp_path: Path) -> None:
    running = started(tmp_path, key=pa.float64())
    running.feed(0, [(float("nan"), 5, 0), (0.0, 5, 1)])
    made = running.feed(1, [(float("nan"), 5, 2), (-0.0, 5, 3)])
    assert sorted((row[2], row[5]) for row in made) == [(0, 2), (1, 3)]


def test_keys_are_compared_where_hashes_cannot_be_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_alike(columns: Any) -> Any:
        return np.full(len(columns[0].lengths), 7, dtype=np.uint64)

    monkeypatch.setattr(joins, "hash_key_columns", all_alike)
    running = started(tmp_path)
    running.feed(0, [("a", 5, 0), ("b", 5, 1)])
    assert running.feed(1, [("b", 5, 2), ("c", 5, 3)]) == [("b", 5, 1, "b", 5, 2)]


def test_dictionary_encoded_columns_are_joined_as_others(tmp_path: Path) -> None:
    running = started(tmp_path)
    plain = batch_of(running.schemas[0], [("a", 5, 0), ("b", 5, 1)])
    encoded = pa.record_batch(
        [plain.column(0).dictionary_encode(), *plain.columns[1:]], names=plain.schema.names
    )
    [operator] = running.operators
    assert rows_of(operator.process(encoded)) == []
    assert running.feed(1, [("b", 6, 2)]) == [("b", 5, 1, "b", 6, 2)]


def test_what_comes_out_has_the_schema_that_was_planned(tmp_path: Path) -> None:
    for how in KINDS:
        running = started(tmp_path / how, how)
        [operator] = running.operators
        made = [
            *operator.process(batch_of(running.schemas[0], [("a", 5, 0), (None, 5, 1)])),
            *operator.process_second(batch_of(running.schemas[1], [("a", 5, 2), ("b", 5, 3)])),
            *operator.on_watermark(END_OF_TIME_US),
        ]
        expected = [*running.schemas[0], *(() if how == "semi" else running.schemas[1])]
        assert {tuple(batch.schema) for batch in made} == {tuple(expected)}


def test_behind_a_join_time_is_as_far_as_the_oldest_row_that_may_come_out(tmp_path: Path) -> None:
    def after(condition: Expression) -> int:
        [operator] = started(tmp_path, "inner", condition).operators
        return operator.time_after(100)

    assert after(within(0, 10)) == 90  # a left row waits so long
    assert after(within(-30, 10)) == 70  # a right one longer
    assert after(within(-10, -5)) == 90
    assert after(within(5, 10)) == 90
    assert after(within(-5, 0)) == 95


def test_the_chain_says_that_time_to_what_is_behind_it_also_after_a_restart(
    tmp_path: Path,
) -> None:
    def told(running: Running, tell: Callable[[Chain], None]) -> list[Any]:
        channel = LocalChannel(1 << 20)
        schema = pa.schema([*running.schemas[0], *running.schemas[1]])
        edge = Edge(0, "edge", 0, 1, Rebalance(), schema, 1, 1, 0)
        output = EdgeOutput(edge, SubtaskIndex(0), [channel], GROUPS)
        planned = PlannedOperator(UID, running.join, running.schemas[0], schema, (), (0,))
        tell(Chain([planned], running.operators, {0: output}))
        return [channel.take()]

    running = started(tmp_path)
    assert told(running, lambda chain: chain.advance(100)) == [Watermark(90)]
    again = running.restarted(1)
    assert told(again, lambda chain: chain.resume_time()) == [Watermark(90)]


def test_the_end_of_time_is_the_end_behind_a_join_too(tmp_path: Path) -> None:
    [operator] = started(tmp_path).operators
    assert operator.time_after(END_OF_TIME_US) == END_OF_TIME_US


def test_the_side_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    running = started(tmp_path)
    running.feed(0, [("a", 5, 0)])
    running.feed(1, [("b", 5, 1)])
    files = {}
    for checkpoint in (1, 2):
        [snapshot] = running.snapshots()
        files[checkpoint] = {keyed.name: keyed.file.path for keyed in snapshot.keyed}
        running.feed(0, [("c", 5, 2)])
    assert files[1].keys() == files[2].keys() == {"left", "right"}
    assert files[1]["right"] == files[2]["right"]
    assert files[1]["left"] != files[2]["left"]


def test_a_match_changes_what_is_written_of_an_outer_side(tmp_path: Path) -> None:
    running = started(tmp_path, "left")
    running.feed(0, [("a", 5, 0)])
    running.snapshots()
    running.feed(1, [("a", 6, 1)])
    again = running.restarted(1)
    assert again.advance(END_OF_TIME_US) == []


def test_what_changes_after_the_barrier_is_not_in_the_snapshot(tmp_path: Path) -> None:
    running = started(tmp_path, "left")
    [operator] = running.operators
    running.feed(0, [("a", 5, 0), ("b", 5, 1)])
    write = operator.snapshot(CheckpointId(1))
    running.feed(1, [("a", 6, 2)])
    running.advance(16)
    again = running.restored([operator.described(CheckpointId(1), write())], 1)
    assert sorted(again.advance(16)) == [
        ("a", 5, 0, None, None, None),
        ("b", 5, 1, None, None, None),
    ]


def test_a_row_that_was_late_for_its_subtask_stays_late_after_a_rescale(tmp_path: Path) -> None:
    running = started(tmp_path, "left").restarted(2)
    names = [f"k{number}" for number in range(40)]
    running.operators[0].watermark_us = 10
    list(running.operators[1].on_watermark(30))  # its barrier overtook the others' watermark
    again = running.restarted(1)
    assert again.operators[0].watermark_us == 10
    again.feed(0, [(name, 20, number) for number, name in enumerate(names)])
    groups = key_groups_of(hash_columns([pa.array(names)]), GROUPS)
    ahead = subtask_of_key_group(groups, 2, GROUPS) == 1
    assert again.late_rows == int(ahead.sum()) > 0
    assert again.state_rows == int((~ahead).sum()) > 0
    again.advance(30)
    assert again.feed(0, [(name, 31, 0) for name in names]) == []
    assert again.late_rows == int(ahead.sum())


def test_a_contradiction_pairs_nothing(tmp_path: Path) -> None:
    running = started(tmp_path, "full", within(10, 5))
    running.feed(0, [("a", number, number) for number in range(20)])
    running.feed(1, [("a", number, number) for number in range(20)])
    made = running.advance(END_OF_TIME_US)
    assert len(made) == 40
    assert all(None in row for row in made)


def test_times_at_the_ends_of_what_numbers_reach_are_joined(tmp_path: Path) -> None:
    running = started(tmp_path)
    far = [-(2**62), 0, 2**62]
    running.feed(0, [("a", us, place) for place, us in enumerate(far)] * 3)
    made = running.feed(1, [("a", us, place) for place, us in enumerate(far)])
    assert Counter((row[2], row[5]) for row in made) == {(0, 0): 3, (1, 1): 3, (2, 2): 3}
