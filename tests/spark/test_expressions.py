"""Every supported expression, evaluated by Spark and by us on the same awkward rows."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError, DataError, UserCodeError
from stillframe.graph.expressions import Column, Named
from stillframe.runtime.expressions import evaluate, filter_batch, project
from stillframe.spark.expressions.reading import condition_of, projection_of
from stillframe.spark.plans.aggregations import aggregation_of
from stillframe.spark.types import empty_frame, from_arrow_schema, parse_schema, to_arrow_schema

pytestmark = pytest.mark.spark

DDL = """
    b boolean, t tinyint, s smallint, i int, l bigint, f float, d double, dec decimal(10,2),
    st string, num string, word string, day_text string, time_text string, bin binary,
    dt date, ts timestamp, tn timestamp_ntz, sr struct<x: int, y: string>
"""


def _each(parse: Callable[[str], Any], *texts: str | None) -> list[Any]:
    return [None if text is None else parse(text) for text in texts]


def _instant(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)


_clock = datetime.datetime.fromisoformat
_date = datetime.date.fromisoformat

# Nulls, extremes, NaN, negative zero, the empty string, letters outside ASCII, times before 1970,
# and New York's skipped and repeated hours. Columns are read downwards: one list is one column.
# fmt: off
ROWS: dict[str, list[Any]] = {
    "b": [True, False, None, True, False, None, True, False],
    "t": [1, -128, 127, 0, None, 5, -7, 3],
    "s": [1, -32768, 32767, 0, None, 5, -7, 3],
    "i": [1, -(2**31), 2**31 - 1, 0, None, 5, -7, 3],
    "l": [1, -(2**63), 2**63 - 1, 0, None, 5, -7, 3],
    "f": [1.5, -0.0, math.nan, math.inf, None, -math.inf, 3.25e10, 0.1],
    "d": [1.5, -0.0, math.nan, math.inf, None, -math.inf, 1e300, 0.1],
    "dec": _each(
        Decimal,
        "1.50", "-0.01", "99999999.99", "0.00", None, "-99999999.99", "2.45", "-2.45",
    ),
    "st": ["abc", "", " Ab c ", "ßéÜ日本", None, "a%b_c\\d", "İstanbul\n", "xxabcxx"],
    "num": ["1", " -2 ", "+3", "007", None, "\t8\n", "-0", "99"],
    "word": ["true", " F ", "Yes", "0", None, "N", "t", "1"],
    "day_text": [
        "2024-02-29", "1969-1-2", "2024", "2024-06",
        None, " 2024-12-31 ", "0001-01-01", "2024-03-10T01:02:03",
    ],
    "time_text": [
        "2024-02-29 12:34:56.789", "1969-12-31T23:59:59", "2024-03-10 02:30:00", None,
        "2024-11-03 01:30", "2024-06-01 00:00:00+05:30", "2024-06-01T10:00:00Z", "2024-06",
    ],
    "bin": [b"a", b"", b"\x00\xff", None, b"abc", b"\xff", b"z", b"a"],
    "dt": _each(
        _date,
        "2024-02-29", "1969-12-31", "1970-01-01", "2023-12-31",
        None, "1883-11-18", "9990-12-31", "2021-01-31",
    ),
    "ts": _each(
        _instant,
        "2024-03-10T06:59:59.999999", "2024-03-10T07:30:00", "1969-12-31T23:59:59.000001",
        "2024-11-03T05:30:00", None, "2024-11-03T06:30:00.5", "1850-06-01T12:00:00",
        "2024-02-29T23:30:15.120000",
    ),
    "tn": _each(
        _clock,
        "2024-03-10T02:30:00", "1969-12-31T23:59:59.999999", None, "2024-11-03T01:30:00",
        "1883-11-18T12:01:00", "2024-02-29T00:00:00", "2025-12-31T23:00:00", "2024-01-31T10:00:00",
    ),
    "sr": [{"x": 1, "y": "a"}, None, {"x": None, "y": ""}, {"x": 4, "y": None}] * 2,
}
# fmt: on

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
    floor(if(b, CAST('NaN' AS double), -1.5D))
    ceil(if(b, CAST('NaN' AS float), 1.5F))
    greatest(ts, timestamp'2024-03-10 07:00:00')
    least(ts, timestamp'2024-03-10 07:00:00', null)
    greatest(tn, timestamp_ntz'2024-01-01 00:00:00')
    unix_micros(CAST(l AS timestamp))
    unix_micros(CAST(if(b, 9223372036854L, -9223372036855L) AS timestamp))
    datediff(date_add(dt, i), date_sub(dt, i))
    datediff(date_add(dt, 2147483647), date'1970-01-01')
    nullif(CAST(null AS int), CAST(st AS int))
    nullif(if(i is null, 1, null), CAST(num AS int) + CAST(st AS int))
    if(i is null, 1, null) + CAST(st AS int)
    if(isnotnull(st), null, 1) < CAST(st AS int)
    if(isnotnull(st), null, 1) <= CAST(st AS int)
    if(isnotnull(st), null, 1) > CAST(st AS int)
    if(isnotnull(st), null, 1) >= CAST(st AS int)
    CAST(st AS int) / if(isnotnull(st), null, 1)
    CAST(st AS int) % if(isnotnull(st), null, 1)
    CAST(st AS int) div if(isnotnull(st), null, 1)
    if(isnotnull(st), null, 1) between CAST(st AS int) and 3
    if(isnotnull(st), null, 1) in (1, CAST(st AS int))
    1 in (1, CAST(st AS int))
    if(isnotnull(i), null, 1) / (i - i)
    datediff(if(isnotnull(st), null, dt), CAST(st AS date))
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
    CAST(CAST(st AS binary) AS string)
    split(st, ' ')
    split(time_text, '[-:]')
    split(time_text, '-', 2)
    split(st, '\\\\s+', -1)
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
    timestamp_micros(i)
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


@pytest.fixture(scope="module", params=["UTC", "America/New_York", "+05:45"])
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
    if not isinstance(value, float):
        return value
    return "NaN" if math.isnan(value) else (value, math.copysign(1.0, value))


def _values(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    return [_comparable(value) for value in array.to_pylist()]


def test_every_supported_expression_gives_what_spark_gives(spark: SparkSession, zone: str) -> None:
    batch = _batch(spark)
    data = _on_spark(spark, batch)
    wrong = []
    truth = data.selectExpr(*SUPPORTED_LIST).toArrow()
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


UNSUPPORTED = [
    "levenshtein(st, num)",
    "rand()",
    "current_timestamp()",
    "ts > current_timestamp() - interval 1 hour",
    "CAST(d AS string)",
    "CAST(sr AS string)",
    "try_cast(num AS int)",
    "try_add(i, 1)",
    "dec / 3",
    "round(d, 1)",
    "contains(st, num)",
    "st rlike '(?i)abc'",
    r"st rlike '\\bword'",
    "st like num",
    "lpad(st, 9, 'ab')",
    "greatest(d, 1)",
    "sr = sr",
    "ts - ts > interval 1 hour",
    "split(st, 'a|b')",
    "array(i, l)",
    "date_format(ts, 'yyyy')",
    "to_date(st, 'dd.MM.yyyy')",
    "explode(array(1, 2))",
    "row_number() over (order by i)",
]


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_an_expression_outside_the_subset_is_refused_when_the_job_is_built(
    spark: SparkSession, text: str
) -> None:
    with pytest.raises(BuildError, match="or in mapInArrow"):
        projection_of(_empty(spark).selectExpr(text))


def test_a_refused_expression_is_named_in_sql_words(spark: SparkSession) -> None:
    with pytest.raises(BuildError, match=r"the expression levenshtein\(st, num\) is outside"):
        projection_of(_empty(spark).select(1 + F.levenshtein("st", "num")))


def test_an_unknown_column_is_told_by_spark(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match=r"UNRESOLVED_COLUMN.WITH_SUGGESTION.*`it`"):
        _empty(spark).select("it")


@pytest.mark.parametrize(
    "text",
    [
        "i + 1",
        "t * t",
        "-i",
        "abs(l)",
        "i / 0",
        "l % (i - i)",
        "CAST(i AS tinyint)",
        "CAST(d AS int)",
        "CAST(st AS int)",
        "CAST(st AS double)",
        "CAST(st AS boolean)",
        "CAST(st AS date)",
        "CAST(st AS timestamp)",
        "CAST(dec AS decimal(4, 2))",
        "CAST(dec AS tinyint)",
        "floor(d)",
        "ceil(if(b, CAST('Infinity' AS double), 1.5D))",
        "floor(if(b, 9223372036854775807D, 1.5D))",
        "nullif(if(st is null, 1, 2), CAST(st AS int))",
        "CAST(st AS int) < if(isnotnull(st), null, 1)",
        "CAST(st AS int) > if(isnotnull(st), null, 1)",
        "if(isnotnull(st), null, 1) / CAST(st AS int)",
        "2 in (1, CAST(st AS int))",
        "l div (i - i)",
        "CAST('0x10' AS int) + i",
        "CAST(concat(substring(day_text, 1, 4), '-02-30') AS date)",
    ],
)
def test_what_fails_in_spark_fails_here_too(spark: SparkSession, text: str) -> None:
    batch = _batch(spark)
    with pytest.raises(Exception, match=r"\[[A-Z_.]+\]"):
        _on_spark(spark, batch).selectExpr(text).toArrow()
    columns = projection_of(_empty(spark).selectExpr(text))
    with pytest.raises(DataError, match=r"cannot be computed: .*; filter out such records"):
        evaluate(columns[0].expression, batch)


LEGACY = [
    "i + 1", "l - 1", "i * i", "-i", "abs(i)", "d / 0", "l % 0", "pmod(i, 0)", "i div 0",
    "CAST(i AS bigint)", "CAST(i AS string)", "CAST(null AS int)", "d + 1",
    "CAST(l AS double)", "i > 1",
]  # fmt: skip


def test_without_ansi_mode_arithmetic_wraps_and_division_by_zero_is_null(
    spark: SparkSession,
) -> None:
    batch = _batch(spark)
    with _setting(spark, "spark.sql.ansi.enabled", "false"):
        truth = _on_spark(spark, batch).selectExpr(*LEGACY).toArrow()
        ours = _ours(_empty(spark).selectExpr(*LEGACY), batch)
    for text, expected, got in zip(LEGACY, truth.columns, ours.columns, strict=True):
        assert _values(got) == _values(expected), text


@pytest.mark.parametrize("text", ["CAST(st AS int)", "CAST(l AS int)", "dec + 1", "CAST(d AS int)"])
def test_without_ansi_mode_what_would_become_null_is_refused(
    spark: SparkSession, text: str
) -> None:
    with (
        _setting(spark, "spark.sql.ansi.enabled", "false"),
        pytest.raises(BuildError, match="LEGACY mode"),
    ):
        projection_of(_empty(spark).selectExpr(text))


CONDITIONS = ["i > 0", "b", "not b", "b or i > 0", "st like 'a%' and l > 0", "d > 1", "i is null"]


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_filter_keeps_the_records_spark_keeps(spark: SparkSession, text: str) -> None:
    batch = _batch(spark)
    expected = _on_spark(spark, batch).filter(text).select("num", "i").toArrow().to_pylist()
    kept = filter_batch(condition_of(_empty(spark).filter(text)), batch)
    assert kept.select(["num", "i"]).to_pylist() == expected


def test_several_filters_are_one_condition_and_the_first_guards_the_second(
    spark: SparkSession,
) -> None:
    batch = _batch(spark)
    condition = condition_of(_empty(spark).filter("i != 0").where("100 / i > 1"))
    assert filter_batch(condition, batch).column("i").to_pylist() == [1, 5, 3]


def test_a_filter_on_something_else_than_the_stream_is_refused(spark: SparkSession) -> None:
    with pytest.raises(BuildError, match="a stream cannot do this operation itself"):
        condition_of(_empty(spark).limit(3).filter("i > 0"))


def test_columns_added_changed_and_dropped_are_composed(spark: SparkSession) -> None:
    batch = _batch(spark)

    def job(frame: DataFrame) -> DataFrame:
        return (
            frame.select("t", "st", F.col("t").alias("t2"), "t")
            .withColumn("n", F.col("t2") + F.lit(1).cast("long"))
            .withColumn("n", F.col("n") * F.col("n"))
            .withColumn("N", F.col("n") + F.col("n"))
            .withColumnRenamed("st", "text")
            .drop("t2")
        )

    expected = job(_on_spark(spark, batch)).toArrow()
    ours = _ours(job(_empty(spark)), batch)
    assert ours.schema.names == expected.schema.names == ["t", "text", "t", "N"]
    for got, want in zip(ours.columns, expected.columns, strict=True):
        assert got.to_pylist() == want.to_pylist()


def test_a_column_keeps_the_streams_name_inside_and_the_users_spelling_outside(
    spark: SparkSession,
) -> None:
    assert projection_of(_empty(spark).select("ST")) == (Named("ST", Column("st", pa.string())),)


def test_an_aggregate_in_a_select_is_refused(spark: SparkSession) -> None:
    with pytest.raises(BuildError, match="a stream cannot do this operation itself: Aggregate"):
        projection_of(_empty(spark).select(F.sum("i")))


def test_a_chain_of_columns_that_use_each_other_twice_stays_quick(spark: SparkSession) -> None:
    frame = _empty(spark).select(F.col("d").alias("x"))
    for _ in range(40):
        frame = frame.withColumn("x", F.col("x") + F.col("x"))
    got = _ours(frame, _batch(spark)).column(0)
    assert got[0].as_py() == 1.5 * 2**40


# Grouping


def _grouped(frame: DataFrame, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The three steps, the middle one by Arrow's own grouping."""
    aggregation = aggregation_of(frame)
    fields = [pa.field(named.name, named.expression.type) for named in aggregation.before]
    before = pa.Table.from_batches([project(aggregation.before, batch, pa.schema(fields))])
    arrow_names = {"count": "count", "sum": "sum", "min": "min", "max": "max", "avg": "mean"}
    wanted: list[Any] = [
        ([], "count_all") if call.input is None else (call.input, arrow_names[call.function])
        for call in aggregation.calls
    ]
    grouped = before.group_by(list(aggregation.keys)).aggregate(wanted)
    names = [call.name for call in aggregation.calls]
    made = [grouped.column(f"{column}_{name}" if column else name) for column, name in wanted]
    columns = [grouped.column(key) for key in aggregation.keys]
    types = [column.type for column in columns] + [call.type for call in aggregation.calls]
    middle = pa.RecordBatch.from_arrays(
        [
            array.combine_chunks().cast(type_)
            for array, type_ in zip([*columns, *made], types, strict=True)
        ],
        names=[*aggregation.keys, *names],
    )
    result = project(aggregation.after, middle, to_arrow_schema(frame.schema))
    return _rows(result)


