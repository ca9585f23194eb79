"""A way to a server with so many bytes a second, as a network has: what is sent there waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_PIECE_BYTES = 1 << 16


class Link:
    """All connections together send no more than that; answers come back at once."""

    def __init__(self, server_port: int, bytes_per_second: int) -> None:
        self._server = ("127.0.0.1", server_port)
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        """Until then the link is taken by what was sent before."""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Whoever waits in accept() would keep the port."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, 10)
            except OSError:
                client.close()
                continue
            for ends in ((client, server, self._wait), (server, client, _at_once)):
                threading.Thread(target=_hand_on, args=ends, name="link", daemon=True).start()

    def _wait(self, length_bytes: int) -> None:
        """Until so many more have passed."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = until = begin + length_bytes / self._bytes_per_second
        time.sleep(max(0.0, until - time.monotonic()))


def _at_once(_length_bytes: int) -> None:
    pass


def _hand_on(source: socket.socket, target: socket.socket, wait: Callable[[int], None]) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            wait(len(data))
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
