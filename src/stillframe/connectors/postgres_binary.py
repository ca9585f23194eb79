"""Columns of Arrow in the binary form of PostgreSQL's COPY, made of whole columns.

A row is the number of its columns, then for each value its length and its bytes; a null has the
length -1 and no bytes. What has one width is put side by side, as the fields of a record. Arrow
joins these and the texts row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"

# It counts days and microseconds from the year 2000 on.
_EPOCH_DAYS = 10_957
_EPOCH_MICROSECONDS = 946_684_800_000_000

_FIXED: Mapping[str, tuple[pa.DataType, str]] = {
    "bool": (pa.uint8(), "u1"),
    "int2": (pa.int16(), ">i2"),
    "int4": (pa.int32(), ">i4"),
    "int8": (pa.int64(), ">i8"),
    "float4": (pa.float32(), ">f4"),
    "float8": (pa.float64(), ">f8"),
    "date": (pa.int32(), ">i4"),
    "timestamp": (pa.int64(), ">i8"),
    "timestamptz": (pa.int64(), ">i8"),
}
_AS_THEY_ARE = frozenset({"text", "varchar", "bpchar", "name", "citext", "json", "enum", "bytea"})


def takes_binary(types: Sequence[str]) -> bool:
    """Whether all of these types of columns are known here; others are loaded as texts."""
    return all(each in _FIXED or each in _AS_THEY_ARE for each in types)


def as_binary(rows: pa.RecordBatch, types: Sequence[str]) -> list[memoryview | bytes]:
    """For columns of these types. Raises `pa.ArrowInvalid` for a value that one of them cannot
    have: as text, the database says so itself."""
    made = _Rows(rows.num_rows)
    made.add(">i2", len(types))
    for column, type_ in zip(rows.columns, types, strict=True):
        if type_ in _AS_THEY_ARE:
            made.add_texts(column)
            continue
        form = _FIXED[type_][1]
        values = _numbers(column, type_)
        if column.null_count:
            made.add_some(form, values, column.is_valid())
        else:
            made.add(">i4", np.dtype(form).itemsize)
            made.add(form, values)
    return [_BEGIN, made.joined(), _END]


class _Rows:
    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[pa.Array] = []
        """Of binary values without nulls."""
        self._side_by_side: list[tuple[str, npt.ArrayLike]] = []
        """What comes behind them, in each row: numbers and their form."""

    def add(self, form: str, values: npt.ArrayLike) -> None:
        """A number for each row, or one for all."""
        self._side_by_side.append((form, values))

    def add_some(self, form: str, values: npt.ArrayLike, there: pa.BooleanArray) -> None:
        self._settle()
        length = np.dtype(form).itemsize
        whole = _beside_each_other(self._count, [(">i4", length), (form, values)])
        self._pieces.append(pc.if_else(there, whole, pa.scalar(_NULL, pa.binary())))

    def add_texts(self, column: pa.Array) -> None:
        values = column.cast(pa.binary())
        self.add(">i4", pc.fill_null(pc.binary_length(values), -1).to_numpy())
        self._settle()
        self._pieces.append(pc.fill_null(values, b"") if values.null_count else values)

    def _settle(self) -> None:
        if self._side_by_side:
            self._pieces.append(_beside_each_other(self._count, self._side_by_side))
            self._side_by_side = []

    def joined(self) -> memoryview:
        self._settle()
        rows = self._pieces[0]
        if len(self._pieces) > 1:
            rows = pc.binary_join_element_wise(*self._pieces, b"")
        ends = np.frombuffer(rows.buffers()[1], np.int32)[rows.offset :]
        return memoryview(rows.buffers()[2])[ends[0] : ends[self._count]]


def _numbers(column: pa.Array, type_: str) -> npt.NDArray[Any]:
    """As PostgreSQL counts; anything for a null."""
    if type_ == "date":
        column = pc.subtract_checked(column.cast(pa.int32()), _EPOCH_DAYS)
    elif type_ in ("timestamp", "timestamptz"):
        moments = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        column = pc.subtract_checked(moments, _EPOCH_MICROSECONDS)
    numbers: npt.NDArray[Any] = column.cast(_FIXED[type_][0]).fill_null(0).to_numpy()
    return numbers


def _beside_each_other(count: int, fields: Sequence[tuple[str, npt.ArrayLike]]) -> pa.Array:
    """The bytes of these numbers of each row, as one value."""
    rows = np.empty(count, [(f"{place}", form) for place, (form, _) in enumerate(fields)])
    for place, (_, values) in enumerate(fields):
        rows[f"{place}"] = values
    width = rows.itemsize
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows.view(np.uint8))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)
