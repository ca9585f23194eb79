"""Times as a file sink is to write them: `timestampFormat` and its kind, by Spark's patterns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.functions import col, date_format
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    MapType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from stillframe.errors import BuildError

if TYPE_CHECKING:
    from stillframe.spark.stream import Stream

_KINDS: Mapping[str, type[DataType]] = {
    "dateFormat": DateType,
    "timestampFormat": TimestampType,
    "timestampNTZFormat": TimestampNTZType,
}


def with_times_as_texts(
    stream: Stream, patterns: Mapping[str, str | None], left_out: Collection[str]
) -> Stream:
    """The stream with texts by these patterns for its times, but for the columns `left_out`."""
    asked = {_KINDS[name]: (name, text) for name, text in patterns.items() if text is not None}
    if not asked:
        return stream
    columns = []
    for field in stream.schema:
        column = col(f"`{field.name.replace('`', '``')}`")
        found = asked.get(type(field.dataType))
        for kind, (option, _) in asked.items():
            if found is None and _has_inside(field.dataType, kind):
                raise BuildError(
                    f"option {option} is for columns of times, and in column {field.name} they are"
                    " inside of something: make a text of each with date_format(...)"
                )
        if found is not None and field.name not in left_out:
            column = date_format(column, found[1]).alias(field.name)
        columns.append(column)
    return stream.select(*columns)


def _has_inside(type_: DataType, kind: type[DataType]) -> bool:
    match type_:
        case StructType():
            return any(_has_inside(field.dataType, kind) for field in type_)
        case ArrayType():
            return _has_inside(type_.elementType, kind)
        case MapType():
            return _has_inside(type_.keyType, kind) or _has_inside(type_.valueType, kind)
        case _:
            return isinstance(type_, kind)
