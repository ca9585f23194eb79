"""Kills on real local Spark, each at its own awkward moment; what comes out is always exact.

Every record passes through one two-phase-commit sink and is counted on its way to another. After
each story the first must hold every record once, and the second the true count of every app.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import stillframe
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCompleted,
    Event,
    SlotsRunning,
)
from stillframe.coordinator.query import Query
from stillframe.graph.logical import Node, Write
from stillframe.protocol.manifests import Manifest, decode_manifest
from stillframe.runtime.stored_states import StatePart, batches_of
from stillframe.spark import launch
from stillframe.storage.paths import metadata_path
from stillframe.storage.store import open_store
from stillframe.testing.sinks import GatedSink
from stillframe.testing.sources import Gate

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECORDS, PARTITIONS, RATE = 400_000, 4, 100_000
WAIT_SECONDS_MAX = 120.0


class PageViews:
    """The page-view job, with a saboteur who is told every event before the job goes on."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._still = stillframe.on(spark)
        self._spark = spark
        self._directory = directory
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self.query: Query

    def start(
        self,
        *saboteurs: Callable[[Event], None],
        around_clicks: Callable[[FileSink], Any] = lambda sink: sink,
        mode: str = "exactly-once",
        backend: str = "fs",
        interval: str = "1 second",
    ) -> None:
        reader = self._still.readStream.format("clicks")
        clicks = reader.options(
            records=RECORDS, recordsPerSecond=RATE, partitions=PARTITIONS, apps=100
        ).load()
        views = clicks.groupBy("app_id").count()
        views_out = FileSink(str(self._directory / "views"), "parquet", views.node.schema)
        clicks_out = FileSink(str(self._directory / "clicks"), "parquet", clicks.node.schema)
        sinks = [
            Node(Write(around_clicks(clicks_out)), clicks.node.schema, (clicks.node,)),
            Node(Write(views_out), views.node.schema, (views.node,)),
        ]
        config = job_config(
            {
                "checkpointLocation": str(self._directory / "checkpoints"),
                "checkpointInterval": interval,
                "restartDelay": "100 ms",
                "restartAttempts": "10",
                "parallelism": "2",
                "checkpointMode": mode,
                "stateBackend": backend,
            }
        )
        self.query = launch.start(self._spark, "page-views", sinks, config)

        def listen(event: Event) -> None:
            for saboteur in saboteurs:
                saboteur(event)
            with self._changed:
                self.events.append(event)
                self._changed.notify_all()

        self.query.add_listener(listen)

    def kill(self, slot: int) -> None:
        os.kill(self.query.slot_pids[slot], signal.SIGKILL)

    def finish(self) -> None:
        """Wait for the end and compare everything with the truth."""
        true_views, last = self.views_at_the_end()
        assert last["count_max"].equals(true_views["count_all"])
        assert last["app_id"].equals(true_views["app_id"])

    def views_at_the_end(self) -> tuple[pa.Table, pa.Table]:
        """The true counts and those that came out; the clicks themselves are compared here."""
        assert self.query.awaitTermination(WAIT_SECONDS_MAX), [str(e) for e in self.events]
        source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=100)
        truth = pa.Table.from_batches(
            [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
        ).sort_by("id")
        assert pq.read_table(self._directory / "clicks").sort_by("id").equals(truth)
        true_views = truth.group_by("app_id").aggregate([([], "count_all")]).sort_by("app_id")
        views = pq.read_table(self._directory / "views").group_by("app_id")
        return true_views, views.aggregate([("count", "max")]).sort_by("app_id")

    def restored_from(self) -> list[int | None]:
        """Per attempt after the first, the checkpoint it started from."""
        started = [event for event in self.events if isinstance(event, AttemptStarted)]
        return [event.restored_from for event in started if event.attempt > 1]


@pytest.fixture
def page_views(spark: SparkSession, tmp_path: Path) -> PageViews:
    return PageViews(spark, tmp_path)


class Once:
    """Kills a slot the first time an event of this kind, in this attempt, comes."""

    def __init__(self, job: PageViews, kind: type, attempt: int, slot: int) -> None:
        self.job, self.kind, self.attempt, self.slot = job, kind, attempt, slot
        self.done = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, self.kind) and getattr(event, "attempt", 0) == self.attempt:
            if not self.done:
                self.job.kill(self.slot)
            self.done = True


@pytest.mark.parametrize("backend", ["fs", "memory", "rocksdb"])
def test_a_kill_during_processing_recovers_from_a_checkpoint_and_not_from_zero(
    page_views: PageViews, tmp_path: Path, backend: str
) -> None:
    read_before: dict[int, int] = {}

    def look(event: Event) -> None:
        if isinstance(event, CheckpointCompleted):
            manifest = _manifest_of(tmp_path / "checkpoints" / "page-views", event)
            read_before[event.checkpoint_id] = sum(
                item["position"]["next"] for each in manifest.snapshots for item in each.items
            )

    kill = Once(page_views, CheckpointCompleted, attempt=1, slot=1)
    page_views.start(look, kill, backend=backend)
    page_views.finish()

    (restored_from,) = page_views.restored_from()
    assert restored_from is not None
    first = next(e for e in page_views.events if isinstance(e, CheckpointCompleted))
    assert restored_from >= first.checkpoint_id
    # How far the first attempt had come when it was killed is not known: at most to the end.
    assert read_before[restored_from] > 0
    assert page_views.query.summary.records_in <= 2 * RECORDS - read_before[restored_from]


