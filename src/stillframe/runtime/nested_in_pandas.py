"""Lists, maps and structs as functions of pandas see them in PySpark, and give them back.

A map is a dict, an array is a numpy array, and times within have the session's zone and do not say
so, as those of plain columns. Arrow alone gives maps as pairs and times within in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

if TYPE_CHECKING:
    import pandas

Convert = Callable[[Any], Any]


def is_nested(type_: pa.DataType) -> bool:
    return bool(pt.is_nested(type_))


def to_series(column: pa.Array, zone: str) -> pandas.Series:
    """The column of nested values for a function."""
    series = column.to_pandas(integer_object_nulls=True)
    convert = _shown(column.type, zone)
    return series if convert is None else _by(series, convert)


def from_series(series: pandas.Series, type_: pa.DataType, zone: str) -> pandas.Series:
    """What a function has made, with times within that know their zone."""
    convert = _given(type_, zone)
    return series if convert is None else _by(series, convert)


def _by(series: pandas.Series, convert: Convert) -> pandas.Series:
    import pandas

    return pandas.Series([_unless_missing(convert, value) for value in series], dtype=object)


def _unless_missing(convert: Convert | None, value: Any) -> Any:
    """Missing is None, and what pandas has in its place: a NaN, or a NaT."""
    if convert is None or value is None:
        return value
    if isinstance(value, float | np.generic | datetime) and value != value:
        return None
    return convert(value)


# --- on the way to a function


def _shown(type_: pa.DataType, zone: str) -> Convert | None:
    """None: Arrow's own is it."""
    if pt.is_struct(type_):
        fields = {field.name: _shown(field.type, zone) for field in type_}
        return partial(_struct_shown, fields) if any(fields.values()) else None
    if pt.is_map(type_):
        return partial(_map_shown, _shown(type_.key_type, zone), _shown(type_.item_type, zone))
    if pt.is_nested(type_):
        inner = _shown(type_.value_type, zone)
        return None if inner is None else partial(_list_shown, inner)
    if pt.is_timestamp(type_):
        return _clock_shown if type_.tz is None else partial(_instant_shown, zone)
    return None


def _struct_shown(fields: Mapping[str, Convert | None], value: Mapping[str, Any]) -> Any:
    return {name: _each(convert, value[name]) for name, convert in fields.items()}


def _map_shown(key: Convert | None, item: Convert | None, pairs: Iterable[Any]) -> Any:
    return {_each(key, k): _each(item, v) for k, v in pairs}


def _list_shown(inner: Convert, values: Any) -> Any:
    made = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        made[place] = _each(inner, value)
    return made


def _each(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _instant_shown(zone: str, value: Any) -> Any:
    import pandas

    time = pandas.Timestamp(value)
    return (
        (time.tz_localize(UTC) if time.tzinfo is None else time).tz_convert(zone).tz_localize(None)
    )


def _clock_shown(value: Any) -> Any:
    import pandas

    return pandas.Timestamp(value)


# --- on the way back


def _given(type_: pa.DataType, zone: str) -> Convert | None:
    """None: there are no instants in it."""
    if pt.is_struct(type_):
        fields = {field.name: _given(field.type, zone) for field in type_}
        return partial(_struct_given, fields) if any(fields.values()) else None
    if pt.is_map(type_):
        key, item = _given(type_.key_type, zone), _given(type_.item_type, zone)
        return partial(_map_given, key, item) if key or item else None
    if pt.is_nested(type_):
        inner = _given(type_.value_type, zone)
        return None if inner is None else partial(_list_given, inner)
    return partial(_instant_given, zone) if pt.is_timestamp(type_) and type_.tz else None


def _struct_given(fields: Mapping[str, Convert | None], value: Any) -> Any:
    """By name of a dict, by place of a tuple; what is neither is left to be refused."""
    if isinstance(value, Mapping):
        found: Iterable[Any] = [value.get(name) for name in fields]
    elif isinstance(value, tuple) and len(value) == len(fields):
        found = value
    else:
        return value
    pairs = zip(fields.items(), found, strict=True)
    return {name: _unless_missing(convert, each) for (name, convert), each in pairs}


def _map_given(key: Convert | None, item: Convert | None, value: Any) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else value
    return [(_unless_missing(key, k), _unless_missing(item, v)) for k, v in pairs]


def _list_given(inner: Convert, value: Any) -> Any:
    if not isinstance(value, list | tuple | np.ndarray):
        return value
    return [_unless_missing(inner, each) for each in value]


def _instant_given(zone: str, value: Any) -> Any:
    """A time without a zone is the session's; what is no time is left to be refused."""
    import pandas

    if not isinstance(value, datetime | np.datetime64):
        return value
    time = pandas.Timestamp(value)
    # ambiguous=False is PySpark's choice for the hour that a clock change repeats.
    return time.tz_localize(zone, ambiguous=False) if time.tzinfo is None else time
