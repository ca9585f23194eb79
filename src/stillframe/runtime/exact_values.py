"""Python values as a column that holds exactly these: Arrow alone makes 1 of a 1.5.

Theory of operation: Arrow refuses most of what does not fit, and takes some by cutting it off: a
float or a Decimal becomes a whole number, a time a date, a bare number a time. So a column is asked
first of which classes its values are, as a whole, and only for the types where that happens. The
values themselves are looked at when something is wrong.
"""

from __future__ import annotations

import datetime
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from stillframe.user_code import shown

_NOTHING = type(None)
_INT64 = pa.int64()
_NUMBERS = (int, float, np.integer, np.floating)
_NO_NUMBERS = (bool, np.timedelta64)
"""Which are subclasses of numbers all the same."""
_FLOATS_TELL_APART = {4: 2**24, 8: 2**53}
"""Up to here floats of so many bytes leave no whole number out."""
_ONLY_INTEGERS = {int}


def exact_array(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Raises `pa.ArrowInvalid`, or what Arrow raises, for a value that does not fit exactly."""
    check = _check_of(type_)
    if check is None:
        return pa.array(values, type_)
    kinds = set(map(type, values))
    if type_ == _INT64 and kinds == _ONLY_INTEGERS:  # the most common by far, at half the cost
        return pa.Array.from_buffers(
            type_, len(values), [None, pa.py_buffer(array("q", values))], null_count=0
        )
    made = pa.array(values, type_)  # first, for what it refuses itself
    check(values, kinds)
    return made


def exact_series(series: Any, type_: pa.DataType) -> pa.Array:
    """The same for a pandas Series, in which a missing whole number makes all of them floats."""
    kind = series.dtype.kind
    if kind not in _fitting_kinds(type_):
        for value in series[series.notna()]:
            raise pa.ArrowInvalid(f"{value} is a {series.dtype}")
    if kind == "M" and pt.is_date32(type_):
        return _days(series, type_)
    made = pa.array(series, type_)
    check = _check_of(type_)
    if kind == "O" and check is not None:
        values = series[series.notna()].tolist()
        check(values, set(map(type, values)))
    elif kind == "f" and pt.is_integer(type_):
        _refuse_uncertain(series)
    elif pt.is_float32(type_):
        _refuse_too_large(pa.array(series, pa.float64()))
    return made


@lru_cache(maxsize=256)
def _fitting_kinds(type_: pa.DataType) -> str:
    """Those of numpy whose values can be of this type, as far as Arrow does not know it."""
    if pt.is_boolean(type_):
        return "bO"
    if pt.is_integer(type_) or pt.is_floating(type_):
        return "iufcO"
    if pt.is_date(type_) or pt.is_timestamp(type_):
        return "MO"
    return "mO" if pt.is_duration(type_) else "iufcmMOSUV"


def _days(series: Any, type_: pa.DataType) -> pa.Array:
    """pandas has no dates: midnights are days, of the zone they are given in."""
    times = series.dt.tz_localize(None)
    for time in times[times.notna() & (times != times.dt.normalize())]:
        raise pa.ArrowInvalid(f"{time} has a time of day")
    return pa.array(times, type_)


def _refuse_uncertain(series: Any) -> None:
    most = _FLOATS_TELL_APART.get(series.dtype.itemsize, 2**53)
    for value in series[series.abs() > most]:
        raise pa.ArrowInvalid(
            f"{value:.1f} is a float beyond 2**{most.bit_length() - 1}, where it may have been"
            ' another whole number: keep such numbers in the dtype "Int64", or in Arrow'
        )


_Check = Callable[[Iterable[Any], set[type]], None]
"""Looks at values of which the classes are known, and raises."""


@lru_cache(maxsize=256)
def _check_of(type_: pa.DataType) -> _Check | None:
    """None: Arrow itself refuses whatever does not fit this type."""
    if pt.is_nested(type_):
        return _nested_check(type_)
    if pt.is_integer(type_):
        return _only((int, np.integer), but=_NO_NUMBERS)
    if pt.is_float32(type_):
        return _in_range_of_float32
    if pt.is_floating(type_):
        return _only(_NUMBERS, but=_NO_NUMBERS)
    if pt.is_date32(type_):
        return _only((datetime.date, np.datetime64), but=(datetime.datetime,))
    if pt.is_timestamp(type_):
        return _without_nanoseconds((datetime.datetime, np.datetime64), type_)
    if pt.is_duration(type_):
        return _without_nanoseconds((datetime.timedelta, np.timedelta64), type_)
    return None


def _only(fitting: tuple[type, ...], but: tuple[type, ...] = ()) -> _Check:
    def check(values: Iterable[Any], kinds: set[type]) -> None:
        for kind in kinds:
            if kind is _NOTHING or (issubclass(kind, fitting) and not issubclass(kind, but)):
                continue
            value = next(each for each in values if type(each) is kind)
            raise pa.ArrowInvalid(f"{shown(value)} is a {kind.__name__}")

    return check


def _in_range_of_float32(values: Iterable[Any], kinds: set[type]) -> None:
    _only(_NUMBERS, but=_NO_NUMBERS)(values, kinds)
    _refuse_too_large(pa.array(values, pa.float64()))


def _refuse_too_large(wide: pa.Array) -> None:
    lost = pc.and_(pc.is_inf(wide.cast(pa.float32())), pc.invert(pc.is_inf(wide)))
    for value in wide.filter(lost):
        raise pa.ArrowInvalid(f"{value.as_py()} is too large")


def _without_nanoseconds(fitting: tuple[type, ...], type_: pa.DataType) -> _Check:
    """Those of pandas have some that Arrow would cut off, as Python's have none."""
    of_kind = _only(fitting)

    def check(values: Iterable[Any], kinds: set[type]) -> None:
        of_kind(values, kinds)
        if type_.unit == "ns" or not any(hasattr(kind, "as_unit") for kind in kinds):
            return
        for value in values:
            if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
                raise pa.ArrowInvalid(f"{value} has nanoseconds")

    return check


# --- values within values


def _nested_check(type_: pa.DataType) -> _Check | None:
    if pt.is_struct(type_):
        parts = [(_field_at(place, field.name), field.type) for place, field in enumerate(type_)]
    elif pt.is_map(type_):
        parts = [(_keys_of, type_.key_type), (_items_of, type_.item_type)]
    else:
        parts = [(_elements_of, type_.value_type)]
    looked_at = ((part, _check_of(kind)) for part, kind in parts)
    checked = [(part, inner) for part, inner in looked_at if inner is not None]
    if not checked:
        return None

    def check(values: Iterable[Any], kinds: set[type]) -> None:
        there = [value for value in values if value is not None]
        for part, inner in checked:
            within = part(there)
            inner(within, set(map(type, within)))

    return check


_Part = Callable[[list[Any]], list[Any]]


def _elements_of(lists: list[Any]) -> list[Any]:
    return [element for each in lists for element in each]


def _keys_of(maps: list[Any]) -> list[Any]:
    return [key for each in maps for key, _ in _pairs(each)]


def _items_of(maps: list[Any]) -> list[Any]:
    return [item for each in maps for _, item in _pairs(each)]


def _pairs(each: Any) -> Iterable[tuple[Any, Any]]:
    return each.items() if isinstance(each, Mapping) else each


def _field_at(place: int, name: str) -> _Part:
    def field_of(value: Any) -> Any:
        if isinstance(value, Mapping):
            return value.get(name)
        return value[place] if isinstance(value, tuple) else dict(value).get(name)

    return lambda structs: list(map(field_of, structs))
