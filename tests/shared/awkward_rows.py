"""Rows on which a function may show what it does not do as Spark does it."""

from __future__ import annotations

import datetime
import random
import string
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

_ROWS_MAX = 48
_RANDOM_ROWS = 6
_SMALL = (0, 1, -1, 2, 3, 7)
"""For lengths and counts: a repetition of 2**31 letters is no test."""
_TEXTS = (
    *(
        "",
        " ",
        "a",
        "Ab c 12",
        "ßéÜ日本",
        "İstanbul",
        "a%b_c\\d",
        "x1y22\n",
        "\x00z",
        "-1.5e3",
        "12",
    ),
    *("2024-02-29", "2024-03-10 02:30:00", "true", '{"a": [1, null]}', "😀 e\u0301"),
)
_DATES = ("0001-01-01", "1582-10-15", "1969-12-31", "1970-01-01", "2024-02-29", "9999-12-31")
_CLOCKS = (
    *("1883-11-18T12:01:00", "1969-12-31T23:59:59.999999", "1970-01-01T00:00:00"),
    *("2024-03-10T02:30:00", "2024-11-03T05:30:00", "2024-11-03T06:30:00.000001"),
    "9999-12-31T23:59:59.999999",
)
_DOUBLES = (0.0, -0.0, 1.5, -2.5, float("nan"), float("inf"), -float("inf"), 1e300, 5e-324, 0.1)


def rows_around(
    example: Sequence[Any], types: Sequence[pa.DataType], seed: str, *, only_small: bool
) -> list[tuple[Any, ...]]:
    """The example first; then nulls, one column after the other awkward, and all of them random.

    `only_small`: numbers are small, as they may say how long something is.
    """
    draw = random.Random(seed)
    made = [tuple(example), tuple(None for _ in example)]
    pools = [list(_awkward(type_, draw, only_small)) for type_ in types]
    longest = max(map(len, pools), default=0)
    for turn in range(longest):
        for place, pool in enumerate(pools):
            if turn < len(pool):
                made.append(_with(example, place, pool[turn]))
    random_rows = [
        tuple(_random(type_, draw, only_small) for type_ in types) for _ in range(_RANDOM_ROWS)
    ]
    return [*made[: _ROWS_MAX - len(random_rows)], *random_rows]


def _with(row: Sequence[Any], place: int, value: Any) -> tuple[Any, ...]:
    return (*row[:place], value, *row[place + 1 :])


def _awkward(type_: pa.DataType, draw: random.Random, only_small: bool) -> Iterator[Any]:
    yield None
    if pt.is_integer(type_):
        yield from _SMALL
        if not only_small:
            bits = type_.bit_width - 1
            yield from (2**bits - 1, -(2**bits), 2**bits - 2)
    elif pt.is_floating(type_):
        yield from _SMALL if only_small else _DOUBLES
    elif pt.is_decimal(type_):
        largest = Decimal(10**type_.precision - 1).scaleb(-type_.scale)
        smallest = Decimal(1).scaleb(-type_.scale)
        yield from (Decimal(0), smallest, -smallest)
        yield from () if only_small else (largest, -largest)
    elif pt.is_nested(type_):
        yield from _nested(type_, lambda inner: _awkward(inner, draw, only_small))
    else:
        yield from _plain(type_)


def _plain(type_: pa.DataType) -> Sequence[Any]:
    if pt.is_boolean(type_):
        return (True, False)
    if pt.is_string(type_):
        return _TEXTS
    if pt.is_binary(type_):
        return (b"", b"a", b"\x00\xff", "é".encode(), bytes(range(40)))
    if pt.is_date(type_):
        return [datetime.date.fromisoformat(each) for each in _DATES]
    if pt.is_timestamp(type_):
        zone = None if type_.tz is None else datetime.UTC
        return [datetime.datetime.fromisoformat(each).replace(tzinfo=zone) for each in _CLOCKS]
    if pt.is_duration(type_):
        return [datetime.timedelta(0), datetime.timedelta(days=-9, microseconds=1)]
    return ()


def _nested(type_: pa.DataType, values_of: Callable[[pa.DataType], Iterator[Any]]) -> Iterator[Any]:
    if pt.is_struct(type_):
        pools = [list(values_of(field.type)) for field in type_]
        for turn in range(max(map(len, pools), default=0)):
            yield {
                field.name: pool[turn % len(pool)] for field, pool in zip(type_, pools, strict=True)
            }
    elif pt.is_map(type_):
        yield []
        keys = [key for key in values_of(type_.key_type) if key is not None]
        for key, value in zip(keys, values_of(type_.item_type), strict=False):
            yield [(key, value)]
    else:
        values = list(values_of(type_.value_type))
        yield from ([], [None], values[1:4], values, values[-2:] * 2)


def _random(type_: pa.DataType, draw: random.Random, only_small: bool) -> Any:
    if draw.random() < 0.1:
        return None
    if pt.is_integer(type_):
        return draw.randint(-9, 9) if only_small else draw.randint(-100, 100)
    if pt.is_floating(type_):
        return draw.uniform(-9, 9)
    if pt.is_decimal(type_):
        return Decimal(draw.randrange(10 ** min(type_.precision, 9))).scaleb(-type_.scale)
    if pt.is_string(type_):
        return "".join(draw.choices(string.printable + "äß日本😀", k=draw.randint(0, 12)))
    if pt.is_binary(type_):
        return draw.randbytes(draw.randint(0, 9))
    if pt.is_boolean(type_):
        return draw.random() < 0.5
    seconds = draw.randrange(4 * 10**9)
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)
    if pt.is_date(type_):
        return moment.date()
    if pt.is_timestamp(type_):
        return moment if type_.tz is None else moment.replace(tzinfo=datetime.UTC)
    if pt.is_duration(type_):
        return datetime.timedelta(seconds=seconds - 2 * 10**9)
    if pt.is_nested(type_):
        found = _nested(type_, lambda inner: iter([_random(inner, draw, only_small)]))
        return draw.choice(list(found))
    return None
