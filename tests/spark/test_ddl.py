"""Schemas written as DDL are read as Spark's own parser reads them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.errors import ParseException
from pyspark.sql import SparkSession

from stillframe.api.ddl import schema_of_ddl
from stillframe.errors import BuildError
from stillframe.spark.types import parse_schema, to_arrow_schema

pytestmark = pytest.mark.spark

READ = [
    "count int",
    "a tinyint, b byte, c smallint, d short, e int, f integer, g bigint, h long",
    "a float, b real, c double, d decimal, e dec(5), f numeric(20, 3), g decimal(38,38)",
    "a string, b char(3), c varchar(10), d binary, e boolean, f date, g void",
    "a timestamp, b timestamp_ntz, c timestamp_ltz",
    "a INTERVAL DAY TO SECOND, b interval hour",
    "A Int Not Null, b STRING not null comment 'a text, with ''quotes''', c long COMMENT \"x\"",
    "xs array<int>, m map<string, array<map<int, string>>>",
    "s struct<a: int, b: string NOT NULL COMMENT 'c', c: struct<d double>>, e struct<>",
    "`odd name` int, `with``tick` struct<`x y`: int>, _under int, d2 int",
    "  spaced \n\t   int ,other\nlong ",
    "array array<int>, map int, struct int, date date, timestamp timestamp",
    "n int, N int",
]

REFUSED = [
    "",
    "a",
    "a int b int",
    "a int,",
    ", a int",
    "a inti",
    "a array",
    "a array<int",
    "a map<int>",
    "a struct<b>",
    "a int NOT",
    "a int COMMENT x",
    "a char",
    "a decimal(1,2,3)",
    "a decimal(x)",
    "a int)",
    "a-b int",
    "a int; b int",
    "a: int, b: string",
]


@pytest.mark.parametrize("text", READ)
def test_a_schema_means_what_it_means_to_spark(spark: SparkSession, text: str) -> None:
    assert schema_of_ddl(text) == to_arrow_schema(parse_schema(spark, text))


@pytest.mark.parametrize("text", REFUSED)
def test_what_spark_refuses_is_refused(spark: SparkSession, text: str) -> None:
    with pytest.raises(ParseException):
        parse_schema(spark, text)
    with pytest.raises(BuildError, match=r"the schema .* cannot be read \("):
        schema_of_ddl(text)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(BuildError, match="two columns named n"):
        schema_of_ddl("n int, n long")


def test_the_error_says_where_reading_stopped() -> None:
    with pytest.raises(BuildError, match=r"Unsupported data type 'WHOLE'"):
        schema_of_ddl("n whole")
    assert schema_of_ddl("n long").field("n").type == pa.int64()
