"""What a slot logs: to its process's stderr, which is where Spark has the logs of an executor, and
what is a warning or worse, to the driver too."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from stillframe.logs import About, LogLines, text_of
from stillframe.protocol.messages import Said, SaidLine
from stillframe.secrets import masked

_TOLD_MAX = 100
"""Between two reports; of more, the newest."""
_TEXT_CHARACTERS_MAX = 4_000


class SlotLog(logging.Handler):
    """Of one slot. Any thread may log; the control thread asks what is to be told."""

    def __init__(self, around: About, *, as_json: bool) -> None:
        super().__init__()
        self.setFormatter(LogLines(as_json=as_json, around=around))
        self._untold: deque[SaidLine] = deque(maxlen=_TOLD_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(f"{self.format(record)}\n", end="", file=sys.stderr, flush=True)
            if record.levelno >= logging.WARNING:
                text = masked(text_of(record))[:_TEXT_CHARACTERS_MAX]
                at_ms = round(record.created * 1000)
                self._untold.append(SaidLine(at_ms, record.levelno, text))
        except Exception:  # as all handlers do
            self.handleError(record)

    def said(self) -> Iterator[Said]:
        """What the driver has not heard yet."""
        lines = []
        while self._untold:
            lines.append(self._untold.popleft())
        if lines:
            yield Said(tuple(lines))


@contextmanager
def logging_as_slot(around: About, *, as_json: bool) -> Iterator[SlotLog]:
    """Until it ends: workers are reused, and the next slot is another one."""
    log, handler = logging.getLogger("stillframe"), SlotLog(around, as_json=as_json)
    level = log.level
    log.addHandler(handler)
    if level == logging.NOTSET:
        log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
