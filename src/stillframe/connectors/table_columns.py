"""Columns of a stream as those of a table: whether they fit, made to fit, and parted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.errors import DataError

Partition = tuple[Any, ...]
"""A value for each column that parts the rows, as Python has it."""


def check_fits(stream: pa.Schema, table: pa.Schema, what: str) -> None:
    """Raise `DataError` unless every value of the stream has its place in the table, unchanged."""
    for field in stream:
        if field.name not in table.names:
            raise DataError(
                f"{what} has no column {field.name}: it has {', '.join(table.names)}; add the"
                " column to the table, or leave it out with select"
            )
        wanted = table.field(field.name).type
        if not _fits(field.type, wanted):
            raise DataError(
                f"column {field.name} is {field.type}, and in {what} it is {wanted}: cast it"
            )
    for field in table:
        if not field.nullable and field.name not in stream.names:
            raise DataError(
                f"{what} has a column {field.name} that must not be null, and the stream has none:"
                " add it with withColumn, or alter the table"
            )


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether each value of one type is a value of the other."""
    types = pa.types
    if types.is_signed_integer(given) and types.is_signed_integer(wanted):
        return bool(given.bit_width <= wanted.bit_width)
    if types.is_floating(given) and types.is_floating(wanted):
        return bool(given.bit_width <= wanted.bit_width)
    if types.is_decimal(given) and types.is_decimal(wanted):
        whole = given.precision - given.scale <= wanted.precision - wanted.scale
        return bool(whole and given.scale <= wanted.scale)
    if types.is_timestamp(given) and types.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    if types.is_struct(given) and types.is_struct(wanted):
        names = [[field.name for field in each] for each in (given, wanted)]
        return names[0] == names[1] and all(
            _fits(one.type, other.type) for one, other in zip(given, wanted, strict=True)
        )
    if types.is_map(given) and types.is_map(wanted):
        return _fits(given.key_type, wanted.key_type) and _fits(given.item_type, wanted.item_type)
    if _is_list(given) and _is_list(wanted):
        return _fits(given.value_type, wanted.value_type)
    return bool(_plain(given) == _plain(wanted))


def _is_list(given: pa.DataType) -> bool:
    return bool(pa.types.is_list(given) or pa.types.is_large_list(given))


def _plain(given: pa.DataType) -> pa.DataType:
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(given, given)


def fitted(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with these columns; those that they lack are null."""
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def parted(rows: pa.Table, by: Sequence[pa.ChunkedArray]) -> list[tuple[Partition, pa.Table]]:
    """The rows of each combination of values, in the order in which these first come."""
    if not by:
        return [((), rows)]
    keys = pa.table({str(number): values for number, values in enumerate(by)})
    places = pa.array(range(rows.num_rows), pa.int64())
    # In this thread: Arrow's own may be taken by the records that flow meanwhile.
    grouped = keys.append_column("at", places).group_by(keys.column_names, use_threads=False)
    groups = grouped.aggregate([("at", "list")])
    values = zip(*(groups.column(name).to_pylist() for name in keys.column_names), strict=True)
    lists = groups.column("at_list").combine_chunks()
    return [
        (value, rows.take(pc.list_flatten(lists.slice(number, 1))))
        for number, value in enumerate(values)
    ]
