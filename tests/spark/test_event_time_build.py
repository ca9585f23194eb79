"""Event time in PySpark's dialect: what is built of it, and what is refused in whose words."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError
from stillframe.graph.expressions import Call, Column, Named
from stillframe.graph.logical import (
    WINDOW,
    Aggregate,
    Node,
    Project,
    Read,
    Window,
    WithWatermark,
    walk,
)
from stillframe.graph.plan import build_plan
from stillframe.runtime.expressions import project

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream
    from stillframe.spark.writer import StreamWriter

pytestmark = pytest.mark.spark

MINUTE_US = 60_000_000
TIMESTAMP = pa.timestamp("us", tz="UTC")
WINDOW_STRUCT = pa.struct([("start", TIMESTAMP), ("end", TIMESTAMP)])

COLUMNS = (
    "shop string, at timestamp, local timestamp_ntz, day date, amount long,"
    " visit struct<began: timestamp, end: timestamp>, window int"
)


@pytest.fixture
def sales(still: Still, tmp_path: Path) -> Stream:
    path = tmp_path / "sales.json"
    path.write_text('{"shop": "Ulm"}\n')
    return still.readStream.schema(COLUMNS).json(str(path))


@pytest.fixture
def same(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """The same columns as a stream of Spark's own, to compare with."""
    (tmp_path / "of-spark").mkdir()
    return spark.readStream.schema(COLUMNS).json(str(tmp_path / "of-spark"))


def operators(stream: Stream, kind: type) -> list[Any]:
    return [node.operator for node in walk([stream.node]) if isinstance(node.operator, kind)]


def the_window(stream: Stream) -> Window:
    (aggregate,) = operators(stream, Aggregate)
    assert aggregate.window is not None
    window: Window = aggregate.window
    return window


def prepared(still: Still, tmp_path: Path, *writers: StreamWriter) -> list[Node]:
    options = {"checkpointLocation": str(tmp_path / "chk"), "checkpointInterval": "1 second"}
    return still.prepare("job", *writers, **options)[0]


# --- withWatermark ------------------------------------------------------------------------------


def test_a_watermark_is_a_node_with_the_column_and_the_delay_and_changes_no_schema(
    sales: Stream,
) -> None:
    watched = sales.withWatermark("at", "2 hours 30 seconds")
    assert watched.node.operator == WithWatermark("at", 7_230_000_000)
    assert watched.node.inputs == (sales.node,)
    assert watched.node.schema == sales.node.schema
    assert watched.dtypes == sales.dtypes


@pytest.mark.parametrize(
    ("delay", "delay_us"),
    [
        ("0 seconds", 0),
        ("10 minutes", 10 * MINUTE_US),
        ("1 day", 24 * 60 * MINUTE_US),
        ("1 month", 31 * 24 * 60 * MINUTE_US),
        ("interval 1 minute 5 milliseconds", MINUTE_US + 5000),
    ],
)
def test_a_delay_means_what_it_means_to_spark(sales: Stream, delay: str, delay_us: int) -> None:
    assert sales.withWatermark("at", delay).node.operator == WithWatermark("at", delay_us)


def test_the_schema_notes_the_watermark_as_sparks_streams_do(
    sales: Stream, same: DataFrame
) -> None:
    def watched(df: Any) -> Any:
        return df.withWatermark("at", "10 minutes")

    assert watched(sales).schema["at"].metadata == {"spark.watermarkDelayMs": 600_000}
    assert watched(sales).schema["at"].metadata == watched(same).schema["at"].metadata


def test_the_event_time_is_found_as_spark_finds_a_column(sales: Stream) -> None:
    named = sales.withColumnRenamed("at", "sold `at`. once")
    found = [
        sales.withWatermark("AT", "1 day"),
        sales.alias("s").withWatermark("s.at", "1 day"),
        named.withWatermark("`sold ``at``. once`", "1 day"),
    ]
    assert [stream.node.operator for stream in found] == [
        WithWatermark("at", 24 * 60 * MINUTE_US),
        WithWatermark("at", 24 * 60 * MINUTE_US),
        WithWatermark("sold `at`. once", 24 * 60 * MINUTE_US),
    ]


def test_columns_of_the_stream_before_a_watermark_still_mean_the_same(sales: Stream) -> None:
    watched = sales.withWatermark("at", "1 day")
    assert watched.filter(sales.amount > 1).select(sales.shop).columns == ["shop"]


def test_a_watermark_has_a_uid_by_which_its_state_is_found(sales: Stream) -> None:
    assert sales.withWatermark("at", "1 day").uid("time").node.uid == "time"


