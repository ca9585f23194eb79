"""Rows as lines of CSV and of text, as Spark writes them, on whole columns.

Times have three digits behind the seconds as in Spark, or six where the microseconds are not zero,
so that they are read back as they were.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.connectors.csv_tokens import SPARKS_SIGNS, Signs
from stillframe.json_texts.writing import plain_texts

_BLANKS = "".join(map(chr, range(33)))


@dataclass(frozen=True, slots=True)
class CsvWriting:
    """Spark's options for writing CSV."""

    signs: Signs = SPARKS_SIGNS
    has_header: bool = False
    null_value: str = ""
    empty_value: str = '""'
    quotes_all: bool = False
    trims: bool = True


def csv_header(names: list[str], how: CsvWriting) -> bytes:
    column = pa.array(names, pa.large_string())
    texts = _quoted(_trimmed(column, how), how).to_pylist()
    return (how.signs.separator.join(texts) + "\n").encode()


def csv_lines(batch: pa.RecordBatch, zone: str, how: CsvWriting) -> memoryview:
    """One line for each row."""
    columns = [_field_texts(column, zone, how) for column in batch.columns]
    separator = pa.scalar(how.signs.separator, pa.large_string())
    lines = pc.binary_join_element_wise(*columns, separator)
    return _ended(lines)


def text_lines(batch: pa.RecordBatch) -> memoryview:
    """The one column, a line for each row; null is an empty line."""
    return _ended(pc.fill_null(batch.column(0).cast(pa.large_string()), ""))


def _ended(lines: pa.Array) -> memoryview:
    end, none = (pa.scalar(text, pa.large_string()) for text in ("\n", ""))
    ended = pc.binary_join_element_wise(lines, end, none)
    _, offsets, data = ended.buffers()
    length = np.frombuffer(offsets, dtype=np.int64)[len(ended)]
    return memoryview(data)[:length] if length else memoryview(b"")


def _field_texts(column: pa.Array, zone: str, how: CsvWriting) -> pa.Array:
    texts = plain_texts(column, zone)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = _quoted(_trimmed(texts, how), how)
    elif how.quotes_all or how.signs.separator in "0123456789.-+:TEeZtrufalsNIiny":
        texts = _quoted(texts, how)
    null = how.null_value
    if how.quotes_all:
        null = f"{how.signs.quote}{null}{how.signs.quote}"
    return pc.fill_null(texts, null)


def _trimmed(texts: pa.Array, how: CsvWriting) -> pa.Array:
    return pc.utf8_trim(texts, characters=_BLANKS) if how.trims else texts


def _quoted(texts: pa.Array, how: CsvWriting) -> pa.Array:
    """With quotes around those that need them."""
    signs = how.signs
    is_empty = pc.equal(texts, "")
    if signs.quote != "\0":
        special = f"[{re.escape(signs.separator)}{re.escape(signs.quote)}\n\r]"
        needs = pc.match_substring_regex(texts, special)
        if how.quotes_all:
            needs = pc.true_unless_null(needs)
        if pc.any(needs, min_count=0).as_py():
            escaped = texts
            if signs.escape not in ("\0", signs.quote):
                escaped = _escape_escapes(escaped, signs)
            if signs.escape != "\0":
                escaped = pc.replace_substring(escaped, signs.quote, signs.escape + signs.quote)
            quote, none = (pa.scalar(text, pa.large_string()) for text in (signs.quote, ""))
            texts = pc.if_else(
                needs, pc.binary_join_element_wise(quote, escaped, quote, none), texts
            )
    return pc.if_else(is_empty, pa.scalar(how.empty_value, pa.large_string()), texts)


def _escape_escapes(texts: pa.Array, signs: Signs) -> pa.Array:
    return pc.replace_substring(texts, signs.escape, signs.escape * 2)
