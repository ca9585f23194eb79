"""Sees when a slot's loop does not come back from a call, and tells the coordinator which.

Theory of operation
-------------------
The loop notes whose turn it is and counts its steps (`runtime/task`, `Turn`), which costs next to
nothing. With every report the control thread looks whether it has come on. If not, it looks at the
loop's stack: the outermost call of code that is not ours is the one that hangs if it is the same
call as before. The call itself is compared, not its line: a slow function that is called for row
after row of a large batch gets on.

Where C code holds the interpreter's lock no thread of it can look at anything, nor report. Then
`faulthandler` writes all stacks, from a thread that needs no lock, straight into a connection to
the coordinator, unless the control thread puts it off in time. That takes longer than for a call
that can be looked at: a process that was paused for as long (SIGSTOP, a frozen container) writes
its stacks the moment it goes on, while its threads run, and that now and then ends the process.

Sinks prepare and commit on other threads, which are looked at in the same way while they do. So do
blocking readers, but one that gives nothing may only have nothing to give: it is told, and no
attempt is ended for it, unless its contract says that it returns soon.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from types import FrameType

from stillframe.clock import Clock
from stillframe.json_values import JsonObject
from stillframe.protocol.messages import Hanging
from stillframe.runtime.chain import Chain
from stillframe.runtime.reading import ReaderAtWork
from stillframe.runtime.task import Subtask, Turn
from stillframe.runtime.writing import SinkWork
from stillframe.stacks import (
    Places,
    arguments_of,
    as_frame,
    called,
    frames_of,
    innermost_own,
    told_by_frames,
)
from stillframe.wire import Address, connect

_LOOK_SECONDS = 1.0
"""From then on the stack is looked at: so well is it known since when the call is there."""
_NOTICE_SECONDS_MAX = 10.0
_ENDING_NOTICE_SECONDS = 2.0
"""Of a slot that was told to end, and does not."""
_STANDSTILL_SECONDS_MAX = 25.0
"""Of a slot whose interpreter does not run at all."""
_CONNECT_SECONDS = 20.0


def notice_seconds(timeout_seconds: float) -> float:
    """How soon what ends the attempt after this long is told; 0: it never does."""
    return min(_NOTICE_SECONDS_MAX, timeout_seconds / 2 or _NOTICE_SECONDS_MAX)


class LoopWatch:
    """Looks at the loop that runs on the thread that makes this object; by another thread."""

    def __init__(self, turn: Turn, clock: Clock, stuck_timeout_seconds: float) -> None:
        self._turn = turn
        self._clock = clock
        self._notice_seconds = notice_seconds(stuck_timeout_seconds)
        self._thread_id = threading.get_ident()
        self._places = Places.here()
        self._steps = -1
        self._standing = _Standing(self._thread_id, 0.0)

    def look(self, *, is_ending: bool) -> Hanging | None:
        """What the loop hangs in. To be asked again and again."""
        now = self._clock.monotonic_seconds()
        if not self._turn.is_working or self._turn.steps != self._steps:
            self._steps, self._standing = self._turn.steps, _Standing(self._thread_id, now)
            return None
        self._standing.look(now, self._places)
        notice = _ENDING_NOTICE_SECONDS if is_ending else self._notice_seconds
        if self._standing.seconds < notice:
            return None
        subtask = self._turn.subtask
        operator = _operator_of(self._standing.frames)
        return self._standing.told(
            self._places, subtask, operator or (None if subtask is None else subtask.head_uid)
        )


class SinkWatch:
    """Looks at sinks that prepare and commit, which they do on threads of the slot's pools.

    A call of code that is not ours counts, however long our own sinks take for their own.
    """

    def __init__(self, clock: Clock, stuck_timeout_seconds: float) -> None:
        self._clock = clock
        self._notice_seconds = notice_seconds(stuck_timeout_seconds)
        self._places = Places.here()
        self._standing: dict[SinkWork, _Standing] = {}

    def look(self, subtasks: Iterable[Subtask]) -> Hanging | None:
        """What a sink hangs in. To be asked again and again."""
        now, before, self._standing = self._clock.monotonic_seconds(), self._standing, {}
        hanging: Hanging | None = None
        for subtask in subtasks:
            for sink in subtask.sinks:
                for thread, work in sink.at_work.items():
                    standing = before.get(work) or _Standing(thread, now)
                    self._standing[work] = standing
                    standing.look(now, self._places)
                    if standing.call is not None and standing.seconds >= self._notice_seconds:
                        told = standing.told(self._places, subtask, sink.uid)
                        about = told.called_with or work.what
                        hanging = hanging or replace(told, called_with=about)
        return hanging


class ReaderWatch:
    """Looks at blocking readers of sources, each of which has a thread of its own."""

    def __init__(self, clock: Clock, stuck_timeout_seconds: float) -> None:
        self._clock = clock
        self._notice_seconds = notice_seconds(stuck_timeout_seconds)
        self._places = Places.here()
        self._standing: dict[ReaderAtWork, _Standing] = {}

    def look(self, subtasks: Iterable[Subtask]) -> Hanging | None:
        """What a reader does not return from. To be asked again and again."""
        now, before, self._standing = self._clock.monotonic_seconds(), self._standing, {}
        hanging: Hanging | None = None
        for subtask in subtasks:
            at_work = subtask.reader_at_work
            if at_work is None:
                continue
            standing = before.get(at_work) or _Standing(at_work.thread, now)
            self._standing[at_work] = standing
            standing.look(now, self._places)
            if standing.seconds < self._notice_seconds or _waits_as_it_may(at_work, standing):
                continue
            # One that must return comes first: the driver ends the attempt for it.
            if hanging is None or hanging.may_wait:
                told = standing.told(self._places, subtask, subtask.head_uid)
                hanging = replace(told, code=at_work.name, may_wait=not at_work.must_return)
        return hanging


def _waits_as_it_may(at_work: ReaderAtWork, standing: _Standing) -> bool:
    """Whether it is one of our own that waits for records, or for Spark to feed them."""
    if at_work.must_return or not at_work.is_ours:
        return False
    call = standing.call
    return call is None or "site-packages" in call.f_code.co_filename


class _Standing:
    """A thread that has done nothing but one thing since a moment."""

    def __init__(self, thread_id: int, since: float) -> None:
        self.frames: list[FrameType] = []
        self.call: FrameType | None = None
        """The outermost of code that is not ours."""
        self.seconds = 0.0
        """For how long it has been in that call, or, without one, at that one thing."""
        self._thread_id = thread_id
        self._since = self._call_since = since

    def look(self, now: float, places: Places) -> None:
        if now - self._since < _LOOK_SECONDS:
            return
        self.frames = frames_of(self._thread_id)
        at = called([as_frame(frame) for frame in self.frames], places)
        call = self.frames[at] if at is not None else None
        if call is not self.call:
            # The first one seen has been there since the beginning, as far as anybody knows.
            self._call_since = self._since if self.call is None else now
            self.call = call
        self.seconds = now - (self._since if call is None else self._call_since)

    def told(self, places: Places, subtask: Subtask | None, operator: str | None) -> Hanging:
        call = self.call
        return Hanging(
            self.seconds,
            None if call is None else f"function {as_frame(call).function}",
            innermost_own([as_frame(frame) for frame in self.frames], places),
            told_by_frames(self.frames, places),
            None if subtask is None else subtask.name,
            None if subtask is None else subtask.ref.subtask,
            operator,
            None if call is None else arguments_of(call),
        )


def _operator_of(frames: list[FrameType]) -> str | None:
    """The one that is at work, by the chain's own calls."""
    for frame in reversed(frames):
        chain = frame.f_locals.get("self")
        if isinstance(chain, Chain):
            return chain.uid_at(frame.f_locals.get("position", 0))
    return None


class StackLine:
    """The connection into which all stacks are written when the interpreter stands still."""

    def __init__(
        self, coordinator: Address, secret: bytes, hello: JsonObject, timeout_seconds: float
    ) -> None:
        """To be made by the thread that is looked at; `timeout_seconds`: the heartbeat's."""
        places = Places.here()
        self._seconds = min(_STANDSTILL_SECONDS_MAX, timeout_seconds / 2)
        said: JsonObject = {
            **hello,
            "kind": "stacks",
            "thread": threading.get_ident(),
            "ours": places.ours,
            "libraries": os.pathsep.join(places.libraries),
        }
        self._socket = connect(coordinator, secret, said, _CONNECT_SECONDS)
        self.put_off()

    def put_off(self) -> None:
        """The interpreter runs: to be called again before time is up."""
        faulthandler.dump_traceback_later(self._seconds, file=self._socket.fileno())

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the other side may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
