"""Programs in Spark's words whose slots are killed, and that go on with fewer: what comes out is
what Spark says of the same rows at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from conftest import Clicks
    from stillframe.coordinator.query import Query
    from stillframe.spark.stream import Stream
    from stillframe.testing.sources import Gate

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("STILLFRAME_KILLS", "1"))
BATCH_ROWS, BATCHES = 500, 10
"""Of each of two splits, until the next kill."""
WAIT_SECONDS_MAX = 120.0


@dataclass(frozen=True)
class Story:
    """The same clicks as a stream and as a table; the stream waits for a kill now and then."""

    clicks: Clicks
    gates: list[Gate]
    options: dict[str, str]

    def stream(self) -> Stream:
        from stillframe.connectors.generate import CLICK_SCHEMA, ClickSource, clicks_table
        from stillframe.graph.logical import Node, Read
        from stillframe.spark.stream import Stream
        from stillframe.testing.sources import Item, ScriptedSource, Wait

        source = ClickSource(records=self.clicks.records, partitions=2, apps=self.clicks.apps)
        scripts: list[tuple[Item, ...]] = []
        for split in range(2):
            items: list[Item] = []
            for number in range(BATCHES * (len(self.gates) + 1)):
                if number % BATCHES == 0 and number:
                    items.append(Wait(self.gates[number // BATCHES - 1]))
                rows = number * BATCH_ROWS, (number + 1) * BATCH_ROWS
                items.append(clicks_table(source, split, *rows))
            scripts.append(tuple(items))
        read = Node(Read(ScriptedSource(CLICK_SCHEMA, tuple(scripts))), CLICK_SCHEMA)
        return Stream.reading(self.clicks.still, read)

    def frame(self) -> DataFrame:
        return self.clicks.frame()

    def finish(self, query: Query) -> None:
        """From two slots to one; then a slot dies while records flow, as often as is asked for."""
        query.checkpoint(timeout=WAIT_SECONDS_MAX)
        query.rescale(1, timeout=WAIT_SECONDS_MAX)
        for gate in self.gates:
            query.checkpoint(timeout=WAIT_SECONDS_MAX)
            [slot] = query.slot_pids
            gate.open()
            os.kill(slot, signal.SIGKILL)
            deadline = time.monotonic() + WAIT_SECONDS_MAX
            # The last one may have read the rest, and be gone, between two looks.
            while query.isActive and (not query.slot_pids or slot in query.slot_pids):
                assert time.monotonic() < deadline, "no slot has come in its place"
                threading.Event().wait(0.05)
        assert query.awaitTermination(WAIT_SECONDS_MAX)
        assert query.summary.restarts >= len(self.gates)


def sorted_rows(frame: DataFrame) -> list[Any]:
    return sorted(map(tuple, frame.collect()), key=repr)


@pytest.fixture
def story(clicks: Clicks, tmp_path: Path, job_options: dict[str, str]) -> Story:
    from stillframe.testing.sources import Gate

    gates = [Gate(str(tmp_path / f"gate-{number}")) for number in range(KILLS)]
    given = replace(clicks, apps=10, records=2 * BATCH_ROWS * BATCHES * (KILLS + 1))
    options = {**job_options, "checkpointInterval": "1 hour", "restartAttempts": str(KILLS + 10)}
    return Story(given, gates, options)


@pytest.mark.parametrize("backend", ["rocksdb"] if KILLS == 1 else ["fs", "rocksdb"])
def test_lists_sets_and_percentiles_are_those_of_a_batch(still, story, tmp_path, backend):
    from pyspark.sql import functions as f

    single, by_spark = ["clicks", "users", "quarter"], []
    if KILLS > 1:  # what Spark's own code accumulates, in a JVM beside each slot
        single += ["added", "estimate"]
        by_spark = [
            f.expr("try_sum(user_id) AS added"),
            f.expr("hll_sketch_estimate(hll_sketch_agg(user_id % 50)) AS estimate"),
        ]

    def aggregated(rows: Any) -> Any:
        few = f.col("user_id") % 50
        return rows.groupBy("app_id").agg(
            f.count("*").alias("clicks"),
            f.count_distinct(few).alias("users"),
            f.collect_list(few).alias("listed"),
            f.percentile("user_id", 0.25).alias("quarter"),
            *by_spark,
        )

    result = aggregated(story.stream()).select("app_id", *single, "listed")
    writer = result.writeStream.outputMode("update").format("parquet").queryName("killed")
    story.finish(
        writer.options(**story.options, path=str(tmp_path / "out"), stateBackend=backend).start()
    )

    def last(frame: DataFrame) -> list[Any]:
        """Lists are in an order of their own."""
        kept = frame.groupBy("app_id").agg(
            *(f.max_by(name, "clicks") for name in single),
            f.array_sort(f.max_by("listed", "clicks")),
        )
        return sorted_rows(kept)

    truth = aggregated(story.frame())
    assert last(still.spark.read.parquet(str(tmp_path / "out"))) == last(truth)


def test_orc_files_have_as_many_rows_as_a_limit_lets_through_and_all_are_observed(
    still, story, tmp_path
):
    from pyspark.sql import functions as f

    passed = story.clicks.records * 3 // 4
    all_of_them = story.stream().toDataFrame().observe("seen", f.count(f.lit(1)).alias("rows"))
    writer = still.writeStream(all_of_them.limit(passed)).format("orc").queryName("killed")
    query = writer.options(**story.options, path=str(tmp_path / "out")).start()
    story.finish(query)

    written = still.spark.read.orc(str(tmp_path / "out"))
    assert written.count() == written.distinct().count() == passed
    assert written.exceptAll(story.frame()).count() == 0
    told = [each["observedMetrics"].get("seen") for each in query.recentProgress]
    assert sum(each["rows"] for each in told if each) == story.clicks.records


def test_a_table_has_every_row_once(still, story, tmp_path):
    still.spark.sql("DROP TABLE IF EXISTS killed_clicks")

    def chosen(rows: Any) -> Any:
        return rows.where("user_id % 3 = 0").select("id", "app_id")

    query = chosen(story.stream()).writeStream.options(**story.options).toTable("killed_clicks")
    try:
        story.finish(query)
        assert sorted_rows(still.spark.table("killed_clicks")) == sorted_rows(chosen(story.frame()))
    finally:
        still.spark.sql("DROP TABLE killed_clicks")
