"""Late rows and output modes in PySpark's dialect: what is built of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stillframe.connectors.staged import StagedSink
from stillframe.errors import BuildError
from stillframe.graph.logical import Aggregate, Late, Node, Read, WithWatermark, Write, walk
from stillframe.graph.plan import build_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream
    from stillframe.spark.writer import StreamWriter

pytestmark = pytest.mark.spark

COLUMNS = "shop string, at timestamp, amount long, note string, window int"


@pytest.fixture
def sales(still: Still, tmp_path: Path) -> Stream:
    path = tmp_path / "sales.json"
    path.write_text('{"shop": "Ulm"}\n')
    return still.readStream.schema(COLUMNS).json(str(path))


@pytest.fixture
def watched(sales: Stream) -> Stream:
    return sales.withWatermark("at", "1 minute")


@pytest.fixture
def same(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """The same columns as a stream of Spark's own, to compare with."""
    (tmp_path / "of-spark").mkdir()
    return spark.readStream.schema(COLUMNS).json(str(tmp_path / "of-spark"))


def hourly(stream: Any) -> Any:
    from pyspark.sql import functions as F

    return stream.groupBy(F.window("at", "1 hour"), "shop").agg(F.sum("amount").alias("sold"))


def prepared(still: Still, tmp_path: Path, *writers: StreamWriter) -> list[Node]:
    options = {"checkpointLocation": str(tmp_path / "chk"), "checkpointInterval": "1 second"}
    return still.prepare("job", *writers, **options)[0]


def nodes_of(sinks: list[Node], kind: type) -> list[Node]:
    return [node for node in walk(sinks) if isinstance(node.operator, kind)]


# --- with_late ----------------------------------------------------------------------------------


def test_late_rows_have_the_columns_that_were_grouped_and_no_watermark(watched: Stream) -> None:
    counts, late = hourly(watched).with_late()
    assert counts.dtypes == hourly(watched).dtypes
    assert late.dtypes == watched.dtypes
    assert not any("watermark" in str(field.metadata) for field in late.schema)
    assert not late.is_updates
    assert late.filter(watched.amount > 1).select(watched.shop).columns == ["shop"]


def test_one_aggregate_gives_both_and_keeps_its_uid(
    still: Still, watched: Stream, tmp_path: Path
) -> None:
    plain = hourly(watched)
    counts, late = plain.with_late()
    sinks = prepared(
        still,
        tmp_path,
        counts.writeStream.format("noop").uid("counts"),
        late.writeStream.format("noop").uid("late"),
    )
    (aggregate,) = nodes_of(sinks, Aggregate)
    assert isinstance(aggregate.operator, Aggregate)
    assert aggregate.operator.emits_closed
    assert aggregate.uid == plain.principal.uid
    (reader,) = nodes_of(sinks, Late)
    assert reader.inputs == (aggregate,)
    (edge,) = build_plan("job", sinks, 2).edges
    assert edge.combines is None
    assert {"shop", "at", "amount", "note", "window_2"} == set(edge.schema.names)


def test_late_rows_may_be_written_in_append_mode_beside_updates(
    still: Still, watched: Stream, tmp_path: Path
) -> None:
    counts, late = hourly(watched).filter("sold > 1").with_late()
    writers = [
        counts.writeStream.format("noop").outputMode("update").uid("counts"),
        late.select("shop").writeStream.format("noop").uid("late"),
    ]
    (aggregate,) = nodes_of(prepared(still, tmp_path, *writers), Aggregate)
    assert aggregate.operator == hourly(watched).principal.operator
    assert prepared(still, tmp_path, writers[1]), "or alone"


def test_columns_that_the_grouping_has_taken_the_names_of_come_back_under_theirs(
    watched: Stream,
) -> None:
    from pyspark.sql import functions as F

    hours = F.window("at", "1 hour").alias("w")
    shouted = watched.groupBy(hours, F.upper("shop").alias("shop"), "window")
    counts, late = shouted.agg(F.max(F.length("note")).alias("note")).with_late()
    assert (counts.columns, late.columns) == (["w", "shop", "window", "note"], watched.columns)
    assert late.node.schema == watched.node.schema


def test_late_rows_may_be_given_a_watermark_anew_and_be_counted(
    still: Still, watched: Stream, tmp_path: Path
) -> None:
    _, late = hourly(watched).with_late()
    again = hourly(late.withWatermark("at", "1 day"))
    sinks = prepared(still, tmp_path, again.writeStream.format("noop"))
    assert len(nodes_of(sinks, WithWatermark)) == 2
    assert len(nodes_of(sinks, Aggregate)) == 2
    with pytest.raises(BuildError, match="without watermark"):
        prepared(still, tmp_path, hourly(late).writeStream.format("noop"))


def test_the_source_reads_every_column_only_if_late_rows_are_written(
    still: Still, watched: Stream, tmp_path: Path
) -> None:
    counts, late = hourly(watched).with_late()
    for writer, columns in (
        (hourly(watched).writeStream, ("shop", "at", "amount")),
        (late.writeStream, tuple(watched.columns)),
    ):
        plan = build_plan("job", prepared(still, tmp_path, writer.format("noop")), 2)
        (read,) = [each.operator for _, each in plan.operators() if isinstance(each.operator, Read)]
        assert read.columns == columns
    assert counts.columns == ["window", "shop", "sold"]