def test_the_last_watermark_is_the_one_that_counts(sales: Stream) -> None:
    twice = (
        sales.withColumn("later", sales.at)
        .withWatermark("at", "1 day")
        .withWatermark("later", "2 days")
    )
    assert [f.name for f in twice.schema if f.metadata] == ["later"]


@pytest.mark.parametrize(
    ("event_time", "delay"),
    [
        ("shop", "1 day"),
        ("day", "1 day"),
        ("local", "1 day"),
        ("visit.began", "1 day"),
        ("nothing", "1 day"),
        ("at", "-5 minutes"),
        ("at", "soon"),
        ("at", ""),
        ("at", 10),
        (None, "1 day"),
    ],
)
def test_a_wrong_watermark_is_refused_in_sparks_words(
    sales: Stream, same: DataFrame, event_time: Any, delay: Any
) -> None:
    said = first_line_raised(lambda: same.withWatermark(event_time, delay).schema)
    assert first_line_raised(lambda: sales.withWatermark(event_time, delay)) == said


def first_line_raised(build: Callable[[], object]) -> tuple[type, str]:
    # Whatever it is: that the two are alike is what is looked at.
    with pytest.raises(Exception) as raised:  # noqa: PT011
        build()
    return type(raised.value), str(raised.value).splitlines()[0]


def test_a_struct_with_an_end_is_no_event_time(sales: Stream) -> None:
    with pytest.raises(BuildError, match=r"the event time visit is a struct.* column of its own"):
        sales.withWatermark("visit", "1 day")


def test_a_delay_that_no_time_is_long_enough_for_is_refused(sales: Stream) -> None:
    with pytest.raises(BuildError, match="'30000000 days' is longer than the times"):
        sales.withWatermark("at", "30000000 days")


def test_an_aggregated_stream_gets_no_watermark(sales: Stream) -> None:
    with pytest.raises(BuildError, match="call withWatermark before groupBy"):
        sales.groupBy("shop").count().withWatermark("shop", "1 day")


# --- Windows ------------------------------------------------------------------------------------


def test_windowed_queries_have_the_schema_that_spark_gives_them(
    sales: Stream, same: DataFrame
) -> None:
    from pyspark.sql import functions as F

    queries: list[Any] = [
        lambda df: df.groupBy(F.window("at", "10 minutes")).count(),
        lambda df: df.groupBy(F.window("at", "10 minutes"), "shop").count(),
        lambda df: df.groupBy("shop", F.window("at", "10 minutes", "5 minutes")).sum("amount"),
        lambda df: df.groupBy(F.window("at", "7 minutes", "3 minutes", "1 minute")).max(),
        lambda df: df.groupBy(F.window("at", "10 minutes").alias("w"), df.shop).min("amount"),
        lambda df: df.groupBy(F.expr("window(at, '10 minutes')")).avg("amount"),
        lambda df: df.groupBy(F.window("at", "1 hour"), F.upper("shop").alias("u")).agg(
            F.count("*").alias("n"), (F.sum("amount") / F.count("amount")).alias("mean")
        ),
        lambda df: df.groupBy(F.window("at", "1 hour"), "at").count(),
        lambda df: df.groupBy(F.window("day", "1 day")).count(),
        lambda df: (
            df.groupBy(F.window("at", "1 hour")).count().select("window.start", "window.end")
        ),
        lambda df: df.groupBy(F.window("at", "1 hour")).count().filter("window.start > '2026'"),
        lambda df: (
            df.groupBy(F.window("at", "1 hour"), "shop").count().select(F.col("window.end"), "*")
        ),
    ]
    bounded = sales.still.spark.createDataFrame([], same.schema)
    for place, query in enumerate(queries):
        assert query(sales).schema == query(bounded).schema, f"query {place}"


def test_what_a_windowed_query_notes_about_event_time_is_what_spark_notes(
    sales: Stream, same: DataFrame
) -> None:
    from pyspark.sql import functions as F

    queries: list[Any] = [
        lambda df: df.groupBy(F.window("at", "10 minutes"), "shop").count(),
        lambda df: df.groupBy(F.window("at", "10 minutes", "5 minutes").alias("w")).max(),
        lambda df: (
            df.filter("amount > 1")
            .select(F.col("at").alias("sold"))
            .groupBy(F.window("sold", "1 hour"))
            .count()
        ),
        lambda df: df.groupBy(F.window("at", "1 hour")).count().select("window.start", "window"),
    ]
    for place, query in enumerate(queries):
        noted = [
            [(field.name, field.dataType, field.metadata) for field in query(watched).schema]
            for watched in (s.withWatermark("at", "1 minute") for s in (sales, same))
        ]
        assert noted[0] == noted[1], f"query {place}"
        assert "spark.watermarkDelayMs" in str(noted), f"query {place}"


