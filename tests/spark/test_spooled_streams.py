"""Sources that only Spark can read: it writes them to files, and each row is counted once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import wait_until

import stillframe
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.errors import DataError, JobFailed, StartRefused
from stillframe.spark.frames.spooled_streams import refuse_another_spool, refuse_lost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still
    from stillframe.spark.writer import StreamWriter

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0


class Incoming:
    """A directory of XML, which Stillframe does not read."""

    def __init__(self, spark: SparkSession, place: Path) -> None:
        self._spark, self._place = spark, place
        self.path, self.rows = place / "incoming", 0
        self.path.mkdir()

    def add(self, rows: int = 50) -> None:
        ids = range(self.rows, self.rows + rows)
        texts = (f"<row><id>{i}</id><at>2024-01-01T00:00:{i % 60:02d}Z</at></row>" for i in ids)
        hidden = self._place / "written.xml"
        hidden.write_text(f"<rows>{''.join(texts)}</rows>")
        hidden.rename(self.path / f"{self.rows:05d}.xml")
        self.rows += rows

    def stream(self, **options: str) -> Any:
        reader = self._spark.readStream.format("xml").schema("id long, at timestamp")
        return reader.options(rowTag="row", **options).load(str(self.path))


@pytest.fixture
def incoming(spark: SparkSession, tmp_path: Path) -> Incoming:
    return Incoming(spark, tmp_path)


def written(spark: SparkSession, place: Path) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, spark.read.parquet(str(place)).collect()))


def spooled(place: Path) -> list[Path]:
    return list(place.glob("checkpoints/**/spool/*/rows/*.parquet"))


def test_what_is_there_is_read_and_the_next_run_reads_what_has_come_since(
    spark: SparkSession, still: Still, incoming: Incoming, tmp_path: Path
) -> None:
    def run(out: str, **options: str) -> None:
        writer = still.writeStream(incoming.stream()).option("path", str(tmp_path / out))
        writer = writer.options(checkpointLocation=str(tmp_path / "checkpoints"), **options)
        query = writer.queryName("kept").trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_SECONDS_MAX)

    incoming.add()
    incoming.add()
    run("out")
    wait_until(lambda: spooled(tmp_path) == [])
    (rows,) = tmp_path.glob("checkpoints/**/spool/*/rows")
    unfinished = rows / "part-of-a-batch-that-did-not-end.parquet"
    pq.write_table(pa.table({"id": [-1], "at": [None]}), unfinished)
    incoming.add()
    run("out")

    truth = spark.read.format("xml").schema("id long, at timestamp").option("rowTag", "row")
    expected = sorted(map(tuple, truth.load(str(incoming.path)).collect()))
    assert len(expected) == 150
    assert written(spark, tmp_path / "out") == expected
    wait_until(lambda: spooled(tmp_path) == [unfinished])
    assert spark.streams.active == []

    run("again", fresh="true")
    assert written(spark, tmp_path / "again") == expected


@pytest.mark.slow
def test_a_lost_slot_and_a_new_start_lose_no_row_and_count_none_twice(
    spark: SparkSession, still: Still, incoming: Incoming, tmp_path: Path
) -> None:
    events: list[Event] = []

    def start(**options: str) -> Query:
        writer = still.writeStream(incoming.stream()).option("path", str(tmp_path / "out"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoints"))
        writer = writer.options(checkpointInterval="1 second", restartDelay="100 ms", **options)
        query = writer.queryName("kept").start()
        query.add_listener(events.append)
        return query

    def rows_shown() -> int:
        out = tmp_path / "out"
        return len(written(spark, out)) if list(out.glob("*.parquet")) else 0

    incoming.add()
    query = start()
    wait_until(lambda: rows_shown() == 50)
    savepoint = query.savepoint(str(tmp_path / "savepoint"))
    incoming.add()
    os.kill(query.slot_pids[-1], signal.SIGKILL)
    wait_until(lambda: rows_shown() == 100)
    query.stop()
    assert spark.streams.active == []
    assert any(isinstance(each, AttemptStarted) and each.restored_from for each in events)

    incoming.add()
    query = start()
    wait_until(lambda: rows_shown() == 150)
    completed = sum(isinstance(each, CheckpointCompleted) for each in events)
    wait_until(lambda: sum(isinstance(e, CheckpointCompleted) for e in events) > completed + 1)
    query.stop()
    assert [row[0] for row in written(spark, tmp_path / "out")] == list(range(150))
    assert spooled(tmp_path) == []

    query = start(restoreFrom=savepoint, fresh="true")
    with pytest.raises(JobFailed, match=r"files of rows .* are not there any more"):
        query.awaitTermination(WAIT_SECONDS_MAX)


JOB = """
import sys
from pyspark.sql import SparkSession
import stillframe
from stillframe.spark.deployment.java import ensure_java

