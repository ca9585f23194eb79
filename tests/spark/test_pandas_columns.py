"""What a pandas function is given, and columns of what it gives; without a JVM, as in a slot."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pandas
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from stillframe.spark.expressions.batch_udfs import BatchUdf
from stillframe.spark.expressions.pandas_columns import PandasColumns
from stillframe.spark.types import to_arrow_type

NAMED = StructType().add("id", IntegerType()).add("name", StringType())
SEEN = StructType().add("at", TimestampType()).add("all", ArrayType(TimestampType()))
AT = datetime.datetime(2024, 1, 1, 23, 30, tzinfo=datetime.UTC)


def columns(made: DataType, given: StructType | None = None) -> PandasColumns:
    settings = {
        "safecheck": False,
        "assign_cols_by_name": True,
        "int_to_decimal_coercion_enabled": False,
    }
    return PandasColumns(given or StructType(), made, "Asia/Tokyo", tuple(settings.items()))


def test_columns_come_as_pandas_has_them_and_times_in_the_zone_of_the_session() -> None:
    kinds = [TimestampType(), DateType(), DecimalType(10, 2), ArrayType(IntegerType()), NAMED, SEEN]
    given = StructType()
    for place, kind in enumerate(kinds):
        given.add(f"_{place}", kind)
    named, seen = {"id": 7, "name": "a"}, {"at": AT, "all": [AT]}
    values = [AT, AT.date(), Decimal("1.50"), [1, 2], named, seen]
    arrays = [
        pa.array([value, None], to_arrow_type(kind))
        for value, kind in zip(values, kinds, strict=True)
    ]
    times, days, amounts, lists, names, nested = columns(LongType(), given).as_pandas(arrays)
    shown = pandas.Timestamp("2024-01-02 08:30")
    assert times[0] == nested["at"][0] == pandas.Timestamp(nested["all"][0][0]) == shown
    assert times.isna().tolist() == [False, True]
    assert days.tolist() == [AT.date(), None]
    assert amounts.tolist() == [Decimal("1.50"), None]
    assert lists[0].tolist() == [1, 2]
    assert list(names.columns) == ["id", "name"]
    assert names["name"].tolist() == ["a", None]


@pytest.mark.parametrize(
    ("kind", "result", "values"),
    [
        (TimestampType(), pandas.Series([pandas.Timestamp("2024-01-02 08:30"), None]), [AT, None]),
        (StringType(), pandas.Series(["a", None]), ["a", None]),
        (LongType(), pandas.Series([1.0, None]), [1, None]),
        (ArrayType(IntegerType()), pandas.Series([[1, 2], None]), [[1, 2], None]),
        (NAMED, pandas.DataFrame({"name": ["a"], "id": [7]}), [{"id": 7, "name": "a"}]),
        (NAMED, pandas.DataFrame({0: [7], 1: ["a"]}), [{"id": 7, "name": "a"}]),
    ],
)
def test_a_result_is_a_column_of_the_declared_type(
    kind: DataType, result: pandas.Series | pandas.DataFrame, values: list[object]
) -> None:
    made = columns(kind).as_column(result).cast(to_arrow_type(kind))
    assert made.equals(pa.array(values, to_arrow_type(kind)))


def test_a_result_that_does_not_fit_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        columns(LongType()).as_column(pandas.Series(["a"]))


def test_a_function_of_arrow_columns_is_given_instants_in_the_zone_of_the_session() -> None:
    hours = BatchUdf(pc.hour, pa.int64(), None, takes_iterator=False, zone="Asia/Tokyo")
    times = pa.array([AT, None], to_arrow_type(TimestampType()))
    assert hours([times], 2).to_pylist() == [8, None]
