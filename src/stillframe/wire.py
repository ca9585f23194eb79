"""Sockets between the parts of one job: who may speak, and JSON messages for control.

Theory of operation
-------------------
Every listening socket of a job is open to whoever can reach the machine. Both sides prove that they
know the job's secret before anything else is said, and neither sends the secret:

    server -> client   magic, version, server nonce
    client -> server   magic, version, client nonce, hello (JSON), proof over all of these
    server -> client   verdict (welcome, or refused and why), proof over all of these

A proof is an HMAC-SHA256 with the job's secret; it names the role, so that a proof cannot be sent
back to its maker, and covers both nonces, so that it cannot be used a second time. Whoever fails is
closed without another byte. What follows on the connection is neither encrypted nor signed: this
keeps strangers out, it does not hide the data from someone who can read the network.

Rules of this file
------------------
1. Nothing that arrives is unpickled or evaluated; every length is checked before it is believed.
2. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillframe.errors import StillframeError
from stillframe.json_values import JsonObject

PROTOCOL_VERSION = 1
HELLO_BYTES_MAX = 8 * 1024
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

_MAGIC = b"STLF"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_GREETING = struct.Struct(f"!4sH{_NONCE_BYTES}s")
_HELLO_HEAD = struct.Struct(f"!4sH{_NONCE_BYTES}sI")
_VERDICT_HEAD = struct.Struct("!BH")
_WELCOME, _REFUSED = 0, 1
_REFUSAL_BYTES_MAX = 1024
_LENGTH = struct.Struct("!I")
_READ_BYTES_MAX = 1024 * 1024

_log = logging.getLogger(__name__)

Admit = Callable[[JsonObject], str | None]
"""Why the peer that sent this hello, and knows the secret, is refused; None to welcome it."""


class ConnectionLost(StillframeError):
    """A connection could not be made or ended early; trying again may help."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a socket listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket, bound before anyone is told of it; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise StillframeError(
            f"cannot listen on {Address(host, port)} ({error}): choose an address of this machine"
            " and a free port"
        ) from error


def address_of(listener: socket.socket) -> Address:
    host, port = listener.getsockname()[:2]
    return Address(host, port)


# --- the handshake ---------------------------------------------------------------------------


def connect(
    address: Address, secret: bytes, hello: JsonObject, timeout_seconds: float
) -> socket.socket:
    """An authenticated, blocking connection to `address`, where `hello` says who we are.

    Raises ConnectionLost where trying again may help, another StillframeError where it will not.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        sock = socket.create_connection((address.host, address.port), timeout_seconds)
    except OSError as error:
        raise ConnectionLost(f"cannot reach {address} ({error}): is its process alive?") from error
    try:
        _configure(sock)
        _introduce(sock, address, secret, hello, deadline)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise ConnectionLost(
            f"{address} did not finish the handshake in {timeout_seconds:g} s ({error}): is its"
            " process alive and not overloaded?"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _introduce(
    sock: socket.socket, address: Address, secret: bytes, hello: JsonObject, deadline: float
) -> None:
    """The client's side of the handshake."""
    magic, version, server_nonce = _GREETING.unpack(
        _read_exactly(sock, _GREETING.size, deadline, address)
    )
    _check_protocol(magic, version, str(address))
    body = _to_json(hello)
    if len(body) > HELLO_BYTES_MAX:
        raise StillframeError(
            f"a hello of {len(body)} bytes is more than the {HELLO_BYTES_MAX} allowed: shorten the"
            " job's name"
        )
    client_nonce = secrets.token_bytes(_NONCE_BYTES)
    head = _HELLO_HEAD.pack(_MAGIC, PROTOCOL_VERSION, client_nonce, len(body))
    proof = _proof(secret, b"client", server_nonce, head, body)
    sock.sendall(head + body + proof)
    verdict_head = _read_exactly(sock, _VERDICT_HEAD.size, deadline, address)
    verdict, reason_bytes = _VERDICT_HEAD.unpack(verdict_head)
    if reason_bytes > _REFUSAL_BYTES_MAX:
        raise StillframeError(f"{address} answered the handshake with garbage: not one of our job")
    reason = _read_exactly(sock, reason_bytes, deadline, address)
    expected = _proof(secret, b"server", proof, verdict_head, reason)
    if not hmac.compare_digest(expected, _read_exactly(sock, _PROOF_BYTES, deadline, address)):
        raise StillframeError(
            f"{address} does not know the job's secret: another process took this port"
        )
    if verdict != _WELCOME:
        raise StillframeError(f"{address} refused us: {reason.decode('utf-8', 'replace')}")


