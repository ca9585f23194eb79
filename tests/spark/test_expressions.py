"""Every supported expression, evaluated by Spark and by us on the same awkward rows."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError, DataError, UserCodeError
from stillframe.graph.expressions import Column, Named
from stillframe.runtime.expressions import evaluate, filter_batch, project
from stillframe.spark.expressions import aggregation_of, condition_of, projection_of
from stillframe.spark.types import empty_frame, from_arrow_schema, parse_schema, to_arrow_schema

pytestmark = pytest.mark.spark

DDL = """
    b boolean, t tinyint, s smallint, i int, l bigint, f float, d double, dec decimal(10,2),
    st string, num string, word string, day_text string, time_text string, bin binary,
    dt date, ts timestamp, tn timestamp_ntz, sr struct<x: int, y: string>
"""
UTC = datetime.UTC


def _instant(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=UTC)


def _clock(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _date(text: str) -> datetime.date:
    return datetime.date.fromisoformat(text)


# One row per line of each column: nulls, extremes, NaN, negative zero, the empty string, letters
# outside ASCII, times before 1970, and New York's skipped and repeated hours.
ROWS: dict[str, list[Any]] = {
    "b": [True, False, None, True, False, None, True, False],
    "t": [1, -128, 127, 0, None, 5, -7, 3],
    "s": [1, -32768, 32767, 0, None, 5, -7, 3],
    "i": [1, -(2**31), 2**31 - 1, 0, None, 5, -7, 3],
    "l": [1, -(2**63), 2**63 - 1, 0, None, 5, -7, 3],
    "f": [1.5, -0.0, math.nan, math.inf, None, -math.inf, 3.25e10, 0.1],
    "d": [1.5, -0.0, math.nan, math.inf, None, -math.inf, 1e300, 0.1],
    "dec": [Decimal(text) for text in ("1.50", "-0.01", "99999999.99", "0.00")]
    + [None]
    + [Decimal(text) for text in ("-99999999.99", "2.45", "-2.45")],
    "st": ["abc", "", " Ab c ", "ßéÜ日本", None, "a%b_c\\d", "İstanbul\n", "xxabcxx"],
    "num": ["1", " -2 ", "+3", "007", None, "\t8\n", "-0", "99"],
    "word": ["true", " F ", "Yes", "0", None, "N", "t", "1"],
    "day_text": ["2024-02-29", "1969-1-2", "2024", "2024-06", None, " 2024-12-31 ", "0001-01-01"]
    + ["2024-03-10T01:02:03"],
    "time_text": ["2024-02-29 12:34:56.789", "1969-12-31T23:59:59", "2024-03-10 02:30:00", None]
    + ["2024-11-03 01:30", "2024-06-01 00:00:00+05:30", "2024-06-01T10:00:00Z", "2024-06"],
    "bin": [b"a", b"", b"\x00\xff", None, b"abc", b"\xff", b"z", b"a"],
    "dt": [_date(d) for d in ("2024-02-29", "1969-12-31", "1970-01-01", "2023-12-31")]
    + [None]
    + [_date(d) for d in ("1883-11-18", "9990-12-31", "2021-01-31")],
    "ts": [_instant("2024-03-10T06:59:59.999999"), _instant("2024-03-10T07:30:00")]
    + [_instant("1969-12-31T23:59:59.000001"), _instant("2024-11-03T05:30:00"), None]
    + [_instant("2024-11-03T06:30:00.5"), _instant("1850-06-01T12:00:00")]
    + [_instant("2024-02-29T23:30:15.120000")],
    "tn": [_clock("2024-03-10T02:30:00"), _clock("1969-12-31T23:59:59.999999"), None]
    + [_clock("2024-11-03T01:30:00"), _clock("1883-11-18T12:01:00"), _clock("2024-02-29T00:00:00")]
    + [_clock("2025-12-31T23:00:00"), _clock("2024-01-31T10:00:00")],
    "sr": [{"x": 1, "y": "a"}, None, {"x": None, "y": ""}, {"x": 4, "y": None}] * 2,
}

SUPPORTED = r"""
    i
    I
    l AS renamed
    sr
    1
    -1L
    1.5
    1.5D
    CAST('NaN' AS double)
    'text'
    true
    x'00ff'
    null
    date'1969-12-31'
    timestamp'2024-03-10 02:30:00'
    timestamp_ntz'1969-12-31 23:59:59.999999'
    2 * 3 + 4
    to_date('2024-02-29', 'yyyy-MM-dd')
    CAST(t AS int) + 1
    CAST(i AS bigint) - 1
    CAST(t AS bigint) * s
    i + 0.5D
    d + d
    d - 1
    d * d
    f * 2
    f + d
    d / 4
    i / 4
    l / 3
    i div 4
    CAST(t AS int) div -3
    l % 3
    i % -3
    d % 0.7
    f % 2
    pmod(l, 3)
    pmod(i, -3)
    pmod(d, 2)
    -d
    - CAST(i AS bigint)
    +i
    abs(d)
    abs(CAST(i AS bigint))
    dec + 1
    dec - dec
    dec * dec
    dec + i
    dec * 1.005
    -dec
    round(dec, 1)
    round(dec)
    round(i, 2)
    floor(if(abs(d) < 1e18D, d, -1.5D))
    ceil(if(abs(d) < 1e18D, d, -1.5D))
    floor(i)
    greatest(i, 3, null)
    least(st, 'b')
    greatest(dt, date'2000-01-01')
    i = 1
    i <> 1
    i < 5
    i <= 5
    i > 5
    i >= 5
    i <=> null
    i <=> 5
    d = d
    d = CAST('NaN' AS double)
    d <=> CAST('NaN' AS double)
    d < CAST('NaN' AS double)
    d <= CAST('NaN' AS double)
    d > 1.0
    d >= CAST('NaN' AS double)
    CAST('NaN' AS double) > d
    d = 0.0
    f < d
    f = 0.1
    st < 'b'
    st = 'ßéÜ日本'
    b < true
    b = false
    bin < x'61'
    bin = x'61'
    dec > 1
    dec = 1.5
    dt < date'1970-01-01'
    ts < timestamp'1970-01-01 00:00:00'
    ts = tn
    dt < ts
    i in (1, 5)
    i in (1, null)
    i not in (1, 5)
    i in (l, 3)
    d in (CAST('NaN' AS double), 1.5)
    st in ('abc', '')
    dt in (date'1970-01-01', null)
    dec in (1.50, 2)
    i between 0 and 5
    st between 'a' and 'b'
    i not between 0 and 5
    b and i > 0
    b or i > 0
    not b
    b and null
    b or null
    i is null
    i is not null
    isnull(st)
    isnotnull(st)
    isnan(d)
    isnan(f)
    nanvl(d, 7)
    coalesce(i, 7)
    coalesce(st, num, 'none')
    nvl(i, 7)
    nvl2(i, 1, 2)
    ifnull(st, 'none')
    nullif(i, 5)
    nullif(st, '')
    zeroifnull(i)
    if(b, i, -1)
    case when i > 0 then 'positive' when i < 0 then 'negative' end
    case i when 1 then 'one' when 5 then 'five' else 'many' end
    case when b then sr end
    case when i <> 0 then 100 / i else 0 end
    i <> 0 and 100 / i > 1
    i = 0 or 100 / i > 1
    coalesce(if(i = 0, -1, null), 100 / i)
    if(i between -100 and 100, CAST(i AS tinyint), null)
    CAST(i AS bigint)
    CAST(t AS smallint)
    CAST(i AS double)
    CAST(l AS float)
    CAST(l AS double)
    CAST(i AS string)
    CAST(l AS boolean)
    CAST(d AS boolean)
    CAST(d AS float)
    CAST(f AS double)
    CAST(b AS int)
    CAST(b AS double)
    CAST(b AS string)
    CAST(i AS decimal(20, 3))
    CAST(l AS decimal(38, 0))
    CAST(dec AS int)
    CAST(dec AS double)
    CAST(dec AS string)
    CAST(dec AS decimal(12, 1))
    CAST(num AS int)
    CAST(num AS tinyint)
    CAST(num AS bigint)
    CAST(num AS double)
    CAST(num AS float)
    CAST(concat(t, '.25e2') AS double)
    CAST(if(i > 0, 'Infinity', '-inf') AS double)
    CAST(if(i > 0, 'nan', '1.5D') AS double)
    CAST(word AS boolean)
    CAST(day_text AS date)
    CAST(time_text AS timestamp)
    CAST(st AS binary)
    CAST(dt AS string)
    CAST(ts AS string)
    CAST(tn AS string)
    CAST(ts AS date)
    CAST(tn AS date)
    CAST(dt AS timestamp)
    CAST(dt AS timestamp_ntz)
    CAST(ts AS timestamp_ntz)
    CAST(tn AS timestamp)
    CAST(ts AS bigint)
    CAST(ts AS double)
    CAST(i AS timestamp)
    CAST(null AS int)
    i || '-' || st
    length(st)
    length(bin)
    char_length(st)
    upper(st)
    lower(st)
    upper(num)
    trim(st)
    ltrim(st)
    rtrim(st)
    trim(BOTH 'xa' FROM st)
    ltrim('x', st)
    btrim(st)
    substring(st, 2, 3)
    substring(st, 0, 2)
    substring(st, 2)
    substring(st, -3, 2)
    substring(st, -10, 8)
    substring(st, -2)
    substring(st, 1, 0)
    left(st, 2)
    right(st, 2)
    concat(st, num, 'x')
    concat(bin, bin)
    concat_ws('-', st, num)
    concat_ws('-', st, null)
    startswith(st, 'ab')
    endswith(st, 'xx')
    contains(st, 'abc')
    st like 'a%'
    st like '%b_c%'
    st like 'a\\%b\\_c%'
    st like '_____'
    st like '%l\n'
    st like 'a!%b%' escape '!'
    st ilike 'AB%'
    st rlike '^[a-c]+$'
    st rlike 'a.c|l$'
    st rlike '^\\s?\\w*\\s'
    st rlike '日.$'
    replace(st, 'abc', 'Z')
    replace(st, '', 'Z')
    replace(st, 'b')
    lpad(st, 5, '*')
    rpad(st, 5, '日')
    lpad(num, 2)
    lpad(st, 0, 'x')
    year(dt)
    year(ts)
    quarter(dt)
    month(ts)
    day(dt)
    dayofmonth(ts)
    dayofyear(dt)
    dayofweek(dt)
    weekday(dt)
    weekofyear(dt)
    hour(ts)
    minute(ts)
    second(ts)
    hour(tn)
    extract(year from ts)
    date_part('hour', ts)
    date_trunc('year', ts)
    date_trunc('QUARTER', ts)
    date_trunc('month', ts)
    date_trunc('week', ts)
    date_trunc('day', ts)
    date_trunc('hour', ts)
    date_trunc('minute', ts)
    date_trunc('second', ts)
    date_trunc('millisecond', ts)
    trunc(dt, 'year')
    trunc(dt, 'quarter')
    trunc(dt, 'MM')
    trunc(dt, 'week')
    to_date(ts)
    to_date(day_text)
    to_timestamp(time_text)
    date_add(dt, 3)
    date_add(dt, t)
    date_sub(dt, 3)
    dt + 1
    dt - interval 1 day
    dt + interval 1 month
    dt + interval 3 years
    add_months(dt, -1)
    datediff(dt, date'1970-01-01')
    unix_timestamp(ts)
    unix_timestamp(dt)
    unix_seconds(ts)
    unix_millis(ts)
    unix_micros(ts)
    timestamp_seconds(i)
    timestamp_millis(i)
    timestamp_micros(l)
    ts + interval 1 hour
    ts - interval 90 minutes
    ts + interval 1 day
    ts - interval 25 hours
    ts + interval 1 month
    ts - interval 1 year
    ts + make_interval(0, 1, 0, 2, 3)
    tn + interval 1 day
    sr.x
    sr.y
