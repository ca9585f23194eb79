"""Waits for what no event tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_WAIT_SECONDS_MAX = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.01)
