"""Ports for servers that must be told one."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A port of our own for as long as this is open: whoever asks for any port gets another one,
    and whoever asks for this one, with SO_REUSEADDR, may listen to it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])
