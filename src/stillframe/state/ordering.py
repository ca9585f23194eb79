"""The order of values of any type that Spark orders, as numbers.

Null is the lowest, NaN the highest number, and -0.0 equals 0.0. Strings are ordered by their bytes.
Structs are by their fields, one after the other, and arrays by their elements; of two arrays of
which one begins with the other, the shorter one is lower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from stillframe.key_groups import Positions, fixed_width_values, is_word_type
from stillframe.state.columns import Array

_UNSIGNED_MAX = 2**63 - 1


def is_ordered(type_: pa.DataType) -> bool:
    """Whether its values have an order."""
    if pt.is_struct(type_):
        return all(is_ordered(field.type) for field in type_)
    if pt.is_list(type_) or pt.is_large_list(type_):
        return is_ordered(type_.value_type)
    return is_word_type(type_) or _is_bytes(type_)


def _is_bytes(type_: pa.DataType) -> bool:
    is_text = pt.is_string(type_) or pt.is_large_string(type_)
    return bool(
        is_text or pt.is_binary(type_) or pt.is_large_binary(type_) or pt.is_decimal128(type_)
    )


def sort_keys(values: Array) -> Array:
    """Integers in the order of these numbers."""
    if values.dtype.kind != "f":
        return values
    wide = values.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
    wide[np.isnan(wide)] = np.nan
    bits = wide.view(np.int64)
    return bits ^ (bits >> 63 & np.int64(_UNSIGNED_MAX))


def ranks(column: pa.Array) -> Positions:
    """Numbers in the order of the values, equal where these are; 0 is null."""
    if pt.is_struct(column.type):
        made = _ranked([ranks(field) for field in column.flatten()], len(column))
    elif pt.is_list(column.type) or pt.is_large_list(column.type):
        made = _ranks_of_lists(column)
    elif is_word_type(column.type):
        made = _dense(sort_keys(fixed_width_values(column)))
    else:
        encoded = column.dictionary_encode()
        places = np.empty(len(encoded.dictionary), dtype=np.int64)
        places[np.asarray(pc.sort_indices(encoded.dictionary))] = np.arange(len(places))
        indices = encoded.indices.fill_null(0) if encoded.null_count else encoded.indices
        if not len(places):
            return np.zeros(len(column), dtype=np.int64)
        made = places.take(fixed_width_values(indices))
    return np.where(np.asarray(column.is_valid()), made + 1, 0)


def _dense(keys: Array) -> Positions:
    _, numbers = np.unique(keys, return_inverse=True)
    return numbers.astype(np.int64)


def _ranked(keys: Sequence[Positions], count: int) -> Positions:
    """Of rows, by the first of these keys, then by the second, and so on."""
    if not keys or not count:
        return np.zeros(count, dtype=np.int64)
    order = np.lexsort(tuple(keys[::-1]))
    is_new = np.zeros(count, dtype=np.bool_)
    for key in keys:
        sorted_key = key.take(order)
        is_new[1:] |= sorted_key[1:] != sorted_key[:-1]
    made = np.empty(count, dtype=np.int64)
    made[order] = np.cumsum(is_new)
    return made


def _ranks_of_lists(column: pa.Array) -> Positions:
    lengths = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    elements = np.append(ranks(column.flatten()) + 1, 0)  # 0: there is none
    keys = [
        np.where(place < lengths, elements.take(np.minimum(starts + place, len(elements) - 1)), 0)
        for place in range(int(lengths.max(initial=0)))
    ]
    return _ranked(keys, len(column))