def test_where_nothing_can_be_late_there_is_no_stream_of_it(sales: Stream, watched: Stream) -> None:
    for stream, why in (
        (watched, "not aggregated, or was combined"),
        (hourly(sales), "nothing comes too late"),
        (watched.groupBy("shop").count(), "nothing comes too late"),
    ):
        with pytest.raises(BuildError, match=why):
            stream.with_late()


def test_names_are_given_before_the_stream_is_split(watched: Stream) -> None:
    counts, late = hourly(watched).uid("hourly").parallelism(3).with_late()
    assert (counts.principal.uid, counts.principal.parallelism) == ("hourly", 3)
    for rename in (lambda s: s.uid("other"), lambda s: s.parallelism(2)):
        with pytest.raises(BuildError, match=r"before with_late\(\)"):
            rename(counts)
    assert counts.filter("sold > 1").uid("large").node.uid == "large"
    assert late.uid("late").node.uid == "late"


# --- Output modes -------------------------------------------------------------------------------


def test_complete_makes_the_aggregate_emit_everything_and_the_sink_forget_what_failed(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    def counted(stream: Stream) -> StreamWriter:
        return stream.groupBy("shop").count().filter("count > 1").writeStream

    for writer in (
        counted(sales).format("memory").queryName("whole"),
        counted(sales).foreachBatch(lambda df, epoch: None),
    ):
        (sink,) = prepared(still, tmp_path, writer.outputMode("Complete"))
        (aggregate,) = nodes_of([sink], Aggregate)
        assert isinstance(aggregate.operator, Aggregate)
        assert (aggregate.operator.emits_all, aggregate.operator.emits_closed) == (True, False)
        assert isinstance(sink.operator, Write)
        assert isinstance(sink.operator.sink, StagedSink)
        assert sink.operator.sink.is_whole
    assert prepared(still, tmp_path, counted(sales).format("noop").outputMode("complete"))


def first_words_raised(start: Callable[[], object]) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of Spark, or of ours
        start()
    return str(raised.value).splitlines()[0].split(". SQLSTATE")[0].split("; ")[0].rstrip(".")


WRONG_MODES: list[tuple[str, Any]] = [
    ("complete without aggregation", lambda s: (s, "complete", "noop")),
    ("complete to parquet", lambda s: (s.groupBy("shop").count(), "complete", "parquet")),
    ("complete to json", lambda s: (hourly(s), "complete", "json")),
    ("append without watermark", lambda s: (hourly(s), "append", "noop")),
    (
        "append without window",
        lambda s: (s.withWatermark("at", "1 day").groupBy("shop").count(), "append", "noop"),
    ),
    ("no mode there is", lambda s: (hourly(s), "sometimes", "noop")),
    ("an empty mode", lambda s: (hourly(s), "", "noop")),
    ("a mode that is no text", lambda s: (hourly(s), 7, "noop")),
]


@pytest.mark.parametrize("case", [c for _, c in WRONG_MODES], ids=[n for n, _ in WRONG_MODES])
def test_a_mode_that_cannot_be_is_refused_in_sparks_words(
    still: Still, sales: Stream, same: DataFrame, tmp_path: Path, case: Any
) -> None:
    def start(stream: Any) -> Any:
        made, mode, sink = case(stream)
        path = None if sink == "noop" else str(tmp_path / "out")
        return made.writeStream.outputMode(mode).format(sink).option("path", path)

    options = {"checkpointLocation": str(tmp_path / "chk")}
    of_spark = first_words_raised(lambda: start(same).options(**options).start())
    assert of_spark.startswith("[")
    assert first_words_raised(lambda: prepared(still, tmp_path, start(sales))) == of_spark


def test_complete_is_refused_where_the_whole_could_come_in_pieces(
    still: Still, sales: Stream, tmp_path: Path
) -> None:
    spread = sales.groupBy("shop").count().select("count").parallelism(3)
    with pytest.raises(BuildError, match="between it and the sink there is project"):
        prepared(still, tmp_path, spread.writeStream.format("noop").outputMode("complete"))


def test_one_aggregation_is_not_written_in_two_of_three_modes(
    still: Still, watched: Stream, tmp_path: Path
) -> None:
    stream = hourly(watched)
    for modes in (("append", "complete"), ("complete", "update")):
        writers = [stream.writeStream.format("noop").uid(m).outputMode(m) for m in modes]
        with pytest.raises(BuildError, match=f"outputMode '{modes[0]}' and with '{modes[1]}'"):
            prepared(still, tmp_path, *writers)


def test_a_window_over_nothing_is_spelled_as_spark_spells_it(
    sales: Stream, same: DataFrame
) -> None:
    """A null is in no window, also where nothing else comes."""
    from pyspark.sql import functions as F

    for nothing in (F.lit(None), F.lit(None).cast("timestamp")):
        counted = sales.groupBy(F.window(nothing, "1 minute")).count()
        assert counted.dtypes == same.groupBy(F.window(nothing, "1 minute")).count().dtypes
