"""JSON is read as Spark reads it, and written as Spark writes it, in UTC and in New York."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.sources import SourceContext
from stillframe.clock import SystemClock
from stillframe.connectors.json_lines import json_from_options
from stillframe.ids import SubtaskIndex
from stillframe.json_texts.writing import json_lines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0
ZONES = ["UTC", "America/New_York"]

SCALARS = [
    *(b"1", b"-0", b"-0.0", b"1.0", b"1e2", b'"1"', b'""', b"true", b"NaN", b"Infinity", b"-INF"),
    *(b"+INF", b"INF", b"Inf", b'"NaN"', b'"INF"', b'"+INF"', b'"-Infinity"', b"1e400", b"1e-400"),
    *(b"9223372036854775808", b"-9223372036854775808", b"[1]", b'{"x": 1}', b"null", b"01", b"+1"),
    *(b".5", b"1.", b"1 2", b"nullx", b"'q'", b'"a\\qb"', b'"x\t,"d":1', b'"caf\xe9"', b'"\xff"'),
    *(b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\ude00x"', b"1.50", b"16777217"),
    *(b"0.10000000000000000000000001", b"1.00000017881393432617187499", b"1.005", b'"1,000.5"'),
    *(
        b"99999999.995",
        b"-0.001",
        b'".5"',
        b'" 1"',
        b"200",
        b"256",
        b"-129",
        b"32768",
        b"2147483648",
    ),
    *(b"1" * 1000, b"1" * 1001, b"[" * 1001 + b"]" * 1001, b"{}", b"[]", b'"\\u0000"', b"'it\\'s'"),
    *(b'"aGk="', b'"aGk"', b'"aG k="', b'"a"', b'"aGk=="', b'"a\\u0047k="', b"[1, 2 ,{ }]"),
    *(b'"2024-01-01"', b'"\xc0\x80"', b'"\xf5\x80\x80\x80"', b"tru", b"{", b"", b"1e999999999"),
]
MOMENTS = [
    b'"%s"' % text
    for text in (
        *(b"2024-01-01T00:00:00", b"2024-01-01 00:00:00.123456789", b"2024-01-01", b"2024-2-9"),
        *(b"2024", b"2024-01", b"2024-01-01T00:00:00Z", b"2024-01-01T00:00:00+02:00", b"x", b""),
        *(b"2024-01-01T00:00:00+0200", b"2024-01-01T00:00:00 America/New_York", b"2024-01-01T00"),
        *(b"2024-01-01T00:00:00GMT+2", b"2024-03-10T02:30:00", b"2024-11-03T01:30:00", b"19000"),
        *(b"1700000000", b" 2024-01-01 ", b"2024-01-01T", b"2024-01-01T24:00:00", b"2024-02-30"),
        *(
            b"2024-01-01T00:00",
            b"1500-01-01T00:00:00",
            b"12024-01-01",
            b"+12024-01-01",
            b"99999999",
        ),
        *(
            b"-0001-01-01",
            b"2024-01-01T00:00:00.1+01:00",
            b"2024-01-01T00:00:00EST",
            b"300000-01-01",
        ),
        *(
            b"2024-01-01T00:00:00+5:30",
            b"2024-01-01T00:00:00.000-05",
            b"2024-01-01abc",
            b"-1000000",
        ),
        *(b"2024-01-01 abc", b"1883-11-18T12:00:00", b"2024-01-01T00:00:00.GMT", b"2024-13-01"),
        *(
            b"2024-01-01T00:00:00+18:00",
            b"2024-01-01T00:00:00+18:01",
            b"2024-01-01T0:0:0",
            b"-10000",
        ),
        *(b"2024-01-01T00:00Z", b"99999-07-01T12:00:00", b"2024-01-01T00:00:00UTC+01:30:15"),
        *(
            b"0001-01-01T00:00:00",
            b"9999-12-31T23:59:59.999999",
            b"2050-07-01T00:00:00",
            b"0000-01-01",
        ),
        *(
            b"2024-01-01T00:00:00 Z",
            b"2024-01-01T00:00:00Nowhere/City",
            b"2024-01-01T00:00GMT+01:00",
        ),
    )
] + [b"1700000000", b"1700000000.5", b"9223372036854775807", b"null", b"true"]
VALUES = {
    **dict.fromkeys(
        ("string", "boolean", "byte", "short", "int", "long", "float", "double"), SCALARS
    ),
    **dict.fromkeys(("decimal(10,2)", "decimal(38,18)", "binary", "void"), SCALARS),
    **dict.fromkeys(("timestamp", "timestamp_ntz", "date"), MOMENTS),
    "array<long>": [
        b"[1,null]",
        b'[1,"x",3]',
        b"[1,[2],3]",
        b'[1,"x",{"c":5},3]',
        b"[1 2]",
        b"[01]",
    ],
    "struct<x: long, y: string>": [
        *(b'{"x":1,"y":2}', b'{"x":"q","y":"z"}', b'{"x" 1}', b"{}", b"[]", b'{"x":1,"x":2}'),
        *(b'{"x":tru,"y":"k"}', b'{"y":"\\q","x":2}', b'[{"x":1}]'),
    ],
    "map<string,long>": [b'{"x":1,"y":null}', b'{"x":"q","y":3}', b'{"x":1,"x":2}', b"{}", b"[]"],
    "map<string,struct<z: long>>": [b'{"x":{"z":1},"y":{"z":"k"}}', b'{"x":3}', b'{"\\ud800":{}}'],
    "array<struct<z: timestamp, b: binary>>": [
        b'[{"z":"2024-01-01T00:00:00","b":"aGk="},{"z":"k"},{"z":"2024-1-1"}]',
        b"[3,{}]",
    ],
}
WHOLE = [
    *(b"", b"  ", b"null", b"[]", b'[{"a":1},{"a":2}]', b'[{"a":1},{"a":"x"}]', b'[{"a":1},3]'),
    *(
        b'[{"a":1},null]',
        b"1",
        b'"x"',
        b'{"a":1}{"a":2}',
        b'{"a":1} garbage',
        b'{"a":1',
        b'{"A":1}',
    ),
    *(
        b'{"a":1,"b":"x',
        b'{"a":1,"a":2}',
        b'{"a":1,}',
        b"{'a':1,'b':'x\"y'}",
        b"{a:1}",
        b"nul",
        b"{",
    ),
    *(b'{"a":1,"z":"\xff"}', b'{"a":1,"z":Inf}', b'{"a":1,"z":NaN}', b'{"a":1 /*x*/}', b'{"a":1]'),
    *(b'\xef\xbb\xbf{"a":1}', b'{"a":1,"b":"\x00"}', b'{"b":1.0e5 }', b'{"b":[1, 2 ,{"x" : 3}]}'),
    *(
        b'{"b":{"x" : NaN}}',
        b'{"a":1}\r{"a":2}',
        b'{"a":1}\r',
        b'{"\\u0061":1}',
        b'{"a" 1}',
        b"//x",
    ),
    *(b'{"a":1,,"b":2}', b'{"a":1 "b":2}', b"}", b'{"b":"\\u12', b' {"a":1}', b'\x0b{"a":1}'),
    *(
        b'{"z\xe9":1,"a":1}',
        b'{"a":007}',
        b'{"b":"\\q\\u0041\\\'"}',
        b'{"b":"x\ty"}',
        b"{a-b:1,a:2}",
    ),
    *(b'/*x*/{"a":/* q**/1}//', b'{"a":-01}', b"{\"b\":'x'}", b'{"b":"NaN","a":NaN}', b"[[{}]]"),
]
OPTIONS = [
    *({}, {"mode": "DROPMALFORMED"}, {"allowUnquotedFieldNames": "true"}),
    *({"allowSingleQuotes": "false"}, {"allowNumericLeadingZeros": "true"}),
    *({"allowBackslashEscapingAnyCharacter": "true"}, {"allowUnquotedControlChars": "true"}),
    *({"allowNonNumericNumbers": "false"}, {"allowComments": "true"}),
]


def as_spark_reads(
    spark: SparkSession, path: Path, schema: str, options: dict[str, str]
) -> pa.Table:
    frame = spark.read.schema(schema).options(**options).json(str(path))
    table: pa.Table = frame.coalesce(1).toArrow()
    return table


def as_we_read(path: Path, schema: str, options: dict[str, str], zone: str) -> pa.Table:
    from pyspark.sql.types import StructType

    from stillframe.spark.types import to_arrow_schema

    declared = to_arrow_schema(StructType.fromDDL(schema))
    source = json_from_options(str(path), declared, None, {"timeZone": zone, **options})
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    return pa.Table.from_batches([batch for _, batch in reader.read()], source.schema)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Values as Python compares them; Spark's corrupt records may not be UTF-8."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, tuple):
            return tuple(plain(each) for each in value)
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def bare(type_: pa.DataType) -> pa.DataType:
        types = pa.types
        if types.is_string(type_):
            return pa.binary()
        if types.is_temporal(type_):
            return pa.int32() if types.is_date(type_) else pa.int64()
        if types.is_list(type_):
            return pa.list_(bare(type_.value_type))
        if types.is_map(type_):
            return pa.map_(bare(type_.key_type), bare(type_.item_type))
        if types.is_struct(type_):
            return pa.struct([(field.name, bare(field.type)) for field in type_])
        return type_

    def instants(type_: pa.DataType) -> pa.DataType:
        return pa.timestamp("us", "UTC") if pa.types.is_timestamp(type_) and type_.tz else type_

    in_utc = table.cast(
        pa.schema([field.with_type(instants(field.type)) for field in table.schema])
    )
    shown = in_utc.cast(pa.schema([(field.name, bare(field.type)) for field in in_utc.schema]))
    return [{name: plain(value) for name, value in row.items()} for row in shown.to_pylist()]


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest, spark: SparkSession) -> Any:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.fixture
def same(spark: SparkSession, zone: str, tmp_path: Path) -> Callable[..., None]:
    """Compares what Spark and we make of lines, line by line: each is followed by a mark."""

    def compare(schema: str, lines: Sequence[bytes], options: dict[str, str] | None = None) -> None:
        path = tmp_path / "lines.json"
        marked = [part for at, line in enumerate(lines) for part in (line, b'{"mark":%d}' % at)]
        path.write_bytes(b"\n".join([*marked, b""]))
        declared = f"{schema}, mark long, _corrupt_record string"
        theirs = by_line(rows_of(as_spark_reads(spark, path, declared, options or {})))
        ours = by_line(rows_of(as_we_read(path, declared, options or {}, zone)))
        different = [
            (line[:200], one, other)
            for line, one, other in zip(lines, theirs, ours, strict=True)
            if one != other
        ]
        assert not different, different[:3]

    return compare


def by_line(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    lines: list[list[dict[str, Any]]] = [[]]
    for row in rows:
        if row["mark"] == len(lines) - 1:
            lines.append([])
        else:
            lines[-1].append(row)
    return lines[:-1]


@pytest.mark.parametrize("type_", VALUES)
def test_a_value_is_read_as_spark_reads_it(type_: str, same: Callable[..., None]) -> None:
    values = VALUES[type_]
    same(f"b long, a {type_}, c long", [b'{"b":1,"a":%s,"c":2}' % value for value in values])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_whole_text_is_read_as_spark_reads_it(
    options: dict[str, str], same: Callable[..., None]
) -> None:
    same("a long, b string", WHOLE, options)


COLUMNS = (
    "id long, name string, x double, at timestamp, ok boolean, tags array<string>, d date,"
    " s struct<u: int, v: string, w: array<double>>, m decimal(12,3), k map<string,long>"
)
RECORDS = [
    b'{"id":17,"name":"caf\xc3\xa9 \\u00e9","x":1.5e3,"at":"2024-01-01T00:00:00.5Z","ok":true,'
    b'"tags":["a","b\\n"],"s":{"u":1,"v":"z","w":[1,2.5]},"d":"2024-02-09","m":12.345}',
    b'{"id": -3 , "name" : null, "zz": {"id": 5, "q": [1, {"name": "n"}]}, "x": NaN, "s": null,'
    b' "tags": [], "m": "1,2.5", "k": {"p": 1, "q": 2}}',
    b"{'id':1,'name':'it\\'s','at':'2024-3-4 5:6:7','ok':false,'x':-Infinity}",
    b'[{"id":1,"name":"a"},{"id":2,"s":{"u":5}}]',
    b'{"id":1,"at":1700000000,"tags":["x",1,{"y":2}],"name":{"a":1, "b":[true]}}',
]
SPLICES = [
    *(
        b'"',
        b"'",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\",
        b"1",
        b"0",
        b"-",
        b".",
        b"e",
        b"n",
        b"t",
    ),
    *(b" ", b"\t", b"\xe9", b"\xc3", b"\x01", b"null", b"true", b'"x"', b"\\u", b"\\ud83d", b"NaN"),
    *(b'{"id":1}', b'"id":9,', b"[]", b"{}", b"/"),
]


def torn(record: bytes, random: Random) -> bytes:
    made = bytearray(record)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        at = random.randrange(len(made) + 1)
        match random.randrange(4):
            case 0:
                made[at : at + 1] = random.choice(SPLICES)
            case 1:
                made[at:at] = random.choice(SPLICES)
            case 2:
                del made[at : at + random.choice([1, 1, 5])]
            case 3:
                del made[at:]
    return bytes(made)


def test_torn_records_lose_what_they_lose_in_spark(same: Callable[..., None]) -> None:
    random = Random(19)
    same(COLUMNS, [torn(random.choice(RECORDS), random) for _ in range(2500)])


def test_a_file_as_one_text_is_read_as_spark_reads_it(
    spark: SparkSession, zone: str, tmp_path: Path
) -> None:
    texts = [b'[{"a":1,\n"b":[1,\n2]},{"a":2}]\n', b'\n{"a":\n3}', b'{"a":"x"}', b"", b"[1]"]
    for at, text in enumerate(texts):
        (tmp_path / f"{at}.json").write_bytes(text)
    schema, options = "a long, b string, _corrupt_record string", {"multiLine": "true"}
    theirs = rows_of(as_spark_reads(spark, tmp_path, schema, options))
    ours = rows_of(as_we_read(tmp_path, schema, options, zone))
    assert sorted(map(str, ours)) == sorted(map(str, theirs))
    assert len(ours) == 5


ROWS = """VALUES
 (1.0D, float(0.1), 1.50BD, timestamp'2024-01-01T00:00:00Z', timestamp_ntz'2024-01-01T00:00:00.5',
  date'2024-02-09', X'6869', map('a', 1, 'b', null), array(1, null), named_struct('x', null,
  'y', 'q"'),
  true, 'caf\u00e9 \u2028 / \t \u0001 \u007f <', map(1.5D, date'2024-01-01'),
  array(array(1e10D))),
 (1e7D, float(1e10), 0.00BD, timestamp'2024-07-01T12:30:45.123Z',
  timestamp_ntz'2024-01-01T00:00:00.123',
  date'0001-01-01', X'', map(), array(), named_struct('x', 1, 'y', null), null, '', null,
  array(null)),
 (1e-3D, float(16777216), -1.23BD, timestamp'1500-01-01T00:00:00Z',
  timestamp_ntz'0001-01-01T00:00:00',
  date'9999-12-31', null, null, null, null, false, null, null, null),
 (9999999.999D, float(1.17549435E-38), 123456789012.34BD, timestamp'9999-12-31T23:59:59.999Z',
  null,
  date'12024-01-01', null, map('x', null), array(1), named_struct('x', null, 'y', null), null,
  '\U0001f600', null, array(array())),
 (double('NaN'), float('NaN'), null, null, null, null, null, null, null, null, null, null, null,
  null),
 (double('Infinity'), float('-Infinity'), null, timestamp'2050-07-01T00:00:00Z', null, null, null,
  null, null, null, null, null, null, null),
 (-0.0D, float('-0.0'), null, timestamp'2024-07-01T12:30:45.1Z', null, null, null, null, null,
  null,
  null, null, null, null),
 (4.9E-324D, float(1.4E-45), null, timestamp'1883-11-18T12:00:00Z', null, null, null, null, null,
  null, null, null, null, null),
 (1.7976931348623157E308D, float(3.4028235E38), null, timestamp'+12024-01-01T00:00:00Z',
  timestamp_ntz'-0001-01-01T00:00:00', date'-0001-01-01', null, null, null, null, null, null,
  null, null),
 (123456789.0D, float(123456.79), null, timestamp'2024-11-03T05:30:00Z', null, null, null, null,
  null,
  null, null, null, null, null),
 (2.0E-5D, float(1e-3), null, null, null, null, null, null, null, null, null, null, null, null)
 AS t(d, f, m, ts, tn, dt, b, mp, a, s, bo, st, dm, aa)"""


def with_values(lines: bytes) -> list[bytes]:
    """Lines with numbers by their value: before version 19 Java writes more digits than needed."""
    doubles = re.sub(rb'"d":([-\d.E]+)', lambda found: repr(float(found[1])).encode(), lines)
    floats = re.sub(rb'"f":([-\d.E]+)', lambda found: repr(np.float32(found[1])).encode(), doubles)
    return floats.split(b"\n")


def test_json_is_written_as_spark_writes_it_and_read_back(
    spark: SparkSession, zone: str, tmp_path: Path
) -> None:
    frame = spark.sql(f"SELECT * FROM {ROWS}").coalesce(1)
    frame.write.json(str(tmp_path / "theirs"))
    (file,) = (tmp_path / "theirs").glob("part-*.json")
    table = frame.toArrow()
    (batch,) = table.combine_chunks().to_batches()
    ours = bytes(json_lines(batch, zone))
    (tmp_path / "ours.json").write_bytes(ours)

    assert with_values(ours) == with_values(file.read_bytes())
    back = spark.read.schema(frame.drop("dm").schema).json(str(tmp_path / "ours.json")).toArrow()
    assert rows_of(back) == rows_of(table.drop_columns("dm"))


def test_numbers_are_written_as_java_writes_them(spark: SparkSession, tmp_path: Path) -> None:
    numbers = spark.range(0, 20_000, 1, 1).selectExpr(
        "rand(1) * pow(10, id % 40 - 20) AS d", "float(randn(2) * pow(10, id % 60 - 30)) AS f"
    )
    numbers.write.json(str(tmp_path / "theirs"))
    (file,) = (tmp_path / "theirs").glob("part-*.json")
    (batch,) = numbers.toArrow().combine_chunks().to_batches()
    ours = bytes(json_lines(batch))
    assert with_values(ours) == with_values(file.read_bytes())
    forms = re.findall(rb'"[df]":([^,}]*)', ours)
    assert len(forms) == 40_000
    assert all(re.fullmatch(rb"-?\d+\.\d+(E-?\d+)?", form) for form in forms)


def test_a_job_reads_in_the_zone_of_the_session_and_counts_what_is_malformed(
    still: Still, zone: str, job_options: dict[str, str], tmp_path: Path
) -> None:
    lines = [b'{"at":"2024-01-01T00:00:00"}', b"null", b'{"at":"\xff"}', b"{", b'{"at":1704067200}']
    (tmp_path / "in.json").write_bytes(b"\n".join(lines))
    schema = "at timestamp, _corrupt_record string"
    stream = still.readStream.schema(schema).json(str(tmp_path / "in.json"))
    writer = stream.writeStream.format("parquet").options(**job_options)
    query = writer.trigger(availableNow=True).start(str(tmp_path / "out"))
    query.awaitTermination(WAIT_SECONDS_MAX)

    assert query.summary.records_malformed == 3
    read = still.spark.read.parquet(str(tmp_path / "out"))
    shown = read.selectExpr("cast(at as long) at", "_corrupt_record is null good").collect()
    begins = 1704067200 + (5 * 3600 if zone == "America/New_York" else 0)
    assert sorted(str(row.at) for row in shown if row.good) == sorted(["1704067200", str(begins)])
    assert sum(not row.good for row in shown) == 3
    assert json.loads(json.dumps(query.summary.to_json()))["records_malformed"] == 3


FROM_JSON = """
    a long, b string, c array<long>, d struct<x: double, at: timestamp>, m map<string, int>,
    at timestamp, day date, n decimal(10, 2), flag boolean
