"""The functions an expression may call, on whole Arrow columns.

Rules of this file: a function takes the type of its result and its arguments, each a column or,
where it is a constant, a scalar; at least one argument is a column. What cannot be computed
raises ArrowInvalid. The results are Spark's, which the tests in tests/spark compare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from stillframe.runtime import casts, times
from stillframe.runtime.from_json import from_json
from stillframe.runtime.splitting import split_by_text

Datum: TypeAlias = pa.Array | pa.Scalar
Function = Callable[..., Datum]


def as_array(datum: Datum, rows: int) -> pa.Array:
    """A constant as a column of so many rows; a column as it is."""
    return pa.repeat(datum, rows) if isinstance(datum, pa.Scalar) else datum


def _columns(*data: Datum) -> list[pa.Array]:
    rows = next(len(datum) for datum in data if not isinstance(datum, pa.Scalar))
    return [as_array(datum, rows) for datum in data]


# Arithmetic


def _arithmetic(checked: Function, plain: Function) -> Function:
    def function(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
        if types.is_decimal(type_):
            return casts.fit(checked(*map(_wide, _columns(left, right))), type_)
        return plain(left, right) if types.is_floating(type_) else checked(left, right)

    return function


def _wide(decimals: pa.Array) -> pa.Array:
    return decimals.cast(pa.decimal256(decimals.type.precision, decimals.type.scale))


def _wrapping(plain: Function) -> Function:
    """What Spark does with ANSI mode off: integers overflow without a word."""
    return lambda type_, *arguments: plain(*arguments)


def _unary(checked: Function, plain: Function) -> Function:
    def function(type_: pa.DataType, argument: Datum) -> Datum:
        return plain(argument) if types.is_floating(type_) else checked(argument)

    return function


def _divide(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    return pc.divide_checked(left, right)


def _null_if_zero(type_: pa.DataType, divisor: Datum) -> Datum:
    zero = pa.scalar(0, pa.int32()).cast(type_)
    return pc.if_else(pc.equal(divisor, zero), pa.scalar(None, type_), divisor)


def _remainder(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    dividend, divisor, nulls = _dividing(left, right)
    with np.errstate(invalid="ignore"):
        return _from_values(np.fmod(dividend, divisor), nulls, type_)


def _pmod(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    dividend, divisor, nulls = _dividing(left, right)
    with np.errstate(invalid="ignore", over="ignore"):
        rest = np.fmod(dividend, divisor)
        rest = np.where(rest < 0, np.fmod(rest + divisor, divisor), rest)
    return _from_values(rest, nulls, type_)


def _dividing(
    left: Datum, right: Datum
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """Both sides as numpy, the divisor 1 where either is null; zero divisors are refused."""
    dividend, divisor = _columns(left, right)
    nulls = pc.or_(dividend.is_null(), divisor.is_null()).to_numpy(zero_copy_only=False)
    above = pc.fill_null(dividend, _one(dividend.type)).to_numpy(zero_copy_only=False)
    below = pc.fill_null(divisor, _one(divisor.type)).to_numpy(zero_copy_only=False)
    if ((below == 0) & ~nulls).any():
        raise pa.ArrowInvalid("divide by zero")
    return above, np.where(nulls, np.ones_like(below), below), nulls


def _one(type_: pa.DataType) -> pa.Scalar:
    return pa.scalar(1, pa.int32()).cast(type_)


def _from_values(
    values: npt.NDArray[np.generic], nulls: npt.NDArray[np.bool_], type_: pa.DataType
) -> pa.Array:
    return pa.array(values, type_, mask=nulls, from_pandas=False)


def _to_whole(rounding: Function) -> Function:
    """floor and ceil: NaN is 0, as in Java; what does not fit a long is refused."""

    def function(type_: pa.DataType, argument: pa.Array) -> Datum:
        whole = rounding(argument)
        # A cast answers the largest long for 2**63, which here is too large.
        if pc.any(pc.greater_equal(whole, 2.0**63)).as_py():
            raise pa.ArrowInvalid(f"the value {pc.max(whole).as_py()!r} does not fit {type_}")
        return casts.cast(pc.if_else(pc.is_nan(whole), 0.0, whole), type_, zone="UTC")

    return function


def _round_decimal(type_: pa.DataType, argument: pa.Array) -> Datum:
    return casts.fit(argument, type_)


def _normalize_float(type_: pa.DataType, argument: pa.Array) -> Datum:
    """One zero and one NaN, so that keys which are equal have equal bits."""
    positive = pc.add(argument, pa.scalar(0.0, type_))
    return pc.if_else(pc.is_nan(positive), pa.scalar(float("nan"), type_), positive)


# Comparison


def _is_void(left: Datum, right: Datum) -> bool:
    """Whether one of them has nothing but nulls, of no type: Arrow compares none of these."""
    return bool(types.is_null(left.type) or types.is_null(right.type))


def _unknown(left: Datum, right: Datum) -> Datum:
    either = pc.or_(pc.is_null(left), pc.is_null(right))
    return pc.if_else(either, pa.scalar(None, pa.bool_()), False)


def _equal(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    if _is_void(left, right):
        return _unknown(left, right)
    same = pc.equal(left, right)
    if types.is_floating(left.type):
        same = pc.or_(same, pc.and_(pc.is_nan(left), pc.is_nan(right)))
    return same


def _null_safe_equal(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    if _is_void(left, right):
        return both_null
    return pc.if_else(both_null, True, pc.fill_null(_equal(type_, left, right), False))


def _less(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    if _is_void(left, right):
        return _unknown(left, right)
    less = pc.less(left, right)
    if types.is_floating(left.type):
        less = pc.or_(less, pc.and_(pc.invert(pc.is_nan(left)), pc.is_nan(right)))
    return less


def _less_equal(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
    return pc.invert(_less(type_, right, left))


def _in(type_: pa.DataType, value: pa.Array, *items: Datum) -> Datum:
    if not items:
        return pa.repeat(False, len(value))
    if all(isinstance(item, pa.Scalar) for item in items) and not types.is_floating(value.type):
        return _in_constants(value, list(items))
    return reduce(pc.or_kleene, (_equal(type_, value, item) for item in items))


def _in_constants(value: pa.Array, items: list[pa.Scalar]) -> pa.Array:
    known = pa.array([item.as_py() for item in items if item.is_valid], value.type)
    found = pc.is_in(value, value_set=known)
    if len(known) < len(items):
        found = pc.if_else(found, True, pa.scalar(None, pa.bool_()))
    return pc.if_else(pc.is_null(value), pa.scalar(None, pa.bool_()), found)


def _extreme(pick: Function) -> Function:
    """greatest and least; nulls are skipped."""

    def function(type_: pa.DataType, *arguments: Datum) -> Datum:
        if type_ == times.INSTANT:  # Arrow compares such times, and does not pick among them
            arguments = tuple(argument.cast(pa.int64()) for argument in arguments)
        return pick(*arguments, skip_nulls=True).cast(type_)

    return function


def _is_nan(type_: pa.DataType, argument: pa.Array) -> Datum:
    return pc.fill_null(pc.is_nan(argument), False)


# Strings


def _change_case(ascii_only: Function, one: Callable[[str], str]) -> Function:
    """Beyond ASCII, letters may become several (ß, ŉ), which Arrow's functions do not do."""

    def function(type_: pa.DataType, text: pa.Array) -> Datum:
        if pc.all(pc.string_is_ascii(text), min_count=0).as_py():
            return ascii_only(text)
        words = text.dictionary_encode()
        changed = [None if word is None else one(word) for word in words.dictionary.to_pylist()]
        return pa.array(changed, type_).take(words.indices)

    return function


