"""The last lines of a driver's log, of all its jobs and their slots, for those who may see them.

One for the process, as its log is. Events are not taken from the log, where most are not told
unless somebody asks for it, but from the job itself (`server.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stillframe.coordinator.history import event_log
from stillframe.json_values import JsonObject
from stillframe.logs import About, about, slot_log, text_of
from stillframe.secrets import masked

LINES_MAX = 2_000
_TEXT_CHARACTERS_MAX = 4_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class LogLine:
    number: int
    at_ms: int
    level: int
    about: About
    text: str

    def to_json(self) -> JsonObject:
        return {
            "number": self.number,
            "at": self.at_ms,
            "level": logging.getLevelName(self.level),
            "slot": self.about.slot,
            "attempt": self.about.attempt,
            "checkpoint": self.about.checkpoint,
            "task": self.about.task,
            "text": self.text,
        }

    def is_of(self, job: str) -> bool:
        """What names no job may be about any."""
        return self.about.job in (None, job)


Listener: TypeAlias = Callable[[LogLine], None]


class LogRing(logging.Handler):
    """Every member may be used from any thread."""

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=lines_max)
        self._newest = 0
        self._ring_lock = threading.Lock()
        self._listeners: list[Listener] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not record.name.startswith(event_log.name):
                at_ms = round(record.created * 1000)
                self.add(at_ms, record.levelno, about(record), text_of(record))
            _say_where_nobody_listens(record)
        except Exception:  # as all handlers do
            self.handleError(record)

    def add(self, at_ms: int, level: int, of: About, text: str) -> None:
        with self._ring_lock:
            self._newest += 1
            line = LogLine(self._newest, at_ms, level, of, masked(text)[:_TEXT_CHARACTERS_MAX])
            self._lines.append(line)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(line)

    def newest_first(self, job: str) -> Iterator[LogLine]:
        with self._ring_lock:
            lines = list(self._lines)
        return (line for line in reversed(lines) if line.is_of(job))

    @contextlib.contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """`listener` is called with every line, by whoever logs it; it must not wait."""
        with self._ring_lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._ring_lock:
                self._listeners.remove(listener)


def _say_where_nobody_listens(record: logging.LogRecord) -> None:
    """Python shows warnings of which nobody takes care on stderr, unless there is a handler; this
    one is not what it means."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        others = [each for each in logger.handlers if not isinstance(each, LogRing)]
        if others:
            return
        logger = logger.parent if logger.propagate else None
    if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
        logging.lastResort.handle(record)


_lock = threading.Lock()
_ring: LogRing | None = None


def log_ring() -> LogRing:
    """That of this process; it listens from the first call on."""
    global _ring
    with _lock:
        if _ring is None:
            _ring = LogRing()
            for logger in (logging.getLogger("stillframe"), slot_log):
                logger.addHandler(_ring)
        return _ring
