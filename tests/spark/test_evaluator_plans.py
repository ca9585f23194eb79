"""What only Spark's evaluator computes, wherever in a plan it stands: Spark's own results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from stillframe.errors import BuildError, StartRefused
from stillframe.graph.expressions import SparkResult
from stillframe.graph.logical import Project
from stillframe.spark.expressions.evaluated import columns_in_two
from stillframe.spark.plans.aggregations import aggregation_of
from stillframe.spark.types import empty_frame, parse_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

SCHEMA = "id long, name string, at timestamp"
ROWS = 60
_NAMES = ("robert", "Rupert", "ab c", None, "", "7", "Éa ab", "x1 y22")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a file of rows, one each second."""
    place = tmp_path_factory.mktemp("rows")
    lines = (
        {"id": i, "name": _NAMES[i % 8], "at": f"2024-01-01T00:00:{i:02d}Z"} for i in range(ROWS)
    )
    (place / "a.json").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return str(place)


def codes(spark: SparkSession) -> DataFrame:
    values = [("361R", 0, "ripert"), ("001A", 1, "abc"), ("001A", 2, None), (None, 3, "x")]
    return spark.createDataFrame(values, "code string, n long, label string")


def sql(text: str) -> Callable[[DataFrame], DataFrame]:
    def asked(rows: DataFrame) -> DataFrame:
        rows.createOrReplaceTempView("clicks")
        codes(rows.sparkSession).createOrReplaceTempView("codes")
        return rows.sparkSession.sql(text)

    return asked


@F.udf(StringType())
def upside_down(text: str | None) -> str | None:
    return None if text is None else text[::-1]


MEASURED = StructType().add("a", "integer").add("b", "string")
DESCRIBED = (
    StructType()
    .add("later", TimestampType())
    .add("label", StringType())
    .add("sizes", ArrayType(IntegerType()))
)


@F.pandas_udf(StringType())  # type: ignore[call-overload]
def twice(texts: pandas.Series, numbers: pandas.Series) -> pandas.Series:
    return texts.str.cat(numbers.astype(str), na_rep="?")


@F.pandas_udf(MEASURED)  # type: ignore[call-overload]
def measured(batches: Iterator[pandas.Series]) -> Iterator[pandas.DataFrame]:
    for texts in batches:
        yield pandas.DataFrame({"a": texts.fillna("none").str.len(), "b": texts})


@F.pandas_udf(DESCRIBED)  # type: ignore[call-overload]
def described(
    times: pandas.Series, named: pandas.DataFrame, lists: pandas.Series
) -> pandas.DataFrame:
    """Columns by their names, in another order than the declared one."""
    labels = named["name"].fillna("?") + named["id"].astype(str)
    sizes = lists.map(lambda each: [len(each), *map(len, each)])
    later = times.dt.floor("D") + pandas.Timedelta(hours=1)
    return pandas.DataFrame({"sizes": sizes, "label": labels, "later": later})


if hasattr(F, "arrow_udf"):

    @F.arrow_udf(LongType())
    def lengths(texts: pa.Array) -> pa.Array:
        return pc.utf8_length(texts)

else:  # PySpark 4.0 has none
    lengths = F.udf(lambda text: None if text is None else len(text), LongType())


if hasattr(F, "arrow_udf"):

    @F.arrow_udf(LongType())
    def hours(times: pa.Array, seen: pa.Array) -> pa.Array:
        return pc.add(pc.multiply(pc.hour(times), 100), pc.hour(pc.struct_field(seen, "at")))


def hours_seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        zones = pa.array([f"{batch.schema.types}"] * batch.num_rows)
        columns = [batch.column("id"), zones, pc.hour(batch.column("at")), batch.column("at")]
        yield pa.RecordBatch.from_arrays(columns, names=["id", "zones", "h", "at"])


def streams_joined(rows: DataFrame) -> DataFrame:
    first = rows.withWatermark("at", "1 minute")
    other = first.selectExpr("id AS its", "name AS other", "at AS then")
    condition = (
        "soundex(name) = soundex(reverse(reverse(other))) AND levenshtein(name, other) < its"
        " AND then BETWEEN at AND at + INTERVAL 9 SECONDS"
    )
    return first.join(other, F.expr(condition)).select("id", "its", "other")


