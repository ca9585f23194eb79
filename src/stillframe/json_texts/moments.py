"""Dates and times as Spark reads them out of text, one by one.

Microseconds and days since 1970 in a calendar without ends, other than Python's own dates, which
are of the years 1 to 9999. What is accepted is what Spark's casts accept.
"""

from __future__ import annotations

import re
from datetime import datetime

from stillframe.zones import NoZone, offset_at, zone_of

_DAY_SECONDS = 86_400
_LONG_MAX, _INT_MAX = 2**63 - 1, 2**31 - 1
_BLANKS = "".join(map(chr, range(0x21))) + "\x7f"
_TIME = (
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})"
    r"(?:\.(?P<fraction>\d*))?(?P<zone>\D.*)?)?)?"
)
_DAY = r"(?P<year>[+-]?\d{4,%d})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})(?:[ T]%s)?)?)?"
_FLAGS = re.ASCII | re.DOTALL
_DATE_PATTERN = re.compile(_DAY % (7, ".*"), _FLAGS)
_MOMENT_PATTERN = re.compile(_DAY % (6, _TIME), _FLAGS)
_TIME_PATTERN = re.compile(rf"(?=T|\d+:)T?{_TIME}", _FLAGS)
_DAYS_PATTERN = re.compile(r"[+-]?\d+", re.ASCII)
_JULIAN_UNTIL_DAY = -141_427


class NoMoment(ValueError):
    """The text is no date or time."""


def day_of(text: str) -> int:
    """Days since 1970."""
    try:
        return _date(text)
    except NoMoment:
        return _date(_without_gmt(text))


def date_of(text: str) -> int:
    """Days since 1970, also of a text that is their number."""
    try:
        return day_of(text)
    except NoMoment:
        # Spark 1.5 wrote dates as numbers of days, and counted them in the old calendar.
        if _DAYS_PATTERN.fullmatch(text) is None or abs(int(text)) > _INT_MAX:
            raise
        return _rebased(int(text))


def instant_of(text: str, zone: str) -> int:
    """Microseconds since 1970; of a time that does not say its zone, on the clocks of this one."""
    try:
        return _instant(text, zone)
    except NoMoment:
        return _instant(_without_gmt(text), zone)


def wall_clock_of(text: str) -> int:
    """Microseconds since 1970 on a clock without a zone; a text with one is refused."""
    found = _MOMENT_PATTERN.fullmatch(text.strip(_BLANKS))
    if found is None or found["zone"] is not None:
        raise NoMoment(f"{text!r} is no time without a zone")
    return _in_range(_days(found) * _DAY_SECONDS * 1_000_000 + _micros_of_day(found), _LONG_MAX)


def _date(text: str) -> int:
    found = _DATE_PATTERN.fullmatch(text.strip(_BLANKS))
    if found is None:
        raise NoMoment(f"{text!r} is no date")
    return _in_range(_days(found), _INT_MAX)


def _instant(text: str, session_zone: str) -> int:
    found = _MOMENT_PATTERN.fullmatch(text.strip(_BLANKS))
    today = None
    if found is None:
        # A time alone is of today; Spark wants its T, if it has one, before any blank.
        trimmed = text.strip(_BLANKS)
        today = _TIME_PATTERN.fullmatch(trimmed)
        if today is None or (trimmed.startswith("T") and not text.startswith("T")):
            raise NoMoment(f"{text!r} is no time")
    parts = found or today
    assert parts is not None
    said = parts["zone"].strip(_BLANKS) if parts["zone"] is not None else session_zone
    try:
        zone = zone_of(said)
    except NoZone:
        raise NoMoment(f"{said!r} is no time zone") from None
    days = _days(found) if found else datetime.now(zone).toordinal() - 719_163
    micros = days * _DAY_SECONDS * 1_000_000 + _micros_of_day(parts)
    return _in_range(micros - offset_at(micros // 1_000_000, zone) * 1_000_000, _LONG_MAX)


def _days(found: re.Match[str]) -> int:
    year, month, day = int(found["year"]), int(found["month"] or 1), int(found["day"] or 1)
    is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    lengths = (31, 29 if is_leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    if not 1 <= month <= 12 or not 1 <= day <= lengths[month - 1]:
        raise NoMoment(f"{found[0]!r} is no day of the calendar")
    return _days_since_1970(year, month, day)


def _days_since_1970(year: int, month: int, day: int) -> int:
    # The year begins in March, so that a leap day is its last.
    year -= month <= 2
    day_of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return 365 * year + year // 4 - year // 100 + year // 400 + day_of_year - 719_468


def _rebased(days: int) -> int:
    """The day with the same name in today's calendar as this one had in the Julian calendar."""
    if days >= _JULIAN_UNTIL_DAY:
        return days
    since_march = days + 719_470
    year = (4 * since_march + 3) // 1461
    day_of_year = since_march - 1461 * year // 4
    shifted = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + 3 if shifted < 10 else shifted - 9
    return _days_since_1970(year + (month <= 2), month, day)


def _micros_of_day(found: re.Match[str]) -> int:
    hour, minute, second = (int(found[part] or 0) for part in ("hour", "minute", "second"))
    if hour > 23 or minute > 59 or second > 59:
        raise NoMoment(f"{found[0]!r} is no time of day")
    fraction = int((found["fraction"] or "")[:6].ljust(6, "0"))
    return ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction


def _in_range(value: int, largest: int) -> int:
    if not -largest - 1 <= value <= largest:
        raise NoMoment("it is too far from 1970")
    return value


def _without_gmt(text: str) -> str:
    return text.replace("GMT", "", 1)
