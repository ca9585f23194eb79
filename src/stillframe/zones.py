"""Instants and what clocks show, on whole columns: Arrow's zones with Java's decisions.

Instants are `timestamp('us', 'UTC')`, wall-clock times are `timestamp('us')`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cache
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

INSTANT = pa.timestamp("us", tz="UTC")
WALL_CLOCK = pa.timestamp("us")

_RULES_END_US = 2_114_380_800_000_000
"""Of 2037: Arrow knows no summer time that is after the last change in the files of the zones."""
_CYCLE_SECONDS = 146_097 * 86_400
_FIRST_SECOND, _LAST_SECOND = -719_160 * 86_400, 253_402_128_000
"""In the years 1 and 9999, with a few days to spare for zones."""
_OFFSET_PATTERN = re.compile(
    r"(?P<sign>[+-])(?:(?P<h>\d)|(?P<hour>\d\d)(?::?(?P<minute>\d\d))?|"
    r"(?P<hh>\d\d)(?P<colon>:?)(?P<mm>\d\d)(?P=colon)(?P<second>\d\d))",
    re.ASCII,
)
_OFFSET_SECONDS_MAX = 18 * 3600
_SHORT_ZONES = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}


def to_numpy(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The integers behind a column (zero where null), and where it is null."""
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    integers = array.cast(pa.int32()).cast(pa.int64()) if array.type == pa.date32() else array
    integers = integers.cast(pa.int64())
    return pc.fill_null(integers, 0).to_numpy(zero_copy_only=False), nulls


def from_numpy(
    values: npt.NDArray[np.int64], nulls: npt.NDArray[np.bool_], type_: pa.DataType
) -> pa.Array:
    """The inverse of `to_numpy`; raises ArrowInvalid where a value does not fit the type."""
    integers = pa.array(values, pa.int64(), mask=nulls)
    if type_ == pa.date32():
        return integers.cast(pa.int32()).cast(pa.date32())
    return integers.cast(type_)


def type_in_zone(type_: pa.DataType, zone: str) -> pa.DataType:
    """The type with this zone in all its instants, as Spark gives them to Python's functions."""
    if pt.is_timestamp(type_) and type_.tz is not None:
        return pa.timestamp(type_.unit, zone)
    if pt.is_struct(type_):
        return pa.struct([_field_in_zone(field, zone) for field in type_])
    if pt.is_list(type_):
        return pa.list_(_field_in_zone(type_.value_field, zone))
    if pt.is_map(type_):
        return pa.map_(type_in_zone(type_.key_type, zone), _field_in_zone(type_.item_field, zone))
    return type_


def _field_in_zone(field: pa.Field, zone: str) -> pa.Field:
    return field.with_type(type_in_zone(field.type, zone))


def wall_clock(instants: pa.Array, zone: str) -> pa.Array:
    """What the clocks of the zone show at these instants."""
    zone = common_name(zone)
    if zone == "UTC":
        return instants.cast(pa.int64()).cast(WALL_CLOCK)
    shown = pc.local_timestamp(instants.cast(pa.timestamp("us", tz=zone)))
    return _late_ones_corrected(shown, instants, zone, _offset_at_instant, 1)


def instants(clock: pa.Array, zone: str) -> pa.Array:
    """The instants at which the clocks of the zone show this.

    As java.time decides it: a time shown twice is the earlier one, a time that was skipped is
    read with the offset from before the change.
    """
    zone = common_name(zone)
    if zone == "UTC":
        return clock.cast(pa.int64()).cast(INSTANT)
    guessed = pc.assume_timezone(clock, zone, ambiguous="earliest", nonexistent="earliest")
    guessed = guessed.cast(INSTANT)
    wanted, nulls = to_numpy(clock)
    found, _ = to_numpy(guessed)
    shown, _ = to_numpy(wall_clock(guessed, zone))
    # For a skipped time Arrow answers the last instant before the gap: its offset is Java's.
    skipped = (shown != wanted) & ~nulls
    made = from_numpy(np.where(skipped, wanted - (shown - found), found), nulls, INSTANT)
    return _late_ones_corrected(made, clock, zone, offset_at, -1)


