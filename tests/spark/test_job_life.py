"""A job's life on Spark: it fails, is stopped with a savepoint that is moved, goes on elsewhere."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.kept_history import read_history
from stillframe.errors import StartRefused
from stillframe.processes import await_ended
from stillframe.storage.store import open_store
from stillframe.testing.sources import Gate

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECORDS, PARTITIONS, APPS = 120_000, 4, 300


def start(still: Still, home: Path, place: str, **options: object) -> Query:
    """The job in a place of its own; what it writes is the same for all."""
    clicks = (
        still.readStream.format("clicks")
        .options(records=RECORDS, recordsPerSecond=30_000, partitions=PARTITIONS, apps=APPS)
        .load()
    )
    writer = clicks.groupBy("app_id").count().writeStream.outputMode("update").queryName("life")
    writer = writer.format("parquet").option("path", str(home / place / "out"))
    writer = writer.option("checkpointLocation", str(home / place / "checkpoints"))
    writer = writer.options(checkpointInterval="200 ms", restartDelay="100 ms", parallelism=2)
    return writer.options(**options).start()


def test_a_job_goes_on_from_a_savepoint_that_was_moved_and_its_past_is_remembered(
    still: Still, tmp_path: Path
) -> None:
    first = start(still, tmp_path, "first")
    first.checkpoint(timeout=60)
    os.kill(first.slot_pids[1], signal.SIGKILL)
    first.checkpoint(timeout=60)
    first.stop(savepoint=str(tmp_path / "savepoint"))
    moved = tmp_path / "moved" / "savepoint"
    moved.parent.mkdir()
    (tmp_path / "savepoint").rename(moved)

    second = start(
        still, tmp_path, "second", restoreFrom=str(moved), restoreMode="claim", parallelism=3
    )
    assert second.awaitTermination(120)

    check_counts([tmp_path / "first" / "out", tmp_path / "second" / "out"])
    assert second.summary.records_in < RECORDS, "what the savepoint holds was not read again"
    assert not moved.exists(), "it was claimed, and is not needed any more"
    [failure] = first.failures
    assert failure.recovered_from is not None
    kept = read_history(open_store(str(tmp_path / "first" / "checkpoints" / "life")))
    assert [each.reason for each in kept.failures] == [failure.reason]
    newest = kept.statistics().history[0].to_json()
    assert newest["status"] == "COMPLETED"
    assert newest["num_acknowledged_subtasks"] == newest["num_subtasks"] == 4


def test_a_job_of_joins_and_deduplication_goes_on_with_its_state(
    still: Still, tmp_path: Path
) -> None:
    def begin() -> Query:
        clicks = (
            still.readStream.format("clicks")
            .options(records=20_000, recordsPerSecond=8_000, partitions=2, apps=50, batchRows=200)
            .load()
        )
        apps = clicks.select("app_id", "user_id").dropDuplicates(["app_id"])
        first = apps.withColumnRenamed("user_id", "first_user").withColumnRenamed("app_id", "app")
        joined = clicks.join(first, clicks["app_id"] == first["app"]).select("id", "first_user")
        writer = joined.writeStream.queryName("joined").format("parquet")
        writer = writer.option("path", str(tmp_path / "out"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoints"))
        return writer.options(checkpointInterval="200 ms", parallelism=2).start()

    query = begin()
    query.checkpoint(timeout=60)
    query.stop()
    query = begin()
    assert query.awaitTermination(120)

    ids = pq.read_table(tmp_path / "out")["id"].to_pylist()
    assert sorted(ids) == list(range(20_000))


def test_a_cancelled_job_begins_anew_only_if_it_is_told_to(still: Still, tmp_path: Path) -> None:
    cancelled = start(still, tmp_path, "one")
    cancelled.checkpoint(timeout=60)
    cancelled.cancel()

    again = start(still, tmp_path, "one")
    with pytest.raises(Exception, match="was cancelled and its checkpoints deleted"):
        again.awaitTermination(60)
    anew = start(still, tmp_path, "one", fresh=True)
    anew.checkpoint(timeout=60)
    assert anew.summary.records_in > 0
    anew.cancel()


def test_a_guarantee_that_cannot_be_given_is_refused_before_anything_runs(
    still: Still, tmp_path: Path
) -> None:
    lines = still.readStream.format("socket").option("host", "localhost").option("port", 9).load()
    writer = lines.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoints"))
    writer = writer.options(checkpointInterval="1 s", requireGuarantee="exactly-once")

    with pytest.raises(StartRefused, match="socket"):
        writer.start()
    assert not (tmp_path / "checkpoints").exists()


def check_counts(outputs: list[Path]) -> None:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    each = RECORDS // PARTITIONS
    clicks = pa.Table.from_batches([clicks_table(source, p, 0, each) for p in range(PARTITIONS)])
    expected = clicks.group_by("app_id").aggregate([([], "count_all")]).sort_by("app_id")
    written = pa.concat_tables([pq.read_table(output) for output in outputs])
    newest = written.group_by("app_id").aggregate([("count", "max")]).sort_by("app_id")
    assert newest["count_max"].equals(expected["count_all"])
    # Each count was told once: a record that counted twice would make one that is not there.
    assert written.group_by(["app_id", "count"]).aggregate([([], "count_all")])[
        "count_all"
    ].to_pylist() == [1] * len(written)


def await_slots(query: Query) -> tuple[int, ...]:
    """The processes of the job's slots, once all of them run: one may be at work before another."""
    deadline = time.monotonic() + 60
    while not (pids := query.slot_pids):
        assert time.monotonic() < deadline, "not all slots run after a minute"
        threading.Event().wait(0.05)
    return pids


@pytest.mark.parametrize("holds_the_lock", [False, True])
def test_a_job_whose_function_hangs_stops_soon_and_spark_keeps_no_worker_of_it(
    still: Still, tmp_path: Path, holds_the_lock: bool
) -> None:
    """If it holds the interpreter's lock no thread of its worker runs: Spark has to end it."""
    pids_known, reached = Gate(str(tmp_path / "pids known")), Gate(str(tmp_path / "reached"))

    def hang(row: Any) -> Any:
        if row.id == 50:
            pids_known.await_open()
            reached.open()
            if holds_the_lock:
                re.match(r"(a+)+$", "a" * 60 + "b")
            time.sleep(1_000)
        return row

    clicks = still.readStream.format("clicks").options(records=10_000, partitions=2).load()
    writer = clicks.select("id").map_rows(hang, "id long").writeStream.format("parquet")
    writer = writer.option("path", str(tmp_path / "out")).queryName("hangs")
    writer = writer.options(checkpointLocation=str(tmp_path / "checkpoints"), parallelism=2)
    query = writer.option("checkpointInterval", "1 s").start()
    pids = await_slots(query)
    pids_known.open()
    reached.await_open()

    began = time.monotonic()
    query.stop()

    assert time.monotonic() - began < 25, "and not 30 s, and then some"
    assert await_ended(pids, 15) == []