def test_a_kill_during_the_asynchronous_part_leaves_that_checkpoint_incomplete(
    page_views: PageViews, tmp_path: Path
) -> None:
    prepare, reached = Gate(str(tmp_path / "prepare")), Gate(str(tmp_path / "reached"))
    page_views.start(around_clicks=lambda sink: GatedSink(sink, prepare=prepare, reached=reached))
    _until(lambda: reached.is_open)
    page_views.kill(slot=0)
    _until(lambda: any(isinstance(event, AttemptFailed) for event in page_views.events))
    prepare.open()
    page_views.finish()

    assert page_views.restored_from() == [None]


def test_a_kill_in_the_first_epoch_starts_again_from_the_beginning(page_views: PageViews) -> None:
    page_views.start(Once(page_views, SlotsRunning, attempt=1, slot=0))
    page_views.finish()

    assert page_views.restored_from() == [None]


def test_a_kill_during_recovery_is_recovered_from(page_views: PageViews) -> None:
    first = Once(page_views, CheckpointCompleted, attempt=1, slot=0)
    second = Once(page_views, SlotsRunning, attempt=2, slot=1)
    page_views.start(first, second)
    page_views.finish()

    restored_from = page_views.restored_from()
    assert len(restored_from) == 2
    assert None not in restored_from


def test_two_kills_in_quick_succession_count_as_one_failure(page_views: PageViews) -> None:
    first = Once(page_views, CheckpointCompleted, attempt=1, slot=0)
    second = Once(page_views, CheckpointCompleted, attempt=1, slot=1)
    page_views.start(first, second)
    page_views.finish()

    assert len(page_views.restored_from()) == 1


def test_at_least_once_counts_exactly_those_records_twice_that_are_in_the_checkpoint_and_replayed(
    page_views: PageViews, tmp_path: Path
) -> None:
    doubled: dict[int, Counter[str]] = {}

    def look(event: Event) -> None:
        if isinstance(event, CheckpointCompleted) and event.attempt == 1:
            is_first = not any(doubled.values())
            doubled[event.checkpoint_id] = _counted_ahead(tmp_path / "checkpoints", event)
            if is_first and doubled[event.checkpoint_id]:
                page_views.kill(slot=1)

    page_views.start(look, mode="at-least-once", interval="200 ms")
    true_views, last = page_views.views_at_the_end()

    (restored_from,) = page_views.restored_from()
    assert restored_from is not None
    assert doubled[restored_from]
    assert page_views.query.guarantee().word == "at-least-once"
    truth = Counter(dict(zip(*(c.to_pylist() for c in true_views.columns), strict=True)))
    counted = Counter(dict(zip(*(c.to_pylist() for c in last.columns), strict=True)))
    assert counted == truth + doubled[restored_from]


def _manifest_of(place: Path, event: CheckpointCompleted) -> Manifest:
    path = metadata_path(event.checkpoint_id, event.attempt)
    return decode_manifest((place / path).read_bytes(), path)


def _counted_ahead(checkpoints: Path, event: CheckpointCompleted) -> Counter[str]:
    """Of each app, how many records the state has counted that its sources read again."""
    place = checkpoints / "page-views"
    manifest = _manifest_of(place, event)
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=100)
    counted, read = Counter[str](), Counter[str]()
    store = open_store(str(place))
    for snapshot in manifest.snapshots:
        for item in snapshot.items:
            partition, stop = int(item["id"].rsplit("-", 1)[-1]), item["position"]["next"]
            read.update(clicks_table(source, partition, 0, stop).column("app_id").to_pylist())
        for keyed in snapshot.keyed:
            part = StatePart(snapshot.uid, snapshot.subtask, keyed.name, keyed)
            for _, batch in batches_of(store, part, manifest.max_parallelism):
                counted.update(dict(zip(*(c.to_pylist() for c in batch.columns), strict=True)))
    assert not read - counted, "nothing that was read before the barrier is missing"
    return counted - read


def test_counts_grow_strictly_from_commit_to_commit(page_views: PageViews, tmp_path: Path) -> None:
    page_views.start(Once(page_views, CheckpointCompleted, attempt=1, slot=1))
    page_views.finish()

    # The names of published files sort by the checkpoint, and rows within one keep their order.
    files = sorted((tmp_path / "views").glob("part-*"))
    views = pa.concat_tables([pq.read_table(file) for file in files])
    for app in pc.unique(views["app_id"]).to_pylist():
        counts = views.filter(pc.equal(views["app_id"], app))["count"].to_pylist()
        assert counts == sorted(set(counts)), app


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
