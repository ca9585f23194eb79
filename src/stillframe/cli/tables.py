"""Short aligned tables, and moments, spans and sizes as people say them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from stillframe.coordinator.history import format_bytes

NOTHING = "-"
"""Stands where there is nothing, or nobody knows."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines with every column as wide as its widest cell."""
    lines = [list(headings), *(list(row) for row in rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        yield "  ".join(map(_padded, line, widths)).rstrip()


def fields(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One line for each: its name, and what it is, in two columns."""
    known = list(pairs)
    width = max((_width(name) for name, _ in known), default=0)
    for name, value in known:
        yield f"{_padded(name, width)}  {value}".rstrip()


def moment(wall_ms: object) -> str:
    """In the time of this machine, to the second."""
    if not isinstance(wall_ms, int | float) or wall_ms < 0:
        return NOTHING
    return f"{datetime.fromtimestamp(wall_ms / 1000):%Y-%m-%d %H:%M:%S}"


def span(duration_ms: object) -> str:
    if not isinstance(duration_ms, int | float) or duration_ms < 0:
        return NOTHING
    if round(duration_ms) < 1000:
        return f"{duration_ms:.0f} ms"
    seconds = duration_ms / 1000
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {seconds_left} s"


def size(length_bytes: object) -> str:
    if not isinstance(length_bytes, int) or length_bytes < 0:
        return NOTHING
    return format_bytes(length_bytes)


def one_line(text: object) -> str:
    """Text from elsewhere, without anything that would break a line or move a cursor."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(cell: str) -> int:
    """Chinese signs take two columns."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in cell)
