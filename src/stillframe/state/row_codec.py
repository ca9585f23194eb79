"""Frozen rows as bytes: MessagePack, typed by the schema, without field names.

What is decoded is the very row that was encoded: tuples for lists, structs and pairs of maps, one
and the same NaN. As a *key* a row has one form for all rows that are equal: 0.0 and -0.0 are one.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from stillframe.errors import SnapshotDamaged
from stillframe.state.rows import Row

_Fix = Callable[[Any], Any]
_encode = msgspec.msgpack.Encoder().encode


class RowCodec:
    """The rows of one schema, with something beside them or alone."""

    def __init__(self, schema: pa.Schema) -> None:
        self._type = type_ = _row_type([field.type for field in schema])
        self._same_nan = _row_fix(schema, _float_read, None)
        self._as_key = _row_fix(schema, _float_key, _decimal_key)
        self._decode_row = _decoder(type_)
        kept = _tuple(type_, int | None)
        self._decode_kept = _decoder(kept)
        self._decode_rows = _decoder(_tuple(type_, ...))
        self._decode_all_kept = _decoder(_tuple(kept, ...))

    encode = staticmethod(_encode)
    """A row, a row and when it expires, or a sequence of one of these."""

    def encode_key(self, row: Row) -> bytes:
        return _encode(row if self._as_key is None else self._as_key(row))

    def row(self, data: bytes) -> Row:
        row: Row = self._decode_row(data)
        return row if self._same_nan is None else self._same_nan(row)

    def kept(self, data: bytes) -> tuple[Row, int | None]:
        row, expires_ms = self._decode_kept(data)
        return (row if self._same_nan is None else self._same_nan(row)), expires_ms

    def rows(self, data: bytes) -> list[Row]:
        rows = self._decode_rows(data)
        return list(rows if self._same_nan is None else map(self._same_nan, rows))

    def all_kept(self, data: bytes) -> list[tuple[Row, int | None]]:
        fix = self._same_nan
        kept = self._decode_all_kept(data)
        return list(kept) if fix is None else [(fix(row), expires_ms) for row, expires_ms in kept]

    def entries_decoder(
        self, *, in_lists: bool = False, expire: bool = False
    ) -> Callable[[Sequence[bytes]], list[Any]]:
        """What decodes many entries at once: each is a row, or a row and when it expires, or a
        tuple of these. It is for columns, where no value is compared: a NaN is any NaN."""
        type_ = _tuple(self._type, int | None) if expire else self._type
        return _decoder_of_many(_tuple(type_, ...) if in_lists else type_)


def _decoder_of_many(type_: Any) -> Callable[[Sequence[bytes]], list[Any]]:
    decode, decode_or_tell = msgspec.msgpack.Decoder(type_).decode, _decoder(type_)

    def decoded(entries: Sequence[bytes]) -> list[Any]:
        try:
            return list(map(decode, entries))
        except msgspec.MsgspecError:
            return list(map(decode_or_tell, entries))

    return decoded


def _decoder(type_: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(type_).decode

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except msgspec.MsgspecError as error:
            raise SnapshotDamaged(
                f"{len(data)} bytes of state are no row of their schema ({error}): restore an"
                " older checkpoint"
            ) from error

    return decoded


# --- the type of a frozen value


def _tuple(*types: Any) -> Any:
    """`tuple[...]` of types that are known at run time only."""
    return tuple.__class_getitem__(types)


def _row_type(types: list[pa.DataType]) -> Any:
    return _tuple(*[_value_type(type_) for type_ in types])


def _value_type(type_: pa.DataType) -> Any:
    """Null is let through anywhere: what may be null was checked when the row came in."""
    inner = _inner_type(type_)
    return None if inner is None else inner | None


def _inner_type(type_: pa.DataType) -> Any:
    if pt.is_list(type_):
        return _tuple(_value_type(type_.value_type), ...)
    if pt.is_map(type_):
        pair = _tuple(_value_type(type_.key_type), _value_type(type_.item_type))
        return _tuple(pair, ...)
    if pt.is_struct(type_):
        return _row_type([field.type for field in type_])
    return _scalar_type(type_)


def _scalar_type(type_: pa.DataType) -> Any:
    if pt.is_timestamp(type_):
        return datetime.datetime
    for is_one, scalar in _SCALARS:
        if is_one(type_):
            return scalar
    raise AssertionError(f"no state keeps values of type {type_}")


_SCALARS: list[tuple[Callable[[pa.DataType], bool], Any]] = [
    (pt.is_boolean, bool),
    (pt.is_integer, int),
    (pt.is_floating, float),
    (pt.is_string, str),
    (pt.is_binary, bytes),
    (pt.is_decimal, decimal.Decimal),
    (pt.is_date32, datetime.date),
    (pt.is_duration, datetime.timedelta),
    (pt.is_null, None),
]


# --- values that are equal but do not look so


def _float_read(value: float) -> float:
    return value if value == value else math.nan


def _float_key(value: float) -> float:
    return value + 0.0 if value == value else math.nan


def _decimal_key(value: decimal.Decimal) -> decimal.Decimal:
    return value if value else value.copy_abs()


def _row_fix(fields: Any, of_float: _Fix, of_decimal: _Fix | None) -> _Fix | None:
    """Makes the row anew with these made of its numbers; None: it has no such numbers."""
    fixes = [_fix(field.type, of_float, of_decimal) for field in fields]
    if not any(fixes):
        return None

    def fixed(row: Row) -> Row:
        return tuple(
            [
                value if fix is None or value is None else fix(value)
                for fix, value in zip(fixes, row, strict=True)
            ]
        )

    return fixed


def _fix(type_: pa.DataType, of_float: _Fix, of_decimal: _Fix | None) -> _Fix | None:
    if pt.is_floating(type_):
        return of_float
    if pt.is_decimal(type_):
        return of_decimal
    if pt.is_struct(type_):
        return _row_fix(list(type_), of_float, of_decimal)
    if pt.is_map(type_):
        pair = _row_fix([type_.key_field, type_.item_field], of_float, of_decimal)
        return None if pair is None else lambda pairs: tuple(map(pair, pairs))
    if pt.is_list(type_):
        each = _row_fix([type_.value_field], of_float, of_decimal)
        return None if each is None else lambda values: tuple([each((v,))[0] for v in values])
    return None
