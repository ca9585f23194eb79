"""How the interpreter of a slot's process shares its time: between threads, and with collections.

Both settings are put back when the slot has ended, because Spark reuses workers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_SECONDS = 0.0005
"""A batch passes two threads of either slot on its way, and each has to wait this long for a loop
that is busy in Python. Python's own 5 ms were most of the latency of a busy job."""
_YOUNG_OBJECTS = 50_000
"""So many new objects before Python looks for garbage among them; its own 700 are a few rows. Rows
are tuples that no cycle goes through, and looking at them took a sixth of a job of Python rows."""


@contextmanager
def quick_threads() -> Iterator[None]:
    """Let a thread that has something to do interrupt the others sooner."""
    before_seconds = sys.getswitchinterval()
    sys.setswitchinterval(min(before_seconds, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before_seconds)


@contextmanager
def spared_collections() -> Iterator[None]:
    """Let the garbage collector pass over all that is there now, and come less often.

    Modules and restored state are there to stay. A full collection looked at each of their objects
    and stopped all threads for 50 to 70 ms, in a slot with no state at all.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(_YOUNG_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
