"""What `stillframe run` does when it is told to end: Ctrl-C, or SIGTERM.

Theory of operation
-------------------
The main thread is the script's: it may hold locks that the job needs, and if it were interrupted at
once, a `finally: spark.stop()` of the script would pull Spark away from a job that has its
savepoint still to take. So a thread of our own hears of signals and ends the jobs as wished. It
hears them through Python's wake-up file, because a system may hand a signal to any thread, and then
a main thread that waits for a lock sleeps on and runs no handler.

The script is interrupted (`Interrupted`, which is a KeyboardInterrupt) when its last job has ended:
by a signal to the main thread alone, sent by that job's own thread as the last thing it does, so
that a script that waits for its job never comes to what follows the waiting.

From the first signal on there is a bound. When it is reached, or a second signal comes, or nothing
is to be waited for (`detach`), everything ends by force, see `last_steps`; what the job log says
then is what the next start goes on from, as after a crash.

Exit codes: 130 or 143, as shells expect, also when everything wished for was done: what follows
`stillframe run JOB.py &&` must not take a job that was ended for one that has come to its end. 1 if
something wished for could not be done.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn

from stillframe.cli.last_steps import end_by_force
from stillframe.coordinator.history import Event, JobEnded
from stillframe.errors import StillframeError
from stillframe.storage.paths import job_directory

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query

Wish = Literal["stop", "savepoint", "cancel", "detach"]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPT = signal.SIGURG
"""Ours, for the main thread: nobody else sends it, and nobody minds it where it has no handler."""
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SAVEPOINT_SHARE = 0.75
"""Of the bound; the rest is for stopping a job whose savepoint did not come."""
_JVM_SECONDS_MAX = 5.0
_FLUSH_SECONDS_MAX = 1.0
_LISTENER_SECONDS_MAX = 1.0
"""How long after an interrupt that was not ours the listener may still hear of the same signal."""


class Interrupted(KeyboardInterrupt):
    """A signal has ended the jobs; what the script had still to do is left undone."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(_WORDS[number])
        self.exit_code = 128 + number


