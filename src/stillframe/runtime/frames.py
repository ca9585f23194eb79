"""Frames: how the elements of a channel look on a connection between two slots.

    type u8 | flags u8 | channel u32 | payload length u32 | payload          (little-endian)

A batch is a self-contained Arrow IPC stream: schema, dictionaries, one record batch. The payload
of every frame is received into a buffer of its own and decoded without a copy. Most batches of a
channel have the same schema, so both ends remember the last one and its bytes: writing and reading
a whole stream takes several times as long as the batch alone, which counts for small batches.

Rules of this file
------------------
1. Batches are never changed once sent: a frame refers to their memory until it has left.
2. A change of the format raises FORMAT_VERSION, which slots compare when they meet.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.errors import DataError, StillframeError
from stillframe.ids import CheckpointId
from stillframe.runtime.elements import (
    Barrier,
    CancelBarrier,
    Element,
    EndOfRecords,
    Idle,
    Lap,
    LatencyMarker,
    Marker,
    Watermark,
)

FORMAT_VERSION = 4
PAYLOAD_BYTES_MAX = 2 * 1024 * 1024 * 1024
HEADER = struct.Struct("<BBII")
PRIORITY = 0x01
"""Flag: overtakes what waits in its channel without it, at the receiver too."""

_BARRIER = struct.Struct("<qqq?")
_NO_ALIGNMENT_TIMEOUT = -1
_CANCEL = struct.Struct("<q")
_LAP = struct.Struct("<qq?")
_LATENCY = struct.Struct("<qq")
_WATERMARK = struct.Struct("<q")
_CREDIT = struct.Struct("<q")
_SMALL_PIECE_BYTES_MAX = 1024
# Below this a copy is cheaper than the calls that avoid it (measured: 001-transport).
_COPIED_BYTES_MAX = 256 * 1024


class FrameType(IntEnum):
    """Numbers 23 to 31 are free for announcements."""

    BATCH = 1
    BARRIER = 16
    CANCEL = 17
    END_OF_RECORDS = 18
    LATENCY = 19
    LAP = 20
    WATERMARK = 21
    IDLE = 22
    CREDIT = 64
    GOODBYE = 65


@dataclass(slots=True, eq=False)
class Frame:
    """One encoded frame on its way out."""

    parts: list[memoryview]
    """Header and payload, in pieces that are written one after the other."""
    payload_bytes: int
    is_batch: bool
    is_priority: bool
    """Goes before all that waits at the sender. Has the flag too, unless it is a barrier."""
    barrier: Barrier | None = None
    source: pa.RecordBatch | pa.Schema | None = None
    """The batch whose memory this frame refers to; the schema alone of one that was copied, whose
    own memory (often a slice of something much larger) is not kept for the copy's sake."""

    def batch(self) -> pa.RecordBatch:
        """What this frame carries: a whole batch, or its part of one that was split."""
        if isinstance(self.source, pa.RecordBatch):
            return self.source
        return pa.ipc.read_record_batch(pa.py_buffer(self.parts[1]), self.source)


class Header(NamedTuple):
    """The first bytes of a frame that came in."""

    type: FrameType
    is_priority: bool
    channel_id: int
    payload_bytes: int


class Encoder:
    """Makes the frames of one channel."""

    def __init__(self, channel_id: int) -> None:
        self._channel_id = channel_id
        self._schema: pa.Schema | None = None
        self._schema_bytes = b""
        self._has_dictionaries = False

    def encode(self, element: Element) -> list[Frame]:
        """The frames of an element: one, or several for a batch too large for one."""
        if not isinstance(element, pa.RecordBatch):
            return [_encode_marker(self._channel_id, element)]
        if self._schema is None or not element.schema.equals(self._schema, check_metadata=True):
            self._schema = element.schema
            self._schema_bytes = element.schema.serialize().to_pybytes()
            self._has_dictionaries = any(_has_dictionary(each.type) for each in element.schema)
        if not self._has_dictionaries and element.nbytes <= _COPIED_BYTES_MAX:
            frame = self._copied(element)
            if frame.payload_bytes <= PAYLOAD_BYTES_MAX:
                return [frame]
        return _encode_stream(self._channel_id, element)

    def _copied(self, batch: pa.RecordBatch) -> Frame:
        """A stream put together from the remembered schema and the batch."""
        body = memoryview(batch.serialize())
        payload_bytes = len(self._schema_bytes) + len(body)
        header = HEADER.pack(FrameType.BATCH, 0, self._channel_id, payload_bytes)
        parts = [memoryview(header + self._schema_bytes), body]
        return Frame(parts, payload_bytes, True, False, source=self._schema)


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return _has_dictionary(kind.value_type)
    return any(_has_dictionary(kind.field(index).type) for index in range(kind.num_fields))


