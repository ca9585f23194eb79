"""Dates, times and intervals: how Spark's become ours.

Theory of operation: a moment is the same everywhere, but its day and hour are not. So what asks for
them gets the session's zone as one more argument. An interval has three parts, which are added one
after the other: months, as long as they are; days, which may have 23 hours; and microseconds.

Rules of this file: an interval that is added is a constant. (The gap of a session need not be: that
is in `gaps`.)
"""

from __future__ import annotations

import pyarrow as pa
from py4j.java_gateway import JavaObject, get_field
from pyarrow import types
from pyspark.sql.types import DayTimeIntervalType, YearMonthIntervalType

from stillframe.graph.expressions import Call, Expression, Literal
from stillframe.spark.expressions.nodes import (
    constant_of,
    refused,
    spark_type_of,
    text_literal,
    type_of,
    zone_of,
)
from stillframe.spark.expressions.rules import Rule, Translating, in_zone, literal_arguments, simple
from stillframe.spark.steps import children
from stillframe.spark.types import TIMESTAMP, TIMESTAMP_NTZ

DAY_MICROS = 86_400_000_000
"""Those of a day of 24 hours."""

_UNITS = {
    **dict.fromkeys(("year", "yyyy", "yy"), "year"),
    "quarter": "quarter",
    **dict.fromkeys(("month", "mon", "mm"), "month"),
    "week": "week",
}
_CLOCK_UNITS = {
    **_UNITS,
    **dict.fromkeys(("day", "dd"), "day"),
    **{unit: unit for unit in ("hour", "minute", "second", "millisecond", "microsecond")},
}


def _unit(node: JavaObject, given: Expression, known: dict[str, str]) -> Literal:
    (name,) = literal_arguments(node, [given])
    unit = known.get(name.lower())
    if unit is None:
        raise refused(node, f"has the unknown unit {name!r}")
    return text_literal(unit)


def _truncate_timestamp(translator: Translating, node: JavaObject) -> Expression:
    given, moments = translator.children(node)
    unit = _unit(node, given, _CLOCK_UNITS)
    return Call("truncate", (moments, unit, zone_of(node)), type_of(node))


def _truncate_date(translator: Translating, node: JavaObject) -> Expression:
    dates, given = translator.children(node)
    return Call("truncate_date", (dates, _unit(node, given, _UNITS)), pa.date32())


def _unix_timestamp(translator: Translating, node: JavaObject) -> Expression:
    moments = translator.translate(children(node)[0])
    if types.is_date32(moments.type):
        moments = Call("cast", (moments, zone_of(node)), TIMESTAMP)
    if moments.type != TIMESTAMP:
        raise refused(node)
    return Call("unix_timestamp", (moments,), pa.int64())


def _from_unix(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        (number,) = translator.children(node)
        if not types.is_integer(number.type):
            raise refused(node)
        return Call(function, (number,), TIMESTAMP)

    return rule


def _add_interval(translator: Translating, node: JavaObject) -> Expression:
    moments, interval = children(node)
    parts = [Literal(pa.scalar(part, pa.int64())) for part in _constant_parts(node, interval)]
    type_ = type_of(node)
    zone = text_literal("UTC") if type_ == TIMESTAMP_NTZ else zone_of(node)
    return Call("add_interval", (translator.translate(moments), *parts, zone), type_)


def _constant_parts(node: JavaObject, interval: JavaObject) -> tuple[int, int, int]:
    """Months, days and microseconds of a constant interval."""
    constant = constant_of(interval)
    if constant is None or constant[0] is None:
        raise refused(node, "needs a constant interval to be evaluated in a stream")
    value = constant[0]
    match spark_type_of(interval):
        case YearMonthIntervalType():
            return int(value), 0, 0
        case DayTimeIntervalType():
            days = abs(int(value)) // DAY_MICROS * (1 if value >= 0 else -1)
            return 0, days, int(value) - days * DAY_MICROS
        case _:
            return interval_parts(value)


def interval_parts(value: JavaObject) -> tuple[int, int, int]:
    """Months, days and microseconds of a calendar interval in Spark's internal form."""
    names = ("months", "days", "microseconds")
    months, days, micros = (int(get_field(value, name)) for name in names)
    return months, days, micros


def _add_months(translator: Translating, node: JavaObject) -> Expression:
    dates, interval = children(node)
    constant = constant_of(interval)
    if constant is None or constant[0] is None:
        raise refused(node, "needs a constant number of months to be evaluated in a stream")
    months = Literal(pa.scalar(int(constant[0]), pa.int64()))
    return Call("add_months", (translator.translate(dates), months), pa.date32())


TIME_RULES: dict[str, Rule] = {
    "Year": simple("year"),
    "Quarter": simple("quarter"),
    "Month": simple("month"),
    "DayOfMonth": simple("day"),
    "DayOfYear": simple("day_of_year"),
    "DayOfWeek": simple("day_of_week"),
    "WeekDay": simple("weekday"),
    "WeekOfYear": simple("week_of_year"),
    "Hour": in_zone("hour"),
    "Minute": in_zone("minute"),
    "Second": in_zone("second"),
    "TruncTimestamp": _truncate_timestamp,
    "TruncDate": _truncate_date,
    "DateAdd": simple("add_days"),
    "DateSub": simple("subtract_days"),
    "DateDiff": simple("days_between"),
    "AddMonths": _add_months,
    "DateAddYMInterval": _add_months,
    "TimestampAddInterval": _add_interval,
    "TimeAdd": _add_interval,  # as Spark called it before 4.1
    "TimestampAddYMInterval": _add_interval,
    "UnixTimestamp": _unix_timestamp,
    "ToUnixTimestamp": _unix_timestamp,
    "UnixSeconds": simple("unix_seconds"),
    "UnixMillis": simple("unix_millis"),
    "UnixMicros": simple("unix_micros"),
    "SecondsToTimestamp": _from_unix("seconds_to_timestamp"),
    "MillisToTimestamp": _from_unix("millis_to_timestamp"),
    "MicrosToTimestamp": _from_unix("micros_to_timestamp"),
}
