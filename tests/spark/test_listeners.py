"""What watches Spark's queries, without a change: listeners, progress and failures."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.functions import window
from pyspark.sql.streaming import StreamingQueryListener
from pyspark.sql.streaming.listener import StreamingQueryProgress

import stillframe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120
ROWS = 600


class Noting(StreamingQueryListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.has_ended = threading.Event()

    def onQueryStarted(self, event: Any) -> None:
        self.events.append(("started", event))

    def onQueryProgress(self, event: Any) -> None:
        self.events.append(("progress", event.progress))

    def onQueryIdle(self, event: Any) -> None:
        self.events.append(("idle", event))

    def onQueryTerminated(self, event: Any) -> None:
        self.events.append(("terminated", event))
        self.has_ended.set()

    def of(self, kind: str) -> list[Any]:
        return [event for said, event in self.events if said == kind]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    (tmp_path / "rows").mkdir()
    lines = ({"id": i, "at": f"2024-01-01T00:{i // 60:02d}:{i % 60:02d}Z"} for i in range(ROWS))
    (tmp_path / "rows" / "a.json").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return str(tmp_path / "rows")


def watched(spark: SparkSession, rows: str, name: str) -> tuple[Noting, Any]:
    """Counts by minutes, watched by a listener that was written for Spark."""
    listener = Noting()
    spark.streams.addListener(listener)
    try:
        stream = spark.readStream.schema("id long, at timestamp").json(rows)
        counts = stream.withWatermark("at", "1 minute").groupBy(window("at", "1 minute")).count()
        writer = counts.writeStream.format("memory").queryName(name).outputMode("append")
        query = writer.trigger(availableNow=True).start()
        assert [kind for kind, _ in listener.events][:1] == ["started"], "before start returns"
        assert query.awaitTermination(WAIT_SECONDS_MAX)
        assert listener.has_ended.wait(WAIT_SECONDS_MAX)
    finally:
        spark.streams.removeListener(listener)
    return listener, query


def names_in(progress: Any) -> dict[str, set[str]]:
    told = json.loads(progress.json)
    return {
        "": set(told),
        "state": set(told["stateOperators"][0]),
        "source": set(told["sources"][0]),
        "sink": set(told["sink"]),
    }


def test_a_listener_hears_here_what_it_hears_in_spark(spark: SparkSession, rows: str) -> None:
    of_spark, _ = watched(spark, rows, "of_spark")
    stillframe.everywhere(spark)
    try:
        ours, query = watched(spark, rows, "ours")
        assert spark.streams.active == []
        assert spark.streams.get(query.id) is None
        spark.streams.resetTerminated()
    finally:
        stillframe.nowhere()

    for each in (of_spark, ours):
        kinds = [kind for kind, _ in each.events]
        assert (kinds[0], kinds[-1], len(each.of("started"))) == ("started", "terminated", 1)
        assert sum(progress.numInputRows for progress in each.of("progress")) == ROWS
        assert {event.runId for kind, event in each.events if kind != "idle"} == {
            each.of("started")[0].runId
        }
        assert each.of("terminated")[0].exception is None

    progress = ours.of("progress")[0]
    assert isinstance(progress, StreamingQueryProgress)
    assert progress.name == "ours"
    theirs, own = names_in(of_spark.of("progress")[0]), names_in(progress)
    theirs["state"].discard("customMetrics"), own["state"].discard("customMetrics")
    missing = {place: theirs[place] - own[place] for place in theirs}
    assert missing == {place: set() for place in theirs}
    (state,), (source,) = progress.stateOperators, progress.sources
    assert state.operatorName == of_spark.of("progress")[0].stateOperators[0].operatorName
    assert source.numInputRows == progress.numInputRows
    assert json.loads(source.endOffset) == {}, "the only file was read to its end"
    last = query.lastProgress
    assert isinstance(last, StreamingQueryProgress)
    assert last.eventTime["watermark"] == "2024-01-01T00:08:59.000Z"
    assert last["checkpoint"]["id"] == len(query.recentProgress)


def test_all_that_is_available_has_files_that_have_come_since_the_last_listing(
    spark: SparkSession, rows: str
) -> None:
    text = (Path(rows) / "a.json").read_text()
    stillframe.everywhere(spark)
    try:
        stream = spark.readStream.schema("id long, at timestamp").json(rows)
        query = stream.writeStream.format("memory").queryName("available").start()
        try:
            for times in range(1, 4):
                query.processAllAvailable()
                assert spark.table("available").count() == times * ROWS
                draft = Path(rows).parent / "draft"
                draft.write_text(text)
                draft.rename(Path(rows) / f"{times}.json")
        finally:
            query.stop()
    finally:
        stillframe.nowhere()


def test_a_failure_is_spark_s_kind_of_exception(still: Any, rows: str) -> None:
    def broken(frame: Any, epoch: int) -> None:
        raise TypeError("no such column")

    listener = Noting()
    still.streams.addListener(listener)
    still.streams.resetTerminated()
    try:
        stream = still.spark.readStream.schema("id long, at timestamp").json(rows)
        query = still.writeStream(stream).foreachBatch(broken).queryName("broken").start()
        with pytest.raises(StreamingQueryException, match="no such column"):
            query.awaitTermination(WAIT_SECONDS_MAX)
        assert listener.has_ended.wait(WAIT_SECONDS_MAX)
        with pytest.raises(StreamingQueryException, match="no such column"):
            still.streams.awaitAnyTermination(WAIT_SECONDS_MAX)
    finally:
        still.streams.removeListener(listener)
        still.streams.resetTerminated()
    assert "no such column" in listener.of("terminated")[0].exception
    assert isinstance(query.exception(), StreamingQueryException)
    assert isinstance(query.exception(), stillframe.JobFailed)


def test_a_listener_may_start_a_query_when_it_is_told_of_one(still: Any, rows: str) -> None:
    queries = []

    def start(name: str) -> None:
        stream = still.spark.readStream.schema("id long, at timestamp").json(rows)
        writer = still.writeStream(stream).format("memory").queryName(name)
        writer = writer.option("parallelism", 1).trigger(availableNow=True)
        queries.append(writer.start())

    class Starting(Noting):
        def onQueryStarted(self, event: Any) -> None:
            if event.name == "the_first":
                start("the_second")

    listener = Starting()
    still.streams.addListener(listener)
    try:
        start("the_first")
        assert [query.name for query in queries] == ["the_second", "the_first"]
        assert all(query.awaitTermination(WAIT_SECONDS_MAX) for query in queries)
    finally:
        still.streams.removeListener(listener)
    assert still.spark.table("the_second").count() == ROWS