def accept_authenticated(
    sock: socket.socket, secret: bytes, timeout_seconds: float, admit: Admit | None = None
) -> JsonObject:
    """The hello of whoever connected on `sock`, once it has proved that it knows the secret.

    On any error the caller closes `sock`. On return `sock` is blocking.
    """
    deadline = time.monotonic() + timeout_seconds
    handshake = _ServerHandshake(secret, admit)
    try:
        _configure(sock)
        sock.settimeout(timeout_seconds)
        sock.sendall(handshake.greeting)
        while handshake.verdict is None:
            handshake.receive(_read_exactly(sock, handshake.bytes_wanted, deadline, "a newcomer"))
        sock.sendall(handshake.verdict)
        sock.settimeout(None)
    except OSError as error:
        raise ConnectionLost(
            f"a newcomer did not finish the handshake in {timeout_seconds:g} s ({error})"
        ) from error
    if handshake.refusal is not None:
        raise StillframeError(f"a newcomer was refused: {handshake.refusal}")
    return handshake.hello


class _ServerHandshake:
    """The server's side, fed with bytes as they come; sends and waits for nothing itself."""

    def __init__(self, secret: bytes, admit: Admit | None) -> None:
        self._secret = secret
        self._admit = admit
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = bytearray()
        self._needed_bytes = _HELLO_HEAD.size
        self.greeting = _GREETING.pack(_MAGIC, PROTOCOL_VERSION, self._nonce)
        self.hello: JsonObject = {}
        self.refusal: str | None = None
        self.verdict: bytes | None = None
        """What to send to the client at the end; None while more must be received."""

    @property
    def bytes_wanted(self) -> int:
        """How many bytes may be read now: never one that belongs to what follows the handshake."""
        return self._needed_bytes - len(self._received)

    def receive(self, data: bytes) -> None:
        """Raises a StillframeError for a stranger, who must be closed without another byte."""
        assert self.verdict is None
        self._received += data
        if self.bytes_wanted == 0 and self._needed_bytes == _HELLO_HEAD.size:
            self._check_head()
        elif self.bytes_wanted == 0:
            self._check_proof()

    def _check_head(self) -> None:
        magic, version, _nonce, hello_bytes = _HELLO_HEAD.unpack(self._received)
        _check_protocol(magic, version, "a newcomer")
        if not 2 <= hello_bytes <= HELLO_BYTES_MAX:
            raise StillframeError(
                f"a newcomer announced a hello of {hello_bytes} bytes, more than the"
                f" {HELLO_BYTES_MAX} allowed, and was turned away"
            )
        self._needed_bytes += hello_bytes + _PROOF_BYTES

    def _check_proof(self) -> None:
        received = bytes(self._received)
        head = received[: _HELLO_HEAD.size]
        body, proof = received[_HELLO_HEAD.size : -_PROOF_BYTES], received[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", self._nonce, head, body)):
            raise StillframeError("a newcomer does not know the job's secret and was turned away")
        self.hello = _object_from_json(body)
        self.refusal = self._admit(self.hello) if self._admit else None
        reason = (self.refusal or "").encode()[:_REFUSAL_BYTES_MAX]
        verdict = _WELCOME if self.refusal is None else _REFUSED
        verdict_head = _VERDICT_HEAD.pack(verdict, len(reason))
        server_proof = _proof(self._secret, b"server", proof, verdict_head, reason)
        self.verdict = verdict_head + reason + server_proof


def _proof(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    """The role's proof over these parts, each with its length so that none can lend to the next.

    The server's covers the client's proof and with it both nonces and the hello.
    """
    mac = hmac.new(secret, b"stillframe " + role, hashlib.sha256)
    for part in parts:
        mac.update(_LENGTH.pack(len(part)) + part)
    return mac.digest()


def _check_protocol(magic: bytes, version: int, who: str) -> None:
    if magic != _MAGIC:
        raise StillframeError(f"{who} does not speak Stillframe's protocol: not one of our job")
    if version != PROTOCOL_VERSION:
        raise StillframeError(
            f"{who} speaks version {version} of the protocol, this process version"
            f" {PROTOCOL_VERSION}: install the same Stillframe on the driver and all executors"
        )


def _read_exactly(sock: socket.socket, count: int, deadline: float, who: Address | str) -> bytes:
    data = bytearray()
    while len(data) < count:
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(remaining_seconds)
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionLost(
                f"{who} closed the connection during the handshake: it does not know the same job"
                " secret, or it is shutting down"
            )
        data += part
    return bytes(data)


def _configure(sock: socket.socket) -> None:
    """Small messages leave at once; a peer whose machine vanished is noticed in half a minute."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has every one of these; where one is missing its default stands.
    for option, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# --- the door --------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Stranger:
    sock: socket.socket
    handshake: _ServerHandshake
    deadline: float


class Doorman:
    """Answers a listening socket on a thread of its own and lets in who knows the secret.

    All strangers are heard side by side, so a slow or silent one delays nobody. `on_peer` is called
    on the doorman's thread with a blocking socket, which then belongs to the callee, and must not
    block. The listening socket belongs to the doorman.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        on_peer: Callable[[socket.socket, JsonObject], None],
        *,
        admit: Admit | None = None,
        strangers_max: int = 64,
        stranger_seconds_max: float = 5.0,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._on_peer = on_peer
        self._admit = admit
        self._strangers_max = strangers_max
        self._stranger_seconds_max = stranger_seconds_max
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._bell, self._bell_rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._accept_again_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="stillframe-doorman", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Close the door and everyone still at it; those let in are not touched. Idempotent."""
        with contextlib.suppress(OSError):
            self._bell_rope.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            while True:
                ready = [key.fileobj for key, _ in self._selector.select(self._wait_seconds())]
                if self._bell in ready:
                    return
                for sock in ready:
                    if sock is self._listener:
                        self._accept()
                    elif sock in self._strangers:
                        assert isinstance(sock, socket.socket)
                        self._hear(self._strangers[sock])
                self._tidy()
        finally:
            for stranger in list(self._strangers.values()):
                self._drop(stranger)
            self._selector.close()
            for own in (self._listener, self._bell, self._bell_rope):
                own.close()

    def _wait_seconds(self) -> float | None:
        due = [stranger.deadline for stranger in self._strangers.values()]
        if self._accept_again_at is not None:
            due.append(self._accept_again_at)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _tidy(self) -> None:
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.deadline <= now]:
            self._drop(stranger)
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            sock, _address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of file descriptors: the newcomer stays in the backlog, and asking again at once
            # would only burn the processor.
            self._selector.unregister(self._listener)
            self._accept_again_at = time.monotonic() + 0.1
            return
        if len(self._strangers) >= self._strangers_max:
            self._drop(next(iter(self._strangers.values())))
        sock.setblocking(False)
        deadline = time.monotonic() + self._stranger_seconds_max
        stranger = _Stranger(sock, _ServerHandshake(self._secret, self._admit), deadline)
        self._strangers[sock] = stranger
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            _configure(sock)
            sock.send(stranger.handshake.greeting)
        except OSError:
            self._drop(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        handshake = stranger.handshake
        try:
            data = stranger.sock.recv(handshake.bytes_wanted)
            if not data:
                self._drop(stranger)
                return
            handshake.receive(data)
            if handshake.verdict is None:
                return
            # A fresh socket's buffer holds far more than a verdict.
            stranger.sock.send(handshake.verdict)
        except BlockingIOError:
            return
        except (OSError, StillframeError) as error:
            _log.info("turned away at the door: %s", error)
            self._drop(stranger)
            return
        self._let_in(stranger)

    def _let_in(self, stranger: _Stranger) -> None:
        if stranger.handshake.refusal is not None:
            self._drop(stranger)
            return
        self._forget(stranger)
        stranger.sock.setblocking(True)
        try:
            self._on_peer(stranger.sock, stranger.handshake.hello)
        except Exception:
            # One peer that cannot be served must not close the door to the others.
            _log.exception("a peer was let in but could not be served")
            stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.sock]
        self._selector.unregister(stranger.sock)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.sock.close()


# --- messages --------------------------------------------------------------------------------


def send_message(sock: socket.socket, message: JsonObject) -> None:
    """Send one message; a sender with several threads takes turns by its own lock."""
    body = _to_json(message)
    _check_message_bytes(len(body))
    try:
        sock.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise ConnectionLost(f"a message could not be sent ({error}): the peer is gone") from error


def read_message(sock: socket.socket) -> JsonObject | None:
    """The next message from a blocking socket; None when the peer closed after a whole one."""
    reader = MessageReader()
    while True:
        try:
            data = sock.recv(min(reader.bytes_wanted, _READ_BYTES_MAX))
        except OSError as error:
            raise ConnectionLost(f"no message came ({error}): the peer is gone") from error
        if not data:
            reader.end()
            return None
        for message in reader.receive(data):
            return message


class MessageReader:
    """Cuts received bytes into messages, for whoever reads a socket as its bytes come."""

    def __init__(self) -> None:
        self._received = bytearray()

    @property
    def bytes_wanted(self) -> int:
        """How many bytes complete the next message, as far as is known."""
        needed_bytes = _LENGTH.size
        if len(self._received) >= _LENGTH.size:
            needed_bytes += _LENGTH.unpack_from(self._received)[0]
        return needed_bytes - len(self._received)

    def receive(self, data: bytes) -> list[JsonObject]:
        """The messages these bytes complete. Raises for what cannot be one of our messages."""
        self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            (body_bytes,) = _LENGTH.unpack_from(self._received)
            _check_message_bytes(body_bytes)
            if len(self._received) < _LENGTH.size + body_bytes:
                break
            messages.append(
                _object_from_json(bytes(self._received[_LENGTH.size : _LENGTH.size + body_bytes]))
            )
            del self._received[: _LENGTH.size + body_bytes]
        return messages

    def end(self) -> None:
        """The peer closed: raises if that was in the middle of a message."""
        if self._received:
            raise ConnectionLost(
                f"the connection ended inside a message, after {len(self._received)} of its bytes:"
                " the peer is gone"
            )


def _check_message_bytes(count: int) -> None:
    if count > MESSAGE_BYTES_MAX:
        raise StillframeError(
            f"a control message of {count} bytes is more than the {MESSAGE_BYTES_MAX} allowed:"
            " keep large state in files, not in messages"
        )


def _to_json(message: JsonObject) -> bytes:
    return json.dumps(message, separators=(",", ":"), default=_plain).encode()


def _plain(value: object) -> Any:
    """Any mapping or sequence is JSON to us, json knows dict, list and tuple only."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be sent in a message")


def _object_from_json(body: bytes) -> JsonObject:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StillframeError(f"a message of {len(body)} bytes is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise StillframeError(
            f"a message is a JSON object, but a {type(value).__name__} came: the peer is not one"
            " of ours"
        )
    return value
