"""Spark's schemas and Arrow's: the same columns in two dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as sql

from stillframe.errors import BuildError

TIMESTAMP = pa.timestamp("us", tz="UTC")
TIMESTAMP_NTZ = pa.timestamp("us")

_SIMPLE_TYPES: dict[type[sql.DataType], pa.DataType] = {
    sql.NullType: pa.null(),
    sql.BooleanType: pa.bool_(),
    sql.ByteType: pa.int8(),
    sql.ShortType: pa.int16(),
    sql.IntegerType: pa.int32(),
    sql.LongType: pa.int64(),
    sql.FloatType: pa.float32(),
    sql.DoubleType: pa.float64(),
    sql.VarcharType: pa.string(),
    sql.CharType: pa.string(),
    sql.BinaryType: pa.binary(),
    sql.DateType: pa.date32(),
    sql.TimestampType: TIMESTAMP,
    sql.TimestampNTZType: TIMESTAMP_NTZ,
    sql.DayTimeIntervalType: pa.duration("us"),
}

_FROM_ARROW: tuple[tuple[Callable[[pa.DataType], bool], Callable[[], sql.DataType]], ...] = (
    (pa.types.is_null, sql.NullType),
    (pa.types.is_boolean, sql.BooleanType),
    (pa.types.is_int8, sql.ByteType),
    (pa.types.is_int16, sql.ShortType),
    (pa.types.is_int32, sql.IntegerType),
    (pa.types.is_int64, sql.LongType),
    (pa.types.is_float32, sql.FloatType),
    (pa.types.is_float64, sql.DoubleType),
    (pa.types.is_string, sql.StringType),
    (pa.types.is_large_string, sql.StringType),
    (pa.types.is_binary, sql.BinaryType),
    (pa.types.is_large_binary, sql.BinaryType),
    (pa.types.is_date32, sql.DateType),
    (pa.types.is_duration, sql.DayTimeIntervalType),
)


def to_arrow_type(spark_type: sql.DataType) -> pa.DataType:
    """The Arrow type our slots use for a Spark type."""
    match spark_type:
        case sql.StringType():
            return _string_type(spark_type)
        case sql.DecimalType():
            return pa.decimal128(spark_type.precision, spark_type.scale)
        case sql.ArrayType():
            return pa.list_(_field("element", spark_type.elementType, spark_type.containsNull))
        case sql.MapType():
            value = _field("value", spark_type.valueType, spark_type.valueContainsNull)
            return pa.map_(to_arrow_type(spark_type.keyType), value)
        case sql.StructType():
            return pa.struct([_to_arrow_field(field) for field in spark_type.fields])
    arrow_type = _SIMPLE_TYPES.get(type(spark_type))
    if arrow_type is None:
        raise BuildError(
            f"a stream cannot carry the type {spark_type.simpleString()}: "
            "cast it to another type before still.stream(...)"
        )
    return arrow_type


def _string_type(spark_type: sql.StringType) -> pa.DataType:
    if not spark_type.isUTF8BinaryCollation():
        raise BuildError(
            f"a stream cannot carry the type {spark_type.simpleString()}: strings are compared "
            "by their bytes, so cast it to a plain string before still.stream(...)"
        )
    return pa.string()


def _to_arrow_field(field: sql.StructField) -> pa.Field:
    return _field(field.name, field.dataType, field.nullable)


def _field(name: str, spark_type: sql.DataType, is_nullable: bool) -> pa.Field:
    arrow_type = to_arrow_type(spark_type)
    # Spark says of `array()` that its elements, of type void, are never null. Arrow refuses that.
    return pa.field(name, arrow_type, is_nullable or pa.types.is_null(arrow_type))


def to_arrow_schema(schema: sql.StructType) -> pa.Schema:
    """The Arrow schema of a stream with these Spark columns; timestamps are UTC instants."""
    return pa.schema([_to_arrow_field(field) for field in schema.fields])


def from_arrow_type(arrow_type: pa.DataType) -> sql.DataType:
    """The Spark type of an Arrow type."""
    if pa.types.is_timestamp(arrow_type):
        return sql.TimestampNTZType() if arrow_type.tz is None else sql.TimestampType()
    if pa.types.is_decimal128(arrow_type):
        return sql.DecimalType(arrow_type.precision, arrow_type.scale)
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        element = arrow_type.value_field
        return sql.ArrayType(from_arrow_type(element.type), element.nullable)
    if pa.types.is_map(arrow_type):
        value = arrow_type.item_field
        key_type = from_arrow_type(arrow_type.key_type)
        return sql.MapType(key_type, from_arrow_type(value.type), value.nullable)
    if pa.types.is_struct(arrow_type):
        return sql.StructType([_from_arrow_field(field) for field in arrow_type])
    for is_type, make in _FROM_ARROW:
        if is_type(arrow_type):
            return make()
    raise BuildError(
        f"Spark has no type for Arrow's {arrow_type}: cast the column to one that Spark knows"
    )


def _from_arrow_field(field: pa.Field) -> sql.StructField:
    return sql.StructField(field.name, from_arrow_type(field.type), field.nullable)


def from_arrow_schema(schema: pa.Schema) -> sql.StructType:
    """The Spark schema of these Arrow columns."""
    return sql.StructType([_from_arrow_field(field) for field in schema])


def parse_schema(spark: SparkSession, ddl_or_struct: str | sql.StructType) -> sql.StructType:
    """A schema as `DataFrameReader.schema` takes it; mistakes are told by Spark's own parser."""
    if isinstance(ddl_or_struct, sql.StructType):
        return ddl_or_struct
    if not isinstance(ddl_or_struct, str):
        raise BuildError(
            f"a schema is a StructType or a DDL string, not {ddl_or_struct!r}: "
            'write for example "app_id string, at timestamp"'
        )
    parsed = _jvm(spark).org.apache.spark.sql.types.StructType.fromDDL(ddl_or_struct)
    return sql.StructType.fromJson(json.loads(parsed.json()))


def _jvm(spark: SparkSession) -> Any:
    return spark._jvm


def empty_frame(spark: SparkSession, schema: pa.Schema | sql.StructType) -> DataFrame:
    """A DataFrame without rows, for Spark's analyzer to try an operation on. Runs no job."""
    struct = from_arrow_schema(schema) if isinstance(schema, pa.Schema) else schema
    # A local relation, made on the JVM side: createDataFrame([]) would make an RDD.
    session = spark._jsparkSession
    rows = _jvm(spark).java.util.ArrayList()
    java_schema = session.parseDataType(struct.json())
    return DataFrame(session.createDataFrame(rows, java_schema), spark)
