"""DataFrames as sources: which are fed to the slots as they are, and which are spooled first."""

from __future__ import annotations

import datetime
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.sources import BlockingReader, Source, SourceContext
from stillframe.clock import SystemClock
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.frame import FrameSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.logical import Filter, Node, Project, Read, Write, walk
from stillframe.graph.plan import build_plan
from stillframe.ids import OperatorUid, SubtaskIndex

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.frames.sources import Resolved

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _workers_run_this_python(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> str:
    """Three small Parquet files."""
    path = str(tmp_path / "files")
    spark.range(0, 999, 1, 3).selectExpr("id", "id % 7 AS k").write.parquet(path)
    return path


def plus_one(spark: SparkSession, deterministic: bool = True) -> Any:
    from pyspark.sql import functions as F

    function = F.udf(lambda value: value + 1, "long")
    return function if deterministic else function.asNondeterministic()


def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


Make = Callable[["SparkSession", str], "DataFrame"]

DIRECT: dict[str, Make] = {
    "a range": lambda spark, files: spark.range(0, 100, 1, 3),
    "a projection and a filter": lambda spark, files: (
        spark.range(0, 100, 1, 3).selectExpr("id + 1 AS x").where("x > 3")
    ),
    "an explode": lambda spark, files: spark.range(0, 100, 1, 3).selectExpr(
        "explode(array(id, -id)) AS x"
    ),
    "an Arrow table": lambda spark, files: spark.createDataFrame(pa.table({"a": [3, 1, 2]})),
    "SQL values": lambda spark, files: spark.sql("SELECT * FROM VALUES (1, 'a'), (2, 'b') AS t"),
    "one row": lambda spark, files: spark.sql("SELECT 1 AS a"),
    "Parquet files": lambda spark, files: spark.read.parquet(files).where("k > 2"),
    "text files": lambda spark, files: spark.read.text(os.path.dirname(__file__) + "/*.py"),
    "a UDF": lambda spark, files: spark.range(0, 100, 1, 2).select(plus_one(spark)("id")),
}

SPOOLED: dict[str, tuple[Make, str]] = {
    "rand": (lambda spark, files: spark.range(0, 9, 1, 2).selectExpr("rand() AS r"), "another one"),
    "uuid": (lambda spark, files: spark.range(0, 9, 1, 2).selectExpr("uuid() AS u"), "another one"),
    "a UDF that says so": (
        lambda spark, files: spark.range(0, 9, 1, 2).select(plus_one(spark, False)("id")),
        "another one",
    ),
    "now": (
        lambda spark, files: spark.range(0, 9, 1, 2).where("now() > '2020-01-01'"),
        "the current time",
    ),
    "a subquery": (
        lambda spark, files: spark.sql("SELECT id, (SELECT max(id) FROM range(9)) FROM range(9)"),
        "a subquery",
    ),
    "repartition": (lambda spark, files: spark.range(0, 9, 1, 2).repartition(2), "Exchange"),
    "coalesce": (lambda spark, files: spark.range(0, 9, 1, 4).coalesce(2), "Coalesce"),
    "union": (lambda spark, files: spark.range(4).union(spark.range(2)), "Union"),
    "limit": (lambda spark, files: spark.range(0, 9, 1, 2).limit(3), "Limit"),
    "a sort": (lambda spark, files: spark.read.parquet(files).orderBy("k"), "Sort"),
    "a sort within partitions": (
        lambda spark, files: spark.read.parquet(files).sortWithinPartitions("k"), "Sort",
    ),
    "an aggregate": (lambda spark, files: spark.range(9).groupBy("id").count(), "HashAggregate"),
    "distinct": (lambda spark, files: spark.range(9).distinct(), "HashAggregate"),
    "a join": (lambda spark, files: spark.range(9).join(spark.range(5), "id"), "Join"),
    "a sample": (lambda spark, files: spark.range(9).sample(0.5, seed=1), "Sample"),
    "an RDD": (lambda spark, files: spark.range(9).rdd.toDF(), "Scan ExistingRDD"),
    "a list": (lambda spark, files: spark.createDataFrame([(1,), (2,)], "a int"), "ExistingRDD"),
    "mapInArrow": (lambda spark, files: spark.range(9).mapInArrow(unchanged, "id long"), "MapInA"),
    "a window": (
        lambda spark, files: spark.sql("SELECT id, rank() OVER (ORDER BY id) FROM range(9)"),
        "Window",
    ),
}  # fmt: skip


def job_over(spark: SparkSession, *frames: DataFrame) -> list[Node]:
    from stillframe.spark.frames.sources import frame_node

    reads = [frame_node(spark, frame) for frame in frames]
    return [Node(Write(DiscardSink()), read.schema, (read,)) for read in reads]


def resolve(
    spark: SparkSession,
    sinks: list[Node],
    spool: Path,
    parallelism: int | None = None,
    max_slots: int = 4,
) -> Resolved:
    from stillframe.spark.frames.sources import resolve_frames

    def place(uid: OperatorUid) -> str:
        return str(spool / uid)

    return resolve_frames(spark, sinks, parallelism, place, max_slots)


def source_of(sink: Node) -> Source:
    read = walk([sink])[0].operator
    assert isinstance(read, Read)
    return read.source


def rows_of(source: Source) -> list[dict[str, Any]]:
    context = SourceContext(SubtaskIndex(0), 1, SystemClock())
    reader = source.open(source.splits(1), context)
    assert isinstance(reader, BlockingReader)
    return [row for _, batch in reader.read() for row in batch.to_pylist()]


def in_slots(frame: DataFrame) -> list[list[bytes]]:
    """The rows each slot gets, in order, as Spark feeds them to a barrier stage."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        taken = [repr(row).encode() for batch in batches for row in batch.to_pylist()]
        yield pa.record_batch({"rows": pa.array([taken], pa.list_(pa.binary()))})

    fed = frame.mapInArrow(rows, "rows array<binary>", barrier=True)
    return [[bytes(row) for row in slot.rows] for slot in fed.collect()]


# --- Which is which -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DIRECT)
def test_a_plan_that_repeats_itself_is_fed_as_it_is(
    spark: SparkSession, files: str, tmp_path: Path, kind: str
) -> None:
    frame = DIRECT[kind](spark, files)
    resolved = resolve(spark, job_over(spark, frame), tmp_path / "spool")
    source = source_of(resolved.sinks[0])
    assert isinstance(source, FrameSource), kind
    assert resolved.feed is frame
    assert resolved.parallelism == source.partitions == frame.rdd.getNumPartitions()
    assert not (tmp_path / "spool").exists()
    first = in_slots(frame)
    assert len(first) == source.partitions
    assert in_slots(frame) == first


@pytest.mark.parametrize("kind", SPOOLED)
def test_a_plan_that_may_not_repeat_itself_is_spooled(
    spark: SparkSession, files: str, kind: str
) -> None:
    from stillframe.spark.frames.sources import why_not_repeating

    make, why = SPOOLED[kind]
    reason = why_not_repeating(make(spark, files))
    assert reason is not None
    assert why in reason


def test_a_cached_dataframe_is_spooled(spark: SparkSession) -> None:
    from stillframe.spark.frames.sources import why_not_repeating

    frame = spark.range(0, 1234, 1, 2).cache()
    try:
        assert "InMemoryTableScan" in str(why_not_repeating(frame))
    finally:
        frame.unpersist()


# --- The numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partitions", "parallelism", "slots", "direct"),
    [(3, None, 3, True), (3, None, 2, False), (3, 3, 4, True), (3, 2, 4, False)],
)
def test_a_dataframe_is_fed_directly_only_if_its_partitions_are_the_slots(
    spark: SparkSession,
    tmp_path: Path,
    partitions: int,
    parallelism: int | None,
    slots: int,
    direct: bool,
) -> None:
    sinks = job_over(spark, spark.range(0, 9, 1, partitions))
    resolved = resolve(spark, sinks, tmp_path, parallelism, slots)
    assert (resolved.feed is not None) == direct
    assert resolved.parallelism == (partitions if direct else parallelism)


def test_an_operator_that_wants_more_slots_than_there_are_partitions_causes_a_spool(
    spark: SparkSession, tmp_path: Path
) -> None:
    sinks = job_over(spark, spark.range(0, 9, 1, 2))
    assert resolve(spark, [sinks[0].with_parallelism(3)], tmp_path).feed is None
    assert resolve(spark, [sinks[0].with_parallelism(2)], tmp_path / "other").feed is not None


def test_of_two_dataframes_one_is_fed_and_the_other_is_spooled(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame, other = spark.range(0, 9, 1, 2), spark.range(0, 5, 1, 2).toDF("n")
    resolved = resolve(spark, job_over(spark, frame, other), tmp_path)
    assert resolved.feed is frame
    assert isinstance(source_of(resolved.sinks[0]), FrameSource)
    spooled = source_of(resolved.sinks[1])
    assert isinstance(spooled, ParquetSource)
    assert sorted(row["n"] for row in rows_of(spooled)) == [0, 1, 2, 3, 4]


# --- Columns --------------------------------------------------------------------------------------

WIDE: dict[str, tuple[Make, str]] = {
    "Parquet files": (lambda spark, files: spark.read.parquet(files).where("id > 2"), "k"),
    "a range": (lambda spark, files: spark.range(0, 90, 1, 3).selectExpr("id", "-id AS k"), "k"),
    "an Arrow table": (
        lambda spark, files: spark.createDataFrame(pa.table({"a": [3, 1, 2], "k": [1, 2, 3]})), "k",
    ),
    "an explode": (
        lambda spark, files: spark.range(0, 90, 1, 3).selectExpr(
            "id", "id * 2 AS k", "explode(array(id, -id)) AS x"
        ), "k",
    ),
    "a UDF": (
        lambda spark, files: spark.range(0, 90, 1, 3).withColumn("k", plus_one(spark)("id")), "id",
    ),
}  # fmt: skip


def job_reading(spark: SparkSession, frame: DataFrame, name: str) -> list[Node]:
    """One that looks at one column only."""
    from stillframe.graph.expressions import Column, Named
    from stillframe.spark.frames.sources import frame_node

    read = frame_node(spark, frame)
    kept = pa.schema([read.schema.field(name)])
    project = Node(Project((Named(name, Column(name, kept.field(0).type)),)), kept, (read,))
    return [Node(Write(DiscardSink()), kept, (project,))]


def columns_in_slots(frame: DataFrame, name: str) -> list[list[Any]]:
    return [[eval(row)[name] for row in slot] for slot in in_slots(frame)]


@pytest.mark.parametrize("kind", WIDE)
def test_spark_hands_over_only_what_the_job_reads_in_the_same_order(
    spark: SparkSession, files: str, tmp_path: Path, kind: str
) -> None:
    make, name = WIDE[kind]
    frame = make(spark, files)
    resolved = resolve(spark, job_reading(spark, frame, name), tmp_path)
    assert resolved.feed is not None
    assert resolved.feed.columns == [name]
    assert columns_in_slots(resolved.feed, name) == columns_in_slots(frame, name)


def test_a_job_that_later_reads_other_columns_goes_on_where_it_was(
    spark: SparkSession, files: str, tmp_path: Path
) -> None:
    frame = spark.read.parquet(files)
    sources = [
        source_of(resolve(spark, job_reading(spark, frame, name), tmp_path).sinks[0])
        for name in ("id", "k")
    ]
    assert sources[0] == sources[1]


def test_buckets_that_would_be_read_as_other_partitions_are_handed_over_whole(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(0, 99, 1, 2).selectExpr("id", "id % 7 AS k").write.bucketBy(2, "k")
    rows.option("path", str(tmp_path / "buckets")).saveAsTable("buckets")
    try:
        with_buckets = spark.table("buckets")
        spark.conf.set("spark.sql.sources.bucketing.autoBucketedScan.enabled", "false")
        assert with_buckets.rdd.getNumPartitions() == 2
        assert with_buckets.select("id").rdd.getNumPartitions() != 2
        resolved = resolve(spark, job_reading(spark, with_buckets, "id"), tmp_path)
        assert resolved.feed is with_buckets
    finally:
        spark.conf.unset("spark.sql.sources.bucketing.autoBucketedScan.enabled")
        spark.sql("DROP TABLE buckets")


@pytest.mark.parametrize("name", ["a.b", "a`b"])
def test_a_column_that_has_to_be_quoted_goes_by_way_of_files(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    frame = spark.range(0, 9, 1, 2).toDF(name).selectExpr("*", "1 AS other")
    resolved = resolve(spark, job_reading(spark, frame, name), tmp_path)
    assert resolved.feed is None
    rows = rows_of(source_of(resolved.sinks[0]))
    assert sorted(row[name] for row in rows) == list(range(9))


# --- The graph ------------------------------------------------------------------------------------


def test_operators_keep_their_uids_and_shared_streams_stay_shared(
    spark: SparkSession, tmp_path: Path
) -> None:
    from stillframe.graph.expressions import Column, Named
    from stillframe.spark.frames.sources import frame_node

    read = frame_node(spark, spark.range(0, 9, 1, 2))
    columns = (Named("n", Column("id", pa.int64())),)
    project = Node(Project(columns), pa.schema([("n", pa.int64())]), (read,))
    again = Node(Project(columns), pa.schema([("n", pa.int64())]), (read,))
    sinks = [
        Node(Write(DiscardSink()), project.schema, (project,), "first"),
        Node(Write(DiscardSink()), again.schema, (again,), "second", 2),
    ]
    resolved = resolve(spark, sinks, tmp_path)
    before, after = walk(sinks), walk(resolved.sinks)
    assert [node.uid for node in after] == [node.uid for node in before]
    assert [node.parallelism for node in after] == [node.parallelism for node in before]
    assert len([node for node in after if isinstance(node.operator, Read)]) == 1
    build_plan("job", resolved.sinks, 2)
    pickle.dumps([node.operator for node in after])


def test_a_graph_without_dataframes_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    from stillframe.connectors.generate import ClickSource
    from stillframe.graph.expressions import Literal

    source = ClickSource(records=5)
    read = Node(Read(source), source.schema)
    kept = Node(Filter(Literal(pa.scalar(True))), source.schema, (read,))
    sinks = [Node(Write(DiscardSink()), source.schema, (kept,))]
    resolved = resolve(spark, sinks, tmp_path, parallelism=3)
    assert (list(resolved.sinks), resolved.feed, resolved.parallelism) == (sinks, None, 3)


def test_an_unresolved_dataframe_never_leaves_the_driver(spark: SparkSession) -> None:
    [sink] = job_over(spark, spark.range(3))
    with pytest.raises(AssertionError, match=r"DataFrame\(id\) was not resolved"):
        pickle.dumps(source_of(sink))


def test_a_dataframe_with_two_columns_of_one_name_is_refused(spark: SparkSession) -> None:
    with pytest.raises(BuildError, match="more than one column named id"):
        job_over(spark, spark.range(3).selectExpr("id", "id"))


# --- Fingerprints ---------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_for_the_same_dataframe_made_again(
    spark: SparkSession, files: str
) -> None:
    from stillframe.spark.frames.sources import fingerprint_of

    for make in DIRECT.values():
        assert fingerprint_of(make(spark, files)) == fingerprint_of(make(spark, files))


def test_the_fingerprint_differs_where_rows_or_partitions_do(
    spark: SparkSession, files: str
) -> None:
    from stillframe.spark.frames.sources import fingerprint_of

    rows = pa.table({"a": [3, 1, 2]})
    seen = {
        fingerprint_of(spark.range(0, 9, 1, 2)),
        fingerprint_of(spark.range(0, 9, 1, 3)),
        fingerprint_of(spark.range(0, 9, 1, 2).where("id > 1")),
        fingerprint_of(spark.range(0, 9, 1, 2).where("id > 2")),
        fingerprint_of(spark.createDataFrame(rows)),
        fingerprint_of(spark.createDataFrame(rows.slice(1))),
        fingerprint_of(spark.createDataFrame(rows.take([0, 2, 1]))),
        fingerprint_of(spark.read.parquet(files)),
    }
    pq.write_table(pa.table({"id": [1], "k": [1]}), f"{files}/one-more.parquet")
    seen.add(fingerprint_of(spark.read.parquet(files)))
    os.utime(f"{files}/one-more.parquet", (1, 1))
    seen.add(fingerprint_of(spark.read.parquet(files)))
    assert len(seen) == 10


# --- The spool ------------------------------------------------------------------------------------


def test_a_spool_holds_the_rows_as_they_were(spark: SparkSession, tmp_path: Path) -> None:
    late = datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=datetime.UTC)
    frame = spark.sql(
        "SELECT id, cast(id AS string) AS name, TIMESTAMP '9999-12-31T23:59:59.999999Z' AS at,"
        " cast(id AS decimal(20, 2)) AS price, array(id) AS many FROM range(0, 5, 1, 2)"
        " DISTRIBUTE BY id"
    )
    before = spark.conf.get("spark.sql.parquet.outputTimestampType")
    resolved = resolve(spark, job_over(spark, frame), tmp_path)
    rows = sorted(rows_of(source_of(resolved.sinks[0])), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[3]["name"] == "3"
    assert rows[3]["at"] == late
    assert (str(rows[3]["price"]), rows[3]["many"]) == ("3.00", [3])
    assert spark.conf.get("spark.sql.parquet.outputTimestampType") == before


def test_a_complete_spool_is_used_again_and_never_written_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    def random_rows() -> list[dict[str, Any]]:
        sinks = job_over(spark, spark.range(0, 5, 1, 1).selectExpr("id", "rand() AS r"))
        return rows_of(source_of(resolve(spark, sinks, tmp_path).sinks[0]))

    assert random_rows() == random_rows()


def test_a_spool_that_was_not_finished_is_written_anew(spark: SparkSession, tmp_path: Path) -> None:
    sinks = job_over(spark, spark.range(0, 5, 1, 1).repartition(2))
    [uid] = [node.uid for node in walk(sinks) if isinstance(node.operator, Read)]
    rubbish = tmp_path / uid / "part-00000.parquet"
    rubbish.parent.mkdir()
    rubbish.write_bytes(b"half a fi")
    source = source_of(resolve(spark, sinks, tmp_path).sinks[0])
    assert sorted(row["id"] for row in rows_of(source)) == [0, 1, 2, 3, 4]


def test_what_was_spooled_once_stays_spooled(spark: SparkSession, tmp_path: Path) -> None:
    """Else a restored job would look for positions in files, in a DataFrame that has none."""
    sinks = job_over(spark, spark.range(0, 9, 1, 3))
    assert resolve(spark, sinks, tmp_path, max_slots=2).feed is None
    assert resolve(spark, sinks, tmp_path, max_slots=4).feed is None


def test_a_spool_of_other_columns_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    resolve(spark, job_over(spark, spark.range(3).repartition(1)), tmp_path)
    other = job_over(spark, spark.range(3).selectExpr("cast(id AS int) AS id").repartition(1))
    with pytest.raises(StartRefused, match="holds the rows of another DataFrame"):
        resolve(spark, other, tmp_path)


def test_a_job_that_keeps_nothing_needs_no_place_for_a_spool_it_does_not_make(
    spark: SparkSession,
) -> None:
    from stillframe.spark.frames.sources import resolve_frames

    def nowhere(uid: OperatorUid) -> str:
        raise StartRefused("set checkpointLocation")

    fed = resolve_frames(spark, job_over(spark, spark.range(0, 9, 1, 2)), None, nowhere, 4)
    assert fed.feed is not None
    with pytest.raises(StartRefused, match="set checkpointLocation"):
        resolve_frames(spark, job_over(spark, spark.range(9).distinct()), None, nowhere, 4)
