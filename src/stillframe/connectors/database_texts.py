"""Columns of Arrow as the texts that databases load, made of whole columns and not row by row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv


def as_csv(rows: pa.RecordBatch) -> pa.Buffer:
    """For PostgreSQL's COPY: nothing is a null, texts are in quotes."""
    columns = [
        _around("\\x", hexadecimal(column), "") if pa.types.is_binary(column.type) else column
        for column in rows.columns
    ]
    table = pa.Table.from_arrays(columns, names=rows.schema.names)
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(include_header=False))
    return sink.getvalue()


def as_lines(rows: pa.RecordBatch) -> memoryview:
    """For MySQL's LOAD DATA: tabs between columns, a backslash before what means something else."""
    texts = [pc.fill_null(_escaped(column), "\\N") for column in rows.columns]
    inner = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, "\t")
    return _bytes_of(_around("", inner, "\n"))


def _escaped(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type):
        return _plain(column)
    there = bytes(_bytes_of(column))
    for sign, written in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\0", "\\0")):
        # Most texts have none of them, and to look is quicker than to make another.
        if sign.encode() in there:
            column = pc.replace_substring(column, sign, written)
    return column


def as_values(rows: pa.RecordBatch) -> memoryview:
    """For MySQL's INSERT: `(1,'a'),(2,NULL)`. Backslashes escape, whatever sql_mode says else."""
    literals = [pc.fill_null(_literal(column), "NULL") for column in rows.columns]
    inner = literals[0] if len(literals) == 1 else pc.binary_join_element_wise(*literals, ",")
    lines = _around("(", inner, "),")
    return _bytes_of(lines)[:-1]  # without the last comma


def _literal(column: pa.Array) -> pa.Array:
    type_ = column.type
    if pa.types.is_binary(type_):
        return _around("x'", hexadecimal(column), "'")
    if pa.types.is_floating(type_):
        text = _plain(column)
        # They are no numbers to MySQL, which refuses them as texts.
        return pc.if_else(pc.is_finite(column), text, _around("'", text, "'"))
    if pa.types.is_string(type_):
        escaped = pc.replace_substring(column, "\\", "\\\\")
        return _around("'", pc.replace_substring(escaped, "'", "\\'"), "'")
    # A decimal in quotes stays exact where it has an exponent.
    is_bare = pa.types.is_integer(type_) or pa.types.is_boolean(type_)
    return _plain(column) if is_bare else _around("'", _plain(column), "'")


def _plain(column: pa.Array) -> pa.Array:
    """As MySQL writes numbers and times."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us"))  # in UTC
    return column.cast(pa.string())


def hexadecimal(column: pa.Array) -> pa.Array:
    """Each value of a binary column in two digits for each byte."""
    offsets = _offsets(column)
    data = column.buffers()[2]
    digits = b"" if data is None else data[offsets[0] : offsets[-1]].to_pybytes().hex().encode()
    doubled = ((offsets - offsets[0]) * 2).astype(np.int32)
    made = pa.StringArray.from_buffers(len(column), pa.py_buffer(doubled), pa.py_buffer(digits))
    return pc.if_else(column.is_valid(), made, None)


def _around(before: str, column: pa.Array, after: str) -> pa.Array:
    return pc.binary_join_element_wise(before, column, after, "")


def _bytes_of(texts: pa.Array) -> memoryview:
    """All of them, one behind the other."""
    offsets, data = _offsets(texts), texts.buffers()[2]
    return memoryview(b"" if data is None else data)[offsets[0] : offsets[-1]]


def _offsets(column: pa.Array) -> np.ndarray:
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, np.int32)[column.offset : column.offset + len(column) + 1]
