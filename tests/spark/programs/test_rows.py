"""Programs of Spark's Structured Streaming guide that give rows: run by Spark, and here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from guide import (
    BOTH_REFUSE,
    Inputs,
    Outcome,
    Program,
    as_table,
    compare,
    outcomes_here,
    outcomes_of_spark,
    settings,
    table_in_docs,
    write_inputs,
)
from pyspark.sql.functions import (
    avg,
    col,
    count,
    explode,
    expr,
    session_window,
    split,
    sum,
    when,
    window,
    window_time,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# All run before the first is looked at.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

MATCHED = """clickAdId = impressionAdId AND clickTime >= impressionTime AND
    clickTime <= impressionTime + INTERVAL 1 HOUR"""


# --- Quick example, sources -----------------------------------------------------------------------


def word_count(at: Inputs) -> DataFrame:
    lines = at.spark.readStream.text(at.path("lines"))
    words = lines.select(explode(split(lines.value, " ")).alias("word"))
    return words.groupBy("word").count()


def csv(at: Inputs) -> DataFrame:
    reader = at.spark.readStream.option("sep", ";").schema("name string, age int")
    return reader.csv(at.path("csv"))


def with_file_options(at: Inputs) -> DataFrame:
    reader = at.spark.readStream.format("json").schema("n long")
    options = {"maxFilesPerTrigger": 1, "latestFirst": True, "maxFileAge": "30d"}
    return reader.options(**options, pathGlobFilter="part-*").load(at.path("years"))


# --- Windows --------------------------------------------------------------------------------------


def windowed(words: DataFrame) -> DataFrame:
    return words.groupBy(window("timestamp", "10 minutes", "5 minutes"), "word").count()


def late_words(at: Inputs) -> DataFrame:
    return at.rows("words").withWatermark("timestamp", "10 minutes")


def windowed_by_an_older_column(at: Inputs) -> DataFrame:
    words = at.rows("words")
    late = words.withWatermark("timestamp", "10 minutes")
    return late.groupBy(window(words.timestamp, "10 minutes", "5 minutes"), words.word).count()


def visits(at: Inputs) -> DataFrame:
    return at.rows("events").withWatermark("timestamp", "10 minutes")


def sessions(at: Inputs) -> DataFrame:
    return visits(at).groupBy(session_window("timestamp", "5 minutes"), "userId").count()


def sessions_of_an_older_column(at: Inputs) -> DataFrame:
    events = at.rows("events")
    late = events.withWatermark("timestamp", "10 minutes")
    return late.groupBy(session_window(events.timestamp, "5 minutes"), events.userId).count()


def sessions_with_own_gaps(at: Inputs) -> DataFrame:
    gap = when(col("userId") == "user1", "5 seconds").when(col("userId") == "user2", "20 seconds")
    span = session_window("timestamp", gap.otherwise("5 minutes"))
    return visits(at).groupBy(span, "userId").count()


def windows_of_windows(at: Inputs, time: Callable[[DataFrame], Any]) -> DataFrame:
    counts = windowed(late_words(at))
    return counts.groupBy(window(time(counts), "20 minutes"), counts.word).agg(sum("count"))


# --- Joins ----------------------------------------------------------------------------------------


def shown(at: Inputs) -> DataFrame:
    return at.rows("impressions").withWatermark("impressionTime", "2 hours")


def clicked(at: Inputs) -> DataFrame:
    return at.rows("clicks").withWatermark("clickTime", "3 hours")


def joined(how: str) -> Callable[[Inputs], DataFrame]:
    return lambda at: shown(at).join(clicked(at), expr(MATCHED), how)


def with_types(how: str) -> Callable[[Inputs], DataFrame]:
    return lambda at: at.rows("devices").drop("tags").join(at.types(), "deviceType", how)


def types_with(how: str) -> Callable[[Inputs], DataFrame]:
    return lambda at: at.types().join(at.rows("devices").drop("tags"), "deviceType", how)


def windows_joined(at: Inputs, renamed: str) -> DataFrame:
    clicks = clicked(at).groupBy("clickAdId", window("clickTime", "1 hour")).count()
    shows = shown(at).groupBy("impressionAdId", window("impressionTime", "1 hour"))
    return clicks.join(shows.agg(count("*").alias(renamed)), "window", "inner")


def windows_of_joined(at: Inputs, how: str) -> DataFrame:
    both = shown(at).join(clicked(at), expr(MATCHED), how).drop("impressionTime")
    return both.groupBy("clickAdId", window("clickTime", "1 hour")).count()


def joined_in_a_row(at: Inputs) -> DataFrame:
    again = clicked(at).selectExpr("clickAdId AS again", "clickTime AS laterTime")
    near = "again = clickAdId AND laterTime BETWEEN clickTime AND clickTime + INTERVAL 2 HOURS"
    return joined("inner")(at).drop("impressionTime").join(again, expr(near))


# --- Arbitrary state ------------------------------------------------------------------------------
# Classes and functions are made inside of functions: so they travel to workers by value.


def group_state(at: Inputs, timeout: str) -> DataFrame:
    def counted(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        import pandas as pd

        if state.hasTimedOut:
            (n,) = state.get
            state.remove()
            yield pd.DataFrame({"userId": [key[0]], "n": [n], "is_over": [True]})
            return
        (n,) = state.getOption or (0,)
        newest = 0
        for frame in frames:
            n += len(frame)
            newest = max(newest, int(frame["timestamp"].max().timestamp() * 1000))
        state.update((n,))
        if timeout == "EventTimeTimeout":
            state.setTimeoutTimestamp(max(newest, state.getCurrentWatermarkMs()) + 60_000)
        else:
            yield pd.DataFrame({"userId": [key[0]], "n": [n], "is_over": [False]})

    said = "userId string, n long, is_over boolean"
    grouped = visits(at).groupBy("userId")
    return grouped.applyInPandasWithState(counted, said, "n long", "update", timeout)


def with_processor(at: Inputs, kind: str, *, in_pandas: bool = False) -> DataFrame:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Counting(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            if kind == "list":
                self.kept = handle.getListState("kept", "n long")
            elif kind == "map":
                self.kept = handle.getMapState("kept", "minute long", "n long")
            else:
                self.kept = handle.getValueState("kept", "n long")

        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            self.kept.update((initialState.n,))

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            if in_pandas:
                import pandas as pd

                n = 0
                for frame in rows:
                    n += len(frame)
                self.kept.update((n,))
                yield pd.DataFrame({"userId": [key[0]], "said": [f"{n} rows"]})
                return
            for row in rows:
                yield Row(userId=key[0], said=self.said(row))
            if kind == "timer":
                self.handle.registerTimer(1_704_110_400_000 + 600_000)

        def said(self, row: Any) -> str:
            if kind == "list":
                self.kept.appendValue((row.timestamp.minute,))
                return str([minute for (minute,) in self.kept.get()])
            if kind == "map":
                minute = (row.timestamp.minute,)
                (n,) = self.kept.getValue(minute) if self.kept.containsKey(minute) else (0,)
                self.kept.updateValue(minute, (n + 1,))
                return f"{minute[0]}: {n + 1}"
            (n,) = self.kept.get() if self.kept.exists() else (0,)
            self.kept.update((n + 1,))
            return str(n + 1)

        def handleExpiredTimer(
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterator[Any]:
            yield Row(userId=key[0], said=f"timer at {expiredTimerInfo.getExpiryTimeInMs()}")

        def close(self) -> None: ...

    grouped = visits(at).groupBy("userId")
    initial = None
    if kind == "initial":
        rows = [("user1", 100), ("user9", 1)]
        initial = at.spark.createDataFrame(rows, "userId string, n long").groupBy("userId")
    time = "eventTime" if kind == "timer" else "none"
    method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return method(Counting(), "userId string, said string", "update", time, initial)


# --- The table ------------------------------------------------------------------------------------

QUICK = "Quick example"
SOURCES = "Sources"
BASIC = "Basic operations"
WINDOWS = "Windows and watermarks"
SESSIONS = "Session windows"
CHAINED = "Windows of windows"
CLEANING = "When watermarks clean state"
STATIC = "Joins with static data"
STREAMS = "Joins of streams"
DUPLICATES = "Deduplication"
STATE = "Arbitrary state"
UNSUPPORTED = "Unsupported operations"
MODES = "Output modes"
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming"
    ".state.RocksDBStateStoreProvider"
}
"""Which transformWithState needs in Spark."""
OLDER = "runs; Spark takes the column for one without a watermark and refuses"

ROW_PROGRAMS: tuple[Program, ...] = (
    Program(QUICK, "counts the words of lines", word_count, "complete"),
    Program(QUICK, "counts the words of lines", word_count, "update", keys=("word",)),
    Program(SOURCES, "text files", lambda at: at.spark.readStream.text(at.path("lines"))),
    Program(SOURCES, "CSV files with another separator", csv),
    Program(
        SOURCES,
        '`format("csv").load(...)`',
        lambda at: (
            at.spark.readStream.format("csv")
            .options(sep=";")
            .schema("name string, age int")
            .load(at.path("csv"))
        ),
    ),
    Program(SOURCES, "JSON files", lambda at: at.rows("devices")),
    Program(
        SOURCES,
        "Parquet files",
        lambda at: at.spark.readStream.schema("n long").parquet(at.path("parquet")),
    ),
    Program(
        SOURCES,
        "ORC files",
        lambda at: at.spark.readStream.schema("n long").orc(at.path("orc")),
    ),
    Program(
        SOURCES,
        "partition directories",
        lambda at: at.spark.readStream.schema("n long, year int").json(at.path("years")),
    ),
    Program(SOURCES, "options of files", with_file_options),
    Program(
        SOURCES,
        "a path with a pattern",
        lambda at: at.spark.readStream.schema("n long").json(at.path("years") + "/year=*/part-*"),
    ),
    Program(
        SOURCES,
        "an inferred schema",
        lambda at: at.spark.readStream.json(at.path("years")),
        settings={"spark.sql.streaming.schemaInference": "true"},
    ),
    Program(
        SOURCES,
        "`fileNameOnly`",
        lambda at: (
            at.spark.readStream.schema("n long").option("fileNameOnly", True).json(at.path("years"))
        ),
    ),
    Program(
        BASIC,
        "selects and filters",
        lambda at: at.rows("devices").select("device").where("signal > 10"),
    ),
    Program(
        BASIC,
        "a running count",
        lambda at: at.rows("devices").groupBy("deviceType").count(),
        "complete",
    ),
    Program(
        BASIC,
        "a running count",
        lambda at: at.rows("devices").groupBy("deviceType").count(),
        "update",
        keys=("deviceType",),
    ),
    Program(
        BASIC,
        "a running average",
        lambda at: at.rows("devices").groupBy("deviceType").agg(avg("signal")),
        "complete",
    ),
    Program(
        BASIC,
        "a count of all rows",
        lambda at: at.rows("devices").groupBy().count(),
        "complete",
    ),
    Program(
        BASIC,
        "SQL over a view",
        lambda at: at.sql("SELECT count(*) FROM updates", updates=at.rows("devices")),
        "complete",
    ),
    Program(
        BASIC,
        "SQL with `GROUP BY` and `HAVING`",
        lambda at: at.sql(
            "SELECT deviceType, max(signal) AS most FROM updates GROUP BY deviceType"
            " HAVING count(*) > 5",
            updates=at.rows("devices"),
        ),
        "complete",
    ),
    Program(BASIC, "`explode`", lambda at: at.rows("devices").select(explode("tags"), "device")),
    Program(WINDOWS, "sliding windows", lambda at: windowed(at.rows("words")), "complete"),
    Program(
        WINDOWS,
        "sliding windows",
        lambda at: windowed(at.rows("words")),
        "update",
        keys=("window", "word"),
    ),
    Program(
        WINDOWS,
        "sliding windows without a watermark",
        lambda at: windowed(at.rows("words")),
        here=BOTH_REFUSE,
    ),
    Program(WINDOWS, "with a watermark", lambda at: windowed(late_words(at))),
    Program(
        WINDOWS,
        "with a watermark",
        lambda at: windowed(late_words(at)),
        "update",
        keys=("window", "word"),
    ),
    Program(WINDOWS, "with a watermark", lambda at: windowed(late_words(at)), "complete"),
    Program(
        WINDOWS,
        "`words.timestamp` after `withWatermark`",
        windowed_by_an_older_column,
        here=OLDER,
    ),
    Program(
        WINDOWS,
        "`words.timestamp` after `withWatermark`",
        windowed_by_an_older_column,
        "update",
        keys=("window", "word"),
    ),
    Program(
        WINDOWS,
        "tumbling windows",
        lambda at: late_words(at).groupBy(window("timestamp", "10 minutes")).agg(count("word")),
    ),
    Program(
        WINDOWS,
        "windows with an offset",
        lambda at: (
            late_words(at)
            .groupBy(window("timestamp", "10 minutes", "10 minutes", "2 minutes"))
            .count()
        ),
    ),
    Program(
        WINDOWS,
        "SQL with `window`",
        lambda at: at.sql(
            "SELECT window.start, word, count(*) AS n FROM words"
            " GROUP BY window(timestamp, '10 minutes'), word",
            words=late_words(at),
        ),
    ),
    Program(SESSIONS, "a fixed gap", sessions),
    Program(SESSIONS, "a fixed gap", sessions, "complete"),
    Program(SESSIONS, "a fixed gap", sessions, "update", here=BOTH_REFUSE),
    Program(
        SESSIONS,
        "`events.timestamp` after `withWatermark`",
        sessions_of_an_older_column,
        here=OLDER,
    ),
    Program(SESSIONS, "a gap of each row", sessions_with_own_gaps),
    Program(
        SESSIONS,
        "without another key",
        lambda at: visits(at).groupBy(session_window("timestamp", "5 minutes")).count(),
        here="runs; Spark refuses",
    ),
    Program(
        CHAINED,
        "`window_time`",
        lambda at: windows_of_windows(at, lambda counts: window_time(counts.window)),
    ),
    Program(
        CHAINED,
        "`window` of a window",
        lambda at: windows_of_windows(at, lambda counts: counts.window),
    ),
    Program(
        CHAINED,
        "`window_time`",
        lambda at: windows_of_windows(at, lambda counts: window_time(counts.window)),
        "update",
        here=BOTH_REFUSE,
    ),
    Program(
        CHAINED,
        "`window_time` selected",
        lambda at: windowed(late_words(at)).select(window_time("window").alias("t"), "word"),
    ),
    Program(
        CLEANING,
        "groups by the event time",
        lambda at: late_words(at).groupBy("timestamp").count(),
    ),
    Program(
        CLEANING,
        "groups by another time",
        lambda at: (
            late_words(at)
            .withColumn("time2", col("timestamp") + expr("INTERVAL 1 DAY"))
            .groupBy("time2")
            .count()
        ),
        here=BOTH_REFUSE,
    ),
    Program(
        CLEANING,
        "a watermark after the aggregation",
        lambda at: (
            at.rows("words").groupBy("timestamp").count().withWatermark("timestamp", "1 minute")
        ),
        here=BOTH_REFUSE,
    ),
    Program(STATIC, "stream with static: inner", with_types("inner")),
    Program(STATIC, "stream with static: left outer", with_types("left_outer")),
    Program(STATIC, "stream with static: left semi", with_types("left_semi")),
    Program(STATIC, "stream with static: left anti", with_types("left_anti")),
    Program(STATIC, "stream with static: right outer", with_types("right_outer"), here=BOTH_REFUSE),
    Program(STATIC, "stream with static: full outer", with_types("full_outer"), here=BOTH_REFUSE),
    Program(STATIC, "static with stream: inner", types_with("inner")),
    Program(STATIC, "static with stream: right outer", types_with("right_outer")),
    Program(STATIC, "static with stream: left outer", types_with("left_outer"), here=BOTH_REFUSE),
    Program(STATIC, "static with stream: full outer", types_with("full_outer"), here=BOTH_REFUSE),
    Program(STATIC, "static with stream: left semi", types_with("left_semi"), here=BOTH_REFUSE),
    Program(
        STREAMS,
        "inner, without watermarks",
        lambda at: at.rows("impressions").join(
            at.rows("clicks"), expr("clickAdId = impressionAdId")
        ),
    ),
    Program(STREAMS, "inner, within a time", joined("inner")),
    Program(STREAMS, "left outer", joined("leftOuter")),
    Program(STREAMS, "right outer", joined("rightOuter")),
    Program(STREAMS, "full outer", joined("fullOuter")),
    Program(STREAMS, "left semi", joined("leftSemi")),
    Program(
        STREAMS,
        "left outer, without watermarks",
        lambda at: at.rows("impressions").join(
            at.rows("clicks"), expr("clickAdId = impressionAdId"), "leftOuter"
        ),
        here=BOTH_REFUSE,
    ),
    Program(STREAMS, "left anti", joined("leftAnti"), here=BOTH_REFUSE),
    Program(STREAMS, "inner, within a time", joined("inner"), "complete", here=BOTH_REFUSE),
    Program(STREAMS, "joins in a row", joined_in_a_row),
    Program(STREAMS, "windows of both, joined", lambda at: windows_joined(at, "shows")),
    Program(
        STREAMS,
        "windows of both, joined, with two columns `count`",
        lambda at: windows_joined(at, "count"),
        here="refused: a sink has one column of a name, so rename one",
        match="two columns",
    ),
    Program(STREAMS, "windows of what is joined: inner", lambda at: windows_of_joined(at, "inner")),
    Program(
        STREAMS,
        "windows of what is joined: left outer",
        lambda at: windows_of_joined(at, "leftOuter"),
    ),
    Program(DUPLICATES, "by a key", lambda at: at.rows("orders").dropDuplicates(["guid"])),
    Program(
        DUPLICATES,
        "by a key and the event time",
        lambda at: (
            at.rows("orders")
            .withWatermark("eventTime", "10 seconds")
            .dropDuplicates(["guid", "eventTime"])
        ),
    ),
    Program(
        DUPLICATES,
        "within the watermark",
        lambda at: (
            at.rows("orders")
            .withWatermark("eventTime", "10 hours")
            .dropDuplicatesWithinWatermark(["guid"])
        ),
    ),
    Program(
        DUPLICATES,
        "within a watermark that is missing",
        lambda at: at.rows("orders").dropDuplicatesWithinWatermark(["guid"]),
        here=BOTH_REFUSE,
    ),
    Program(DUPLICATES, "`distinct`", lambda at: at.rows("orders").select("guid").distinct()),
    Program(
        STATE,
        "`applyInPandasWithState` without a timeout",
        lambda at: group_state(at, "NoTimeout"),
        "update",
        keys=("userId",),
    ),
    Program(
        STATE,
        "`applyInPandasWithState` with an event time timeout",
        lambda at: group_state(at, "EventTimeTimeout"),
        "update",
        keys=("userId",),
    ),
    Program(
        STATE,
        "`transformWithState` with a value",
        lambda at: with_processor(at, "value"),
        "update",
        settings=ROCKSDB,
    ),
    Program(
        STATE,
        "`transformWithState` with a list",
        lambda at: with_processor(at, "list"),
        "update",
        settings=ROCKSDB,
    ),
    Program(
        STATE,
        "`transformWithState` with a map",
        lambda at: with_processor(at, "map"),
        "update",
        settings=ROCKSDB,
    ),
    Program(
        STATE,
        "`transformWithState` with event time timers",
        lambda at: with_processor(at, "timer"),
        "update",
        settings=ROCKSDB,
    ),
    Program(
        STATE,
        "`transformWithState` with an initial state",
        lambda at: with_processor(at, "initial"),
        "update",
        settings=ROCKSDB,
    ),
    Program(
        STATE,
        "`transformWithStateInPandas`",
        lambda at: with_processor(at, "value", in_pandas=True),
        "update",
        keys=("userId",),
        settings=ROCKSDB,
    ),
    Program(
        UNSUPPORTED,
        "`limit`",
        lambda at: at.rows("devices").select("deviceType").where("deviceType = 't1'").limit(3),
    ),
    Program(
        UNSUPPORTED,
        "`limit` of an aggregation",
        lambda at: at.rows("words").groupBy("word").count().orderBy("word").limit(2),
        "complete",
    ),
    Program(
        UNSUPPORTED,
        "SQL's `DISTINCT`",
        lambda at: at.sql("SELECT DISTINCT guid FROM orders", orders=at.rows("orders")),
        "update",
    ),
    Program(
        UNSUPPORTED,
        "sorting of rows",
        lambda at: at.rows("devices").orderBy("device"),
        here=BOTH_REFUSE,
    ),
    Program(
        UNSUPPORTED,
        "sorting of an aggregation",
        lambda at: at.rows("words").groupBy("word").count().orderBy("count", "word"),
        "complete",
    ),
    Program(
        UNSUPPORTED,
        "sorting of an aggregation",
        lambda at: windowed(late_words(at)).orderBy("count"),
        here=BOTH_REFUSE,
    ),
    Program(
        UNSUPPORTED,
        "an aggregation of an aggregation",
        lambda at: at.rows("words").groupBy("word").count().groupBy("count").count(),
        "complete",
        here=BOTH_REFUSE,
    ),
    Program(
        UNSUPPORTED,
        "a union with static rows",
        lambda at: at.rows("devices").select("device").union(at.types().select("name")),
        here=BOTH_REFUSE,
    ),
    Program(MODES, "rows as they are", lambda at: at.rows("devices").select("signal"), "update"),
    Program(
        MODES,
        "rows as they are",
        lambda at: at.rows("devices").select("signal"),
        "complete",
        here=BOTH_REFUSE,
    ),
    Program(
        MODES,
        "an aggregation without event time",
        lambda at: at.rows("devices").groupBy("device").count(),
        here=BOTH_REFUSE,
    ),
    Program(
        MODES,
        "duplicates",
        lambda at: at.rows("orders").dropDuplicates(["guid"]),
        "update",
    ),
    Program(
        MODES,
        "duplicates",
        lambda at: at.rows("orders").dropDuplicates(["guid"]),
        "complete",
        here=BOTH_REFUSE,
    ),
)


@pytest.fixture(scope="module")
def outcomes(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[Program, tuple[Outcome, Outcome]]:
    """Of each program, in Spark and here."""
    place = tmp_path_factory.mktemp("guide")
    write_inputs(place / "inputs")
    with settings(spark, {"spark.sql.session.timeZone": "UTC"}):
        here = outcomes_here(spark, ROW_PROGRAMS, place / "inputs", place)
        with settings(spark, {"spark.sql.shuffle.partitions": "1"}):  # the rows are few
            there = outcomes_of_spark(spark, ROW_PROGRAMS, place / "inputs", place)
    return {each: (there[each], here[each]) for each in ROW_PROGRAMS}


@pytest.mark.parametrize("program", ROW_PROGRAMS, ids=lambda each: ": ".join(each.row[:2]))
def test_a_program_of_the_guide_gives_here_what_it_gives_in_spark(
    program: Program, outcomes: dict[Program, tuple[Outcome, Outcome]]
) -> None:
    compare(program, *outcomes[program])


def test_the_docs_tell_of_each_program_what_was_seen() -> None:
    expected = as_table(program.row for program in ROW_PROGRAMS)
    assert table_in_docs("the guide's section") == expected, "\n".join(expected)
