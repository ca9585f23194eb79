"""Streaming DataFrames of Spark's own: what they mean in Spark, they mean here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stillframe
from stillframe.connectors.json_lines import JsonLinesSource
from stillframe.errors import BuildError

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still
    from stillframe.spark.writer import StreamWriter

pytestmark = pytest.mark.spark

SCHEMA = "id long, app string, at timestamp"
ROWS = 600
CLOSED = "window.end <= timestamp'2024-01-01 00:08:59'"
"""Ten minutes of rows, and a delay of one."""


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A directory with a file of rows, one each second."""
    (tmp_path / "rows").mkdir()
    lines = (
        {"id": i, "app": f"a{i % 3}", "at": f"2024-01-01T00:{i // 60:02d}:{i % 60:02d}Z"}
        for i in range(ROWS)
    )
    (tmp_path / "rows" / "a.json").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return str(tmp_path / "rows")


@pytest.fixture(autouse=True)
def utc(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(before))


def names(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([("a0", "zero"), ("a1", "one")], "app string, name string")


def doubled(frames: Iterator[pandas.DataFrame]) -> Iterator[pandas.DataFrame]:
    for frame in frames:
        yield frame[["id"]] * 2


def as_they_are(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    yield from batches


def sql(text: str) -> Callable[[DataFrame], DataFrame]:
    def asked(rows: DataFrame) -> DataFrame:
        rows.createOrReplaceTempView("clicks")
        names(rows.sparkSession).createOrReplaceTempView("names")
        return rows.sparkSession.sql(text)

    return asked


def watermarked(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("at", "1 minute")


def sliding(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import window

    windows = watermarked(rows).groupBy(window("at", "4 minutes", "2 minutes"), "app")
    return windows.count().where("app <> 'a2'")


def tumbling_of_an_older_column(rows: DataFrame) -> DataFrame:
    """The guide takes the column of the frame before withWatermark; it is the same one."""
    from pyspark.sql.functions import window

    return watermarked(rows).groupBy(window(rows.at, "3 minutes")).agg({"id": "max"})


def joined_in_time(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import expr

    later = watermarked(rows).selectExpr("id as other", "at as then", "app as its")
    near = "id + 1 = other AND then BETWEEN at AND at + INTERVAL 5 SECONDS"
    return watermarked(rows).join(later, expr(near)).select("id", "other", "app", "its")


def minutes(rows: DataFrame) -> DataFrame:
    """Sliding windows that event time closes."""
    from pyspark.sql.functions import window

    return watermarked(rows).groupBy(window("at", "2 minutes", "1 minute"), "app").count()


def windows_of_windows(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import window, window_time

    per_app = minutes(rows).groupBy(window(window_time("window"), "3 minutes"), "app")
    inner = per_app.agg({"count": "sum"}).withColumnRenamed("sum(count)", "n")
    return inner.groupBy(window("window", "6 minutes")).agg({"n": "sum"})


def windows_joined(rows: DataFrame) -> DataFrame:
    """Of one app beside those of another, which has none later on."""
    early = "app = 'a1' AND window.start < timestamp'2024-01-01 00:04:00'"
    few = minutes(rows).where(early).selectExpr("window", "count as n")
    return minutes(rows).where("app = 'a0'").join(few, "window", "left_outer")


def without_duplicates_all_along(rows: DataFrame) -> DataFrame:
    once = watermarked(rows).dropDuplicates(["id", "at"])
    return minutes(once).drop("app").dropDuplicates()


def sessions_in_windows(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import session_window, window

    visits = watermarked(rows.where("id % 97 < 20")).groupBy(
        session_window("at", "10 seconds"), "app"
    )
    return visits.count().groupBy(window("session_window", "3 minutes")).agg({"count": "max"})


def joined_then_windows(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import expr, window

    later = watermarked(rows).selectExpr("id as other", "at as then")
    near = "id + 1 = other AND then BETWEEN at AND at + INTERVAL 5 SECONDS"
    return watermarked(rows).join(later, expr(near)).groupBy(window("at", "1 minute")).count()


def windows_selected(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import window

    placed = watermarked(rows).select(window("at", "3 minutes", "2 minutes"), "id")
    return placed.where("id % 2 = 0").groupBy("window").agg({"id": "max"})


APPENDED: dict[str, Callable[[DataFrame], DataFrame]] = {
    "a selection": lambda rows: rows.select("id", (rows.id * 2).alias("twice")).where("id > 10"),
    "columns given, renamed and dropped": lambda rows: (
        rows.withColumn("n", rows.id % 7).withColumnRenamed("app", "b").drop("at")
    ),
    "a union with itself": lambda rows: rows.select("id").union(rows.selectExpr("id + 1000")),
    "a union by name": lambda rows: rows.select("id", "app").unionByName(
        rows.select("app", "id").where("id < 5")
    ),
    "a static table on the right": lambda rows: rows.join(names(rows.sparkSession), "app", "left"),
    "a static table on the left": lambda rows: names(rows.sparkSession).join(rows, "app", "right"),
    "streams joined in time": joined_in_time,
    "duplicates": lambda rows: rows.select("app").dropDuplicates(),
    "a pandas function": lambda rows: rows.mapInPandas(doubled, "id long").where("id > 100"),
    "SQL with a static join": sql("SELECT id, name FROM clicks JOIN names USING (app)"),
    "a WITH that is used twice": sql(
        "WITH few AS (SELECT id FROM clicks WHERE id < 9)"
        " SELECT id FROM few UNION ALL SELECT -id FROM few"
    ),
    "a WITH of the static side": sql(
        "WITH few AS (SELECT * FROM names WHERE name = 'one')"
        " SELECT id, name FROM clicks JOIN few USING (app) WHERE id < 99"
    ),
    "a view and a hint": sql(
        "SELECT /*+ BROADCAST(n) */ n.name, id FROM clicks JOIN names n"
        " ON n.app = clicks.app WHERE id % 2 = 0"
    ),
    "joins on columns of one name": sql(
        "SELECT id, n.name, m.name AS again, part FROM clicks JOIN names n ON n.app = clicks.app"
        " LEFT JOIN names m ON m.app = clicks.app LATERAL VIEW explode(split(m.name, 'e')) AS part"
    ),
    "joins of streams on columns of one name": sql(
        "SELECT a.id, b.app, c.id AS again, n.name FROM clicks a JOIN clicks b ON a.id = b.id"
        " JOIN clicks c ON b.id = c.id LEFT JOIN names n ON n.app = b.app WHERE a.id < 50"
    ),
    "words": sql("SELECT id, explode(split(app, '[a1]')) AS word FROM clicks"),
    "words in place of the text": lambda rows: rows.selectExpr(
        "id", "split(concat(app, ' b  c'), ' +') AS w"
    ).selectExpr("id", "posexplode_outer(w) AS (place, w)"),
    "a lateral view": sql(
        "SELECT id, n FROM clicks LATERAL VIEW OUTER explode(CASE WHEN id % 2 = 0"
        " THEN split(app, 'x') END) AS n WHERE id < 50"
    ),
    "fields of JSON": sql(
        'SELECT d.* FROM (SELECT from_json(concat(\'{"n": \', id, \', "t": {"a": "\', app,'
        " '\"}}'), 'n INT, t STRUCT<a: STRING>') AS d FROM clicks) WHERE d.n < 20"
    ),
    "repartition": lambda rows: rows.repartition(3).select("id"),
}

CLOSING: dict[str, Callable[[DataFrame], DataFrame]] = {
    "sliding windows": sliding,
    "windows over the column of an older frame": tumbling_of_an_older_column,
    "windows of windows of windows": windows_of_windows,
    "groups of windows": lambda rows: minutes(rows).groupBy("window").agg({"count": "sum"}),
    "windows joined": windows_joined,
    "duplicates before and behind windows": without_duplicates_all_along,
    "sessions in windows": sessions_in_windows,
    "windows of what was joined": joined_then_windows,
    "windows that were selected": windows_selected,
    "windows united": lambda rows: minutes(rows).union(minutes(rows).where("app <> 'a1'")),
    "a function and duplicates behind windows": lambda rows: (
        minutes(rows)
        .select("window", "count")
        .mapInArrow(as_they_are, "window struct<start: timestamp, end: timestamp>, count long")
        .dropDuplicates()
    ),
}


WHOLE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "a cube": lambda rows: (
        rows.cube("app", (rows.id % 2).alias("k"))
        .count()
        .selectExpr("coalesce(app, 'all') AS app", "coalesce(k, -1) AS k", "count")
    ),
    "a count": lambda rows: rows.groupBy("app").count(),
    "arithmetic of aggregates": lambda rows: (
        rows.groupBy((rows.id % 10).alias("k")).agg({"id": "sum"}).selectExpr("k", "`sum(id)` / 2")
    ),
    "SQL with HAVING": sql(
        "SELECT app, count(*) AS n, max(id) FROM clicks WHERE id > 5 GROUP BY app"
        " HAVING max(id) > 597"
    ),
    "groups behind joins on columns of one name": sql(
        "SELECT n.name, m.app, window(at, '3 minutes').start AS w, sum(id) AS s FROM clicks"
        " JOIN names n ON n.app = clicks.app LEFT JOIN names m ON m.app = n.app"
        " GROUP BY n.name, m.app, window(at, '3 minutes')"
    ),
    "grouping sets behind a join on columns of one name": sql(
        "SELECT coalesce(n.name, '-') AS name, coalesce(id % 3, -1) AS k, count(*) AS c FROM clicks"
        " JOIN names n ON n.app = clicks.app GROUP BY ROLLUP(n.name, id % 3)"
    ),
    "the first ones of a sorted count": lambda rows: (
        rows.groupBy((rows.id % 7).alias("k")).agg({"id": "max"}).orderBy("k").limit(3)
    ),
    "the first ones of what a WITH has counted": sql(
        "WITH few AS (SELECT f.app, f.id FROM clicks f JOIN names USING (app) WHERE f.id > 5)"
        " SELECT app, count(*) AS n FROM few GROUP BY app HAVING max(id) > 9 ORDER BY app LIMIT 1"
    ),
    "SQL with windows": sql(
        "SELECT window.start, app, sum(id) AS s FROM clicks GROUP BY window(at, '3 minutes'), app"
    ),
}


IN_THE_GUIDE = {
    "a selection",
    "a static table on the right",
    "a static table on the left",
    "streams joined in time",
    "duplicates",
    "SQL with a static join",
    "words",
    "sliding windows",
    "windows over the column of an older frame",
    "windows joined",
    "windows of what was joined",
    "a count",
    "SQL with HAVING",
}
"""`programs/test_rows.py` shows of each of them the same, with other rows."""


@pytest.mark.parametrize("in_the_guide", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_programs_of_spark_give_here_what_they_give_there(
    spark: SparkSession, still: Still, rows: str, tmp_path: Path, in_the_guide: bool
) -> None:
    appended, closing, whole = (
        {name: made for name, made in programs.items() if (name in IN_THE_GUIDE) == in_the_guide}
        for programs in (APPENDED, CLOSING, WHOLE)
    )

    def writer(program: Callable[[DataFrame], DataFrame], number: int) -> StreamWriter:
        """One job has them all, so each reads a place of its own."""
        place = f"{tmp_path}/rows-{number}"
        os.symlink(rows, place)
        frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(place)
        return still.writeStream(program(frame)).trigger(availableNow=True).uid(f"sink-{number}")

    writers = [
        writer(program, number).option("path", str(tmp_path / f"out-{number}"))
        for number, program in enumerate([*appended.values(), *closing.values()])
    ]
    for number, program in enumerate(whole.values()):
        memory = writer(program, 100 + number).format("memory").outputMode("complete")
        writers.append(memory.queryName(f"whole_{number}"))
    location = str(tmp_path / "checkpoints")
    query = still.start("programs", *writers, checkpointLocation=location)
    assert query.awaitTermination(120)

    table = spark.read.schema(SCHEMA).json(rows)
    for number, (name, program) in enumerate({**appended, **closing}.items()):
        truth = program(table)
        if name in closing:
            truth = truth.where(CLOSED)
        found = spark.read.schema(truth.schema).parquet(str(tmp_path / f"out-{number}"))
        assert sorted(found.collect()) == sorted(truth.collect()), name
        assert truth.count() > 0, name
    for number, (name, program) in enumerate(whole.items()):
        found, truth = spark.table(f"whole_{number}"), program(table)
        assert sorted(found.collect()) == sorted(truth.collect()), name
        assert truth.count() > 0, name


def test_files_tell_their_names_and_sizes_in_spark_s_hidden_column(
    spark: SparkSession, still: Still, rows: str, tmp_path: Path
) -> None:
    def told(reader: Any) -> DataFrame:
        frame = reader.schema(SCHEMA).json(rows).where("id < 3")
        return frame.select("id", "_metadata.file_name", "_metadata.file_size", "_metadata")

    def named(reader: Any) -> DataFrame:
        frame = reader.schema(SCHEMA).json(rows)
        return frame.selectExpr("id % 3 AS k", "input_file_name() AS file").dropDuplicates()

    writer = still.writeStream(told(spark.readStream)).format("memory").queryName("told")
    assert writer.trigger(availableNow=True).start().awaitTermination(60)
    assert sorted(spark.table("told").collect()) == sorted(told(spark.read).collect())
    writer = still.writeStream(named(spark.readStream)).format("memory").queryName("named")
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert sorted(spark.table("named").collect()) == sorted(named(spark.read).collect())


@pytest.mark.parametrize(
    "condition",
    [
        "app IN (SELECT app FROM names)",
        "app NOT IN (SELECT app FROM names WHERE name = 'one')",
        "EXISTS (SELECT 1 FROM names WHERE names.app = clicks.app AND name = 'one')",
        "NOT EXISTS (SELECT 1 FROM names WHERE names.app = clicks.app)",
        "EXISTS (SELECT 1 FROM names WHERE name = 'one') AND id > 590",
        "id IN (1, 2) AND app IN (SELECT app FROM names) AND id < (SELECT count(*) FROM names)",
    ],
)
def test_in_and_exists_are_joins_with_what_is_static(
    spark: SparkSession, still: Still, rows: str, condition: str
) -> None:
    asked = sql(f"SELECT id, app FROM clicks WHERE {condition}")
    found = asked(spark.readStream.schema(SCHEMA).json(rows))
    writer = still.writeStream(found).format("memory").queryName("asked")
    assert writer.trigger(availableNow=True).start().awaitTermination(60)
    truth = sorted(asked(spark.read.schema(SCHEMA).json(rows)).collect())
    assert truth
    assert sorted(spark.table("asked").collect()) == truth


def test_a_source_and_a_watermark_that_appear_twice_are_there_once(
    spark: SparkSession, still: Still, capsys: pytest.CaptureFixture[str]
) -> None:
    one = spark.readStream.format("rate").load()
    again = spark.readStream.format("rate").load()
    parts = [rows.withWatermark("timestamp", "1 minute") for rows in (one, one, again)]
    still.stream(parts[0].union(parts[1]).union(parts[2])).explain()
    assert "\ntask 2" not in capsys.readouterr().out  # the source, and what writes


def test_our_own_verbs_go_on_after_spark_s(spark: SparkSession, still: Still) -> None:
    rates = spark.readStream.format("rate").option("rowsPerSecond", 5).load()
    stream = still.stream(rates.selectExpr("value % 3 as k").groupBy("k").count()).uid("counts")
    assert stream.principal.given_uid == "counts"
    assert stream.columns == ["k", "count"]


def test_spark_s_verbs_go_on_after_ours(
    spark: SparkSession, still: Still, rows: str, tmp_path: Path
) -> None:
    stream = still.readStream.schema(SCHEMA).json(rows)
    twice = stream.flat_map_rows(lambda row: [(row.app,)] * 2, "app string").uid("twice")
    twice.toDataFrame().createOrReplaceTempView("twice")
    counts = spark.sql("SELECT app, count(*) FROM twice GROUP BY app")
    writer = still.writeStream(counts).format("memory").queryName("counted").outputMode("complete")
    assert writer.trigger(availableNow=True).start().awaitTermination(60)
    assert sorted(spark.table("counted").collect()) == [(f"a{i}", ROWS // 3 * 2) for i in range(3)]


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (lambda rows: rows.orderBy("value").where("value > 1"), "Sorting is not supported on"),
        (
            lambda rows: rows.groupBy("value").count().groupBy("count").count(),
            "already aggregated",
        ),
        (
            lambda rows: minutes_of(rows).withWatermark("t", "1 minute"),
            "Redefining watermark is disallowed",
        ),
    ],
)
def test_a_step_that_is_not_there_is_refused_with_its_name(
    spark: SparkSession, still: Still, program: Callable[[DataFrame], DataFrame], sentence: str
) -> None:
    with pytest.raises(BuildError, match=sentence):
        still.writeStream(program(spark.readStream.format("rate").load()))


def minutes_of(rates: DataFrame) -> DataFrame:
    from pyspark.sql.functions import window, window_time

    windows = rates.withWatermark("timestamp", "1 minute").groupBy(window("timestamp", "1 minute"))
    return windows.count().select("window", window_time("window").alias("t"), "count")


@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize(
    "behind",
    [
        lambda rows: rows.groupBy("window").count(),
        lambda rows: rows.select("window").dropDuplicates(["window"]),
        lambda rows: rows.join(rows.selectExpr("window", "t as other"), "window"),
    ],
    ids=["windows", "duplicates", "a join"],
)
def test_what_stands_behind_windows_gets_final_rows_or_is_refused_in_spark_s_words(
    spark: SparkSession,
    still: Still,
    tmp_path: Path,
    behind: Callable[[DataFrame], DataFrame],
    mode: str,
) -> None:
    rows = behind(minutes_of(spark.readStream.format("rate").load()))
    writer = still.writeStream(rows).format("memory").queryName("chained").outputMode(mode)
    with pytest.raises(BuildError, match="correctness' issue due to global watermark"):
        writer.option("checkpointLocation", str(tmp_path)).start()


@pytest.mark.parametrize("mode", ["append", "update"])
def test_a_result_is_sorted_as_a_whole_or_not_at_all(
    spark: SparkSession, still: Still, tmp_path: Path, mode: str
) -> None:
    from pyspark.sql.functions import window

    rates = spark.readStream.format("rate").load().withWatermark("timestamp", "1 second")
    counts = rates.groupBy(window("timestamp", "1 second")).count().orderBy("count")
    writer = still.writeStream(counts).format("memory").queryName("sorted").outputMode(mode)
    with pytest.raises(BuildError, match=r"Sorting is not supported .* in Complete output mode"):
        writer.option("checkpointLocation", str(tmp_path)).start()


@pytest.mark.slow
def test_each_batch_of_a_rate_comes_once_and_with_its_time_after_a_kill(
    spark: SparkSession, still: Still, run_and_kill: Callable[..., list[dict[str, Any]]]
) -> None:
    reader = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=700, numPartitions=2)
    rows = reader.options(startTimestamp=5000, batchInterval="100 ms", batches=25).load()
    found = run_and_kill(still.writeStream(rows).format("parquet"))
    timed = sorted((row["value"], row["timestamp"].timestamp()) for row in found)
    assert timed == [(n, 5.0 + n // 700) for n in range(25 * 700)]


def test_what_cannot_run_is_told_with_its_line(
    spark: SparkSession, still: Still, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    # PySpark asks only once in a process whether to note lines, and never again if that was in a
    # thread that had no session.
    monkeypatch.setattr("pyspark.errors.utils._enable_debugging_cache", True)
    frame = spark.readStream.schema(SCHEMA).json(rows)
    line = sys._getframe().f_lineno + 1
    rank = F.row_number().over(Window.partitionBy("app").orderBy("at"))
    with pytest.raises(BuildError, match=rf"(?i)window .*\(test_whole_plans.py, line {line}\)"):
        still.writeStream(frame.withColumn("rank", rank).where("rank < 3"))

    asked = sql("SELECT id,\n rank() OVER (PARTITION BY app ORDER BY at) AS r FROM clicks")
    with pytest.raises(BuildError, match=r"(?i)window .*\(line 2 of the SQL text\)"):
        still.writeStream(asked(frame))


def test_an_option_that_nobody_honours_is_named(
    spark: SparkSession, still: Still, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = spark.readStream.schema(SCHEMA).options(prefersDecimal="true", header="true")
    stream = still.stream(reader.option("maxFilesPerTrigger", 1).json(rows))
    assert isinstance(stream.node.operator.source, JsonLinesSource)
    for said in (
        "option prefersDecimal of the source json has no effect: the schema is there already",
        "option header means nothing to the source json: no effect",
        "option maxFilesPerTrigger of the source json has no effect",
    ):
        assert said in caplog.text


def test_an_option_that_nobody_knows_is_named_and_passed_over_in_a_program_of_spark_s(
    spark: SparkSession, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    stillframe.everywhere(spark)
    try:
        frame = spark.readStream.schema(SCHEMA).json(rows)
        writer = frame.writeStream.format("memory").queryName("passed_over").option("header", True)
        assert writer.trigger(availableNow=True).start().awaitTermination(60)
    finally:
        stillframe.nowhere()
    assert spark.table("passed_over").count() == ROWS
    assert "option header means nothing to the sink memory: no effect" in caplog.text


def options_of(spark: SparkSession, format: str) -> list[str]:
    """What Spark's own classes name."""
    catalyst, sql = "org.apache.spark.sql.catalyst.", "org.apache.spark.sql.execution.datasources."
    classes = {
        "json": f"{catalyst}json.JSONOptions",
        "csv": f"{catalyst}csv.CSVOptions",
        "text": f"{sql}text.TextOptions",
        "parquet": f"{sql}parquet.ParquetOptions",
        "orc": f"{sql}orc.OrcOptions",
        "": f"{sql}FileIndexOptions",
    }
    jvm: Any = spark._jvm
    loaded = jvm.java.lang.Class.forName(f"{classes[format]}$").getField("MODULE$").get(None)
    names = loaded.getAllOptions().toSeq()
    return sorted(str(names.apply(place)) for place in range(names.size()))


_OF_WRITERS = {
    *("ignoreNullFields", "pretty", "writeNonAsciiCharacterAsCodePoint", "escapeQuotes"),
    *("quoteAll", "extension", "sortKeys", "parquet.compression", "orc.compress"),
}


@pytest.mark.parametrize("format", ["json", "csv", "text", "parquet", "orc"])
def test_every_option_of_files_that_spark_knows_is_known_here(
    spark: SparkSession, format: str
) -> None:
    from stillframe.spark.formats.ours import OWN_SOURCES
    from stillframe.spark.plans.leaf_options import KNOWN

    known = {*(OWN_SOURCES[format].option_names or ()), *KNOWN, *_OF_WRITERS}
    asked = [*options_of(spark, format), *options_of(spark, "")]
    assert [each for each in asked if each.lower() not in {name.lower() for name in known}] == []


@pytest.mark.parametrize(
    ("format", "text", "schema", "options"),
    [
        (
            "json",
            '{"id": 1, "at": "03.01.2024 10:15"}\n{"id": 2, "at": "04.01.2024 11:30"}\n',
            "id long, at timestamp",
            {"timestampFormat": "dd.MM.yyyy HH:mm"},
        ),
        (
            "csv",
            'id;;note\n1;;"two\nlines"\n2;;one\n',
            "id long, note string",
            {"multiLine": "true", "header": "true", "sep": ";;"},
        ),
    ],
    ids=["timestampFormat", "multiLine"],
)
def test_files_with_options_that_only_spark_s_reader_follows_are_read_by_it(
    spark: SparkSession,
    still: Still,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    format: str,
    text: str,
    schema: str,
    options: dict[str, str],
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text(text)
    reader = spark.readStream.format(format).schema(schema).options(**options)
    writer = still.writeStream(reader.load(str(tmp_path / "in"))).format("memory")
    query = writer.queryName(f"by_spark_{format}").trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert f"the source {format} is read by a query of Spark's own: " in caplog.text
    truth = spark.read.format(format).schema(schema).options(**options)
    expected = sorted(truth.load(str(tmp_path / "in")).collect())
    assert len(expected) == 2
    assert None not in expected[0]
    assert sorted(spark.table(f"by_spark_{format}").collect()) == expected


@pytest.mark.parametrize("format", ["json", "csv"])
def test_files_have_times_by_the_patterns_of_spark(
    spark: SparkSession, rows: str, tmp_path: Path, format: str
) -> None:
    def written(place: Path) -> list[str]:
        frame = spark.readStream.schema(SCHEMA).json(rows).where("id % 100 = 0")
        times = frame.selectExpr(
            "id", "at", "cast(at AS date) AS day", "CASE WHEN id > 0 THEN at END AS `n.t`"
        )
        writer = times.writeStream.format(format).option("timestampFormat", "dd/MM/yy, HH'h'mm")
        writer = writer.options(dateFormat="MMM d", checkpointLocation=f"{place}-checkpoints")
        query = writer.trigger(availableNow=True).start(str(place))
        assert query.awaitTermination(120)
        return sorted(row.value for row in spark.read.text(str(place)).collect())

    of_spark = written(tmp_path / "spark")
    stillframe.everywhere(spark)
    try:
        assert written(tmp_path / "here") == of_spark
        nested = spark.readStream.schema("s struct<at: timestamp>").json(rows)
        with pytest.raises(BuildError, match=r"timestampFormat .* in column s they are inside"):
            nested.writeStream.format("json").option("timestampFormat", "yyyy").start(
                str(tmp_path / "nested"), checkpointLocation=str(tmp_path / "nested-checkpoints")
            )
    finally:
        stillframe.nowhere()
    assert "01/01/24, 00h01" in of_spark[1]


def test_everywhere_takes_the_queries_of_its_session_and_no_other_s(
    spark: SparkSession, rows: str, tmp_path: Path
) -> None:
    from stillframe.coordinator.query import Query

    other = spark.newSession()
    stillframe.everywhere(spark)
    try:
        counts = spark.readStream.schema(SCHEMA).json(rows).groupBy("app").count()
        writer = counts.writeStream.format("memory").queryName("counted").outputMode("complete")
        query = writer.trigger(availableNow=True).start()
        assert isinstance(query, Query)
        assert query.awaitTermination(60)
        assert sorted(spark.table("counted").collect()) == [(f"a{i}", ROWS // 3) for i in range(3)]
        theirs = other.readStream.format("rate").load().writeStream
        assert type(theirs).__module__.startswith("pyspark.")
        with pytest.raises(Exception, match="writeStream"):
            spark.range(1).writeStream  # noqa: B018
    finally:
        stillframe.nowhere()
    assert type(counts.writeStream).__module__.startswith("pyspark.")


@pytest.mark.kafka
def test_everywhere_reads_kafka_without_a_jar(
    spark: SparkSession, kafka: Any, tmp_path: Path
) -> None:
    from pyspark.sql.functions import explode, split

    topic = kafka.topic(2)
    for partition in range(2):
        kafka.send(topic, [b"a b", b"b c"], partition)
    stillframe.everywhere(spark)
    try:
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka.address)
        lines = reader.option("subscribe", topic).option("startingOffsets", "earliest").load()
        words = lines.selectExpr("CAST(value AS STRING)").select(
            explode(split("value", " ")).alias("word")
        )
        writer = words.groupBy("word").count().writeStream.format("memory").queryName("words")
        query = writer.outputMode("complete").trigger(availableNow=True).start()
        assert query.awaitTermination(60)
        assert sorted(spark.table("words").collect()) == [("a", 2), ("b", 4), ("c", 2)]
    finally:
        stillframe.nowhere()
