"""CSV and text are read as Spark reads them, and written as Spark writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from stillframe.api.sources import SourceContext
from stillframe.clock import SystemClock
from stillframe.connectors.csv_lines import csv_from_options
from stillframe.connectors.csv_tokens import Signs
from stillframe.connectors.csv_writing import CsvWriting, csv_header, csv_lines, text_lines
from stillframe.connectors.files import FileSource
from stillframe.connectors.text_lines import text_from_options
from stillframe.ids import SubtaskIndex

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ZONE = "America/New_York"
NUMBERS = [
    *("1", "-1", "+1", "007", "1.0", "1e2", "1.5E-3", " 1", "1 ", "", "x", "NaN", "Inf", "-Inf"),
    *("Infinity", "-Infinity", "128", "-129", "32768", "2147483648", "9223372036854775808", "1,5"),
    *(
        "1d",
        "1f",
        "0x10",
        ".5",
        "1.",
        "-",
        "+",
        "1_0",
        "12345678.125",
        "0.1",
        "-0",
        "-0.0",
        "1e400",
    ),
    *("99999999.995", "123456789.1", '"1"', '""', "true", "TRUE", "False", "t", "0.10000000149"),
]
MOMENTS = [
    *("2024-01-01", "2024-2-9", "2024-01-01 00:00:00", "2024-01-01T00:00:00.123456", "2024", "x"),
    *(
        "2024-01-01T00:00:00Z",
        "2024-01-01T00:00:00+02:00",
        "2024-07-01 12:00",
        "2024-02-30",
        "12:30",
    ),
    *("2024-03-10T02:30:00", "1500-01-01", "0001-01-01", " 2024-01-01 ", "2024-01-01T", "20240101"),
    *("2024-01-01T00:00:00 Europe/Berlin", "2024-01-01x", "19000", "2024-13-01", '"2024-01-01"'),
]
VALUES = {
    "string, boolean, byte, short, int, long, float, double": NUMBERS,
    "decimal(10;2), decimal(38;18)": NUMBERS,
    "string, timestamp, timestamp_ntz, date": MOMENTS,
}
OPTIONS: list[dict[str, str]] = [
    *({}, {"mode": "DROPMALFORMED"}, {"header": "true"}, {"nullValue": "x"}, {"escape": '"'}),
    *({"sep": ";", "quote": "'"}, {"sep": "\t"}, {"quote": ""}, {"comment": "#"}),
    *({"emptyValue": "E"}, {"nullValue": "b", "emptyValue": "x", "columnNameOfCorruptRecord": "k"}),
    {"ignoreLeadingWhiteSpace": "true", "ignoreTrailingWhiteSpace": "true"},
]
SIGNS = 'ab x"""\'\',,,;;\\\\ \t#é'


@pytest.fixture(autouse=True)
def zone(spark: SparkSession) -> Any:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    yield ZONE
    spark.conf.set("spark.sql.session.timeZone", str(before))


def read(source: FileSource) -> pa.Table:
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    batches = [item[1] for item in reader.read() if item is not None]
    return pa.Table.from_batches([each for each in batches if each is not None], source.schema)


def bare(table: pa.Table) -> pa.Table:
    """Times as numbers: Python's own end with the year 9999."""

    def plain(type_: pa.DataType) -> pa.DataType:
        if pa.types.is_timestamp(type_):
            return pa.int64()
        return pa.int32() if pa.types.is_date(type_) else type_

    return table.cast(pa.schema([(each.name, plain(each.type)) for each in table.schema]))


def compare(
    spark: SparkSession, path: Path, schema: str, lines: Sequence[str], options: dict[str, str]
) -> None:
    from pyspark.sql.types import StructType

    from stillframe.spark.types import to_arrow_schema

    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    frame = spark.read.schema(schema).options(**options).csv(str(path)).coalesce(1)
    declared = to_arrow_schema(StructType.fromDDL(schema))
    given = {"timeZone": ZONE, **options}
    ours = read(csv_from_options(str(path), declared, None, given))
    theirs = frame.toArrow()
    assert ours.num_rows == theirs.num_rows
    mine, others = (list(map(repr, bare(table).to_pylist())) for table in (ours, theirs))
    different = [pair for pair in zip(lines, others, mine, strict=False) if pair[1] != pair[2]]
    if len(lines) != len(mine):
        different = [("", *pair) for pair in zip(others, mine, strict=True) if pair[0] != pair[1]]
    assert not different, different[:3]


@pytest.mark.parametrize("types", VALUES)
def test_a_value_is_read_as_spark_reads_it(types: str, spark: SparkSession, tmp_path: Path) -> None:
    kinds = types.split(", ")
    lines = [",".join([value] * len(kinds)) for value in VALUES[types]]
    lines += ["1", ",".join([""] * len(kinds)), ",".join("1" * (len(kinds) + 1))]
    columns = [f"c{at} {kind.replace(';', ',')}" for at, kind in enumerate(kinds)]
    schema = ", ".join([*columns, "_corrupt_record string"])
    compare(spark, tmp_path / "lines.csv", schema, lines, {})