@pytest.mark.parametrize(
    ("arguments", "minutes"),
    [
        (("10 minutes",), (10, 10, 0)),
        (("10 minutes", "10 minutes"), (10, 10, 0)),
        (("10 minutes", "5 minutes"), (10, 5, 0)),
        (("10 minutes", "4 minutes", "1 minute"), (10, 4, 1)),
        (("10 minutes", "10 minutes", "-1 minute"), (10, 10, 9)),
        (("1 hour", "1 minute"), (60, 1, 0)),
        (("1 week",), (7 * 24 * 60, 7 * 24 * 60, 0)),
        (("1 day", None, "15 hours"), (24 * 60, 24 * 60, 15 * 60)),
        (("1 day", "2 hours", "-119 minutes"), (24 * 60, 120, 1)),
    ],
)
def test_a_window_has_the_size_slide_and_start_that_were_written(
    sales: Stream, arguments: tuple[str, ...], minutes: tuple[int, ...]
) -> None:
    from pyspark.sql import functions as F

    counted = sales.groupBy(F.window("at", *arguments)).count()
    assert the_window(counted) == Window("at", *(minute * MINUTE_US for minute in minutes))


def test_a_window_of_a_microsecond_is_found_too(sales: Stream) -> None:
    from pyspark.sql import functions as F

    counted = sales.groupBy(F.window("at", "3 microseconds", "1 microsecond")).count()
    assert the_window(counted) == Window("at", 3, 1, 0)


def test_a_windowed_count_becomes_these_nodes(sales: Stream) -> None:
    from pyspark.sql import functions as F

    watched = sales.withWatermark("at", "1 minute")
    counted = watched.groupBy("shop", F.window("at", "10 minutes").alias("w")).count()
    after, aggregate, before, time, read = reversed(walk([counted.node]))
    assert isinstance(read.operator, Read)
    assert time.operator == WithWatermark("at", MINUTE_US)
    assert before.operator == Project(
        (Named("at", Column("at", TIMESTAMP)), Named("shop", Column("shop", pa.string())))
    )
    assert aggregate.operator == Aggregate(
        ("shop",),
        (AggregateCall("count", None, "count(1)", pa.int64()),),
        Window("at", 10 * MINUTE_US, 10 * MINUTE_US, 0),
    )
    assert aggregate.schema == pa.schema(
        [(WINDOW, WINDOW_STRUCT), ("shop", pa.string()), ("count(1)", pa.int64())]
    )
    assert after.operator == Project(
        (
            Named("shop", Column("shop", pa.string())),
            Named("w", Column(WINDOW, WINDOW_STRUCT)),
            Named("count", Column("count(1)", pa.int64())),
        )
    )


def test_an_event_time_may_be_computed(sales: Stream) -> None:
    from pyspark.sql import functions as F

    hour_later = F.window(F.col("at") + F.expr("INTERVAL 1 HOUR"), "10 minutes", "5 minutes")
    counted = sales.groupBy(hour_later).sum("amount")
    before = operators(counted, Project)[0]
    time = before.columns[0]
    assert the_window(counted) == Window(time.name, 10 * MINUTE_US, 5 * MINUTE_US, 0)
    assert isinstance(time.expression, Call)
    assert time.expression.function == "add_interval"
    assert [column.name for column in before.columns[1:]] == ["amount"]


def test_the_event_time_may_also_be_a_key_and_an_input(sales: Stream) -> None:
    from pyspark.sql import functions as F

    latest = sales.groupBy(F.window("at", "1 day"), "at").agg(F.max("at"))
    (aggregate,) = operators(latest, Aggregate)
    assert (aggregate.window.time, aggregate.keys) == ("at", ("at_2",))
    assert aggregate.calls[0].input == "at"
    assert latest.columns == ["window", "at", "max(at)"]


def test_a_key_that_is_called_window_does_not_take_the_windows_place(sales: Stream) -> None:
    from pyspark.sql import functions as F

    counted = sales.groupBy(F.window("at", "1 day").alias("w"), "window").count()
    (aggregate,) = operators(counted, Aggregate)
    assert aggregate.keys == ("window_2",)
    assert counted.dtypes[1] == ("window", "int")
    after = operators(counted, Project)[-1]
    assert after.columns[1] == Named("window", Column("window_2", pa.int32()))


