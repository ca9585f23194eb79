"""PySpark's StatefulProcessor on real local Spark: compared with Spark's own, and with a kill."""

from __future__ import annotations

import datetime
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import time as clock_seconds
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.errors import BuildError
from stillframe.graph.logical import Transform
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0
COLUMNS = "k string, n long, at timestamp, xs array<long>"
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("n", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("xs", pa.list_(pa.int64())),
    ]
)
SAID = "k string, what string, n long"
FIRST = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)
END_SECOND = 10_000


# --- Processors, as one writes them for Spark -----------------------------------------------------


class Processor(StatefulProcessor):
    def close(self) -> None: ...


class CountRows(Processor):
    """A value: how many rows, and the largest number."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        handle.deleteIfExists("of an older program")
        self.seen = handle.getValueState("seen", "rows int NOT NULL, largest long, by array<long>")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        (k,) = key
        count, largest, last = self.seen.get() if self.seen.exists() else (0, None, None)
        yield Row(k=k, what=f"before: {last}", n=largest)
        for row in rows:
            count += 1
            largest = row.n if largest is None else max(largest, row["n"])
            last = row.xs
            if row.asDict()["n"] == 7:
                self.seen.clear()
                yield Row(n=row[1], what="cleared", k=k)
                return
        self.seen.update((count, largest, last))
        yield Row(k=k, what=f"count {timerValues.getCurrentProcessingTimeInMs()}", n=count)
        yield Row(k=k, what="only some fields")


class CountFrames(Processor):
    """The same in pandas."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "rows long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        count = self.seen.get()[0] if self.seen.exists() else 0
        for frame in rows:
            count += len(frame)
            first = frame["at"].iloc[0]
            yield pd.DataFrame(
                {"what": [str(first), repr(list(frame.columns))], "n": [count, None], "k": key[0]}
            )
        self.seen.update((count,))


class ListsAndMaps(Processor):
    """What is in a list and in a map, after adding to both and taking from both."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.last = handle.getListState(
            "last", "n long, row struct<xs: array<long>, at: timestamp>"
        )
        self.by = handle.getMapState("by", "n long, s string", "times int, ns array<long>")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            at = None if row.at is None else row.at.replace(tzinfo=None)
            self.last.appendValue((row.n, (row.xs, at)))
            found = self.by.getValue((row.n % 3, None))
            times, ns = (0, []) if found is None else (found.times, found.ns)
            ns.append(row.n)
            self.by.updateValue((row.n % 3, None), (times + 1, ns))
            if row.n % 10 == 0:
                self.last.put([(-1, None), (-2, (None, None))])
                self.by.removeKey((row.n % 3, None))
            if row.n % 10 == 5:
                self.last.clear()
                self.by.clear()
        (k,) = key
        yield Row(k=k, what=f"list {list(self.last.get())}", n=int(self.last.exists()))
        yield Row(k=k, what=f"map {sorted(self.by.iterator())}", n=int(self.by.exists()))
        yield Row(k=k, what=f"{sorted(self.by.keys())} {sorted(self.by.values())}", n=None)
        yield Row(k=k, what="has 1", n=int(self.by.containsKey((1, None))))


class Sessions(Processor):
    """A timer 5 seconds after the newest row of a key; earlier ones are deleted."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.rows = handle.getValueState("rows", "rows long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        count = self.rows.get()[0] if self.rows.exists() else 0
        timers = list(self.handle.listTimers())
        for row in rows:
            count += 1
            if row.at is not None and row.n >= 0:
                timers.append(int(row.at.timestamp() * 1000) + 5000)
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        if timers:
            self.handle.registerTimer(max(timers))
        self.rows.update((count,))
        watermark = timerValues.getCurrentWatermarkInMs()
        yield Row(k=key[0], what=f"rows at {watermark}", n=count)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Any]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        assert list(self.handle.listTimers()) == [expiry]
        assert expiry <= timerValues.getCurrentWatermarkInMs()
        yield Row(k=key.k, what=f"over at {expiry}", n=self.rows.get()[0])
        self.rows.clear()


