"""Every checkpoint mode on real local Spark, with backpressure and a `kill -9` in the middle.

The job numbers the clicks of each app in a function over two streams, and what comes behind it is
slow, so that channels are full when barriers come. Exactly once means two things that do not
follow from each other: every click comes out once, and the numbers of an app, which are the
function's state, are 1, 2, 3, … without a gap.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import stillframe
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.coordinator.query import Query
from stillframe.errors import StartRefused
from stillframe.graph.logical import Node, Write
from stillframe.protocol.manifests import Manifest, decode_manifest
from stillframe.spark import launch
from stillframe.spark.stream import Stream
from stillframe.storage.paths import metadata_path

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECORDS, PARTITIONS, APPS = 40_000, 2, 50
BATCH_ROWS = 500
WAIT_SECONDS_MAX = 120.0

NUMBERED = "id long, app_id string, n long"
Rows = list[dict[str, Any]]


class Numbered(stillframe.TwoInputFunction):
    """Answers each row with how many rows of its app have come."""

    SCHEMA = pa.schema([("id", pa.int64()), ("app_id", pa.string()), ("n", pa.int64())])

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def process_first(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        numbers = []
        for app in batch.column("app_id").to_pylist():
            self._seen[app] += 1
            numbers.append(self._seen[app])
        columns = [batch.column("id"), batch.column("app_id"), pa.array(numbers, pa.int64())]
        yield pa.record_batch(columns, self.SCHEMA)

    process_second = process_first

    def snapshot(self) -> pa.RecordBatch:
        return pa.record_batch(
            {
                "app_id": pa.array(self._seen.keys(), pa.string()),
                "n": pa.array(self._seen.values(), pa.int64()),
            }
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        self._seen.update(dict(zip(*(c.to_pylist() for c in batch.columns), strict=True)))


def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(0.008)
        yield batch


class Story:
    """One job with a saboteur, who sees each checkpoint before the job goes on."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.still = stillframe.on(spark)
        self._directory = directory
        self.query: Query
        self.events: list[Event] = []
        self.manifests: list[Manifest] = []
        self._has_killed = False

    def clicks(self, records_per_second: int | None = None) -> Stream:
        return (
            self.still.readStream.format("clicks")
            .options(records=RECORDS, partitions=PARTITIONS, apps=APPS, batchRows=BATCH_ROWS)
            .option("recordsPerSecond", records_per_second)
            .load()
        )

    def numbered(self) -> Stream:
        clicks = self.clicks().select("id", "app_id")
        even, odd = clicks.filter("id % 2 = 0"), clicks.filter("id % 2 = 1")
        return even.connect(odd, Numbered, NUMBERED, by="app_id")

    def numbered_slowly(self) -> Stream:
        """Slot 0 alone does the slow part, so that whatever leads to it fills up."""
        return self.numbered().mapInArrow(slowly, NUMBERED).parallelism(1)

    def run(
        self,
        stream: Stream,
        kill_after: Callable[[Manifest], bool] = lambda manifest: False,
        **options: Any,
    ) -> Rows:
        """Run to the end; slot 1 dies after the first checkpoint that is meant. What came out."""
        settings = {
            "checkpointLocation": str(self._directory / "checkpoints"),
            "checkpointInterval": "100 ms",
            "restartDelay": "100 ms",
            "restartAttempts": "10",
            "parallelism": "2",
            "channelBufferBytes": "20000",
        }
        writer = stream.writeStream.option("path", str(self._directory / "out"))

        def listen(event: Event) -> None:
            self.events.append(event)
            if isinstance(event, CheckpointCompleted):
                self.manifests.append(self._manifest(event))
                if not self._has_killed and kill_after(self.manifests[-1]):
                    self._has_killed = True
                    os.kill(self.query.slot_pids[1], signal.SIGKILL)

        self.query = self.still.start("job", writer, **(settings | options))
        self.query.add_listener(listen)
        assert self.query.awaitTermination(WAIT_SECONDS_MAX), [str(e) for e in self.events]
        rows: Rows = pq.read_table(self._directory / "out").to_pylist()
        return rows

    def _manifest(self, event: CheckpointCompleted) -> Manifest:
        path = metadata_path(event.checkpoint_id, event.attempt)
        file = self._directory / "checkpoints" / "job" / path
        return decode_manifest(file.read_bytes(), str(file))

    def restored_from(self) -> Manifest:
        """The checkpoint that the only kill was recovered with."""
        started = [event for event in self.events if isinstance(event, AttemptStarted)]
        (restored_from,) = [event.restored_from for event in started if event.attempt > 1]
        (manifest,) = [m for m in self.manifests if m.checkpoint_id == restored_from]
        return manifest


@pytest.fixture
def story(spark: SparkSession, tmp_path: Path) -> Story:
    return Story(spark, tmp_path)


def second_checkpoint(manifest: Manifest) -> bool:
    return manifest.checkpoint_id >= 2


def rows_under_way(manifest: Manifest) -> int:
    return sum(channel.rows for channel in manifest.channels)


def has_rows_under_way(manifest: Manifest) -> bool:
    return rows_under_way(manifest) > 0


