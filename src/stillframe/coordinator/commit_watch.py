"""Sinks that are called on the driver: told if one takes long, given up if it hangs.

A thread of the driver cannot be ended. So a call that has not returned past `stuckTimeout` ends the
job and not only the attempt: the next one would call the same function with the same epoch while
the first call still runs. Work that Spark does meanwhile is no hang, however long it takes.
"""

from __future__ import annotations

import math
import threading

from stillframe.coordinator.history import Waiting
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.sinks import CommitFailed, DriverSinks
from stillframe.errors import Blame, UserCodeError
from stillframe.graph.launch import Deployment
from stillframe.ids import OperatorUid
from stillframe.protocol.manifests import Manifest
from stillframe.stacks import Places, as_frame, frames_of, innermost_own, told_by_frames

TELL_SECONDS = 5.0


class CommitWatch:
    """Looks at the sink that is called on the driver. Used by the job's thread alone."""

    def __init__(self, parts: JobParts, deployment: Deployment) -> None:
        self._sinks = parts.sinks
        self._clock = parts.clock
        self._history = parts.history
        self._stuck_timeout_seconds = parts.config.stuck_timeout_seconds
        self._deployment = deployment
        self._worked_at_seconds = -math.inf

    def look(self) -> CommitFailed | None:
        """Every few seconds: tell what has taken long; what is given up is answered, and is not
        waited for any more."""
        called, now = self._sinks.under_way, self._clock.monotonic_seconds()
        if called is not None and called.awaits is not None:
            self._history.begin("commit", Waiting(called.awaits))
            return None
        if called is None or now - called.began_at_seconds < TELL_SECONDS:
            self._history.over("commit")
            return None
        if self._deployment.works():
            self._worked_at_seconds = now
        frames, places = frames_of(called.thread.ident or 0), Places.here()
        stack = told_by_frames(frames, places)
        said = f"{called.sink} has had epoch {called.epoch} for"
        why = self._deployment.shortage()
        seconds = now - called.began_at_seconds
        shown = "".join(f"\n    {line}" for line in stack.splitlines())
        told = f"{said} {seconds:.0f} s{f': {why}' if why else ''}{shown}"
        self._history.begin("commit", Waiting(told))
        idle_seconds = now - max(called.began_at_seconds, self._worked_at_seconds)
        if not 0 < self._stuck_timeout_seconds <= idle_seconds:
            return None
        self._sinks.left_behind = called.thread
        line = innermost_own([as_frame(frame) for frame in frames], places)
        return CommitFailed(
            f"{said} {seconds:.0f} s and has not returned{f' ({line})' if line else ''}: a function"
            " on the driver cannot be ended, so the job ends; end the driver's process, correct the"
            " cause and start the job again, it is given the epoch again; raise stuckTimeout if it"
            " needs longer",
            "permanent",
            Blame(called.sink, "Hang", False, line, stack, called.uid, f"epoch {called.epoch}"),
        )

    def commit(self, uid: OperatorUid, manifest: Manifest) -> None:
        """Commit and wait for it; raises what the sink raises, or that it is given up."""
        call = _Call(self._sinks, uid, manifest)
        call.start()
        call.join(TELL_SECONDS)
        while call.is_alive():
            given_up = self.look()
            if given_up is not None:
                raise UserCodeError(given_up.reason, given_up.blame)
            call.join(TELL_SECONDS)
        self._history.over("commit")
        if call.error is not None:
            raise call.error


class _Call(threading.Thread):
    """One commit, on a thread that can be left behind."""

    def __init__(self, sinks: DriverSinks, uid: OperatorUid, manifest: Manifest) -> None:
        super().__init__(name="stillframe-epoch", daemon=True)
        self._commit = sinks.commit
        self._about = uid, manifest
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._commit(*self._about)
        except BaseException as error:  # for whoever waits for it
            self.error = error