def test_a_window_over_a_column_of_the_stream_before_its_watermark_is_watched(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    watched = sales.withWatermark("at", "1 minute")
    counted = watched.groupBy(F.window(sales.at, "1 hour"), sales.shop).count()
    assert prepared(still, tmp_path, counted.writeStream.format("noop").outputMode("append"))


def test_united_streams_close_their_windows_by_one_watermark_or_by_two(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    other = sales.filter("amount > 1")
    united = [
        sales.union(other).withWatermark("at", "1 minute"),
        sales.withWatermark("at", "1 minute").union(other.withWatermark("at", "1 hour")),
    ]
    for stream in united:
        assert prepared(still, tmp_path, windowed(stream).writeStream.format("noop"))


def test_a_windowed_plan_is_explained(sales: Stream, capsys: pytest.CaptureFixture[str]) -> None:
    from pyspark.sql import functions as F

    sales.withWatermark("at", "90 seconds").groupBy(F.window("at", "1 hour")).count().explain()
    assert "watermark at - 90 s" in capsys.readouterr().out


WRONG_WINDOWS: list[tuple[str, Any]] = [
    ("of no size", lambda F: [F.window("at", "0 minutes")]),
    ("of less than no size", lambda F: [F.window("at", "-1 minute")]),
    ("with a slide larger than its size", lambda F: [F.window("at", "1 minute", "2 minutes")]),
    ("without slide", lambda F: [F.window("at", "1 minute", "0 minutes")]),
    ("that starts behind its slide", lambda F: [F.window("at", "5 minutes", None, "6 minutes")]),
    ("of months", lambda F: [F.window("at", "1 month")]),
    ("of nothing known", lambda F: [F.window("at", "often")]),
    ("of numbers", lambda F: [F.window("amount", "1 minute")]),
    ("of nothing there", lambda F: [F.window("nothing", "1 minute")]),
    ("beside another", lambda F: [F.window("at", "1 minute"), F.window("at", "2 minutes")]),
    ("beside a session", lambda F: [F.window("at", "1 minute"), F.session_window("at", "1 day")]),
]


@pytest.mark.parametrize("keys", [k for _, k in WRONG_WINDOWS], ids=[n for n, _ in WRONG_WINDOWS])
def test_a_wrong_window_is_refused_in_sparks_words(
    sales: Stream, same: DataFrame, keys: Any
) -> None:
    from pyspark.sql import functions as F

    said = first_line_raised(lambda: same.groupBy(*keys(F)).count().schema)
    assert first_line_raised(lambda: sales.groupBy(*keys(F)).count()) == said


def test_what_a_stream_does_not_do_with_windows_is_said(sales: Stream) -> None:
    from pyspark.sql import functions as F

    watched = sales.withWatermark("at", "1 minute")
    hourly = F.window("at", "1 hour")
    overlapping = F.window("at", "1 hour", "10 minutes")
    refused: list[tuple[Any, str]] = [
        (lambda: watched.groupBy(F.window("local", "1 hour")).count(), "not over the column that"),
        (lambda: sales.groupBy(hourly.start).count(), "only where it groups by it"),
        (lambda: sales.groupBy("shop").agg(F.max(hourly.start)), "only where it groups by it"),
        (lambda: sales.groupBy(hourly).agg(F.max(hourly.start)), "not grouped by as such"),
        (lambda: sales.select(hourly), r"only where it groups by it: say groupBy\(window"),
        (lambda: sales.withColumn("w", overlapping), "only where it groups by it"),
        (lambda: watched.groupBy(F.window("day", "1 day")).count(), "not over the column that"),
        (
            lambda: (
                watched.withColumn("ended", F.col("visit.end"))
                .groupBy(F.window("ended", "1 day"))
                .count()
            ),
            "not over the column that",
        ),
        (
            lambda: watched.groupBy(F.window(F.date_add("at", 1), "1 day")).count(),
            "not over the column that withWatermark was given",
        ),
        (
            lambda: watched.mapInArrow(iter, COLUMNS).groupBy(hourly).count(),
            "as the last step before groupBy",
        ),
        (
            lambda: watched.union(sales).groupBy(hourly).count(),
            "only some of the streams that are united here have a watermark",
        ),
        (lambda: sales.union(watched).groupBy(hourly).count(), "not over the column that"),
        (lambda: sales.groupBy(hourly).count().groupBy("count").count(), "already aggregated"),
    ]
    for build, why in refused:
        with pytest.raises(BuildError, match=why):
            build()


# --- Output modes -------------------------------------------------------------------------------


def windowed(stream: Stream) -> Stream:
    from pyspark.sql import functions as F

    return stream.groupBy(F.window("at", "1 hour"), "shop").count()


def test_append_makes_the_aggregate_emit_what_is_closed_and_changes_nothing_else(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    hourly = windowed(sales.withWatermark("at", "1 minute")).filter("count > 1")
    (sink,) = prepared(still, tmp_path, hourly.writeStream.format("noop"))
    before, after = walk([hourly.node]), walk([sink])[:-1]
    for old, new in zip(before, after, strict=True):
        expected = old.operator
        if isinstance(expected, Aggregate):
            expected = replace(expected, emits_closed=True)
        assert (new.operator, new.schema, new.uid) == (expected, old.schema, old.uid)


def test_update_leaves_the_aggregate_as_it_is(still: Still, sales: Stream, tmp_path: Path) -> None:
    for stream in (sales, sales.withWatermark("at", "1 minute")):
        hourly = windowed(stream)
        writer = hourly.writeStream.format("noop").outputMode("update")
        (sink,) = prepared(still, tmp_path, writer)
        assert sink.inputs == (hourly.node,)
        assert [each.emits_closed for each in operators(hourly, Aggregate)] == [False]


def test_a_given_uid_and_parallelism_stay_with_the_aggregate_that_closes(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    hourly = windowed(sales.withWatermark("at", "1 minute")).uid("hourly").parallelism(3)
    (sink,) = prepared(still, tmp_path, hourly.writeStream.format("noop"))
    (made,) = [node for node in walk([sink]) if isinstance(node.operator, Aggregate)]
    assert (made.uid, made.parallelism) == ("hourly", 3)


def test_append_without_a_watermark_is_refused_in_sparks_words(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    watched = sales.withWatermark("at", "1 minute")
    words = (
        r"\[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION\] Invalid streaming output mode: append."
        " This output mode is not supported for streaming aggregations without watermark"
    )
    for stream in (windowed(sales), sales.groupBy("shop").count(), watched.groupBy("shop").sum()):
        with pytest.raises(BuildError, match=words):
            prepared(still, tmp_path, stream.writeStream.format("noop"))


def test_two_sinks_share_the_aggregate_that_closes(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    hourly = windowed(sales.withWatermark("at", "1 minute"))
    sinks = prepared(
        still,
        tmp_path,
        hourly.filter("count > 1").writeStream.format("noop").uid("many"),
        hourly.select("shop").writeStream.format("noop").uid("shops"),
        sales.writeStream.format("noop").uid("raw"),
    )
    aggregates = [node for node in walk(sinks) if isinstance(node.operator, Aggregate)]
    assert [node.operator.emits_closed for node in aggregates] == [True]  # type: ignore[union-attr]
    assert build_plan("job", sinks, 2).tasks


def test_one_aggregation_is_not_written_in_two_modes(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    hourly = windowed(sales.withWatermark("at", "1 minute"))
    writers = [
        hourly.writeStream.format("noop").uid("closed"),
        hourly.writeStream.format("noop").uid("changed").outputMode("update"),
    ]
    with pytest.raises(BuildError, match="both with outputMode 'append' and with 'update'"):
        prepared(still, tmp_path, *writers)


# --- A window's fields --------------------------------------------------------------------------


def test_the_fields_of_a_struct_are_those_that_spark_takes(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    from stillframe.spark.expressions.reading import projection_of
    from stillframe.spark.types import empty_frame, to_arrow_schema

    rows = spark.createDataFrame(
        [
            ((datetime.datetime(2026, 1, 1, 10), "x", (1,)),),
            ((None, "y", None),),
            (None,),
        ],
        "s struct<start: timestamp, end: string, deep: struct<n: int>>",
    )
    selected = rows.select(
        "s.start", F.col("s").getField("end"), F.col("s.deep.n"), F.col("s")["deep"].alias("deep")
    )
    schema = to_arrow_schema(selected.schema)
    expected = selected.toArrow().cast(schema)
    empty = empty_frame(spark, rows.schema)
    columns = projection_of(empty.select("s.start", "s.end", "s.deep.n", "s.deep"))
    table = rows.toArrow().cast(to_arrow_schema(rows.schema)).combine_chunks()
    assert table.num_rows == 3
    for first in range(3):  # also of a batch that is a part of a larger one
        (batch,) = table.slice(first).to_batches()
        made = project(columns, batch, schema)
        assert made.to_pylist() == expected.slice(first).to_pylist()
