"""The HTTP server of a driver: connections, threads and bytes; `api.py` makes the answers.

Rules of this file
------------------
1. Nothing that a client does costs a job anything: few connections are open at a time, bodies are
   short, and a whole request has to arrive within a bound, however slowly its bytes come.
2. Whatever is not read to its end closes its connection: what follows could be taken for a request.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stillframe.clock import Clock, SystemClock
from stillframe.coordinator.query import Query
from stillframe.errors import StartRefused
from stillframe.rest.announcing import Announcement
from stillframe.rest.api import BODY_BYTES_MAX, Answer, Api, Request, refusal
from stillframe.rest.jobs import ServedJobs
from stillframe.rest.operations import Operations
from stillframe.rest.refusals import Refused
from stillframe.rest.registry import this_process
from stillframe.storage.store import canonical_address

CONNECTIONS_MAX = 32
REQUEST_SECONDS_MAX = 10.0
"""From its first byte, or from the end of the last one: idle connections are closed too."""
_LINE_BYTES_MAX = 65_536
_DRAINED_BYTES_MAX = 1 << 20
_CLOSE_SECONDS_MAX = 10.0
log = logging.getLogger("stillframe.rest")


class RestServer:
    """Serves all jobs of a driver. Every member may be used from any thread."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        token: str,
        clock: Clock | None = None,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        """Listens when it returns; raises `StartRefused` if it cannot."""
        self._jobs = ServedJobs(clock or SystemClock())
        self._api = Api(self._jobs, Operations(), token, bind_host, is_loopback(bind_host))
        try:
            self._connections = _Connections(bind_host, port, self._api, request_seconds_max)
        except (OSError, UnicodeError) as error:
            raise StartRefused(
                f"the HTTP API cannot be served on {bind_host} port {port} ({error}): give another"
                " restPort or restBindAddress, or 0 for any free port, or off"
            ) from error
        self.bind_host, self.asked_port = bind_host, port
        self._announcements: list[Announcement] = []
        self._thread = threading.Thread(
            target=self._connections.serve_forever, name="stillframe-rest", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._connections.server_address[1])

    @property
    def url(self) -> str:
        """As others find it: where all addresses are listened on, by the machine's name."""
        host = self.bind_host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def token(self) -> str:
        return self._api.token

    def add(self, query: Query) -> None:
        """Answer for this query, from before it begins; tell others of it while it runs."""
        job = self._jobs.add(query)
        location = query.config.checkpoint_location
        if location is not None:  # who looks it up may be in another working directory
            location = canonical_address(location)
        registered = this_process(
            job.jid, job.name, self.url, self.token, location, job.started_at_ms
        )
        self._announcements = [each for each in self._announcements if not each.is_over]
        self._announcements.append(Announcement(query, registered))

    def withdraw(self, seconds_max: float) -> None:
        """Wait until jobs that have ended are no longer announced."""
        deadline = time.monotonic() + seconds_max
        for each in self._announcements:
            each.await_end(max(0.0, deadline - time.monotonic()))

    def await_heard(self, seconds_max: float) -> None:
        """Wait until those who asked for something that has just ended know it."""
        self._api.operations.await_heard(seconds_max)
        self._connections.await_answered(seconds_max)

    def close(self) -> None:
        self._connections.shutdown()
        self._connections.server_close()
        self._connections.end_all()
        self._thread.join(_CLOSE_SECONDS_MAX)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Connections(ThreadingHTTPServer):
    """A thread for each of a few connections; more are turned away at once."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, host: str, port: int, api: Api, request_seconds_max: float) -> None:
        self.api = api
        self.request_seconds_max = request_seconds_max
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._answering = 0
        self._answered = threading.Condition()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Connection)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name server who we are.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._turn_away(request)
            return
        with self._open_lock:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            self._let_go(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def _let_go(self, request: socket.socket) -> None:
        with self._open_lock:
            self._open.discard(request)
        self._free.release()

    def _turn_away(self, request: socket.socket) -> None:
        sentence = f"{CONNECTIONS_MAX} connections are open already: try again soon"
        body = json.dumps({"errors": [sentence]})
        with contextlib.suppress(OSError):
            request.settimeout(1.0)
            request.sendall(
                "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
                f"{body}".encode()
            )
        self.shutdown_request(request)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around everything between a request and the last byte of its answer."""
        with self._answered:
            self._answering += 1
        try:
            yield
        finally:
            with self._answered:
                self._answering -= 1
                self._answered.notify_all()

    def await_answered(self, seconds_max: float) -> None:
        """Wait until no answer is on its way."""
        with self._answered:
            self._answered.wait_for(lambda: self._answering == 0, seconds_max)

    def end_all(self) -> None:
        with self._open_lock:
            still_open = list(self._open)
        for each in still_open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection from %s broke", client_address, exc_info=True)


