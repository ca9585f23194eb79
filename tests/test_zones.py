"""Clocks and instants in a zone, also after the last change that the files of zones have."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pandas as pd
import pyarrow as pa
import pytest

from stillframe.zones import NoZone, common_name, instants, wall_clock, zone_of

CLOCKS = [
    datetime(year, month, 1, 12)
    for year in (1950, 2024, 2037, 2038, 2050, 2500, 9999)
    for month in (1, 7)
]


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "Australia/Sydney"])
def test_summer_time_goes_on_after_2037(zone):
    clock = pa.array([*CLOCKS, None], pa.timestamp("us"))
    expected = [each.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC) for each in CLOCKS]
    found = instants(clock, zone)

    assert found.to_pylist() == [*expected, None]
    assert wall_clock(found, zone).equals(clock)


@pytest.mark.parametrize(
    ("name", "hours"),
    [("+02:00", 2), ("-5", -5), ("GMT+2", 2), ("UTC", 0), ("EST", -5), ("+5:30", 5.5), ("Z", 0)],
)
def test_a_zone_may_be_an_offset_or_one_of_java_s_short_names(name, hours):
    assert zone_of(name).utcoffset(datetime(2024, 7, 1)).total_seconds() == hours * 3600


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("GMT+8", "Asia/Shanghai"),
        ("UTC+08:00", "Asia/Shanghai"),
        ("+8", "Asia/Shanghai"),
        ("+5:30", "Asia/Kolkata"),
        ("PST", "America/Los_Angeles"),
        ("CTT", "Asia/Shanghai"),
        ("Z", "UTC"),
        ("Asia/Tokyo", "Asia/Tokyo"),
    ],
)
def test_clocks_and_instants_are_known_by_any_name_that_a_session_may_give_its_zone(name, region):
    clock = pa.array([datetime(2024, 7, 1, 12), datetime(2050, 7, 1, 12), None], pa.timestamp("us"))
    found = instants(clock, name)

    assert found.equals(instants(clock, region))
    assert wall_clock(found, name).equals(clock)
    shown = pd.Timestamp("2024-07-01", tz="UTC").tz_convert(common_name(name))
    assert shown.utcoffset() == datetime(2024, 7, 1, tzinfo=ZoneInfo(region)).utcoffset()


def test_a_name_that_nobody_knows_is_left_to_whoever_uses_it():
    assert common_name("Mars/Base") == "Mars/Base"


@pytest.mark.parametrize("name", ["Mars/Base", "+19:00", "", "utc", "../etc/passwd"])
def test_what_java_does_not_know_is_no_zone(name):
    with pytest.raises(NoZone):
        zone_of(name)
