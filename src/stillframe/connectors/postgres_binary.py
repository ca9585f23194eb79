"""Columns of Arrow in the binary form of PostgreSQL's COPY, made of whole columns.

A row is the number of its columns, then for each value its length and its bytes; a null has the
length -1 and no bytes. What has one width is put side by side in a matrix of bytes. Arrow joins
these and the texts row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
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
    made.add(np.frombuffer(len(types).to_bytes(2, "big"), np.uint8))
    for column, type_ in zip(rows.columns, types, strict=True):
        if type_ in _AS_THEY_ARE:
            made.add_texts(column)
        elif column.null_count:
            made.add_some(_with_length(column, type_), column.is_valid())
        else:
            made.add(_with_length(column, type_))
    return [_BEGIN, made.joined(), _END]


class _Rows:
    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[pa.Array] = []
        """Of binary values without nulls."""
        self._side_by_side: list[np.ndarray] = []
        """What comes behind them: the same number of bytes for each row."""

    def add(self, values: np.ndarray) -> None:
        """A row of bytes for each, or one for all."""
        self._side_by_side.append(np.broadcast_to(values, (self._count, values.shape[-1])))

    def add_some(self, values: np.ndarray, there: pa.BooleanArray) -> None:
        self._settle()
        self._pieces.append(pc.if_else(there, _binary(values), pa.scalar(_NULL, pa.binary())))

    def add_texts(self, column: pa.Array) -> None:
        values = column.cast(pa.binary())
        lengths = pc.fill_null(pc.binary_length(values), -1).to_numpy()
        self.add(lengths.astype(">i4").view(np.uint8).reshape(-1, 4))
        self._settle()
        self._pieces.append(pc.fill_null(values, b"") if values.null_count else values)

    def _settle(self) -> None:
        if self._side_by_side:
            self._pieces.append(_binary(np.concatenate(self._side_by_side, axis=1)))
            self._side_by_side = []

    def joined(self) -> memoryview:
        self._settle()
        rows = self._pieces[0]
        if len(self._pieces) > 1:
            rows = pc.binary_join_element_wise(*self._pieces, b"")
        ends = np.frombuffer(rows.buffers()[1], np.int32)[rows.offset :]
        return memoryview(rows.buffers()[2])[ends[0] : ends[self._count]]


def _with_length(column: pa.Array, type_: str) -> np.ndarray:
    """The bytes of each value behind its length; anything for a null."""
    arrow, form = _FIXED[type_]
    if type_ == "date":
        column = pc.subtract_checked(column.cast(pa.int32()), _EPOCH_DAYS)
    elif type_ in ("timestamp", "timestamptz"):
        moments = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        column = pc.subtract_checked(moments, _EPOCH_MICROSECONDS)
    values = column.cast(arrow).fill_null(0).to_numpy().astype(form)
    width = values.itemsize
    made = np.empty((len(values), 4 + width), np.uint8)
    made[:, :4] = np.frombuffer(width.to_bytes(4, "big"), np.uint8)
    made[:, 4:] = values.view(np.uint8).reshape(-1, width)
    return made


def _binary(values: np.ndarray) -> pa.Array:
    """A row of bytes as a value."""
    count, width = values.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)