def encode_credit(channel_id: int, credit_bytes: int) -> Frame:
    return _frame(FrameType.CREDIT, channel_id, _CREDIT.pack(credit_bytes))


def encode_goodbye() -> Frame:
    return _frame(FrameType.GOODBYE, 0)


def _encode_marker(channel_id: int, marker: Marker) -> Frame:
    match marker:
        case Barrier():
            return _encode_barrier(channel_id, marker)
        case CancelBarrier(checkpoint_id):
            return _frame(FrameType.CANCEL, channel_id, _CANCEL.pack(checkpoint_id), PRIORITY)
        case EndOfRecords():
            return _frame(FrameType.END_OF_RECORDS, channel_id)
        case Watermark(time_us):
            return _frame(FrameType.WATERMARK, channel_id, _WATERMARK.pack(time_us))
        case Idle():
            return _frame(FrameType.IDLE, channel_id)
        case Lap(loop, number, is_quiet):
            return _frame(FrameType.LAP, channel_id, _LAP.pack(loop, number, is_quiet))
        case LatencyMarker(source_task, sent_at_ms):
            return _frame(FrameType.LATENCY, channel_id, _LATENCY.pack(source_task, sent_at_ms))


def _encode_barrier(channel_id: int, barrier: Barrier) -> Frame:
    timeout_ms = barrier.alignment_timeout_ms
    payload = _BARRIER.pack(
        barrier.checkpoint_id,
        barrier.triggered_at_ms,
        _NO_ALIGNMENT_TIMEOUT if timeout_ms is None else timeout_ms,
        barrier.holds,
    )
    frame = _frame(FrameType.BARRIER, channel_id, payload + (barrier.savepoint or "").encode())
    frame.barrier = barrier
    return frame


def _frame(kind: FrameType, channel_id: int, payload: bytes = b"", flags: int = 0) -> Frame:
    data = HEADER.pack(kind, flags, channel_id, len(payload)) + payload
    return Frame([memoryview(data)], len(payload), False, bool(flags & PRIORITY))


def _encode_stream(channel_id: int, batch: pa.RecordBatch) -> list[Frame]:
    pieces = _Pieces()
    batch = _with_compact_dictionaries(batch)
    with pa.ipc.new_stream(pa.PythonFile(pieces, mode="w"), batch.schema) as writer:
        writer.write_batch(batch)
    if pieces.payload_bytes <= PAYLOAD_BYTES_MAX:
        return [pieces.frame(channel_id, batch)]
    if batch.num_rows <= 1:
        raise DataError(
            f"one row takes {pieces.payload_bytes} bytes, more than the {PAYLOAD_BYTES_MAX} that"
            " can be sent between slots: keep such values in files and send their names"
        )
    half = batch.num_rows // 2
    return [
        *_encode_stream(channel_id, batch.slice(0, half)),
        *_encode_stream(channel_id, batch.slice(half)),
    ]


class _Pieces:
    """A file for pyarrow to write to, which keeps what it is given instead of joining it.

    pyarrow hands over its column buffers themselves, so a large batch costs no copy, and much
    padding and metadata in little pieces, which are joined to keep the number of pieces small.
    """

    closed = False

    def __init__(self) -> None:
        self._small = bytearray(HEADER.size)
        self._pieces: list[bytearray | pa.Buffer] = [self._small]
        self.payload_bytes = 0

    def write(self, data: bytes | pa.Buffer) -> int:
        size_bytes = len(data)
        self.payload_bytes += size_bytes
        if size_bytes <= _SMALL_PIECE_BYTES_MAX:
            self._small += data
        else:
            self._small = bytearray()
            self._pieces += [data, self._small]
        return size_bytes

    def flush(self) -> None:
        """Part of what pyarrow expects of a file."""

    def close(self) -> None:
        """Part of what pyarrow expects of a file."""

    def frame(self, channel_id: int, batch: pa.RecordBatch) -> Frame:
        assert isinstance(self._pieces[0], bytearray)
        HEADER.pack_into(self._pieces[0], 0, FrameType.BATCH, 0, channel_id, self.payload_bytes)
        parts = [memoryview(piece) for piece in self._pieces if len(piece)]
        return Frame(parts, self.payload_bytes, True, False, source=batch)


