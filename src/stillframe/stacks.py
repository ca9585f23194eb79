"""What a thread is doing, for people: the call of code that is not ours, and the stack it is in.

Rules of this file
------------------
1. Nothing here runs while all goes well. A stack is looked at from outside, by another thread, or
   comes as the text that `faulthandler` writes when the interpreter does not run at all.
2. It imports nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

_FRAMES_MAX = 20
_TEXT_CHARACTERS_MAX = 6_000
_VALUE_CHARACTERS_MAX = 120
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)


@dataclass(frozen=True, slots=True)
class Places:
    """Where code lies on the machine that runs it."""

    ours: str
    libraries: tuple[str, ...]

    @classmethod
    def here(cls) -> Places:
        paths = sysconfig.get_paths()
        libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
        return cls(ours, tuple(sorted(os.path.abspath(path) + os.sep for path in libraries)))


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def frames_of(thread_id: int) -> list[FrameType]:
    """The stack of a thread, the outermost call first; empty if it has ended."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def as_frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def called(frames: Sequence[Frame], places: Places) -> int | None:
    """Which of these is the call of the user's code by ours; None: there is none.

    What calls us, such as Spark's worker, is not meant. Code in a library is taken for the user's
    only if there is no other: a job may be installed there.
    """
    is_ours = [frame.file.startswith(places.ours) for frame in frames]
    if not any(is_ours):
        return None
    inside = range(is_ours.index(True) + 1, len(frames))
    own = [at for at in inside if not is_ours[at] and not _is_library(frames[at], places)]
    others = [at for at in inside if not is_ours[at] and "site-packages" in frames[at].file]
    return next(iter(own or others), None)


def innermost_own(frames: Sequence[Frame], places: Places) -> str | None:
    """Where the user's code is, within the call that `called` tells."""
    at = called(frames, places)
    if at is None:
        return None
    own = [
        frame
        for frame in frames[at:]
        if not frame.file.startswith(places.ours) and not _is_library(frame, places)
    ]
    return str((own or frames[at : at + 1])[-1])


def _is_library(frame: Frame, places: Places) -> bool:
    return frame.file.startswith(("<frozen ", *places.libraries))


def told_by_frames(frames: Sequence[FrameType], places: Places) -> str:
    """As Python prints a traceback, without our frames around the user's."""
    at = called([as_frame(frame) for frame in frames], places)
    own = list(frames[-_FRAMES_MAX:] if at is None else frames[at:][-_FRAMES_MAX:])
    walked = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in own)
    return bounded("".join(walked.format()).rstrip())


def bounded(text: str) -> str:
    cut = text if len(text) <= _TEXT_CHARACTERS_MAX else "…" + text[-_TEXT_CHARACTERS_MAX:]
    return cut.encode("utf-8", "backslashreplace").decode()


def arguments_of(frame: FrameType) -> str | None:
    """What the function was called with, `self` apart; of objects that are no plain data only
    their class, because their own repr might do anything."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    told = [f"{name}={_shown(values[name])}" for name in names if name in values and name != "self"]
    return bounded(", ".join(told)) or None


def _shown(value: Any) -> str:
    if not isinstance(value, _PLAIN):
        return f"<{type(value).__name__}>"
    try:
        text = repr(value)
    except Exception as error:  # of what it holds
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[:_VALUE_CHARACTERS_MAX] + "…"


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def dumped_frames(text: str, thread_id: int) -> list[Frame]:
    """The stack of one thread out of what `faulthandler` has written, the outermost call first."""
    frames: list[Frame] = []
    is_meant = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            is_meant = int(thread[1], 16) == thread_id
        elif is_meant and (call := _CALL.match(line)):
            frames.append(Frame(call[1], int(call[2]), call[3]))
    return frames[::-1]
