"""How far the queries of a command have come, shown while they run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TextIO

from stillframe.cli.lines import fields_of, kind_of
from stillframe.clock import Clock
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointDamaged,
    CheckpointFailed,
    Event,
    JobEnded,
    Summary,
    format_bytes,
)
from stillframe.coordinator.query import Query

Form = Literal["terminal", "plain", "json"]
_INTERVAL_SECONDS = 1.0
_PLAIN_INTERVAL_SECONDS = 10.0
"""Where every line stays: a log of a night would be full of them."""
_EXPECTED = (CheckpointCompleted, CheckpointCommitted, JobEnded)
"""What people see in the figures and need not be told besides."""
_TROUBLE = (AttemptFailed, CheckpointDamaged, CheckpointFailed)


@dataclass(frozen=True, slots=True)
class Figures:
    """One query at one moment."""

    name: str
    records_in: int
    records_out: int
    records_late: int
    records_malformed: int
    records_per_second: float
    """Read since the figures before."""
    checkpoints: int
    last_duration_ms: float | None
    last_bytes: int | None
    restarts: int
    outcome: str

    def __str__(self) -> str:
        parts = [
            f"{self.name}: {_grouped(self.records_in)} records in",
            f"{_grouped(self.records_out)} out",
            f"{_grouped(round(self.records_per_second))}/s",
            self._checkpoints(),
        ]
        if self.records_late:
            parts.insert(2, f"{_grouped(self.records_late)} too late")
        if self.records_malformed:
            parts.insert(1, f"{_grouped(self.records_malformed)} malformed")
        if self.restarts:
            parts.append(f"{self.restarts} restart{'s' if self.restarts > 1 else ''}")
        if self.outcome != "running":
            parts.append(self.outcome)
        return ", ".join(parts)

    def _checkpoints(self) -> str:
        done = f"{self.checkpoints} checkpoint{'s' if self.checkpoints != 1 else ''}"
        if self.last_duration_ms is None or self.last_bytes is None:
            return done
        return f"{done} (last {self.last_duration_ms:.0f} ms, {format_bytes(self.last_bytes)})"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "progress",
            "name": self.name,
            "records_in": self.records_in,
            "records_out": self.records_out,
            "records_late": self.records_late,
            "records_malformed": self.records_malformed,
            "records_per_second": round(self.records_per_second, 1),
            "checkpoints": self.checkpoints,
            "last_duration_ms": self.last_duration_ms,
            "last_bytes": self.last_bytes,
            "restarts": self.restarts,
            "outcome": self.outcome,
        }


def figures_of(
    name: str,
    summary: Summary,
    last: CheckpointCompleted | None,
    records_before: int,
    elapsed_seconds: float,
) -> Figures:
    gained = summary.records_in - records_before
    return Figures(
        name=name,
        records_in=summary.records_in,
        records_out=summary.records_out,
        records_late=summary.records_late,
        records_malformed=summary.records_malformed,
        records_per_second=gained / elapsed_seconds if elapsed_seconds > 0 else 0.0,
        checkpoints=summary.checkpoints_completed,
        last_duration_ms=last.duration_ms if last else None,
        last_bytes=last.state_bytes if last else None,
        restarts=summary.restarts,
        outcome=summary.outcome,
    )


class Progress:
    """Shows figures as time passes, and at once what goes wrong and what is done about it.

    People are told on stderr, so that the output of the job file stays its own; machines, who asked
    for it, on stdout. `is_quiet`: only what goes wrong.
    """

    def __init__(
        self, form: Form, clock: Clock, out: TextIO | None = None, *, is_quiet: bool = False
    ) -> None:
        self._form = form
        self._clock = clock
        self._is_quiet = is_quiet
        self._out = out or (sys.stdout if form == "json" else sys.stderr)
        self._lock = threading.Lock()
        self._queries: list[_Followed] = []
        self._line_width = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stillframe-progress", daemon=True)

    def waiting(self, text: str) -> None:
        """Say what nothing can be shown before; the next line takes its place on a terminal."""
        with self._lock:
            self._wait(text)

    def _wait(self, text: str) -> None:
        if self._is_quiet:
            return
        if self._form == "terminal":
            self._redraw(text)
        else:
            self._print(text, {"kind": "waiting", "text": text})

    def follow(self, query: Query) -> None:
        with self._lock:
            self._queries.append(_Followed(query, self._clock.monotonic_seconds()))
            is_first = len(self._queries) == 1
        query.add_listener(partial(self._on_event, query))
        if is_first and not self._is_quiet:
            self._thread.start()

    def close(self) -> None:
        """Show where everything has ended."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._is_quiet:
            self.show()
        with self._lock:
            if self._line_width:
                self._line_width = 0
                print(file=self._out, flush=True)

    def show(self) -> None:
        """The figures that have changed since they were shown last."""
        with self._lock:
            now = self._clock.monotonic_seconds()
            changed = [figures for query in self._queries if (figures := query.look(now))]
            if self._form == "terminal":
                latest = [str(query.shown) for query in self._queries if query.shown]
                if changed:
                    self._redraw("; ".join(latest))
            for figures in changed if self._form != "terminal" else []:
                self._print(str(figures), figures.to_json())

    def _run(self) -> None:
        is_plain = self._form == "plain"
        while not self._closing.wait(_PLAIN_INTERVAL_SECONDS if is_plain else _INTERVAL_SECONDS):
            self.show()

    def _on_event(self, query: Query, event: Event) -> None:
        is_expected = isinstance(event, _EXPECTED) or (
            isinstance(event, AttemptStarted)
            and event.restored_from is None
            and event.savepoint is None
        )
        if self._is_quiet:
            is_expected = not isinstance(event, _TROUBLE)
        with self._lock:
            if self._form == "json" and not (self._is_quiet and is_expected):
                self._print("", {"kind": kind_of(event), "text": str(event), **fields_of(event)})
            elif not is_expected:
                self._redraw("")
                self._print(str(event), {})
            if isinstance(event, AttemptStarted) and self._form != "json":
                slots = query.plan.slots
                self._wait(f"{query.name}: waiting for {slots} slot{'s' if slots > 1 else ''}")

    def _print(self, text: str, fields: dict[str, Any]) -> None:
        line = json.dumps(fields, ensure_ascii=False) if self._form == "json" else text
        # In one piece: print writes the line's end apart, and the script writes here too.
        print(f"{line}\n", end="", file=self._out, flush=True)

    def _redraw(self, text: str) -> None:
        """Put this in place of the line that is there; only a terminal has such a line."""
        if self._form != "terminal":
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        self._out.write("\r" + text.ljust(self._line_width) + ("" if text else "\r"))
        self._out.flush()
        self._line_width = len(text)


class _Followed:
    """A query and what was last shown of it."""

    def __init__(self, query: Query, now_seconds: float) -> None:
        self.shown: Figures | None = None
        self._query = query
        self._at_seconds = now_seconds
        self._records = 0

    def look(self, now_seconds: float) -> Figures | None:
        """New figures, if anything but the rate has changed."""
        summary, completed = self._query.summary, self._query.checkpoints
        figures = figures_of(
            self._query.name,
            summary,
            completed[-1] if completed else None,
            self._records,
            now_seconds - self._at_seconds,
        )
        if self.shown is not None and _without_rate(figures) == _without_rate(self.shown):
            return None
        self.shown, self._at_seconds, self._records = figures, now_seconds, summary.records_in
        return figures


def form_for(stream: TextIO, *, as_json: bool) -> Form:
    if as_json:
        return "json"
    return "terminal" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"


def _without_rate(figures: Figures) -> dict[str, Any]:
    return {key: value for key, value in figures.to_json().items() if key != "records_per_second"}


def _grouped(count: int) -> str:
    return f"{count:,}"
