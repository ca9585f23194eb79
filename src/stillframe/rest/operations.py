"""What takes longer than a request: begun by one, asked about by others.

Theory of operation
-------------------
Whoever asks for a checkpoint, a savepoint or another parallelism gets a number back at once and
asks with it what became of it, as in Flink. The work is done on a thread of its own, which only
waits for the job; the job does not know about it.

Rules of this file
------------------
1. Few operations run at a time, and few that are over are remembered: the oldest are forgotten.
2. A client that did not hear the answer may ask again under the number it chose: it gets the same
   operation, not another. Under the same number something else is refused.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stillframe.errors import StillframeError
from stillframe.json_values import JsonObject
from stillframe.rest.refusals import Refused

Kind = Literal["checkpoint", "savepoint", "rescaling", "cancel", "difference"]

RUNNING_MAX = 8
KEPT_MAX = 200
log = logging.getLogger("stillframe.rest")


@dataclass(frozen=True, slots=True)
class Done:
    result: JsonObject


@dataclass(frozen=True, slots=True)
class Failed:
    kind: str
    """The name of the error's class."""
    reason: str


@dataclass(slots=True)
class Operation:
    """One thing that was asked for; `outcome` is None while it is under way."""

    asked: JsonObject
    outcome: Done | Failed | None = None
    ended_at_seconds: float = 0.0
    is_heard: bool = False
    """Whether somebody has been told the outcome."""


OperationTold: TypeAlias = Callable[[str, Kind, str, Done | Failed | None], None]
"""The job's id, what it is, its number, and what became of it; None: it has begun."""


class Operations:
    """Those of all jobs of a driver. Every member may be used from any thread."""

    def __init__(self, tell: OperationTold | None = None) -> None:
        """`tell`: of what is begun and of what is over; it must not wait."""
        self._tell = tell or (lambda jid, kind, trigger_id, outcome: None)
        self._lock = threading.Condition()
        self._operations: dict[tuple[str, Kind, str], Operation] = {}

    def begin(
        self,
        jid: str,
        kind: Kind,
        trigger_id: str | None,
        asked: JsonObject,
        do: Callable[[], JsonObject],
        refuse_new: Callable[[], None],
    ) -> str:
        """Have it done in the background; answers the number to ask about it with.

        `refuse_new` raises if it is too late to begin anything; not asked if it began before.
        """
        trigger_id = (trigger_id or uuid.uuid4().hex).lower()
        operation = Operation(asked)
        with self._lock:
            known = self._operations.get((jid, kind, trigger_id))
            if known is not None:
                _refuse_other(known, asked, trigger_id)
                return trigger_id
            refuse_new()
            self._make_room()
            self._operations[jid, kind, trigger_id] = operation
        self._tell(jid, kind, trigger_id, None)

        def run() -> None:
            outcome = _outcome(do)
            operation.ended_at_seconds = time.monotonic()
            operation.outcome = outcome  # last: whoever sees it takes it for over
            self._tell(jid, kind, trigger_id, outcome)

        name = f"stillframe-rest-{kind}-{trigger_id[:8]}"
        threading.Thread(target=run, name=name, daemon=True).start()
        return trigger_id

    def find(self, jid: str, kind: Kind, trigger_id: str) -> Done | Failed | None:
        """What became of it so far."""
        with self._lock:
            operation = self._operations.get((jid, kind, trigger_id.lower()))
            if operation is not None and operation.outcome is not None:
                operation.is_heard = True
                self._lock.notify_all()
        if operation is None:
            raise Refused(
                404,
                f"no {kind} of this job has the trigger id {trigger_id}: the driver that took the"
                f" request may have been another one, or {KEPT_MAX} newer ones came since",
            )
        return operation.outcome

    def await_heard(self, seconds_max: float) -> None:
        """Until somebody has heard what has ended of late, or is about to: a job that is stopped
        may be all that its process was there for, and who stopped it asks every now and then."""
        since_seconds = time.monotonic() - seconds_max
        with self._lock:
            self._lock.wait_for(lambda: not self._has_news(since_seconds), seconds_max)

    def _has_news(self, since_seconds: float) -> bool:
        return any(
            each.outcome is None or (not each.is_heard and each.ended_at_seconds > since_seconds)
            for (_, kind, _), each in self._operations.items()
            if kind != "cancel"  # nobody can ask about it
        )

    def _make_room(self) -> None:
        over = [key for key, each in self._operations.items() if each.outcome is not None]
        running = len(self._operations) - len(over)
        if running >= RUNNING_MAX:
            raise Refused(
                429,
                f"{running} operations are under way already: ask again when one of them is done",
                {"Retry-After": "1"},
            )
        for key in over[: max(0, len(self._operations) + 1 - KEPT_MAX)]:
            del self._operations[key]


def _refuse_other(known: Operation, asked: JsonObject, trigger_id: str) -> None:
    if known.asked != asked:
        raise Refused(
            409,
            f"the trigger id {trigger_id} was used for something else before: leave it out, or"
            " choose another",
        )


def _outcome(do: Callable[[], JsonObject]) -> Done | Failed:
    try:
        return Done(do())
    except StillframeError as error:
        return Failed(type(error).__name__, str(error))
    except Exception as error:
        log.exception("an operation asked for over HTTP failed")
        return Failed(type(error).__name__, f"{type(error).__name__}: {error}")
