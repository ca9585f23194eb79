"""Processors in a subtask, without a JVM: time, lateness, snapshots, rescaling, other programs."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.types import StructType

from stillframe.errors import DataError, UserCodeError
from stillframe.graph.logical import TimeMode, Transform
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.key_groups import key_group_range
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.runtime.keyed_functions import FIRED_ROWS_MAX
from stillframe.spark.processors.group_states import WithGroupState
from stillframe.spark.processors.programs import ProcessorProgram
from stillframe.spark.processors.rows import python_values, row_maker
from stillframe.testing.clock import ManualClock
from stillframe.testing.hand_fed import HandFed, plainly

INPUT = pa.schema([("k", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
OUTPUT = pa.schema([("k", pa.string()), ("n", pa.int64())])
GROUPS = 16


@pytest.fixture(params=["heap", "disk"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every story is told twice: with states on the heap, and in a database."""
    monkeypatch.setattr(HandFed, "backend", request.param)
    return str(request.param)


class Subtask(HandFed):
    """A processor as an operator, fed by hand."""

    def __init__(
        self,
        processor: StatefulProcessor,
        place: Path,
        mode: TimeMode = "none",
        *,
        in_pandas: bool = False,
        index: int = 0,
        zone: str = "UTC",
        **more: Any,
    ) -> None:
        self.clock = more.pop("clock", None) or ManualClock(wall_ms=1_000)
        about = ProcessorProgram(
            cloudpickle.dumps(processor), "Processor", OUTPUT, mode, zone, in_pandas
        )
        self.made: list[Any] = []

        def make() -> Any:
            self.made.append(about())
            return self.made[-1]

        time = more.pop("time", "at" if mode == "eventTime" else None)
        program = replace(Transform(make, "Processor", ("k",), mode, time), **more)
        super().__init__(program, INPUT, OUTPUT, place, GROUPS, self.clock, index)

    @property
    def processor(self) -> Any:
        return self.made[0]._processor

    def restore(self, files: list[Any], owned: range = range(GROUPS)) -> Subtask:
        self.take_back(files, owned)
        return self


