"""The coordinator's end of the control connections: one per slot, for one attempt."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass

from stillframe.coordinator.ports import SlotsPort
from stillframe.errors import StillframeError
from stillframe.ids import Attempt, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import JsonFields
from stillframe.protocol.messages import Order, Report, message_to_json, report_from_json
from stillframe.wire import (
    ConnectionLost,
    Doorman,
    address_of,
    listen,
    read_message,
    send_message,
)

_SLOT_SILENT_SECONDS_MAX = 50.0
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class SlotJoined:
    """A slot has proved the secret and waits for its start."""

    slot: SlotIndex
    pid: int
    data_address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class SlotReported:
    """A slot has said something."""

    slot: SlotIndex
    report: Report


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The connection to a slot has ended."""

    slot: SlotIndex
    reason: str


ControlEvent = SlotJoined | SlotReported | SlotLost


class ControlServer(SlotsPort):
    """Admits the slots of one attempt, each once; hands on what they say as events.

    `on_event` is called on this object's threads and must not block. `send` and `close` are for
    the job's thread.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        job: str,
        attempt: Attempt,
        slots: int,
        on_event: Callable[[ControlEvent], None],
    ) -> None:
        self._job = job
        self._attempt = attempt
        self._slots = slots
        self._on_event = on_event
        self._lock = threading.Lock()
        self._sockets: dict[SlotIndex, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False
        listener = listen(host)
        self.port = address_of(listener).port
        self._doorman = Doorman(listener, secret, self._on_peer, admit=self._refusal)

    def send(self, slot: SlotIndex, order: Order) -> None:
        """A slot that is gone is not an error here: its loss is an event of its own."""
        sock = self._sockets.get(slot)
        if sock is not None:
            with contextlib.suppress(ConnectionLost):
                send_message(sock, message_to_json(order))

    def broadcast(self, order: Order) -> None:
        for slot in list(self._sockets):
            self.send(slot, order)

    def close(self) -> None:
        """End all connections: slots that still run then end themselves."""
        self._closing = True
        self._doorman.close(_CLOSE_SECONDS)
        with self._lock:
            sockets = list(self._sockets.values())
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        for sock in sockets:
            sock.close()

    def _refusal(self, hello: JsonObject) -> str | None:
        return refusal(hello, self._job, self._attempt, self._slots, self._sockets)

    def _on_peer(self, sock: socket.socket, hello: JsonObject) -> None:
        joined = _joined(hello)
        slot = joined.slot
        # Slots report twice a second, so a silence this long means that the machine is gone.
        sock.settimeout(_SLOT_SILENT_SECONDS_MAX)
        thread = threading.Thread(
            target=self._listen_to, args=(slot, sock), name=f"stillframe-slot-{slot}", daemon=True
        )
        with self._lock:
            self._sockets[slot] = sock
            self._threads.append(thread)
        self._on_event(joined)
        thread.start()

    def _listen_to(self, slot: SlotIndex, sock: socket.socket) -> None:
        reason = "it closed its connection"
        try:
            while (message := read_message(sock)) is not None:
                self._on_event(SlotReported(slot, report_from_json(message)))
        except StillframeError as error:
            reason = str(error)
        if not self._closing:
            self._on_event(SlotLost(slot, reason))


def refusal(
    hello: JsonObject, job: str, attempt: Attempt, slots: int, registered: Container[SlotIndex]
) -> str | None:
    """Why whoever says this hello is not let in, by the coordinator of this attempt of the job."""
    try:
        fields = JsonFields(hello)
        kind, its_job = fields.text("kind"), fields.text("job")
        its_attempt, slot = fields.integer("attempt"), SlotIndex(fields.integer("slot"))
        _joined(hello)
    except ValueError as error:
        return f"the hello is not a slot's ({error})"
    if kind != "control" or its_job != job:
        return f"this is the coordinator of job {job!r}"
    if its_attempt != attempt:
        return f"attempt {its_attempt} is over, attempt {attempt} is running"
    if not 0 <= slot < slots:
        return f"there is no slot {slot}: the job has {slots}"
    if slot in registered:
        return f"slot {slot} has registered already in attempt {attempt}"
    return None


def _joined(hello: JsonObject) -> SlotJoined:
    """Raises `ValueError` for a hello that is not a slot's."""
    fields = JsonFields(hello)
    data_address = (fields.text("host"), fields.integer("port"))
    return SlotJoined(SlotIndex(fields.integer("slot")), fields.integer("pid"), data_address)
