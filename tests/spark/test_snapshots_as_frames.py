"""Snapshots as DataFrames on real local Spark: read, changed, written, and gone on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from stillframe import Savepoint
from stillframe.errors import BuildError, DataError, StorageError
from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

OUTPUT = "app string, total long, pages string, visits string"
ROWS = [("a", "p", 1), ("b", "p", 2), ("a", "q", 4), ("a", "p", 8), (None, "p", 16)]


class Visits(StatefulProcessor):
    """A value, a list and a map of each key, told as they are after each batch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n long")
        self.pages = handle.getListState("pages", "page string", 3_600_000)
        self.visits = handle.getMapState("visits", "page string", "times int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        total = self.total.get()[0] if self.total.exists() else 0
        for row in rows:
            total += row.n
            self.pages.appendValue((row.page,))
            found = self.visits.getValue((row.page,))
            self.visits.updateValue((row.page,), ((0 if found is None else found[0]) + 1,))
        self.total.update((total,))
        pages = "".join(page for (page,) in self.pages.get())
        visits = {page: times for (page,), (times,) in sorted(self.visits.iterator())}
        yield Row(app=key[0], total=total, pages=pages, visits=str(visits))

    def close(self) -> None: ...


def run(still: Still, name: str, rows: list[Any], location: Path, **options: str) -> list[Row]:
    """The last of what the job told of each app."""
    frame = still.spark.createDataFrame(rows, "app string, page string, n long").coalesce(1)
    writer = (
        still.stream(frame)
        .uid("rows")
        .groupBy("app")
        .transformWithState(Visits(), OUTPUT, "update", "processingtime")
        .uid("visits")
        .writeStream.format("memory")
        .queryName(name)
        .outputMode("update")
        .options(checkpointLocation=str(location), checkpointInterval="1 hour", parallelism=2)
    )
    query = writer.options(**options).start()
    assert query.awaitTermination(120)
    assert query.summary.outcome == "finished"
    newest = still.spark.table(name).groupBy("app").agg(F.max_by(F.struct("*"), "total").alias("r"))
    return sorted((each.r for each in newest.collect()), key=str)


@pytest.fixture(scope="module")
def location(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job has been there."""
    import stillframe

    place = tmp_path_factory.mktemp("location")
    run(stillframe.on(spark), "first", ROWS, place)
    return place


def read(spark: SparkSession, path: Path, **options: str) -> DataFrame:
    return spark.read.format("stillframe").options(**options).load(str(path))


def test_without_options_there_is_a_row_for_each_state(spark, location):
    found = {
        row.state: row
        for row in read(spark, location / "first").collect()
        if row.operator == "visits"
    }

    assert found.keys() == {"total", "pages", "visits"}
    assert [(found[name].kind, found[name].rows) for name in sorted(found)] == [
        ("list", 5),
        ("value", 3),
        ("map", 4),
    ]
    assert found["total"].schema.startswith("struct<key:struct<app:string>,value:struct<n:bigint>")


def test_a_session_that_was_made_of_another_reads_snapshots_too(spark, location):
    import stillframe

    other = spark.newSession()
    stillframe.on(other)

    assert other.read.format("stillframe").load(str(location / "first")).count() > 0


def test_a_state_is_read_with_its_keys_and_types(spark, location):
    totals = read(spark, location / "first", operator="visits", state="total")
    pages = read(spark, location / "first", operator="visits", state="pages")
    visits = read(spark, location / "first", operator="visits", state="visits")

    assert totals.schema.simpleString() == (
        "struct<key:struct<app:string>,value:struct<n:bigint>,key_group:int>"
    )
    assert {row.key.app: row.value.n for row in totals.collect()} == {"a": 13, "b": 2, None: 16}
    assert pages.columns == ["key", "list_element", "list_index", "expires", "key_group"]
    of_a = pages.where("key.app = 'a'").orderBy("list_index").select("list_element.page")
    assert [row.page for row in of_a.collect()] == ["p", "q", "p"]
    assert {
        (row.key.app, row.user_map_key.page): row.user_map_value.times for row in visits.collect()
    } == {("a", "p"): 2, ("a", "q"): 1, ("b", "p"): 1, (None, "p"): 1}
    groups = [each.select("key.app", "key_group").distinct() for each in (totals, pages)]
    assert groups[0].exceptAll(groups[1]).count() == 0


def test_what_is_read_changed_and_written_is_what_the_next_job_starts_from(
    spark, still, location, tmp_path
):
    totals = read(spark, location / "first", operator="visits", state="total")
    pages = read(spark, location / "first", operator="visits", state="pages")
    raised = totals.withColumn("value", F.struct((F.col("value.n") + 100).alias("n")))
    fewer = raised.where("key.app is not null")
    savepoint = tmp_path / "savepoint"

    made = Savepoint.of(spark, str(location / "first")).without_operator("rows")
    made = made.with_state("visits", "total", fewer)
    made.with_state("visits", "pages", pages.orderBy(F.rand())).write(str(savepoint))
    told = run(
        still,
        "second",
        [("a", "r", 1), (None, "r", 1), ("c", "r", 1)],
        tmp_path / "location",
        restoreFrom=str(savepoint),
        parallelism="1",
    )

    assert [tuple(row) for row in told] == [
        ("a", 114, "pqpr", "{'p': 2, 'q': 1, 'r': 1}"),
        ("c", 1, "r", "{'r': 1}"),
        (None, 1, "pr", "{'p': 1, 'r': 1}"),
    ]


def test_a_job_starts_with_state_that_was_never_a_jobs(spark, still, tmp_path):
    totals = spark.createDataFrame([("a", 1_000), ("b", 2_000)], "app string, n long")
    visits = spark.sql(
        "select struct('a' as app) as key, struct('p' as page) as user_map_key,"
        " struct(7 as times) as user_map_value"
    )
    savepoint = tmp_path / "savepoint"

    made = Savepoint.new(spark).with_state("visits", "total", totals, keys=["app"])
    made.with_state("visits", "visits", visits).write(str(savepoint))
    told = run(still, "third", ROWS[:2], tmp_path, restoreFrom=str(savepoint))

    assert [tuple(row) for row in told] == [
        ("a", 1_001, "p", "{'p': 8}"),
        ("b", 2_002, "p", "{'p': 1}"),
    ]


def test_a_key_with_two_values_is_refused_and_nothing_is_left(spark, tmp_path):
    twice = spark.createDataFrame([("a", 1), ("b", 2), ("a", 3)], "app string, n long")
    made = Savepoint.new(spark).with_state("visits", "total", twice, keys=["app"])

    with pytest.raises(DataError, match=r"^state 'total' has 2 rows for \{'app': 'a'\}: give one"):
        made.write(str(tmp_path / "savepoint"))

    assert not list((tmp_path / "savepoint").rglob("*"))


def test_a_savepoint_is_not_written_over_anything(spark, tmp_path):
    Savepoint.new(spark).write(str(tmp_path / "savepoint"))

    with pytest.raises(StorageError, match="is not empty"):
        Savepoint.new(spark).write(str(tmp_path / "savepoint"))


def test_what_is_not_there_is_told_with_what_is(spark, location):
    with pytest.raises(AnalysisException, match=r"no operator 'visit' in checkpoint 1.*visits"):
        read(spark, location / "first", operator="visit")
    with pytest.raises(AnalysisException, match="has 3 states: give option state one of: pages"):
        read(spark, location / "first", operator="visits")
    with pytest.raises(AnalysisException, match="has no option 'opertor'; did you mean 'operator'"):
        read(spark, location / "first", opertor="visits")
    with pytest.raises(AnalysisException, match="there are the jobs first below it"):
        read(spark, location)
    with pytest.raises(BuildError, match="'visits' has no state 'sums' to leave out"):
        Savepoint.of(spark, str(location / "first")).without_state("visits", "sums")


def test_a_session_registers_the_source_when_somebody_asks_for_it(spark: SparkSession) -> None:
    session = spark.newSession()
    sources: Any = session._jsparkSession.sessionState().dataSourceManager()
    Still(session)
    before = sources.dataSourceExists("stillframe")

    session.read.format("stillframe")

    assert (before, sources.dataSourceExists("stillframe")) == (False, True)
