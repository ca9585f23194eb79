"""Log lines that people and machines can use: each says of which job, attempt, checkpoint, task and
slot it tells, as far as that is known."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime

from stillframe.secrets import masked

slot_log = logging.getLogger("stillframe.slots")
"""On the driver: what slots have said. It is in their own logs, so that nobody gets it here but who
asks for it."""
slot_log.propagate = False
slot_log.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class About:
    """What a line is about."""

    job: str | None = None
    attempt: int | None = None
    checkpoint: int | None = None
    task: str | None = None
    slot: int | None = None

    def known(self) -> dict[str, str | int]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def within(self, around: About) -> About:
        """With what is known of everything around it."""
        return replace(around, **self.known())  # type: ignore[arg-type]

    def extra(self) -> dict[str, object]:
        """For the calls of `logging`."""
        return {"stillframe": self}


def about(record: logging.LogRecord) -> About:
    found = getattr(record, "stillframe", None)
    return found if isinstance(found, About) else About()


class LogLines(logging.Formatter):
    """One line for each record, in words or as JSON."""

    def __init__(self, *, as_json: bool, around: About | None = None) -> None:
        super().__init__()
        self._as_json = as_json
        self._around = around or About()

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        when = when.replace("+00:00", "Z")
        known = about(record).within(self._around).known()
        text = masked(text_of(record))
        if self._as_json:
            line = {"at": when, "level": record.levelname, **known, "text": text}
            return json.dumps(line, ensure_ascii=False)
        job = known.pop("job", None)
        where = [str(job)] if job is not None else []
        where += [f"{name} {value}" for name, value in known.items()]
        said = " | ".join(text.splitlines())
        return f"{when} {record.levelname} {', '.join(where) or 'stillframe'}: {said}"


def text_of(record: logging.LogRecord) -> str:
    """With where an error came from, if it tells of one."""
    text = record.getMessage()
    if record.exc_info:
        text += f"\n{logging.Formatter().formatException(record.exc_info)}"
    return text
