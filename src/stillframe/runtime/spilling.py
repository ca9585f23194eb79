"""A queue that may grow without end: what does not fit into memory waits on local disk.

Only what comes back in a cycle needs it: everywhere else a full queue stops its sender. A spilled
batch is written to a file that has no name any more when it is read, so that it goes with the
process whatever ends it, and is mapped into memory: whoever takes it notices nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import pyarrow as pa

from stillframe.runtime.channels import InputChannel, QueuedInput
from stillframe.runtime.elements import Element

MEMORY_BYTES_MAX = 32 * 1024 * 1024


class FeedbackInput(QueuedInput):
    """The receiving end of a channel that closes a cycle: its sender never has to wait for long."""

    def __init__(self, channel: InputChannel, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        super().__init__()
        self._channel = channel
        self._memory_bytes_max = memory_bytes_max

    def take_all(self) -> bool:
        """Take whatever has come; whether there was anything."""
        if self._channel.is_empty():
            return False
        while not self._channel.is_empty():
            element = self._channel.take()
            self._put(element, element.nbytes if isinstance(element, pa.RecordBatch) else 0)
            if self._buffered_bytes > self._memory_bytes_max:
                self._spill()
        return True

    def _spill(self) -> None:
        """Move the newest batches, which are taken last, to disk until half the memory is free."""
        kept: list[tuple[Element, int]] = []
        wanted_bytes = self._buffered_bytes - self._memory_bytes_max // 2
        run: list[pa.RecordBatch] = []
        while self._elements and wanted_bytes > 0:
            element, memory_bytes = self._elements.pop()
            if memory_bytes:
                run.append(element)
                wanted_bytes -= memory_bytes
                self._buffered_bytes -= memory_bytes
            else:  # a marker, or on disk already
                kept += [(batch, 0) for batch in reversed(on_disk(run[::-1]))]
                run = []
                kept.append((element, 0))
        kept += [(batch, 0) for batch in reversed(on_disk(run[::-1]))]
        self._elements.extend(reversed(kept))


def on_disk(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The same batches, mapped from a file that goes when they are no longer used."""
    if not batches:
        return []
    with tempfile.TemporaryFile(dir=_directory()) as file:
        with pa.ipc.new_stream(file, batches[0].schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pa.ipc.open_stream(pa.py_buffer(mapped)) as stream:
        return list(stream)


def _directory() -> str | None:
    """Where Spark keeps its own working files, if it says so."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None
