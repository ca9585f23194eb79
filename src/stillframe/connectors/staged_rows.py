"""Rows as a stream of Arrow, on their way into a staged file."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa


class RowStreams:
    """Used by one thread. On a disk, to compress costs more processor time than to write; so does
    memory that nobody has touched before, which is why one piece of it is used again and again."""

    def __init__(self, *, is_compressed: bool) -> None:
        self._is_compressed = is_compressed
        self._memory = pa.allocate_buffer(0)

    def encoded(self, batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
        """It holds these bytes until the next call."""
        if self._is_compressed:
            grown = pa.BufferOutputStream()
            _write(grown, batches, pa.ipc.IpcWriteOptions(compression="lz4"))
            return grown.getvalue()
        measured = pa.MockOutputStream()
        _write(measured, batches)
        length_bytes = measured.size()
        if self._memory.size < length_bytes:
            self._memory = pa.allocate_buffer(length_bytes)
        _write(pa.FixedSizeBufferWriter(self._memory), batches)
        return self._memory.slice(0, length_bytes)


def _write(
    sink: pa.NativeFile,
    batches: Sequence[pa.RecordBatch],
    options: pa.ipc.IpcWriteOptions | None = None,
) -> None:
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)