APPENDED: dict[str, Callable[[DataFrame], DataFrame]] = {
    "keys of a join with a table": sql(
        "SELECT id, n FROM clicks LEFT JOIN codes ON soundex(name) = reverse(code)"
    ),
    "a condition of a join with a table": sql(
        "SELECT id, label FROM clicks LEFT JOIN codes"
        " ON id % 4 = n AND levenshtein(name, label) < 6"
    ),
    "streams joined": streams_joined,
    "words": sql("SELECT id, explode(regexp_extract_all(name, '([a-z]+)', 1)) AS w FROM clicks"),
    "an outer view of structs": sql(
        "SELECT id, a, b FROM clicks LATERAL VIEW OUTER"
        " inline(arrays_zip(get(sentences(name), 0), sequence(1, 2))) AS a, b"
    ),
    "entries of a map": sql(
        "SELECT id, explode_outer(map_filter(map('k', id, 'l', -id), (k, v) -> v > 9)) FROM clicks"
    ),
    "words beside each row": sql(
        "SELECT id, w FROM clicks, LATERAL explode(regexp_extract_all(name, '([a-z]+)', 1)) AS t(w)"
    ),
    "fields of a text": sql(
        "SELECT id, a, n FROM clicks LATERAL VIEW"
        " json_tuple(concat('{\"a\": \"', soundex(name), '\", \"n\": [', id, ', 1.50]}'),"
        " 'a', 'n') AS a, n"
    ),
    "a stack": sql("SELECT id, stack(2, soundex(name), id, name) AS (t, n) FROM clicks"),
    "a function within and without": lambda rows: rows.select(
        "id", F.initcap(upside_down(F.soundex(upside_down("name")))).alias("made")
    ),
    "functions of columns": lambda rows: rows.select(
        "id",
        F.soundex(twice(F.initcap("name"), F.col("id"))).alias("t"),
        measured(F.reverse("name")).alias("m"),
        F.factorial((lengths("name") % 5).cast("int")).alias("n"),
    ),
    "a function of times, structs and lists": lambda rows: rows.select(
        "id",
        described("at", F.struct("id", "name"), F.split(F.concat_ws(" ", "name"), " ")).alias("d"),
    ),
    "a function of a filter": lambda rows: rows.where(
        F.levenshtein(upside_down("name"), F.lit("ab")) > 2
    ),
    "subqueries": sql(
        "SELECT id, levenshtein(name, (SELECT max(label) FROM codes)) AS far FROM clicks"
        " WHERE id > (SELECT max(n) FROM codes) AND (SELECT n FROM codes WHERE n > 9) IS NULL"
    ),
}

WHOLE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "keys, aggregates and results": sql(
        "SELECT soundex(name) AS k, count(*) AS n, max(initcap(name)) AS m, reverse(max(name)) AS"
        " r, count(*) FILTER (WHERE levenshtein(name, 'abc') > 3) AS far,"
        " count(soundex(name), id) AS c FROM clicks GROUP BY soundex(name)"
    ),
    "aggregates that only Spark computes": sql(
        "SELECT id % 3 AS k, try_sum(id) AS s, histogram_numeric(id, 999) AS h,"
        " hll_sketch_estimate(hll_sketch_agg(name)) AS n,"
        " listagg(name, '') WITHIN GROUP (ORDER BY id DESC) AS l FROM clicks GROUP BY id % 3"
    ),
    "a cube": lambda rows: rows.cube(F.soundex("name").alias("k"), F.col("id") % 2).count(),
    "windows of computed times": lambda rows: rows.groupBy(
        F.window(F.from_utc_timestamp("at", "Asia/Kathmandu"), "7 seconds")
    ).count(),
    "a key of a function": lambda rows: rows.groupBy(
        F.initcap(upside_down(F.soundex("name"))).alias("k")
    ).agg(F.max(lengths("name")).alias("longest")),
}

LEGACY: dict[str, Callable[[DataFrame], DataFrame]] = {
    "sums that begin again": sql(
        "SELECT id % 3 AS k, sum(9223372036854775807 - id) AS s, avg(cast(id AS decimal(38, 0)))"
        " AS a, sum(cast(repeat('9', 37) AS decimal(38, 0)) * (id + 1)) AS d FROM clicks"
        " GROUP BY id % 3"
    ),
    "casts that give null": sql(
        "SELECT cast(name AS int) AS k, count(cast(substring(name, 2) AS date)) AS n,"
        " max(id / (id % 3)) AS m FROM clicks GROUP BY cast(name AS int)"
    ),
}


@pytest.mark.parametrize("mode", ["true", "false"])
@pytest.mark.timeout(300)
def test_plans_around_sparks_evaluator_give_what_they_give_in_spark(
    spark: SparkSession, still: Still, rows: str, tmp_path: Path, mode: str
) -> None:
    spark.conf.set("spark.sql.ansi.enabled", mode)
    try:
        # Where ANSI mode is off, expressions say something else; plans do not.
        appended, whole = (APPENDED, WHOLE) if mode == "true" else ({}, LEGACY)
        _compare(spark, still, rows, tmp_path, appended, whole)
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


