"""Processors of single keys in a subtask: states of all kinds, timers of both clocks, snapshots."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stillframe import KeyProcessor, KeyStates
from stillframe.errors import DataError, StartRefused, StillframeError, UserCodeError
from stillframe.graph.logical import Transform
from stillframe.ids import SubtaskIndex
from stillframe.key_groups import key_group_range
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.runtime.key_processing import KeyProgram
from stillframe.state.backends import VALUE
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.testing.clock import ManualClock
from stillframe.testing.hand_fed import HandFed, plainly

INPUT = pa.schema([("k", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
OUTPUT = pa.schema([("k", pa.string()), ("said", pa.string())])
GROUPS = 16
LETTERS = "abcdefghij"


@pytest.fixture(params=["heap", "disk"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every story is told twice: with states on the heap, and in a database."""
    monkeypatch.setattr(HandFed, "backend", request.param)
    return str(request.param)


class Subtask(HandFed):
    """A processor as an operator, fed by hand."""

    def __init__(
        self,
        make: Any,
        place: Path,
        *,
        index: int = 0,
        clock: ManualClock | None = None,
        schema: pa.Schema = OUTPUT,
    ) -> None:
        self.clock = clock or ManualClock(wall_ms=1_000_000)
        program = Transform(KeyProgram(make, "Processor", schema), "Processor", ("k",), "both")
        super().__init__(program, INPUT, schema, place, GROUPS, self.clock, index)

    def restore(self, files: list[Any], owned: range = range(GROUPS)) -> Subtask:
        self.take_back(files, owned)
        return self


def rows_kept(files: list[Any], name: str) -> list[dict[str, Any]]:
    """What a snapshot holds of this state."""
    return [
        row
        for keyed, buffer in files
        if keyed.name == name
        for batch in read_keyed_snapshot(pa.py_buffer(buffer), keyed.key_groups, range(GROUPS))
        for row in batch.to_pylist()
    ]


class Everything(KeyProcessor):
    """Keeps the same numbers in states of all kinds, and says what is in them."""

    def open(self, states: KeyStates) -> None:
        self.last = states.value("last", "n long, at timestamp, seen array<struct<n: long>>")
        self.all = states.list("all", "n long")
        self.by_parity = states.map("by_parity", "is_even boolean", "n long")
        self.most = states.reducing("most", "n long", max)
        self.mean = states.aggregating(
            "mean",
            "total double, count long",
            lambda kept, n: (n, 1) if kept is None else (kept.total + n, kept.count + 1),
            lambda kept: kept.total / kept.count,
        )
        self.counter = states.opaque("counter")

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        counter = self.counter.get() or Counter()
        for row in rows:
            before = self.last.get()
            seen = [*([] if before is None else before.seen), {"n": row.n}]
            self.last.update((row.n, row.at, seen))
            self.all.append((row.n,))
            self.by_parity.put((row.n % 2 == 0,), (row.n,))
            self.most.add((row.n,))
            self.mean.add(row.n)
            counter[row.n] += 1
        self.counter.update(counter)
        yield {"k": key.k, "said": self.said()}

    def said(self) -> str:
        parts = [
            [each.n for each in self.last.get().seen],
            [each.n for each in self.all.get()],
            sorted((user_key.is_even, row.n) for user_key, row in self.by_parity.items()),
            self.most.get().n,
            self.mean.get(),
            sorted(self.counter.get().items()),
        ]
        return " ".join(map(str, parts))


def test_states_of_all_kinds_remember_what_their_key_put_in(tmp_path: Path) -> None:
    subtask = Subtask(Everything, tmp_path)

    subtask.process(("a", 1), ("b", 7), ("a", 4))
    said = subtask.process(("a", 3), ("b", 7))

    assert said == [
        ("a", "[1, 4, 3] [1, 4, 3] [(False, 3), (True, 4)] 4 2.6666666666666665"
              " [(1, 1), (3, 1), (4, 1)]"),
        ("b", "[7, 7] [7, 7] [(False, 7)] 7 7.0 [(7, 2)]"),
    ]  # fmt: skip


