"""Where state is kept and where its snapshots go, on real processes: what comes out is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCompleted,
    CheckpointFailed,
)
from stillframe.protocol.manifests import Manifest, decode_manifest
from stillframe.runtime.disk import rows_of_databases
from stillframe.runtime.restoring import read_file
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.local import LocalStore
from stillframe.storage.paths import checkpoint_of

BACKENDS = ["memory", "fs", "rocksdb"]


def job_directory(page_views: Any) -> Path:
    return Path(page_views.location) / "page-views"


def newest(page_views: Any) -> Manifest:
    files = job_directory(page_views).glob("chk-*/_metadata")
    last = max(files, key=lambda file: checkpoint_of(file.parent.name) or (0, 0))
    return decode_manifest(last.read_bytes())  # older ones may be going


def state_files(page_views: Any) -> list[Path]:
    return list(job_directory(page_views).glob("shared/*/*"))


def counted(page_views: Any, backend: str) -> dict[str, int]:
    """The counts in the newest checkpoint, from where this backend keeps them."""
    store = LocalStore(job_directory(page_views))
    batches: list[pa.RecordBatch] = []
    for snapshot in newest(page_views).snapshots_of("count"):
        assert (snapshot.disk is not None) == (backend == "rocksdb")
        if snapshot.disk is not None:
            rows = rows_of_databases(store, [snapshot.disk], range(128))
            batches += [batch for _, batch in rows]
        for state in snapshot.keyed:
            assert state.file.is_inline == (backend == "memory")
            data = read_file(store, state.file)
            batches += read_keyed_snapshot(data, state.key_groups, range(128))
    table = pa.Table.from_batches(batches)
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


@pytest.mark.parametrize("mode", [{}, {"unalignedCheckpoints": "true"}], ids=["aligned", "not"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_killed_while_records_flow_loses_and_doubles_nothing(page_views, backend, mode):
    source = ClickSource(records=30_000, records_per_second=15_000)

    running = page_views.start(page_views.plan(source), stateBackend=backend, **mode)
    running.wait(CheckpointCompleted)
    running.kill(slot=1)
    running.finish()

    page_views.check_exactly_once(source)
    assert [each.attempt for each in running.attempts()] == [1, 2]
    assert running.attempts()[1].restored_from is not None
    assert bool(state_files(page_views)) == (backend != "memory")


@pytest.mark.parametrize("first", BACKENDS)
@pytest.mark.parametrize("second", BACKENDS)
def test_what_one_backend_has_kept_another_takes_over_at_any_parallelism(page_views, first, second):
    between, gate = page_views.gate("between"), page_views.gate("last")
    source = page_views.three_parts(between, gate, splits=3)

    def start(parallelism: int, backend: str) -> Any:
        plan = page_views.plan(source, parallelism)
        return page_views.start(plan, stateBackend=backend, checkpointInterval="1 hour")

    running = start(3, first)
    running.wait_for_records(1_500)
    running.query.checkpoint(timeout=60)
    running.query.stop()
    assert sum(counted(page_views, first).values()) == 1_500

    running = start(1, second)
    between.open()
    running.wait_for_records(1_500)
    running.query.checkpoint(timeout=60)
    running.query.stop()
    assert sum(counted(page_views, second).values()) == 3_000

    running = start(2, first)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert running.query.summary.records_in == 3_000, "only the last part was read"
    assert counted(page_views, first) == counts_of(source)


def counts_of(source: Any) -> dict[str, int]:
    batches = [item for script in source.scripts for item in script if hasattr(item, "num_rows")]
    counts = pa.Table.from_batches(batches).group_by("app_id").aggregate([([], "count_all")])
    return dict(zip(*(counts[name].to_pylist() for name in counts.column_names), strict=True))


def test_an_idle_job_keeps_its_state_in_every_checkpoint(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(
        page_views.plan(source),
        stateBackend="memory",
        checkpointInterval="1 hour",
        checkpointsRetained="1",
    )
    running.wait_for_records(2_000)
    running.query.checkpoint(timeout=60)
    running.query.checkpoint(timeout=60)
    last = running.query.checkpoint(timeout=60)

    assert sum(counted(page_views, "memory").values()) == 2_000
    assert newest(page_views).checkpoint_id == last
    timings = newest(page_views).timings
    written = sum(each.bytes_written for each in timings)
    assert written == sum(each.state_bytes for each in timings) == newest(page_views).state_bytes()

    running.kill(0)
    running.wait(AttemptStarted, attempt=2)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert running.attempts()[1].restored_from == last


def test_a_state_that_is_too_long_fails_its_checkpoints_and_not_the_job(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(
        page_views.plan(source),
        stateBackend="memory",
        memoryStateMax="1k",
        tolerableFailedCheckpoints="infinite",
    )
    failed = running.wait(CheckpointFailed)
    gate.open()
    running.wait_for_records(4_000)
    running.wait(CheckpointFailed, number=3)
    running.query.stop()

    assert "state 'aggregates' of operator 'count' in subtask " in failed.reason
    assert "more than the 1024 that stateBackend=memory keeps in an acknow" in failed.reason
    assert (
        "set stateBackend=fs or stateBackend=rocksdb, or a larger memoryStateMax" in failed.reason
    )
    assert [each.attempt for each in running.attempts()] == [1]
    assert not state_files(page_views)


def test_too_many_checkpoints_that_failed_for_it_end_the_attempt_with_the_reason(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(
        page_views.plan(source),
        stateBackend="memory",
        memoryStateMax="1k",
        tolerableFailedCheckpoints="0",
    )

    failed = running.wait(AttemptFailed)

    assert "state 'aggregates' of operator 'count' in subtask " in failed.reason
    running.query.stop()
