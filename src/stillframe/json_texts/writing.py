"""Rows as JSON texts, as Spark writes them, on whole columns.

Theory of operation: each column becomes a column of texts; those of a row are put end to end. The
texts of what is inside lists, structs and maps are made in the same way, once for all rows, and put
together by the offsets. Only strings that need escapes, bytes, and numbers that are written with
an exponent cost a loop over values.

Spark cuts times off after the milliseconds. Here they have three digits, too, or six where the
microseconds are not zero, so that they are read back as they were.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.zones import to_numpy, wall_clock, zone_of

_PLAIN_FROM, _PLAIN_BELOW = 1e-3, 1e7
"""Between these Java writes a number without an exponent."""
_YEAR_0_US, _YEAR_9999_US = -62_135_596_800_000_000, 253_370_764_800_000_000
"""Between these a year has four digits in every zone."""


def json_lines(batch: pa.RecordBatch, zone: str = "UTC") -> memoryview:
    """One JSON object per row, in a line of its own; nulls are left out."""
    members = list(zip(batch.schema.names, map(_whole, batch.columns), strict=True))
    lines = _objects(members, batch.num_rows, zone, "}\n")
    # The texts of a string column lie end to end in one buffer: that is the file's content.
    _, offsets, data = lines.buffers()
    end = np.frombuffer(offsets, dtype=np.int64)[len(lines)]
    return memoryview(data)[:end] if end else memoryview(b"")


def plain_texts(column: pa.Array, zone: str) -> pa.Array:
    """The text of each value of a column that is not nested, without quotes; null stays null."""
    types = pa.types
    if types.is_string(column.type) or types.is_large_string(column.type):
        return column.cast(pa.large_string())
    texts = _texts(column, zone)
    if types.is_temporal(column.type) or types.is_floating(column.type):
        return pc.utf8_trim(texts, characters='"')
    return texts


def partition_texts(column: pa.Array, zone: str) -> pa.Array:
    """The text of each value as Spark casts it to a string, for the name of a directory."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not pa.types.is_timestamp(column.type):
        return plain_texts(column, zone)
    texts = column.cast(pa.timestamp("us", column.type.tz))
    if column.type.tz is not None:
        texts = _shown_in(texts.cast(pa.timestamp("us", "UTC")), to_numpy(texts)[0], zone)[0]
    texts = texts.view(pa.timestamp("us")).cast(pa.large_string())
    return pc.replace_substring_regex(texts, r"\.?0+$", "")


def _whole(column: pa.Array) -> pa.Array:
    """The column with all that it holds beginning at its beginning."""
    if column.offset == 0 or not pa.types.is_nested(column.type):
        return column
    return column.take(pa.array(np.arange(len(column))))


def _objects(members: list[tuple[str, pa.Array]], rows: int, zone: str, end: str = "}") -> pa.Array:
    if not members:
        return pa.repeat(_large("{" + end), rows)
    parts = [
        pc.coalesce(_joined(f",{_quoted(name)}:", _texts(column, zone)), _large(""))
        for name, column in members
    ]
    # Each is `,"name":value`, or empty where the value is null; the first comma goes.
    return _joined("{", pc.utf8_slice_codeunits(_joined(*parts), 1), end)


def _texts(column: pa.Array, zone: str) -> pa.Array:
    """The JSON text of each value, as large strings; null stays null."""
    kind, types = column.type, pa.types
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return column.cast(pa.large_string())
    if types.is_floating(kind):
        return _float_texts(column)
    if types.is_timestamp(kind):
        return _in_quotes(_timestamp_texts(column, zone))
    if types.is_date(kind):
        texts = column.cast(pa.large_string())
        # Most columns have no year of five digits, and a regular expression is slow.
        is_long = pc.max(pc.binary_length(texts)).as_py() not in (None, 10)
        return _in_quotes(_with_sign_of_long_years(texts) if is_long else texts)
    if types.is_struct(kind):
        members = [(field.name, column.field(at)) for at, field in enumerate(kind)]
        return _where_valid(column, _objects(members, len(column), zone))
    if types.is_map(kind):
        return _map_texts(column, zone)
    if types.is_list(kind) or types.is_large_list(kind):
        return _joined("[", _put_together(column, _or_null(_texts(column.values, zone))), "]")
    if types.is_dictionary(kind):
        return _texts(column.dictionary_decode(), zone)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _one_by_one(column, lambda value: f'"{base64.b64encode(value).decode("ascii")}"')
    if types.is_null(kind):
        return pa.nulls(len(column), pa.large_string())
    return _string_texts(column)


# --- nested values


def _map_texts(column: pa.Array, zone: str) -> pa.Array:
    keys = _joined(_key_texts(column.keys, zone), ":")
    pairs = _joined(keys, _or_null(_texts(column.items, zone)))
    return _joined("{", _put_together(column, pairs), "}")


def _key_texts(keys: pa.Array, zone: str) -> pa.Array:
    """Keys are names, and so in quotes; times and dates are the numbers that Spark has for them."""
    if pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type):
        return _texts(keys, zone)
    if pa.types.is_timestamp(keys.type):
        keys = keys.cast(pa.int64())
    elif pa.types.is_date(keys.type):
        keys = keys.cast(pa.int32())
    return _in_quotes(_texts(keys, zone))