ensure_java()
incoming, place = sys.argv[1:]
builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
rows = spark.readStream.format("xml").schema("id long, at timestamp").option("rowTag", "row")
writer = stillframe.on(spark).writeStream(rows.load(incoming)).queryName("kept")
writer = writer.options(checkpointLocation=f"{place}/checkpoints", checkpointInterval="1 second")
writer.option("leaseTimeout", "6 s").start(f"{place}/out").awaitTermination()
"""


@pytest.mark.slow
def test_a_driver_that_is_killed_loses_no_row_and_counts_none_twice(
    spark: SparkSession, still: Still, incoming: Incoming, tmp_path: Path
) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    incoming.add()
    process = subprocess.Popen(
        [sys.executable, str(job), str(incoming.path), str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: list((tmp_path / "out").glob("*.parquet")) and not spooled(tmp_path))
        incoming.add()
        wait_until(lambda: bool(spooled(tmp_path)))
    finally:
        process.kill()
        process.wait()
    incoming.add()
    writer = still.writeStream(incoming.stream()).option("path", str(tmp_path / "out"))
    writer = writer.options(checkpointLocation=str(tmp_path / "checkpoints"), leaseTimeout="6 s")
    query = writer.queryName("kept").trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_SECONDS_MAX)
    assert [row[0] for row in written(spark, tmp_path / "out")] == list(range(150))


def test_spark_s_query_needs_a_core_beside_the_slots(
    still: Still, incoming: Incoming, tmp_path: Path
) -> None:
    writer = still.writeStream(incoming.stream()).format("noop").option("parallelism", 4)
    writer = writer.options(checkpointLocation=str(tmp_path), checkpointInterval="1 second")
    with pytest.raises(StartRefused, match="needs 5 cores"):
        writer.start()


def test_a_failure_of_spark_s_query_is_the_job_s_in_spark_s_words(
    spark: SparkSession, still: Still, incoming: Incoming, tmp_path: Path
) -> None:
    (incoming.path / "bad.xml").write_text("<rows><row><id>one</id></row></rows>")
    writer = still.writeStream(incoming.stream(mode="FAILFAST")).format("noop")
    writer = writer.options(checkpointLocation=str(tmp_path), checkpointInterval="1 second")
    query = writer.option("restartStrategy", "none").start()
    with pytest.raises(JobFailed, match=r"Spark cannot read source xml .*: .*") as failed:
        query.awaitTermination(WAIT_SECONDS_MAX)
    assert "\n" not in str(failed.value)
    assert "bad.xml" in str(failed.value) or "FAILFAST" in str(failed.value)
    assert spark.streams.active == []


def test_a_leaf_that_is_in_a_plan_twice_is_read_once(
    spark: SparkSession, incoming: Incoming
) -> None:
    incoming.add(10)
    stillframe.everywhere(spark)
    try:
        rows = incoming.stream()
        twice = rows.union(rows)
        writer = twice.groupBy().sum("id").writeStream.format("memory").queryName("summed")
        query = writer.outputMode("complete").trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_SECONDS_MAX)
    finally:
        stillframe.nowhere()
    assert [row[0] for row in spark.table("summed").collect()] == [2 * sum(range(10))]


def test_there_must_be_a_place_for_the_rows(still: Still, incoming: Incoming) -> None:
    writer: StreamWriter = still.writeStream(incoming.stream()).format("noop")
    with pytest.raises(StartRefused, match=r"source xml .* set checkpointLocation"):
        writer.start()


# --- What is known of the files -------------------------------------------------------------------

NAMED = {"a.parquet": 1_000, "b.parquet": 2_000}


def test_a_file_that_spark_has_written_and_nobody_has_read_must_be_there() -> None:
    refuse_lost(NAMED, ["/chk/rows/a.parquet", "/chk/rows/b.parquet"], 0)
    refuse_lost(NAMED, ["/chk/rows/b.parquet"], 1_001)  # the other one is long forgotten
    with pytest.raises(
        DataError, match=r"1 files of rows .* such as b.parquet: a later checkpoint"
    ):
        refuse_lost(NAMED, ["/chk/rows/a.parquet"], 0)


def test_a_job_does_not_go_on_from_the_rows_of_another_place() -> None:
    refuse_another_spool("/chk/spool/x", ["/chk/spool/x/rows/a.parquet"])
    with pytest.raises(DataError, match=r"written to /old/spool/x/rows, and not to /chk/spool/x"):
        refuse_another_spool("/chk/spool/x", ["/old/spool/x/rows/a.parquet"])
