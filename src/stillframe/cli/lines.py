"""What a command says: lines for people, or one JSON object per line for machines."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from typing import Any, TextIO

from stillframe.coordinator.history import Event
from stillframe.errors import StillframeError, telling_line


class Lines:
    """One line per thing that happens, at once, from whichever thread."""

    def __init__(self, *, as_json: bool, out: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = out or sys.stdout
        self._lock = threading.Lock()

    def say(self, kind: str, text: str, **fields: Any) -> None:
        """`text` for people; `kind`, `text` and the fields for machines."""
        line = text
        if self.as_json:
            line = json.dumps({"kind": kind, "text": text, **fields}, ensure_ascii=False)
        with self._lock:
            # In one piece: print writes the line's end apart, and the script writes here too.
            print(f"{line}\n", end="", file=self._out, flush=True)

    def say_event(self, event: Event) -> None:
        self.say(kind_of(event), str(event), **fields_of(event))

    def for_people(self, text: str) -> None:
        """What machines have no use for."""
        if not self.as_json:
            self.say("", text)


def kind_of(event: Event) -> str:
    """`CheckpointCompleted` → `checkpoint_completed`."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type(event).__name__).lower()


def fields_of(event: Event) -> dict[str, Any]:
    return dataclasses.asdict(event)


def in_one_sentence(error: Exception) -> str:
    """Our own errors are one; of others, the line that tells, which in Spark's has Java around."""
    if isinstance(error, StillframeError):
        return str(error)
    said = telling_line(str(error))
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
