"""Aggregates beside Spark's own, of all types: running and in windows, on both backends."""

from __future__ import annotations

import datetime
import decimal
import math
import os
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import Row
from pyspark.sql import functions as F

from stillframe.evaluator.beside import Evaluator
from stillframe.graph.expressions import spark_results
from stillframe.graph.logical import Aggregate, evaluated_by_spark
from stillframe.runtime.aggregating_by_spark import bound
from stillframe.runtime.expressions import project
from stillframe.spark.deployment.entry import spark_here
from stillframe.spark.plans.aggregations import Aggregation, aggregation_of
from stillframe.spark.types import empty_frame, to_arrow_schema
from stillframe.state.aggregates import AggregateTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

SCHEMA = (
    "k string, n long, x double, m decimal(12, 2), w decimal(28, 3), y binary, at timestamp,"
    " i int, f float, s string, b boolean, d date, tn timestamp_ntz, iv interval day to second,"
    " p struct<a: int, b: string>, l array<int>, q map<string, int>"
)
FIRST = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
NUMBERS = ("n", "x", "m", "w", "i", "f")
ORDERED = (*NUMBERS, "y", "at", "s", "b", "d", "tn", "iv", "p", "l")
STATISTICS = (
    *("variance", "var_pop", "stddev", "std", "stddev_pop", "skewness", "kurtosis", "median"),
    *("sum", "avg"),
)
PAIRS = (
    *("corr", "covar_pop", "covar_samp", "regr_count", "regr_avgx", "regr_avgy", "regr_sxx"),
    *("regr_syy", "regr_sxy", "regr_r2", "regr_slope", "regr_intercept"),
)
FEW = ("n", "x", "s", "p", "l")
NAN_IS_ONE = pyspark.__version__ >= "4.2"
"""Before, each NaN of a batch is a value of its own to Spark's `collect_set` and `mode`."""
SINGLE = [
    *(f"{name}({column})" for name in ("min", "max") for column in ORDERED),
    *(f"{name}({column})" for name in ("first", "last") for column in (*FEW, "q", "iv")),
    *(f"{name}({column}, true)" for name in ("first", "last") for column in (*FEW, "q")),
    *(f"min_by({column}, at)" for column in (*FEW, "q", "w", "y")),
    *(f"max_by(n, {column})" for column in ORDERED),
    *(f"collect_list({column})" for column in (*FEW, "q")),
    *(f"collect_set({column})" for column in FEW if column != "x" or NAN_IS_ONE),
    *(f"mode({column}, true)" for column in FEW if column != "x" or NAN_IS_ONE),
    *(f"approx_count_distinct({column})" for column in ("x", "f", "b", "y", "w", "tn", "iv")),
    *(f"percentile_approx({column}, 0.4)" for column in ("n", "x", "m", "d", "at")),
    *(f"{name}({column})" for name in ("bit_and", "bit_or", "bit_xor") for column in ("n", "i")),
    *(f"{name}({column})" for name in STATISTICS for column in "nm"),
    *(f"{name}(n, i)" for name in PAIRS),
    *(f"count(DISTINCT {column})" for column in FEW),
    *(f"{name}(DISTINCT {column})" for name in ("sum", "avg") for column in "xw"),
    "count(DISTINCT i, s, b)",
    "corr(DISTINCT n, i)",
    "corr(i - i, n)",
    "regr_r2(i - i, n)",
    "regr_r2(n, i - i)",
    "regr_slope(n, i - i)",
    "kurtosis(i - i)",
    "skewness(x)",
    "corr(x, f)",
    "median(x)",
    "median(iv)",
    "stddev(DISTINCT i)",
    "bit_xor(DISTINCT i)",
    "collect_list(DISTINCT i)",
    "percentile(DISTINCT i, 0.4)",
    "max(DISTINCT i)",
    "approx_count_distinct(n, 0.01)",
    "approx_count_distinct(n, 0.2)",
    "percentile(n, array(0.0, 0.31, 1.0))",
    "percentile(x, 0.5)",
    "percentile(iv, 0.31)",
    "percentile_approx(n, array(0.1, 0.5, 0.99), 1000)",
    "percentile_cont(0.3) WITHIN GROUP (ORDER BY n)",
    "percentile_cont(0.3) WITHIN GROUP (ORDER BY n DESC)",
    "percentile_disc(0.3) WITHIN GROUP (ORDER BY i)",
    "percentile_disc(0.3) WITHIN GROUP (ORDER BY i DESC)",
    "mode() WITHIN GROUP (ORDER BY i)",
    "mode() WITHIN GROUP (ORDER BY i DESC)",
    "listagg(s)",
    "listagg(s, ', ')",
    "listagg(y, x'00')",
    "listagg(DISTINCT s, '-') WITHIN GROUP (ORDER BY s)",
    "string_agg(s, '') WITHIN GROUP (ORDER BY s DESC)",
    "count(n, m, y)",
    "count(*) FILTER (WHERE n % 2 = 0)",
    "count(n) FILTER (WHERE x > 0)",
    "sum(m) FILTER (WHERE n > 10 OR y IS NULL)",
    "max(w) FILTER (WHERE k <> 'a')",
    "first(n) FILTER (WHERE i > 0)",
    "last(p) FILTER (WHERE b)",
    "max(p) FILTER (WHERE b)",
    "collect_list(l) FILTER (WHERE b)",
    "last(s, true) FILTER (WHERE b)",
    "min_by(s, at) FILTER (WHERE b)",
    "corr(n, i) FILTER (WHERE b)",
    "count(DISTINCT n, i) FILTER (WHERE b)",
    "sum(DISTINCT i) FILTER (WHERE b)",
    "collect_list(s) FILTER (WHERE b)",
    "count_if(n > 3)",
    "bool_and(n > -90)",
    "every(n > 0)",
    "bool_or(n > 90)",
    "some(m < 0) FILTER (WHERE n > 0)",
    "sum(m * n)",
]