class Prompt(Processor):
    """A timer of processing time that is due at once."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.kept = handle.getValueState("kept", "n long", ttlDurationMs=3_600_000)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        before = self.kept.get() or (0,)
        self.kept.update((before[0] + sum(row.n for row in rows),))
        assert timerValues.getCurrentWatermarkInMs() == 0
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 3_600_000)
        return iter([])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Any]:
        for timer in list(self.handle.listTimers()):
            if timer != expiredTimerInfo.getExpiryTimeInMs():
                self.handle.deleteTimer(timer)
        yield Row(k=key[0], what="said", n=self.kept.get()[0])


class Forgets(Processor):
    """What it keeps has expired when the next batch comes, and is there until then."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "n long", ttlDurationMs=1)
        self.list = handle.getListState("list", "n long", ttlDurationMs=1)
        self.map = handle.getMapState("map", "n long", "n long", ttlDurationMs=1)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        before = self.kept()
        for row in rows:
            self.value.update((row.n,))
            self.list.appendValue((row.n,))
            self.map.updateValue((row.n % 5,), (row.n,))
        yield Row(k=key[0], what=f"{before} {self.kept()}", n=self.value.get()[0])
        while clock_seconds() * 1000 < timerValues.getCurrentProcessingTimeInMs() + 3:
            """So that the next batch is later than this one by the clock."""

    def kept(self) -> Any:
        pairs = sorted((k[0], v[0]) for k, v in self.map.iterator())
        exists = [state.exists() for state in (self.value, self.list, self.map)]
        return exists, self.value.get(), [tuple(row) for row in self.list.get()], pairs


class Begun(Processor):
    """Goes on with what it is told at the beginning."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        before = self.total.get() or (0,)
        self.total.update((before[0] * 10 + initialState.start,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        before = self.total.get() or (0,)
        self.total.update((before[0] + len(list(rows)),))
        yield Row(k=key[0], what="total", n=self.total.get()[0])


# --- As Spark's own streams do it -----------------------------------------------------------------


def scripted(batches: int) -> list[list[dict[str, Any]]]:
    """Some keys, null among them; some rows come late, some without a time."""
    chance = random.Random(5)
    made = []
    for number in range(batches):
        batch: list[dict[str, Any]] = []
        for _ in range(25):
            second = number * 10 + chance.randrange(10) - chance.choice([0, 0, 0, 4, 30])
            key = chance.choice(["a", "b", "c", f"only {number}", None])
            xs = chance.choice([None, [], [1, None]])
            at = None if chance.random() < 0.1 else moment(second)
            batch.append({"k": key, "n": chance.randrange(40), "at": at, "xs": xs})
        made.append(batch)
    # Spark fires no timer for the end of the input: event time must pass them all.
    end = {"k": "end", "n": -1, "at": moment(END_SECOND), "xs": None}
    return [*made, [end], [{**end, "k": "after", "at": moment(END_SECOND + 10)}]]


def moment(second: int) -> str:
    return (FIRST + datetime.timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def states_of_spark(spark: SparkSession) -> Iterator[None]:
    """Spark's transformWithState keeps its states in RocksDB only."""
    pytest.importorskip("google.protobuf", reason="Spark's transformWithState needs protobuf")
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    yield
    spark.conf.unset("spark.sql.streaming.stateStore.providerClass")


def of_spark(batches: Any, make: Any) -> Counter[Any]:
    return Counter(tuple(row) for row in batches.of_spark(make))


def of_spark_without_rest(batches: Any, make: Any) -> Counter[Any]:
    """With timers of processing time Spark runs micro-batches all the time: a row for each key of
    a batch is waited for."""
    said: list[Any] = []
    came = threading.Condition()

    def take(frame: Any, number: int) -> None:
        rows = frame.collect()
        with came:
            said.extend(tuple(row) for row in rows)
            came.notify()

    query = batches.spark_writer(make).foreachBatch(take).start()
    expected = 0
    try:
        for batch in batches.given_to_spark():
            expected += len({row["k"] for row in batch})
            with came:
                assert came.wait_for(lambda: len(said) >= expected, WAIT_SECONDS_MAX)  # noqa: B023
        return Counter(said)
    finally:
        query.stop()


