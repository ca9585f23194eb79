"""`join` in PySpark's dialect: what is built of it, and what is refused in whose words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from stillframe.errors import BuildError
from stillframe.graph.expressions import Column, Named
from stillframe.graph.logical import Join, JoinSide, Node, Project, walk
from stillframe.graph.plan import build_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
SHOWN = "ad long, shown timestamp, page string"
CLICKED = "ad int, clicked timestamp, who string"
RANGE = "clicked >= shown AND clicked <= shown + INTERVAL 1 HOUR"


def read(still: Still, schema: str, directory: Path) -> Stream:
    directory.mkdir(parents=True)
    (directory / "rows.json").write_text("{}\n")
    return still.readStream.schema(schema).json(str(directory))


@pytest.fixture
def shown(still: Still, tmp_path: Path) -> Stream:
    return read(still, SHOWN, tmp_path / "shown").withWatermark("shown", "10 minutes")


@pytest.fixture
def clicked(still: Still, tmp_path: Path) -> Stream:
    return read(still, CLICKED, tmp_path / "clicked").withWatermark("clicked", "20 minutes")


@pytest.fixture
def of_spark(spark: SparkSession, tmp_path: Path) -> tuple[DataFrame, DataFrame]:
    """The same as streams of Spark's own, to compare with."""
    made = []
    for name, schema in (("shown", SHOWN), ("clicked", CLICKED)):
        (tmp_path / "of-spark" / name).mkdir(parents=True)
        frame = spark.readStream.schema(schema).json(str(tmp_path / "of-spark" / name))
        made.append(frame.withWatermark(name, "10 minutes"))
    return made[0], made[1]


def the_join(stream: Stream) -> Join:
    (found,) = [n.operator for n in walk([stream._node]) if isinstance(n.operator, Join)]
    return found


def on(condition: str) -> Any:
    from pyspark.sql.functions import expr

    return expr(condition)


# --- Keys, bounds and columns -------------------------------------------------------------------