def is_part(part: str, text: str) -> bool:
    """Spark plans no query with all of them."""
    is_joined = "listagg(DISTINCT" in text
    return part == ("joined" if is_joined else "different" if "DISTINCT" in text else "all")


BY_SPARK = [
    *(f"try_sum({column})" for column in ("n", "w", "i", "iv")),
    *("try_avg(w)", "try_avg(iv)", "sum(iv)", "avg(iv)"),
    # Which bins there are depends on what is merged when, in Spark too; how many values does not.
    "aggregate(histogram_numeric(n, 300), 0D, (sum, bin) -> sum + bin.y)",
    "count_min_sketch(n, 0.1d, 0.9d, 7)",
    "count_min_sketch(s, 0.1d, 0.9d, 7) FILTER (WHERE b)",
    "hll_sketch_estimate(hll_sketch_agg(s, 12))",
    "hll_sketch_estimate(hll_sketch_agg(n) FILTER (WHERE n > 0))",
    "bitmap_count(bitmap_construct_agg(bitmap_bit_position(abs(n))))",
    "percentile(n, 0.4, abs(i))",
    "listagg(s, ',') WITHIN GROUP (ORDER BY at DESC)",
    "try_sum(DISTINCT i)",
]
# Of values that are there as often, either may come first.
SINCE = {"4.1": ["array_sort(transform(approx_top_k(i, 20), each -> each.count))"]}


# One DISTINCT only: with two, Spark 4.3 itself counts too many in sessions.
IN_JOBS = [
    *("count(*)", "sum(m)", "avg(w)", "min(y)", "max(p)", "variance(n)", "skewness(n)"),
    *("bit_xor(n)", "corr(n, i)", "regr_slope(n, i)", "max_by(l, at)", "min_by(s, at)"),
    *("any_value(k)", "first(k) FILTER (WHERE b)", "last(n) FILTER (WHERE n = 7)"),
    *("collect_list(n)", "collect_list(p)", "collect_set(s)", "count(DISTINCT s, b)"),
    *("approx_count_distinct(n)", "median(m)", "mode(s, true)"),
    *("percentile_approx(n, 0.4)", "sum(m) FILTER (WHERE n > 10 OR y IS NULL)", "bool_or(b)"),
    *("try_sum(w) FILTER (WHERE b)", "hll_sketch_estimate(hll_sketch_agg(s))"),
]
STARTS = {
    "fs": (["sliding", "sessions"], ["true"]),
    "rocksdb": (["running"], ["second(at) < 20", "second(at) >= 20"]),
}
"""By backend: which groupings there are, and what is there to read with each start."""


def rows() -> Iterator[tuple[Any, ...]]:
    draw = random.Random(7)

    def number(digits: int, scale: int) -> decimal.Decimal:
        return decimal.Decimal(draw.randrange(-(10**digits) + 1, 10**digits)).scaleb(-scale)

    with decimal.localcontext(prec=60):
        for second in range(900):
            at = FIRST + datetime.timedelta(seconds=second)
            key = draw.choice("abcd")
            given = (
                draw.randint(-99, 99),
                draw.choice([draw.uniform(-9, 9), 0.0, -0.0, math.nan, math.inf, 1.5]),
                number(12, 2),
                number(28, 3),
                draw.randbytes(2),
            )
            others = (
                draw.randint(-9, 9),
                draw.choice([0.5, -1.25, math.nan, 0.0]),
                draw.choice(["", "a", "Ab", "é", "日本", "a text of more than thirty-two letters"]),
                draw.random() < 0.5,
                datetime.date(2024, 1, 1) + datetime.timedelta(days=draw.randint(-9, 9)),
                datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=draw.randint(-9, 9)),
                datetime.timedelta(hours=draw.randint(-9, 9), microseconds=draw.randint(0, 9)),
                (draw.choice([1, 2, None]), draw.choice(["a", None, "b"])),
                draw.choices([1, 2, None, -3], k=draw.randint(0, 3)),
                {"z": draw.randint(0, 9)},
            )
            values = [None if draw.random() < 0.1 else each for each in (*given, *others)]
            yield (key, *values[:5], at, *values[5:])