def _rows(table: pa.Table | pa.RecordBatch) -> list[tuple[Any, ...]]:
    return sorted(zip(*map(_values, table.columns), strict=True), key=repr)


GROUPINGS = {
    "a count": lambda frame: frame.groupBy("b").count(),
    "all five": lambda frame: frame.groupBy("b").agg(
        F.count("*"), F.count("st"), F.sum("t"), F.min("st"), F.max("dt"), F.avg("s"), F.max("ts")
    ),
    "shortcuts": lambda frame: frame.groupBy("b").sum("t", "s"),
    "a dictionary": lambda frame: frame.groupBy("b").agg({"t": "avg", "*": "count"}),
    "an expression as key": lambda frame: frame.groupBy((F.col("t") % 3).alias("rest")).count(),
    "two keys": lambda frame: frame.groupBy("b", F.length("st")).agg(F.sum("t").alias("total")),
    "expressions of aggregates": lambda frame: frame.groupBy("b").agg(
        (F.sum("t") / F.count("*")).alias("mean"), F.sum(F.col("t") * 2) + 1, F.upper(F.max("num"))
    ),
    "the same aggregate twice": lambda frame: frame.groupBy("b").agg(
        F.sum("t").alias("x"), (F.sum("t") + F.sum("t")).alias("y")
    ),
    "the key again": lambda frame: frame.groupBy("t").agg(
        F.sum("t"), (F.col("t") + F.lit(1).cast("int")).alias("next"), F.count(F.lit(1))
    ),
    "a key that is not a number and both zeros": lambda frame: frame.groupBy("d").count(),
    "after a projection": lambda frame: frame.withColumn("t", F.col("s") % 2).groupBy("t").count(),
    "a decimal": lambda frame: frame.groupBy("b").agg(F.sum("dec"), F.max("dec")),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_a_grouping_gives_what_spark_gives(spark: SparkSession, name: str) -> None:
    batch = _batch(spark)
    expected = GROUPINGS[name](_on_spark(spark, batch))
    frame = GROUPINGS[name](_empty(spark))
    named = [column.name for column in aggregation_of(frame).after]
    assert named == expected.columns
    assert _grouped(frame, batch) == _rows(expected.toArrow())


def test_a_plain_count_reads_only_its_key(spark: SparkSession) -> None:
    aggregation = aggregation_of(_empty(spark).groupBy("st").count())
    column = Column("st", pa.string())
    assert aggregation.before == (Named("st", column),)
    assert aggregation.keys == ("st",)
    assert aggregation.calls == (AggregateCall("count", None, "count(1)", pa.int64()),)
    assert aggregation.after == (
        Named("st", column),
        Named("count", Column("count(1)", pa.int64())),
    )


def test_a_grouping_without_keys_has_none(spark: SparkSession) -> None:
    aggregation = aggregation_of(_empty(spark).agg(F.sum("i")))
    assert aggregation.keys == ()
    assert [call.function for call in aggregation.calls] == ["sum"]


def test_an_aggregate_in_python_is_refused_by_name(spark: SparkSession) -> None:
    @F.pandas_udf("double")
    def middle(values: pandas.Series) -> float:
        return float(values.median())

    with pytest.raises(BuildError, match="middle"):
        aggregation_of(_empty(spark).groupBy("b").agg(middle("d")))


@pytest.mark.parametrize(
    "operation",
    [
        lambda frame: frame.rollup("b").count(),
        lambda frame: frame.groupBy("b").pivot("t", [1, 2]).count(),
        lambda frame: frame.groupBy("b").count().filter("count > 1"),
    ],
)
def test_other_groupings_are_refused(spark: SparkSession, operation: Any) -> None:
    with pytest.raises(BuildError, match=r"still\.stream\(\.\.\.\), or in mapInArrow"):
        aggregation_of(operation(_empty(spark)))


# The user's functions


def _shout(text: str | None, times: int | None) -> str | None:
    return None if text is None or times is None else text.upper() + "!" * max(0, times)


def test_a_python_function_is_called_per_row(spark: SparkSession) -> None:
    batch = _batch(spark)
    shout = F.udf(_shout, "string")
    next_hour = F.udf(
        lambda at: None if at is None else at + datetime.timedelta(hours=1), "timestamp"
    )
    show = F.udf(str, "string")

    def job(frame: DataFrame) -> DataFrame:
        return frame.select(
            F.length(shout(F.lower("st"), "t")), next_hour("tn"), show("ts"), show("dec"), show("b")
        )

    ours = _ours(job(_empty(spark)), batch)
    expected = job(_on_spark(spark, batch)).toArrow()
    for got, want in zip(ours.columns, expected.columns, strict=True):
        assert got.to_pylist() == want.to_pylist()


def _seen(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


NESTED_DDL = """
    inner struct<x: int, at: timestamp, deep: struct<y: string>>, counts map<string, int>,
    rows array<struct<x: int>>, times array<timestamp>, by_name map<string, struct<x: int>>
"""


def test_a_python_function_gets_rows_and_dicts_as_sparks_do(spark: SparkSession) -> None:
    at = _instant("2024-03-10T07:30:00")
    values = [
        [{"x": 1, "at": at, "deep": {"y": "a"}}, None],
        [[("a", 1), ("b", None)], []],
        [[{"x": 1}, None], None],
        [[at, None], []],
        [[("a", {"x": 2})], None],
    ]
    schema = to_arrow_schema(parse_schema(spark, NESTED_DDL))
    arrays = [pa.array(each, field.type) for each, field in zip(values, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    seen = F.udf(_seen, "string")

    def job(frame: DataFrame) -> DataFrame:
        return frame.select(*(seen(F.col(name)) for name in schema.names))

    kind = parse_schema(spark, NESTED_DDL)
    ours = _ours(job(empty_frame(spark, kind)), batch)
    theirs = job(spark.createDataFrame(pa.Table.from_batches([batch]), kind)).toArrow()
    for name, got, want in zip(schema.names, ours.columns, theirs.columns, strict=True):
        assert got.to_pylist() == want.to_pylist(), name
    assert ours.column(0)[0].as_py().startswith("Row Row(x=1, at=datetime.datetime(")
    assert ours.column(1)[0].as_py() == "dict {'a': 1, 'b': None}"


RETURNED: dict[str, list[Any]] = {
    "int": [5, 1.5, True, "5", Decimal("1.2"), None],
    "long": [2.0, "7", _clock("2024-01-02T03:00:00")],
    "double": [5, True, "5", Decimal("1.235")],
    "boolean": [True, 5, 0, 1.5],
    "string": ["x", 5, 1.5, True, [1, "a"], {"a": 1}, b"ab", _date("2024-01-02"), Row(x=1)],
    "decimal(10,2)": [Decimal("1.235"), Decimal("1.225"), Decimal("7")],
    "array<string>": [["a", 1, None]],
    "map<string, int>": [{"a": 1}, {}],
    "struct<x: int, y: string>": [(1, "a"), {"y": 2}, Row(x=1, y="a"), Row(y=3, x="b")],
    "timestamp": [_clock("2024-01-02T03:00:00"), _instant("2024-01-02T03:00:00")],
}


@pytest.mark.parametrize("kind", RETURNED)
def test_what_a_python_function_returns_is_converted_as_spark_converts_it(
    spark: SparkSession, kind: str
) -> None:
    batch = _batch(spark)
    data = _on_spark(spark, batch).limit(1).localCheckpoint()
    for value in RETURNED[kind]:
        columns = [F.udf(lambda _, value=value: value, kind)("t")]
        try:
            wanted = data.select(*columns).toArrow().column(0).to_pylist()[0]
        except Exception as error:
            wanted = error
        if isinstance(wanted, Exception):
            with pytest.raises(UserCodeError):
                _ours(_empty(spark).select(*columns), batch)
        else:
            got = _ours(_empty(spark).select(*columns), batch).column(0).to_pylist()
            assert got == [wanted] * batch.num_rows, f"{value!r} as {kind}"


def test_a_python_function_may_filter(spark: SparkSession) -> None:
    is_odd = F.udf(lambda number: number is not None and number % 2 == 1, "boolean")
    condition = condition_of(_empty(spark).filter(is_odd("t")))
    assert filter_batch(condition, _batch(spark)).column("t").to_pylist() == [1, 127, 5, -7, 3]


def test_a_python_function_that_raises_is_named(spark: SparkSession) -> None:
    def invert(number: int) -> float:
        return 1 / number

    columns = projection_of(_empty(spark).select(F.udf(invert, "double")("t")))
    with pytest.raises(UserCodeError, match="function invert raised ZeroDivisionError"):
        evaluate(columns[0].expression, _batch(spark))


# Schemas


def test_a_schema_survives_the_way_to_arrow_and_back(spark: SparkSession) -> None:
    nested = "a array<int>, m map<string, array<double>>, s struct<x: int, y: struct<z: date>>"
    struct = parse_schema(spark, f"{DDL}, {nested}, n bigint NOT NULL")
    assert from_arrow_schema(to_arrow_schema(struct)) == struct


def test_timestamps_are_utc_instants_in_arrow(spark: SparkSession) -> None:
    schema = to_arrow_schema(parse_schema(spark, "a timestamp, b timestamp_ntz"))
    assert schema.field("a").type == pa.timestamp("us", tz="UTC")
    assert schema.field("b").type == pa.timestamp("us")


def test_a_schema_with_a_mistake_is_told_by_sparks_parser(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="PARSE_SYNTAX_ERROR"):
        parse_schema(spark, "a string b")


def test_a_type_a_stream_cannot_carry_is_refused(spark: SparkSession) -> None:
    with pytest.raises(BuildError, match="cannot carry the type variant"):
        to_arrow_schema(parse_schema(spark, "v variant"))
    with pytest.raises(BuildError, match="UNICODE"):
        to_arrow_schema(parse_schema(spark, "s string collate UNICODE_CI"))


def test_an_empty_frame_has_the_schema_and_starts_no_job(spark: SparkSession) -> None:
    tracker = spark.sparkContext.statusTracker()
    before = tracker.getJobIdsForGroup(None)
    frame = empty_frame(spark, to_arrow_schema(parse_schema(spark, DDL)))
    projection_of(frame.selectExpr("i + 1", "1 + 1"))
    assert frame.schema == parse_schema(spark, DDL)
    assert tracker.getJobIdsForGroup(None) == before


# The page in docs/


def _documented() -> tuple[list[str], list[str]]:
    """Expressions, and aggregates."""
    page = Path(__file__).parents[2] / "docs" / "expressions.md"
    listed = page.read_text(encoding="utf-8").partition("<!-- functions: begin")[0]
    expressions, aggregates = listed.split("\n## Aggregates\n")
    return _examples(expressions), _examples(aggregates)


def _examples(text: str) -> list[str]:
    lines = text.splitlines()
    cells = [line.split("|")[2] for line in lines if line.startswith("| ") and "`" in line]
    return [text.replace("\\", "") for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def test_every_example_in_the_documentation_is_supported(spark: SparkSession) -> None:
    examples, aggregates = _documented()
    assert len(examples) > 60
    assert len(aggregates) > 40
    schema = "a int, b int, x double, price decimal(10,2), s string, at timestamp, day date"
    more = "place struct<city: string>, array_of_ints array<int>"
    frame = empty_frame(spark, parse_schema(spark, f"{schema}, {more}"))
    for text in examples:
        projection_of(frame.selectExpr(text))
    for text in aggregates:
        aggregation_of(frame.groupBy("day").agg(F.expr(text)))


def test_the_program_in_the_documentation_runs(spark: SparkSession) -> None:
    page = Path(__file__).parents[2] / "docs" / "expressions.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(program, "docs/expressions.md", "exec"), {"spark": spark})
