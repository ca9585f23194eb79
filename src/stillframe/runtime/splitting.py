"""`split(text, ' ')` on whole columns: as fast as the separators are found.

Arrow's own function looks for the separator letter by letter and appends part after part. Of one
byte, all separators of a column are found at once, and taken out at once: what is left are the
parts, end to end, as Arrow has them in memory anyway.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_Places = npt.NDArray[np.int64]


def split_by_text(type_: pa.DataType, text: pa.Array, by: pa.Scalar, limit: pa.Scalar) -> pa.Array:
    """A list of the parts of each text; at most `limit`, if that is above 0."""
    parts_max, separator = limit.as_py(), by.as_py().encode()
    is_plain = pa.types.is_string(text.type) and len(text) and not text.null_count
    if parts_max <= 0 and len(separator) == 1 and is_plain:
        return _split_by_byte(text, separator)
    return pc.split_pattern(text, by.as_py(), max_splits=parts_max - 1 if parts_max > 0 else None)


def _split_by_byte(text: pa.Array, separator: bytes) -> pa.Array:
    """Texts of which none is null, by a byte that is a letter: in UTF-8 it is no part of one."""
    count = len(text)
    _, offsets_buffer, data = text.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, count + 1, 4 * text.offset)
    letters = memoryview(data or b"")[offsets[0] : offsets[-1]]
    begins = (offsets - offsets[0]).astype(np.int64)
    found = np.flatnonzero(np.frombuffer(letters, np.uint8) == separator[0])
    found_before = np.searchsorted(found, begins)
    # Each text has one part more than separators, so its parts begin behind so many.
    first_parts = found_before + np.arange(count + 1)
    ends = _part_bounds(begins, found, found_before, first_parts)
    kept = bytes(letters).translate(None, separator)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(kept)]
    parts = pa.Array.from_buffers(pa.string(), len(ends) - 1, buffers)
    return pa.ListArray.from_arrays(pa.array(first_parts.astype(np.int32)), parts)


def _part_bounds(
    begins: _Places, found: _Places, found_before: _Places, first_parts: _Places
) -> npt.NDArray[np.int32]:
    """Where each part begins among the letters that are no separators, and where the last ends."""
    bounds = np.empty(len(found) + len(begins), np.int32)
    bounds[first_parts] = begins - found_before
    # By a mask, which is gone through once: to work out each place takes several times as long.
    is_behind_separator = np.ones(len(bounds), np.bool_)
    is_behind_separator[first_parts] = False
    bounds[is_behind_separator] = found.astype(np.int32) - np.arange(len(found), dtype=np.int32)
    return bounds