def _late_ones_corrected(
    made: pa.Array,
    given: pa.Array,
    zone: str,
    offset_of: Callable[[int, tzinfo], int],
    sign: int,
) -> pa.Array:
    """After 2037 value by value, since Arrow has no rules for then."""
    values, nulls = to_numpy(given)
    is_late = values >= _RULES_END_US
    if not is_late.any():
        return made
    there = zone_of(zone)
    late, places = np.unique(values[is_late], return_inverse=True)
    offsets = np.array([offset_of(int(us) // 1_000_000, there) for us in late], dtype=np.int64)
    corrected = to_numpy(made)[0].copy()
    corrected[is_late] = values[is_late] + sign * offsets[places] * 1_000_000
    return from_numpy(corrected, nulls, made.type)


class NoZone(ValueError):
    """It is no time zone."""


@cache
def zone_of(name: str) -> tzinfo:
    """What Java and Spark know by this name: a region, an offset, or one of Java's short names."""
    padded = re.sub(r"([+-])(\d):", r"\g<1>0\2:", name, count=1)
    padded = re.sub(r"([+-])(\d\d):(\d)$", r"\1\2:0\3", padded, count=1)
    padded = _SHORT_ZONES.get(padded, padded)
    if padded in ("Z", "UTC", "GMT", "UT"):
        return UTC
    offset = re.sub(r"^(UTC|GMT|UT)(?=[+-])", "", padded)
    if offset[:1] in ("+", "-"):
        return timezone(timedelta(seconds=_offset_seconds(offset)))
    try:
        return ZoneInfo(padded)
    except (KeyError, ValueError, OSError):
        raise NoZone(f"{name!r} is no time zone") from None


@cache
def common_name(name: str) -> str:
    """The same zone by the name that Arrow and pandas know it by; another is left as it is."""
    try:
        zone = zone_of(name)
    except NoZone:
        return name
    if isinstance(zone, ZoneInfo):
        return zone.key
    minutes, seconds = divmod(int(zone.utcoffset(None).total_seconds()), 60)  # type: ignore[union-attr]
    if not minutes and not seconds:
        return "UTC"
    hours, rest = divmod(abs(minutes), 60)
    return name if seconds else f"{'-' if minutes < 0 else '+'}{hours:02}:{rest:02}"


def _offset_seconds(text: str) -> int:
    found = _OFFSET_PATTERN.fullmatch(text)
    if found is None:
        raise NoZone(f"{text!r} is no offset")
    hours = int(found["h"] or found["hour"] or found["hh"])
    minutes = int(found["minute"] or found["mm"] or 0)
    seconds = int(found["second"] or 0)
    total = (hours * 60 + minutes) * 60 + seconds
    if minutes > 59 or seconds > 59 or total > _OFFSET_SECONDS_MAX:
        raise NoZone(f"{text!r} is no offset")
    return -total if found["sign"] == "-" else total


def offset_at(clock_seconds: int, zone: tzinfo) -> int:
    """How far ahead of UTC the clocks of the zone are when they show this.

    A time shown twice is the earlier one, and one that was skipped has the offset from before,
    as Java decides it and as Python does without a fold. The calendar repeats itself after 400
    years, and so do the rules of summer time after the last change of them.
    """
    return _seconds_ahead(_representable(clock_seconds).replace(tzinfo=zone))


def _offset_at_instant(seconds: int, zone: tzinfo) -> int:
    return _seconds_ahead(_representable(seconds).replace(tzinfo=UTC).astimezone(zone))


def _representable(seconds: int) -> datetime:
    """A moment at which clocks do what they do at this one, in the years that Python has."""
    seconds = max(seconds, _FIRST_SECOND)
    if seconds > _LAST_SECOND:
        seconds -= ((seconds - _LAST_SECOND) // _CYCLE_SECONDS + 1) * _CYCLE_SECONDS
    return datetime(1970, 1, 1) + timedelta(seconds=seconds)


def _seconds_ahead(moment: datetime) -> int:
    offset = moment.utcoffset()
    assert offset is not None
    return offset // timedelta(seconds=1)
