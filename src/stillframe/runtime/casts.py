"""Casts on whole columns with the results of Spark's ANSI mode.

`castable` says which pairs of types are here; the translation from Spark refuses the others when
the job is built. What cannot be cast raises ArrowInvalid, with the value that was seen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from stillframe.runtime import times

# What Java's String.trim takes away: everything up to the space.
_BLANKS = "".join(chr(code) for code in range(0x21)) + "\x7f"
_INTEGER = r"^[+-]?[0-9]+$"
_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[dDfF]?$"
_SPECIAL_FLOAT = r"(?i)^([+-]?inf(inity)?|nan)$"
_TRUE_WORDS = pa.array(["t", "true", "y", "yes", "1"])
_FALSE_WORDS = pa.array(["f", "false", "n", "no", "0"])
_DATE = r"(?P<year>[0-9]{4})(?:-(?P<month>[0-9]{1,2})(?:-(?P<day>[0-9]{1,2})"
_DATE_ONLY = rf"^{_DATE}(?:[ T].*)?)?)?$"
_DATE_TIME = (
    rf"^{_DATE}(?:[ T](?P<hour>[0-9]{{1,2}}):(?P<minute>[0-9]{{1,2}})"
    r"(?::(?P<second>[0-9]{1,2})(?:\.(?P<fraction>[0-9]{0,9}))?)?"
    r" ?(?P<zone>Z|UTC|[+-][0-9]{2}:[0-9]{2})?)?)?)?$"
)


def cast(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    """The column as another type; `zone` is the session's, for dates, times and strings."""
    if array.type == target:
        return array
    if types.is_null(array.type):
        return pa.nulls(len(array), target)
    return _cast_of(array.type, target)(array, target, zone)


def castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether the cast gives what Spark gives."""
    if source == target or types.is_null(source):
        return True
    try:
        _cast_of(source, target)
    except NotImplementedError:
        return False
    return True


def cannot_fail(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether every value can be cast, so that Spark's ANSI and legacy modes agree."""
    if source == target or types.is_null(source):
        return True
    if types.is_temporal(source):
        return not types.is_integer(target)
    if types.is_binary(source):
        return True
    if types.is_boolean(source) or types.is_string(target) or types.is_boolean(target):
        return not types.is_string(source)
    if types.is_integer(source) and types.is_integer(target):
        return bool(source.bit_width <= target.bit_width)
    return not types.is_string(source) and types.is_floating(target)


_Cast = Callable[[pa.Array, pa.DataType, str], pa.Array]


def _cast_of(source: pa.DataType, target: pa.DataType) -> _Cast:
    for from_kind, to_kind, function in _CASTS:
        if from_kind(source) and to_kind(target):
            return function
    raise NotImplementedError(f"cast from {source} to {target}")


