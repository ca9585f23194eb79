"""Spark's `xxhash64` of whole columns: XXH64 of what a value is as bytes, the lowest first."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.key_groups import Positions, Words, fixed_width_values, is_word_type
from stillframe.state.columns import Array

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_STRIPE = 32
_WORD = 8
_HALF = 4
_LONG_DIGITS = 18
"""A decimal with so many is a number of 64 bits."""


def is_hashed(type_: pa.DataType) -> bool:
    return is_word_type(type_) or bool(
        pt.is_string(type_) or pt.is_binary(type_) or pt.is_decimal128(type_)
    )


def xxhash64(column: pa.Array, seed: int) -> Words:
    """The hash of each value; none is null."""
    with np.errstate(over="ignore"):  # numbers of 64 bits, on purpose
        if is_word_type(column.type):
            return _of_numbers(fixed_width_values(column), seed)
        if pt.is_decimal128(column.type):
            return _of_decimals(column, seed)
        _, offsets_buffer, data = column.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, 4 * column.offset)
        first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        some = np.frombuffer(data, np.uint8, size, first) if size else np.empty(0, np.uint8)
        starts = (offsets[:-1] - offsets[0]).astype(np.int64)
        return _of_bytes(some, starts, np.diff(offsets).astype(np.int64), seed)


def _of_numbers(values: Array, seed: int) -> Words:
    if values.dtype.kind == "f":
        values = values + values.dtype.type(0)  # -0.0 + 0.0 is 0.0
        values[np.isnan(values)] = np.nan
        values = values.view(np.int32 if values.dtype.itemsize == _HALF else np.int64)
    start = np.full(len(values), np.uint64(seed) + _P5)
    if values.dtype.itemsize == _WORD:
        return _ended(_with_word(start + np.uint64(_WORD), values.view(np.uint64)))
    words = values.astype(np.int32).view(np.uint32).astype(np.uint64)
    return _ended(_with_half(start + np.uint64(_HALF), words))


def _of_decimals(column: pa.Array, seed: int) -> Words:
    """Those of many digits are hashed as Java says them: as few bytes as can be, highest first."""
    whole = np.frombuffer(column.buffers()[1], np.uint8, 16 * len(column), 16 * column.offset)
    if column.type.precision <= _LONG_DIGITS:
        return _of_numbers(np.ascontiguousarray(whole.view(np.int64)[::2]), seed)
    highest_first = np.ascontiguousarray(whole.reshape(-1, 16)[:, ::-1])
    sign = np.where(highest_first[:, :1] >= 0x80, 0xFF, 0)
    says_nothing = (highest_first[:, :-1] == sign) & (highest_first[:, 1:] >> 7 == sign >> 7)
    left_out = np.cumprod(says_nothing, axis=1).sum(axis=1)
    starts = np.arange(len(column)) * 16 + left_out
    return _of_bytes(highest_first.reshape(-1), starts, 16 - left_out, seed)


def _of_bytes(data: Array, starts: Positions, lengths: Positions, seed: int) -> Words:
    padded = np.zeros(len(data) + _WORD, dtype=np.uint8)
    padded[: len(data)] = data
    word_at = np.ndarray((len(data) + 1,), "<u8", padded, 0, (1,))
    hashes = np.full(len(starts), np.uint64(seed) + _P5)
    long = np.flatnonzero(lengths >= _STRIPE)
    if len(long):
        hashes[long] = _of_stripes(word_at, starts[long], lengths[long] // _STRIPE, seed)
    hashes += lengths.astype(np.uint64)
    ends = starts + lengths
    at = starts + lengths // _STRIPE * _STRIPE
    for _ in range(_STRIPE // _WORD - 1):
        more = np.flatnonzero(ends - at >= _WORD)
        hashes[more] = _with_word(hashes[more], word_at[at[more]])
        at[more] += _WORD
    more = np.flatnonzero(ends - at >= _HALF)
    hashes[more] = _with_half(hashes[more], word_at[at[more]] & np.uint64(0xFFFFFFFF))
    at[more] += _HALF
    for _ in range(_HALF - 1):
        more = np.flatnonzero(ends > at)
        single = padded[at[more]].astype(np.uint64)
        hashes[more] = _turned(hashes[more] ^ single * _P5, 11) * _P1
        at[more] += 1
    return _ended(hashes)


def _of_stripes(word_at: Words, starts: Positions, counts: Positions, seed: int) -> Words:
    first = np.uint64(seed)
    begun = (first + _P1 + _P2, first + _P2, first, first - _P1)
    lanes = [np.full(len(starts), each) for each in begun]
    for stripe in range(int(counts.max())):
        more = np.flatnonzero(counts > stripe)
        for number, lane in enumerate(lanes):
            words = word_at[starts[more] + stripe * _STRIPE + number * _WORD]
            lane[more] = _turned(lane[more] + words * _P2, 31) * _P1
    hashes = sum(
        (_turned(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)),
        np.zeros(len(starts), np.uint64),
    )
    for lane in lanes:
        hashes = (hashes ^ _turned(lane * _P2, 31) * _P1) * _P1 + _P4
    return hashes


def _with_word(hashes: Words, words: Words) -> Words:
    return _turned(hashes ^ _turned(words * _P2, 31) * _P1, 27) * _P1 + _P4


def _with_half(hashes: Words, words: Words) -> Words:
    return _turned(hashes ^ words * _P1, 23) * _P2 + _P3


def _turned(words: Words, bits: int) -> Words:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)


def _ended(hashes: Words) -> Words:
    hashes = (hashes ^ hashes >> np.uint64(33)) * _P2
    hashes = (hashes ^ hashes >> np.uint64(29)) * _P3
    return hashes ^ hashes >> np.uint64(32)