def _length(type_: pa.DataType, text: pa.Array) -> Datum:
    length = pc.utf8_length if types.is_string(text.type) else pc.binary_length
    return length(text).cast(type_)


def _trim(trim: Function) -> Function:
    return lambda type_, text, characters: trim(text, characters=characters.as_py())


def _substring(type_: pa.DataType, text: pa.Array, position: pa.Scalar, length: pa.Scalar) -> Datum:
    begin, count = position.as_py(), length.as_py()
    start = begin - 1 if begin > 0 else begin
    if count <= 0:
        return pc.if_else(pc.is_null(text), pa.scalar(None, type_), "")
    stop = start + count
    if start < 0:
        # Counted from the end: what would reach past the end simply ends there.
        return pc.utf8_slice_codeunits(text, start, stop if stop < 0 else None)
    return pc.utf8_slice_codeunits(text, start, stop)


def _concat(type_: pa.DataType, *parts: Datum) -> Datum:
    empty: bytes | str = "" if types.is_string(type_) else b""
    return pc.binary_join_element_wise(*parts, pa.scalar(empty, type_), null_handling="emit_null")


def _concat_ws(type_: pa.DataType, separator: pa.Scalar, *parts: Datum) -> Datum:
    # Arrow's own way to skip nulls loses the row when every part is null. So: each part behind
    # a separator, all of them joined, the first separator taken off.
    text = separator.as_py()
    behind = [pc.fill_null(_concat(type_, pa.scalar(text), part), "") for part in _columns(*parts)]
    return pc.utf8_slice_codeunits(_concat(type_, *behind), len(text))