def near(value: Any) -> Any:
    """Sums of doubles may differ in their last digits; a zero has no sign."""
    if isinstance(value, float) and not math.isnan(value):
        return f"{value + 0.0:.9g}"
    return [near(each) for each in value] if isinstance(value, list) else str(value)


def compared(text: str, value: Any) -> Any:
    return near(sorted(value, key=str) if text.startswith("collect_") else value)


@contextmanager
def null_where_it_divides_by_zero(spark: SparkSession) -> Iterator[None]:
    """In ANSI mode Spark's correlations and slopes raise there before 4.3, and are null now."""
    with without_ansi(spark) if spark.version < "4.3" else nullcontext():
        yield


@contextmanager
def without_ansi(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        yield
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


@pytest.fixture(scope="module")
def table(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(list(rows()), SCHEMA).coalesce(1).cache()


@pytest.mark.parametrize("part", ["all", "different", "joined"])
def test_every_aggregate_is_what_it_is_in_spark(
    spark: SparkSession, table: DataFrame, part: str
) -> None:
    """Records in batches, and what was kept restored in between."""
    check(spark, table, [text for text in SINGLE if is_part(part, text)])


def test_aggregates_that_only_spark_computes_are_what_they_are_in_spark(
    spark: SparkSession, table: DataFrame
) -> None:
    newer = [text for version, texts in SINCE.items() if spark.version >= version for text in texts]
    check(spark, table, [*BY_SPARK, *newer], native=False)


@pytest.mark.parametrize("text", ["sum(n * 9223372036854775)", "avg(n)", "sum(i)", "sum(m)"])
def test_without_ansi_mode_sums_are_what_they_are_in_spark(
    spark: SparkSession, table: DataFrame, text: str
) -> None:
    """They begin again at the other end of 64 bits; a decimal that does not fit is null."""
    check(spark, table, [text], native=text != "sum(m)", ansi=False)


def check(
    spark: SparkSession,
    table: DataFrame,
    texts: list[str],
    *,
    native: bool = True,
    ansi: bool = True,
) -> None:
    asked = [F.expr(text).alias(f"c{place}") for place, text in enumerate(texts)]
    with null_where_it_divides_by_zero(spark) if ansi else without_ansi(spark):
        truth = table.groupBy("k").agg(*asked)
        theirs = {row[0]: row[1:] for row in truth.collect()}
    with nullcontext() if ansi else without_ansi(spark):
        made = aggregation_of(empty_frame(spark, table.schema).groupBy("k").agg(*asked))
    assert [call.name for call in made.calls if (call.function == "by_spark") is native] == []
    fields = [pa.field(each.name, each.expression.type) for each in made.before]
    with evaluator_of(made) as evaluator:
        calls = bound(Aggregate(made.keys, made.calls), evaluator).calls
        what = (pa.schema(fields), made.keys, calls, 8)
        kept = AggregateTable(*what)
        for number, batch in enumerate(arrow_rows(table).to_batches(max_chunksize=200)):
            kept.take_in(project(made.before, batch, what[0], evaluator), partial=False)
            if number % 2:
                before, kept = kept, AggregateTable(*what)
                for _, rows_of_group in before.freeze().batches_by_key_group():
                    kept.restore(rows_of_group)
        found = project(made.after, kept.results(), to_arrow_schema(truth.schema), evaluator)
    assert found.num_rows == len(theirs) == 4
    for row in zip(*(column.to_pylist() for column in found.columns), strict=True):
        for text, here, there in zip(texts, row[1:], theirs[row[0]], strict=True):
            assert compared(text, plain(here)) == compared(text, plain(there)), text


@contextmanager
def evaluator_of(made: Aggregation) -> Iterator[Evaluator | None]:
    """Spark's, if anything of the aggregation needs it."""
    read = [each.expression for each in (*made.before, *made.after)]
    needed = [*spark_results(*read), *evaluated_by_spark(Aggregate(made.keys, made.calls))]
    if not needed:
        yield None
        return
    projections = [each.projection for each in needed]
    with closing(Evaluator(spark_here(), projections, 256 << 20)) as evaluator:
        yield evaluator


def arrow_rows(frame: DataFrame) -> pa.Table:
    """As our sources give them."""
    return frame.toArrow().cast(to_arrow_schema(frame.schema))


def plain(value: Any) -> Any:
    """As one form of what Arrow and PySpark give."""
    if isinstance(value, Row | dict):
        return [plain(each) for each in (value if isinstance(value, Row) else value.values())]
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, tuple):
        return plain(value[1])  # an entry of a map
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone().replace(tzinfo=None)
    return value


def test_as_many_different_values_are_counted_as_by_spark(spark: SparkSession) -> None:
    """Of a few to very many: with registers that are empty, with tables, and beyond these."""
    read = {
        "id": 0.05,
        "cast(id as int)": 0.02,
        "cast(id as double)": 0.3,
        "cast(id as string)": 0.05,
        "cast(cast(id as string) as binary)": 0.05,
        "cast(id as decimal(10, 0))": 0.05,
        "cast(id - 9 as decimal(30, 5))": 0.05,
        "date_add(date'1970-01-01', cast(id as int))": 0.05,
        "concat(repeat(cast(id as string), 9), 'é')": 0.05,
    }
    columns = [F.expr(text).alias(f"v{place}") for place, text in enumerate(read)]
    group = F.expr("cast(log2(id + 1) as int) as k")
    frame = spark.range(150_000).select(group, *columns)
    asked = [F.approx_count_distinct(f"v{at}", rsd) for at, rsd in enumerate(read.values())]
    truth = {row[0]: row[1:] for row in frame.groupBy("k").agg(*asked).collect()}
    made = aggregation_of(empty_frame(spark, frame.schema).groupBy("k").agg(*asked))
    rows = arrow_rows(frame)
    kept = AggregateTable(rows.schema, made.keys, made.calls, 8)
    for batch in rows.to_batches(max_chunksize=30_000):
        kept.take_in(batch, partial=False)
    found = zip(*(column.to_pylist() for column in kept.results().columns), strict=True)
    assert {row[0]: row[1:] for row in found} == truth
    assert len(truth) == 18


@pytest.mark.parametrize("backend", STARTS)
def test_aggregates_of_jobs_are_what_they_are_in_spark(
    spark: SparkSession, still: Still, tmp_path: Path, backend: str
) -> None:
    """A job that is started again has another parallelism then."""
    place = str(tmp_path / "rows")
    chosen = ", ".join(f"{each} AS c{place}" for place, each in enumerate(IN_JOBS))
    groupings = {
        "running": f"SELECT k AS end, k, {chosen} FROM {{rows}} GROUP BY k",
        "sliding": f"SELECT window.end, k, {chosen} FROM {{rows}}"
        " GROUP BY window(at, '4 minutes', '2 minutes'), k",
        "sessions": f"SELECT session_window.end, k, {chosen} FROM {{rows}}"
        " GROUP BY session_window(at, '9 seconds'), k",
    }
    given = spark.createDataFrame(list(rows()), SCHEMA).drop("iv")  # which Parquet has not
    names, parts = STARTS[backend]
    for name in names:
        os.symlink(place, f"{place}-{name}")  # one job, and each reads a place of its own
    for start, part in enumerate(parts):
        given.where(part).repartition(3).write.mode("append").parquet(place)
        writers = []
        for name in names:
            stream = spark.readStream.schema(given.schema).parquet(f"{place}-{name}")
            writer = still.writeStream(spark.sql(groupings[name], rows=stream)).format("memory")
            writer = writer.queryName(name).outputMode("complete").uid(name)
            writers.append(writer.trigger(availableNow=True))
        where = {"checkpointLocation": str(tmp_path / "chk"), "stateBackend": backend}
        query = still.start("aggregates", *writers, parallelism=2 - start, **where)
        assert query.awaitTermination(120)
    table = spark.read.parquet(place)
    for name in names:
        with null_where_it_divides_by_zero(spark):
            truth, found = spark.sql(groupings[name], rows=table), spark.table(name)
            assert found.schema.simpleString() == truth.schema.simpleString()
            ours, theirs = (
                sorted(frame.collect(), key=lambda row: row[:2]) for frame in (found, truth)
            )
        assert len(theirs) >= 4
        for mine, its in zip(ours, theirs, strict=True):
            assert mine[:2] == its[:2]
            for each, here, there in zip(IN_JOBS, mine[2:], its[2:], strict=True):
                assert compared(each, plain(here)) == compared(each, plain(there)), (name, each)
