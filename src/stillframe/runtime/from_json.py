"""`from_json(...)` on whole columns: the texts go through the one reader of JSON there is."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.json_texts.columns import Texts
from stillframe.json_texts.records import Malformed, RecordReader, columns_to_read, nullable
from stillframe.json_texts.rules import JsonRules

_SHOWN_CHARACTERS_MAX = 80


def from_json(
    type_: pa.DataType, text: pa.Array, rules: pa.Scalar, looked_at: pa.Scalar | None = None
) -> pa.Array:
    """A struct of each text, as Spark's from_json makes it: null of none, or of one that is blank.
    An array is malformed, where a file may have one.

    `looked_at` are the places of the fields that matter; the others may be null.
    """
    texts, is_void = _plain_objects(text), None
    if texts is None:
        bare = pc.utf8_trim_whitespace(text)
        is_void = pc.fill_null(pc.equal(pc.utf8_length(bare), 0), True)
        read = pc.if_else(pc.starts_with(bare, "["), "[", pc.if_else(is_void, "{}", text))
        texts = _joined(pc.fill_null(read, "{}"))
    places = None if looked_at is None else tuple(looked_at.as_py())
    try:
        records = _json_reader(type_, rules.as_py(), places).read(texts)
    except Malformed as error:
        begins = text[error.place].as_py()[:_SHOWN_CHARACTERS_MAX]
        raise pa.ArrowInvalid(
            f"from_json cannot read {begins!r} in FAILFAST mode ({error.why}): correct the schema,"
            " or set mode to PERMISSIVE"
        ) from None
    made = records.batch
    assert made.num_rows == len(text), "every text that is no array is one row"
    columns = [
        made.column(each.name) if each.name in made.schema.names else _nulls(each.type, len(text))
        for each in type_
    ]
    found = pa.StructArray.from_arrays(columns, fields=list(nullable(pa.schema(list(type_)))))
    return found if is_void is None else pc.if_else(is_void, pa.scalar(None, found.type), found)


def _plain_objects(text: pa.Array) -> Texts | None:
    """What nearly all columns are: each text begins an object, and none is missing."""
    if text.null_count or not len(text):
        return None
    texts = _joined(text)
    is_there = bool((texts.ends > texts.starts).all())
    return texts if is_there and texts.all_begin_with(b"{") else None


def _joined(text: pa.Array) -> Texts:
    """With a line's end behind each, none of which is null."""
    ended = pc.binary_join_element_wise(text.cast(pa.string()), "", "\n")
    _, offsets, data = ended.buffers()
    behind = np.frombuffer(offsets, np.int32, len(text) + 1).astype(np.int64)
    return Texts(memoryview(data) if len(text) else b"", behind[:-1], behind[1:] - 1)


def _nulls(type_: pa.DataType, count: int) -> pa.Array:
    """A piece of a column that is kept: making one for each batch costs more than its texts' ends
    do to be found."""
    return _kept_nulls(type_, 1 << count.bit_length()).slice(0, count)


@lru_cache(maxsize=16)
def _kept_nulls(type_: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, type_)


@lru_cache(maxsize=64)
def _json_reader(type_: pa.DataType, rules: str, places: tuple[int, ...] | None) -> RecordReader:
    given, schema = JsonRules(**json.loads(rules)), nullable(pa.schema(list(type_)))
    if places is not None:
        schema = columns_to_read(schema, given, {schema.field(place).name for place in places})
    return RecordReader(schema, given)
