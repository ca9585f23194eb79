"""Strings are checked once, where they enter: everything behind may take them for UTF-8.

Arrow's compute functions do not look, and some of them never come back from text that is not. A
whole batch is checked, plain text at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pyarrow as pa

from stillframe.errors import DataError

_SHOWN_BYTES_MAX = 40
_FEW_ROWS = 500
"""So few that Arrow has looked at them sooner than we have asked numpy."""


def refuse_bad_text(batch: pa.RecordBatch, whose: str, what_to_do: str) -> None:
    """Raise DataError if a string in this batch is not UTF-8.

    `whose` begins the sentence, `what_to_do` ends it.
    """
    for place in _text_columns(batch.schema):
        column = batch.column(place)
        if _is_ascii(column):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            bad = next(_not_utf8(column), None) if "UTF8" in str(error) else None
            if bad is None:
                raise DataError(
                    f"{whose} is not valid Arrow data ({error}): {what_to_do}"
                ) from error
            raise DataError(
                f"{whose} has text in column {batch.schema.names[place]} that is not UTF-8,"
                f" {bad[:_SHOWN_BYTES_MAX]!r}: {what_to_do}"
            ) from None


def _is_ascii(column: pa.Array) -> bool:
    """Whether it is plain text, found out without a look at its values one by one."""
    if not pa.types.is_string(column.type) or len(column) < _FEW_ROWS:
        return False
    _, offsets, text = column.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)
    begin, end = places[column.offset], places[column.offset + len(column)]
    octets = np.frombuffer(text or b"", dtype=np.uint8)[begin:end]
    return bool(octets.max(initial=0) < 0x80)


@lru_cache(maxsize=256)
def _text_columns(schema: pa.Schema) -> tuple[int, ...]:
    return tuple(place for place, field in enumerate(schema) if _has_text(field.type))


def _has_text(type_: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(type_) or types.is_list(type_) or types.is_large_list(type_):
        return _has_text(type_.value_type)
    if types.is_map(type_):
        return _has_text(type_.key_type) or _has_text(type_.item_type)
    if types.is_struct(type_):
        return any(_has_text(field.type) for field in type_)
    return bool(types.is_string(type_) or types.is_large_string(type_))


def _not_utf8(array: pa.Array) -> Iterator[bytes]:
    """Every string in here that is not UTF-8; slow, for messages."""
    types, type_ = pa.types, array.type
    if types.is_dictionary(type_):
        yield from _not_utf8(array.dictionary)
    elif types.is_list(type_) or types.is_large_list(type_):
        yield from _not_utf8(array.flatten())
    elif types.is_map(type_):
        yield from _not_utf8(array.keys)
        yield from _not_utf8(array.items)
    elif types.is_struct(type_):
        for part in array.flatten():
            yield from _not_utf8(part)
    elif types.is_string(type_) or types.is_large_string(type_):
        for value in array.cast(pa.large_binary()):
            if value.is_valid and not _is_utf8(value.as_py()):
                yield value.as_py()


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
