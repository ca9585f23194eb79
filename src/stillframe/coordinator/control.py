"""The coordinator's end of the control connections: one per slot, for one attempt."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from stillframe.coordinator.ports import SlotsPort
from stillframe.errors import StillframeError
from stillframe.ids import Attempt, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import JsonFields
from stillframe.protocol.messages import Order, Report, message_to_json, report_from_json
from stillframe.stacks import Places
from stillframe.wire import (
    ConnectionLost,
    Doorman,
    address_of,
    listen,
    read_message,
    send_message,
)

_CLOSE_SECONDS = 5.0
_DUMP_BYTES_MAX = 1 << 20
_DUMPED_SECONDS = 0.5
"""How long nothing more comes of a dump that is whole."""


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
    is_silent: bool = False
    """Whether nothing was heard of it for too long."""


@dataclass(frozen=True, slots=True)
class StacksDumped:
    """The interpreter of a slot stands still: the stacks of all its threads."""

    slot: SlotIndex
    text: str
    loop_id: int
    """The thread of the slot's loop."""
    places: Places


ControlEvent = SlotJoined | SlotReported | SlotLost | StacksDumped


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
        silent_seconds_max: float = 50.0,
    ) -> None:
        self._job = job
        self._attempt = attempt
        self._slots = slots
        self._on_event = on_event
        self._silent_seconds_max = silent_seconds_max
        self._lock = threading.Lock()
        self._sockets: dict[SlotIndex, socket.socket] = {}
        self._stacks: list[socket.socket] = []
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
            sockets = [*self._sockets.values(), *self._stacks]
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
        is_control = hello["kind"] == "control"
        # Slots report twice a second, so a silence this long means that the machine is gone.
        sock.settimeout(self._silent_seconds_max if is_control else _DUMPED_SECONDS)
        thread = threading.Thread(
            target=self._listen_to if is_control else self._take_dumps,
            args=(slot, sock) if is_control else (_without_stacks(hello), sock),
            name=f"stillframe-slot-{slot}{'' if is_control else '-stacks'}",
            daemon=True,
        )
        with self._lock:
            self._threads.append(thread)
            if is_control:
                self._sockets[slot] = sock
            else:
                self._stacks.append(sock)
        if is_control:
            self._on_event(joined)
        thread.start()

    def _take_dumps(self, empty: StacksDumped, sock: socket.socket) -> None:
        """What `faulthandler` writes has no end that could be seen, only a pause behind it."""
        text = b""
        while not self._closing:
            try:
                data = sock.recv(_DUMP_BYTES_MAX)
            except TimeoutError:
                if text:
                    self._on_event(replace(empty, text=text.decode(errors="replace")))
                    text = b""
                continue
            except OSError:
                return
            if not data:
                return
            text = (text + data)[-_DUMP_BYTES_MAX:]

    def _listen_to(self, slot: SlotIndex, sock: socket.socket) -> None:
        reason, heard_at = "it closed its connection", time.monotonic()
        try:
            while (message := read_message(sock)) is not None:
                heard_at = time.monotonic()
                self._on_event(SlotReported(slot, report_from_json(message)))
        except StillframeError as error:
            reason = str(error)
        is_silent = time.monotonic() - heard_at >= self._silent_seconds_max
        if is_silent:
            reason = f"it has sent nothing for {self._silent_seconds_max:g} s (heartbeatTimeout)"
        if not self._closing:
            self._on_event(SlotLost(slot, reason, is_silent))


def refusal(
    hello: JsonObject, job: str, attempt: Attempt, slots: int, registered: Container[SlotIndex]
) -> str | None:
    """Why whoever says this hello is not let in, by the coordinator of this attempt of the job."""
    try:
        fields = JsonFields(hello)
        kind, its_job = fields.text("kind"), fields.text("job")
        its_attempt, slot = fields.integer("attempt"), SlotIndex(fields.integer("slot"))
        _joined(hello)
        if kind == "stacks":
            _without_stacks(hello)
    except ValueError as error:
        return f"the hello is not a slot's ({error})"
    if kind not in ("control", "stacks") or its_job != job:
        return f"this is the coordinator of job {job!r}"
    if its_attempt != attempt:
        return f"attempt {its_attempt} is over, attempt {attempt} is running"
    if not 0 <= slot < slots:
        return f"there is no slot {slot}: the job has {slots}"
    if slot in registered and kind == "control":
        return f"slot {slot} has registered already in attempt {attempt}"
    return None


def _joined(hello: JsonObject) -> SlotJoined:
    """Raises `ValueError` for a hello that is not a slot's."""
    fields = JsonFields(hello)
    data_address = (fields.text("host"), fields.integer("port"))
    return SlotJoined(SlotIndex(fields.integer("slot")), fields.integer("pid"), data_address)


def _without_stacks(hello: JsonObject) -> StacksDumped:
    """Who will dump, and how that is to be read. Raises `ValueError` if it does not say so."""
    fields = JsonFields(hello)
    places = Places(fields.text("ours"), tuple(fields.text("libraries").split(os.pathsep)))
    return StacksDumped(SlotIndex(fields.integer("slot")), "", fields.integer("thread"), places)
