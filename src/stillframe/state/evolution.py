"""Rows of an older program, made to fit what the program declares now.

A field that was added is null, one that was left out is dropped, a number may have become wider.
Whatever else has changed is refused, with both schemas.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from stillframe.errors import StartRefused
from stillframe.key_groups import is_text
from stillframe.state.backends import EXPIRES, EXPIRES_TYPE, USER_KEY, VALUE, Declared, Kind
from stillframe.state.snapshots import kind_of, schema_text


def fitted_to(declared: Declared, batch: pa.RecordBatch, key_schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of `declared.snapshot_schema`."""
    _refuse_other_kind(declared, batch.schema)
    schema = declared.snapshot_schema(key_schema)
    if batch.schema.equals(schema):
        return batch
    names = batch.schema.names
    if names[: len(key_schema)] != key_schema.names:
        raise StartRefused(
            f"state {declared.name!r} was kept by the columns {names}, and the stream is grouped by"
            f" {key_schema.names} now: group by the same keys in the same order, or start over"
        )
    columns = [_key_column(declared, batch, field) for field in key_schema]
    if declared.user_key is not None:
        columns.append(_cast(declared, batch.column(USER_KEY), declared.user_key.type))
    columns.append(_cast(declared, batch.column(VALUE), declared.value.type))
    if declared.expires:
        nulls = pa.nulls(batch.num_rows, EXPIRES_TYPE)
        columns.append(batch.column(EXPIRES) if EXPIRES in names else nulls)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def hash_alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a key of one type belongs to the same key group, and is found, with the other."""
    if found.equals(wanted) or (is_text(found) and is_text(wanted)):
        return True
    both_float = pt.is_floating(found) and pt.is_floating(wanted)
    both_integer = pt.is_integer(found) and pt.is_integer(wanted)
    return (both_float or both_integer) and _is_wider(found, wanted)


def can_be_cast(found: pa.DataType, wanted: pa.DataType) -> bool:
    """What a value that is lost by it raises, the cast says."""
    return (
        _fits(found, wanted)
        or (is_text(found) and is_text(wanted))
        or (
            pt.is_primitive(found)
            and pt.is_primitive(wanted)
            and pt.is_temporal(found) == pt.is_temporal(wanted)
        )
    )


def refuse_other_keys(found: pa.Schema, key_schema: pa.Schema, uid: str) -> None:
    """Rows that a user's function keeps as it likes are found by their keys alone."""
    here = {field.name: field.type for field in found}
    if all(f.name in here and hash_alike(here[f.name], f.type) for f in key_schema):
        return
    raise StartRefused(
        f"the state of operator {uid!r} has the columns {schema_text(found)} in the snapshot, and"
        f" the stream is keyed by {schema_text(key_schema)} now: key by what it was, or give the"
        " operator another uid"
    )


def _refuse_other_kind(declared: Declared, found: pa.Schema) -> None:
    kind = kind_of(found)
    if kind != declared.kind:
        raise StartRefused(
            f"state {declared.name!r} is a {kind or 'state of a function'} in the checkpoint, and"
            f" the program declares it as a {declared.kind}: give the new one another name"
        )


def _key_column(declared: Declared, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names or batch.schema.field(field.name).type != field.type:
        raise StartRefused(
            f"state {declared.name!r} was kept by the keys {batch.schema.names}, and the stream is"
            f" grouped by {field.name} {field.type} now: group by what it was, or start over"
        )
    return batch.column(field.name)


def _cast(declared: Declared, column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if not _fits(column.type, wanted):
        raise StartRefused(
            f"state {declared.name!r} has the schema {column.type} in the checkpoint, which cannot"
            f" become {wanted}, as the program declares it: add fields that may be null, drop"
            " fields or widen numbers, or give the new state"
            f"{' of this ' + declared.kind if declared.kind is Kind.MAP else ''} another name"
        )
    return made(column, wanted)


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    if found.equals(wanted):
        return True
    if pt.is_struct(found) and pt.is_struct(wanted):
        there = {field.name: field for field in found}
        return all(
            _fits(there[field.name].type, field.type) if field.name in there else field.nullable
            for field in wanted
        )
    if pt.is_list(found) and pt.is_list(wanted):
        return _fits(found.value_type, wanted.value_type)
    if pt.is_map(found) and pt.is_map(wanted):
        keys = found.key_type.equals(wanted.key_type)
        return keys and _fits(found.item_type, wanted.item_type)
    return _is_wider(found, wanted)


def _is_wider(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pt.is_null(found):
        return True
    if pt.is_integer(found) and pt.is_integer(wanted):
        return bool(found.bit_width <= wanted.bit_width)
    if pt.is_integer(found) and pt.is_float64(wanted):
        return bool(found.bit_width <= 32)
    if pt.is_decimal(found) and pt.is_decimal(wanted):
        digits = wanted.precision - wanted.scale >= found.precision - found.scale
        return bool(digits and wanted.scale >= found.scale)
    return bool(pt.is_float32(found) and pt.is_float64(wanted))


def made(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The column with the wanted type; null structs have become rows of the state long ago."""
    if column.type.equals(wanted):
        return column
    if pt.is_struct(wanted):
        there = {field.name: number for number, field in enumerate(column.type)}
        parts = column.flatten()
        arrays = [
            made(parts[there[field.name]], field.type)
            if field.name in there
            else pa.nulls(len(column), field.type)
            for field in wanted
        ]
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(arrays, fields=list(wanted), mask=mask)
    if pt.is_list(wanted):
        rows = column.to_pylist()
        return pa.array(rows, wanted)
    if pt.is_map(wanted):
        return pa.array(column.to_pylist(), wanted)
    return column.cast(wanted)
