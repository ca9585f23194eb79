"""What the driver tells, folded into where the job is now; others wait here for what they need."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stillframe.errors import StillframeError

_KEPT_MAX = 200
_PATIENCE_SECONDS = 30.0
"""After which a wait is told, with what it is for."""
_LOOK_SECONDS = 0.2
log = logging.getLogger("stillframe.playground")
T = TypeVar("T")


class TookTooLong(StillframeError):
    """What was waited for has not come."""


class Left(StillframeError):
    """Whoever waited is not to wait any longer."""


@dataclass(slots=True)
class JobNow:
    """As the driver has last told."""

    driver: int | None = None
    """Its process; None: there is none."""
    attempt: int = 0
    restored_from: int | None = None
    pids: tuple[int, ...] = ()
    """Of the slots, while they run."""
    completed: int = 0
    committed: int = 0
    is_running: bool = False
    failure: str | None = None
    """Of an attempt or of the job, the last one."""
    has_ended: bool = False
    refused: str | None = None
    blame: dict[str, Any] | None = None
    damage: str | None = None
    rescaled: str | None = None


@dataclass(slots=True)
class Waiting:
    """What somebody waits for."""

    what: str
    since: float = field(default_factory=time.monotonic)

    @property
    def sentence(self) -> str | None:
        """Told when it takes long."""
        seconds = time.monotonic() - self.since
        if seconds < _PATIENCE_SECONDS:
            return None
        return f"has waited for {seconds:.0f} s: {self.what}"


class Following:
    """Reads the lines of a driver after the other. Every member may be used from any thread."""

    def __init__(self, on_committed: Callable[[int], None]) -> None:
        self.now = JobNow()
        self.lines: deque[dict[str, Any]] = deque(maxlen=_KEPT_MAX)
        self.waiting: Waiting | None = None
        self.is_leaving = False
        self.on_long: Callable[[str], object] = lambda sentence: None
        """Called once for each wait that takes long, with what it is for."""
        self._changed = threading.Condition()
        self._on_committed = on_committed

    def read(self, lines: Iterable[str], pid: int) -> None:
        """Until the driver has ended; on a thread of its own."""
        with self._changed:
            self.now.driver = pid
        for line in lines:
            if line.endswith("\n"):  # else it was killed while it wrote
                self.tell(json.loads(line))
        with self._changed:
            if self.now.driver == pid:
                self.now.driver, self.now.pids, self.now.is_running = None, (), False
            self._changed.notify_all()

    def tell(self, told: dict[str, Any]) -> None:
        """One line of a driver."""
        with self._changed:
            self.lines.append(told)
            _fold(self.now, told)
            self._changed.notify_all()
        if told["kind"] == "checkpoint_committed":
            try:
                self._on_committed(told["checkpoint_id"])
            except Exception:  # what comes next is to be heard all the same
                log.exception("checkpoint %s cannot be followed", told["checkpoint_id"])

    def changed(self) -> None:
        """Have those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def leave(self) -> None:
        """Have those who wait give up."""
        with self._changed:
            self.is_leaving = True
            self._changed.notify_all()

    def wait(self, what: str, ask: Callable[[], T | None], seconds_max: float = 300.0) -> T:
        """The first answer that is not None; `what` is said if it does not come."""
        deadline = time.monotonic() + seconds_max
        self.waiting = waiting = Waiting(what)
        is_told = False
        try:
            while True:
                if self.is_leaving:
                    raise Left(f"left while it waited: {what}")
                if not is_told and waiting.sentence is not None:
                    is_told = True
                    self.on_long(waiting.sentence)
                answer = ask()
                if answer is not None:
                    return answer
                if time.monotonic() > deadline:
                    last = self.lines[-1]["text"] if self.lines else "nothing"
                    raise TookTooLong(
                        f"waited {seconds_max:g} s in vain until {what}; last the driver told:"
                        f" {last}"
                    )
                with self._changed:
                    self._changed.wait(_LOOK_SECONDS)
        finally:
            self.waiting = None


def _fold(now: JobNow, told: dict[str, Any]) -> None:
    match told["kind"]:
        case "attempt_started":
            now.attempt, now.restored_from = told["attempt"], told["restored_from"]
            now.has_ended, now.refused = False, None
        case "slots_running":
            now.pids, now.is_running = tuple(told["pids"]), True
        case "checkpoint_completed":
            now.completed = told["checkpoint_id"]
        case "checkpoint_committed":
            now.committed = told["checkpoint_id"]
        case "checkpoint_damaged":
            now.damage = told["text"]
        case "rescaled":
            now.rescaled = told["text"]
        case "attempt_failed":
            now.pids, now.is_running = (), False
            now.failure, now.blame = told["reason"], told["blame"]
        case "refused":
            now.refused = told["text"]
        case "ended":
            now.pids, now.is_running, now.has_ended = (), False, True
            now.failure = told["failure"] or now.failure