"""
FROM_JSON_TEXTS = [
    None,
    "",
    "   ",
    "null",
    "{}",
    "[]",
    "[1]",
    '"text"',
    "7",
    '{"a": 1, "b": "x", "c": [1, 2], "d": {"x": 1, "at": "2024-03-10T02:30:00"}}',
    '{"a": "no number", "b": "x"}',
    '{"a": 1.5, "b": 2}',
    '{"a": 1, "a": 2, "other": [{}]}',
    '{"a": 1} trailing',
    '{"a": 1',
    '[{"a": 1}, {"a": 2}]',
    "{'a': 3}",
    '{"m": {"k": 1, "l": null}, "flag": true, "n": 12.345, "day": "2024-02-09"}',
    '{"at": "2024-06-01 12:00:00", "day": "2024-2-9", "n": "7"}',
    '{"b": {"inner": [1, 2]}, "c": null}',
    '{"b": "gr\\u00fc\\u00df\\n"}',
    "not json at all",
]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_from_json_gives_what_spark_gives(spark: SparkSession, zone: str) -> None:
    from pyspark.sql import functions as F

    from stillframe.runtime.expressions import project
    from stillframe.runtime.from_json import from_json
    from stillframe.spark.expressions.reading import projection_of
    from stillframe.spark.types import empty_frame, from_arrow_schema, to_arrow_schema

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        schema = pa.schema([("text", pa.string())])
        asked = F.from_json("text", FROM_JSON).alias("read")
        rows = [(text,) for text in FROM_JSON_TEXTS]
        truth = spark.createDataFrame(rows, from_arrow_schema(schema)).select(asked).toArrow()
        frame = empty_frame(spark, schema).select(asked)
        batch = pa.record_batch([pa.array(FROM_JSON_TEXTS)], schema=schema)
        [column] = projection_of(frame)
        made = project([column], batch, to_arrow_schema(frame.schema))
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))

    found = made.column("read").to_pylist()
    expected = truth.column("read").cast(made.schema.field("read").type).to_pylist()
    differing = [
        (text, ours, theirs)
        for text, ours, theirs in zip(FROM_JSON_TEXTS, found, expected, strict=True)
        if ours != theirs
    ]
    assert not differing, differing

    call, texts = column.expression, batch.column("text")
    for place, each in enumerate(call.type):  # for somebody who looks at this field alone
        alone = from_json(call.type, texts, call.arguments[1].value, pa.scalar([place]))
        whole = [read and read[each.name] for read in found]
        assert [read and read[each.name] for read in alone.to_pylist()] == whole
