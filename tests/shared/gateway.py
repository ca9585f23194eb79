"""A way to a server that a test may break: closed, stalled, losing answers, or holding requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ports import hold_port, port_of

Matches = Callable[[bytes], bool]
"""Of the bytes with which a request begins: whether it is meant."""

_HTTP = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")


def _none(_data: bytes) -> bool:
    return False


class Gateway:
    """A way to a server that can be broken or slow."""

    def __init__(self, server_port: int) -> None:
        self._server = ("127.0.0.1", server_port)
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._answers_to_lose = 0
        self._bytes_until_cut: int | None = None
        self.answers_lost = 0
        self.stalled = threading.Event()
        """Set when an answer has been held back."""
        self._holds: Matches = _none
        self._stalls: Matches = _none
        self._loses: Matches = _none
        self._goes_on = threading.Event()
        self.held = threading.Event()
        """Set when a request has been held back."""
        self._delay_seconds = 0.0
        self.answered_at = 0.0
        """When something came back last, by the clock on the wall."""
        self._port = hold_port()
        self.port = port_of(self._port)
        self._listener = self._listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """From now on nobody gets through, as with a server that is down."""
        # Shut down first: a thread that waits in accept() would keep the port open.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flow()
        with self._lock:
            open_now, self._sockets = self._sockets, set()
        for each in open_now:
            _end(each)

    def open(self) -> None:
        """The server is back."""
        self._bytes_until_cut = None
        self._listener = self._listen()

    def stall(self) -> None:
        """Requests arrive, but no answer comes back, until `flow`."""
        self.stalled.clear()
        self._flows.clear()

    def stall_from(self, matches: Matches) -> None:
        """As soon as a request that matches has arrived."""
        self.stalled.clear()
        self._stalls = matches

    def flow(self) -> None:
        self._flows.set()
        self._holds = self._stalls = _none
        self._goes_on.set()

    def hold(self, matches: Matches) -> None:
        """Requests that match do not arrive, until `flow`; all others do."""
        self.held.clear()
        self._goes_on.clear()
        self._holds = matches

    def hold_deletions(self) -> None:
        """As an S3 server is asked for them."""
        self.hold(lambda data: data.startswith((b"DELETE ", b"POST ")))

    def delay(self, seconds: float) -> None:
        """Every HTTP request arrives so much later."""
        self._delay_seconds = seconds

    def lose_answers(self, count: int) -> None:
        """The next requests arrive and are done, but their connections break."""
        self._answers_to_lose = count

    def lose_answer_to(self, matches: Matches) -> None:
        """The next request that matches arrives and is done, but its connection breaks."""
        self._loses = matches

    def cut_after(self, request_bytes: int) -> None:
        """Close for good when this many bytes of requests have passed."""
        self._bytes_until_cut = request_bytes

    def end(self) -> None:
        self.close()
        self._port.close()

    def _listen(self) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, 10)
            except OSError:  # the server is down, and may come back
                _end(client)
                continue
            with self._lock:
                self._sockets |= {client, server}
            for args in ((client, server, self._passes), (server, client, self._comes_back)):
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, may) -> None:
        with suppress(OSError):
            while (data := source.recv(65_536)) and may(data):
                target.sendall(data)
        _end(source)
        _end(target)

    def _passes(self, data: bytes) -> bool:
        if self._delay_seconds and data.startswith(_HTTP):
            threading.Event().wait(self._delay_seconds)
        if self._holds(data):
            self.held.set()
            self._goes_on.wait(60)
        if self._stalls(data):
            self._flows.clear()
        if self._loses(data):
            self._loses = _none
            self.lose_answers(1)
        if self._bytes_until_cut is not None:
            self._bytes_until_cut -= len(data)
            if self._bytes_until_cut < 0:
                self.close()
                return False
        return True

    def _comes_back(self, data: bytes) -> bool:
        self.answered_at = time.time()
        if not self._flows.is_set():
            self.stalled.set()
            self._flows.wait(60)
        with self._lock:
            if self._answers_to_lose:
                self._answers_to_lose -= 1
                self.answers_lost += 1
                return False
        return True


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
