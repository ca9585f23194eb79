"""Waits for processes to end; run as a script, ends those that do not end by force.

Theory of operation
-------------------
Linux gives a descriptor for a process, which is readable from its end on, also if it is somebody
else's child and if its parent has not noticed: so one call waits for all of them. Where there is
none (another system, an old kernel, a sandbox), they are looked at every few milliseconds.

Rules of this file
------------------
1. It imports nothing but the standard library: as a script it is run without any package, and must
   be there at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from typing import NoReturn

_LOOK_SECONDS = 0.02
_END_SECONDS_MAX = 5.0


def await_ended(pids: Iterable[int], seconds_max: float) -> list[int]:
    """Those that still run when time is up.

    A process has ended when it runs no more, whether its parent has noticed or not. Children of
    this process are left for it to notice; where processes can only be looked at, they are not.
    """
    deadline = time.monotonic() + seconds_max
    watched: dict[int, int] = {}
    looked_at: list[int] = []
    try:
        for pid in dict.fromkeys(pids):
            try:
                watched[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                pass  # it has ended
            except (OSError, AttributeError):
                looked_at.append(pid)
        return _watch(watched, deadline) + _look(looked_at, deadline)
    finally:
        for descriptor in watched:
            os.close(descriptor)


def _watch(watched: dict[int, int], deadline: float) -> list[int]:
    """Processes by their descriptors."""
    running = dict(watched)
    poll = select.poll()
    for descriptor in running:
        poll.register(descriptor, select.POLLIN)
    is_over = False
    while running and not is_over:
        left_seconds = max(0.0, deadline - time.monotonic())
        is_over = left_seconds == 0.0  # a last look, also for whoever does not want to wait
        for descriptor, _ in poll.poll(left_seconds * 1000):
            poll.unregister(descriptor)
            del running[descriptor]
    return list(running.values())


def _look(pids: list[int], deadline: float) -> list[int]:
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return left


def _runs(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def kill(pid: int) -> None:
    """At once and without a chance; that it has ended already is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _main(arguments: list[str]) -> NoReturn:
    """EXIT_CODE SECONDS_MAX PID…: wait for them, kill those that are left, end with the code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    exit_code, seconds_max, *pids = arguments
    left = await_ended(map(int, pids), float(seconds_max))
    for pid in left:
        kill(pid)
    await_ended(left, _END_SECONDS_MAX)
    os._exit(int(exit_code))


if __name__ == "__main__":
    _main(sys.argv[1:])
