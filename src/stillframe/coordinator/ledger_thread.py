"""The threads that touch the store while an attempt runs: one writes, one deletes.

Theory of operation
-------------------
The job's thread never waits for the store: what it wants done is a letter, and what became of it is
mail. Letters that write are carried out by the ledger thread, which owns the ledger for as long as
the attempt runs. Deletions have a thread of their own: a storage that takes long over them, or does
not answer, delays neither an entry of the log nor what follows from it.

When the attempt is over, what is to be written is waited for; then what is to be deleted, a while;
and when both threads have ended the job's thread owns the ledger again.

Rules of this file
------------------
1. Every letter is carried out or given up; none is carried out twice.
2. `Fenced`, `Unsettled` and whatever nobody has foreseen end the writing: what waits to be written
   or deleted is given up, because the files may be somebody else's by now. Anything else that goes
   wrong is told, and the next letter is carried out.
3. Both lines are bounded. What waits to be written is little (one checkpoint or savepoint, and what
   is known of those in flight), so more than the caller reckons with is a mistake. If a storage
   deletes more slowly than checkpoints come, the oldest deletions are given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from stillframe.coordinator.ledger_mail import LedgerEvent, LedgerFailed
from stillframe.coordinator.ports import LedgerPort, Letter
from stillframe.errors import Fenced, StillframeError

log = logging.getLogger("stillframe")

_DELETIONS_MAX = 1000
_CLOSE_SECONDS_MAX = 5.0


class _Line:
    """Letters that one thread carries out in their order. All of it may be called by any thread."""

    def __init__(
        self,
        name: str,
        on_event: Callable[[LedgerEvent], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """Both are called on its thread; `on_failed` before the failure is told."""
        self._on_event = on_event
        self._on_failed = on_failed
        self._news = threading.Condition()
        self._waiting: deque[Letter] = deque()
        self._began_at: float | None = None
        self._is_closing = False
        self._is_shut = False
        self._is_muted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, letter: Letter) -> int:
        """How many wait now; one that is shut gives up every letter."""
        with self._news:
            if not self._is_shut:
                self._waiting.append(letter)
                self._news.notify_all()
            return len(self._waiting)

    def give_up(self, letters_max: int | None = None) -> int:
        """Give up the oldest, or (None) all that wait; how many those were."""
        with self._news:
            given_up = min(len(self._waiting), letters_max or len(self._waiting))
            for _ in range(given_up):
                self._waiting.popleft()
            self._news.notify_all()
            return given_up

    def shut(self) -> None:
        """Carry out nothing any more."""
        with self._news:
            self._is_shut = True
            self._waiting.clear()
            self._news.notify_all()

    def await_idle(self, seconds_max: float) -> bool:
        """Whether, within this time, every letter has been carried out and its mail sent."""
        with self._news:
            return self._news.wait_for(
                lambda: not self._waiting and self._began_at is None, seconds_max
            )

    def close(self, seconds_max: float) -> None:
        """End when nothing waits any more; waits for that, but no longer than this."""
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        self._thread.join(seconds_max)
        with self._news:
            self._is_muted = True

    def busy_seconds(self) -> float:
        """For how long it has been at the letter it is at; 0 if it is at none."""
        began_at = self._began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def _run(self) -> None:
        while (letter := self._next()) is not None:
            try:
                event = letter()
            except BaseException as error:  # whatever it is, this thread goes on
                told = error if isinstance(error, Exception) else RuntimeError(repr(error))
                self._on_failed(told)
                event = LedgerFailed(told)
            with self._news:  # who has closed it hears nothing from it any more
                if event is not None and not self._is_muted:
                    self._on_event(event)

    def _next(self) -> Letter | None:
        with self._news:
            self._began_at = None
            self._news.notify_all()
            self._news.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._began_at = time.monotonic()
            return self._waiting.popleft()


class LedgerThread(LedgerPort):
    """Carries out the letters of one attempt. `on_event` is called on its threads."""

    def __init__(self, on_event: Callable[[LedgerEvent], None], writes_max: int) -> None:
        """`writes_max`: that many letters may wait to be written."""
        self._writes_max = writes_max
        self._deletions = _Line("stillframe-deletions", on_event, lambda error: None)
        self._writes = _Line("stillframe-ledger", on_event, self._on_write_failed)

    def write(self, letter: Letter) -> None:
        waiting = self._writes.put(letter)
        assert waiting <= self._writes_max, f"{waiting} letters wait for the store"

    def delete(self, letter: Letter) -> None:
        if self._deletions.put(letter) > _DELETIONS_MAX:
            self._deletions.give_up(1)
            log.warning(
                "the storage deletes so slowly that what %d checkpoints left is deleted only when"
                " the job is next started",
                _DELETIONS_MAX,
            )

    def await_writes(self, seconds_max: float) -> bool:
        """Whether, within this time, everything is written or given up, and its mail sent."""
        return self._writes.await_idle(seconds_max)

    def busy_seconds(self) -> float:
        """For how long the store has been at the one thing that is being written."""
        return self._writes.busy_seconds()

    def close(self, seconds_max: float) -> None:
        """Delete what waits, as far as there is time for it, then write what follows from it.

        Never waits longer than it must: who wants to know that all is written calls `await_writes`
        first. A thread that the store holds ends when that answers.
        """
        is_idle = self._deletions.await_idle(seconds_max)
        if not is_idle:
            self._deletions.give_up()
            log.info("what could not be deleted yet is left for the next start of the job")
        # One that hangs is left to itself: whatever it deletes, nobody needs.
        self._deletions.close(_CLOSE_SECONDS_MAX if is_idle else 0.0)
        self._writes.close(_CLOSE_SECONDS_MAX)

    def _on_write_failed(self, error: Exception) -> None:
        if isinstance(error, Fenced) or not isinstance(error, StillframeError):
            self._writes.shut()
            self._deletions.give_up()
