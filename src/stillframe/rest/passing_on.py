"""Asks a driver on behalf of somebody else, who may have its token.

Rules of this file
------------------
1. Where a driver is, a file on the checkpoint store says, and who can write there can write that:
   so nobody is asked, and nobody is told a token, but on this machine or on a host that was named
   when the server was started.
2. Through no proxy, and along no redirection.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from stillframe.protocol.event_ring import frame
from stillframe.rest.registry import RegisteredJob, is_gone, registered_jobs

CONNECT_SECONDS_MAX = 1.0
"""A driver that does not answer by then is taken for gone, and its files for all there is."""
ANSWER_SECONDS_MAX = 30.0
_ANSWER_BYTES_MAX = 64 << 20
_PIECE_BYTES = 32 << 10


class NobodyThere(Exception):
    """The driver does not answer."""


@dataclass(frozen=True, slots=True)
class PassedAnswer:
    status: int
    text: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Driver:
    """Where one is, as a file says it, and as it may be asked."""

    url: str
    host: str
    port: int
    jid: str

    def ask(
        self,
        method: str,
        target: str,
        authorization: str | None = None,
        body: bytes = b"",
        seconds_max: float = ANSWER_SECONDS_MAX,
    ) -> PassedAnswer:
        """`target`: path and what is behind it. Raises `NobodyThere`."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS_MAX)
        try:
            connection.connect()
            connection.sock.settimeout(seconds_max)
            connection.request(method, target, body or None, self._headers(authorization))
            answer = connection.getresponse()
            text = answer.read(_ANSWER_BYTES_MAX).decode(errors="replace")
            kept = ("Content-Type", "Retry-After", "Allow", "WWW-Authenticate")
            headers = {name: value for name in kept if (value := answer.headers.get(name))}
            return PassedAnswer(answer.status, text, headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NobodyThere(str(error)) from error
        finally:
            connection.close()

    def _headers(self, authorization: str | None) -> dict[str, str]:
        # Sent on only if it is a header at all; what it says is for the driver to judge.
        is_plain = authorization is not None and authorization.isprintable()
        return {"Authorization": authorization} if is_plain and authorization else {}

    async def parts(
        self, target: str, headers: Mapping[str, str], gone: asyncio.Future[Any], seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """A stream of it, as it comes; at its end a word that it is over."""
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(self.host, self.port), CONNECT_SECONDS_MAX
            )
        except (OSError, TimeoutError):
            yield bye("the driver does not answer any more")
            return
        gone.add_done_callback(lambda _: writer.close())
        try:
            # Of version 1.0, so that it comes in one piece and not in chunks.
            lines = [f"GET {target} HTTP/1.0", f"Host: {self._host_header()}"]
            lines += [f"{name}: {value}" for name, value in headers.items() if value.isprintable()]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace"))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), seconds)
            if b" 200 " in head.partition(b"\r\n")[0]:
                while part := await asyncio.wait_for(reader.read(_PIECE_BYTES), seconds):
                    yield part
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
        if not gone.done():
            yield bye("the driver does not answer any more")

    def _host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bye(reason: str) -> bytes:
    return frame("bye", f'{{"reset": true, "reason": "{reason}"}}')


def driver_of(registered: RegisteredJob | None, forward: frozenset[str]) -> Driver | None:
    """None if there is none that may be asked; whether it answers is not known."""
    if registered is None or is_gone(registered):
        return None
    try:
        parts = urlsplit(registered.url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    is_whole = parts.scheme == "http" and not parts.username and parts.path in ("", "/")
    if not is_whole or host is None or port is None or not _may_be_asked(host, forward):
        return None
    return Driver(registered.url.rstrip("/"), host, port, registered.jid)


def _may_be_asked(host: str, forward: frozenset[str]) -> bool:
    if host.lower() in forward:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def token_of(driver: Driver) -> str | None:
    """What this user's own registry has for this very address."""
    found = (job.token for job in registered_jobs() if job.url.rstrip("/") == driver.url)
    return next(found, None)


def path_of(*parts: str) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in parts)