class Totals(KeyProcessor):
    """Keeps columns of numbers until a timer of the key clears them."""

    def open(self, states: KeyStates) -> None:
        self.states = states
        reductions = {"n": "sum", "last": "max"}
        self.totals = states.reducing("totals", "n long, last timestamp", reductions)

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            self.totals.add((row.n, row.at))
            self.states.register_timer(datetime(2024, 1, 1, tzinfo=UTC))
        yield key.k, f"{self.totals.get().n} {self.totals.get()['last']:%H:%M %Z}"

    def on_timer(self, key: Any, time: datetime, clock: str) -> Iterator[Any]:
        yield key.k, f"{self.totals.get().n} at last"
        self.totals.clear()
        assert not self.totals.exists()


def test_reductions_with_names_come_back_and_are_cleared_by_timers(tmp_path: Path) -> None:
    noon = datetime(2023, 12, 31, 12, tzinfo=UTC)
    before = Subtask(Totals, tmp_path)
    assert before.process(("a", 1, noon), ("b", 5, noon), ("a", None, None)) == [
        ("a", "1 12:00 UTC"),
        ("b", "5 12:00 UTC"),
    ]
    files = before.checkpoint()
    assert sorted(row["k"] for row in rows_kept(files, "totals")) == ["a", "b"]

    after = Subtask(Totals, tmp_path / "after").restore(files)
    later = noon + timedelta(minutes=5)
    assert after.process(("a", 10, later)) == [("a", "11 12:05 UTC")]
    assert sorted(after.watermark(END_OF_TIME_US)) == [("a", "11 at last"), ("b", "5 at last")]
    assert rows_kept(after.checkpoint(), "totals") == []
    assert after.process(("a", 2, noon)) == [("a", "2 12:00 UTC")]


class Zeros(KeyProcessor):
    """Says which key it was given, and which rows."""

    def open(self, states: KeyStates) -> None:
        self.states = states

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        self.states.register_timer(datetime(2024, 1, 1, tzinfo=UTC))
        yield key.x, " ".join(str(row.x) for row in rows)

    def on_timer(self, key: Any, time: datetime, clock: str) -> Iterator[Any]:
        yield key.x, "timer"


