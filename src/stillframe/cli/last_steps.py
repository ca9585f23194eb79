"""Ends by force what a Spark driver has started: its JVM, the Python daemon, the slots.

Theory of operation
-------------------
A driver that kills its slots and then waits for Spark to go would see its own job react: restart,
or note a failure that was none. So this process becomes another program first (`exec`): with its
number, which whoever started it waits for, but without its threads. That program, `processes.py`
run as a script, waits for the processes to end, kills those that do not, and ends with the exit
code.

A JVM whose driver is gone ends by itself and tidies its temporary files up; that is what it is
given a few seconds for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from stillframe import processes
from stillframe.processes import await_ended, kill

_LAUNCHING_SECONDS_MAX = 5.0
_PROC = Path("/proc")


def descendants_of(pid: int) -> list[int]:
    """Children, their children and so on, of this moment; none where nobody can tell."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    ahead = [pid]
    while ahead:
        for child in children.pop(ahead.pop(), ()):
            found.append(child)
            ahead.append(child)
    return found


def _parents() -> Iterable[tuple[int, int]]:
    """Every process with its parent."""
    if _PROC.joinpath("self", "stat").exists():
        return _parents_in_proc()
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, timeout=5, check=True
        )
        pairs = [line.split() for line in listed.stdout.splitlines()]
        return [(int(child), int(parent)) for child, parent in pairs]
    return []


def _parents_in_proc() -> Iterable[tuple[int, int]]:
    for place in _PROC.iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # Behind the name, which may hold anything: state and parent.
                fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(place.name), int(fields[1])


def end_launching_jvm() -> None:
    """End a JVM whose start was interrupted: PySpark has forgotten it, and it would go on to its
    beginning only to find that its driver is gone."""
    found = _launching()
    for pid in found:
        kill(pid)
    await_ended(found, _LAUNCHING_SECONDS_MAX)


def _launching() -> list[int]:
    """Spark's processes below this one, the first of them first; none where nobody can tell."""
    return [pid for pid in descendants_of(os.getpid()) if _is_spark(pid)]


def _is_spark(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes()
        return any(name in command for name in (b"spark-submit", b"org.apache.spark."))
    return False


def end_by_force(exit_code: int, jvm: int | None, seconds_max: float) -> NoReturn:
    """End this process, the JVM and everything below it; `jvm` None: one that is just starting.

    The slots are killed at once, and the JVM after `seconds_max` if it has not gone by itself.
    """
    if jvm is None:
        jvm = next(iter(_launching()), None)
    below = descendants_of(jvm) if jvm is not None else []
    for pid in below:
        kill(pid)
    if jvm is None:
        os._exit(exit_code)
    pids = [str(pid) for pid in (jvm, *below)]
    script = [processes.__file__, str(exit_code), str(seconds_max), *pids]
    # What is open is closed with it, and with its input the JVM loses what it waits for.
    os.execv(sys.executable, [sys.executable, "-I", "-S", *script])
