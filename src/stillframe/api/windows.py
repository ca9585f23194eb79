"""Windows of event time, in which records are grouped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Spans of event time in which records are grouped: every `slide_us` one of `size_us`."""

    time: str
    size_us: int
    slide_us: int
    start_us: int = 0
    """How far their beginnings are moved from 1970-01-01 00:00 UTC."""


@dataclass(frozen=True, slots=True)
class SessionWindow:
    """Spans of event time that last as long as records of a key come within a gap of each other."""

    time: str
    gap: int | str
    """In microseconds; or the column with each record's own, an int64 of microseconds."""


WINDOW = "window"
"""The column with which a windowed aggregate says which window a row is about: a struct of start
and end, both timestamps in UTC. It comes first, then the keys, then the aggregates."""
