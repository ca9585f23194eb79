"""`from_json(...)` on whole columns: the texts go through the one reader of JSON there is."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.json_texts.columns import Texts
from stillframe.json_texts.records import Malformed, RecordReader, nullable
from stillframe.json_texts.rules import JsonRules

_SHOWN_CHARACTERS_MAX = 80


def from_json(type_: pa.DataType, text: pa.Array, rules: pa.Scalar) -> pa.Array:
    """A struct of each text, as Spark's from_json makes it: null of none, or of one that is blank.
    An array is malformed, where a file may have one."""
    bare = pc.utf8_trim_whitespace(text)
    is_void = pc.fill_null(pc.equal(pc.utf8_length(bare), 0), True)
    read = pc.if_else(pc.starts_with(bare, "["), "[", pc.if_else(is_void, "{}", text))
    read = pc.fill_null(read, "{}").cast(pa.binary())
    lengths = np.asarray(pc.binary_length(read), np.int64)
    ends = np.cumsum(lengths + 1) - 1
    whole = pa.ListArray.from_arrays(pa.array([0, len(read)], pa.int32()), read)
    data = pc.binary_join(whole, b"\n")[0].as_py() if len(read) else b""
    try:
        records = _json_reader(type_, rules.as_py()).read(Texts(data, ends - lengths, ends))
    except Malformed as error:
        begins = text[error.place].as_py()[:_SHOWN_CHARACTERS_MAX]
        raise pa.ArrowInvalid(
            f"from_json cannot read {begins!r} in FAILFAST mode ({error.why}): correct the schema,"
            " or set mode to PERMISSIVE"
        ) from None
    found = pa.StructArray.from_arrays(records.batch.columns, fields=list(records.batch.schema))
    assert len(found) == len(text), "every text that is no array is one row"
    return pc.if_else(is_void, pa.scalar(None, found.type), found)


@lru_cache(maxsize=64)
def _json_reader(type_: pa.DataType, rules: str) -> RecordReader:
    return RecordReader(nullable(pa.schema(list(type_))), JsonRules(**json.loads(rules)))
