"""Programs of Spark's Structured Streaming guide that start queries: run by Spark, and here.

Each gives facts, some of them several: what they are in Spark they are here, or the docs say why.
"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from guide import (
    SAME,
    WAIT_SECONDS_MAX,
    Inputs,
    as_table,
    settings,
    table_in_docs,
    write_inputs,
)
from pyspark.errors import StreamingQueryException
from pyspark.sql.functions import col, count, lit, max
from pyspark.sql.streaming import StreamingQueryListener
from waiting import wait_until

import stillframe
from stillframe.errors import BuildError
from stillframe.spark.deployment.checks import warn_of_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Facts = dict[str, Any]


class Place(Inputs):
    """The inputs of one program, and a directory for what it writes."""

    def __init__(self, spark: SparkSession, written: Path, place: Path, is_here: bool) -> None:
        super().__init__(spark, written, place)
        self.out = place / "out"
        self.tables = f"t_{'here' if is_here else 'spark'}_"

    def devices(self) -> DataFrame:
        return self.rows("devices").select("device", "deviceType", "signal")

    def done(self, writer: Any, path: str = "") -> None:
        """Start it with a checkpoint location, and wait for its end."""
        writer = writer.option("checkpointLocation", str(self.out / f"checkpoints{path}"))
        query = writer.start(str(self.out / path)) if path else writer.start()
        query.awaitTermination(WAIT_SECONDS_MAX)

    def read(self, path: str, format: str = "parquet") -> list[Any]:
        schema = "value string" if format == "text" else None
        reader = self.spark.read.format(format)
        frame = (reader.schema(schema) if schema else reader).load(str(self.out / path))
        return sorted(map(tuple, frame.select(sorted(frame.columns)).collect()))


# --- Sinks ----------------------------------------------------------------------------------------


def files(at: Place) -> Facts:
    facts: Facts = {}
    for format in ("parquet", "orc", "json", "csv"):
        writer = at.devices().writeStream.format(format).trigger(availableNow=True)
        at.done(writer, format)
        facts[f"`{format}` files"] = at.read(format, format)
    return facts


def text_in_partitions(at: Place) -> Facts:
    rows = at.devices().selectExpr("device AS value", "deviceType")
    writer = rows.writeStream.format("text").partitionBy("deviceType").trigger(availableNow=True)
    at.done(writer, "text")
    found = at.spark.read.text(str(at.out / "text"))
    return {
        "`text` files with `partitionBy`": sorted(map(tuple, found.collect())),
    }


def memory(at: Place) -> Facts:
    counts = at.devices().groupBy("deviceType").count()
    name = f"{at.tables}counts"
    writer = counts.writeStream.queryName(name).outputMode("complete").format("memory")
    at.done(writer.trigger(availableNow=True))
    found = at.spark.sql(f"SELECT * FROM {name} WHERE deviceType > 't0' ORDER BY 1").collect()
    return {"a table in memory, asked by SQL": found}


def console(at: Place) -> Facts:
    query = at.devices().writeStream.format("console").trigger(availableNow=True).start()
    query.awaitTermination(WAIT_SECONDS_MAX)
    return {"`console`": query.exception()}


def for_each_batch(at: Place) -> Facts:
    sums: list[float] = []

    def write(frame: DataFrame, epoch: int) -> None:
        frame.persist()
        frame.write.mode("append").parquet(str(at.out / "first"))
        frame.select("device").write.mode("append").json(str(at.out / "second"))
        sums.extend(row[0] for row in frame.agg({"signal": "sum"}).collect() if row[0] is not None)
        frame.unpersist()

    at.done(at.devices().writeStream.foreachBatch(write).trigger(availableNow=True))
    return {
        "`foreachBatch` with a batch writer": at.read("first"),
        "`foreachBatch` with several places and `persist`": at.read("second", "json"),
        "`foreachBatch` with actions of DataFrames": sum(sums),
    }


def for_each_row(at: Place) -> Facts:
    by_function, by_object = at.out / "function", at.out / "object"
    for each in (by_function, by_object):
        each.mkdir(parents=True)

    def note(row: Any, place: str = str(by_function)) -> None:
        import os
        import uuid

        with open(os.path.join(place, uuid.uuid4().hex), "w") as file:
            file.write(f"{row.device} {row['signal']}")

    class Noting:
        def __init__(self, place: str) -> None:
            self.place = place

        def open(self, partition_id: int, epoch_id: int) -> bool:
            import uuid

            self.lines: list[str] = []
            self.name = f"{self.place}/{uuid.uuid4().hex}"
            return True

        def process(self, row: Any) -> None:
            self.lines.append(f"{row.device} {row.signal}")

        def close(self, error: Exception | None) -> None:
            with open(self.name, "w") as file:
                file.write("\n".join(self.lines))

    rows = at.devices()
    at.done(rows.writeStream.foreach(note).trigger(availableNow=True))
    at.out = at.out / "again"
    at.done(rows.writeStream.foreach(Noting(str(by_object))).trigger(availableNow=True))

    def noted(place: Path) -> list[str]:
        return sorted(line for each in place.iterdir() for line in each.read_text().splitlines())

    return {
        "`foreach` with a function": noted(by_function),
        "`foreach` with an object": noted(by_object),
    }


# --- Tables ---------------------------------------------------------------------------------------


def tables(at: Place) -> Facts:
    spark, name = at.spark, f"{at.tables}devices"
    for each in (name, f"{name}_copy"):
        spark.sql(f"DROP TABLE IF EXISTS {each}")
    writer = at.devices().writeStream.trigger(availableNow=True)
    location = str(at.out / "checkpoints")
    query = writer.option("checkpointLocation", location).toTable(name)
    query.awaitTermination(WAIT_SECONDS_MAX)
    first = sorted(map(tuple, spark.read.table(name).collect()))

    copy = spark.readStream.table(name).select("device", "deviceType").writeStream
    query = (
        copy.option("checkpointLocation", f"{location}-copy")
        .format("parquet")
        .partitionBy("deviceType")
        .trigger(availableNow=True)
        .toTable(f"{name}_copy")
    )
    query.awaitTermination(WAIT_SECONDS_MAX)
    second = spark.read.table(f"{name}_copy")
    found = spark.sql(f"SELECT deviceType, count(*) FROM {name}_copy GROUP BY ALL ORDER BY ALL")
    facts = {
        "`toTable`": first,
        "`readStream.table`": sorted(map(tuple, second.collect())),
        "`toTable` with a format and `partitionBy`": found.collect(),
    }
    for each in (name, f"{name}_copy"):
        spark.sql(f"DROP TABLE {each}")
    return facts


# --- Triggers and queries -------------------------------------------------------------------------


def triggers(at: Place) -> Facts:
    facts: Facts = {}
    for asked, does in (
        ({"once": True}, "`once`"),
        ({"processingTime": "2 seconds"}, "`processingTime`"),
        ({}, "none"),
    ):
        name = f"{at.tables}trigger_{len(facts)}"
        writer = at.devices().writeStream.format("memory").queryName(name)
        query = (writer.trigger(**asked) if asked else writer).start()  # type: ignore[arg-type]
        if "once" in asked:
            query.awaitTermination(WAIT_SECONDS_MAX)
        wait_until(lambda name=name: at.spark.table(name).count() == 60)  # type: ignore[misc]
        query.stop()
        facts[does] = at.spark.table(name).count(), query.isActive
    return facts


def gone_on(at: Place) -> Facts:
    """Started again from its checkpoint location it reads what has come since."""
    incoming = at.out / "incoming"
    incoming.mkdir(parents=True)
    source = next(Path(at.path("devices")).glob("*.json"))
    ids, run_ids = set(), set()
    for day in ("monday", "tuesday"):
        shutil.copy(source, incoming / f"{day}.json")
        rows = at.spark.readStream.schema("device string").json(str(incoming))
        writer = rows.writeStream.format("parquet").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(at.out / "checkpoints"))
        query = writer.start(str(at.out / "all"))
        query.awaitTermination(WAIT_SECONDS_MAX)
        ids.add(str(query.id))
        run_ids.add(str(query.runId))
    return {
        "`availableNow`, started again from its checkpoint location": len(at.read("all")),
        "`id` stays, `runId` does not": (len(ids), len(run_ids)),
    }


class Watching(StreamingQueryListener):
    def __init__(self) -> None:
        self.rows = 0
        self.observed: list[Any] = []
        self.kinds: list[str] = []
        self.is_over = threading.Event()

    def onQueryStarted(self, event: Any) -> None:
        self.kinds.append("started")

    def onQueryProgress(self, event: Any) -> None:
        self.rows += event.progress.numInputRows
        observed = event.progress.observedMetrics.get("metrics")
        if observed is not None and observed.n:
            self.observed.append(tuple(observed))

    def onQueryIdle(self, event: Any) -> None: ...

    def onQueryTerminated(self, event: Any) -> None:
        self.kinds.append("terminated")
        self.is_over.set()


def watched(at: Place) -> Facts:
    streams, name = at.spark.streams, f"{at.tables}watched"
    streams.resetTerminated()
    listener = Watching()
    streams.addListener(listener)
    try:
        metrics = [count(lit(1)).alias("n"), max("signal").alias("most")]
        rows = at.devices().observe("metrics", *metrics).where(col("signal") > 10)
        writer = rows.writeStream.format("memory").queryName(name)
        query = writer.start()
        active = [each.name for each in streams.active], streams.get(query.id).name
        wait_until(lambda: at.spark.table(name).count() == 39)
        wait_until(lambda: bool(listener.observed) and listener.rows == 60)
        status, alive = query.status, query.isActive
        query.stop()
        ended = streams.awaitAnyTermination(WAIT_SECONDS_MAX)
        assert listener.is_over.wait(WAIT_SECONDS_MAX)
    finally:
        streams.removeListener(listener)
        streams.resetTerminated()
    progress = query.recentProgress
    told = json.loads(progress[0].json)
    return {
        "`name`, `isActive`, `stop`": (query.name == name, alive, query.isActive),
        "`status`": {"message", "isDataAvailable", "isTriggerActive"} <= set(status),
        "`recentProgress`": (sum(each.numInputRows for each in progress), len(told["sources"])),
        "`lastProgress`": query.lastProgress is not None,
        "`exception()` of one that did not fail": query.exception(),
        "`spark.streams.active` and `get`": active == ([name], name),
        "`spark.streams.awaitAnyTermination`": ended,
        "a `StreamingQueryListener`": (listener.kinds, listener.rows),
        "`observe`": sorted(set(listener.observed)),
        "`explain()`": query.explain(),
    }


def with_a_usual_place(at: Place) -> Facts:
    usual = at.out / "usual"
    with settings(at.spark, {"spark.sql.streaming.checkpointLocation": str(usual)}):
        writer = at.devices().writeStream.queryName(f"{at.tables}usual").format("parquet")
        query = writer.trigger(availableNow=True).start(str(at.out / "rows"))
        query.awaitTermination(WAIT_SECONDS_MAX)
    return {"`spark.sql.streaming.checkpointLocation`": len(list(usual.iterdir()))}


def failing(at: Place) -> Facts:
    def broken(frame: DataFrame, epoch: int) -> None:
        raise ValueError("no such place")

    with settings(at.spark, {"spark.stillframe.restartStrategy": "none"}):
        query = at.devices().writeStream.foreachBatch(broken).start()
    try:
        query.awaitTermination(WAIT_SECONDS_MAX)
        told = ""
    except StreamingQueryException as error:
        told = str(error)
    at.spark.streams.resetTerminated()
    return {
        "`awaitTermination()` of one that fails": "no such place" in told,
        "`exception()` of one that fails": "no such place" in str(query.exception()),
    }


def live(at: Place) -> Facts:
    name = f"{at.tables}rate"
    rates = at.spark.readStream.format("rate").option("rowsPerSecond", 50).load()
    query = rates.writeStream.format("memory").queryName(name).start()
    wait_until(lambda: at.spark.table(name).count() >= 20)
    query.stop()
    found = at.spark.table(name)
    values = sorted(row.value for row in found.collect())
    return {
        "`rate`": (found.dtypes, values == list(range(len(values)))),
    }


def without_batches(at: Place) -> Facts:
    name = f"{at.tables}continuous"
    rates = at.spark.readStream.format("rate").options(rowsPerSecond=50, numPartitions=1)
    writer = rates.load().writeStream.format("memory").queryName(name)
    query = writer.trigger(continuous="500 milliseconds").start()
    wait_until(lambda: at.spark.table(name).count() >= 20)
    query.stop()
    values = sorted(row.value for row in at.spark.table(name).collect())
    tracked = rates.load().writeStream.format("noop").option("asyncProgressTrackingEnabled", "true")
    query = tracked.option("checkpointLocation", str(at.out / "tracked")).start()
    wait_until(lambda: query.lastProgress is not None)
    query.stop()
    return {
        "`trigger(continuous=...)`": values == list(range(len(values))),
        "asynchronous progress tracking": query.exception(),
    }


def in_batches(at: Place) -> Facts:
    name = f"{at.tables}batches"
    asked = {"rowsPerBatch": 10, "numPartitions": 3, "startTimestamp": 5000}
    reader = at.spark.readStream.format("rate-micro-batch").options(**asked)
    rows = reader.option("advanceMillisPerBatch", 250).load()
    query = rows.writeStream.format("memory").queryName(name).start()
    wait_until(lambda: at.spark.table(name).count() >= 20)
    query.stop()
    found = at.spark.table(name)
    first = found.where("value < 20").orderBy("value").collect()
    return {"`rate-micro-batch`": (found.dtypes, first)}


@dataclass(frozen=True)
class Run:
    section: str
    make: Callable[[Place], Facts]
    here: dict[str, str]
    """What is said of each fact."""


RUNS = (
    Run("Sinks", files, {f"`{each}` files": SAME for each in ("parquet", "orc", "json", "csv")}),
    Run("Sinks", text_in_partitions, {"`text` files with `partitionBy`": SAME}),
    Run("Sinks", memory, {"a table in memory, asked by SQL": SAME}),
    Run("Sinks", console, {"`console`": SAME}),
    Run(
        "Sinks",
        for_each_batch,
        {
            "`foreachBatch` with a batch writer": SAME,
            "`foreachBatch` with several places and `persist`": SAME,
            "`foreachBatch` with actions of DataFrames": SAME,
        },
    ),
    Run(
        "Sinks",
        for_each_row,
        {"`foreach` with a function": SAME, "`foreach` with an object": SAME},
    ),
    Run(
        "Tables",
        tables,
        {
            "`toTable`": SAME,
            "`readStream.table`": SAME,
            "`toTable` with a format and `partitionBy`": SAME,
        },
    ),
    Run("Triggers", triggers, {"none": SAME, "`processingTime`": SAME, "`once`": SAME}),
    Run(
        "Triggers",
        gone_on,
        {
            "`availableNow`, started again from its checkpoint location": SAME,
            "`id` stays, `runId` does not": SAME,
        },
    ),
    Run(
        "Queries",
        watched,
        {
            "`name`, `isActive`, `stop`": SAME,
            "`explain()`": "prints Stillframe's own plan",
            "`status`": SAME,
            "`recentProgress`": SAME,
            "`lastProgress`": SAME,
            "`exception()` of one that did not fail": SAME,
            "`spark.streams.active` and `get`": SAME,
            "`spark.streams.awaitAnyTermination`": SAME,
            "a `StreamingQueryListener`": SAME,
            "`observe`": SAME,
        },
    ),
    Run("Queries", with_a_usual_place, {"`spark.sql.streaming.checkpointLocation`": SAME}),
    Run(
        "Queries",
        failing,
        {
            "`awaitTermination()` of one that fails": SAME,
            "`exception()` of one that fails": SAME,
        },
    ),
    Run("Sources that never end", live, {"`rate`": SAME}),
    Run("Sources that never end", in_batches, {"`rate-micro-batch`": SAME}),
    Run(
        "Sources that never end",
        without_batches,
        {"`trigger(continuous=...)`": SAME, "asynchronous progress tracking": SAME},
    ),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs") / "written"
    write_inputs(place)
    return place


@pytest.fixture(autouse=True)
def utc(spark: SparkSession) -> Iterator[None]:
    with settings(spark, {"spark.sql.session.timeZone": "UTC"}):
        yield


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.make.__name__)
def test_a_query_of_the_guide_does_here_what_it_does_in_spark(
    run: Run, spark: SparkSession, written: Path, tmp_path: Path
) -> None:
    of_spark = run.make(Place(spark, written, tmp_path / "spark", is_here=False))
    stillframe.everywhere(spark)
    try:
        here = run.make(Place(spark, written, tmp_path / "here", is_here=True))
    finally:
        stillframe.nowhere()
    assert list(of_spark) == list(here)
    assert set(here) == set(run.here)
    for does in run.here:
        assert here[does] == of_spark[does], does


REFUSED = (
    (
        "`realTime`",
        "records are processed as they come in any case",
        lambda at: at.devices().writeStream.trigger(realTime="5 minutes"),
        "records are processed as they come",
    ),
)


@pytest.mark.parametrize(
    ("does", "why", "make", "match"), REFUSED, ids=[each[0] for each in REFUSED]
)
def test_what_is_not_there_is_refused_with_its_name(
    does: str,
    why: str,
    make: Callable[[Place], Any],
    match: str,
    spark: SparkSession,
    written: Path,
    tmp_path: Path,
) -> None:
    stillframe.everywhere(spark)
    try:
        with pytest.raises(BuildError, match=match):
            make(Place(spark, written, tmp_path / "here", is_here=True))
    finally:
        stillframe.nowhere()


def test_a_setting_without_effect_is_named(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    policy = "spark.sql.streaming.multipleWatermarkPolicy"
    warn_of_settings(spark)
    assert caplog.text == ""
    with settings(spark, {policy: "max"}):
        warn_of_settings(spark)
    assert f"{policy}=max has no effect: event time has come as far as" in caplog.text


def test_the_docs_tell_of_each_query_what_was_seen() -> None:
    seen = [(run.section, does, here) for run in RUNS for does, here in run.here.items()]
    refused = [("Not there", does, f"refused: {why}") for does, why, *_ in REFUSED]
    expected = as_table(itertools.chain(seen, refused))
    assert table_in_docs("the guide's part") == expected, "\n".join(expected)
