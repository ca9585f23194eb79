"""Columns of files that tell their schema: matched by name, and held to what is declared."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from stillframe.connectors.files import first_line
from stillframe.errors import DataError
from stillframe.key_groups import is_binary, is_text


def names_in_file(found: pa.Schema, declared: pa.Schema) -> list[str | None]:
    """What each declared column is called in the file: case does not matter, as in Spark."""
    by_lower = {name.lower(): name for name in found.names}
    return [name if name in found.names else by_lower.get(name.lower()) for name in declared.names]


def refuse_unfit(path: str, found: pa.Schema, declared: pa.Schema, names: list[str | None]) -> None:
    for field, name in zip(declared, names, strict=True):
        if name is None and not field.nullable:
            raise DataError(
                f"{path} has no column {field.name}, which is declared as never null: declare it"
                " nullable or take the file out of the path"
            )
        if name is not None and not _fits(found.field(name).type, field.type):
            raise DataError(
                f"column {name} of {path} is {found.field(name).type}, but {field.type} was"
                " declared: correct the schema or take the file out of the path"
            )


def _fits(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether every value of the one type is a value of the other, or a cast can tell."""
    types = pa.types
    if found.equals(declared) or types.is_null(found):
        return True
    if types.is_dictionary(found):
        return _fits(found.value_type, declared)
    if types.is_integer(found):
        return _integer_fits(found, declared)
    if types.is_floating(found):
        return bool(types.is_floating(declared) and found.bit_width <= declared.bit_width)
    if types.is_decimal(found) and types.is_decimal(declared):
        more_scale = declared.scale - found.scale
        return bool(0 <= more_scale <= declared.precision - found.precision)
    if is_text(found) or is_binary(found):
        # Text may be read as the bytes that it is, which may not be UTF-8.
        return is_binary(declared) or (is_text(found) and is_text(declared))
    if types.is_timestamp(found):
        return bool(types.is_timestamp(declared))
    return _nested_fits(found, declared)


def _integer_fits(found: pa.DataType, declared: pa.DataType) -> bool:
    if pa.types.is_float64(declared):
        return bool(found.bit_width <= 32)
    if not pa.types.is_integer(declared):
        return False
    signed = pa.types.is_signed_integer(declared)
    if signed == pa.types.is_signed_integer(found):
        return bool(found.bit_width <= declared.bit_width)
    return bool(signed and found.bit_width < declared.bit_width)


def _nested_fits(found: pa.DataType, declared: pa.DataType) -> bool:
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        same = pa.types.is_list(declared) or pa.types.is_large_list(declared)
        return same and _fits(found.value_type, declared.value_type)
    if pa.types.is_map(found) and pa.types.is_map(declared):
        return _fits(found.key_type, declared.key_type) and (
            _fits(found.item_type, declared.item_type)
        )
    if pa.types.is_struct(found) and pa.types.is_struct(declared):
        pairs = list(zip(found.fields, declared.fields, strict=False))
        return found.num_fields == declared.num_fields and all(
            one.name == other.name and _fits(one.type, other.type) for one, other in pairs
        )
    return False


def fitted(
    path: str,
    batch: pa.RecordBatch,
    schema: pa.Schema,
    names: list[str | None],
    grouped_by: Sequence[str],
) -> pa.RecordBatch:
    columns = []
    for field, name in zip(schema, names, strict=True):
        if name is None:
            columns.append(pa.nulls(batch.num_rows, field.type))
        elif field.name in grouped_by and _is_dictionary_of(field.type, batch.column(name).type):
            columns.append(_not_null(path, batch.column(name), field))
        else:
            columns.append(_fitted_column(path, batch.column(name), field))
    fields = [field.with_type(each.type) for field, each in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _is_dictionary_of(type_: pa.DataType, found: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(found) and found.value_type.equals(type_))


def _not_null(path: str, column: pa.Array, field: pa.Field) -> pa.Array:
    if column.null_count and not field.nullable:
        raise DataError(
            f"column {field.name} of {path} has nulls, but it is declared as never null: declare"
            " it nullable"
        )
    return column


def _fitted_column(path: str, column: pa.Array, field: pa.Field) -> pa.Array:
    _not_null(path, column, field)
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"column {field.name} of {path} is {column.type} and has values that do not fit the"
            f" declared {field.type} ({first_line(error)}): correct the schema"
        ) from error
