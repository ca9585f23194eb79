"""PySpark's dialect: the words, schemas and errors of a DataFrame, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import stillframe
from stillframe.config import JobConfig
from stillframe.errors import BuildError, StartRefused, UnknownOption, UserCodeError
from stillframe.graph.logical import Aggregate, Filter, MapInArrow, Node, Project, Read, Write, walk
from stillframe.ids import CheckpointId, Mark, OperatorUid, Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream
    from stillframe.spark.writer import StreamWriter

MARK = Mark(Writer("0123abcd", OperatorUid("w"), None), CheckpointId(1))
pytestmark = pytest.mark.spark


@pytest.fixture
def clicks(still: Still) -> Stream:
    return still.readStream.format("clicks").option("records", 1000).load()


@pytest.fixture
def same(spark: SparkSession, clicks: Stream) -> DataFrame:
    """An ordinary DataFrame with the columns of `clicks`, to compare with."""
    return spark.createDataFrame([], clicks.schema)


def kinds(stream: Stream) -> list[str]:
    return [node.kind for node in walk([stream.node])]


def checkpointed(writer: StreamWriter, tmp_path: Path) -> StreamWriter:
    return writer.option("checkpointLocation", str(tmp_path / "chk")).option(
        "checkpointInterval", "1 second"
    )


def sink_of(still: Still, writer: StreamWriter, name: str = "job") -> tuple[Node, JobConfig]:
    sinks, config = still.prepare(name, writer)
    assert isinstance(sinks[0].operator, Write)
    return sinks[0], config


# --- Schemas ------------------------------------------------------------------------------------


def test_every_operation_has_the_schema_that_spark_gives_it(
    clicks: Stream, same: DataFrame
) -> None:
    from pyspark.sql import functions as F

    operations: list[Any] = [
        lambda df: df.select("id", F.col("user_id") + 1, df.app_id.alias("app")),
        lambda df: df.select(["id", "app_id"]),
        lambda df: df.select("*", F.lit("x").alias("x")),
        lambda df: df.selectExpr("id * 2 AS twice", "upper(app_id) AS app"),
        lambda df: df.filter("id > 5").where(df.app_id == "x"),
        lambda df: df[df.id > 5][["id", "at"]],
        lambda df: df.withColumn("id", F.col("id").cast("int")),
        lambda df: df.withColumns({"a": F.lit(1), "b": df.id + df.user_id}),
        lambda df: df.withColumnRenamed("id", "number").withColumnRenamed("nothing", "x"),
        lambda df: df.withColumnsRenamed({"id": "a", "at": "b"}),
        lambda df: df.drop("at", "nothing"),
        lambda df: df.toDF("a", "b", "c", "d"),
        lambda df: df.alias("c").select("c.id", "c.app_id"),
        lambda df: df.transform(lambda each: each.drop("id")),
        lambda df: df.groupBy("app_id").count(),
        lambda df: df.groupby(df.app_id, (df.id % 2).alias("odd")).sum("user_id"),
        lambda df: df.groupBy("app_id").min("id", "user_id"),
        lambda df: df.groupBy("app_id").max("user_id").select("app_id"),
        lambda df: df.groupBy("app_id").agg(F.max("at"), F.min(df.app_id)),
        lambda df: df.groupBy("app_id").avg("user_id"),
        lambda df: df.groupBy("app_id").mean("user_id"),
        lambda df: df.groupBy("app_id").agg({"id": "max"}),
        lambda df: df.groupBy("app_id").agg(
            F.count("*").alias("n"), (F.sum("id") / F.count("id")).alias("mean")
        ),
        lambda df: df.groupBy().count(),
    ]
    for place, operation in enumerate(operations):
        assert operation(clicks).schema == operation(same).schema, f"operation {place}"


def test_what_a_dataframe_can_do_a_stream_can_also_where_nobody_wrote_it_down(
    clicks: Stream, same: DataFrame
) -> None:
    from pyspark.sql import functions as F

    names = same.sparkSession.createDataFrame([("a", "b")], "app_id string, name string")
    operations: list[Any] = [
        lambda df: df.dropna(subset=["app_id"]),
        lambda df: df.na.fill({"app_id": "none"}),
        lambda df: df.fillna(0).replace("a", "b"),
        lambda df: df.unpivot("app_id", ["id", "user_id"], "what", "value"),
        lambda df: df.withMetadata("id", {"unit": "none"}),
        lambda df: df.select(df.colRegex("`.*id`")),
        lambda df: df.hint("broadcast").repartition(3, "id").coalesce(1),
        lambda df: df.limit(3),
        lambda df: df.crossJoin(names.select("name")),
        lambda df: df.unionByName(df.drop("at"), allowMissingColumns=True).dropna(),
        lambda df: df.agg(F.max("id")),
        lambda df: df.rollup("app_id").count(),
        lambda df: df.cube("app_id", df.user_id).agg({"id": "max"}),
        lambda df: df.groupingSets([["app_id"], ["user_id"]], "app_id", "user_id").count(),
        lambda df: df.dropna().filter(df.id > 7).select(df.app_id),
        lambda df: df.to(same.select("id", "at").schema),
    ]
    for place, operation in enumerate(operations):
        made = operation(clicks)
        assert type(made) is type(clicks), f"operation {place}"
        assert made.columns == operation(same).columns, f"operation {place}"
        kinds_of = [each.dataType for each in made.schema]
        assert kinds_of == [each.dataType for each in operation(same).schema], f"operation {place}"
    assert clicks.sparkSession is same.sparkSession
    assert "unpivot" in dir(clicks)
    assert "collect" not in dir(clicks)


def test_a_method_of_dataframes_names_and_follows_the_operator_as_one_of_ours_does(
    clicks: Stream,
) -> None:
    counted = clicks.dropna().rollup("app_id").count().uid("counts")
    assert isinstance(counted.principal.operator, Aggregate)
    assert counted.principal.given_uid == "counts"
    assert clicks.hint("broadcast").node is clicks.node
    clicks.dropna().createOrReplaceTempView("clicked")
    counts = clicks.still.stream(clicks.sparkSession.sql("SELECT count(*) FROM clicked"))
    assert kinds(counts)[:2] == ["read", "filter"]


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (lambda df: df.sample(0.5), "Sampling is not supported on streaming"),
        (lambda df: df.sortWithinPartitions("id"), "Sorting is not supported on streaming"),
        (lambda df: df.offset(3), "Offset is not supported on streaming"),
        (lambda df: df.intersect(df), "Intersect of streaming .* is not supported"),
        (lambda df: df.persist(), "Queries with streaming sources must be executed with"),
        (lambda df: df.observe("seen", F_count()), "still.writeStream"),
    ],
    ids=["sample", "sort", "offset", "intersect", "persist", "observe"],
)
def test_what_spark_refuses_of_a_stream_is_refused_in_its_words(
    clicks: Stream, operation: Any, sentence: str
) -> None:
    with pytest.raises(Exception, match=f"(?i){sentence}") as refused:
        operation(clicks)
    assert "Py4J" not in type(refused.value).__name__


def F_count() -> Any:
    from pyspark.sql import functions as F

    return F.count(F.lit(1)).alias("n")


def test_a_stream_describes_itself_as_a_dataframe_does(
    clicks: Stream, same: DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (clicks.columns, clicks.dtypes) == (same.columns, same.dtypes)
    assert clicks.isStreaming
    same.printSchema()
    expected = capsys.readouterr().out
    clicks.printSchema()
    assert capsys.readouterr().out == expected


def test_a_column_of_an_earlier_stream_still_means_the_same_column(clicks: Stream) -> None:
    kept = clicks.select("id", "app_id").withColumn("x", clicks.id + 1).filter(clicks.id > 7)
    assert kept.select(clicks.app_id, "x").columns == ["app_id", "x"]
    counted = clicks.groupBy("app_id").count()
    assert counted.filter(clicks.app_id != "x").columns == ["app_id", "count"]


# --- The graph ----------------------------------------------------------------------------------


def test_the_graph_follows_what_was_written(clicks: Stream) -> None:
    made = clicks.filter("id > 5").select("app_id").map_rows(lambda row: row, "app_id string")
    assert kinds(made) == ["read", "filter", "project", "mapinarrow"]
    assert made.node.schema.names == ["app_id"]


def test_a_projection_that_changes_nothing_is_left_out(clicks: Stream) -> None:
    assert clicks.select("*").drop("nothing").select(*clicks.columns).node is clicks.node


def test_a_grouping_is_a_projection_an_aggregate_and_a_projection(clicks: Stream) -> None:
    from pyspark.sql import functions as F

    total = F.sum(clicks.user_id + 1) * 2
    grouped = clicks.groupBy("app_id").agg(total.alias("total"))
    assert kinds(grouped) == ["read", "project", "aggregate", "project"]
    aggregate = next(n for n in walk([grouped.node]) if isinstance(n.operator, Aggregate))
    assert isinstance(aggregate.operator, Aggregate)
    assert aggregate.operator.keys == ("app_id",)
    assert [call.function for call in aggregate.operator.calls] == ["sum"]
    assert set(aggregate.schema.names) >= {"app_id", aggregate.operator.calls[0].name}


def test_the_uid_of_a_grouped_stream_is_that_of_its_state(clicks: Stream) -> None:
    from pyspark.sql import functions as F

    grouped = clicks.groupBy("app_id").agg((F.sum("id") + 1).alias("n"))
    named = grouped.uid("counts").parallelism(3)
    assert isinstance(named.node.operator, Project)
    assert isinstance(named.node.inputs[0].operator, Aggregate)
    assert (named.node.inputs[0].uid, named.node.inputs[0].parallelism) == ("counts", 3)


def test_uid_and_parallelism_belong_to_the_operation_they_follow(clicks: Stream) -> None:
    named = clicks.uid("source").parallelism(2).filter("id > 1").uid("late")
    filtered = named.node
    assert isinstance(filtered.operator, Filter)
    assert (filtered.uid, filtered.inputs[0].uid) == ("late", "source")
    assert (filtered.parallelism, filtered.inputs[0].parallelism) == (None, 2)


def test_explain_prints_the_physical_plan(
    clicks: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.groupBy("app_id").count().explain()
    printed = capsys.readouterr().out
    assert "read clicks" in printed
    assert "hash(app_id)" in printed


def test_functions_become_map_operators_that_carry_their_names(clicks: Stream) -> None:
    def halve(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, batch.num_rows // 2).select(["id"])

    def later(row: Any) -> list[Any]:
        return [(row.id,)]

    for made in (
        clicks.mapInArrow(halve, "id long"),
        clicks.mapInPandas(halve, "id long"),
        clicks.flat_map_rows(later, "id long"),
    ):
        assert isinstance(made.node.operator, MapInArrow)
        assert made.node.operator.name in ("halve", "later")
        assert made.dtypes == [("id", "bigint")]
    ids = pa.record_batch({"id": [1, 2, 3, 4]})
    operator = clicks.mapInArrow(halve, "id long").node.operator
    assert isinstance(operator, MapInArrow)
    assert [batch.num_rows for batch in operator.function(iter([ids]))] == [2]


# --- Mistakes: Spark's words ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "condition"),
    [
        (lambda s: s.select("ap_id"), "UNRESOLVED_COLUMN.WITH_SUGGESTION"),
        (lambda s: s.filter("ap_id = 'x'"), "UNRESOLVED_COLUMN.WITH_SUGGESTION"),
        (lambda s: s.groupBy("ap_id").count(), "UNRESOLVED_COLUMN.WITH_SUGGESTION"),
        (lambda s: s["ap_id"], "UNRESOLVED_COLUMN.WITH_SUGGESTION"),
        (lambda s: s.filter("app_id"), "DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN"),
        (lambda s: s.select(s.at + s.at), "DATATYPE_MISMATCH.BINARY_OP_WRONG_TYPE"),
        (lambda s: s.selectExpr("nosuch(id)"), "UNRESOLVED_ROUTINE"),
        (lambda s: s.selectExpr("id +"), "PARSE_SYNTAX_ERROR"),
        (lambda s: s.drop("app_id").select(s.app_id), "MISSING_ATTRIBUTES"),
        (lambda s: s.map_rows(lambda row: row, "id lon"), "UNSUPPORTED_DATATYPE"),
    ],
)
def test_a_mistake_is_told_in_sparks_words(clicks: Stream, mistake: Any, condition: str) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as raised:
        mistake(clicks)
    assert str(raised.value.getCondition()).startswith(condition)


def test_an_unknown_attribute_is_told_in_sparks_words(clicks: Stream) -> None:
    with pytest.raises(AttributeError, match="ATTRIBUTE_NOT_SUPPORTED"):
        _ = clicks.ap_id


# --- Mistakes: ours -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: s.selectExpr("explode(array(id, user_id))"),
        lambda s: s.selectExpr("row_number() over (order by id) as n"),
        lambda s: s.selectExpr("input_file_name() as f"),
        lambda s: s.filter("id in (select 1)"),
        lambda s: s.select("id", "id"),
        lambda s: s.map_rows("not a function", "id long"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_in_one_sentence(clicks: Stream, operation: Any) -> None:
    with pytest.raises(BuildError) as raised:
        operation(clicks)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("show", "a stream never ends"),
        ("collect", "a stream never ends"),
        ("orderBy", "no last row"),
        ("write", "writeStream"),
    ],
)
def test_a_method_that_a_stream_has_not_says_what_to_do_instead(
    clicks: Stream, name: str, why: str
) -> None:
    with pytest.raises(BuildError, match=f"a stream has no {name}: .*{why}"):
        getattr(clicks, name)
    assert not hasattr(clicks, name)


def test_an_aggregated_stream_is_not_grouped_again(clicks: Stream) -> None:
    with pytest.raises(BuildError, match="already aggregated"):
        clicks.groupBy("app_id").count().filter("count > 1").groupBy("count")


def test_a_key_that_rows_are_not_told_apart_by_is_refused_when_it_is_written(
    spark: SparkSession, still: Still
) -> None:
    from pyspark.sql.functions import window

    rows = "SELECT struct(1 AS x, 2 AS y) AS place, timestamp'2024-01-01' AS at"
    places = still.stream(spark.sql(rows))
    windowed = places.withWatermark("at", "1 minute").groupBy(window("at", "1 hour"), "place")
    for grouped in (places.groupBy("place"), windowed):
        with pytest.raises(BuildError, match=r"groupBy 'place' is .*<x:int,y:int>"):
            grouped.count()


def test_a_grouped_stream_names_what_it_has(clicks: Stream) -> None:
    with pytest.raises(
        BuildError, match="no pivot: it has count, sum, min, max, avg, agg, process"
    ):
        clicks.groupBy("app_id").pivot("id")


# --- Reading --------------------------------------------------------------------------------------


def test_a_file_stream_has_the_schema_that_was_declared(
    spark: SparkSession, still: Still, tmp_path: Path
) -> None:
    path = str(tmp_path / "clicks")
    spark.range(10).write.parquet(path)
    ways = [
        still.readStream.schema("id long").parquet(path),
        still.readStream.format("PARQUET").schema(spark.range(1).schema).load(path),
        still.readStream.option("PATH", path).schema("id long").load(),
        still.readStream.load(path, format="parquet", schema="id long"),
    ]
    assert [stream.columns for stream in ways] == [["id"]] * 4
    read = ways[0].node.operator
    assert isinstance(read, Read)
    assert read.source.describe() == f"parquet {path}"
    assert read.source.discovery_interval_seconds == 1.0, "it is followed, as in Spark"


def test_a_file_stream_without_a_schema_is_refused_in_sparks_words(
    still: Still, tmp_path: Path
) -> None:
    message = "Schema must be specified when creating a streaming source DataFrame"
    for reader in (still.readStream.parquet, still.readStream.json):
        with pytest.raises(BuildError, match=message):
            reader(str(tmp_path))


def test_a_path_that_does_not_exist_is_refused_at_once(still: Still, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    with pytest.raises(BuildError, match=r"\[PATH_NOT_FOUND\] Path does not exist: .*nowhere"):
        still.readStream.schema("id long").json(path)
    with pytest.raises(BuildError, match="the source json has no path"):
        still.readStream.schema("id long").format("json").load()


def test_an_unknown_format_names_the_nearest(clicks: Stream, still: Still) -> None:
    with pytest.raises(BuildError, match="no format 'parqet', did you mean 'parquet'"):
        still.readStream.format("parqet")
    with pytest.raises(BuildError, match="no format 'memry', did you mean 'memory'"):
        clicks.writeStream.format("memry")


@pytest.mark.parametrize("name", ["xml", "avro"])
def test_a_format_that_is_like_no_other_is_not_taken_for_one(
    clicks: Stream, still: Still, name: str
) -> None:
    for ask in (still.readStream.format, clicks.writeStream.format):
        with pytest.raises(BuildError, match=f"no format '{name}'; there are ") as refused:
            ask(name)
        assert "did you mean" not in str(refused.value)


def test_an_unknown_option_of_a_source_names_the_nearest(still: Still, tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match="no option 'recods'; did you mean 'records'"):
        still.readStream.format("clicks").option("recods", 5).load()
    with pytest.raises(UnknownOption, match="no option 'pth'; did you mean 'path'"):
        still.readStream.schema("id long").option("pth", "x").parquet(str(tmp_path))


def test_a_generator_has_its_own_schema(still: Still) -> None:
    rate = still.readStream.format("rate").options(rowsPerSecond=5, numPartitions=2).load()
    assert rate.dtypes == [("timestamp", "timestamp"), ("value", "bigint")]
    with pytest.raises(BuildError, match="the source rate has a schema of its own"):
        still.readStream.format("rate").schema("a int").load()


def test_a_dataframe_becomes_a_stream_with_its_schema(spark: SparkSession, still: Still) -> None:
    frame = spark.range(10).selectExpr("id", "cast(id as string) as name")
    assert still.stream(frame).schema == frame.schema


def test_what_is_no_dataframe_is_refused(still: Still) -> None:
    with pytest.raises(BuildError, match="takes a DataFrame, not a list"):
        still.stream([1, 2])  # type: ignore[arg-type]


def test_a_spark_connect_session_is_refused_at_once() -> None:
    remote = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(StartRefused, match=r"Spark Connect session.*use a classic session"):
        stillframe.on(remote)


# --- Writing --------------------------------------------------------------------------------------


def test_a_writer_makes_a_file_sink_and_the_jobs_settings(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    writer = clicks.writeStream.format("json").option("path", str(tmp_path / "out"))
    writer = checkpointed(writer, tmp_path).option("PARALLELISM", 3).uid("the-sink")
    node, config = sink_of(still, writer)
    assert node.uid == "the-sink"
    assert node.operator.sink.describe() == f"json {tmp_path / 'out'}"
    assert (config.parallelism, config.checkpoint_interval_seconds) == (3, 1.0)


def test_parquet_is_the_default_format_and_needs_a_path(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match="the sink parquet has no path"):
        checkpointed(clicks.writeStream, tmp_path).start()


def test_an_unknown_option_of_a_writer_names_the_nearest(clicks: Stream, tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match="did you mean 'checkpointInterval'"):
        clicks.writeStream.option("checkpointIntervall", "1 second").start(str(tmp_path))
    with pytest.raises(UnknownOption, match="the sink noop has no option 'path'"):
        clicks.writeStream.format("noop").start(str(tmp_path))


def test_of_a_job_of_several_sinks_one_that_shows_records_at_checkpoints_is_refused_without_them(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    message = "checkpoints are off: set the option checkpointInterval"
    location = str(tmp_path / "chk")
    for writer in (
        clicks.writeStream.option("path", str(tmp_path / "out")),
        clicks.writeStream.format("memory").queryName("rows"),
        clicks.writeStream.foreachBatch(lambda df, epoch: None),
        clicks.writeStream.option("checkpointLocation", location).option("path", location),
    ):
        with pytest.raises(BuildError, match=message):
            still.start("job", writer)


def test_a_discarding_sink_needs_no_checkpoints(clicks: Stream, still: Still) -> None:
    node, config = sink_of(still, clicks.writeStream.format("noop"))
    assert node.operator.sink.describe() == "noop"
    assert config.checkpoint_interval_seconds is None


def test_append_mode_of_an_aggregation_is_refused_in_sparks_words(
    clicks: Stream, still: Still
) -> None:
    counted = clicks.groupBy("app_id").count().withColumnRenamed("count", "n")
    message = r"\[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION\].*append.*without watermark"
    with pytest.raises(BuildError, match=message):
        counted.writeStream.format("noop").start()
    sink_of(still, counted.writeStream.format("noop").outputMode("update"))
    sink_of(still, clicks.writeStream.format("noop").outputMode("Update"))


def test_output_modes_that_do_not_exist_are_refused(clicks: Stream) -> None:
    with pytest.raises(BuildError, match="Invalid streaming output mode: upsert"):
        clicks.writeStream.outputMode("upsert")


def test_a_trigger_says_when_checkpoints_are_taken_and_whether_the_job_stops(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    def config(**trigger: Any) -> JobConfig:
        writer = clicks.writeStream.format("noop").trigger(**trigger)
        return sink_of(still, writer.option("checkpointLocation", str(tmp_path)))[1]

    assert config(processingTime="5 seconds").checkpoint_interval_seconds == 5.0
    assert not config(processingTime="5 seconds").available_now
    assert config(processingTime="0 seconds").checkpoint_interval_seconds == 1.0
    assert config(continuous="3 seconds").checkpoint_interval_seconds == 3.0
    assert not config(continuous="3 seconds").available_now
    for name in ("availableNow", "once"):
        assert config(**{name: True}).available_now
        assert config(**{name: True}).checkpoint_interval_seconds == 1.0


def test_triggers_that_cannot_be_meant_are_refused(clicks: Stream, still: Still) -> None:
    writer = clicks.writeStream.format("noop")
    with pytest.raises(BuildError, match=r"trigger\(realTime='5 minutes'\) is not there"):
        writer.trigger(realTime="5 minutes")
    with pytest.raises(BuildError, match="takes one of processingTime, continuous"):
        writer.trigger(continuous="1 second", processingTime="1 second")
    with pytest.raises(BuildError, match="takes one of processingTime, continuous, availableNow"):
        writer.trigger()
    with pytest.raises(BuildError, match="takes one of processingTime, continuous, availableNow"):
        writer.trigger(availableNow=True, processingTime="1 second")
    with pytest.raises(BuildError, match="processingTime is a duration such as"):
        writer.trigger(processingTime="soon")
    both = clicks.writeStream.option("checkpointInterval", "1 s").trigger(processingTime="2 s")
    with pytest.raises(BuildError, match=r"checkpointInterval is '1 s' and '2 s' in one job"):
        sink_of(still, both.format("noop"))
    endless = still.readStream.format("clicks").load()
    with pytest.raises(BuildError, match="would never stop: the source clicks"):
        sink_of(still, endless.writeStream.format("noop").trigger(once=True))


def started(writer: StreamWriter, tmp_path: Path) -> JobConfig:
    """The settings of the job that `start` would run."""
    from stillframe.spark.launch import rehearse

    seen: list[JobConfig] = []

    def look(plan: object, config: JobConfig) -> Any:
        seen.append(config)

    with rehearse(look, str(tmp_path)):
        writer.start()
    [config] = seen
    return config


def test_a_query_with_a_location_takes_checkpoints(clicks: Stream, tmp_path: Path) -> None:
    writer = clicks.writeStream.format("noop").option("checkpointLocation", str(tmp_path))

    assert started(writer, tmp_path).checkpoint_interval_seconds == 1.0
    assert started(writer.trigger(processingTime="9 s"), tmp_path).checkpoint_interval_seconds == 9


@pytest.mark.parametrize("kind", ["memory", "console", "foreachBatch", "noop"])
def test_a_query_needs_no_location_where_spark_needs_none(
    kind: str, clicks: Stream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = clicks.writeStream.queryName(f"no_location_of_{kind}").trigger(availableNow=True)
    if kind == "foreachBatch":
        writer = writer.foreachBatch(lambda df, epoch: None)
    else:
        writer = writer.format(kind)
    config = started(writer, tmp_path)

    assert config.checkpoint_interval_seconds == 1.0
    assert config.checkpoint_location is not None
    assert Path(config.checkpoint_location).is_dir()
    assert f"keeps its checkpoints in {config.checkpoint_location}" in caplog.text


def test_a_query_without_trigger_and_location_takes_checkpoints_only_if_its_sink_needs_them(
    clicks: Stream, tmp_path: Path
) -> None:
    assert started(clicks.writeStream.format("noop"), tmp_path).checkpoint_location is None
    remembered = clicks.writeStream.format("memory").queryName("remembered")
    assert started(remembered, tmp_path).checkpoint_interval_seconds == 1.0


def test_a_file_sink_needs_a_location_as_in_spark(clicks: Stream, tmp_path: Path) -> None:
    writer = clicks.writeStream.option("path", str(tmp_path / "out"))
    for each in (writer, writer.trigger(availableNow=True)):
        with pytest.raises(BuildError, match="checkpointLocation must be specified"):
            each.start()


def test_a_job_of_several_sinks_takes_no_checkpoints_unless_it_says_so(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    location = clicks.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    assert sink_of(still, location)[1].checkpoint_interval_seconds is None


def test_the_console_shows_each_epoch_as_spark_shows_its_batches(
    still: Still, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = still.stream(spark.range(0, 40, 1, 1)).writeStream.format("console")
    writer.option("numRows", 5).start().awaitTermination(120)
    shown = capfd.readouterr().out
    spark.range(40).show(5)

    line = "-" * 43
    assert f"{line}\nBatch: 0\n{line}\n{capfd.readouterr().out}" in shown
    assert shown.count("Batch:") == 1, "epochs without rows are not shown"


def test_the_console_shows_a_whole_result_only_when_it_has_changed(
    clicks: Stream, still: Still, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = clicks.groupBy("id").count().select("id")
    writer = counts.writeStream.format("console").outputMode("complete")
    node, _ = sink_of(still, checkpointed(writer, tmp_path))
    for epoch, ids in enumerate(([1, 2], [1, 2], [1, 2, 3])):
        files = staged_epoch(node, tmp_path, f"part-{epoch}", ids)
        node.operator.sink.handler(epoch, MARK, files)
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Batch")]
    assert shown == ["Batch: 0", "Batch: 2"]


def test_what_a_writer_has_not_says_what_to_do_instead(clicks: Stream) -> None:
    with pytest.raises(BuildError, match=r": .*foreachBatch"):
        clicks.writeStream.format("noop").toTable("t")


def test_partition_columns_are_checked_before_the_start(clicks: Stream, tmp_path: Path) -> None:
    options = {"checkpointLocation": str(tmp_path / "chk"), "checkpointInterval": "1 second"}
    files = clicks.writeStream.option("path", str(tmp_path / "out"))
    for wrong, said in (
        (files.partitionBy("nobody"), "Partition column nobody not found"),
        (clicks.writeStream.format("noop").partitionBy("app_id"), "the sink noop has no files"),
    ):
        with pytest.raises(BuildError, match=said):
            clicks.still.prepare("job", wrong, **options)
    with pytest.raises(BuildError, match="Cannot use all columns"):
        clicks.still.prepare("job", files.partitionBy(*clicks.columns), **options)


def test_a_job_has_a_sink(still: Still) -> None:
    with pytest.raises(BuildError, match="job 'nothing' has no sink"):
        still.start("nothing")


def test_two_operators_with_one_uid_are_refused(clicks: Stream, still: Still) -> None:
    from stillframe.graph.plan import build_plan

    first = clicks.filter("id > 1").uid("same").writeStream.format("noop").uid("a")
    second = clicks.filter("id < 1").uid("same").writeStream.format("noop").uid("b")
    sinks, _ = still.prepare("job", first, second)
    with pytest.raises(BuildError, match="two operators have the uid 'same'"):
        build_plan("job", sinks, 1)


def test_several_writers_share_one_graph_and_one_set_of_options(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    raw = clicks.writeStream.option("path", str(tmp_path / "raw"))
    counts = clicks.groupBy("app_id").count().writeStream.outputMode("update")
    counts = checkpointed(counts.option("path", str(tmp_path / "counts")), tmp_path)
    sinks, config = still.prepare("both", raw, counts, parallelism=2)
    assert config.parallelism == 2
    assert [node.kind for node in walk(sinks)].count("read") == 1
    assert len({node.uid for node in sinks}) == 2


def test_writers_of_one_job_do_not_disagree(clicks: Stream, still: Still) -> None:
    one = clicks.writeStream.format("noop").option("parallelism", 2)
    two = clicks.writeStream.format("noop").option("Parallelism", 3)
    with pytest.raises(BuildError, match="option Parallelism is '2' and '3' in one job"):
        still.prepare("job", one, two)


def test_settings_of_the_session_are_below_those_of_the_writer(
    spark: SparkSession, clicks: Stream, still: Still
) -> None:
    spark.conf.set("spark.stillframe.parallelism", "3")
    spark.conf.set("spark.stillframe.restartAttempts", "7")
    try:
        writer = clicks.writeStream.format("noop").option("parallelism", 2)
        _, config = sink_of(still, writer)
    finally:
        spark.conf.unset("spark.stillframe.parallelism")
        spark.conf.unset("spark.stillframe.restartAttempts")
    assert (config.parallelism, config.restart_attempts) == (2, 7)


# --- Epochs on the driver -------------------------------------------------------------------------


def staged_epoch(node: Node, tmp_path: Path, name: str, ids: list[int]) -> list[str]:
    """A file of an epoch, named with the signs that staged files have."""
    import pyarrow.parquet as pq

    directory = tmp_path / "_stillframe" / "staging"
    directory.mkdir(parents=True, exist_ok=True)
    file = str(directory / f"job%2D1-{name}.parquet")
    pq.write_table(pa.table({"id": ids}, schema=node.schema), file)
    return [file]


def test_only_a_function_is_tied_to_nothing_that_has_a_name(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    writers = [
        clicks.writeStream.foreachBatch(lambda df, epoch: None),
        clicks.writeStream.format("console"),
        clicks.writeStream.format("memory").queryName("table"),
        clicks.writeStream.format("json").option("path", str(tmp_path / "out")),
    ]
    sinks = [sink_of(still, checkpointed(each, tmp_path))[0].operator for each in writers]

    assert [each.sink.tied_to for each in sinks if isinstance(each, Write)] == [
        None,
        "console",
        "memory table",
        f"json {tmp_path}/out",
    ]


def test_foreach_batch_gets_each_epoch_as_a_dataframe(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    seen: list[tuple[int, list[int], str]] = []

    def collect(frame: DataFrame, epoch: int) -> None:
        seen.append((epoch, sorted(row.id for row in frame.collect()), frame.dtypes[0][1]))

    ids = clicks.select("id")
    node, _ = sink_of(still, checkpointed(ids.writeStream.foreachBatch(collect), tmp_path))
    sink = node.operator.sink
    assert sink.describe() == "foreachBatch collect"
    assert sink.directory == str(tmp_path / "chk" / "job" / "staged" / node.uid)
    sink.handler(0, MARK, staged_epoch(node, tmp_path, "a", [2, 1]))
    sink.handler(1, MARK, [])  # an epoch in which nothing came
    assert seen == [(0, [1, 2], "bigint")]


def test_a_foreach_batch_function_that_raises_is_named_in_one_sentence(
    clicks: Stream, still: Still, tmp_path: Path
) -> None:
    def broken(frame: DataFrame, epoch: int) -> None:
        frame.select("nosuch")

    writer = clicks.select("id").writeStream.foreachBatch(broken)
    node, _ = sink_of(still, checkpointed(writer, tmp_path))
    with pytest.raises(UserCodeError, match=r"function broken .* raised Analysis") as raised:
        node.operator.sink.handler(4, MARK, staged_epoch(node, tmp_path, "a", [1]))
    assert "\n" not in str(raised.value)
    assert "epoch 4" in raised.value.blame.record
    assert f"{__file__}:" in raised.value.blame.line


def test_the_memory_sink_grows_a_table_that_sql_can_read(
    spark: SparkSession, clicks: Stream, still: Still, tmp_path: Path
) -> None:
    writer = clicks.select("id").writeStream.format("memory").queryName("remembered")
    node, _ = sink_of(still, checkpointed(writer.option("maxRows", 3), tmp_path))
    handler = node.operator.sink.handler
    table = "select id from remembered order by id"
    assert spark.sql(table).collect() == []
    handler(0, MARK, staged_epoch(node, tmp_path, "a", [2, 1]))
    handler(0, MARK, staged_epoch(node, tmp_path, "a", [2, 1]))
    handler(1, MARK, staged_epoch(node, tmp_path, "b", [3]))
    assert [row.id for row in spark.sql(table).collect()] == [1, 2, 3]
    with pytest.raises(stillframe.DataError, match="4 rows, more than its maxRows of 3"):
        handler(2, MARK, staged_epoch(node, tmp_path, "c", [4]))


def test_the_memory_sink_needs_a_name(clicks: Stream, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="queryName must be specified for memory sink"):
        checkpointed(clicks.writeStream.format("memory"), tmp_path).start()
