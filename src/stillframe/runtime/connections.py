"""One connection between two slots: its channels, their credits, and bytes in and out.

Theory of operation
-------------------
Both directions of all channels between two slots share one TCP connection. Each channel has a
credit in bytes: the receiver grants a window at the start and gives back what its loop has taken.
A batch leaves only while its channel has credit, so what arrives always has a place to wait in,
sockets are always drained, and a channel nobody reads stops itself and no other. Markers need no
credit but keep their place behind the batches of their channel. Frames with the priority flag have
a lane of their own, which goes first at the sender and again at the receiver.

A barrier that overtakes has the priority lane at the sender only. It passes the batches that have
not been gathered for the socket, and the sender answers for those. At the receiver it takes its
place behind all that arrived before it, until the loop pulls it out and answers for what it passed
there. So a batch is in exactly one of the two answers, or was taken before the barrier, or was sent
after it: nobody has to agree with anybody, because both ends see the one order of the bytes.

Rules of this file
------------------
1. The loop thread calls the channels' ends, the I/O thread the connection. What both touch is
   guarded by the network's one lock, held for a few statements and never while encoding or
   decoding a batch or doing I/O.
2. A misbehaving peer is a StillframeError out of `read`; the network ends the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from stillframe.errors import StillframeError
from stillframe.ids import CheckpointId, SlotIndex
from stillframe.runtime.channels import InputChannel, OutputChannel, pull_barrier
from stillframe.runtime.elements import Barrier, Element
from stillframe.runtime.frames import (
    HEADER,
    Decoder,
    Encoder,
    Frame,
    FrameType,
    Header,
    decode_credit,
    decode_header,
    encode_credit,
    encode_goodbye,
)

# How much is taken from the channels at once. A priority frame waits behind this much at most.
_GATHER_BYTES_MAX = 512 * 1024
_PARTS_PER_CALL_MAX = 512
# How much one connection moves before the others have their turn.
_TURN_BYTES_MAX = 4 * 1024 * 1024


class NetworkOutput(OutputChannel):
    """The sending end of a channel to another slot."""

    def __init__(self, connection: Connection, channel_id: int, buffer_bytes_max: int) -> None:
        self.channel_id = channel_id
        self._connection = connection
        self._encoder = Encoder(channel_id)
        self._buffer_bytes_max = buffer_bytes_max
        # Guarded by the network's lock:
        self.priority: deque[Frame] = deque()
        self.normal: deque[Frame] = deque()
        self.held: deque[Frame] = deque()  # the barriers in `normal`, in their order
        self.credit_bytes = 0
        self.waiting_bytes = 0
        self.waiting_frames = 0
        self.is_flush_awaited = False
        self.is_barrier_awaited = False
        self.has_turn = False

    def has_room(self) -> bool:
        return self.waiting_bytes < self._buffer_bytes_max

    def send(self, element: Element) -> None:
        for frame in self._encoder.encode(element):
            if frame.is_batch:
                self.bytes_sent += frame.payload_bytes
            self._connection.enqueue(self, frame)
        if isinstance(element, pa.RecordBatch):
            self.rows_sent += element.num_rows

    def is_flushed(self) -> bool:
        with self._connection.lock:
            self.is_flush_awaited = self.waiting_frames > 0
            return not self.is_flush_awaited

    def overtake(self, barrier: Barrier) -> list[pa.RecordBatch]:
        with self._connection.lock:
            overtaken = list(self.normal)
            self._send_ahead(barrier)
        return _batches(overtaken)

    def hasten(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch] | None:
        with self._connection.lock:
            held = _barrier_in(self.held, checkpoint_id)
            if held is None:
                return None if _barrier_in(self.priority, checkpoint_id) is None else []
            overtaken = self._withdraw(held)
            assert held.barrier is not None
            self._send_ahead(replace(held.barrier, alignment_timeout_ms=0))
        return _batches(overtaken)

    def holds(self, checkpoint_id: CheckpointId) -> bool:
        with self._connection.lock:
            self.is_barrier_awaited = _barrier_in(self.held, checkpoint_id) is not None
            return self.is_barrier_awaited

    def _send_ahead(self, barrier: Barrier) -> None:
        (frame,) = self._encoder.encode(barrier)
        frame.is_priority = True
        self._connection.add(self, frame)

    def _withdraw(self, held: Frame) -> list[Frame]:
        """Take a barrier out of its place; the frames in front of it."""
        place = self.normal.index(held)
        ahead = list(itertools.islice(self.normal, place))
        del self.normal[place]
        self.held.remove(held)
        self.waiting_bytes -= held.payload_bytes
        self.waiting_frames -= 1
        return ahead

    # What follows is the connection's, under the lock.

    def add(self, frame: Frame) -> None:
        if frame.is_priority:
            self.priority.append(frame)
        else:
            self.normal.append(frame)
            if frame.barrier is not None:
                self.held.append(frame)
        self.waiting_bytes += frame.payload_bytes
        self.waiting_frames += 1

    def can_send(self) -> bool:
        """Whether the first of what has no priority may leave."""
        return bool(self.normal) and (not self.normal[0].is_batch or self.credit_bytes > 0)

    def next_frame(self) -> Frame:
        frame = self.normal.popleft()
        if frame.is_batch:
            self.credit_bytes -= frame.payload_bytes
        elif frame.barrier is not None:
            self.held.popleft()
        return frame

    def has_left(self, frame: Frame) -> bool:
        """The last byte of the frame was written; whether the loop waits to hear of that."""
        had_room = self.has_room()
        self.waiting_bytes -= frame.payload_bytes
        self.waiting_frames -= 1
        is_flush_news = self.is_flush_awaited and self.waiting_frames == 0
        return is_flush_news or (self.has_room() and not had_room)

    def clear(self) -> None:
        self.priority.clear()
        self.normal.clear()
        self.held.clear()
        self.waiting_bytes = self.waiting_frames = 0


def _barrier_in(frames: Iterable[Frame], checkpoint_id: CheckpointId) -> Frame | None:
    for frame in frames:
        if frame.barrier is not None and frame.barrier.checkpoint_id == checkpoint_id:
            return frame
    return None


def _batches(frames: Iterable[Frame]) -> list[pa.RecordBatch]:
    return [frame.batch() for frame in frames if frame.is_batch]


class NetworkInput(InputChannel):
    """The receiving end of a channel from another slot."""

    def __init__(self, connection: Connection, channel_id: int, window_bytes: int) -> None:
        self.channel_id = channel_id
        self.window_bytes = window_bytes
        self.decoder = Decoder()
        self._connection = connection
        self._taken_bytes = 0  # taken and not yet given back; the loop thread's own
        # Guarded by the network's lock:
        self._priority: deque[tuple[Element, int]] = deque()
        self._normal: deque[tuple[Element, int]] = deque()
        self._barriers: deque[Barrier] = deque()  # those in `_normal`, in their order
        self.credit_bytes = 0

    def is_empty(self) -> bool:
        return not self._priority and not self._normal

    def peek(self) -> Element:
        with self._connection.lock:
            return (self._priority or self._normal)[0][0]

    def take(self) -> Element:
        with self._connection.lock:
            element, size_bytes = (self._priority or self._normal).popleft()
            if self._barriers and element is self._barriers[0]:
                self._barriers.popleft()
            self.queued_bytes -= size_bytes
        self.bytes_taken += size_bytes
        self._taken_bytes += size_bytes
        # In quarters of the window: fewer frames, and the sender never sees less than three.
        if self._taken_bytes * 4 >= self.window_bytes:
            self._connection.grant(self, self._taken_bytes)
            self._taken_bytes = 0
        return element

    def waiting_barriers(self) -> Sequence[Barrier]:
        if not self._barriers:
            return ()
        with self._connection.lock:
            return tuple(self._barriers)

    def pull(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch]:
        with self._connection.lock:
            return pull_barrier(self._normal, self._barriers, checkpoint_id)

    # What follows is the connection's, under the lock.

    def put(self, element: Element, size_bytes: int, is_priority: bool) -> bool:
        """Whether the loop has something to do now that it did not have before."""
        if isinstance(element, Barrier):
            # Behind all that arrived before it even if it overtook: `pull` lets it overtake here.
            self._normal.append((element, size_bytes))
            self._barriers.append(element)
            return True
        was_empty = self.is_empty()
        self.queued_bytes += size_bytes
        (self._priority if is_priority else self._normal).append((element, size_bytes))
        return was_empty

    def charge(self, size_bytes: int) -> None:
        if self.credit_bytes <= 0:
            raise StillframeError(f"channel {self.channel_id} was sent a batch without credit")
        self.credit_bytes -= size_bytes


@dataclass(slots=True)
class _Leaving:
    """A frame handed to the socket; gone once `end` bytes were written in all."""

    end: int
    frame: Frame
    output: NetworkOutput | None


class Connection:
    """The channels to and from one peer, and the socket once there is one."""

    def __init__(
        self,
        peer: SlotIndex,
        lock: threading.Lock,
        ring: Callable[[Connection], None],
        tell_loop: Callable[[], None],
    ) -> None:
        """`ring`: there is something to write (called under the lock, by either thread).
        `tell_loop`: the loop can do something it could not do before (called by the I/O thread).
        """
        self.peer = peer
        self.lock = lock
        self.outputs: dict[int, NetworkOutput] = {}
        self.inputs: dict[int, NetworkInput] = {}
        self.sock: socket.socket | None = None
        self.is_write_blocked = False
        self.has_peer_left = False
        """The peer said goodbye; what is sent to it from then on is dropped."""
        self._ring = ring
        self._tell_loop = tell_loop
        self._is_over = False
        self._is_discarding = False
        self._has_said_goodbye = False
        # Guarded by the lock:
        self._urgent: deque[NetworkOutput] = deque()  # once for each frame in a priority lane
        self._turns: deque[NetworkOutput] = deque()
        self._grants: dict[int, int] = {}
        self._goodbye_wanted = False
        # The I/O thread's own:
        self._unwritten: deque[memoryview] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._gathered_bytes = 0
        self._written_bytes = 0
        self._header_bytes = bytearray(HEADER.size)
        self._header_view = memoryview(self._header_bytes)
        self._header_filled = 0
        self._header: Header | None = None
        self._payload = pa.py_buffer(b"")
        self._payload_view = memoryview(bytearray())  # the part not yet filled

    # --- called by the loop thread

    def enqueue(self, output: NetworkOutput, frame: Frame) -> None:
        with self.lock:
            self.add(output, frame)

    def add(self, output: NetworkOutput, frame: Frame) -> None:
        """Called under the lock."""
        if self._is_over or self._goodbye_wanted:
            return
        output.add(frame)
        if frame.is_priority:
            self._urgent.append(output)
            self._ring(self)
        else:
            self._give_turn(output)

    def grant(self, channel: NetworkInput, credit_bytes: int) -> None:
        with self.lock:
            if self._is_over or self._goodbye_wanted:
                return
            channel.credit_bytes += credit_bytes
            self._grants[channel.channel_id] = (
                self._grants.get(channel.channel_id, 0) + credit_bytes
            )
            self._ring(self)

    def _give_turn(self, output: NetworkOutput) -> None:
        if not output.has_turn and output.can_send():
            output.has_turn = True
            self._turns.append(output)
            self._ring(self)

    # --- the life of the connection

    def open(self, sock: socket.socket) -> None:
        """From here on the I/O thread moves bytes."""
        sock.setblocking(False)
        self.sock = sock
        for channel in self.inputs.values():
            self.grant(channel, channel.window_bytes)
        with self.lock:
            self._ring(self)  # for markers that were sent before

    def start_goodbye(self) -> None:
        """Stop delivering, send what is queued, then goodbye."""
        self._is_discarding = True
        with self.lock:
            if not any(output.waiting_frames for output in self.outputs.values()):
                self._goodbye_wanted = True
                self._ring(self)

    def say_goodbye_if_flushed(self) -> bool:
        """Whether the goodbye and all before it has been written."""
        if not self._goodbye_wanted:
            self.start_goodbye()
        if not self._has_said_goodbye or self._unwritten:
            return False
        assert self.sock is not None
        self.sock.shutdown(socket.SHUT_WR)
        return True

    def end(self, *, at_once: bool = False) -> None:
        """Close the socket and forget what waits; what was received can still be taken."""
        with self.lock:
            self._is_over = True
            self._urgent.clear()
            self._turns.clear()
            self._grants.clear()
            for output in self.outputs.values():
                output.clear()
        self._unwritten.clear()
        self._leaving.clear()
        if self.sock is not None:
            if at_once:
                no_linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # struct linger {1, 0}
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            self.sock.close()
            self.sock = None

    # --- writing, on the I/O thread

    def write(self) -> bool:
        """Write what may be written now; whether there is more than one turn's worth."""
        assert self.sock is not None
        self.is_write_blocked = False
        stop_at = self._written_bytes + _TURN_BYTES_MAX
        while self._unwritten or self._gather():
            if self._written_bytes >= stop_at:
                return True
            parts = list(itertools.islice(self._unwritten, _PARTS_PER_CALL_MAX))
            try:
                count = self.sock.sendmsg(parts)
            except BlockingIOError:
                self.is_write_blocked = True
                return False
            self._advance(count)
        return False

    def _gather(self) -> bool:
        """Take frames from the channels in turn; whether there were any."""
        with self.lock:
            for channel_id, credit_bytes in self._grants.items():
                self._put(encode_credit(channel_id, credit_bytes), None)
            self._grants.clear()
            while self._urgent:
                output = self._urgent.popleft()
                self._put(output.priority.popleft(), output)
            stop_at = self._written_bytes + _GATHER_BYTES_MAX
            while self._turns and self._gathered_bytes < stop_at:
                self._gather_from(self._turns.popleft())
            if self._goodbye_wanted and not self._has_said_goodbye:
                self._has_said_goodbye = True
                self._put(encode_goodbye(), None)
        return bool(self._unwritten)

    def _gather_from(self, output: NetworkOutput) -> None:
        # What it was given its turn for may be gone: a barrier that was hastened.
        if output.can_send():
            frame = output.next_frame()
            self._put(frame, output)
            if frame.barrier is not None and output.is_barrier_awaited:
                self._tell_loop()
        output.has_turn = output.can_send()
        if output.has_turn:
            self._turns.append(output)

    def _put(self, frame: Frame, output: NetworkOutput | None) -> None:
        self._unwritten.extend(frame.parts)
        self._gathered_bytes += HEADER.size + frame.payload_bytes
        self._leaving.append(_Leaving(self._gathered_bytes, frame, output))

    def _advance(self, count: int) -> None:
        self._written_bytes += count
        while count and count >= len(self._unwritten[0]):
            count -= len(self._unwritten.popleft())
        if count:
            self._unwritten[0] = self._unwritten[0][count:]
        with self.lock:
            while self._leaving and self._leaving[0].end <= self._written_bytes:
                left = self._leaving.popleft()
                if left.output is not None and left.output.has_left(left.frame):
                    self._tell_loop()

    # --- reading, on the I/O thread

    def read(self) -> None:
        """Read what is there, up to one turn's worth. Raises if the peer is lost or misbehaves."""
        read_bytes = 0
        while read_bytes < _TURN_BYTES_MAX and not self.has_peer_left:
            assert self.sock is not None
            try:
                # The rest of this frame's payload and the next header: one call for each frame.
                count = self.sock.recvmsg_into(
                    [self._payload_view, self._header_view[self._header_filled :]]
                )[0]
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("closed without a goodbye")
            read_bytes += count
            self._fill(count)

    def _fill(self, count: int) -> None:
        payload_count = min(count, len(self._payload_view))
        self._payload_view = self._payload_view[payload_count:]
        if self._header is not None and not self._payload_view:
            self._finish_frame(self._header)
        self._header_filled += count - payload_count
        if self._header_filled == HEADER.size:
            self._header_filled = 0
            self._start_frame(decode_header(self._header_bytes))

    def _start_frame(self, header: Header) -> None:
        self._header = header
        if header.payload_bytes == 0:
            self._payload = pa.py_buffer(b"")
            self._finish_frame(header)
            return
        self._payload = pa.allocate_buffer(header.payload_bytes)
        self._payload_view = memoryview(self._payload)

    def _finish_frame(self, header: Header) -> None:
        payload, self._payload = self._payload, pa.py_buffer(b"")
        self._header = None
        match header.type:
            case FrameType.CREDIT:
                self._on_credit(header.channel_id, decode_credit(payload))
            case FrameType.GOODBYE:
                self.has_peer_left = True
            case _:
                self._on_element(header, payload)

    def _on_credit(self, channel_id: int, credit_bytes: int) -> None:
        output = self.outputs.get(channel_id)
        if output is None:
            raise StillframeError(f"credit came for the unknown channel {channel_id}")
        with self.lock:
            output.credit_bytes += credit_bytes
            self._give_turn(output)

    def _on_element(self, header: Header, payload: pa.Buffer) -> None:
        channel = self.inputs.get(header.channel_id)
        if channel is None:
            raise StillframeError(
                f"a {header.type.name} came for the unknown channel {header.channel_id}"
            )
        is_batch = header.type is FrameType.BATCH
        element = channel.decoder.decode(header.type, payload)
        with self.lock:
            if is_batch:
                channel.charge(header.payload_bytes)
            if self._is_discarding:
                return
            size_bytes = header.payload_bytes if is_batch else 0
            if channel.put(element, size_bytes, header.is_priority):
                self._tell_loop()