def of_stillframe(batches: Any, make: Any) -> Counter[Any]:
    rows = batches.of_stillframe(make)
    return Counter((row["k"], row["what"], row["n"]) for row in rows)


def rows_of(processor: StatefulProcessor, mode: str = "none", **more: Any) -> Any:
    return lambda rows: rows.groupBy("k").transformWithState(
        processor, SAID, "Append", mode, **more
    )


@pytest.mark.slow
@pytest.mark.usefixtures("states_of_spark")
@pytest.mark.parametrize(
    ("run", "make"),
    [
        (of_spark, rows_of(CountRows())),
        (
            of_spark,
            lambda rows: rows.groupBy("k").transformWithStateInPandas(
                CountFrames(), SAID, "append", "None"
            ),
        ),
        (of_spark, rows_of(ListsAndMaps())),
        (
            of_spark,
            lambda rows: rows_of(Sessions(), "eventTime")(rows.withWatermark("at", "6 seconds")),
        ),
        (of_spark_without_rest, rows_of(Prompt(), "processingTime")),
        (of_spark_without_rest, rows_of(Forgets(), "processingTime")),
    ],
    ids=["value", "pandas", "list and map", "event timers", "processing timers and TTL", "expiry"],
)
def test_a_processor_says_what_it_says_in_spark_also_after_a_kill(
    batches_of: Any, run: Any, make: Any
) -> None:
    batches = batches_of(SCHEMA, scripted(5))
    expected = run(batches, make)
    assert of_stillframe(batches, make) == expected
    assert len(expected) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("states_of_spark")
def test_a_processor_begins_with_the_initial_state_once(
    spark: SparkSession, batches_of: Any
) -> None:
    begin = spark.createDataFrame(
        [("a", 1), ("a", 2), ("b", 3), (None, 4), ("nobody", 5)], "who string, start long"
    )
    make = rows_of(Begun(), initialState=begin.groupBy("who"))
    batches = batches_of(SCHEMA, scripted(4))
    expected = of_spark(batches, make)
    assert of_stillframe(batches, make) == expected
    firsts = {k: n for (k, _, n) in sorted(expected, key=lambda row: -row[2])}
    assert firsts["c"] < 10 < firsts["a"]


# --- With a kill ----------------------------------------------------------------------------------

RECORDS = 40_000
"""So many that the first checkpoint comes before the last of them, also where slots start so slowly
that half of the rows are due at once."""