def _with_pattern(match: Function) -> Function:
    return lambda type_, text, pattern: match(text, pattern.as_py())


def _split_by_pattern(type_: pa.DataType, text: pa.Array, by: pa.Scalar, limit: pa.Scalar) -> Datum:
    parts_max = limit.as_py()
    splits_max = parts_max - 1 if parts_max > 0 else None
    return pc.split_pattern_regex(text, by.as_py(), max_splits=splits_max)


def _replace(type_: pa.DataType, text: pa.Array, search: pa.Scalar, by: pa.Scalar) -> Datum:
    return pc.replace_substring(text, search.as_py(), by.as_py())


def _pad(pad: Function) -> Function:
    def function(type_: pa.DataType, text: pa.Array, width: pa.Scalar, by: pa.Scalar) -> Datum:
        columns = max(0, width.as_py())
        cut = pc.utf8_slice_codeunits(text, 0, columns) if columns else _emptied(text)
        return pad(cut, columns, by.as_py()) if by.as_py() else cut

    return function


def _emptied(text: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_null(text), pa.scalar(None, text.type), "")


# Dates, times and the rest


def _field(extract: Function) -> Function:
    return lambda type_, dates: extract(dates).cast(type_)


def _clock_field(extract: Function) -> Function:
    def function(type_: pa.DataType, moments: pa.Array, zone: pa.Scalar) -> Datum:
        has_zone = moments.type != times.WALL_CLOCK
        clock = times.wall_clock(moments, zone.as_py()) if has_zone else moments
        return extract(clock).cast(type_)

    return function


def _truncate(type_: pa.DataType, moments: pa.Array, unit: pa.Scalar, zone: pa.Scalar) -> Datum:
    return times.truncate(moments, unit.as_py(), zone.as_py())


def _truncate_date(type_: pa.DataType, dates: pa.Array, unit: pa.Scalar) -> Datum:
    return pc.floor_temporal(dates, unit=unit.as_py())


def _with_days(plain: Function) -> Function:
    """On days since 1970 as Java's int, which begins again at its other end."""

    def function(type_: pa.DataType, left: Datum, right: Datum) -> Datum:
        return plain(*(days.cast(pa.int32()) for days in _columns(left, right))).cast(type_)

    return function


def _add_months(type_: pa.DataType, dates: pa.Array, months: pa.Scalar) -> Datum:
    return times.add_months(dates, months.as_py())


def _add_interval(type_: pa.DataType, moments: pa.Array, *parts: pa.Scalar) -> Datum:
    months, days, micros, zone = (part.as_py() for part in parts)
    return times.add_interval(moments, months, days, micros, zone)


def _unix_timestamp(type_: pa.DataType, moments: pa.Array) -> Datum:
    """Rounded towards 1970: so Spark's function of that name differs from unix_seconds."""
    return pc.divide(moments.cast(pa.int64()), times.SECOND_MICROS)


