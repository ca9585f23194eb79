"""The operator that joins with the newest row of another stream."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from stillframe.graph.logical import Enrich
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import key_group_range
from stillframe.runtime.enriching import Enriching, newest_rows
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import open_store

ORDER = pa.schema([("n", pa.int64()), ("currency", pa.string())])
RATE = pa.schema([pa.field("of", pa.string(), nullable=False), ("rate", pa.float64())])
BOTH = pa.schema([*ORDER, *(field.with_nullable(True) for field in RATE)])
GROUPS = 8


def orders(*rows: tuple[int, str | None]) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([r[0] for r in rows]), pa.array([r[1] for r in rows], pa.string())], schema=ORDER
    )


def rates(**rates: float) -> pa.RecordBatch:
    columns = [pa.array(list(rates), pa.string()), pa.array(list(rates.values()), pa.float64())]
    return pa.record_batch(columns, schema=RATE)


def enriching(
    home: Path, how: Literal["inner", "left"] = "left", rows: tuple[pa.RecordBatch, ...] = ()
) -> Enriching:
    operator = Enrich(how, ("currency",), ("of",), None)
    newest = newest_rows(operator, ORDER, BOTH, GROUPS, rows)
    place = (OperatorUid("rates"), SubtaskIndex(0), Attempt(1))
    return Enriching(*place, operator, newest, BOTH, open_store(str(home)))


def joined(operator: Enriching, *rows: tuple[int, str | None]) -> list[tuple[int, float | None]]:
    (batch,) = operator.process(orders(*rows))
    assert batch.schema == BOTH
    return list(zip(batch.column("n").to_pylist(), batch.column("rate").to_pylist(), strict=True))


@pytest.mark.parametrize("how", ["inner", "left"])
def test_each_record_comes_out_at_once_beside_what_is_known_then(
    tmp_path: Path, how: Literal["inner", "left"]
) -> None:
    operator = enriching(tmp_path, how)
    alone: list[tuple[int, float | None]] = [(1, None)] if how == "left" else []
    assert joined(operator, (1, "eur")) == alone
    assert list(operator.process_second(rates(eur=1.0, usd=1.1))) == []
    assert joined(operator, (1, "chf"), (2, "usd"), (3, "eur")) == [*alone, (2, 1.1), (3, 1.0)]
    list(operator.process_second(rates(usd=1.2)))
    assert joined(operator, (4, "usd")) == [(4, 1.2)]


def test_columns_that_come_in_encoded_go_out_plain(tmp_path: Path) -> None:
    operator = enriching(tmp_path)
    encoded = rates(eur=1.0).column("of").dictionary_encode()
    list(operator.process_second(pa.record_batch([encoded, pa.array([1.0])], names=RATE.names)))
    batch = orders((1, "eur"))
    encoded_order = batch.set_column(1, "currency", batch.column("currency").dictionary_encode())
    (made,) = operator.process(encoded_order)
    assert made.schema == BOTH
    assert made.column("rate").to_pylist() == [1.0]


def test_the_newest_rows_are_in_the_snapshot(tmp_path: Path) -> None:
    operator = enriching(tmp_path)
    list(operator.process_second(rates(eur=1.0, usd=1.1)))
    list(operator.process_second(rates(usd=1.2)))
    taken = operator.described(CheckpointId(1), operator.snapshot(CheckpointId(1))())
    (keyed,) = taken.keyed
    data = open_store(str(tmp_path)).read_verified(
        keyed.file.path, keyed.file.length_bytes, keyed.file.crc32
    )
    rows = tuple(read_keyed_snapshot(data, keyed.key_groups, key_group_range(0, 1, GROUPS)))
    assert keyed.rows == 2
    assert joined(enriching(tmp_path, rows=rows), (1, "usd"), (2, "eur")) == [(1, 1.2), (2, 1.0)]