def test_minus_zero_and_zero_are_the_key_zero_and_their_rows_keep_what_they_have(
    tmp_path: Path,
) -> None:
    numbers, said = pa.schema([("x", pa.float64())]), pa.schema([("x", pa.float64()), OUTPUT[1]])
    program = Transform(KeyProgram(Zeros, "Zeros", said), "Zeros", ("x",), "both")
    clock = ManualClock(wall_ms=1_000_000)
    subtask = HandFed(program, numbers, said, tmp_path, GROUPS, clock, 0)

    answers = subtask.process((-0.0,), (0.0,), (math.nan,), (-math.nan,))

    assert list(map(str, answers)) == ["(0.0, '-0.0 0.0')", "(nan, 'nan nan')"]
    fired = subtask.watermark(END_OF_TIME_US)
    assert sorted(map(str, fired)) == ["(0.0, 'timer')", "(nan, 'timer')"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ttl": "1 hour"}, "has a ttl, '1 hour', and a reduction with a name, 'sum'"),
        ({"ttl_refresh": "read and write"}, "and no ttl: give it a ttl"),
    ],
)
def test_reductions_with_names_do_not_expire(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    class Expiring(Totals):
        def open(self, states: KeyStates) -> None:
            states.reducing("totals", "n long", "sum", **settings)

    with pytest.raises(UserCodeError, match=words):
        Subtask(Expiring, tmp_path)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_states_of_all_kinds_go_where_their_keys_go(tmp_path: Path, parallelism: int) -> None:
    before = Subtask(Everything, tmp_path)
    before.process(*((letter, n) for letter in LETTERS for n in range(3)))
    files = before.checkpoint()

    said = []
    for index in range(parallelism):
        place = tmp_path / f"{parallelism}-{index}"
        owned = key_group_range(SubtaskIndex(index), parallelism, GROUPS)
        after = Subtask(Everything, place, index=index).restore(files, owned)
        keys = {row["k"] for state in ("last",) for row in rows_kept(after.checkpoint(), state)}
        said += after.process(*((letter, 3) for letter in sorted(keys)))

    expected = before.process(*((letter, 3) for letter in LETTERS))
    assert sorted(said) == sorted(expected)


def test_a_state_is_cleared_for_one_key_and_no_other(tmp_path: Path) -> None:
    class Clearing(Everything):
        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            rows = iter(list(rows))
            yield from super().process(key, rows)
            if key.k == "a":
                for state in (self.last, self.all, self.by_parity, self.most, self.mean):
                    state.clear()
                self.counter.clear()

    subtask = Subtask(Clearing, tmp_path)
    subtask.process(("a", 1), ("b", 1))

    kept = subtask.checkpoint()

    names = {keyed.name for keyed, _ in kept}
    assert names == {"last", "all", "by_parity", "most", "mean", "counter"}
    assert all(row["k"] == "b" for name in names for row in rows_kept(kept, name))


def test_rows_and_states_have_names_and_instants_are_in_utc(tmp_path: Path) -> None:
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)

    class Newest(KeyProcessor):
        def open(self, states: KeyStates) -> None:
            self.newest = states.value("newest", "at timestamp")

        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            for row in rows:
                kept = self.newest.get()
                if kept is None or row["at"] > kept.at:
                    self.newest.update((row.at,))
            yield key.k, str(self.newest.get().at)

    subtask = Subtask(Newest, tmp_path)

    later = noon + timedelta(microseconds=1)
    assert subtask.process(("a", 1, later), ("a", 2, noon)) == [("a", str(later))]
    again = Subtask(Newest, tmp_path).restore(subtask.checkpoint())
    assert again.process(("a", 3, noon)) == [("a", str(later))]


def test_a_processor_may_answer_nothing_and_very_much(tmp_path: Path) -> None:
    class Uneven(KeyProcessor):
        def process(self, key: Any, rows: Iterator[Any]) -> Any:
            if key.k is None:
                return None
            return ((key.k, str(n)) for n in range(next(rows).n))

    subtask = Subtask(Uneven, tmp_path)

    said = subtask.process((None, 1), ("a", 10_000), ("b", 2))

    assert Counter(key for key, _ in said) == {"a": 10_000, "b": 2}


# --- the row in hand


class CountsAndFails(KeyProcessor):
    """Reads and writes its count for every row; a negative number clears it, 13 is bad luck."""

    def open(self, states: KeyStates) -> None:
        self.states = states
        self.count = states.value("count", "n long")
        self.total = states.aggregating(
            "total",
            "n long",
            lambda kept, n: (n if kept is None else kept.n + n,),
            lambda kept: kept.n,
        )

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            if row.n == 13:
                raise ValueError("bad luck")
            kept = self.count.get()
            self.count.update((1 if kept is None else kept.n + 1,))
            self.total.add(row.n)
            if row.n < 0:
                self.count.clear()
            if row.at is not None:
                self.states.register_timer(row.at)
            yield key.k, str(self.count.get() and self.count.get().n)

    def on_timer(self, key: Any, time: datetime, clock: str) -> Iterator[Any]:
        kept = self.count.get()
        self.count.update((100 if kept is None else kept.n + 100,))
        yield key.k, f"timer {self.count.get().n} of {self.total.get()}"


def counts_in(files: list[Any]) -> dict[str, int]:
    return {row["k"]: row[VALUE]["n"] for row in rows_kept(files, "count")}


def test_every_row_of_a_key_sees_what_the_one_before_it_wrote(tmp_path: Path) -> None:
    subtask = Subtask(CountsAndFails, tmp_path)

    said = subtask.process(("a", 1), ("b", 1), ("a", 1), ("a", -1), ("a", 1), ("b", 1))

    assert Counter(said) == Counter(
        [("a", "1"), ("a", "2"), ("a", "None"), ("a", "1"), ("b", "1"), ("b", "2")]
    )
    assert subtask.process(("a", 1), ("b", -1)) == [("a", "2"), ("b", "None")]
    assert subtask.process(("b", 1)) == [("b", "1")]


