"""Tables that streams are joined with, read again while the job runs, on real local Spark."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from waiting import wait_until

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.coordinator.replanned import Refreshed
from stillframe.errors import StartRefused
from stillframe.graph.logical import Node, Read
from stillframe.spark.refreshing import Tables
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream
from stillframe.spark.writer import StreamWriter
from stillframe.testing.sources import Die, Gate, Item, ScriptedSource, Wait

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0
ORDER = pa.schema([("n", pa.int64()), ("currency", pa.string())])
NAME = pa.schema([("currency", pa.string()), ("version", pa.float64())])


def write(rows: list[tuple[str, float]], directory: Path, name: str = "names") -> None:
    """In one step, so that who reads meanwhile finds the one file or the other."""
    directory.mkdir(exist_ok=True)
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    pq.write_table(pa.Table.from_arrays(columns, schema=NAME), directory / f"_{name}")
    os.replace(directory / f"_{name}", directory / f"{name}.parquet")


def orders_of(*numbers: int) -> pa.RecordBatch:
    rows = [{"n": number, "currency": f"c{number % 3}"} for number in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=ORDER)


def orders(still: Still, *items: Item) -> Stream:
    source = ScriptedSource(ORDER, (items,))
    return Stream.reading(still, Node(Read(source), ORDER, parallelism=1))


def writer_of(stream: Stream, place: Path) -> StreamWriter:
    return (
        stream.writeStream.format("parquet")
        .queryName("refreshed")
        .option("path", str(place / "out"))
        .option("checkpointLocation", str(place / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("restartDelay", "100 ms")
        .option("refreshInterval", "200 ms")
        .option("parallelism", "2")
    )


def versions_in(place: Path) -> dict[int, float | None]:
    rows: list[dict[str, Any]] = pq.read_table(place / "out").to_pylist()
    found = {row["n"]: row["version"] for row in rows}
    assert len(found) == len(rows), "a row came twice"
    return found


@pytest.fixture
def names(spark: SparkSession, tmp_path: Path) -> DataFrame:
    write([("c0", 1.0), ("c1", 1.0)], tmp_path / "names")
    return spark.read.parquet(str(tmp_path / "names"))


@pytest.mark.slow
def test_rows_before_the_refresh_have_the_older_version_and_those_after_it_the_newer(
    still: Still, names: DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_refreshed, died = Gate(str(tmp_path / "refreshed")), Gate(str(tmp_path / "died"))
    script = (
        *(orders_of(*range(30)), Wait(is_refreshed)),
        *(orders_of(*range(30, 60)), Die(died), orders_of(*range(60, 90))),
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, CheckpointCompleted) and event.checkpoint_id == 3:
            write([("c0", 2.0), ("c1", 2.0)], tmp_path / "names")
        if isinstance(event, Refreshed):
            is_refreshed.open()

    query = writer_of(orders(still, *script).join(names, "currency", "left"), tmp_path).start()
    query.add_listener(listen)
    query.explain()
    assert "at the start and every 0.2 s: the table" in capsys.readouterr().out
    assert query.awaitTermination(WAIT_SECONDS_MAX), [str(event) for event in events]

    versions = [1.0] * 30 + [2.0] * 60
    assert versions_in(tmp_path) == {n: None if n % 3 == 2 else versions[n] for n in range(90)}
    assert died.is_open
    assert len([event for event in events if isinstance(event, Refreshed)]) == 1
    started = [event for event in events if isinstance(event, AttemptStarted)]
    assert len(started) == 3, "at first, with the new rows, and after the kill"
    assert query.summary.restarts == 1


@pytest.mark.slow
def test_a_static_side_of_sparks_own_plan_changes_between_two_records(
    spark: SparkSession, still: Still, names: DataFrame, tmp_path: Path
) -> None:
    batches = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3)
    rows = batches.option("batchInterval", "50 ms").load()
    keyed = rows.selectExpr("value AS n", "concat('c', value % 3) AS currency")
    joined = names.join(keyed, "currency", "right").select("n", "version")
    query = (
        still.writeStream(joined)
        .format("memory")
        .queryName("either")
        .option("checkpointLocation", str(tmp_path / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("refreshInterval", "200 ms")
        .option("parallelism", "2")
        .start()
    )
    try:
        wait_until(lambda: spark.table("either").count() > 0)
        write([("c0", 2.0), ("c1", 2.0)], tmp_path / "names")
        wait_until(lambda: spark.table("either").where("version = 2").count() > 0)
    finally:
        query.stop()

    found = sorted(map(tuple, spark.table("either").collect()))
    first_newer = next(n for n, version in found if version == 2.0)
    versions = [1.0] * first_newer + [2.0] * len(found)
    assert first_newer > 0
    assert found == [(n, None if n % 3 == 2 else versions[n]) for n in range(len(found))]
    assert query.summary.restarts == 0


@pytest.mark.slow
def test_a_table_that_cannot_be_read_again_stays_as_it_was(
    still: Still, names: DataFrame, tmp_path: Path
) -> None:
    is_told = Gate(str(tmp_path / "told"))
    told: list[str] = []

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "could not be read again" in record.getMessage():
                told.append(record.getMessage())
                is_told.open()

    script = (orders_of(*range(30)), Wait(is_told), orders_of(*range(30, 60)))
    handler = Telling()
    logging.getLogger("stillframe").addHandler(handler)
    try:
        query = writer_of(orders(still, *script).join(names, "currency"), tmp_path).start()
        (tmp_path / "names" / "names.parquet").write_text("these are no names")
        assert query.awaitTermination(WAIT_SECONDS_MAX)
    finally:
        logging.getLogger("stillframe").removeHandler(handler)

    assert versions_in(tmp_path) == {n: 1.0 for n in range(60) if n % 3 != 2}
    assert told[0].startswith("job 'refreshed' goes on with the tables it has, because they")
    assert "\n" not in told[0]


def test_only_other_rows_are_a_change(
    still: Still, names: DataFrame, spark: SparkSession, tmp_path: Path
) -> None:
    where = tmp_path / "names"
    write([("c0", math.nan), ("c1", 1.0)], where)
    frame = spark.read.parquet(str(where))
    tables = Tables([orders(still).join(frame, "currency").node], 60.0)

    assert not tables.read_again()
    write([("c1", 1.0), ("c0", math.nan)], where)
    assert not tables.read_again(), "in another order"
    write([("c2", 1.0)], where, "more")
    assert tables.read_again(), "in a file that was not there"
    assert not tables.read_again()
    write([("c2", 3.0)], where, "more")
    assert tables.read_again(), "in a file that was replaced"
    (where / "more.parquet").unlink()
    assert tables.read_again(), "in a file that is gone"


def test_a_job_that_could_not_go_on_with_other_rows_is_refused(
    still: Still, names: DataFrame, tmp_path: Path
) -> None:
    joined = orders(still).join(names, "currency")
    with pytest.raises(StartRefused, match=r"refreshInterval .* set checkpointLocation and"):
        joined.writeStream.format("noop").option("refreshInterval", "1 minute").start()
    with pytest.raises(StartRefused, match=r"refreshInterval .* checkpointMode at-most-once"):
        writer_of(joined, tmp_path).option("checkpointMode", "at-most-once").start()