def test_equalities_are_keys_and_the_rest_is_the_condition(shown: Stream, clicked: Stream) -> None:
    both = shown.alias("l").join(clicked.alias("r"), on(f"l.ad = r.ad AND {RANGE}"), "left")
    join = the_join(both)
    assert join.how == "left"
    assert join.left == JoinSide(("ad",), "shown")
    # Spark casts the narrower key, so it is computed before the join.
    assert join.right.time == "clicked"
    assert join.right.keys != ("ad_2",)
    assert (join.earliest_us, join.latest_us) == (-1, HOUR_US + 1)
    assert join.condition is not None


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("true", (None, None)),
        (RANGE, (-1, HOUR_US + 1)),
        ("clicked BETWEEN shown - INTERVAL 5 SECONDS AND shown", (-5 * SECOND_US - 1, 1)),
        ("shown + INTERVAL 1 SECOND < clicked", (SECOND_US, None)),
        ("clicked - INTERVAL '2 01:00:00' DAY TO SECOND <= shown", (None, 49 * HOUR_US + 1)),
        ("clicked = shown", (0, 0)),
        ("clicked >= shown OR page = who", (None, None)),
        ("unix_seconds(clicked) - unix_seconds(shown) < 5", (None, None)),
    ],
)
def test_the_bounds_in_time_are_read_off_the_condition(
    spark: SparkSession,
    shown: Stream,
    clicked: Stream,
    condition: str,
    expected: tuple[int | None, int | None],
) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        both = shown.alias("l").join(clicked.alias("r"), on(f"l.ad = r.ad AND ({condition})"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    join = the_join(both)
    assert (join.earliest_us, join.latest_us) == expected


def test_a_name_in_on_is_one_column_of_the_result_as_in_spark(
    shown: Stream, clicked: Stream, of_spark: tuple[DataFrame, DataFrame]
) -> None:
    for how in ("inner", "full", "right"):
        if how == "inner":
            mine, theirs = shown.join(clicked, "ad", how), of_spark[0].join(of_spark[1], "ad", how)
        else:
            pair = ["ad", "at"]
            mine = shown.withColumnRenamed("shown", "at").join(
                clicked.withColumnRenamed("clicked", "at"), pair, how
            )
            theirs = (
                of_spark[0]
                .withColumnRenamed("shown", "at")
                .join(of_spark[1].withColumnRenamed("clicked", "at"), pair, how)
            )
        assert mine.dtypes == theirs.dtypes
        assert mine.node.schema.names == theirs.columns


def test_equal_event_times_are_keys_and_a_bound(shown: Stream, clicked: Stream) -> None:
    both = shown.alias("l").join(
        clicked.alias("r"), on("l.ad = r.ad AND clicked = shown"), "full_outer"
    )
    join = the_join(both)
    assert join.left.keys[1:] == ("shown",)
    assert join.right.keys[1:] == ("clicked",)
    assert (join.earliest_us, join.latest_us) == (0, 0)


def test_keys_are_the_same_type_on_both_sides(shown: Stream, clicked: Stream) -> None:
    both = shown.join(clicked, shown.ad == clicked.ad)
    plan = build_plan("job", [Node(the_sink(), both._node.schema, (both._node,))], 2, 8)
    edges = [edge for edge in plan.edges if edge.target_task == plan.edges[-1].target_task]
    types = [edge.schema.field(edge.partitioning.keys[0]).type for edge in edges]
    assert types == [pa.int64(), pa.int64()]


def the_sink() -> Any:
    from stillframe.connectors.discard import DiscardSink
    from stillframe.graph.logical import Write

    return Write(DiscardSink())


# --- Two columns of one name --------------------------------------------------------------------


def test_of_two_columns_of_one_name_either_can_be_dropped_selected_or_renamed(
    shown: Stream, clicked: Stream
) -> None:
    both = shown.join(clicked, shown.ad == clicked.ad)
    assert both.columns == ["ad", "shown", "page", "ad", "clicked", "who"]
    left = both.drop(clicked.ad)
    right = both.filter(clicked.ad > 3).drop(shown.ad)
    chosen = both.select(shown.ad.alias("mine"), clicked.ad.alias("other"))
    assert left.dtypes[0] == ("ad", "bigint")
    assert right.dtypes[2] == ("ad", "int")
    assert isinstance(chosen.node.operator, Project)
    assert chosen.node.operator.columns == (
        Named("mine", Column("ad", pa.int64())),
        Named("other", Column("ad_2", pa.int32())),
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda both: both.writeStream.format("noop").start(),
        lambda both: both.union(both),
        lambda both: both.mapInArrow(lambda batches: batches, "ad long"),
        lambda both: both.withColumn("x", both.page),
    ],
)
def test_a_stream_with_two_columns_of_one_name_goes_nowhere_else(
    shown: Stream, clicked: Stream, use: Callable[[Stream], Any]
) -> None:
    both = shown.join(clicked, shown.ad == clicked.ad)
    with pytest.raises(BuildError, match=r"two columns.* ad\b"):
        use(both)


def test_a_stream_with_two_columns_of_one_name_is_joined_again_and_grouped(
    shown: Stream, clicked: Stream
) -> None:
    both = shown.join(clicked, shown.ad == clicked.ad)

    again = both.join(both, "page")
    grouped = both.groupBy(clicked.ad).count()

    assert again.columns == ["page", *(["ad", "shown", "ad", "clicked", "who"] * 2)]
    read = grouped.node.inputs[0].inputs[0].operator
    assert isinstance(read, Project)
    assert read.columns == (Named("ad", Column("ad_2", pa.int32())),)


def test_an_ambiguous_name_is_refused_in_sparks_words(shown: Stream, clicked: Stream) -> None:
    both = shown.join(clicked, shown.ad == clicked.ad)
    with pytest.raises(AnalysisException, match="AMBIGUOUS_REFERENCE"):
        both.select("ad")


def test_what_was_joined_can_be_joined_again(
    shown: Stream, clicked: Stream, still: Still, tmp_path: Path
) -> None:
    within = on(f"l.ad = r.ad AND {RANGE}")
    both = shown.alias("l").join(clicked.alias("r"), within).drop(clicked.ad)
    bought = read(still, "ad long, bought timestamp", tmp_path / "bought")
    bought = bought.withWatermark("bought", "1 minute")
    third = both.join(
        bought,
        (both.ad == bought.ad) & on("bought BETWEEN clicked AND clicked + INTERVAL 1 MINUTE"),
        "left",
    ).drop(bought.ad)
    assert third.columns == ["ad", "shown", "page", "clicked", "who", "bought"]
    last = next(n.operator for n in reversed(walk([third.node])) if isinstance(n.operator, Join))
    assert last.left.time == "clicked"
    assert (last.earliest_us, last.latest_us) == (-1, 60 * SECOND_US + 1)


# --- Event time behind it -----------------------------------------------------------------------


def test_an_event_time_behind_a_join_is_one_only_if_its_rows_cannot_be_arbitrarily_late(
    shown: Stream, clicked: Stream
) -> None:
    from pyspark.sql.functions import window

    def noted(condition: str) -> set[str]:
        both = shown.alias("l").join(clicked.alias("r"), on(f"l.ad = r.ad AND {condition}"))
        return {field.name for field in both.schema if "spark.watermarkDelayMs" in field.metadata}

    assert noted(RANGE) == {"shown", "clicked"}
    assert noted("clicked <= shown") == {"shown"}
    assert noted("clicked >= shown") == {"clicked"}
    assert noted("true") == set()
    for condition in ("true", "clicked >= shown"):
        unbounded = shown.alias("l").join(clicked.alias("r"), on(f"l.ad = r.ad AND {condition}"))
        with pytest.raises(BuildError, match=r"^rows of the join .* bound on both sides how far"):
            unbounded.groupBy(window("shown", "1 minute")).count()


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["left", "right", "full", "left_semi"])
def test_outer_joins_without_a_bound_are_refused_in_sparks_words(
    shown: Stream, clicked: Stream, of_spark: tuple[DataFrame, DataFrame], how: str
) -> None:
    with pytest.raises(BuildError) as refused:
        shown.join(clicked, "ad", how)
    theirs = sparks_refusal(of_spark[0].join(of_spark[1], "ad", how))
    assert str(refused.value).startswith(theirs)


