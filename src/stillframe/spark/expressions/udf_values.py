"""Values of Python UDFs as Spark hands them over: a struct is a Row, a map a dict, and what a
function returns is made to fit the declared type where Spark does so.

Rules of this file
------------------
1. It is called in the slots, with plain values of Arrow on one side and the user's on the other.
2. Conversions are Spark's for functions that get their values by Arrow, which is its default; of
   others only those that lose nothing.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import types as sql

Convert = Callable[[Any], Any]


def argument_of(kind: sql.DataType) -> Convert | None:
    """What is done to a nested value before a function gets it; None: nothing."""
    match kind:
        case sql.StructType():
            return partial(_row, kind.names, [_argument_within(each.dataType) for each in kind])
        case sql.ArrayType():
            within = _argument_within(kind.elementType)
            return None if within is None else partial(_list, within)
        case sql.MapType():
            return partial(_dict, _argument_within(kind.keyType), _argument_within(kind.valueType))
        case _:
            return None


def _argument_within(kind: sql.DataType) -> Convert | None:
    return _local_time if isinstance(kind, sql.TimestampType) else argument_of(kind)


def _row(names: list[str], fields: list[Convert | None], value: Any) -> Any:
    if value is None:
        return None
    return sql._create_row(
        names, [_by(each, value[n]) for n, each in zip(names, fields, strict=True)]
    )


def _list(within: Convert, value: Any) -> Any:
    return None if value is None else list(map(within, value))


def _dict(key: Convert | None, value: Convert | None, pairs: Any) -> Any:
    return None if pairs is None else {_by(key, k): _by(value, v) for k, v in pairs}


def _local_time(value: Any) -> Any:
    return None if value is None else value.astimezone().replace(tzinfo=None)


def _by(convert: Convert | None, value: Any) -> Any:
    return value if convert is None else convert(value)


def results_as(kind: sql.DataType, type_: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """What a function returned, converted as Spark converts it; raises what Arrow raises."""
    convert = _result_of(kind)
    made = values if convert is None else list(map(convert, values))
    try:
        return pa.array(made, type_)
    except pa.ArrowInvalid:
        return pa.array(made).cast(type_, safe=False)


def _result_of(kind: sql.DataType) -> Convert | None:
    match kind:
        case sql.StringType():
            return _text
        case sql.DecimalType():
            return partial(_decimal, kind.precision, kind.scale)
        case sql.TimestampType():
            return _instant
        case sql.StructType():
            return partial(_fields, kind.names, [_result_of(each.dataType) for each in kind])
        case sql.ArrayType():
            return partial(_elements, _result_of(kind.elementType))
        case sql.MapType():
            return partial(_pairs, _result_of(kind.keyType), _result_of(kind.valueType))
        case _:
            return None


def _text(value: Any) -> Any:
    if value is None or type(value) is str:
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decimal(precision: int, scale: int, value: Any) -> Any:
    if not isinstance(value, decimal.Decimal):
        return value
    if value.is_nan():
        return None
    context = decimal.Context(prec=precision, rounding=decimal.ROUND_HALF_EVEN)
    return value.quantize(decimal.Decimal(1).scaleb(-scale), context=context)


def _instant(value: Any) -> Any:
    return None if value is None else value.astimezone(UTC)


def _fields(names: list[str], fields: list[Convert | None], value: Any) -> Any:
    """By place of a tuple or Row, by name of a dict or an object, as Spark finds them."""
    if value is None:
        return None
    if isinstance(value, tuple):
        found: Sequence[Any] = value
        if len(value) != len(names):
            raise ValueError(f"{len(value)} values for the fields {', '.join(names)}")
    else:
        by_name = value if isinstance(value, Mapping) else vars(value)
        found = [by_name.get(name) for name in names]
    return {n: _by(each, v) for n, each, v in zip(names, fields, found, strict=True)}


def _elements(within: Convert | None, value: Any) -> Any:
    return None if value is None else [_by(within, each) for each in value]


def _pairs(key: Convert | None, value: Convert | None, made: Any) -> Any:
    return None if made is None else [(_by(key, k), _by(value, v)) for k, v in made.items()]