def _unix_units(micros: int) -> Function:
    def function(type_: pa.DataType, moments: pa.Array) -> Datum:
        values, nulls = times.to_numpy(moments)
        return _from_values(values // micros, nulls, type_)

    return function


def _from_unix(micros: int) -> Function:
    def function(type_: pa.DataType, numbers: pa.Array) -> Datum:
        return pc.multiply_checked(numbers.cast(pa.int64()), pa.scalar(micros)).cast(type_)

    return function


def _cast(type_: pa.DataType, argument: pa.Array, zone: pa.Scalar) -> Datum:
    return casts.cast(argument, type_, zone.as_py())


def _struct_field(type_: pa.DataType, argument: pa.Array, ordinal: pa.Scalar) -> Datum:
    return pc.struct_field(argument, [ordinal.as_py()])


def _struct(type_: pa.DataType, *fields: Datum) -> Datum:
    return pa.StructArray.from_arrays(_columns(*fields), fields=list(type_))


def _sunday_first(dates: pa.Array) -> pa.Array:
    return pc.day_of_week(dates, count_from_zero=False, week_start=7)


FUNCTIONS: dict[str, Function] = {
    "add": _arithmetic(pc.add_checked, pc.add),
    "subtract": _arithmetic(pc.subtract_checked, pc.subtract),
    "multiply": _arithmetic(pc.multiply_checked, pc.multiply),
    "add_wrapping": _wrapping(pc.add),
    "subtract_wrapping": _wrapping(pc.subtract),
    "multiply_wrapping": _wrapping(pc.multiply),
    "divide": _divide,
    "integral_divide": _divide,
    "null_if_zero": _null_if_zero,
    "remainder": _remainder,
    "pmod": _pmod,
    "negate": _unary(pc.negate_checked, pc.negate),
    "negate_wrapping": _wrapping(pc.negate),
    "abs": _unary(pc.abs_checked, pc.abs),
    "abs_wrapping": _wrapping(pc.abs),
    "floor": _to_whole(pc.floor),
    "ceil": _to_whole(pc.ceil),
    "round_decimal": _round_decimal,
    "normalize_float": _normalize_float,
    "greatest": _extreme(pc.max_element_wise),
    "least": _extreme(pc.min_element_wise),
    "equal": _equal,
    "null_safe_equal": _null_safe_equal,
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda type_, left, right: _less(type_, right, left),
    "greater_equal": lambda type_, left, right: _less_equal(type_, right, left),
    "in": _in,
    "not": lambda type_, argument: pc.invert(argument),
    "is_null": lambda type_, argument: pc.is_null(argument),
    "is_not_null": lambda type_, argument: pc.is_valid(argument),
    "is_nan": _is_nan,
    "cast": _cast,
    "length": _length,
    "upper": _change_case(pc.ascii_upper, str.upper),
    "lower": _change_case(pc.ascii_lower, str.lower),
    "trim": _trim(pc.utf8_trim),
    "ltrim": _trim(pc.utf8_ltrim),
    "rtrim": _trim(pc.utf8_rtrim),
    "substring": _substring,
    "concat": _concat,
    "concat_ws": _concat_ws,
    "starts_with": _with_pattern(pc.starts_with),
    "ends_with": _with_pattern(pc.ends_with),
    "contains": _with_pattern(pc.match_substring),
    "matches": _with_pattern(pc.match_substring_regex),
    "split": _split_by_pattern,
    "split_by_text": split_by_text,
    "from_json": from_json,
    "replace": _replace,
    "lpad": _pad(pc.utf8_lpad),
    "rpad": _pad(pc.utf8_rpad),
    "year": _field(pc.year),
    "quarter": _field(pc.quarter),
    "month": _field(pc.month),
    "day": _field(pc.day),
    "day_of_year": _field(pc.day_of_year),
    "day_of_week": _field(_sunday_first),
    "weekday": _field(pc.day_of_week),
    "week_of_year": _field(pc.iso_week),
    "hour": _clock_field(pc.hour),
    "minute": _clock_field(pc.minute),
    "second": _clock_field(pc.second),
    "truncate": _truncate,
    "truncate_date": _truncate_date,
    "add_days": _with_days(pc.add),
    "subtract_days": _with_days(pc.subtract),
    "days_between": _with_days(pc.subtract),
    "add_months": _add_months,
    "add_interval": _add_interval,
    "unix_timestamp": _unix_timestamp,
    "unix_seconds": _unix_units(times.SECOND_MICROS),
    "unix_millis": _unix_units(1_000),
    "unix_micros": _unix_units(1),
    "seconds_to_timestamp": _from_unix(times.SECOND_MICROS),
    "millis_to_timestamp": _from_unix(1_000),
    "micros_to_timestamp": _from_unix(1),
    "struct": _struct,
    "struct_field": _struct_field,
    "without_zone": lambda type_, argument: argument.cast(type_),
}
