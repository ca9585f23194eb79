"""Records under way as files: what barriers overtook, channel after channel, in one file.

Each run of batches with the same columns is an Arrow stream of its own, found by its offset: the
batches of one channel need not look alike, because some hold partial aggregates.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.errors import SnapshotDamaged
from stillframe.ids import SubtaskIndex
from stillframe.storage.store import Store


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The batches that were under way in one channel, in order."""

    edge: str
    source: SubtaskIndex
    target: SubtaskIndex
    is_input: bool
    """Whether they had reached the receiver; otherwise they were still at the sender."""
    batches: Sequence[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """Where a run of a channel's batches is in the file."""

    channel: Overtaken
    offset_bytes: int
    length_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class WrittenLog:
    """A file with records under way that is durable."""

    path: str
    length_bytes: int
    crc32: int
    runs: tuple[WrittenRun, ...]
    data: bytes | None = field(default=None, repr=False)
    """As the store answered it: the records themselves, if there is no file."""


def write_channel_log(store: Store, path: str, channels: Sequence[Overtaken]) -> WrittenLog:
    """Write what was under way in these channels; runs on a background thread."""
    runs: list[WrittenRun] = []

    def chunks() -> Iterator[bytes]:
        offset_bytes = 0
        for channel in channels:
            # With the metadata, in which partial aggregates say that they are such.
            for _, run in itertools.groupby(channel.batches, lambda batch: str(batch.schema)):
                batches = list(run)
                length_bytes = 0
                for chunk in _stream(batches):
                    length_bytes += len(chunk)
                    yield chunk
                rows = sum(batch.num_rows for batch in batches)
                runs.append(WrittenRun(channel, offset_bytes, length_bytes, rows))
                offset_bytes += length_bytes

    written = store.write(path, chunks())
    return WrittenLog(path, written.length_bytes, written.crc32, tuple(runs), written.data)


def _stream(batches: Sequence[pa.RecordBatch]) -> Iterator[bytes]:
    """An Arrow stream piece by piece: what waits in a cycle, on disk, may not fit into memory."""
    piece = io.BytesIO()
    with pa.ipc.new_stream(piece, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
            yield _taken_from(piece)
    yield _taken_from(piece)


def _taken_from(piece: io.BytesIO) -> bytes:
    written = piece.getvalue()
    piece.seek(0)
    piece.truncate()
    return written


def read_run(buffer: pa.Buffer, offset_bytes: int, length_bytes: int) -> list[pa.RecordBatch]:
    """The batches of a run, without a copy; they keep the buffer alive."""
    try:
        with pa.ipc.open_stream(buffer.slice(offset_bytes, length_bytes)) as stream:
            return list(stream)
    except (pa.ArrowException, OSError) as error:  # Arrow raises either
        raise SnapshotDamaged(
            f"records under way cannot be read from a file of {buffer.size} bytes ({error}):"
            " restore an older checkpoint"
        ) from error