def _with_compact_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows without the dictionary values that none of them uses.

    IPC cuts a slice's own buffers down but ships its dictionaries whole. Dictionaries inside
    nested columns are left as they are.
    """
    for index, field in enumerate(batch.schema):
        if pa.types.is_dictionary(field.type):
            column = batch.column(index)
            if len(column.dictionary) > 2 * len(column):
                batch = batch.set_column(index, field, _compact(column))
    return batch


def _compact(column: pa.DictionaryArray) -> pa.DictionaryArray:
    # Sorted, because in an ordered dictionary the place of a value is its rank.
    used = pc.unique(column.indices).drop_null().sort()
    indices = pc.index_in(column.indices, value_set=used).cast(column.type.index_type)
    return pa.DictionaryArray.from_arrays(
        indices, column.dictionary.take(used), ordered=column.type.ordered
    )


def decode_header(data: bytes | bytearray) -> Header:
    number, flags, channel_id, payload_bytes = HEADER.unpack(data)
    try:
        kind = FrameType(number)
    except ValueError:
        raise StillframeError(f"a frame of the unknown type {number} came") from None
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise StillframeError(
            f"a frame of {payload_bytes} bytes came, more than the {PAYLOAD_BYTES_MAX} allowed"
        )
    return Header(kind, bool(flags & PRIORITY), channel_id, payload_bytes)


def decode_credit(payload: pa.Buffer) -> int:
    try:
        (credit_bytes,) = _CREDIT.unpack(payload)
    except struct.error as error:
        raise StillframeError(f"a credit could not be read ({error})") from error
    if credit_bytes <= 0:
        raise StillframeError(f"a credit of {credit_bytes} bytes came")
    return int(credit_bytes)


class Decoder:
    """Reads the frames of one channel."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._schema_bytes = b""

    def decode(self, kind: FrameType, payload: pa.Buffer) -> Element:
        """The element of a frame. A batch refers to the payload's memory."""
        try:
            if kind is FrameType.BATCH:
                return self._decode_batch(payload)
            return _decode_marker(kind, payload)
        except (pa.ArrowException, OSError, ValueError, StopIteration, struct.error) as error:
            raise StillframeError(
                f"a {kind.name} frame of {payload.size} bytes could not be read ({error})"
            ) from error

    def _decode_batch(self, payload: pa.Buffer) -> pa.RecordBatch:
        prefix_bytes = len(self._schema_bytes)
        if prefix_bytes and memoryview(payload)[:prefix_bytes] == self._schema_bytes:
            batch = pa.ipc.read_record_batch(payload.slice(prefix_bytes), self._schema)
        else:
            with pa.ipc.open_stream(payload) as reader:
                batch = reader.read_next_batch()
                self._remember(reader.schema)
        batch.validate()
        return batch

    def _remember(self, schema: pa.Schema) -> None:
        if any(_has_dictionary(field.type) for field in schema):
            self._schema_bytes = b""
        else:
            self._schema = schema
            self._schema_bytes = schema.serialize().to_pybytes()


def _decode_marker(kind: FrameType, payload: pa.Buffer) -> Marker:
    match kind:
        case FrameType.BARRIER:
            return _decode_barrier(payload)
        case FrameType.CANCEL:
            return CancelBarrier(CheckpointId(_CANCEL.unpack(payload)[0]))
        case FrameType.END_OF_RECORDS:
            return EndOfRecords()
        case FrameType.LAP:
            return Lap(*_LAP.unpack(payload))
        case FrameType.LATENCY:
            return LatencyMarker(*_LATENCY.unpack(payload))
        case FrameType.WATERMARK:
            return Watermark(*_WATERMARK.unpack(payload))
        case FrameType.IDLE:
            return Idle()
        case _:
            raise StillframeError(f"a {kind.name} frame is not a marker of a channel")


def _decode_barrier(payload: pa.Buffer) -> Barrier:
    checkpoint_id, triggered_at_ms, timeout_ms, holds = _BARRIER.unpack_from(payload)
    savepoint = payload.to_pybytes()[_BARRIER.size :].decode()
    return Barrier(
        CheckpointId(checkpoint_id),
        triggered_at_ms,
        None if timeout_ms == _NO_ALIGNMENT_TIMEOUT else timeout_ms,
        savepoint or None,
        holds,
    )