def _compare(
    spark: SparkSession,
    still: Still,
    rows: str,
    tmp_path: Path,
    appended: dict[str, Callable[[DataFrame], DataFrame]],
    whole: dict[str, Callable[[DataFrame], DataFrame]],
) -> None:
    programs = {**appended, **whole}
    writers: list[Any] = []
    for number, (name, program) in enumerate(programs.items()):
        place = f"{tmp_path}/rows-{number}"  # one job has them all, so each reads its own
        os.symlink(rows, place)
        made = still.writeStream(program(spark.readStream.schema(SCHEMA).json(place)))
        made = made.trigger(availableNow=True).uid(f"sink-{number}")
        if name in whole:
            made = made.format("memory").outputMode("complete").queryName(f"evaluated_{number}")
        else:
            made = made.option("path", str(tmp_path / f"out-{number}"))
        writers.append(made)
    location = str(tmp_path / "checkpoints")
    query = still.start("evaluated", *writers, checkpointLocation=location, parallelism=1)
    assert query.awaitTermination(240)

    table = spark.read.schema(SCHEMA).json(rows)
    for number, (name, program) in enumerate(programs.items()):
        truth = program(table)
        if name in whole:
            found = spark.table(f"evaluated_{number}")
        else:
            found = spark.read.schema(truth.schema).parquet(str(tmp_path / f"out-{number}"))
        assert sorted(map(repr, found.collect())) == sorted(map(repr, truth.collect())), name
        assert truth.count() > 0, name


def test_a_function_of_arrow_columns_is_given_instants_in_the_zone_of_the_session(
    spark: SparkSession, still: Still, rows: str, tmp_path: Path
) -> None:
    def seen(rows: DataFrame) -> DataFrame:
        beside = rows.select("id", "at", F.struct("at").alias("s"), F.array("at").alias("l"))
        return beside.mapInArrow(hours_seen, "id long, zones string, h long, at timestamp")

    hours_of: dict[str, Callable[[DataFrame], DataFrame]] = {"mapInArrow": seen}
    if hasattr(F, "arrow_udf"):  # PySpark 4.0 has none
        hours_of["hours"] = lambda rows: rows.select("id", hours("at", F.struct("at")).alias("h"))
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        _compare(spark, still, rows, tmp_path, hours_of, {})
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_all_that_is_computed_together_crosses_once(spark: SparkSession) -> None:
    """And what a Python function stands between, twice."""
    empty = empty_frame(spark, parse_schema(spark, SCHEMA))
    grouping = aggregation_of(
        empty.groupBy(F.soundex("name")).agg(
            F.max(F.initcap("name")), F.reverse(F.min(F.soundex("name")))
        )
    )
    before = [each.expression for each in grouping.before]
    after = [each.expression for each in grouping.after]
    assert len({id(e.projection) for e in before if isinstance(e, SparkResult)}) == 1
    assert [type(each) for each in after].count(SparkResult) == 1

    made = columns_in_two(
        empty.select(F.soundex("name"), F.initcap(upside_down(F.reverse("name"))))
    )
    first, second = (each.expression for each in made)
    assert isinstance(first, SparkResult)
    assert isinstance(second, SparkResult)
    assert first.projection is not second.projection
    [function] = second.projection.inputs
    [argument] = function.arguments  # type: ignore[union-attr]
    assert argument.projection is first.projection


def test_a_subquery_is_said_and_must_give_one_row_that_does_not_change(
    spark: SparkSession, still: Still, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(text: str) -> Any:
        return still.stream(sql(text)(spark.readStream.schema(SCHEMA).json(rows)))

    stream("SELECT id + (SELECT max(n) FROM codes) FROM clicks").explain()
    assert "once at the start: subquery max(n)" in capsys.readouterr().out
    many = stream("SELECT id + (SELECT n FROM codes) AS x FROM clicks").writeStream
    many = many.format("parquet").option("path", str(tmp_path / "out"))
    with pytest.raises(StartRefused, match=r"\[SCALAR_SUBQUERY_TOO_MANY_ROWS\]"):
        many.option("checkpointLocation", str(tmp_path / "checkpoints")).start()
    with pytest.raises(BuildError, match="for each row"):
        stream("SELECT (SELECT max(label) FROM codes WHERE n = id) FROM clicks")
    with pytest.raises(BuildError, match="condition of a join"):
        stream("SELECT id FROM clicks JOIN codes ON id > n + (SELECT max(n) FROM codes)")


def test_what_is_another_value_after_a_recovery_is_said(
    spark: SparkSession, still: Still, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = spark.readStream.schema(SCHEMA).json(rows)
    drawn = F.udf(lambda _: 4, "int").asNondeterministic()
    still.stream(frame.select(F.rand(7), F.initcap("name"), drawn("id"))).explain()
    said = capsys.readouterr().out
    assert said.count("another value after a recovery: ") == 2
    assert "another value after a recovery: <lambda>" in said
    assert "another value after a recovery: rand(7" in said


def test_what_a_generator_reads_is_hidden_behind_it(
    spark: SparkSession, still: Still, rows: str
) -> None:
    frame = sql("SELECT *, explode(sentences(name)) AS s FROM clicks")(
        spark.readStream.schema(SCHEMA).json(rows)
    )
    stream = still.stream(frame)
    assert stream.columns == ["id", "name", "at", "s"]
    front = stream.node
    while not isinstance(front.operator, Project) or "s" in front.schema.names:
        front = front.inputs[0]
    assert len(front.schema) == 4