def _put_together(column: pa.Array, texts: pa.Array) -> pa.Array:
    """The texts of each row's values with commas between them."""
    mask = column.is_null() if column.null_count else None
    lists = pa.ListArray.from_arrays(column.offsets.cast(pa.int32()), texts, mask=mask)
    return pc.binary_join(lists, _large(","))


def _or_null(texts: pa.Array) -> pa.Array:
    return pc.coalesce(texts, _large("null"))


def _where_valid(column: pa.Array, texts: pa.Array) -> pa.Array:
    if not column.null_count:
        return texts
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.large_string()))


# --- single values


def _string_texts(column: pa.Array) -> pa.Array:
    escaped = pc.match_substring_regex(column, r'["\\\x00-\x1f]')
    if pc.any(escaped, min_count=0).as_py():
        return _one_by_one(column, _quoted)
    return _in_quotes(column)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _one_by_one(column: pa.Array, text_of: Callable[[Any], str]) -> pa.Array:
    texts = (None if value is None else text_of(value) for value in column.to_pylist())
    return pa.array(texts, pa.large_string())


def _float_texts(column: pa.Array) -> pa.Array:
    """As Java writes them: 1.0, 1.0E7, and "NaN" in quotes."""
    texts = column.cast(pa.large_string())
    has_fraction = pc.match_substring(texts, ".")
    if not pc.all(has_fraction, min_count=0).as_py():
        texts = pc.if_else(has_fraction, texts, _joined(texts, ".0"))
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    sizes = np.abs(values)
    with np.errstate(invalid="ignore"):
        is_plain = ((sizes >= _PLAIN_FROM) & (sizes < _PLAIN_BELOW)) | (sizes == 0)
    if is_plain.all():
        return texts
    others = pa.array([_with_exponent(value) for value in values[~is_plain]], pa.large_string())
    return pc.replace_with_mask(texts, pa.array(~is_plain), others)


def _with_exponent(value: np.floating[Any]) -> str:
    if np.isnan(value):
        return '"NaN"'
    if np.isinf(value):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    digits = np.format_float_scientific(value, unique=True, trim="-")
    mantissa, _, exponent = digits.partition("e")
    if "." not in mantissa:
        # Of two digits Java takes those that are nearest, which matters for the smallest numbers.
        mantissa, _, exponent = f"{float(value):.1e}".partition("e")
    return f"{mantissa}E{int(exponent)}"


def _timestamp_texts(column: pa.Array, zone: str) -> pa.Array:
    micros, nulls = to_numpy(column.cast(pa.timestamp("us", column.type.tz)))
    clock, offsets = column.cast(pa.timestamp("us", column.type.tz)), None
    if column.type.tz is not None:
        instants = clock.cast(pa.timestamp("us", "UTC"))
        clock, offsets = _shown_in(instants, micros, zone)
    clock = clock.view(pa.timestamp("us"))
    is_whole = micros % 1000 == 0
    texts = clock.cast(pa.timestamp("ms"), safe=False).cast(pa.large_string())
    if not is_whole.all():
        texts = pc.if_else(pa.array(is_whole | nulls), texts, clock.cast(pa.large_string()))
    if (micros >= _YEAR_0_US).all() and (micros < _YEAR_9999_US).all():
        texts = pc.utf8_replace_slice(texts, start=10, stop=11, replacement="T")
    else:
        texts = _with_sign_of_long_years(pc.replace_substring(texts, " ", "T", max_replacements=1))
    return texts if offsets is None else _joined(texts, offsets)


def _shown_in(
    instants: pa.Array, micros: npt.NDArray[np.int64], zone: str
) -> tuple[pa.Array, pa.Array | str]:
    """What the clocks of the zone show, and how far they are ahead."""
    there = zone_of(zone)
    if not isinstance(there, ZoneInfo):
        offset = there.utcoffset(None)
        assert offset is not None
        ahead_us = offset // timedelta(microseconds=1)
        clock = pc.add(instants.cast(pa.int64()), ahead_us).cast(pa.timestamp("us"))
        return clock, _offset_text(ahead_us // 1_000_000)
    clock = wall_clock(instants, there.key)
    ahead, places = np.unique((to_numpy(clock)[0] - micros) // 1_000_000, return_inverse=True)
    texts = pa.array([_offset_text(int(seconds)) for seconds in ahead], pa.large_string())
    return clock, texts.take(pa.array(places))


def _offset_text(seconds: int) -> str:
    if seconds == 0:
        return "Z"
    minutes, rest = divmod(abs(seconds), 60)
    text = f"{'-' if seconds < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}"
    return f"{text}:{rest:02d}" if rest else text


def _with_sign_of_long_years(texts: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(texts, r"^([0-9]{5,})", r"+\1")


def _in_quotes(texts: pa.Array) -> pa.Array:
    return _joined('"', texts.cast(pa.large_string()), '"')


def _joined(*parts: str | pa.Array) -> pa.Array:
    """The parts of each row end to end; null where one of them is. All are large strings."""
    large = [_large(part) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*large, _large(""))


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
