"""Keyed snapshots in real files: written by key group, read back by range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import SnapshotDamaged
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.state.aggregates import AggregateTable
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.storage.local import LocalStore

MAX_PARALLELISM = 128
SCHEMA = pa.schema([("app", pa.string()), ("v", pa.int64())])
CALLS = [
    AggregateCall("count", None, "count", pa.int64()),
    AggregateCall("avg", "v", "avg(v)", pa.float64()),
]


def new_table() -> AggregateTable:
    return AggregateTable(SCHEMA, ["app"], CALLS, MAX_PARALLELISM)


def clicks(app_count: int, records: int = 5_000) -> pa.RecordBatch:
    numbers = np.random.default_rng(3).integers(0, app_count, records)
    names = pa.array([f"app-{number}" for number in numbers.tolist()])
    return pa.RecordBatch.from_arrays([names, pa.array(numbers)], schema=SCHEMA)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def rows_of(table: AggregateTable) -> list[dict]:
    rows = [row for _, batch in table.freeze().batches_by_key_group() for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: row["app"])


def test_a_snapshot_read_back_in_ranges_gives_every_key_once(store):
    table = new_table()
    table.update(clicks(700))
    written = write_keyed_snapshot(store, "chk-1/count-0", table.freeze())
    assert written.rows == len(table) > 600
    assert list(written.key_groups) == sorted(set(written.key_groups))
    buffer = store.read_verified(written.path, written.length_bytes, written.crc32)
    restored_rows = []
    for subtask in range(3):
        restored = new_table()
        owned = key_group_range(subtask, 3, MAX_PARALLELISM)
        for batch in read_keyed_snapshot(buffer, written.key_groups, owned):
            groups = key_groups_of(hash_columns([batch.column(0)]), MAX_PARALLELISM)
            assert len(set(groups.tolist())) == 1
            assert groups[0] in owned
            restored.restore(batch)
        restored_rows += rows_of(restored)
    assert sorted(restored_rows, key=lambda row: row["app"]) == rows_of(table)


def test_a_key_group_without_rows_is_absent_from_the_file(store):
    table = new_table()
    table.update(clicks(app_count=1))
    written = write_keyed_snapshot(store, "one", table.freeze())
    assert len(written.key_groups) == 1
    buffer = store.read_verified("one", written.length_bytes, written.crc32)
    group = written.key_groups[0]
    assert list(read_keyed_snapshot(buffer, written.key_groups, range(group))) == []
    (batch,) = read_keyed_snapshot(buffer, written.key_groups, range(group, group + 1))
    assert batch.to_pylist() == [
        {"app": "app-0", "count": 5_000, "avg(v).sum": 0.0, "avg(v).non_null_count": 5_000}
    ]


def test_a_table_without_keys_makes_an_empty_readable_file(store):
    written = write_keyed_snapshot(store, "none", new_table().freeze())
    assert (written.rows, written.key_groups) == (0, ())
    buffer = store.read_verified("none", written.length_bytes, written.crc32)
    assert list(read_keyed_snapshot(buffer, (), range(MAX_PARALLELISM))) == []
    assert written.schema_text == (
        "app string, count int64, avg(v).sum double, avg(v).non_null_count int64"
    )


def test_batches_are_read_without_a_copy(store):
    table = new_table()
    table.update(clicks(50))
    written = write_keyed_snapshot(store, "file", table.freeze())
    buffer = store.read_verified("file", written.length_bytes, written.crc32)
    before = pa.total_allocated_bytes()
    batches = list(read_keyed_snapshot(buffer, written.key_groups, range(MAX_PARALLELISM)))
    values = batches[0].column("count").buffers()[1]
    assert buffer.address <= values.address < buffer.address + buffer.size
    assert pa.total_allocated_bytes() - before < 1_000


def test_any_arrow_reader_can_open_the_file(store, tmp_path):
    table = new_table()
    table.update(clicks(50))
    write_keyed_snapshot(store, "file", table.freeze())
    whole = pa.ipc.open_file(tmp_path / "file").read_all()
    assert sum(whole["count"].to_pylist()) == 5_000


def test_bytes_that_are_no_snapshot_are_reported_as_damaged():
    with pytest.raises(SnapshotDamaged, match="not an Arrow file"):
        list(read_keyed_snapshot(pa.py_buffer(b"nothing of the kind"), (), range(8)))


def test_metadata_that_names_other_key_groups_is_reported_as_damaged(store):
    table = new_table()
    table.update(clicks(50))
    written = write_keyed_snapshot(store, "file", table.freeze())
    buffer = store.read_verified("file", written.length_bytes, written.crc32)
    with pytest.raises(SnapshotDamaged, match="where its metadata names"):
        list(read_keyed_snapshot(buffer, written.key_groups[1:], range(MAX_PARALLELISM)))
