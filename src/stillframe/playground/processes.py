"""The processes of the playground: which there are, and what signals do to them.

Rules of this file
------------------
1. Only processes of the playground are sent signals: the driver that it has started, the slots that
   this driver tells of while they run, and what is above a slot up to its executor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from stillframe.errors import StillframeError
from stillframe.processes import kill

_EXECUTOR = b"CoarseGrainedExecutorBackend"
_MEMORY_BYTES_MIN = 3 << 30
"""What a driver with two executors takes, about."""
CLUSTER, LOCAL = "local-cluster[2,2,1024]", "local[4]"


def master_here() -> tuple[str, str | None]:
    """What Spark runs on, and why there is no executor to kill, if there is none."""
    available = _memory_available_bytes()
    if available is not None and available < _MEMORY_BYTES_MIN:
        return LOCAL, (
            f"with {available / (1 << 30):.1f} GB of memory left Spark runs in one process"
            f" ({LOCAL}): an executor is the driver itself; about {_MEMORY_BYTES_MIN >> 30} GB are"
            " needed for executors of their own"
        )
    return CLUSTER, None


def _memory_available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def parent_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):
        # Behind the name, which may hold anything: state and parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def executor_of(slot: int) -> int:
    """The process of the executor that a slot is a worker of."""
    pid: int | None = slot
    while pid is not None and pid > 1:
        with contextlib.suppress(OSError):
            if _EXECUTOR in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        pid = parent_of(pid)
    raise StillframeError(f"the slot with pid {slot} has no executor of its own to kill")


def freeze(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def thaw(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def thaw_later(pids: Iterable[int], seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, thaw, (list(pids),))
    timer.daemon = True
    timer.start()
    return timer


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        kill(pid)
