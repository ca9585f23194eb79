"""The rows of one side of a join: how many chunks there are, and that what is over goes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from stillframe.key_groups import Flags
from stillframe.state import joins
from stillframe.state.joins import JoinRows, SortedRows, TimeRange

SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us"))])
ANY = TimeRange(None, None)


def rows_of(keys: np.ndarray, times: np.ndarray) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(keys), pa.array(times).view(pa.timestamp("us"))], schema=SCHEMA
    )


def sorted_rows(kept: JoinRows, keys: np.ndarray, times: np.ndarray) -> SortedRows:
    batch = rows_of(keys, times)
    hashes, _, moments = kept.keyed(batch)
    return SortedRows.of(batch, hashes, moments)


def unmatched(rows: SortedRows) -> Flags:
    return np.zeros(len(rows), dtype=np.bool_)


def add(kept: JoinRows, keys: np.ndarray, times: np.ndarray) -> None:
    rows = sorted_rows(kept, keys, times)
    kept.add(rows, unmatched(rows))


def test_chunks_stay_few_however_many_batches_come() -> None:
    kept = JoinRows(SCHEMA, ["k"], "t", 8)
    for batch in range(1_000):
        keys = np.arange(batch * 100, batch * 100 + 100)
        add(kept, keys, keys)
    assert len(kept) == 100_000
    assert kept.chunk_count < 40


def test_state_is_flat_over_a_long_run() -> None:
    kept = JoinRows(SCHEMA, ["k"], "t", 8)
    sizes, chunks = [], []
    for batch in range(3_000):
        keys = np.arange(batch * 100, batch * 100 + 100)
        add(kept, keys, keys)
        assert not list(kept.expire(batch * 100 - 20_000, emits_unmatched=False))
        sizes.append(kept.state_bytes)
        chunks.append(kept.chunk_count)
    assert max(sizes[500:]) < 1.1 * max(sizes[500:1_000])
    assert len(kept) < 2 * 20_000
    assert max(chunks) < 40


def test_rows_from_a_far_future_do_not_keep_those_that_came_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does every one of them stay a chunk of its own."""
    monkeypatch.setattr(joins, "_LITTLE_ROWS", 400)
    kept = JoinRows(SCHEMA, ["k"], "t", 8)
    for batch in range(2_000):
        keys = np.arange(batch * 100, batch * 100 + 100)
        times = keys.copy()
        times[50] = 10**9
        add(kept, keys, times)
        list(kept.expire(batch * 100 - 1_000, emits_unmatched=False))
    assert len(kept) < 2_000 + 2 * (1_000 + 200) + joins._LITTLE_ROWS
    assert kept.chunk_count <= joins._CHUNKS_MAX + 1


@pytest.mark.parametrize("rows", [10, 300, 5_000])
def test_every_row_is_found_however_they_were_merged(rows: int) -> None:
    random = np.random.default_rng(rows)
    kept = JoinRows(SCHEMA, ["k"], "t", 8)
    all_keys = random.integers(0, rows // 2, rows)
    for keys in np.array_split(all_keys, 10):
        add(kept, keys, np.arange(len(keys)))
    probe = sorted_rows(kept, np.arange(rows), np.arange(rows))
    met = 0
    for pairs in kept.pairs(probe, kept.key_places, ANY):
        mine = probe.batch.column("k").take(pa.array(pairs.places))
        assert mine == pairs.others.column("k")
        met += len(mine)
    assert met == rows


def test_a_hash_beyond_all_others_is_not_found_where_there_is_none() -> None:
    batch = rows_of(np.arange(3), np.arange(3))
    rows = SortedRows(batch, np.array([1, 5, 2**63], dtype=np.uint64), None)
    sought = np.array([0, 1, 4, 5, 2**63, 2**63 + 1, 2**64 - 1], dtype=np.uint64)
    _, met = rows.find(sought)
    assert met.tolist() == [False, True, False, True, True, False, False]


def test_pairs_come_a_limited_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "PAIRS_MAX", 1_000)
    kept = JoinRows(SCHEMA, ["k"], "t", 8)
    add(kept, np.zeros(100, np.int64), np.arange(100))
    probe = sorted_rows(kept, np.zeros(100, np.int64), np.arange(100))
    sizes = [len(pairs.places) for pairs in kept.pairs(probe, kept.key_places, ANY)]
    assert sum(sizes) == 10_000
    assert max(sizes) <= 1_100


def test_a_hot_key_is_searched_by_time_and_not_pair_by_pair() -> None:
    kept = JoinRows(SCHEMA, ["k"], "t", 8)
    add(kept, np.zeros(50_000, np.int64), np.arange(50_000))
    probe = sorted_rows(kept, np.zeros(5_000, np.int64), np.arange(5_000) * 10)
    made = list(kept.pairs(probe, kept.key_places, TimeRange(-1, 1)))
    assert sum(len(pairs.places) for pairs in made) == 3 * 5_000 - 1
