"""Dates and timestamps on whole columns, in Spark's calendar and in a given time zone.

Instants are `timestamp('us', 'UTC')`, wall-clock times are `timestamp('us')`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.zones import INSTANT as INSTANT
from stillframe.zones import WALL_CLOCK as WALL_CLOCK
from stillframe.zones import from_numpy as from_numpy
from stillframe.zones import instants as instants
from stillframe.zones import to_numpy as to_numpy
from stillframe.zones import wall_clock as wall_clock

SECOND_MICROS = 1_000_000
DAY_MICROS = 86_400 * SECOND_MICROS

_FIXED_MICROS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": SECOND_MICROS,
    "minute": 60 * SECOND_MICROS,
    "hour": 3_600 * SECOND_MICROS,
}


def dates(instants_: pa.Array, zone: str) -> pa.Array:
    """The calendar day in the zone."""
    return wall_clock(instants_, zone).cast(pa.date32())


def midnights(days: pa.Array, zone: str) -> pa.Array:
    """The instants at which these days begin in the zone."""
    return instants(days.cast(WALL_CLOCK), zone)


def truncate(moments: pa.Array, unit: str, zone: str) -> pa.Array:
    """The beginning of the unit these instants or wall-clock times are in."""
    if moments.type == WALL_CLOCK:
        return _truncate_clock(moments, unit)
    if unit not in _FIXED_MICROS:
        return instants(_truncate_clock(wall_clock(moments, zone), unit), zone)
    # Up to an hour the offset stays what it is: going through the wall clock and back would
    # move the second of two equal hours an hour back.
    instant, nulls = to_numpy(moments)
    clock, _ = to_numpy(wall_clock(moments, zone))
    return from_numpy(instant - clock % _FIXED_MICROS[unit], nulls, INSTANT)


def _truncate_clock(clock: pa.Array, unit: str) -> pa.Array:
    return pc.floor_temporal(clock, unit=unit)


def add_months(days: pa.Array, months: int) -> pa.Array:
    """The same day so many months later, or the last day of that month if it is shorter."""
    values, nulls = to_numpy(days)
    return from_numpy(_months_later(values, months), nulls, pa.date32())


def _months_later(days: npt.NDArray[np.int64], months: int) -> npt.NDArray[np.int64]:
    date = days.astype("datetime64[D]")
    month = date.astype("datetime64[M]")
    day_of_month = date - month.astype("datetime64[D]")
    target = month + np.timedelta64(months, "M")
    first = target.astype("datetime64[D]")
    one_day = np.timedelta64(1, "D")
    last_day = (target + np.timedelta64(1, "M")).astype("datetime64[D]") - first - one_day
    later: npt.NDArray[np.int64] = (first + np.minimum(day_of_month, last_day)).astype(np.int64)
    return later


def add_interval(moments: pa.Array, months: int, days: int, micros: int, zone: str) -> pa.Array:
    """Later by calendar months and days on the zone's wall clock, then by exact microseconds."""
    moved = _add_calendar(moments, months, days, zone) if months or days else moments
    values = pc.add_checked(moved.cast(pa.int64()), pa.scalar(micros, pa.int64()))
    return values.cast(moments.type)


def _add_calendar(moments: pa.Array, months: int, days: int, zone: str) -> pa.Array:
    has_zone = moments.type != WALL_CLOCK
    clock = wall_clock(moments, zone) if has_zone else moments
    shown, nulls = to_numpy(clock)
    day, time_of_day = np.divmod(shown, DAY_MICROS)
    day = _months_later(day, months) + days
    later = day * DAY_MICROS + time_of_day
    moved = from_numpy(later, nulls, WALL_CLOCK)
    if not has_zone:
        return moved
    before, _ = to_numpy(moments)
    return _keep_offset(moved, shown - before, zone)


def _keep_offset(clock: pa.Array, offset: npt.NDArray[np.int64], zone: str) -> pa.Array:
    """Of two instants that show the same time, the one with the offset we came from."""
    wanted, nulls = to_numpy(clock)
    kept = from_numpy(wanted - offset, nulls, INSTANT)
    shown, _ = to_numpy(wall_clock(kept, zone))
    found, _ = to_numpy(instants(clock, zone))
    same = np.where(shown == wanted, wanted - offset, found)
    return from_numpy(same, nulls, INSTANT)


def unix_seconds(instants_: pa.Array) -> pa.Array:
    """Whole seconds since 1970, rounded down also before it."""
    values, nulls = to_numpy(instants_)
    return pa.array(values // SECOND_MICROS, pa.int64(), mask=nulls)
