"""One line of CSV as the texts of its fields, exactly as Spark's parser cuts it: the slow way.

Theory of operation
-------------------
Spark gives each line to the univocity parser, with unescaped quotes read up to the next delimiter.
A field that begins with a quote is quoted, any other is taken as it stands, quotes and escapes too.
In a quoted field the escape character stands before a quote, or before itself. A quote that is
neither escaped nor at the end of its field makes the rest, up to the delimiter, part of the value;
then the first quote belongs to the value as well.

This file walks over the characters in the order in which that parser does, `previous` and
`current` are its `prev` and `ch`, so that odd texts come out alike (`tests/spark/test_csv.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_NONE: Final = "\0"
_BLANK: Final = " "


@dataclass(frozen=True, slots=True)
class Signs:
    """The characters that mean something. `\\0` for quote or escape: there is none."""

    separator: str = ","
    quote: str = '"'
    escape: str = "\\"


SPARKS_SIGNS: Final = Signs()


class _End(Exception):
    """Of the line."""


class Field(str):
    """The text of a field; one that was quoted and is empty is not a missing one."""

    __slots__ = ()


EMPTY: Final = Field("")


def fields_of(line: str, signs: Signs, *, trims_left: bool, trims_right: bool) -> Sequence[str]:
    """The fields; an unquoted field without text is `""`, a quoted one is `EMPTY`."""
    return _Line(line, signs, trims_left, trims_right).fields()


class _Line:
    def __init__(self, text: str, signs: Signs, trims_left: bool, trims_right: bool) -> None:
        self._text = text
        self._at = 0
        self._separator, self._quote, self._escape = signs.separator, signs.quote, signs.escape
        self._escape_escape = _NONE if signs.quote == signs.escape else signs.escape
        self._trims_left, self._trims_right = trims_left, trims_right
        self._fields: list[str] = []
        self._value: list[str] = []
        self._trims = False
        self._current = self._previous = _NONE
        self._is_unescaped = self._is_plain = False

    def fields(self) -> list[str]:
        try:
            self._next()
            while True:
                self._field()
                self._next()
                # What follows a delimiter is a field, also if nothing is there.
        except _End:
            self._end()
        return self._fields

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise _End
        self._current = self._text[self._at]
        self._at += 1
        return self._current

    # --- one field ---

    def _field(self) -> None:
        if self._trims_left:
            while self._is_blank(self._current) and self._current != self._separator:
                self._next()
        if self._current == self._separator:
            self._fields.append("")
            return
        self._is_unescaped, self._previous = False, _NONE
        if self._current == self._quote and self._quote != _NONE:
            self._trims = False
            self._quoted()
        else:
            self._is_plain = True
            self._trims = self._trims_right
            self._take_until(self._separator)
        self._finish_value()

    def _finish_value(self) -> None:
        text = "".join(self._value)
        if self._trims:
            text = text.rstrip("".join(map(chr, range(33))))
        self._value.clear()
        self._fields.append(text or ("" if self._is_plain else EMPTY))
        self._trims = self._is_plain = False

    def _take_until(self, *stops: str) -> None:
        first = self._current
        while self._current not in stops:
            self._value.append(self._current)
            try:
                self._next()
            except _End:
                self._current = first  # the parser knows only where it began
                raise

    def _quoted(self) -> None:
        if self._previous != _NONE:  # after a quote that nobody had escaped
            self._value.insert(0, self._quote)
            self._next()
            self._trims = self._trims_right
            self._take_until(self._separator)
            return
        self._next()
        while not (
            self._previous == self._quote
            and (self._is_blank(self._current) or self._current == self._separator)
        ):
            if self._current not in (self._quote, self._escape):
                if self._previous == self._quote:
                    self._unescaped_quote()
                    return
                if self._previous == self._escape and self._escape != _NONE:
                    self._value.append(self._escape)
                self._take_until(self._quote, self._escape, self._escape_escape)
                self._previous = self._current
                self._next()
            else:
                self._escaped()
                self._previous = self._current
                self._next()
                if self._is_unescaped and self._current == self._separator:
                    return
        self._blanks_behind()

    def _escaped(self) -> None:
        if (
            self._current == self._escape
            and self._previous == self._escape_escape
            and self._escape_escape != _NONE
        ):
            self._value.append(self._escape)
            self._current = _NONE
        elif self._previous == self._escape:
            if self._current == self._quote:
                self._value.append(self._quote)
                self._current = _NONE
            else:
                self._value.append(self._previous)
        elif self._current == self._quote and self._previous == self._quote:
            self._value.append(self._quote)
        elif self._previous == self._quote:
            self._unescaped_quote_in_value()

    def _unescaped_quote(self) -> None:
        self._is_unescaped = True
        self._value += [self._quote, self._current]
        self._previous = self._current
        self._quoted()

    def _unescaped_quote_in_value(self) -> None:
        self._value.append(self._quote)
        self._previous = self._current
        while self._current != self._separator:
            if self._current in (self._quote, self._escape):
                self._escaped()
            elif self._previous == self._quote:
                self._unescaped_quote_in_value()
                return
            else:
                self._value.append(self._current)
            self._previous = self._current
            self._next()

    def _blanks_behind(self) -> None:
        """Between a closing quote and the delimiter they are passed over; with more, they stay."""
        if self._current == self._separator or not self._is_blank(self._current):
            return
        blanks: list[str] = []
        while self._is_blank(self._current) and self._current != self._separator:
            blanks.append(self._current)
            self._next()
        if self._current != self._separator:
            self._value += [self._quote, *blanks, self._current]
            self._previous = self._current
            self._quoted()

    def _is_blank(self, sign: str) -> bool:
        return sign <= _BLANK

    # --- the end of the line ---

    def _end(self) -> None:
        is_value = False
        if self._current == self._quote and self._quote != _NONE:
            if self._previous == self._quote:
                is_value = True
            elif not self._is_unescaped:
                self._value.append(self._quote)
        is_value = is_value or (self._previous != _NONE and self._current != self._separator)
        if self._value or is_value:
            self._finish_value()
        else:
            self._fields.append("")