class EveryView(Processor):
    """Says of each view the how-manieth of its app it is: to lose or repeat one would show."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.views = handle.getReducingState(  # type: ignore[attr-defined]
            "views", "n long", lambda a, b: (a[0] + b[0],)
        )

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for _ in rows:
            self.views.add((1,))
            yield Row(app_id=key[0], n=self.views.get()[0])


@pytest.mark.slow
@pytest.mark.parametrize("unaligned", ["false", "true"])
def test_every_row_is_counted_once_after_a_kill(
    spark: SparkSession, still: Still, tmp_path: Path, unaligned: str
) -> None:
    events: list[Event] = []
    clicks = (
        still.readStream.format("clicks")
        .options(records=RECORDS, partitions=2, apps=20, batchRows=250, recordsPerSecond=10_000)
        .load()
    )
    counted = clicks.groupBy("app_id").transformWithState(
        EveryView(), "app_id string, n long", "Append", "None"
    )
    query = (
        counted.writeStream.queryName("views")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("restartDelay", "100 ms")
        .option("restartAttempts", "10")
        .option("parallelism", "2")
        .option("unalignedCheckpoints", unaligned)
        .start()
    )

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, CheckpointCompleted) and event.checkpoint_id == 1:
            os.kill(query.slot_pids[1], signal.SIGKILL)

    query.add_listener(listen)
    assert query.awaitTermination(WAIT_SECONDS_MAX), [str(event) for event in events]
    assert [e for e in events if isinstance(e, AttemptStarted) and e.restored_from]
    said: dict[str, list[int]] = {}
    for row in pq.read_table(tmp_path / "out").to_pylist():
        said.setdefault(row["app_id"], []).append(row["n"])
    assert all(sorted(numbers) == list(range(1, len(numbers) + 1)) for numbers in said.values())
    assert sum(map(len, said.values())) == RECORDS


# --- What is built, and refused -------------------------------------------------------------------


@pytest.fixture
def rows(still: Still, tmp_path: Path) -> Stream:
    (tmp_path / "rows.json").write_text('{"k": "a"}\n')
    return still.readStream.schema(COLUMNS).json(str(tmp_path / "rows.json"))


def test_the_event_time_is_that_of_the_watermark(rows: Stream) -> None:
    watched = rows.withWatermark("at", "6 seconds")
    for mode, time in (("EventTime", "at"), ("ProcessingTime", None), ("None", None)):
        operator = rows_of(CountRows(), mode)(watched).node.operator
        assert isinstance(operator, Transform)
        assert (operator.time, operator.keys) == (time, ("k",))


def test_the_output_may_have_an_event_time_for_windows_behind_it(rows: Stream) -> None:
    made = (
        rows.withWatermark("at", "6 seconds")
        .groupBy("k")
        .transformWithState(
            Sessions(), "k string, at timestamp", "Append", "EventTime", eventTimeColumnName="at"
        )
    )
    counts = made.groupBy(F.window("at", "5 seconds")).count()
    assert counts.columns == ["window", "count"]
    with pytest.raises(BuildError, match="eventTimeColumnName is 'when', and the output has k"):
        rows_of(Sessions(), "EventTime", eventTimeColumnName="when")(rows)


class BadSchema(CountRows):
    def init(self, handle: StatefulProcessorHandle) -> None:
        handle.getValueState("seen", "rows whole number")


class Expiring(CountRows):
    def init(self, handle: StatefulProcessorHandle) -> None:
        handle.getValueState("seen", "rows long", 1000)


class Twice(CountRows):
    def init(self, handle: StatefulProcessorHandle) -> None:
        handle.getValueState("seen", "rows long")
        handle.getListState("seen", "rows long")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (rows_of(CountRows(), "sometimes"), "Unknown time mode sometimes"),
        (rows_of(BadSchema()), "BadSchema cannot be used: the schema 'rows whole number'"),
        (rows_of(Expiring()), "Cannot use TTL for state=seen in timeMode=none"),
        (rows_of(Twice()), "State variable with name seen has already been defined"),
        (rows_of(CountRows), "takes an object of a class that extends"),  # type: ignore[arg-type]
        (
            lambda rows: rows.groupBy().transformWithState(CountRows(), SAID, "Append", "None"),
            "transformWithState needs keys",
        ),
        (
            lambda rows: rows.groupBy("k").transformWithState(CountRows(), SAID, "most", "None"),
            "Unknown output mode most",
        ),
        (
            lambda rows: rows.groupBy("k").transformWithState(
                CountRows(), SAID, "Complete", "None"
            ),
            "use Append or Update",
        ),
        (
            lambda rows: rows_of(Begun(), initialState=rows.groupBy("k"))(rows),
            "initialState takes a grouped DataFrame",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(
    rows: Stream, make: Any, words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        make(rows)


def test_an_initial_state_has_keys_of_the_same_types(spark: SparkSession, rows: Stream) -> None:
    begin = spark.createDataFrame([(1, 2)], "who long, start long").groupBy("who")
    with pytest.raises(BuildError, match="group both by columns of the same types"):
        rows_of(Begun(), initialState=begin)(rows)