def test_a_snapshot_between_two_batches_has_all_that_was_written_until_then(
    tmp_path: Path,
) -> None:
    subtask = Subtask(CountsAndFails, tmp_path)
    taken = []
    for _ in range(5):
        subtask.process(*[(letter, 1) for letter in LETTERS * 3])
        taken.append(subtask.checkpoint())
        subtask.process(("a", -1))

    assert counts_in(taken[0]) == dict.fromkeys(LETTERS, 3)
    assert counts_in(taken[4]) == {**dict.fromkeys(LETTERS, 15), "a": 3}
    again = Subtask(CountsAndFails, tmp_path / "again").restore(taken[4])
    assert again.process(("a", 1), ("b", 1)) == [("a", "4"), ("b", "16")]


def test_a_timer_changes_what_the_next_rows_read_and_reads_what_the_last_ones_wrote(
    tmp_path: Path,
) -> None:
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    subtask = Subtask(CountsAndFails, tmp_path)
    subtask.process(("a", 1, noon), ("a", 1, noon + timedelta(seconds=1)), ("b", 5, noon))

    fired = subtask.watermark(END_OF_TIME_US)

    assert Counter(fired) == Counter(
        [("a", "timer 102 of 2"), ("b", "timer 101 of 5"), ("a", "timer 202 of 2")]
    )
    assert subtask.operator.timers_fired == 3
    assert subtask.process(("a", 1), ("b", 1)) == [("a", "203"), ("b", "102")]


def test_after_an_exception_no_key_is_at_hand_and_no_other_key_has_got_what_was(
    tmp_path: Path,
) -> None:
    subtask = Subtask(CountsAndFails, tmp_path)
    subtask.process(("a", 1), ("b", 1))

    with pytest.raises(UserCodeError, match="Processor raised ValueError: bad luck"):
        subtask.process(("a", 1), ("a", 1), ("b", 13))

    assert subtask.process(("b", 1), ("c", 1)) == [("b", "2"), ("c", "1")]


def test_a_key_that_looks_different_from_row_to_row_is_seen_as_it_came(tmp_path: Path) -> None:
    class Signs(KeyProcessor):
        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            yield "k", " ".join(f"{row.k}" for row in rows)

    schema = pa.schema([("k", pa.float64()), ("n", pa.int64())])
    program = Transform(KeyProgram(Signs, "Signs", OUTPUT), "Signs", ("k",), "both")
    fed = HandFed(program, schema, OUTPUT, tmp_path, GROUPS, ManualClock(wall_ms=1))

    assert fed.process((0.0, 1), (-0.0, 2)) == [("k", "0.0 -0.0")]

    keys_only = HandFed(program, schema.remove(1), OUTPUT, tmp_path, GROUPS, ManualClock(wall_ms=1))
    assert keys_only.process((0.0,), (-0.0,)) == [("k", "0.0 -0.0")]


def test_rows_that_are_all_key_come_as_often_as_they_came_by_name_and_in_their_order(
    tmp_path: Path,
) -> None:
    class Says(KeyProcessor):
        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            yield key.a, " ".join(f"{row.n}{row.a}" for row in rows)

    schema = pa.schema([("n", pa.int64()), ("a", pa.string())])
    program = Transform(KeyProgram(Says, "Says", OUTPUT), "Says", ("a", "n"), "both")
    fed = HandFed(program, schema, OUTPUT, tmp_path, GROUPS, ManualClock(wall_ms=1))

    said = fed.process((1, "x"), (2, "y"), (1, "x"), (1, None), (1, "x"))
    assert sorted(said, key=str) == [("x", "1x 1x 1x"), ("y", "2y"), (None, "1None")]


# --- time to live


