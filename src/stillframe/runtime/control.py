"""The slot's end of the control connection: orders from the coordinator, reports to it."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
from collections.abc import Callable, Iterable

from stillframe.clock import Clock
from stillframe.errors import StillframeError
from stillframe.json_values import JsonObject
from stillframe.protocol.messages import Order, Report, message_to_json, order_from_json
from stillframe.wire import Address, ConnectionLost, MessageReader, connect, send_message

_CONNECT_SECONDS = 20.0
_SEND_SECONDS = 30.0
_REPORT_SECONDS = 0.5
_READ_BYTES = 65_536


class Control:
    """One authenticated connection; a thread of its own reads orders and reports progress.

    `on_order` and `on_lost` are called on that thread; `send` may be called by any.
    """

    def __init__(
        self,
        coordinator: Address,
        secret: bytes,
        hello: JsonObject,
        silent_seconds_max: float,
        clock: Clock,
        beat: Callable[[], Iterable[Report]],
        on_order: Callable[[Order], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._silent_seconds_max = silent_seconds_max
        self._clock = clock
        self._beat = beat
        self._on_order = on_order
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._send_lock = threading.Lock()
        self._socket = connect(coordinator, secret, hello, _CONNECT_SECONDS)
        self._socket.settimeout(_SEND_SECONDS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="stillframe-control", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        """Raises `ConnectionLost` when the coordinator is gone."""
        with self._send_lock:
            send_message(self._socket, message_to_json(report))

    def is_lost(self) -> bool:
        """Whether the coordinator is gone, also if nobody has noticed so far."""
        here = select.poll()
        here.register(self._socket, select.POLLIN)
        try:
            return bool(here.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):  # the other side may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SEND_SECONDS)
        self._selector.close()
        self._socket.close()

    def _run(self) -> None:
        try:
            self._converse()
        except (StillframeError, OSError) as error:
            if not self._closing.is_set():
                self._on_lost(f"the connection to the coordinator was lost ({error})")

    def _converse(self) -> None:
        reader = MessageReader()
        heard_at = reported_at = self._clock.monotonic_seconds()
        while not self._closing.is_set():
            is_readable = self._selector.select(_REPORT_SECONDS)
            data = self._socket.recv(_READ_BYTES) if is_readable else None
            now = self._clock.monotonic_seconds()
            if data == b"":
                raise ConnectionLost("it was closed")
            if data:
                heard_at = now
                for order in reader.receive(data):
                    self._on_order(order_from_json(order))
            elif now - heard_at > self._silent_seconds_max:
                raise ConnectionLost(f"nothing was heard for {now - heard_at:.0f} s")
            if now - reported_at >= _REPORT_SECONDS:
                reported_at = now
                for report in self._beat():
                    self.send(report)