def true_clicks() -> dict[int, str]:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    tables = [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
    clicks = pa.Table.from_batches(tables)
    return dict(zip(clicks["id"].to_pylist(), clicks["app_id"].to_pylist(), strict=True))


def assert_numbered_exactly_once(rows: Rows) -> None:
    truth = true_clicks()
    assert len(rows) == RECORDS
    assert {row["id"]: row["app_id"] for row in rows} == truth
    numbers: dict[str, list[int]] = {}
    for row in rows:
        numbers.setdefault(row["app_id"], []).append(row["n"])
    for app, count in Counter(truth.values()).items():
        assert sorted(numbers[app]) == list(range(1, count + 1)), app


def test_a_sink_that_commits_in_two_phases_is_refused_where_nothing_would_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    clicks = stillframe.on(spark).readStream.format("clicks").option("records", 10).load()
    sink = FileSink(str(tmp_path / "out"), "parquet", clicks.node.schema)
    write = Node(Write(sink), clicks.node.schema, (clicks.node,))
    for options in ({}, {"checkpointLocation": str(tmp_path / "chk")}):
        with pytest.raises(StartRefused, match=r"commits in two phases.* checkpoints are off"):
            launch.start(spark, "job", [write], job_config(options))


# --- Exactly once, in every way -----------------------------------------------------------------


def test_unaligned_records_under_way_survive_a_kill(story: Story) -> None:
    rows = story.run(story.numbered_slowly(), has_rows_under_way, unalignedCheckpoints=True)

    assert_numbered_exactly_once(rows)
    assert rows_under_way(story.restored_from()) > 0


def test_an_alignment_that_takes_too_long_turns_unaligned_and_survives_a_kill(
    story: Story,
) -> None:
    rows = story.run(
        story.numbered_slowly(),
        has_rows_under_way,
        unalignedCheckpoints=True,
        alignedCheckpointTimeout="5 ms",
    )

    assert_numbered_exactly_once(rows)
    assert rows_under_way(story.restored_from()) > 0


def test_a_timeout_that_is_never_reached_leaves_checkpoints_aligned(story: Story) -> None:
    rows = story.run(
        story.numbered(),
        second_checkpoint,
        unalignedCheckpoints=True,
        alignedCheckpointTimeout="1 min",
    )

    assert_numbered_exactly_once(rows)
    assert not any(rows_under_way(manifest) for manifest in story.manifests)


def test_stop_the_world_survives_a_kill(story: Story) -> None:
    rows = story.run(story.numbered_slowly(), second_checkpoint, checkpointMode="stop-the-world")

    assert_numbered_exactly_once(rows)
    assert not rows_under_way(story.restored_from())


def test_several_checkpoints_in_flight_survive_a_kill(story: Story) -> None:
    rows = story.run(
        story.numbered_slowly(),
        second_checkpoint,
        maxConcurrentCheckpoints=3,
        checkpointInterval="20 ms",
    )

    assert_numbered_exactly_once(rows)
    assert story.restored_from().checkpoint_id >= 2
    spans = sorted((m.triggered_at_ms, m.completed_at_ms) for m in story.manifests)
    overlap = (later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
    assert any(overlap), "no two were in flight at once"


# --- Cycles -------------------------------------------------------------------------------------


def one_round(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(0.002)
        left = pa.array([n - 1 for n in batch.column("n").to_pylist()], pa.int64())
        yield pa.record_batch([batch.column("id"), left], batch.schema)


def rounds(stream: Stream) -> tuple[Stream, Stream]:
    turned = stream.mapInArrow(one_round, "id long, n long").parallelism(1)
    return turned.filter("n <= 0"), turned.filter("n > 0")


@pytest.mark.parametrize("is_unaligned", [False, True], ids=["aligned", "unaligned"])
def test_records_that_go_round_in_a_cycle_survive_a_kill(story: Story, is_unaligned: bool) -> None:
    entering = story.clicks(records_per_second=10_000).selectExpr("id", "id % 4 AS n")

    rows = story.run(
        entering.iterate(rounds).uid("rounds"),
        lambda manifest: any(">rounds" in channel.edge for channel in manifest.channels),
        unalignedCheckpoints=is_unaligned,
    )

    assert Counter(row["id"] for row in rows) == dict.fromkeys(range(RECORDS), 1)
    assert rows_under_way(story.restored_from()) > 0


# --- At most once -------------------------------------------------------------------------------


def test_at_most_once_loses_nothing_without_a_failure(story: Story) -> None:
    rows = story.run(story.numbered(), checkpointMode="at-most-once")

    assert_numbered_exactly_once(rows)


def test_at_most_once_shows_nothing_twice_after_a_kill(story: Story) -> None:
    rows = story.run(story.numbered_slowly(), second_checkpoint, checkpointMode="at-most-once")

    truth = true_clicks()
    assert story.restored_from().checkpoint_id >= 2
    assert all(truth[row["id"]] == row["app_id"] for row in rows)
    assert max(Counter(row["id"] for row in rows).values()) == 1
    # What the checkpoint had reserved and slot 1 had not got to is skipped, and never comes.
    assert 0 < len(rows) < RECORDS
    # The state has not seen anything twice either.
    assert max(Counter((row["app_id"], row["n"]) for row in rows).values()) == 1