def _plain(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return array.cast(target)


def _as_text(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    """Bytes as text. Spark keeps those that are not UTF-8 and shows U+FFFD: they become it here."""
    try:
        return array.cast(target)
    except pa.ArrowInvalid:
        values = (each.as_py() for each in array)
        return pa.array(
            [None if each is None else each.decode("utf-8", "replace") for each in values], target
        )


def _rounding(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    """A number to the nearest float: losing digits is no error."""
    return array.cast(target, safe=False)


def _not_zero(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return pc.not_equal(array, pa.scalar(0, pa.int32()).cast(array.type))


def _float_to_integer(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    values = np.trunc(pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.float64))
    limits = np.iinfo(target.to_pandas_dtype())
    # float(2**63 - 1) is 2**63: Java accepts it and answers the largest long.
    wrong = ~((values >= float(limits.min)) & (values <= float(limits.max)))
    _refuse(array, wrong, f"does not fit {target}")
    top = values >= 2.0**63
    whole = np.where(top, limits.max, np.where(top, 0.0, values).astype(np.int64))
    return times.from_numpy(whole, array.is_null().to_numpy(zero_copy_only=False), target)


def _integer_to_decimal(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return fit(array.cast(pa.int64()).cast(pa.decimal256(19, 0)), target)


def _decimal_to_integer(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    options = pc.CastOptions(target_type=target, allow_decimal_truncate=True)
    return pc.cast(array, options=options)


def _decimal_to_decimal(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return fit(array, target)


def _decimal_to_float(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    # Through the digits: Arrow's direct conversion may be off by one in the last place.
    return array.cast(pa.string()).cast(pa.float64()).cast(target, safe=False)


def fit(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Decimals rounded half up to the target's scale; ArrowInvalid where digits do not fit."""
    scale = max(array.type.scale, target.scale)
    # One digit more than there is: 9.9 becomes 10, and Arrow rounds to 0 what has no room.
    digits = min(76, array.type.precision - array.type.scale + scale + 1)
    array = array.cast(pa.decimal256(digits, scale))
    if scale > target.scale:
        array = pc.round(array, target.scale, "half_towards_infinity")
    return array.cast(target)


def _trimmed(array: pa.Array) -> pa.Array:
    return pc.utf8_trim(array, characters=_BLANKS)


def _string_to_integer(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    text = _trimmed(array)
    _refuse_unmatched(array, pc.match_substring_regex(text, _INTEGER), f"is no {target}")
    return pc.replace_substring_regex(text, r"^\+", "").cast(target)


def _string_to_float(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    text = _trimmed(array)
    special = pc.match_substring_regex(text, _SPECIAL_FLOAT)
    ordinary = pc.match_substring_regex(text, _FLOAT)
    _refuse_unmatched(array, pc.or_(special, ordinary), f"is no {target}")
    digits = pc.replace_substring_regex(text, r"[dDfF]$", "")
    return pc.replace_substring_regex(pc.if_else(special, text, digits), r"^\+", "").cast(target)


def _string_to_boolean(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    text = pc.utf8_lower(_trimmed(array))
    true = pc.is_in(text, value_set=_TRUE_WORDS)
    false = pc.is_in(text, value_set=_FALSE_WORDS)
    _refuse_unmatched(array, pc.or_(true, false), "is no boolean")
    return pc.if_else(text.is_null(), pa.scalar(None, pa.bool_()), true)


def _string_to_date(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    days, _ = _parsed_days(array, _DATE_ONLY)
    return times.from_numpy(days, array.is_null().to_numpy(zero_copy_only=False), pa.date32())


def _string_to_timestamp(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    days, parts = _parsed_days(array, _DATE_TIME)
    hour, minute, second = (_part(parts, name, 0) for name in ("hour", "minute", "second"))
    _refuse(array, (hour > 23) | (minute > 59) | (second > 59), "is no time of day")
    fraction = pc.utf8_slice_codeunits(pc.utf8_rpad(parts.field("fraction"), 6, "0"), 0, 6)
    micros = pc.fill_null(fraction.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    clock = times.from_numpy(seconds * times.SECOND_MICROS + micros, nulls, times.WALL_CLOCK)
    if target == times.WALL_CLOCK:
        return clock
    return _at_given_zones(clock, parts.field("zone"), zone)


def _at_given_zones(clock: pa.Array, given: pa.Array, zone: str) -> pa.Array:
    """The instants: with the offset written in the text, or else in the session's zone."""
    here = times.instants(clock, zone)
    if not pc.any(pc.greater(pc.binary_length(given), 0)).as_py():
        return here
    signed = pc.match_substring_regex(given, "^[+-]")
    offset = pc.if_else(signed, given, "+00:00")
    hours = pc.utf8_slice_codeunits(offset, 1, 3).cast(pa.int64())
    minutes = pc.utf8_slice_codeunits(offset, 4, 6).cast(pa.int64())
    total = pc.add(pc.multiply(hours, 60), minutes)
    total = pc.if_else(pc.starts_with(offset, "-"), pc.negate(total), total)
    shift = pc.multiply(total, 60 * times.SECOND_MICROS)
    there = pc.subtract(clock.cast(pa.int64()), shift).cast(times.INSTANT)
    return pc.if_else(pc.equal(pc.binary_length(given), 0), here, there)


def _parsed_days(array: pa.Array, pattern: str) -> tuple[npt.NDArray[np.int64], pa.StructArray]:
    parts = pc.extract_regex(_trimmed(array), pattern)
    _refuse_unmatched(array, parts.is_valid(), "is no date or time of the form 2024-12-31 23:59:59")
    year, month, day = (_part(parts, name, 1) for name in ("year", "month", "day"))
    wrong = (month < 1) | (month > 12) | (day < 1)
    months = np.where(wrong, 0, (year - 1970) * 12 + month - 1).astype("datetime64[M]")
    first = months.astype("datetime64[D]")
    date = first + (day - 1).astype("timedelta64[D]")
    wrong |= date.astype("datetime64[M]") != months
    _refuse(array, wrong, "is no day of the calendar")
    return date.astype(np.int64), parts


def _part(parts: pa.StructArray, name: str, default: int) -> npt.NDArray[np.int64]:
    text = parts.field(name)
    present = pc.greater(pc.binary_length(text), 0)
    number = pc.if_else(present, text, str(default)).cast(pa.int64())
    values: npt.NDArray[np.int64] = pc.fill_null(number, default).to_numpy(zero_copy_only=False)
    return values


def _refuse_unmatched(array: pa.Array, matched: pa.Array, why: str) -> None:
    accepted = pc.or_(pc.fill_null(matched, False), array.is_null())
    if not pc.all(accepted, min_count=0).as_py():
        _refuse(array, pc.invert(accepted).to_numpy(zero_copy_only=False), why)


def _refuse(array: pa.Array, wrong: npt.NDArray[np.bool_], why: str) -> None:
    wrong = wrong & array.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        raise pa.ArrowInvalid(f"the value {array[int(wrong.argmax())].as_py()!r} {why}")


def _decimal_to_string(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return array.cast(pa.string())


def _date_to_string(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return _with_sign_of_long_years(array.cast(pa.string()))


def _timestamp_to_string(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    clock = array if array.type == times.WALL_CLOCK else times.wall_clock(array, zone)
    text = pc.strftime(clock, format="%Y-%m-%d %H:%M:%S")
    text = pc.replace_substring_regex(text, r"\.0{6}$", "")
    text = pc.replace_substring_regex(text, r"(\.[0-9]*[1-9])0+$", r"\1")
    return _with_sign_of_long_years(text)


def _with_sign_of_long_years(text: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(text, r"^([0-9]{5,})", r"+\1")


def _timestamp_to_date(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    clock = array if array.type == times.WALL_CLOCK else times.wall_clock(array, zone)
    return clock.cast(pa.date32())


def _date_to_timestamp(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    if target == times.WALL_CLOCK:
        return array.cast(times.WALL_CLOCK)
    return times.midnights(array, zone)


def _between_timestamps(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    if target == times.WALL_CLOCK:
        return times.wall_clock(array, zone)
    return times.instants(array, zone)


def _instant_to_integer(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    return times.unix_seconds(array).cast(target)


def _instant_to_double(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    micros = array.cast(pa.int64()).cast(pa.float64(), safe=False)
    return pc.divide(micros, float(times.SECOND_MICROS)).cast(target, safe=False)


def _integer_to_instant(array: pa.Array, target: pa.DataType, zone: str) -> pa.Array:
    """Seconds; a time that is too far away is the last or the first there is."""
    seconds, nulls = times.to_numpy(array)
    limits = np.iinfo(np.int64)
    last = limits.max // times.SECOND_MICROS
    micros = np.clip(seconds, -last, last) * times.SECOND_MICROS
    micros = np.where(seconds > last, limits.max, np.where(seconds < -last, limits.min, micros))
    return times.from_numpy(micros, nulls, times.INSTANT)


def _is_instant(type_: pa.DataType) -> bool:
    return bool(type_ == times.INSTANT)


def _is_wide_float(type_: pa.DataType) -> bool:
    return bool(types.is_float64(type_))


def _is_readable_decimal(type_: pa.DataType) -> bool:
    # With more digits after the point Arrow writes small numbers as 1E-7, Spark does not.
    return bool(types.is_decimal128(type_) and type_.scale <= 6)


_Kind = Callable[[pa.DataType], bool]
_CASTS: tuple[tuple[_Kind, _Kind, _Cast], ...] = (
    (types.is_integer, types.is_integer, _plain),
    (types.is_integer, types.is_floating, _rounding),
    (types.is_floating, types.is_floating, _rounding),
    (types.is_floating, types.is_integer, _float_to_integer),
    (types.is_integer, types.is_decimal128, _integer_to_decimal),
    (types.is_decimal128, types.is_integer, _decimal_to_integer),
    (types.is_decimal128, types.is_decimal128, _decimal_to_decimal),
    (types.is_decimal128, _is_wide_float, _decimal_to_float),
    (types.is_boolean, types.is_integer, _plain),
    (types.is_boolean, types.is_floating, _plain),
    (types.is_integer, types.is_boolean, _not_zero),
    (types.is_floating, types.is_boolean, _not_zero),
    (types.is_integer, types.is_string, _plain),
    (types.is_boolean, types.is_string, _plain),
    (_is_readable_decimal, types.is_string, _decimal_to_string),
    (types.is_date32, types.is_string, _date_to_string),
    (types.is_timestamp, types.is_string, _timestamp_to_string),
    (types.is_string, types.is_integer, _string_to_integer),
    (types.is_string, types.is_floating, _string_to_float),
    (types.is_string, types.is_boolean, _string_to_boolean),
    (types.is_string, types.is_date32, _string_to_date),
    (types.is_string, types.is_timestamp, _string_to_timestamp),
    (types.is_string, types.is_binary, _plain),
    (types.is_binary, types.is_string, _as_text),
    (types.is_timestamp, types.is_date32, _timestamp_to_date),
    (types.is_date32, types.is_timestamp, _date_to_timestamp),
    (types.is_timestamp, types.is_timestamp, _between_timestamps),
    (_is_instant, types.is_integer, _instant_to_integer),
    (_is_instant, _is_wide_float, _instant_to_double),
    (types.is_integer, _is_instant, _integer_to_instant),
)
