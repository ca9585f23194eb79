"""What a sink should have shown by now, and whether that is what one sees outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from stillframe.api.sinks import Sink
from stillframe.errors import BuildError
from stillframe.testing.conformance.promises import Broken, named

HIDDEN = (
    "nobody outside sees a record before the checkpoint that holds it is complete, and never if"
    " none is"
)
SHOWN = "when commit has returned, all that it was given is seen outside, and stays"
ONCE = "what has been committed is left alone when it is committed again: each record is seen once"
UNALTERED = "a record is seen outside as it was written"

Row = tuple[Any, ...]
Visible = Callable[[Any], Iterable[Any]]
"""Given the sink, all rows that are seen outside, as tuples or as dicts."""

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def row_of(schema: pa.Schema) -> Callable[[int], Row]:
    """A function that makes the row of a number out of nothing but the types."""
    makers = [_value_of(field) for field in schema]
    return lambda number: tuple(make(number) for make in makers)


def _value_of(field: pa.Field) -> Callable[[int], Any]:
    type_ = field.type
    if pa.types.is_integer(type_):
        return lambda number: number
    if pa.types.is_floating(type_):
        return float
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return lambda number: f"{field.name}-{number}"
    if pa.types.is_boolean(type_):
        return lambda number: number % 2 == 0
    if pa.types.is_timestamp(type_):
        begin = _BEGIN if type_.tz else _BEGIN.replace(tzinfo=None)
        return lambda number: begin + timedelta(seconds=number)
    raise BuildError(f"column {field.name} is {type_}: give row=, a function of a number")


@dataclass(slots=True)
class _Written:
    number: int
    where: str
    may_show: bool = False
    must_show: bool = False
    may_repeat: bool = False


class Outside:
    """All rows of one schedule: where each was written and what may be seen of it."""

    def __init__(self, sink: Sink, schema: pa.Schema, row: Callable[[int], Any], see: Visible):
        self._sink = sink
        self._schema = schema
        self._row = row
        self._see = see
        self._rows: dict[Hashable, _Written] = {}
        self._by_number: dict[int, _Written] = {}
        self._next = 1
        self._strangers = self._counted()
        """What was there before."""

    def batch(self, rows: int, where: str) -> tuple[pa.RecordBatch, list[int]]:
        """So many rows that were never written before, and their numbers."""
        numbers: list[int] = []
        values: list[Row] = []
        while len(numbers) < rows:
            number, self._next = self._next, self._next + 1
            value = self._in_order(self._row(number))
            if value in self._strangers:
                continue
            if value in self._rows:
                raise BuildError(
                    f"row({number}) is {value}, which was there before: make it differ"
                )
            self._rows[value] = self._by_number[number] = _Written(number, where)
            numbers.append(number)
            values.append(value)
        columns = [
            pa.array([value[index] for value in values], field.type)
            for index, field in enumerate(self._schema)
        ]
        return pa.record_batch(columns, self._schema), numbers

    def may_show(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._by_number[number].may_show = True

    def must_show(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._by_number[number].must_show = True

    def may_repeat(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._by_number[number].may_repeat = True

    def need_not_show(self) -> None:
        """Another epoch takes the place of all before it."""
        for written in self._by_number.values():
            written.must_show = False

    def check(self) -> None:
        """Raises `Broken` if what is seen is not what may be seen."""
        if not self._sink.makes_visible:
            return
        counts = self._counted()
        counts.subtract(self._strangers)
        twice = []
        for value, count in counts.items():
            written = self._rows.get(value)
            if written is None:
                self._check_stranger(value, count)
            elif not written.may_show:
                raise Broken(HIDDEN, f"row {written.number}, {written.where}, is seen")
            elif count > 1 and not written.may_repeat:
                twice.append(written.number)
        if twice and self._sink.guarantee != "at-least-once":
            raise Broken(ONCE, f"row {named(sorted(twice))} is seen more than once")
        missing = [
            written.number
            for value, written in self._rows.items()
            if written.must_show and not counts.get(value)
        ]
        if missing and self._sink.guarantee != "at-most-once":
            where = self._by_number[missing[0]].where
            raise Broken(SHOWN, f"row {named(missing)}, {where}, is committed and not seen")

    def _check_stranger(self, value: Hashable, count: int) -> None:
        if count > 0:
            raise Broken(UNALTERED, f"{value} is seen, which nobody has written")
        if count < 0 and not self._sink.is_whole:
            raise Broken(SHOWN, f"{value}, which was there before, is gone")

    def _counted(self) -> Counter[Hashable]:
        return Counter(self._in_order(value) for value in self._see(self._sink))

    def _in_order(self, value: Any) -> Row:
        """A row as a tuple in the order of the columns."""
        if isinstance(value, Mapping):
            value = [value[name] for name in self._schema.names]
        elif not isinstance(value, Sequence) or isinstance(value, str | bytes):
            value = [value]
        return tuple(each if isinstance(each, Hashable) else repr(each) for each in value)
