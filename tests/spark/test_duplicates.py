"""Duplicates on real local Spark: compared with Spark's own streams, and with a `kill -9`."""

from __future__ import annotations

import datetime
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException, PySparkTypeError
from pyspark.sql import functions as F

from stillframe.errors import BuildError
from stillframe.graph.logical import DropDuplicates
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

COLUMNS = "n long, k string, at timestamp"
SCHEMA = pa.schema([("n", pa.int64()), ("k", pa.string()), ("at", pa.timestamp("us", "UTC"))])


@pytest.fixture
def rows(still: Still, tmp_path: Path) -> Stream:
    path = tmp_path / "rows.json"
    path.write_text('{"k": "a"}\n')
    return still.readStream.schema(COLUMNS + ", more array<int>").json(str(path))


# --- What is built ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (lambda rows: rows.dropDuplicates(["K"]), DropDuplicates(("k",))),
        (lambda rows: rows.drop("more").distinct(), DropDuplicates(("n", "k", "at"))),
        (lambda rows: rows.dropDuplicates([]), DropDuplicates(())),
        (
            lambda rows: rows.withWatermark("at", "5 seconds").dropDuplicates(["k"]),
            DropDuplicates(("k",), "at"),
        ),
        (
            lambda rows: rows.withWatermark("at", "5 seconds").drop_duplicates(["k", "at"]),
            DropDuplicates(("k", "at"), "at", 0),
        ),
        (
            lambda rows: rows.withWatermark("at", "5 seconds").dropDuplicatesWithinWatermark(["k"]),
            DropDuplicates(("k",), "at", 5_000_000),
        ),
        (
            lambda rows: (
                rows.withWatermark("at", "5 seconds")
                .withColumnRenamed("at", "moment")
                .dropDuplicatesWithinWatermark(["k"])
            ),
            DropDuplicates(("k",), "moment", 5_000_000),
        ),
        (
            lambda rows: (
                rows.withWatermark("at", "5 seconds")
                .withColumn("at", F.col("at") + F.expr("interval 1 day"))
                .dropDuplicates(["k"])
            ),
            DropDuplicates(("k",)),
        ),
    ],
)
def test_keys_and_event_time_are_found_as_spark_finds_them(
    rows: Stream, make: Callable[[Stream], Stream], operator: DropDuplicates
) -> None:
    made = make(rows)
    assert made.node.operator == operator
    assert not made.is_updates


def test_the_result_has_the_columns_and_the_watermark_of_the_stream(rows: Stream) -> None:
    watched = rows.withWatermark("at", "5 seconds")
    assert watched.dropDuplicates(["k"]).schema == watched.schema


def test_without_a_watermark_nothing_is_within_it(rows: Stream) -> None:
    for stream in (rows, rows.withWatermark("at", "1 second").select("k")):
        with pytest.raises(BuildError, match="is not supported on streaming DataFrames/DataSets"):
            stream.dropDuplicatesWithinWatermark(["k"])


def test_duplicates_of_aggregates_are_refused(rows: Stream) -> None:
    with pytest.raises(BuildError, match="drop duplicates before groupBy"):
        rows.groupBy("k").count().distinct()


def test_columns_that_cannot_be_keys_are_named(rows: Stream) -> None:
    with pytest.raises(BuildError, match=r"by 'more' is not possible.*array<int>"):
        rows.dropDuplicates()


def test_wrong_subsets_are_told_in_sparks_words(rows: Stream) -> None:
    with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN_AMONG_FIELD_NAMES"):
        rows.dropDuplicates(["nope"])
    with pytest.raises(PySparkTypeError, match="should be list or tuple"):
        rows.dropDuplicates("k")  # type: ignore[arg-type]


# --- Zeros and NaN --------------------------------------------------------------------------------


ZEROS = {
    "dropDuplicates": lambda rows: rows.dropDuplicates(["d"]).select("d"),
    "distinct": lambda rows: rows.select("d", "f").distinct(),
    "groupBy": lambda rows: rows.groupBy("d", "f").count(),
    "join": lambda rows: rows.join(rows.selectExpr("d AS e", "n AS m"), F.expr("d = e")),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_and_nan_are_one_key_each_and_shown_as_sparks_tables_show_them(
    still: Still, tmp_path: Path, job_options: dict[str, str], name: str
) -> None:
    numbers = [-0.0, 0.0, math.nan, -math.nan, None, 1.5, -0.0]
    columns = [pa.array(numbers), pa.array(numbers, pa.float32()), pa.array(range(7))]
    path = str(tmp_path / "numbers.parquet")
    pq.write_table(pa.table(columns, names=["d", "f", "n"]), path)
    rows = still.readStream.schema("d double, f float, n long").parquet(path)

    writer = ZEROS[name](rows).writeStream.queryName("zeros").outputMode("append")
    if name == "groupBy":
        writer = writer.outputMode("update")
    writer = writer.options(**job_options).trigger(availableNow=True)
    assert writer.start(str(tmp_path / "out")).awaitTermination(60)

    ours = [tuple(row.values()) for row in pq.read_table(tmp_path / "out").to_pylist()]
    theirs = [tuple(row) for row in ZEROS[name](still.spark.read.parquet(path)).collect()]
    assert sorted(map(str, ours)) == sorted(map(str, theirs))


# --- As Spark's own streams do it -----------------------------------------------------------------


BATCH_ROWS = 40
FIRST = datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)


def disordered(batches: int) -> list[list[dict[str, Any]]]:
    """Keys that come again soon, or much later; some rows come far too late, some without time."""
    chance = random.Random(4)
    made = []
    for number in range(batches):
        batch = []
        for place in range(BATCH_ROWS):
            second = number * 10 + chance.randrange(10) - chance.choice([0, 0, 0, 3, 8, 25, 60])
            moment = (FIRST + datetime.timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%SZ")
            key = f"k{chance.randrange(25)}"
            batch.append({"n": number * BATCH_ROWS + place, "k": key, "at": moment})
        made.append(batch)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows.dropDuplicates(["k"]),
        lambda rows: rows.withWatermark("at", "12 seconds").dropDuplicates(["k"]),
        lambda rows: rows.withWatermark("at", "12 seconds").dropDuplicates(["k", "at"]),
        lambda rows: rows.withWatermark("at", "12 seconds").dropDuplicatesWithinWatermark(["k"]),
    ],
    ids=["for ever", "for ever without late", "with the event time", "within the watermark"],
)
def test_the_rows_that_pass_are_those_of_sparks_own_streams_also_after_a_kill(
    batches_of: Any, make: Any
) -> None:
    batches = batches_of(SCHEMA, disordered(8))
    expected = sorted(row.n for row in batches.of_spark(make))
    assert sorted(row["n"] for row in batches.of_stillframe(make)) == expected
    assert 0 < len(expected) < 8 * BATCH_ROWS


# --- With a kill ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("within", [False, True], ids=["for ever", "within the watermark"])
def test_each_key_comes_out_once_after_a_kill(clicks: Any, run_and_kill: Any, within: bool) -> None:
    keyed = clicks.stream().select((F.col("id") / 4).cast("long").alias("key"), "at")
    watched = keyed.withWatermark("at", "1 second")
    stream = (
        watched.dropDuplicatesWithinWatermark(["key"]) if within else keyed.dropDuplicates(["key"])
    )
    rows = run_and_kill(stream.writeStream.outputMode("append").format("parquet"))

    assert Counter(row["key"] for row in rows) == Counter(range(clicks.records // 4))