@pytest.mark.parametrize(
    ("type_", "fits"), [("int", "1"), ("double", "1.5"), ("date", "2024-01-01")]
)
def test_a_value_that_does_not_fit_makes_the_line_corrupt(
    type_: str, fits: str, spark: SparkSession, tmp_path: Path
) -> None:
    schema = f"a {type_}, b long, _corrupt_record string"
    for options in ({}, {"mode": "DROPMALFORMED"}):
        compare(spark, tmp_path / "lines.csv", schema, [f"{fits},2", "x,2", '"",1'], options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lines_of_chance_are_cut_as_spark_cuts_them(
    options: dict[str, str], spark: SparkSession, tmp_path: Path
) -> None:
    random = Random(7)
    lines = ["".join(random.choices(SIGNS, k=random.randint(0, 12))) for _ in range(1000)]
    lines += ['"a","b","c"', "a,b,c", '"a b",,"c"', "", "  ", "1,2", '"x""y",b,c', '"x\\"y",b,c']
    corrupt = options.get("columnNameOfCorruptRecord", "_corrupt_record")
    schema = f"a string, b string, c string, {corrupt} string"
    compare(spark, tmp_path / "lines.csv", schema, lines, options)


@pytest.mark.parametrize(
    "text", [b"a\nb\r\nc\rd", b"\n\n", b"", b"\xef\xbb\xbfx\n\xff\xfe\n", b"a"]
)
def test_text_is_read_as_spark_reads_it(text: bytes, spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    frame = spark.read.text(str(tmp_path)).selectExpr("cast(value as binary) value")
    theirs = [row.value.decode("utf-8", "replace") for row in frame.collect()]
    source = text_from_options(str(tmp_path), pa.schema([("value", pa.string())]), None, {})
    assert read(source)["value"].to_pylist() == theirs


ROWS = """VALUES
 (1, 1.0D, float(0.1), 1.50BD, timestamp'2024-01-01T00:00:00Z', timestamp_ntz'2024-01-01T00:00:00',
  date'2024-02-09', true, 'plain'),
 (2, 1e7D, float('NaN'), -1.23BD, timestamp'2024-07-01T12:30:45.123Z', null, null, false, ''),
 (3, double('Infinity'), float(1e10), 0.00BD, null, null, date'0001-01-01', null, null),
 (4, -0.0D, null, null, null, null, null, null, 'a,b'),
 (5, 1e-5D, null, null, null, null, null, null, 'say "hi"'),
 (6, null, null, null, null, null, null, null, ' blanks '),
 (7, null, null, null, null, null, null, null, 'back\\\\slash'),
 (8, null, null, null, null, null, null, null, 'b\\\\"q;x'),
 (9, null, null, null, null, null, null, null, 'two\nlines'),
 (10, null, null, null, null, null, null, null, "it's; café"),
 (11, null, null, null, null, null, null, null, '"'),
 (12, null, null, null, null, null, null, null, ' '),
 (13, null, null, null, null, null, null, null, 'NULL'),
 (14, null, null, null, null, null, null, null, '\\\\')
 AS t(id, d, f, m, ts, tn, dt, bo, st)"""
WRITINGS: list[tuple[dict[str, str], CsvWriting]] = [
    ({}, CsvWriting()),
    ({"header": "true", "nullValue": "NULL"}, CsvWriting(has_header=True, null_value="NULL")),
    ({"sep": ";", "quote": "'"}, CsvWriting(Signs(";", "'"))),
    ({"escape": '"'}, CsvWriting(Signs(escape='"'))),
]


@pytest.mark.parametrize(("options", "how"), WRITINGS, ids=lambda each: str(each)[:60])
def test_csv_is_written_as_spark_writes_it(
    options: dict[str, str], how: CsvWriting, spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.sql(f"SELECT * FROM {ROWS}").coalesce(1)
    frame.write.options(**options).csv(str(tmp_path / "theirs"))
    (file,) = (tmp_path / "theirs").glob("part-*.csv")
    table = frame.toArrow().combine_chunks()
    (batch,) = table.to_batches()
    head = csv_header(table.schema.names, how) if how.has_header else b""
    assert (head + bytes(csv_lines(batch, ZONE, how))).split(b"\n") == file.read_bytes().split(
        b"\n"
    )


def test_text_is_written_as_spark_writes_it(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql("SELECT * FROM VALUES ('a'), (''), (null), ('b c'), ('é\"') AS t(v)")
    frame.coalesce(1).write.text(str(tmp_path / "theirs"))
    (file,) = (tmp_path / "theirs").glob("part-*.txt")
    (batch,) = frame.coalesce(1).toArrow().combine_chunks().to_batches()
    assert bytes(text_lines(batch)) == file.read_bytes()


def test_csv_and_text_of_sparks_own_plans_are_read_and_written_by_ours(
    spark: SparkSession, tmp_path: Path
) -> None:
    import stillframe

    still = stillframe.on(spark)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text('id,word\n1,a\n2,"b,c"\nx,d\n')
    frame = spark.readStream.schema("id long, word string").csv(str(tmp_path / "in"), header=True)
    lines = spark.readStream.text(str(tmp_path / "in"))
    for name, query in (
        ("csv", still.writeStream(frame.where("id > 0")).option("header", True).format("csv")),
        ("text", still.writeStream(lines.selectExpr("upper(value) AS value")).format("text")),
    ):
        query = query.queryName(f"own-{name}").trigger(availableNow=True)
        started = query.start(
            str(tmp_path / name), checkpointLocation=str(tmp_path / "chk"), compression="gzip"
        )
        assert started.awaitTermination(120)
    read = spark.read.schema("id long, word string").csv(str(tmp_path / "csv"), header=True)
    assert sorted(map(tuple, read.collect())) == [(1, "a"), (2, "b,c")]
    words = [row.value for row in spark.read.text(str(tmp_path / "text")).collect()]
    assert sorted(words) == ["1,A", '2,"B,C"', "ID,WORD", "X,D"]
    assert [file.suffixes for file in (tmp_path / "text").glob("part-*")] == [[".txt", ".gz"]]