class Remembers(KeyProcessor):
    """Says whether it has seen the key, without writing that down a second time."""

    refresh: Any = "write"

    def open(self, states: KeyStates) -> None:
        self.seen = states.opaque("seen", ttl="10 seconds", ttl_refresh=self.refresh)

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        known = self.seen.get()
        if known is None:
            self.seen.update({"since": 1})
        yield key.k, "again" if known else "new"


class KeepsWhatIsRead(Remembers):
    refresh = "read and write"


def test_a_read_begins_the_time_to_live_anew_if_reads_count(tmp_path: Path) -> None:
    said = {}
    for make in (Remembers, KeepsWhatIsRead):
        subtask = Subtask(make, tmp_path / make.__name__)
        for _ in range(4):
            said.setdefault(make, []).extend(word for _, word in subtask.process(("a",)))
            subtask.clock.advance(6)

    assert said[Remembers] == ["new", "again", "new", "again"]
    assert said[KeepsWhatIsRead] == ["new", "again", "again", "again"]


@pytest.mark.parametrize("make", [Remembers, KeepsWhatIsRead])
def test_what_has_expired_is_neither_in_a_snapshot_nor_in_what_is_restored(
    tmp_path: Path, make: Any
) -> None:
    subtask = Subtask(make, tmp_path)
    subtask.process(("a",))
    alive = subtask.checkpoint()
    subtask.clock.advance(10)
    subtask.process(("b",))

    assert [row["k"] for row in rows_kept(subtask.checkpoint(), "seen")] == ["b"]
    again = Subtask(make, tmp_path / "again", clock=subtask.clock).restore(alive)
    assert again.process(("a",)) == [("a", "new")]


# --- opaque state


class Untouchable:
    """Counts how often it was unpickled."""

    made = 0

    def __reduce__(self) -> Any:
        return Untouchable._made, ()

    @staticmethod
    def _made() -> Untouchable:
        Untouchable.made += 1
        return Untouchable()


class KeepsUntouchable(KeyProcessor):
    def open(self, states: KeyStates) -> None:
        self.kept = states.opaque("kept")

    def process(self, key: Any, rows: Iterator[Any]) -> None:
        if self.kept.get() is None:
            self.kept.update(Untouchable())


class Plain(KeyProcessor):
    """Has another state, or the same one with a schema."""

    def __init__(self, name: str = "other", schema: str = "n long") -> None:
        self.declared = name, schema

    def open(self, states: KeyStates) -> None:
        self.state = states.value(*self.declared)

    def process(self, key: Any, rows: Iterator[Any]) -> None:
        self.state.get()


def test_an_object_is_unpickled_only_by_a_program_that_declares_it_opaque(tmp_path: Path) -> None:
    subtask = Subtask(KeepsUntouchable, tmp_path)
    subtask.process(("a", 1))
    files = subtask.checkpoint()
    Untouchable.made = 0

    carrying = Subtask(Plain, tmp_path / "carried").restore(files)
    carrying.process(("a", 1))
    files = carrying.checkpoint()
    assert Untouchable.made == 0

    Subtask(KeepsUntouchable, tmp_path / "back").restore(files).process(("a", 1))
    assert Untouchable.made == 1


def test_bytes_of_a_state_with_a_schema_are_never_taken_for_a_pickle(tmp_path: Path) -> None:
    class Bytes(Plain):
        def process(self, key: Any, rows: Iterator[Any]) -> None:
            self.state.update((pickle.dumps(Untouchable()),))

    subtask = Subtask(partial(Bytes, "kept", "pickled binary"), tmp_path)
    subtask.process(("a", 1))

    with pytest.raises(StartRefused, match="cannot become"):
        Subtask(KeepsUntouchable, tmp_path / "again").restore(subtask.checkpoint())
    with pytest.raises(UserCodeError, match="which only opaque states have"):
        Subtask(partial(Bytes, "kept", "`$pickled` binary not null"), tmp_path)


