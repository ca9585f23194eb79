"""Rows as a stream, in memory that is used again."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.connectors.staged_rows import RowStreams


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_stream_holds_its_own_rows_whatever_was_in_its_memory_before(is_compressed):
    streams = RowStreams(is_compressed=is_compressed)
    few, many = ({"n": pa.array(range(rows))} for rows in (3, 10_000))

    for batch in map(pa.record_batch, (few, many, few, many)):
        encoded = streams.encoded([batch, batch])
        alone = RowStreams(is_compressed=is_compressed).encoded([batch, batch])
        assert encoded.equals(alone), "and nothing behind them"
        with pa.ipc.open_stream(encoded) as stream:
            assert stream.read_all() == pa.Table.from_batches([batch, batch])