class Ending:
    """The end of a command and its jobs, once a signal asks for it."""

    def __init__(
        self,
        wish: Wish,
        seconds_max: float,
        savepoints: str | None,
        jvm_pid: Callable[[], int | None],
        tidy_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`savepoints` is the directory for them; None: `savepoints` in each job's location.

        `tidy_up` is called before an end by force, where nothing else is.
        """
        self.received: signal.Signals | None = None
        self.savepoints_taken: list[str] = []
        self.undone: list[str] = []
        """One sentence for each thing that was wished for and could not be done."""
        self._wish = wish
        self._seconds_max = seconds_max
        self._savepoints = savepoints
        self._jvm_pid = jvm_pid
        self._tidy_up = tidy_up
        self._lock = threading.RLock()
        self._running: list[Query] = []
        self._is_due = False
        """Whether the script is to be interrupted."""
        self._is_interrupted = False
        """Whether it has been; it happens once."""
        self._acting: list[threading.Thread] = []
        self._begun = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals mean what is wished for, until the block is left; on the main thread."""
        _forget_in_forks()
        before = {number: signal.getsignal(number) for number in (*SIGNALS, _INTERRUPT)}
        heard, told = socket.socketpair()
        told.setblocking(False)
        woken_before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._listen, args=(heard,), name="stillframe-signals", daemon=True
        ).start()
        signal.signal(_INTERRUPT, self._on_interrupt)
        self.take_back_signals()
        try:
            yield
        finally:
            if self.received is None:  # else a second one is listened for to the very end
                signal.set_wakeup_fd(woken_before)
                for number, handler in before.items():
                    signal.signal(number, handler)
                told.close()

    def take_back_signals(self) -> None:
        """PySpark answers Ctrl-C by cancelling every Spark job, which would kill the slots."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, _leave_it_to_the_listener)

    def follow(self, query: Query) -> None:
        """A job is about to begin; not any more if all are being ended."""
        with self._lock:
            if self.received is not None:
                raise Interrupted(self.received)
            self._running.append(query)
        self.take_back_signals()

        def note(event: Event) -> None:
            if isinstance(event, JobEnded):
                self._note_ended(query)

        query.add_listener(note)

    def await_done(self) -> None:
        """Until the jobs have ended and what came of it is known; the bound is a limit here too.

        If it was not we who have interrupted the script, this begins to end them.
        """
        self._is_interrupted = True
        if not self._begun.wait(_LISTENER_SECONDS_MAX):
            self._begin(signal.SIGINT)
        with self._lock:
            acting = list(self._acting)
        for thread in acting:
            thread.join()

    def interrupt_if_asked(self) -> None:
        """For a script that went on to its end although it was interrupted."""
        if self.received is not None:
            raise Interrupted(self.received)

    # --- signals ---

    def _listen(self, heard: socket.socket) -> None:
        with heard:
            while numbers := heard.recv(64):  # nothing: nobody listens any more
                for number in numbers:
                    if number in SIGNALS and not self._begin(signal.Signals(number)):
                        self._end_at_once(128 + number, seconds_max=0.0)

    def _begin(self, number: signal.Signals) -> bool:
        """End the jobs as wished; False if that has begun before."""
        with self._lock:
            if self.received is not None:
                return False
            self.received = number
        if self._wish == "detach":
            self._end_at_once(128 + number, _JVM_SECONDS_MAX, "left the job to its next start")
        bound = threading.Timer(self._seconds_max, self._end_late)
        bound.daemon = True
        bound.start()
        with self._lock:
            self._acting = [
                threading.Thread(target=self._end_job, args=(query,), daemon=True)
                for query in self._running
            ]
            for thread in self._acting:
                thread.start()
            if not self._acting:
                self._interrupt()
        self._begun.set()
        return True

    def _note_ended(self, query: Query) -> None:
        """On the job's thread, as the last thing it does."""
        with self._lock:
            self._running.remove(query)
            if self.received is not None and not self._running:
                self._interrupt()

    def _interrupt(self) -> None:
        self._is_due = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _INTERRUPT)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """On the main thread."""
        if self._is_due and not self._is_interrupted:
            self._is_interrupted = True
            assert self.received is not None
            raise Interrupted(self.received)

    # --- what is wished for ---

    def _end_job(self, query: Query) -> None:
        try:
            match self._wish:
                case "savepoint":
                    self._stop_with_savepoint(query)
                case "cancel":
                    query.cancel()
                case _:
                    query.stop()
        except StillframeError as error:
            if query.exception() is None:  # its own failure is told anyway
                self.undone.append(str(error))

    def _stop_with_savepoint(self, query: Query) -> None:
        try:
            place = self._savepoint_place(query)
            query.stop(savepoint=place, timeout=self._seconds_max * _SAVEPOINT_SHARE)
            self.savepoints_taken.append(place)
        except StillframeError as error:
            if query.summary.outcome == "finished":
                return  # it was faster, and has nothing left to save
            self.undone.append(
                f"{error}; job {query.name!r} was stopped without a savepoint, and goes on from its"
                " last completed checkpoint when it is started again"
            )
            query.stop()

    def _savepoint_place(self, query: Query) -> str:
        root = self._savepoints
        if root is None:
            location = query.config.checkpoint_location
            if location is None:
                raise StillframeError(
                    f"job {query.name!r} has no checkpointLocation, so nobody said where its"
                    " savepoint goes: give --savepoint-dir"
                )
            root = f"{location.rstrip('/')}/savepoints"
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return f"{root.rstrip('/')}/{job_directory(query.name)}-{moment}"

    # --- by force ---

    def _end_late(self) -> None:
        self._end_at_once(
            1,
            0.0,
            f"the job did not end within {self._seconds_max:g} s (--signal-timeout), so it was"
            " ended by force; started again it goes on from its last completed checkpoint",
        )

    def _end_at_once(self, exit_code: int, seconds_max: float, sentence: str = "") -> NoReturn:
        # Written past Python's buffers: the interrupted code may be in the middle of a print.
        word = _WORDS[self.received] if self.received is not None else "interrupted"
        said = f"stillframe: {sentence or word}\n"
        with suppress(OSError):
            os.write(2, said.encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)
        flush.start()
        flush.join(_FLUSH_SECONDS_MAX)
        with suppress(Exception):
            self._tidy_up()
        end_by_force(exit_code, self._jvm_pid(), seconds_max)


@lru_cache(maxsize=1)
def _forget_in_forks() -> None:
    """A child that a script forks would tell us of its own signals, and not end by them."""
    before = threading.local()

    def hold() -> None:
        # Until the child has forgotten: a signal may come as soon as it is there.
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_listener:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=forget)


def _leave_it_to_the_listener(number: int, frame: FrameType | None) -> None:
    """A handler has to be there, or the signal would do what it does by itself."""
