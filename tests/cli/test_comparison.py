"""The demo's proof must be able to fail: it is shown outputs that are wrong in every way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import stillframe
from stillframe.api.aggregates import AggregateCall
from stillframe.cli.comparison import (
    Comparison,
    compare,
    compare_clicks,
    compare_counts,
    read_counts,
    read_state,
)
from stillframe.clock import SystemClock
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.joblog import attempt_started, checkpoint_completed
from stillframe.protocol.manifests import (
    FileHandle,
    KeyedState,
    Manifest,
    OperatorSnapshot,
)
from stillframe.state.aggregates import AggregateTable
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.store import open_store

JOB = "page-views"
SOURCE = ClickSource(records=1_003, partitions=4, apps=20, seed=5)
UID = OperatorUid("count")


def clicks() -> pa.Table:
    rows = [-((p - 1_003) // 4) for p in range(4)]
    return pa.Table.from_batches([clicks_table(SOURCE, p, 0, rows[p]) for p in range(4)])


def true_counts() -> dict[str, int]:
    counted = pc.value_counts(clicks()["app_id"]).to_pylist()
    return {pair["values"]: pair["counts"] for pair in counted}


def write_clicks(output: Path, table: pa.Table) -> None:
    (output / "clicks").mkdir(parents=True)
    pq.write_table(table.slice(0, 500), output / "clicks" / "part-a.parquet")
    pq.write_table(table.slice(500), output / "clicks" / "part-b.parquet")


def write_counts(output: Path, checkpoint: int, counts: list[tuple[str, int]]) -> None:
    (output / "counts").mkdir(exist_ok=True, parents=True)
    apps, values = zip(*counts, strict=True)
    name = f"part-page-views-write-0a1b-{checkpoint}-0-1-0f0f0f0f-0.parquet"
    table = pa.table({"app_id": list(apps), "count": pa.array(values, pa.int64())})
    pq.write_table(table, output / "counts" / name)


def write_state(output: Path, counts: dict[str, int]) -> None:
    """A checkpoint as a job leaves it, made with the same writers."""
    store = open_store(str(output / "checkpoints")).below(JOB)
    table = AggregateTable(
        pa.schema([("app_id", pa.string())]),
        ["app_id"],
        [AggregateCall("count", None, "count(1)", pa.int64())],
        128,
    )
    apps = [app for app, count in counts.items() for _ in range(count)]
    table.update(pa.record_batch({"app_id": apps}))
    written = write_keyed_snapshot(store, "chk-1-1/count-0-aggregates.arrow", table.freeze())
    state = KeyedState(
        name="aggregates",
        file=FileHandle(written.path, written.length_bytes, written.crc32),
        key_groups=written.key_groups,
        rows=written.rows,
        schema=written.schema_text,
    )
    manifest = Manifest(
        job=JOB,
        attempt=Attempt(1),
        checkpoint_id=CheckpointId(1),
        epoch=Epoch(0),
        kind="checkpoint",
        triggered_at_ms=0,
        completed_at_ms=1,
        max_parallelism=128,
        operators=(),
        snapshots=(OperatorSnapshot(UID, SubtaskIndex(0), keyed=(state,)),),
    )
    log = JobLog(store, JOB, SystemClock())
    record = log.append(attempt_started(log.read(), None))
    completed = Snapshots(store).write_manifest(manifest)
    log.append(checkpoint_completed(record, completed, 2)[0])


@pytest.fixture
def exact(tmp_path: Path) -> Path:
    """What a job leaves that has made no mistake."""
    output = tmp_path / "output"
    write_clicks(output, clicks())
    final = true_counts()
    # Checkpoint 10 comes after 9 only for who reads numbers and not names.
    write_counts(output, 9, [(app, 1) for app, count in final.items() if count > 1])
    write_counts(output, 10, list(final.items()))
    write_state(output, final)
    return output


Compare = Callable[[Path], Comparison]


@pytest.fixture
def compared(spark) -> Compare:
    return lambda output: compare(stillframe.on(spark), SOURCE, output, JOB)


pytestmark = pytest.mark.spark


def replace_clicks(output: Path, table: pa.Table) -> None:
    shutil.rmtree(output / "clicks")
    write_clicks(output, table)


def altered(table: pa.Table, row: int) -> pa.Table:
    users = table["user_id"].to_pylist()
    users[row] += 1
    return table.set_column(2, "user_id", pa.array(users))


def test_an_exact_output_passes(compared, exact):
    found = compared(exact)
    assert found.is_exact, found.differences
    assert (found.records, found.apps) == (1_003, len(true_counts()))
    assert (found.lost, found.duplicated) == (0, 0)


def test_a_click_that_is_missing_is_lost(compared, exact):
    replace_clicks(exact, clicks().slice(1))
    found = compared(exact)
    assert not found.is_exact
    assert (found.lost, found.duplicated) == (1, 0)
    assert "click 0 " in found.differences[0]
    assert "missing" in found.differences[0]


def test_a_click_that_is_there_three_times_is_duplicated_twice(compared, exact):
    table = clicks()
    replace_clicks(exact, pa.concat_tables([table, table.slice(3, 1), table.slice(3, 1)]))
    found = compared(exact)
    assert (found.lost, found.duplicated) == (0, 2)
    assert "too much in the output, 2 times" in found.differences[0]


def test_an_altered_click_is_lost_and_too_much(compared, exact):
    replace_clicks(exact, altered(clicks(), 7))
    found = compared(exact)
    assert (found.lost, found.duplicated) == (1, 1)


def test_one_click_lost_and_another_doubled_do_not_make_up_for_each_other(compared, exact):
    table = clicks()
    replace_clicks(exact, pa.concat_tables([table.slice(1), table.slice(1, 1)]))
    found = compared(exact)
    assert (found.lost, found.duplicated) == (1, 1)


def test_an_output_that_never_came_is_all_lost(spark, tmp_path):
    found = compare_clicks(stillframe.on(spark), SOURCE, tmp_path / "clicks")
    assert (found.lost, found.duplicated) == (1_003, 0)
    assert len(found.examples) == 5


def test_a_last_count_that_is_off_by_one_is_told(compared, exact):
    final = true_counts()
    write_counts(exact, 11, [("app-0001", final["app-0001"] + 1)])
    found = compared(exact)
    assert not found.is_exact
    assert (found.lost, found.duplicated) == (0, 0)
    assert found.differences == (
        f"the last count written for app-0001 is {final['app-0001'] + 1} where Spark counts"
        f" {final['app-0001']}",
    )


@pytest.mark.parametrize("step", [0, -1])
def test_a_count_that_does_not_grow_from_commit_to_commit_is_told(spark, tmp_path, step):
    write_counts(tmp_path, 9, [("app-0001", 5), ("app-0002", 1)])
    write_counts(tmp_path, 10, [("app-0001", 5 + step), ("app-0001", 8)])
    last, shrinking = read_counts(stillframe.on(spark), tmp_path / "counts")
    assert last == {"app-0001": 8, "app-0002": 1}
    assert shrinking == [f"app-0001 is written as {5 + step} in checkpoint 10 after 5"]


def test_a_count_that_does_not_grow_within_a_file_is_told(spark, tmp_path):
    write_counts(tmp_path, 9, [("app-0001", 5), ("app-0002", 1), ("app-0001", 5)])
    _, shrinking = read_counts(stillframe.on(spark), tmp_path / "counts")
    assert shrinking == ["app-0001 is written as 5 in checkpoint 9 after 5"]


def test_a_wrong_count_in_the_last_checkpoint_is_told(compared, exact):
    shutil.rmtree(exact / "checkpoints")
    final = true_counts()
    write_state(exact, {**final, "app-0002": final["app-0002"] + 1})
    found = compared(exact)
    assert [difference for difference in found.differences if "last checkpoint" in difference]
    assert len(found.differences) == 1


def test_a_damaged_checkpoint_is_told_and_not_trusted(compared, exact):
    state = exact / "checkpoints" / JOB / "chk-1-1" / "count-0-aggregates.arrow"
    data = bytearray(state.read_bytes())
    data[200] ^= 1
    state.write_bytes(data)
    found = compared(exact)
    assert not found.is_exact
    assert "chk-1-1/count-0-aggregates.arrow" in found.differences[0]


def test_a_job_without_a_checkpoint_has_no_state_to_read(tmp_path):
    with pytest.raises(StorageError, match="no completed checkpoint"):
        read_state(tmp_path, JOB)


def test_many_differences_of_one_kind_are_told_in_a_few_lines():
    told = compare_counts({f"app-{n:02d}": n for n in range(20)}, {}, "the last count written")
    assert len(told) == 6
    assert told[-1] == "… and 15 more of this kind"