def test_a_change_of_an_object_is_kept_when_it_is_put_back_and_not_before(tmp_path: Path) -> None:
    class Changes(KeyProcessor):
        def open(self, states: KeyStates) -> None:
            self.kept = states.opaque("kept")

        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            if not self.kept.exists():
                self.kept.update([0])
            held = self.kept.get()
            held.append(1)
            yield key.k, str(self.kept.get())
            self.kept.update(held)
            held.append(2)

    subtask = Subtask(Changes, tmp_path)

    assert subtask.process(("a",)) == [("a", "[0]")]
    assert subtask.process(("a",)) == [("a", "[0, 1]")]


def test_a_snapshot_shows_of_an_object_nothing_but_its_bytes(tmp_path: Path) -> None:
    subtask = Subtask(KeepsUntouchable, tmp_path)
    subtask.process(("a", 1))

    (row,) = rows_kept(subtask.checkpoint(), "kept")

    assert list(row[VALUE]) == ["$pickled"]
    assert isinstance(row[VALUE]["$pickled"], bytes)


# --- timers


class Alarm(KeyProcessor):
    """A timer of either clock for each row; says when it fires."""

    def open(self, states: KeyStates) -> None:
        self.states = states
        self.count = states.value("count", "n long")

    def process(self, key: Any, rows: Iterator[Any]) -> None:
        for row in rows:
            if row.at is not None:
                self.states.register_timer(row.at)
            if row.n is not None:
                when = self.states.now + timedelta(milliseconds=row.n)
                self.states.register_timer(when, "processing")

    def on_timer(self, key: Any, time: datetime, clock: str) -> Iterator[Any]:
        count = (self.count.get() or (0,))[0] + 1
        self.count.update((count,))
        yield key.k, f"{clock} {time:%S.%f} {count}"


def at(time_us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)


def test_timers_of_both_clocks_fire_each_by_its_own_and_never_early(tmp_path: Path) -> None:
    subtask = Subtask(Alarm, tmp_path)
    subtask.process(("a", 500, at(2_000_001)), ("b", None, at(1_000_000)), ("a", None, at(1)))

    assert subtask.watermark(2_000_001) == [
        ("a", "event 00.001000 1"),
        ("b", "event 01.000000 1"),
    ]
    assert subtask.watermark(2_001_000) == [("a", "event 02.001000 2")]
    assert subtask.operator.due_in_seconds() == 0.5
    subtask.clock.advance(0.5)
    assert plainly(subtask.operator.fire_by_clock()) == [("a", "processing 40.500000 3")]
    assert subtask.operator.due_in_seconds() is None


def test_timers_of_both_clocks_are_in_the_snapshot_and_the_end_fires_those_of_event_time(
    tmp_path: Path,
) -> None:
    subtask = Subtask(Alarm, tmp_path)
    subtask.process(*((letter, 500, at(10**9)) for letter in LETTERS))
    files = subtask.checkpoint()

    again = Subtask(Alarm, tmp_path / "again", clock=subtask.clock).restore(files)
    ended = again.watermark(END_OF_TIME_US)
    assert sorted(key for key, _ in ended) == list(LETTERS)
    again.clock.advance(1)
    assert sorted(key for key, _ in plainly(again.operator.fire_by_clock())) == list(LETTERS)


def test_a_key_lists_and_deletes_its_own_timers(tmp_path: Path) -> None:
    class Tidy(Alarm):
        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            super().process(key, rows)
            first, *_ = self.states.timers()
            self.states.delete_timer(first)
            left = [f"{time:%S}" for time in self.states.timers()]
            yield key.k, f"{left} {len(list(self.states.timers('processing')))}"

    subtask = Subtask(Tidy, tmp_path)
    said = subtask.process(("a", 5, at(3 * 10**6)), ("a", 6, at(2 * 10**6)), ("b", None, at(10**6)))

    assert said == [("a", "['03'] 2"), ("b", "[] 0")]
    assert subtask.watermark(10**7) == [("a", "event 03.000000 1")]


