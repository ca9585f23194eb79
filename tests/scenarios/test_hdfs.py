"""Checkpoints on HDFS, with slots that are killed, and the cluster itself."""

import json
import os
from collections import Counter
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.cli.main import main
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.coordinator.history import (
    AttemptFailed,
    CheckpointCompleted,
    CheckpointFailed,
    SlotsRunning,
)
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.storage.places import place_of

pytestmark = pytest.mark.hdfs


def test_slots_killed_while_their_checkpoints_go_to_hdfs_lose_and_double_nothing(
    page_views, hdfs, hdfs_root, capsys
):
    page_views.location = f"{hdfs_root}/jobs"
    source = ClickSource(records=20_000, records_per_second=10_000)
    running = page_views.start(page_views.plan(source))
    for attempt in (1, 2):
        running.wait(SlotsRunning, attempt=attempt)
        running.wait(CheckpointCompleted, attempt=attempt)
        running.kill_any(Random(attempt))
    running.finish()

    page_views.check_exactly_once(source)
    assert [each.attempt for each in running.attempts()] == [1, 2, 3]
    assert all(each.restored_from for each in running.attempts()[1:])
    kept = hdfs.names_below("/" + hdfs_root.rpartition("/")[2])
    assert any(name.endswith("/_metadata") for name in kept), kept
    assert not any("/.tmp-" in name for name in kept), kept
    assert main(["inspect", "--json", page_views.location]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    last = [each for each in running.told if isinstance(each, CheckpointCompleted)][-1]
    assert job["checkpoints"][-1]["checkpoint"] == last.checkpoint_id


if os.environ.get("STILLFRAME_SOAK"):

    def test_a_cluster_that_is_killed_and_returns_loses_nothing_and_the_job_goes_on(
        page_views, hdfs, hdfs_root, until
    ):
        gate = page_views.gate("second-half")
        source = page_views.halves(gate)
        page_views.location = hdfs_root
        patient = {"restartAttempts": "1000", "tolerableFailedCheckpoints": "1000"}
        running = page_views.start(page_views.plan(source), **patient)
        running.next_checkpoint()
        hdfs.kill()
        failures = AttemptFailed | CheckpointFailed
        until(lambda: any(isinstance(each, failures) for each in running.told))
        hdfs.start()
        gate.open()
        running.finish()

        page_views.check_exactly_once(source)


def test_files_are_written_to_hdfs_and_read_from_there_once_each_though_slots_are_killed(
    page_views, hdfs_root
):
    """The one job writes what the other reads."""
    page_views.location = f"{hdfs_root}/jobs"
    clicks = ClickSource(records=20_000, records_per_second=10_000)
    for name, source in (
        ("first", clicks),
        ("second", ParquetSource((f"{hdfs_root}/first",), clicks.schema)),
    ):
        read = Node(Read(source), clicks.schema, given_uid="read")
        sink = FileSink(f"{hdfs_root}/{name}", "parquet", clicks.schema)
        write = Node(Write(sink), clicks.schema, (read,), given_uid="write")
        running = page_views.start(build_plan(name, [write], 2), available_now=name == "second")
        if name == "first":
            running.wait(CheckpointCompleted)
            running.kill(slot=1)
        running.finish()

    place = place_of(hdfs_root)
    shown = list(place.walk(f"{hdfs_root}/second", lambda part: part.startswith(("_", "."))))
    ids = Counter()
    for each in shown:
        with place.open(each.path) as file:
            ids.update(pq.read_table(pa.PythonFile(file, mode="r"))["id"].to_pylist())
    assert ids == Counter(range(20_000))