@pytest.mark.parametrize(
    ("condition", "how"),
    [("clicked >= shown", "left"), ("clicked <= shown", "right"), ("clicked >= shown", "semi")],
)
def test_a_bound_on_the_wrong_side_is_none(
    shown: Stream, clicked: Stream, of_spark: tuple[DataFrame, DataFrame], condition: str, how: str
) -> None:
    def joined(left: Any, right: Any) -> Any:
        return left.alias("l").join(right.alias("r"), on(f"l.ad = r.ad AND {condition}"), how)

    with pytest.raises(BuildError) as refused:
        joined(shown, clicked)
    assert str(refused.value).startswith(sparks_refusal(joined(*of_spark)))


def sparks_refusal(frame: DataFrame, mode: str = "Append") -> str:
    """What Spark says to its own stream when it is started."""
    jvm: Any = frame.sparkSession._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    output_mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, mode)()
    with pytest.raises(AnalysisException) as refused:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), output_mode)
    return str(refused.value).split(";\n")[0].rstrip(";")


def test_a_stream_without_a_watermark_has_no_bound(
    shown: Stream, still: Still, tmp_path: Path
) -> None:
    other = read(still, CLICKED, tmp_path / "untimed")
    condition = on(f"l.ad = r.ad AND {RANGE}")
    with pytest.raises(BuildError, match="withWatermark on both streams"):
        shown.alias("l").join(other.alias("r"), condition, "left")
    inner = the_join(shown.alias("l").join(other.alias("r"), condition))
    assert (inner.earliest_us, inner.latest_us) == (None, None)


def test_anti_joins_are_refused_in_sparks_words(
    shown: Stream, clicked: Stream, of_spark: tuple[DataFrame, DataFrame]
) -> None:
    with pytest.raises(BuildError) as refused:
        shown.join(clicked, "ad", "left_anti")
    assert str(refused.value).startswith(
        sparks_refusal(of_spark[0].join(of_spark[1], "ad", "left_anti"))
    )


@pytest.mark.parametrize("how", ["left", "right", "full"])
def test_outer_joins_are_only_appended_in_sparks_words(
    shown: Stream, clicked: Stream, of_spark: tuple[DataFrame, DataFrame], tmp_path: Path, how: str
) -> None:
    def joined(left: Any, right: Any) -> Any:
        left, right = left.alias("l"), right.withColumnRenamed("ad", "other").alias("r")
        return left.join(right, on(f"ad = other AND {RANGE}"), how)

    options = {"checkpointLocation": str(tmp_path / "chk"), "checkpointInterval": "1 second"}
    writer = joined(shown, clicked).writeStream.format("noop").outputMode("update")
    with pytest.raises(BuildError) as refused:
        shown.still.prepare("job", writer, **options)
    assert str(refused.value) == sparks_refusal(joined(*of_spark), "Update")


def test_inner_joins_may_be_updates_as_in_spark(
    shown: Stream, clicked: Stream, tmp_path: Path
) -> None:
    options = {"checkpointLocation": str(tmp_path / "chk"), "checkpointInterval": "1 second"}
    writer = shown.join(clicked, "ad").writeStream.format("noop").outputMode("update")
    shown.still.prepare("job", writer, **options)


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (lambda a, b: a.join(b), "without equality predicate"),
        (lambda a, b: a.join(b, on(RANGE)), "without equality predicate"),
        (lambda a, b: a.join(b, on("page <=> who")), "without equality predicate"),
        (lambda a, b: a.crossJoin(b), "say join"),
        (lambda a, b: a.groupBy("ad").count().join(b, "ad"), "before groupBy"),
        (lambda a, b: a.join(b.groupBy("ad").count(), "ad"), "before groupBy"),
        (lambda a, b: a.join(7, "ad"), "not a int"),
    ],
)
def test_what_is_no_join_of_streams_is_refused(
    shown: Stream, clicked: Stream, join: Callable[[Stream, Stream], Any], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        join(shown, clicked)


def test_names_and_kinds_that_spark_does_not_know_are_refused_by_spark(
    shown: Stream, clicked: Stream
) -> None:
    with pytest.raises(AnalysisException, match="UNRESOLVED_USING_COLUMN_FOR_JOIN"):
        shown.join(clicked, "nothing")
    with pytest.raises(AnalysisException, match="UNSUPPORTED_JOIN_TYPE"):
        shown.join(clicked, "ad", "sideways")
    with pytest.raises(AnalysisException, match="ambiguous"):
        shown.join(shown.alias("again"), shown.ad == on("again.ad"))
