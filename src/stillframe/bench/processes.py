"""Runs one program to its end, within a time limit, and leaves nothing of it behind.

Theory of operation
-------------------
A program starts others: a JVM, its Python workers, a second process. It gets a session of its own,
so that Ctrl-C at the terminal reaches us and not half of them, and a mark in its environment, which
all its descendants inherit: some of them (PySpark's daemon) leave the process group, so the group
alone does not tell who belongs to it. When the program has ended, in whichever way, whoever still
carries the mark is asked to end and, a few seconds later, killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stillframe.processes import await_ended

MARK = "STILLFRAME_BENCH_RUN"
"""The variable by which the processes of one run know each other."""
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    exit_code: int | None
    """Negative: by this signal, as subprocess has it. None: it was ended at its time limit."""
    seconds: float
    left_behind: int
    """How many processes it had not ended itself."""

    @property
    def is_too_late(self) -> bool:
        return self.exit_code is None


def run_program(
    command: Sequence[str],
    *,
    directory: Path,
    output: Path,
    errors: Path,
    seconds_max: float,
    environ: Mapping[str, str] | None = None,
    grace_seconds: float = _GRACE_SECONDS,
) -> Ended:
    """Run it in this directory; what it prints goes to the two files.

    Whatever happens, an interrupt included, no process of it is left when this returns or raises.
    Raises OSError where there is no such program.
    """
    mark = uuid.uuid4().hex
    marked = {**(os.environ if environ is None else environ), MARK: mark}
    began = time.monotonic()
    with open(output, "wb") as out, open(errors, "wb") as err:
        program = subprocess.Popen(
            list(command),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=marked,
            start_new_session=True,
        )
    exit_code = None
    try:
        exit_code = program.wait(seconds_max)
    except subprocess.TimeoutExpired:
        pass
    finally:
        seconds = time.monotonic() - began
        with _undisturbed():
            left_behind = _end_all(program, mark, grace_seconds)
    return Ended(exit_code, seconds, left_behind)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C waits until the processes are gone; it would leave some of them otherwise."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, to which no interrupt comes
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_all(program: subprocess.Popen[bytes], mark: str, grace_seconds: float) -> int:
    """How many there were, the program itself not counted if it had ended."""
    found = _alive(program, mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _alive(program, mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        _await_gone(program, mark, grace_seconds)
    return len(found)


def _await_gone(program: subprocess.Popen[bytes], mark: str, seconds_max: float) -> None:
    """Until none is left; one that is to end may have started another meanwhile."""
    deadline = time.monotonic() + seconds_max
    while (alive := _alive(program, mark)) and (left := deadline - time.monotonic()) > 0:
        await_ended(alive, left)


def _alive(program: subprocess.Popen[bytes], mark: str) -> set[int]:
    own = {program.pid} if program.poll() is None else set()
    return own | _marked(mark) | _of_group(program.pid)


def _marked(mark: str) -> set[int]:
    """Everybody whose environment has the mark; empty where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for pid in _pids():
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def _of_group(group: int) -> set[int]:
    """Those of the group that are not just waiting to be noticed by their parent."""
    found = set()
    for pid in _pids():
        with suppress(OSError):
            state, _, of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.add(pid)
    return found


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())