class Count(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        before = self.count.get() or (0,)
        self.count.update((before[0] + len(list(rows)),))
        yield Row(k=key[0], n=self.count.get()[0])

    def close(self) -> None:
        self.closed = True


def test_a_key_is_called_once_per_batch_with_its_rows_in_their_order(tmp_path: Path) -> None:
    class Order(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield Row(k=key[0], n=int("".join(str(row.n) for row in rows)))

    subtask = Subtask(Order(), tmp_path)
    assert subtask.process(("b", 1), ("a", 2), ("b", 3), (None, 4), ("a", 5)) == [
        ("b", 13),
        ("a", 25),
        (None, 4),
    ]
    assert subtask.process(("a", 6), ("c", 7), ("b", 8)) == [("b", 8), ("a", 6), ("c", 7)]


def test_a_processor_need_not_look_at_its_rows(tmp_path: Path) -> None:
    class Blind(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            return iter([Row(k=key[0], n=1)])

    assert Subtask(Blind(), tmp_path).process(("a", 1), ("a", 2)) == [("a", 1)]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 16])
def test_state_and_timers_go_where_their_keys_go(tmp_path: Path, parallelism: int) -> None:
    class Later(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield from super().handleInputRows(key, rows, timerValues)
            self.handle.registerTimer(ord(key[0]))

        def handleExpiredTimer(
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterator[Any]:
            yield Row(k=key.k, n=1000 * self.count.get()[0] + expiredTimerInfo.getExpiryTimeInMs())

    letters = "abcdefghijklmnopqrstuvwxyz"
    subtask = Subtask(Later(), tmp_path, "eventTime")
    subtask.process(*((letter, 1) for letter in letters * 2))
    files = subtask.checkpoint()
    assert {keyed.name for keyed, _ in files} == {"count", "$event_timers"}
    said = []
    for index in range(parallelism):
        again = Subtask(Later(), tmp_path / "again", "eventTime", index=index)
        again.restore(files, key_group_range(SubtaskIndex(index), parallelism, GROUPS))
        said += again.watermark(END_OF_TIME_US)
    assert sorted(said) == [(letter, 2000 + ord(letter)) for letter in letters]


@pytest.mark.parametrize("backend", ["heap"], indirect=True)
def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    subtask = Subtask(Count(), tmp_path)
    subtask.process(("a", 1))
    ((first, _),) = subtask.checkpoint()
    ((second, _),) = subtask.checkpoint()
    subtask.process(("a", 1))
    ((third, _),) = subtask.checkpoint()
    assert first.file == second.file != third.file


def test_a_snapshot_under_way_is_not_changed_by_what_comes_after(tmp_path: Path) -> None:
    class Lists(Count):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.kept = handle.getValueState("kept", "xs array<long>")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            kept = self.kept.get() or ([],)
            yield Row(k=key[0], n=len(kept[0]))
            given = [*kept[0], 1]
            self.kept.update((given,))
            kept[0].append(2)
            given.append(3)

    subtask = Subtask(Lists(), tmp_path)
    subtask.process(("a", 1))
    write = subtask.operator.snapshot(CheckpointId(1))
    subtask.process(("a", 1))
    snapshot = subtask.operator.described(CheckpointId(1), write())
    again = Subtask(Lists(), tmp_path)
    again.restore([(keyed, subtask.store.read(keyed.file.path)) for keyed in snapshot.keyed])
    assert again.process(("a", 1)) == [("a", 1)]
    assert subtask.process(("a", 1)) == [("a", 2)]


# --- time


class Tell(Count):
    """Says the times it is told, in seconds."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            yield Row(k="now", n=timerValues.getCurrentProcessingTimeInMs())
            yield Row(k="watermark", n=timerValues.getCurrentWatermarkInMs())
            if row.n is not None:
                self.handle.registerTimer(row.n)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Any]:
        yield Row(k=f"fired {key[0]}", n=expiredTimerInfo.getExpiryTimeInMs())


@pytest.mark.parametrize(
    ("mode", "told"),
    [("none", (-1, -1)), ("processingTime", (1_000, 2)), ("eventTime", (1_000, 2))],
)
def test_times_are_told_as_spark_tells_them(
    tmp_path: Path, mode: TimeMode, told: tuple[int, int]
) -> None:
    subtask = Subtask(Tell(), tmp_path, mode)
    subtask.watermark(2_999)
    assert subtask.process(("a",)) == [("now", told[0]), ("watermark", told[1])]


def test_event_timers_fire_in_order_when_the_watermark_has_reached_them(tmp_path: Path) -> None:
    subtask = Subtask(Tell(), tmp_path, "eventTime")
    subtask.process(("a", 7), ("b", 5), ("a", 3), ("a", 3))
    assert subtask.watermark(2_999) == []
    assert subtask.watermark(5_000) == [("fired a", 3), ("fired b", 5)]
    assert subtask.watermark(END_OF_TIME_US) == [("fired a", 7)]


def test_processing_timers_fire_by_the_clock_and_not_early(tmp_path: Path) -> None:
    subtask = Subtask(Tell(), tmp_path, "processingTime")
    subtask.process(("a", 1_500), ("b", 1_600))
    assert subtask.operator.due_in_seconds() == 0.5
    subtask.clock.advance(0.499)
    assert plainly(subtask.operator.fire_by_clock()) == []
    subtask.clock.advance(0.001)
    assert plainly(subtask.operator.fire_by_clock()) == [("fired a", 1_500)]
    assert subtask.operator.due_in_seconds() == pytest.approx(0.1)
    assert not subtask.operator.is_due()


def test_a_burst_of_timers_fires_in_parts_between_which_a_checkpoint_is_whole(
    tmp_path: Path,
) -> None:
    subtask = Subtask(Tell(), tmp_path, "eventTime")
    subtask.process(*((f"k{n}", 5) for n in range(3_000)))
    subtask.operator.on_watermark(10_000)
    fired = plainly(subtask.operator.fire())
    assert len(fired) == FIRED_ROWS_MAX
    again = Subtask(Tell(), tmp_path / "again", "eventTime").restore(subtask.checkpoint())
    rest = again.watermark(10_000)
    assert sorted({*fired, *rest}) == sorted({("fired k" + str(n), 5) for n in range(3_000)})
    assert len(fired) + len(rest) == 3_000


@pytest.mark.parametrize("backend", ["heap"], indirect=True)
def test_timers_are_found_again_when_keys_without_state_are_forgotten(tmp_path: Path) -> None:
    subtask = Subtask(Tell(), tmp_path, "eventTime")
    many = ((f"k{n}", None) for n in range(20_000))
    subtask.process(("first", 7), *many, ("last", 5))
    numbers = subtask.operator._states.backend.numbers
    subtask.process(("new", 6))
    assert subtask.operator._states.backend.numbers < 10 < numbers
    assert subtask.watermark(10_000) == [("fired last", 5), ("fired new", 6), ("fired first", 7)]


def test_a_timer_that_fires_is_there_until_it_was_handled_and_a_deleted_one_does_not_fire(
    tmp_path: Path,
) -> None:
    class Deleting(Tell):
        def handleExpiredTimer(
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterator[Any]:
            yield Row(k=str(list(self.handle.listTimers())), n=expiredTimerInfo.getExpiryTimeInMs())
            self.handle.deleteTimer(6)

    subtask = Subtask(Deleting(), tmp_path, "eventTime")
    subtask.process(("a", 5), ("a", 6), ("a", 7))
    assert subtask.watermark(10_000) == [("[5, 6, 7]", 5), ("[7]", 7)]


def test_rows_that_are_not_after_the_watermark_are_late_and_those_without_a_time_never(
    tmp_path: Path,
) -> None:
    def at(us: int) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(us / 1e6, datetime.UTC)

    subtask = Subtask(Count(), tmp_path, "eventTime")
    subtask.watermark(5)
    assert subtask.process(("a", 1, at(5)), ("a", 1, at(6)), ("a", 1, None)) == [("a", 2)]
    assert subtask.process(("b", 1, at(4))) == []
    assert subtask.operator.late_rows == 2
    without = Subtask(Count(), tmp_path, "processingTime")
    without.watermark(5)
    assert without.process(("a", 1, at(5))) == [("a", 1)]


def test_a_value_expires_by_the_clock_of_the_batch(tmp_path: Path) -> None:
    class Expiring(Count):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.count = handle.getValueState("count", "n long", 100)

    subtask = Subtask(Expiring(), tmp_path, "processingTime")
    assert subtask.process(("a", 1)) == [("a", 1)]
    subtask.clock.advance(0.099)
    assert subtask.process(("a", 1)) == [("a", 2)]
    files = subtask.checkpoint()
    subtask.clock.advance(0.1)
    assert subtask.process(("a", 1)) == [("a", 1)]
    later = Subtask(Expiring(), tmp_path, "processingTime", clock=subtask.clock).restore(files)
    assert later.process(("a", 1)) == [("a", 1)]


# --- another program


def test_a_state_that_is_not_declared_any_more_is_kept_until_it_is_deleted(tmp_path: Path) -> None:
    class Other(Count):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.count = handle.getValueState("other", "n long")

    class Deleting(Other):
        def init(self, handle: StatefulProcessorHandle) -> None:
            super().init(handle)
            handle.deleteIfExists("count")

    subtask = Subtask(Count(), tmp_path)
    subtask.process(("a", 1), ("b", 1), ("a", 1))
    other = Subtask(Other(), tmp_path / "other").restore(subtask.checkpoint())
    assert other.process(("a", 1)) == [("a", 1)]
    files = other.checkpoint()
    assert sorted(keyed.name for keyed, _ in files) == ["count", "other"]
    assert Subtask(Count(), tmp_path / "back").restore(files).process(("a", 1)) == [("a", 3)]
    deleting = Subtask(Deleting(), tmp_path / "deleting").restore(files)
    assert deleting.process(("a", 1)) == [("a", 2)]
    assert [keyed.name for keyed, _ in deleting.checkpoint()] == ["other"]


def test_the_initial_state_is_told_to_the_subtasks_that_own_its_keys(tmp_path: Path) -> None:
    class Begun(Count):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            self.count.update((initialState.start,))

    letters = list("abcdefgh")
    table = pa.table({"who": letters, "start": [10] * 8})
    begun = []
    for index in range(3):
        subtask = Subtask(
            Begun(), tmp_path / str(index), index=index, initial=table, initial_keys=("who",)
        )
        subtask.operator.start(key_group_range(SubtaskIndex(index), 3, GROUPS))
        begun.append(dict(subtask.process(*((letter, 1) for letter in letters))))
    for letter in letters:
        assert sorted(said[letter] for said in begun) == [1, 1, 11]


# --- what goes wrong


def test_a_mistake_in_the_processor_names_it(tmp_path: Path) -> None:
    class Wrong(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield Row(k="a", n=1 // 0)

    with pytest.raises(UserCodeError, match="Processor raised ZeroDivisionError"):
        Subtask(Wrong(), tmp_path).process(("a", 1))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "answered None where an iterator of rows is wanted"),
        ([("a", 1)], r"yielded \('a', 1\): transformWithState wants pyspark.sql.Row objects"),
        ([Row(k="a", n="x")], "values for column n that are no int64"),
    ],
)
def test_what_is_no_row_of_the_output_is_refused(tmp_path: Path, made: Any, words: str) -> None:
    class Wrong(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return made

    with pytest.raises((UserCodeError, DataError), match=words):
        Subtask(Wrong(), tmp_path).process(("a", 1))


def test_states_are_declared_in_init_and_timers_need_a_time_mode(tmp_path: Path) -> None:
    class Late(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            self.handle.getValueState("more", "n long")

    class Timed(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            self.handle.registerTimer(1)

    with pytest.raises(UserCodeError, match="after initialization is complete"):
        Subtask(Late(), tmp_path).process(("a", 1))
    with pytest.raises(UserCodeError, match="operation=register_timer with timeMode=none"):
        Subtask(Timed(), tmp_path).process(("a", 1))


def test_a_subtask_that_ends_closes_its_processor(tmp_path: Path) -> None:
    subtask = Subtask(Count(), tmp_path)
    subtask.operator.close()
    assert subtask.processor.closed


# --- rows


def test_rows_are_rows_of_pyspark_whatever_their_fields_are_called() -> None:
    make = row_maker(("count", "a b", "class", "_x", "n"))
    row = make([1, 2, 3, 4, 5])
    spark = Row("count", "a b", "class", "_x", "n")(1, 2, 3, 4, 5)
    assert row == spark
    assert isinstance(row, Row)
    assert row.asDict() == spark.asDict()
    assert repr(row) == repr(spark)
    assert row["count"] == 1
    assert row.count(1) == spark.count(1) == 1
    assert (row.n, row["a b"], row[2]) == (5, 2, 3)
    assert type(cloudpickle.loads(cloudpickle.dumps(row))) is Row
    with pytest.raises(AttributeError):
        _ = row.nothing


@pytest.mark.parametrize(
    ("zone", "offset"), [("GMT+8", "+08:00"), ("UTC-05:30", "-05:30"), ("+01:00", "+01:00")]
)
def test_a_zone_of_the_session_may_be_an_offset_however_it_is_written(
    zone: str, offset: str
) -> None:
    column = pa.array([datetime.datetime(2024, 7, 1, tzinfo=datetime.UTC)])

    [found] = python_values(column, zone)
    assert found.isoformat() == column.cast(pa.timestamp("us", offset))[0].as_py().isoformat()


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_instants_come_in_the_zone_of_the_session_also_in_the_hour_that_comes_twice(
    zone: str,
) -> None:
    # On 3 November 2024 the clocks of New York went back at 06:00 UTC.
    begin = datetime.datetime(2024, 11, 3, 4, tzinfo=datetime.UTC)
    times = [begin + datetime.timedelta(minutes=15 * n) for n in range(20)]
    column = pa.array(times, pa.timestamp("us", "UTC"))
    found = python_values(column, zone)
    expected = column.cast(pa.timestamp("us", zone)).to_pylist()
    assert [(t, t.fold, str(t.tzinfo)) for t in found] == [
        (t, t.fold, str(t.tzinfo)) for t in expected
    ]


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "GMT+9"])
def test_frames_have_times_without_a_zone_and_an_index_of_their_own(
    tmp_path: Path, zone: str
) -> None:
    class Frames(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            (frame,) = rows
            assert list(frame.columns) == ["k", "n", "at"]
            assert list(frame.index) == list(range(len(frame)))
            frame["n"] = frame["n"] * 10
            hour = frame["at"].dt.hour
            yield pd.DataFrame({"n": frame["n"] + hour, "k": frame["k"]})
            yield pd.DataFrame({"n": [], "k": []})

    noon = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC)
    subtask = Subtask(Frames(), tmp_path, in_pandas=True, zone=zone)
    said = subtask.process(("b", 1, noon), ("a", 2, noon), ("b", 3, noon))
    assert said == [("b", 31), ("b", 51), ("a", 41)]


def test_a_frame_may_have_more_columns_than_were_declared_and_none_of_their_names(
    tmp_path: Path,
) -> None:
    class More(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield pd.DataFrame({"more": ["x"], "n": [1], "k": ["named"]})
            yield pd.DataFrame([("placed", 2, "more")])
            yield pd.DataFrame()

    said = Subtask(More(), tmp_path, in_pandas=True).process(("a", 1))
    assert said == [("named", 1), ("placed", 2)]


def test_a_frame_with_other_columns_is_refused(tmp_path: Path) -> None:
    class Wrong(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield pd.DataFrame({"n": [1], "other": [2]})

    with pytest.raises(DataError, match="Processor declared k string, n int64 but gave back"):
        Subtask(Wrong(), tmp_path, in_pandas=True).process(("a", 1))


def test_frames_of_many_keys_are_put_together_and_keep_their_values(tmp_path: Path) -> None:
    """Together with a missing one, pandas would make floats of whole numbers."""
    large = 2**60 + 1

    class Ids(Count):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            ids = [large] if key[0] != "b" else [None]
            yield pd.DataFrame({"k": [key[0]], "n": pd.Series(ids, dtype=KINDS.get(key[0]))})

    said = Subtask(Ids(), tmp_path, in_pandas=True).process(("a", 1), ("b", 2), ("c", 3), ("d", 4))
    assert said == [("a", large), ("b", None), ("c", large), ("d", large)]


KINDS = {"a": "int64", "b": "float64", "c": "object", "d": "Int64"}


def test_an_end_of_something_else_loses_no_row_of_a_function_with_a_state(tmp_path: Path) -> None:
    """`map` takes a StopIteration of the function that it calls for its own end."""

    def one(frame: pd.DataFrame) -> pd.DataFrame:
        return next(iter(()))

    def lazy(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Any:
        return map(one, frames)

    function = WithGroupState(
        lazy,
        StructType().add("n", "long"),
        GroupStateTimeout.NoTimeout,
        INPUT.names,
        has_watermark=False,
    )
    with pytest.raises(UserCodeError, match="Processor raised StopIteration"):
        Subtask(function, tmp_path, "processingTime", in_pandas=True).process(("a", 1))
