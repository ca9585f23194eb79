"""The connections of the HTTP API, by uvicorn, with bounds that it does not have.

Rules of this file
------------------
1. Nothing that a client does costs a job anything: few connections are open at a time, bodies are
   short, and a whole request has to arrive within a bound, however slowly its bytes come.
2. Whatever is not read to its end closes its connection: what follows could be taken for a request.
3. It is imported by the server's own thread, so that no start of a job waits for uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, aclosing
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeAlias

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from stillframe.rest.api import BODY_BYTES_MAX, Answer, Api, Request, refusal
from stillframe.rest.refusals import Refused
from stillframe.rest.streams import OwnStream, Stream, Streams
from stillframe.rest.workers import Workers

CONNECTIONS_MAX = 32
_HEAD_BYTES_MAX = 64 << 10
_DRAINED_BYTES_MAX = 1 << 20
_KERNEL_BYTES = 64 << 10
_BYE_SECONDS = 1.0
"""How long those who follow a stream have to take its last word."""
_CLOSE: dict[str, str] = {"Connection": "close"}
log = logging.getLogger("stillframe.rest")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


async def serve(
    listening: socket.socket,
    api: Api,
    streams: Streams,
    workers: Workers,
    answering: AbstractContextManager[None],
    request_seconds_max: float,
    closing: asyncio.Event,
) -> None:
    """Answer everybody who connects, until it is told to close."""
    config = Config(
        _Application(api, streams, workers, answering, request_seconds_max),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",
        access_log=False,
        h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()

    def connection() -> _Connection:
        return _Connection(config, state, loop, request_seconds_max)

    server = await loop.create_server(connection, sock=listening)
    telling = asyncio.ensure_future(streams.run())
    await closing.wait()
    server.close()
    streams.close()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=_BYE_SECONDS)
    for each in list(state.connections):
        each.transport.abort()
    for task in state.tasks:
        task.cancel()
    await asyncio.gather(telling, *state.tasks, return_exceptions=True)
    workers.close()


class _Connection(H11Protocol):
    """One connection, request after request, each within a time."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        loop: asyncio.AbstractEventLoop,
        request_seconds_max: float,
    ) -> None:
        super().__init__(config, state, {"connection": self}, loop)
        self._seconds_max = request_seconds_max
        self._too_late: asyncio.TimerHandle | None = None
        self._has_begun = False
        """Whether something of the request that is awaited has come."""
        self._says_no_more = False
        """The client has ended its side, and may still want to hear the answer."""
        self.is_followed = False
        """The answer is a stream: a client that ends its side has had enough."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What a client does not read is bounded in the kernel too.
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES
        )
        if len(self.connections) > CONNECTIONS_MAX:
            sentence = f"{CONNECTIONS_MAX} connections are open already: try again soon"
            self._refuse(Refused(503, sentence, {"Retry-After": "1"}))
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE and self.conn.their_state is not h11.SEND_BODY:
            self._await_nothing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open."""
        self._says_no_more = True
        is_answered = self.cycle is None or self.cycle.response_complete
        return not is_answered and not self.is_followed

    def on_response_complete(self) -> None:
        if self._says_no_more:
            self.transport.close()
        self._has_begun = bool(self.conn.trailing_data[0])
        self._await_request()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the wait above does it

    def _await_request(self) -> None:
        self._await_nothing()
        self._too_late = self.loop.call_later(self._seconds_max, self._give_up)

    def _await_nothing(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _give_up(self) -> None:
        if self._has_begun:
            sentence = f"the request did not arrive within {self._seconds_max:g} s"
            self._refuse(Refused(408, sentence))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What the reader of HTTP itself refuses: called while it is handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(
            Refused(status, f"this is no HTTP request that can be understood: {error or msg}")
        )

    def _refuse(self, error: Refused) -> None:
        """Without a request, or before all of it has come; the connection ends with it."""
        self._await_nothing()
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        answer = refusal(error)
        head = h11.Response(
            status_code=answer.status,
            headers=_headers(answer, is_last=True),
            reason=HTTPStatus(answer.status).phrase.encode(),
        )
        for event in (head, h11.Data(data=_body(answer)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Application:
    """What uvicorn calls with each request."""

    def __init__(
        self,
        api: Api,
        streams: Streams,
        workers: Workers,
        answering: AbstractContextManager[None],
        stalled_seconds_max: float,
    ) -> None:
        self._api = api
        self._streams = streams
        self._workers = workers
        self._answering = answering
        self._stalled_seconds_max = stalled_seconds_max

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            self._api.traffic.sent_bytes += len(message.get("body") or b"")
            await send(message)

        await self._answer(scope, receive, counted)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            _refuse_head(scope)
            body = await _read_body(headers, receive)
        except Refused as error:
            await _send(send, refusal(error), is_last=True)
            return
        if body is None:  # the client has gone
            return
        with self._answering:
            request = _request(scope, headers, body)
            answer = await self._workers.run(lambda: self._api.answer(request))
            if isinstance(answer, Answer):
                await _send(send, answer)
                return
        await self._follow(answer, scope, receive, send)

    async def _follow(
        self, stream: Stream | OwnStream, scope: Message, receive: Receive, send: Send
    ) -> None:
        try:
            with self._streams.entered(), self._api.traffic.following():
                await self._send_stream(stream, scope, receive, send)
        except Refused as error:
            await _send(send, refusal(error))

    async def _send_stream(
        self, stream: Stream | OwnStream, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Until the client closes it, or is sent away; its connection ends with it."""
        headers = _headers(Answer(200, None, {"Content-Type": "text/event-stream"}), is_last=True)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        gone = asyncio.ensure_future(receive())
        connection: _Connection = scope["state"]["connection"]
        connection.is_followed = True
        try:
            async with aclosing(self._streams.parts(stream, gone)) as parts:
                async for part in parts:
                    await self._send_part(send, part, is_last=False)
            await self._send_part(send, b"", is_last=True)
            # It may take a while to read what is left.
            connection.loop.call_later(self._stalled_seconds_max, connection.transport.abort)
        except TimeoutError:  # it reads nothing: what it was sent is dropped
            connection.transport.abort()
        finally:
            gone.cancel()

    async def _send_part(self, send: Send, part: bytes, *, is_last: bool) -> None:
        """Waits for room; raises `TimeoutError` if there is none for long."""
        message = {"type": "http.response.body", "body": part, "more_body": not is_last}
        await asyncio.wait_for(send(message), self._stalled_seconds_max)


def _request(scope: Message, headers: dict[str, str], body: bytes) -> Request:
    query = scope["query_string"].decode("latin-1")
    return Request(
        scope["method"],
        scope["raw_path"].decode("latin-1") + (f"?{query}" if query else ""),
        headers.get("host"),
        headers.get("authorization"),
        body,
        headers.get("origin"),
        headers.get("sec-fetch-site"),
        headers.get("last-event-id"),
    )


def _refuse_head(scope: Message) -> None:
    """What its reader lets pass: it bounds only a head that comes in pieces."""
    if scope["http_version"] not in ("1.0", "1.1"):
        raise Refused(505, f"HTTP {scope['http_version']} is not spoken here: use 1.1")
    length = len(scope["raw_path"]) + sum(len(each) for pair in scope["headers"] for each in pair)
    if length > _HEAD_BYTES_MAX:
        raise Refused(431, f"the head of the request has more than {_HEAD_BYTES_MAX} bytes")


async def _read_body(headers: dict[str, str], receive: Receive) -> bytes | None:
    length = int(headers.get("content-length", "0"))
    if length > BODY_BYTES_MAX and "expect" in headers:
        raise _too_long(length)  # before it is sent
    body, is_more = b"", True
    while is_more and len(body) <= _DRAINED_BYTES_MAX:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        is_more = message["more_body"]
    # A client that was still sending would not have heard why it is refused.
    if len(body) > BODY_BYTES_MAX:
        raise _too_long(max(length, len(body)))
    return body


def _too_long(length: int) -> Refused:
    return Refused(
        413, f"the body has {length} bytes, but {BODY_BYTES_MAX} are the most there may be"
    )


async def _send(send: Send, answer: Answer, is_last: bool = False) -> None:
    headers = _headers(answer, is_last)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": _body(answer)})


def _body(answer: Answer) -> bytes:
    if isinstance(answer.body, str):
        return answer.body.encode()
    return b"" if answer.body is None else json.dumps(answer.body, allow_nan=False).encode()


def _headers(answer: Answer, is_last: bool) -> list[tuple[bytes, bytes]]:
    headers = {"Server": "stillframe", "Date": formatdate(usegmt=True)}
    if answer.body is not None:
        headers["Content-Type"] = "application/json"
        headers["Content-Length"] = str(len(_body(answer)))
    headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    headers |= answer.headers
    if is_last:
        headers |= _CLOSE
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