"""

SUPPORTED_LIST = [line.strip() for line in SUPPORTED.strip().splitlines()]


@pytest.fixture(scope="module", params=["UTC", "America/New_York", "Asia/Kathmandu", "+02:00"])
def zone(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[str]:
    with _setting(spark, "spark.sql.session.timeZone", request.param):
        yield request.param


class _setting:  # noqa: N801
    """A session setting, put back afterwards."""

    def __init__(self, spark: SparkSession, key: str, value: str) -> None:
        self._spark, self._key, self._value = spark, key, value

    def __enter__(self) -> None:
        self._before = self._spark.conf.get(self._key)
        self._spark.conf.set(self._key, self._value)

    def __exit__(self, *failure: object) -> None:
        self._spark.conf.set(self._key, self._before)


def _batch(spark: SparkSession) -> pa.RecordBatch:
    schema = to_arrow_schema(parse_schema(spark, DDL))
    arrays = [pa.array(ROWS[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _on_spark(spark: SparkSession, batch: pa.RecordBatch) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_batches([batch]), parse_schema(spark, DDL))


def _empty(spark: SparkSession) -> DataFrame:
    return empty_frame(spark, parse_schema(spark, DDL))


def _ours(frame: DataFrame, batch: pa.RecordBatch) -> pa.RecordBatch:
    return project(projection_of(frame), batch, to_arrow_schema(frame.schema))


def _comparable(value: Any) -> Any:
    """Values that are equal only if Spark's are: NaN is itself, -0.0 is not 0.0."""
    if isinstance(value, float):
        return ("nan" if math.isnan(value) else value, math.copysign(1.0, value) < 0) if (
            not math.isnan(value)
        ) else "nan"
    return value


def _values(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    return [_comparable(value) for value in array.to_pylist()]


def test_every_supported_expression_gives_what_spark_gives(spark: SparkSession, zone: str) -> None:
    batch = _batch(spark)
    data = _on_spark(spark, batch)
    wrong = []
    columns = [f"({text}) AS c{index}" if " AS renamed" not in text else f"l AS c{index}"
               for index, text in enumerate(SUPPORTED_LIST)]
    truth = data.selectExpr(*columns).toArrow()
    for index, text in enumerate(SUPPORTED_LIST):
        expected = truth.column(index)
        try:
            got = _ours(_empty(spark).selectExpr(text), batch).column(0)
        except Exception as error:
            wrong.append(f"{text}: {type(error).__name__} {error}")
            continue
        if got.type != expected.type and not pa.types.is_nested(got.type):
            wrong.append(f"{text}: {got.type}, Spark {expected.type}")
        if _values(got) != _values(expected):
            wrong.append(f"{text}: {got.to_pylist()}\n   Spark {expected.to_pylist()}")
    assert not wrong, "\n".join(wrong)
