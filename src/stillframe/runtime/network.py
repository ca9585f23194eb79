"""The network of one slot in one attempt: a connection to every peer, moved by one thread.

Theory of operation
-------------------
Slots meet once: each listens from its construction on, the lower one dials the higher, and the
door is closed when all are there. From then on one selector thread moves bytes between the sockets
and the channels' queues; the loop thread encodes what it sends and takes what was decoded. The
loop rings a bell (a socket pair) when there is something to write, at most once until it is heard.

A peer that ends in good order says goodbye; a connection that ends without it is a failure of the
whole attempt, told in one sentence by `failure`. What is sent to a peer after its goodbye is
dropped: that peer acknowledges nothing any more, so no checkpoint can miss it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from stillframe.errors import StillframeError
from stillframe.ids import Attempt, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.runtime.channels import InputChannel, OutputChannel
from stillframe.runtime.connections import Connection, NetworkInput, NetworkOutput
from stillframe.runtime.frames import FORMAT_VERSION
from stillframe.wire import Address, ConnectionLost, Doorman, address_of, connect, listen

HELLO_KIND = "data"
_DIAL_SECONDS_MAX = 5.0
_DIAL_PAUSE_SECONDS = 0.05
_JOIN_SECONDS_MAX = 5.0


class Network:
    """All connections of one slot to its peers in one attempt.

    `wake` is called on the I/O thread when an input is no longer empty or has got a barrier, an
    output has room again or, if that was asked in vain, is flushed or has let a barrier go, or
    something failed; once for all that happened in one turn of the thread. It must be cheap.
    """

    def __init__(
        self,
        *,
        job: str,
        host: str,
        secret: bytes,
        attempt: Attempt,
        slot: SlotIndex,
        buffer_bytes_max: int,
        wake: Callable[[], None],
    ) -> None:
        assert buffer_bytes_max > 0
        self._job = job
        self._secret = secret
        self._attempt = attempt
        self._slot = slot
        self._buffer_bytes_max = buffer_bytes_max
        self._wake = wake

        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Guarded by the lock:
        self._connections: dict[SlotIndex, Connection] = {}
        self._arrived: dict[SlotIndex, socket.socket] = {}
        self._is_mesh_decided = False
        self._failure: str | None = None
        self._newcomers: dict[Connection, socket.socket] = {}
        self._rung: set[Connection] = set()
        self._is_awake = False
        self._is_ended = False
        self._close_deadline: float | None = None
        self._is_aborted = False
        # The I/O thread's own:
        self._open: dict[socket.socket, Connection] = {}
        self._parting: set[Connection] = set()
        self._has_news = False

        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._run, name=f"stillframe-network-{slot}", daemon=True
        )
        listener = listen(host)
        self.address = address_of(listener)
        self._doorman = Doorman(listener, secret, self._on_peer, admit=self._refusal)
        self._thread.start()

    # --- the channels

    def output(self, peer: SlotIndex, channel_id: int) -> OutputChannel:
        """The sending end of a channel; asked for once, before `connect`."""
        connection = self._connection_to(peer)
        assert channel_id not in connection.outputs, f"channel {channel_id} was given out before"
        channel = NetworkOutput(connection, channel_id, self._buffer_bytes_max)
        connection.outputs[channel_id] = channel
        return channel

    def input(self, peer: SlotIndex, channel_id: int) -> InputChannel:
        """The receiving end of a channel; asked for once, before `connect`."""
        connection = self._connection_to(peer)
        assert channel_id not in connection.inputs, f"channel {channel_id} was given out before"
        channel = NetworkInput(connection, channel_id, self._buffer_bytes_max)
        connection.inputs[channel_id] = channel
        return channel

    def _connection_to(self, peer: SlotIndex) -> Connection:
        assert peer != self._slot, "a slot does not connect to itself"
        with self._lock:
            assert not self._is_mesh_decided, "channels are registered before connect"
            if peer not in self._connections:
                self._connections[peer] = Connection(peer, self._lock, self._ring, self._note_news)
            return self._connections[peer]

    def failure(self) -> str | None:
        """One sentence once a connection was lost or a peer misbehaved: the attempt must end."""
        return self._failure

    # --- meeting the peers

    def connect(self, peers: Mapping[SlotIndex, Address], timeout_seconds: float) -> None:
        """Connect to all of `peers`, oneself excluded, or raise and say who is missing."""
        deadline = time.monotonic() + timeout_seconds
        others = {peer: address for peer, address in peers.items() if peer != self._slot}
        unknown = sorted(set(self._connections) - set(others))
        assert not unknown, f"channels lead to slots {unknown}, whose addresses were not given"
        for peer in others:
            self._connection_to(peer)
        sockets = self._meet(others, deadline, timeout_seconds)
        self._doorman.close()
        with self._lock:
            if self._is_ended:
                for sock in sockets.values():
                    sock.close()
                raise StillframeError(f"slot {self._slot} was closed while it was connecting")
            self._newcomers = {self._connections[peer]: sock for peer, sock in sockets.items()}
            self._ring_bell()

    def _meet(
        self, others: Mapping[SlotIndex, Address], deadline: float, timeout_seconds: float
    ) -> dict[SlotIndex, socket.socket]:
        dialed: dict[SlotIndex, socket.socket] = {}
        lower = {peer for peer in others if peer < self._slot}
        higher = {peer: address for peer, address in others.items() if peer > self._slot}
        try:
            reasons = self._dial(higher, dialed, deadline)
            self._await_arrivals(lower, deadline)
            with self._lock:
                self._is_mesh_decided = True
                met = {**dialed, **self._arrived}
                missing = sorted(set(others) - set(met))
                if missing or self._is_ended:
                    raise StillframeError(
                        self._missing_sentence(missing, others, reasons, timeout_seconds)
                    )
                self._arrived = {}
        except BaseException:
            for sock in dialed.values():
                sock.close()
            raise
        for peer in met.keys() - others.keys():
            met.pop(peer).close()
        return met

    def _missing_sentence(
        self,
        missing: list[SlotIndex],
        others: Mapping[SlotIndex, Address],
        reasons: Mapping[SlotIndex, str],
        timeout_seconds: float,
    ) -> str:
        if self._is_ended:
            return f"slot {self._slot} was closed while it was connecting to its peers"
        each = "; ".join(
            f"slot {peer} at {others[peer]}" + (f" ({reasons[peer]})" if peer in reasons else "")
            for peer in missing
        )
        return (
            f"slot {self._slot} of job {self._job!r}, attempt {self._attempt}, did not meet all its"
            f" peers within {timeout_seconds:g} s; missing: {each}: check that executors can reach"
            " each other's ports"
        )

    def _dial(
        self,
        higher: Mapping[SlotIndex, Address],
        dialed: dict[SlotIndex, socket.socket],
        deadline: float,
    ) -> dict[SlotIndex, str]:
        """Dial everyone in turn until all answer or time is up; why the others did not."""
        hello: JsonObject = {
            "kind": HELLO_KIND,
            "job": self._job,
            "attempt": self._attempt,
            "slot": self._slot,
            "format": FORMAT_VERSION,
        }
        reasons: dict[SlotIndex, str] = {}
        while not self._is_ended:
            for peer in sorted(higher.keys() - dialed.keys()):
                limit_seconds = min(_DIAL_SECONDS_MAX, max(0.1, deadline - time.monotonic()))
                try:
                    dialed[peer] = connect(higher[peer], self._secret, hello, limit_seconds)
                except ConnectionLost as error:
                    reasons[peer] = str(error)
            if len(dialed) == len(higher) or time.monotonic() >= deadline:
                break
            with self._changed:
                self._changed.wait_for(lambda: self._is_ended, _DIAL_PAUSE_SECONDS)
        return reasons

    def _await_arrivals(self, lower: set[SlotIndex], deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ended or lower <= self._arrived.keys(),
                max(0.0, deadline - time.monotonic()),
            )

    def _refusal(self, hello: JsonObject) -> str | None:
        """Called on the doorman's thread, and again when the peer is let in."""
        who = f"slot {self._slot} of job {self._job!r}, attempt {self._attempt},"
        for word, own in (
            ("kind", HELLO_KIND),
            ("format", FORMAT_VERSION),
            ("job", self._job),
            ("attempt", self._attempt),
        ):
            if hello.get(word) != own:
                return f"{who} expects {word} {own!r} but was offered {hello.get(word)!r}"
        slot = hello.get("slot")
        if not isinstance(slot, int) or not 0 <= slot < self._slot:
            return f"{who} is dialed by lower slots only, not by slot {slot!r}"
        if self._is_mesh_decided or slot in self._arrived:
            return f"{who} already has its connection to slot {slot}"
        return None

    def _on_peer(self, sock: socket.socket, hello: JsonObject) -> None:
        with self._changed:
            if self._is_ended or self._refusal(hello) is not None:
                sock.close()
                return
            slot = hello["slot"]
            assert isinstance(slot, int)
            self._arrived[SlotIndex(slot)] = sock
            self._changed.notify_all()

    # --- the end

    def close(self, timeout_seconds: float) -> None:
        """Send what is queued, say goodbye and stop.

        A peer that does not take what is queued for it within the limit gets no goodbye: for that
        peer the connection is lost, because something it should have received never came.
        """
        with self._changed:
            self._is_ended = True
            if self._close_deadline is None:
                self._close_deadline = time.monotonic() + timeout_seconds
            self._ring_bell()
            self._changed.notify_all()
        self._join(timeout_seconds + _JOIN_SECONDS_MAX)

    def abort(self) -> None:
        """Drop everything at once; the peers see a lost connection."""
        with self._changed:
            self._is_ended = True
            self._is_aborted = True
            self._ring_bell()
            self._changed.notify_all()
        self._join(_JOIN_SECONDS_MAX)

    def _join(self, timeout_seconds: float) -> None:
        self._doorman.close()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout_seconds)

    def _release(self) -> None:
        """The last act of the I/O thread."""
        for connection in list(self._open.values()):
            self._end(connection)
        self._selector.close()
        with self._lock:
            for sock in (*self._newcomers.values(), *self._arrived.values()):
                sock.close()
            self._newcomers.clear()
            self._arrived.clear()
            self._bell.close()
            self._bell_rope.close()

    # --- the I/O thread

    def _ring(self, connection: Connection) -> None:
        """Called under the lock."""
        self._rung.add(connection)
        self._ring_bell()

    def _ring_bell(self) -> None:
        """Called under the lock. A bell not yet heard is not rung again."""
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):
                self._bell_rope.send(b"\0")

    def _note_news(self) -> None:
        self._has_news = True

    def _run(self) -> None:
        try:
            while not self._is_aborted and self._take_turn():
                pass
        except Exception as error:
            self._fail(f"the network of slot {self._slot} stopped unexpectedly: {error!r}")
        finally:
            self._release()
            self._tell_loop()

    def _take_turn(self) -> bool:
        """Wait for something to do and do it; False when there will be nothing more."""
        events = self._selector.select(self._wait_seconds())
        with self._lock:
            self._is_awake = True  # from here to the end of the reads no bell is needed
        for key, mask in events:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(64)
                continue
            if mask & selectors.EVENT_READ:
                self._attend(key.data, self._read)
            if mask & selectors.EVENT_WRITE:
                self._attend(key.data, self._write)
        self._open_newcomers()
        for connection in self._take_rung():
            if not connection.is_write_blocked:
                self._attend(connection, self._write)
        self._tell_loop()
        return self._close_deadline is None or self._part()

    def _open_newcomers(self) -> None:
        with self._lock:
            newcomers, self._newcomers = self._newcomers, {}
        for connection, sock in newcomers.items():
            connection.open(sock)
            self._open[sock] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _wait_seconds(self) -> float | None:
        if self._close_deadline is None:
            return None
        return max(0.0, self._close_deadline - time.monotonic())

    def _take_rung(self) -> set[Connection]:
        with self._lock:
            self._is_awake = False
            rung, self._rung = self._rung, set()
            return rung

    def _attend(self, connection: Connection, act: Callable[[Connection], None]) -> None:
        if connection.sock is None:
            return
        try:
            act(connection)
        except (OSError, StillframeError) as error:
            self._end(connection)
            if self._close_deadline is None:
                self._fail(self._lost_sentence(connection.peer, error))

    def _read(self, connection: Connection) -> None:
        connection.read()
        if connection.has_peer_left:
            self._end(connection)

    def _write(self, connection: Connection) -> None:
        assert connection.sock is not None
        was_blocked = connection.is_write_blocked
        has_more = connection.write()
        if connection.is_write_blocked != was_blocked:
            write_too = selectors.EVENT_WRITE if connection.is_write_blocked else 0
            self._selector.modify(connection.sock, selectors.EVENT_READ | write_too, connection)
        if has_more:
            with self._lock:
                self._ring(connection)

    def _part(self) -> bool:
        """Say goodbye where all is sent; whether someone is left to wait for."""
        for connection in list(self._open.values()):
            if connection not in self._parting:
                self._attend(connection, self._say_goodbye)
        assert self._close_deadline is not None
        return bool(self._open) and time.monotonic() < self._close_deadline

    def _say_goodbye(self, connection: Connection) -> None:
        if connection.say_goodbye_if_flushed():
            # Not closed yet: what the peer still sends must be read, or the kernel would answer
            # it with a reset that can take the goodbye away from the peer.
            self._parting.add(connection)

    def _end(self, connection: Connection) -> None:
        if connection.sock is not None:
            self._selector.unregister(connection.sock)
            del self._open[connection.sock]
        connection.end(at_once=self._is_aborted)
        # An output that leads nowhere any more has room.
        self._note_news()

    def _lost_sentence(self, peer: SlotIndex, error: Exception) -> str:
        if isinstance(error, StillframeError):
            return (
                f"slot {peer} sent slot {self._slot} what cannot be: {error}; the connection was"
                " closed and the attempt must restart"
            )
        return (
            f"slot {self._slot} lost its connection to slot {peer} ({error}): that slot or its"
            " machine is gone and the attempt must restart"
        )

    def _fail(self, sentence: str) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = sentence
        self._note_news()

    def _tell_loop(self) -> None:
        if self._has_news:
            self._has_news = False
            self._wake()