class _TimedReader(io.RawIOBase):
    """What a socket receives until a moment; the socket's own timeout begins with every byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic()

    def allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Connection(BaseHTTPRequestHandler):
    """One connection, request after request."""

    server: _Connections
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self._reader = _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader, 8192)

    def handle_one_request(self) -> None:
        self.command, self.requestline, self.request_version = "", "", self.protocol_version
        self.close_connection = True
        try:
            self._reader.allow(self.server.request_seconds_max)
            self.raw_requestline = self.rfile.readline(_LINE_BYTES_MAX + 1)
            if not self.raw_requestline:
                return
            self._reader.allow(self.server.request_seconds_max)
            self._answer_one()
        except TimeoutError:
            self.close_connection = True
            if self.requestline:
                seconds = self.server.request_seconds_max
                sentence = f"the request did not arrive within {seconds:g} s"
                self._send(refusal(Refused(408, sentence)))
        except OSError:  # the client has gone
            self.close_connection = True

    def _answer_one(self) -> None:
        if len(self.raw_requestline) > _LINE_BYTES_MAX:
            self.send_error(414, "its first line is too long")
            return
        if not self.parse_request():
            return
        try:
            body = self._read_body()
        except Refused as error:
            self.close_connection = True
            self._send(refusal(error))
            return
        request = Request(
            self.command,
            self.path,
            self.headers.get("Host"),
            self.headers.get("Authorization"),
            body,
        )
        with self.server.answering():
            self._send(self.server.api.answer(request))

    def _read_body(self) -> bytes:
        if "Transfer-Encoding" in self.headers:
            raise Refused(411, "a body without Content-Length is not read: send its length")
        given = self.headers.get_all("Content-Length") or ["0"]
        if len(given) != 1 or not re.fullmatch(r"[0-9]{1,18}", given[0].strip(), re.ASCII):
            raise Refused(400, f"Content-Length is a number of bytes, not {given[0][:50]!r}")
        length = int(given[0])
        if length > BODY_BYTES_MAX:
            self._drain(length)
            raise Refused(
                413, f"the body has {length} bytes, but {BODY_BYTES_MAX} are the most there may be"
            )
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client went away in the middle of a body")
        return body

    def _drain(self, length: int) -> None:
        """A client that is still sending would not hear why it is refused."""
        if "Expect" in self.headers:
            return
        left = min(length, _DRAINED_BYTES_MAX)
        with contextlib.suppress(TimeoutError):
            while left > 0 and (data := self.rfile.read1(min(left, 65_536))):
                left -= len(data)

    def handle_expect_100(self) -> bool:
        """A body that is too long is refused before it is sent."""
        length = self.headers.get("Content-Length", "")
        if length.isascii() and length.isdigit() and len(length) < 18:
            return int(length) > BODY_BYTES_MAX or super().handle_expect_100()
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the reader of HTTP itself refuses."""
        self.close_connection = True
        sentence = f"this is no HTTP request that can be understood: {message or 'it is broken'}"
        self._send(refusal(Refused(code, sentence)))

    def _send(self, answer: Answer) -> None:
        data = b"" if answer.body is None else json.dumps(answer.body, allow_nan=False).encode()
        self.connection.settimeout(self.server.request_seconds_max)
        self.send_response(answer.status)
        if answer.body is not None:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        return "stillframe"  # and not which Python this is

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
