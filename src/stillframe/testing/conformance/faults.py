"""A process that dies, or stands still, in the middle of a call: at one of the lines of its code.

Theory of operation. Python calls a trace function before each line. The lines of the class under
test are counted as they are first reached in a call, so that a loop counts once; at the given one
the call is ended by an exception that no `except Exception` holds up, or it waits until it is let
go. What a `finally` does on the way out, a killed process would not do: what is left behind may be
less than after a real kill, and never more.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import stillframe

Answer = TypeVar("Answer")

_OURS = os.path.dirname(os.path.abspath(stillframe.__file__)) + os.sep
_CONNECTORS = os.path.join(_OURS, "connectors") + os.sep
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PAUSE_SECONDS_MAX = 30.0


class Killed(BaseException):
    """The process is gone, as far as the call can tell."""


class Fault:
    """What happens at the given line of a call, counted from 1; 0: nothing."""

    def __init__(self, line: int) -> None:
        self._line = line
        self.at: str | None = None
        """Where it happened; None: the call was over before."""

    def during(self, call: Callable[[], Answer]) -> Answer:
        """Make the call, on this thread."""
        if not self._line:
            return call()
        before, lines = sys.gettrace(), _Lines(self._line, self._reached)
        sys.settrace(lines.on_call)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _reached(self, place: str) -> None:
        self.at = place
        self.happen()

    def happen(self) -> None:
        raise Killed(self.at)


class Pause(Fault):
    """The call waits at its line until `go_on`."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self._may_go_on = threading.Event()
        self.stands = threading.Event()
        """Set when the call waits, or is over."""

    def during(self, call: Callable[[], Answer]) -> Answer:
        try:
            return super().during(call)
        finally:
            self.stands.set()

    def happen(self) -> None:
        self.stands.set()
        self._may_go_on.wait(_PAUSE_SECONDS_MAX)

    def go_on(self) -> None:
        self._may_go_on.set()


class _Lines:
    """Counts the lines of code that is neither a library's nor the engine's."""

    def __init__(self, line: int, reached: Callable[[str], None]) -> None:
        self._left = line
        self._reached = reached
        self._seen: set[tuple[CodeType, int]] = set()

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if self._left and _is_theirs(frame.f_code.co_filename) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        line = (frame.f_code, frame.f_lineno)
        if event == "line" and self._left and line not in self._seen:
            self._seen.add(line)
            self._left -= 1
            if not self._left:
                name = os.path.basename(frame.f_code.co_filename)
                self._reached(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        return self._on_line


def _is_theirs(file: str) -> bool:
    if file.startswith(_CONNECTORS):
        return True
    return not (file.startswith((_OURS, *_LIBRARIES, "<")) or "site-packages" in file)
