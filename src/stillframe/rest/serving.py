"""The one HTTP server of this process: it starts with the first job that wants it.

While the process lives it goes on answering for jobs that have ended.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading

from stillframe.config import LOOPBACK, JobConfig
from stillframe.coordinator.query import Query
from stillframe.errors import StartRefused
from stillframe.rest.server import RestServer

TOKEN_VARIABLE = "STILLFRAME_TOKEN"
_TOKEN_CHARACTERS_MIN = 16
_EXIT_SECONDS_MAX = 2.0
_lock = threading.Lock()
_server: RestServer | None = None


def serve(query: Query) -> RestServer | None:
    """Answer for this query, before its job begins; None if it wants no server.

    Raises `StartRefused` if the port it wants cannot be had.
    """
    global _server
    config = query.config
    if config.rest_port == "off":
        return None
    with _lock:
        if _server is None:
            _server = RestServer(config.rest_bind_address, config.rest_port, chosen_token())
        else:
            _refuse_another(_server, config, query.name)
        _server.add(query)
        return _server


def _refuse_another(server: RestServer, config: JobConfig, name: str) -> None:
    """What was left to us fits any server."""
    port_differs = config.rest_port not in (0, server.port)
    host_differs = config.rest_bind_address not in (LOOPBACK, server.bind_host)
    if port_differs or host_differs:
        raise StartRefused(
            f"job {name!r} wants the HTTP API on {config.rest_bind_address} port"
            f" {config.rest_port}, but this driver serves it on {server.bind_host} port"
            f" {server.port} already: give all its jobs the same restPort and restBindAddress"
        )


def chosen_token() -> str:
    """What the environment says, so that clients on other machines can know it; else any."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(32)
    if len(given) < _TOKEN_CHARACTERS_MIN or not given.isascii() or not given.isprintable():
        raise StartRefused(
            f"{TOKEN_VARIABLE} has {len(given)} characters: a token has at least"
            f" {_TOKEN_CHARACTERS_MIN}, all of them printable ASCII; unset it for one by chance"
        )
    return given


@atexit.register
def _withdraw() -> None:
    """After the jobs have ended (`spark/launch.py`), so that nobody looks for them here."""
    if _server is not None:
        _server.withdraw(_EXIT_SECONDS_MAX)
        _server.await_heard(_EXIT_SECONDS_MAX)
        _server.close()  # those who follow are told good-bye
