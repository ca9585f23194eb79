"""`session_window(...)`: what is built of it, and what comes out, beside what Spark makes of it."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError
from stillframe.graph.expressions import Call, Column, Named
from stillframe.graph.logical import WINDOW, Aggregate, Project, Read, SessionWindow, walk
from stillframe.runtime.expressions import project
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream
from stillframe.state.sessions import SessionTable

pytestmark = pytest.mark.spark

SECOND_US = 1_000_000
TIMESTAMP = pa.timestamp("us", tz="UTC")
COLUMNS = "shop string, at timestamp, local timestamp_ntz, amount long, rest int, said string"
WAIT_SECONDS_MAX = 120.0
Rows = Counter[tuple[Any, ...]]
Query = Callable[[Any], Any]


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


def the_aggregate(stream: Stream) -> Aggregate:
    (found,) = [n.operator for n in walk([stream.node]) if isinstance(n.operator, Aggregate)]
    assert isinstance(found, Aggregate)
    return found


def prepared(still: Still, tmp_path: Path, *writers: Any) -> list[Any]:
    options = {"checkpointLocation": str(tmp_path / "chk"), "checkpointInterval": "1 second"}
    return still.prepare("job", *writers, **options)[0]


# --- what is built ------------------------------------------------------------------------------


def test_sessions_have_the_schema_that_spark_gives_them(sales: Stream, same: DataFrame) -> None:
    five = F.session_window("at", "5 minutes")
    queries: list[Query] = [
        lambda df: df.groupBy(five).count(),
        lambda df: df.groupBy("shop", five).sum("amount"),
        lambda df: df.groupBy(five.alias("s"), F.upper("shop")).agg(F.min("at"), F.count("*")),
        lambda df: df.groupBy(five, "shop").count().select("session_window.start", "shop"),
        lambda df: df.groupBy(five, "shop").count().filter("session_window.end > '2026'"),
        lambda df: df.groupBy(F.expr("session_window(at, '5 minutes')"), "at").avg("amount"),
    ]
    bounded = sales.still.spark.createDataFrame([], same.schema)
    for place, query in enumerate(queries):
        assert query(sales).schema == query(bounded).schema, f"query {place}"
        noted = [
            [(field.name, field.metadata) for field in query(watched).schema]
            for watched in (s.withWatermark("at", "1 minute") for s in (sales, same))
        ]
        assert noted[0] == noted[1], f"query {place}"


def test_sessions_become_these_nodes(sales: Stream) -> None:
    counted = sales.groupBy("shop", F.session_window("at", "90 seconds").alias("s")).count()
    after, aggregate, before, read = reversed(walk([counted.node]))
    assert isinstance(read.operator, Read)
    assert before.operator == Project(
        (Named("at", Column("at", TIMESTAMP)), Named("shop", Column("shop", pa.string())))
    )
    count = AggregateCall("count", None, "count(1)", pa.int64())
    window = SessionWindow("at", 90 * SECOND_US)
    assert aggregate.operator == Aggregate(("shop",), (count,), window)
    struct = pa.struct([("start", TIMESTAMP), ("end", TIMESTAMP)])
    assert aggregate.schema.field(0) == pa.field(WINDOW, struct)
    assert after.operator.columns[1] == Named("s", Column(WINDOW, struct))


@pytest.mark.parametrize(
    ("gap", "gap_us"),
    [
        ("1 microsecond", 1),
        ("interval 1 minute 5 milliseconds", 60 * SECOND_US + 5_000),
        ("1 week", 7 * 86_400 * SECOND_US),
        ("1 day -1 hour", 23 * 3_600 * SECOND_US),
    ],
)
def test_a_gap_means_what_it_means_to_spark(sales: Stream, gap: str, gap_us: int) -> None:
    counted = sales.groupBy(F.session_window("at", gap)).count()
    assert the_aggregate(counted).window == SessionWindow("at", gap_us)


def test_a_gap_of_each_record_is_a_column(sales: Stream) -> None:
    gap = F.when(F.col("amount") > 10, "5 seconds").otherwise("1 minute")
    counted = sales.groupBy(F.session_window("at", gap), "shop").count()
    window = the_aggregate(counted).window
    assert isinstance(window, SessionWindow)
    before = next(n.operator for n in walk([counted.node]) if isinstance(n.operator, Project))
    made = {column.name: column.expression for column in before.columns}[window.gap]
    assert isinstance(made, Call)
    assert (made.function, made.type) == ("case", pa.int64())


def test_what_a_stream_does_not_do_with_sessions_is_said(sales: Stream) -> None:
    watched = sales.withWatermark("at", "1 minute")
    five = F.session_window("at", "5 minutes")
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: sales.groupBy(F.session_window("at", "-1 day")).count(), "give a positive one"),
        (lambda: sales.groupBy(F.session_window("at", "0 days")).count(), "give a positive one"),
        (
            lambda: sales.groupBy(F.session_window("at", "soon")).count(),
            "soon.*give a positive one",
        ),
        (lambda: sales.groupBy(F.session_window("at", F.col("said"))).count(), "said is no gap"),
        (
            lambda: sales.groupBy(
                F.session_window("at", F.make_interval(days=F.col("rest")))
            ).count(),
            "longer than hours",
        ),
        (
            lambda: sales.groupBy(
                F.session_window("at", F.make_interval(secs=F.col("rest") / 2))
            ).count(),
            "not a whole number",
        ),
        (lambda: sales.groupBy(five.start).count(), "only where it groups by it"),
        (lambda: sales.groupBy(five).agg(F.max(five.start)), "not grouped by as such"),
        (lambda: sales.select(five), "only where it groups by it"),
        (
            lambda: watched.groupBy(F.session_window("local", "1 day")).count(),
            "not over the column",
        ),
        (
            lambda: watched.groupBy(F.session_window(F.date_add("at", 1), "1 day")).count(),
            "not over the column that withWatermark was given",
        ),
    ]
    for build, why in refused:
        with pytest.raises(BuildError, match=why):
            build()


def test_output_modes_that_sessions_cannot_give_are_refused_in_sparks_words(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    def sessions(stream: Stream) -> Any:
        return stream.groupBy(F.session_window("at", "1 hour"), "shop").count().writeStream

    watched = sales.withWatermark("at", "1 minute")
    mode = r"\[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION\] Invalid streaming output mode: {}. "
    words = "This output mode is not supported for session window streaming aggregations on"
    with pytest.raises(BuildError, match=mode.format("update") + words):
        prepared(still, tmp_path, sessions(watched).format("noop").outputMode("update"))
    with pytest.raises(BuildError, match=mode.format("append")) as raised:
        prepared(still, tmp_path, sessions(sales).format("noop"))
    assert "update" not in str(raised.value), "which sessions refuse too"
    (sink,) = prepared(still, tmp_path, sessions(watched).format("noop"))
    (made,) = [n.operator for n in walk([sink]) if isinstance(n.operator, Aggregate)]
    assert made.emits_closed


# --- what comes out, of one table ---------------------------------------------------------------


def some_sales() -> pa.Table:
    """Two days around the end of summer time in Berlin, with whatever may be missing missing."""
    random = np.random.default_rng(7)
    begin_us = int(datetime.datetime(2025, 10, 25, tzinfo=datetime.UTC).timestamp()) * SECOND_US
    count = 3_000
    minutes = random.integers(0, 2 * 24 * 60, count)
    times = pa.array(begin_us + minutes * 60 * SECOND_US, mask=random.random(count) < 0.02)
    return pa.table(
        {
            "shop": pa.array([f"shop {n}" for n in random.integers(0, 60, count)]),
            "at": times.view(TIMESTAMP),
            "amount": pa.array(random.integers(-5, 100, count), mask=random.random(count) < 0.1),
            "rest": pa.array(random.integers(-1, 90, count).astype(np.int32)),
        }
    )


GAPS: dict[str, Any] = {
    "constant": "7 minutes",
    "chosen": lambda: F.when(F.col("amount") > 50, "3 minutes").otherwise("25 minutes"),
    "chosen, or none": lambda: F.when(F.col("amount") > 50, "3 minutes").when(
        F.col("amount") > 20, "-3 minutes"
    ),
    "a column, or a constant": lambda: F.coalesce(
        F.when(F.col("amount") > 9, "2 minutes"), F.lit("4 minutes")
    ),
    "made of numbers": lambda: F.make_interval(mins=F.col("rest")),
    "made of several numbers": lambda: F.make_interval(
        hours=F.lit(0), mins=F.col("rest"), secs=F.col("amount")
    ),
    "days, which may be longer": "1 day",
    "months": "1 month -29 days -12 hours",
    "days, chosen": lambda: F.when(F.col("amount") > 98, "1 day").otherwise("1 minute"),
}


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize("gap", list(GAPS.values()), ids=list(GAPS))
def test_sessions_are_those_that_spark_makes_of_the_same_rows(
    spark: SparkSession, still: Still, tmp_path: Path, gap: Any, zone: str
) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        pq.write_table(some_sales(), tmp_path / "sales.parquet")
        rows = spark.read.parquet(str(tmp_path / "sales.parquet"))

        def counted(df: Any) -> Any:
            window = F.session_window("at", gap() if callable(gap) else gap)
            return df.groupBy("shop", window).agg(
                F.count("*").alias("n"), F.sum("amount"), F.max("at"), F.avg("rest")
            )

        expected = Counter(map(flat, counted(rows).toArrow().to_pylist()))
        stream = still.readStream.schema(rows.schema).parquet(str(tmp_path / "sales.parquet"))
        found = computed(counted(stream), some_sales())
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert found == expected
    assert len({row[:2] for row in expected}) > 100 or "day" in str(gap)


def computed(stream: Stream, table: pa.Table) -> Rows:
    """What the operators of this aggregation make of a table, without slots around them."""
    nodes = walk([stream.node])
    place = next(i for i, node in enumerate(nodes) if isinstance(node.operator, Aggregate))
    before, after = nodes[place - 1], nodes[place + 1]
    operator = the_aggregate(stream)
    sessions = SessionTable(before.schema, operator.keys, operator.calls, operator.window, 128)
    for batch in table.to_batches(max_chunksize=500):
        sessions.add(project(before.operator.columns, batch, before.schema), None)
    closed = sessions.close(2**63 - 1)
    made = [project(after.operator.columns, batch, after.schema) for batch in closed]
    return Counter(flat(row) for batch in made for row in batch.to_pylist())


def flat(row: dict[str, Any]) -> tuple[Any, ...]:
    window = row.pop("session_window")
    moments = (window["start"].timestamp(), window["end"].timestamp())
    rest = (value.timestamp() if hasattr(value, "timestamp") else value for value in row.values())
    return (*moments, *rest)


# --- what comes out, of a job -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gap", "unaligned"),
    [
        ("800 milliseconds", "false"),
        (lambda: F.when(F.col("id") % 3 == 0, "100 milliseconds").otherwise("700 ms"), "true"),
    ],
    ids=["constant", "chosen"],
)
def test_every_session_comes_out_once_and_whole_after_a_kill(
    clicks: Any, run_and_kill: Any, gap: Any, unaligned: str
) -> None:
    clicks = replace(clicks, apps=300)

    def counted(rows: Any) -> Any:
        window = F.session_window("at", gap() if callable(gap) else gap)
        return rows.groupBy(window, "app_id").agg(
            F.count("*").alias("views"), F.max("id").alias("last"), F.min("at").alias("first")
        )

    stream = counted(clicks.stream().withWatermark("at", "1 second"))
    rows = run_and_kill(stream.writeStream.format("parquet"), unalignedCheckpoints=unaligned)

    expected = counted(clicks.frame()).toArrow().to_pylist()
    assert Counter(map(flat, rows)) == Counter(map(flat, expected))
    assert max(Counter(row["app_id"] for row in expected).values()) > 10


MINUTES = [
    [("a", 0), ("a", 8), ("b", 3), ("b", 30), ("c", 1)],
    # Late by itself; beside a session that is open; in time, within one that has closed; far away.
    [("a", 12), ("b", 20), ("b", 21), ("b", 25), ("c", 29), ("a", 24), ("c", -60), ("d", 40)],
    [("a", 31), ("d", 29), ("d", 33), ("c", 36), ("b", 60), ("a", 41), ("d", 30)],
    [("a", 49), ("a", 50), ("a", 51), ("b", 70), ("c", 45)],
    [("end", 10_000)],
]


PORTIONS = pa.schema([("portion", pa.int64()), ("shop", pa.string()), ("at", TIMESTAMP)])


def portions() -> Iterator[list[tuple[str, int]]]:
    """Those of `MINUTES`, and between two something that does not move time.

    Spark drops by the time of the portion before the last; we drop by that of the last.
    """
    for portion in MINUTES:
        yield portion
        yield [("end", max(minute for _, minute in portion))]


@pytest.mark.slow
def test_what_is_late_is_what_is_late_to_spark(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    """The same rows in the same portions, each of which is judged by the time of those before."""
    begin_us = int(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC).timestamp()) * SECOND_US
    tables = []
    (tmp_path / "many").mkdir()
    for number, portion in enumerate(portions()):
        times = [begin_us + minute * 60 * SECOND_US for _, minute in portion]
        shops = [shop for shop, _ in portion]
        columns = {"portion": [number] * len(portion), "shop": shops, "at": times}
        tables.append(pa.table(columns).cast(PORTIONS))
        path = tmp_path / "many" / f"{number}.parquet"
        pq.write_table(tables[-1], path)
        os.utime(path, (1_000 + number, 1_000 + number))
    pq.write_table(pa.concat_tables(tables), tmp_path / "one.parquet")

    def counted(rows: Any) -> Any:
        watched = rows.withWatermark("at", "0 seconds")
        return watched.groupBy(F.session_window("at", "10 minutes"), "shop").count()

    columns_said = "portion long, shop string, at timestamp"
    of_spark = spark.readStream.schema(columns_said).option("maxFilesPerTrigger", 1)
    query = (
        counted(of_spark.parquet(str(tmp_path / "many")))
        .writeStream.format("memory")
        .queryName("sessions_of_spark")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    expected = spark.table("sessions_of_spark").toArrow().to_pylist()
    dropped = sum(
        each["numRowsDroppedByWatermark"]
        for progress in query.recentProgress
        for each in progress["stateOperators"]
    )

    def by_portion(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in sorted(set(batch.column("portion").to_pylist())):
                yield batch.filter(pa.compute.equal(batch.column("portion"), number))

    stream = still.readStream.schema(columns_said).parquet(str(tmp_path / "one.parquet"))
    ours = (
        counted(stream.mapInArrow(by_portion, columns_said))
        .writeStream.queryName("late_sessions")
        .format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoints"))
        .option("checkpointInterval", "1 second")
        .option("parallelism", "1")
        .trigger(availableNow=True)
        .start()
    )
    assert ours.awaitTermination(WAIT_SECONDS_MAX)

    found = Counter(map(flat, pq.read_table(tmp_path / "out").to_pylist()))
    assert without_end(found) == without_end(Counter(map(flat, expected)))
    assert ours.summary.records_late == dropped > 5


def without_end(rows: Rows) -> Rows:
    return Counter({row: count for row, count in rows.items() if "end" not in row})