def test_the_watermark_is_none_before_anybody_knows_and_the_last_time_at_the_end(
    tmp_path: Path,
) -> None:
    class Tell(KeyProcessor):
        def open(self, states: KeyStates) -> None:
            self.states = states

        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            yield key.k, str(self.states.watermark)

    subtask = Subtask(Tell, tmp_path)

    told = []
    for reached in (None, 5, END_OF_TIME_US):
        if reached is not None:
            subtask.watermark(reached)
        told += [said for _, said in subtask.process(("a",))]

    assert told == [
        "None",
        "1970-01-01 00:00:00.000005+00:00",
        "9999-12-31 23:59:59.999999+00:00",
    ]


# --- mistakes


def opening(declare: Any) -> Any:
    class Declares(KeyProcessor):
        def open(self, states: KeyStates) -> None:
            declare(states)

        def process(self, key: Any, rows: Iterator[Any]) -> None:
            return None

    return Declares


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda s: s.value("v", 7), "schema of state v is a StructType or a DDL string, not 7"),
        (lambda s: s.value("v", "n lung"), "Unsupported data type 'LUNG'"),
        (lambda s: s.value("$v", "n long"), "choose a name without"),
        (lambda s: (s.value("v", "n long"), s.opaque("v")), "already been defined"),
        (lambda s: s.value("v", "n long", ttl="soon"), "such as '1 hour' .* not 'soon'"),
        (lambda s: s.value("v", "n long", ttl=3_000), "such as '1 hour' .* not 3000"),
        (lambda s: s.list("v", "n long", ttl=timedelta(0)), "a millisecond or more"),
        (lambda s: s.value("v", "n long", ttl_refresh="read"), "'write' or 'read and write'"),
        (lambda s: s.opaque("v", ttl_refresh="read and write"), "and no ttl: give it a ttl"),
        (lambda s: s.value("v", "n long").get(), "Implicit key not found"),
        (lambda s: s.register_timer(at(5)), "Implicit key not found"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_sentence(
    tmp_path: Path, declare: Any, says: str
) -> None:
    with pytest.raises(StillframeError, match=says):
        Subtask(opening(declare), tmp_path)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda p: p.states.value("late", "n long"), "declare all states in open"),
        (lambda p: p.states.opaque("late"), "declare all states in open"),
        (lambda p: p.states.register_timer(datetime(2024, 1, 1)), "with a time zone"),
        (lambda p: p.states.register_timer(5), "with a time zone"),
        (lambda p: p.states.timers("wall"), "'event' or 'processing', not 'wall'"),
        (lambda p: p.value.update(("x",)), "'x' is no whole number"),
        (lambda p: p.opaque.update(lambda: 1), "cannot be pickled"),
        (lambda p: 1 / 0, "Processor raised ZeroDivisionError"),
    ],
)
def test_a_mistake_while_rows_are_handled_names_what_is_wrong(
    tmp_path: Path, use: Any, says: str
) -> None:
    class Mistaken(KeyProcessor):
        def open(self, states: KeyStates) -> None:
            self.states = states
            self.value, self.opaque = states.value("v", "n long"), states.opaque("o")

        def process(self, key: Any, rows: Iterator[Any]) -> None:
            use(self)

    with pytest.raises(UserCodeError, match=says):
        Subtask(Mistaken, tmp_path).process(("a", 1))


def test_rows_that_do_not_fit_the_output_are_refused(tmp_path: Path) -> None:
    class Wrong(KeyProcessor):
        def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
            yield key.k, 7, 8

    with pytest.raises(DataError, match="declared k string, said string but gave back 3 values"):
        Subtask(Wrong, tmp_path).process(("a", 1))


def test_timers_need_somebody_to_call(tmp_path: Path) -> None:
    class Deaf(Alarm):
        on_timer = KeyProcessor.on_timer

    subtask = Subtask(Deaf, tmp_path)
    subtask.process(("a", None, at(5)))

    with pytest.raises(UserCodeError, match="registers timers but has no on_timer: write it"):
        subtask.watermark(10_000)


def test_what_makes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="made a dict: process wants what makes a KeyProcessor"):
        Subtask(dict, tmp_path)
