"""Which key group a key belongs to, and which subtask owns a key group.

Theory of operation: every key has a 64-bit hash that is the same in every process, on every
machine and in every release, because snapshots are sorted by it: change it and no old checkpoint
can be restored. Key groups are the hash modulo the maximum parallelism; subtasks own ranges of
key groups, so rescaling means reading other ranges.

Rules of this file:
- the hash depends on the value and never on its encoding: dictionary-encoded, sliced, wide or
  narrow, with or without nulls beside it, a value hashes the same;
- the column path (`hash_columns`) and the row path (`hash_row`) agree on every value;
- one fixed-width column hashes without collisions (splitmix64 is a bijection); `state/` relies on
  it. The only exception is null, whose fixed hash is also that of one integer.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.errors import BuildError

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
GroupOrGroups = TypeVar("GroupOrGroups", int, npt.NDArray[Any])

NULL_HASH = 0x6E756C6C5F6B6579
NO_COLUMNS_HASH = 0
"""The one key of an aggregate over everything."""
_BYTES_SEED = 0x7374696C6C667261
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_COMBINE = 0xD6E8FEB86659FD93
_WORD_MAX = 0xFFFFFFFFFFFFFFFF
_NAN_BITS = 0x7FF8000000000000
_DECIMAL_BYTES = 16

LONG_KEY_BYTES = 1 << 20
"""A longer key is hashed by its digest: word by word a megabyte takes a tenth of a second."""
_DIGEST_BYTES = 32

_FEW_ROWS = 32
"""Below this many rows one numpy step per word costs more than plain Python."""
_SAMPLE_ROWS = 1024
_SAMPLE_DISTINCT_MAX = 920
"""So many different values in the sample are expected of some 5,000 in all."""
_TAIL_MASKS: Words = np.array(
    [(1 << (8 * length)) - 1 for length in range(8)] + [_WORD_MAX], dtype=np.uint64
)


# --- the hash of one 64-bit word, as a column and as a row


def _mixed(words: Words) -> Words:
    """splitmix64 of each word."""
    mixed = words + np.uint64(_GAMMA)
    shifted = mixed >> np.uint64(30)
    mixed ^= shifted
    mixed *= np.uint64(_MIX_1)
    np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed ^= shifted
    mixed *= np.uint64(_MIX_2)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


def _mixed_word(word: int) -> int:
    word = (word + _GAMMA) & _WORD_MAX
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD_MAX
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD_MAX
    return word ^ (word >> 31)


# --- key columns in a form that can be hashed and compared


class KeyColumn(Protocol):
    """A column of keys, ready to be hashed and compared with stored keys."""

    @property
    def valid(self) -> Flags | None:
        """Which rows are not null; None: all of them."""

    def hashes(self) -> Words: ...


@dataclass(frozen=True, slots=True)
class WordColumn:
    """Keys of a fixed-width type, each as one 64-bit word; 0 where null."""

    words: Words
    valid: Flags | None

    def hashes(self) -> Words:
        return _null_where_invalid(_mixed(self.words), self.valid)


@dataclass(frozen=True, slots=True)
class BytesColumn:
    """Keys of variable length: where each starts in the bytes; length 0 where null.

    The bytes go on for at least 8 after the last key, so that a whole word can be read anywhere.
    """

    padded: npt.NDArray[np.uint8]
    starts: Positions
    lengths: Positions
    valid: Flags | None

    def hashes(self) -> Words:
        hashes = _mixed(self.lengths.astype(np.uint64) + np.uint64(_BYTES_SEED))
        return _null_where_invalid(self._with_bytes_mixed_in(hashes), self.valid)

    def _with_bytes_mixed_in(self, hashes: Words) -> Words:
        begin = 0
        is_long = self.lengths > LONG_KEY_BYTES
        for row in np.flatnonzero(is_long).tolist():
            hashes[row] = _mixed_bytes(int(hashes[row]), self._bytes_of(row))
        active = np.flatnonzero((self.lengths > 0) & ~is_long)
        while len(active) > _FEW_ROWS:
            whole = len(active) == len(hashes)
            rows: Any = slice(None) if whole else active
            remaining = self.lengths[rows] - begin
            words = words_at(self.padded, self.starts[rows] + begin, remaining)
            hashes[rows] = _mixed(hashes[rows] ^ words)
            begin += 8
            active = active[remaining > 8]
        # A few long keys must not cost a numpy step per word of them.
        for row in active.tolist():
            hashes[row] = _mixed_bytes(int(hashes[row]), self._bytes_of(row, begin))
        return hashes

    def _bytes_of(self, row: int, begin: int = 0) -> bytes:
        start, end = int(self.starts[row]), int(self.starts[row] + self.lengths[row])
        return self.padded[start + begin : end].tobytes()


def words_at(padded: npt.NDArray[np.uint8], starts: Positions, remaining: Positions) -> Words:
    """The next 8 bytes at each start, little-endian, zero beyond what remains of the key."""
    overlapping: npt.NDArray[Any] = np.ndarray(
        (len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,)
    )
    words = overlapping[starts].astype(np.uint64, copy=False)
    if len(remaining) and remaining.min() < 8:
        words &= _TAIL_MASKS.take(remaining, mode="clip")
    return words


def _mixed_bytes(word: int, data: bytes) -> int:
    if len(data) > LONG_KEY_BYTES:
        data = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
    for begin in range(0, len(data), 8):
        word = _mixed_word(word ^ int.from_bytes(data[begin : begin + 8], "little"))
    return word


def _null_where_invalid(hashes: Words, valid: Flags | None) -> Words:
    if valid is not None:
        hashes[~valid] = np.uint64(NULL_HASH)
    return hashes


# --- from Arrow columns


def unsupported_key_type(type_: pa.DataType) -> str | None:
    """Why a column of this type cannot be a key, in one clause; None if it can."""
    if pt.is_dictionary(type_):
        return unsupported_key_type(type_.value_type)
    if is_word_type(type_) or _is_bytes_type(type_):
        return None
    return f"type {type_} cannot be a key"


def key_column(column: pa.Array) -> KeyColumn:
    """The column in the form that is hashed and compared; not for dictionary-encoded ones."""
    if reason := unsupported_key_type(column.type):
        raise BuildError(
            f"{reason}: use numbers, booleans, strings, binary, dates, timestamps or decimals"
        )
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    return _word_column(column) if is_word_type(column.type) else _bytes_column(column)


def is_word_type(type_: pa.DataType) -> bool:
    """Whether a value is a number, or kept as one."""
    return bool(
        pt.is_integer(type_)
        or pt.is_float32(type_)
        or pt.is_float64(type_)
        or pt.is_boolean(type_)
        or pt.is_date(type_)
        or pt.is_timestamp(type_)
        or pt.is_time(type_)
        or pt.is_duration(type_)
    )


def _is_bytes_type(type_: pa.DataType) -> bool:
    return is_text(type_) or is_binary(type_) or bool(pt.is_decimal128(type_))


def is_text(type_: pa.DataType) -> bool:
    return bool(pt.is_string(type_) or pt.is_large_string(type_) or pt.is_string_view(type_))


def is_binary(type_: pa.DataType) -> bool:
    return bool(
        pt.is_binary(type_)
        or pt.is_large_binary(type_)
        or pt.is_binary_view(type_)
        or pt.is_fixed_size_binary(type_)
    ) and not pt.is_decimal(type_)


def validity(column: pa.Array) -> Flags | None:
    """Which rows are not null; None: all of them."""
    if column.null_count == 0:
        return None
    flags: Flags = column.is_valid().to_numpy(zero_copy_only=False)
    return flags


def fixed_width_values(column: pa.Array) -> npt.NDArray[Any]:
    """The values as numpy sees them, without a copy where there can be; anything where null.

    Dates, times and timestamps are the integers they are stored as.
    """
    if pt.is_boolean(column.type):
        filled = column.fill_null(False) if column.null_count else column
        booleans: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
        return booleans
    dtype = np.dtype(stored_dtype(column.type))
    if len(column) == 0:
        return np.empty(0, dtype=dtype)
    return np.frombuffer(
        column.buffers()[1], dtype=dtype, count=len(column), offset=column.offset * dtype.itemsize
    )


def stored_dtype(type_: pa.DataType) -> npt.DTypeLike:
    """The numpy type of the values a fixed-width Arrow column stores."""
    if pt.is_boolean(type_):
        return np.bool_
    if pt.is_integer(type_) or pt.is_floating(type_):
        return type_.to_pandas_dtype()  # type: ignore[no-any-return]
    return np.int32 if type_.bit_width == 32 else np.int64


def _word_column(column: pa.Array) -> WordColumn:
    values = fixed_width_values(column)
    valid = validity(column)
    words = _float_words(values) if values.dtype.kind == "f" else _integer_words(values)
    if valid is not None:
        words = np.where(valid, words, np.uint64(0))
    return WordColumn(words, valid)


def _integer_words(values: npt.NDArray[Any]) -> Words:
    if values.dtype.itemsize == 8:
        return values.view(np.uint64)
    return values.astype(np.int64).view(np.uint64)


def _float_words(values: npt.NDArray[Any]) -> Words:
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        canonical = values.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
    canonical[np.isnan(canonical)] = np.nan  # numpy's own NaN has the bits of _NAN_BITS
    return canonical.view(np.uint64)


def _bytes_column(column: pa.Array) -> BytesColumn:
    if pt.is_decimal128(column.type) or pt.is_fixed_size_binary(column.type):
        return _fixed_bytes_column(column)
    if pt.is_string_view(column.type) or pt.is_binary_view(column.type):
        column = column.cast(pa.large_binary() if is_binary(column.type) else pa.large_string())
    wide = pt.is_large_string(column.type) or pt.is_large_binary(column.type)
    if len(column) == 0:
        return BytesColumn(
            np.zeros(8, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64), None
        )
    _, offset_buffer, data = column.buffers()
    dtype = np.dtype(np.int64 if wide else np.int32)
    offsets = np.frombuffer(
        offset_buffer, dtype, count=len(column) + 1, offset=column.offset * dtype.itemsize
    ).astype(np.int64)
    first = int(offsets[0])
    offsets -= first
    padded = _padded(data, first, int(offsets[-1]))
    return _bytes_column_of(padded, offsets[:-1], np.diff(offsets), validity(column))


def _fixed_bytes_column(column: pa.Array) -> BytesColumn:
    width = column.type.byte_width
    data = column.buffers()[1] if len(column) else None
    padded = _padded(data, column.offset * width, len(column) * width)
    starts = np.arange(len(column), dtype=np.int64) * width
    lengths = np.full(len(column), width, dtype=np.int64)
    return _bytes_column_of(padded, starts, lengths, validity(column))


def _bytes_column_of(
    padded: npt.NDArray[np.uint8], starts: Positions, lengths: Positions, valid: Flags | None
) -> BytesColumn:
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    return BytesColumn(padded, starts, lengths, valid)


def _padded(data: pa.Buffer | None, start: int, length: int) -> npt.NDArray[np.uint8]:
    padded = np.empty(length + 8, dtype=np.uint8)
    padded[length:] = 0
    if data is not None and length:
        padded[:length] = np.frombuffer(data, np.uint8, count=length, offset=start)
    return padded


# --- hashes of columns and of rows


def hash_columns(columns: Sequence[pa.Array]) -> Words:
    """The stable hash of each row's key, made of these columns in this order; at least one."""
    return combine_hashes([_column_hashes(column) for column in columns])


def hash_key_columns(columns: Sequence[KeyColumn]) -> Words:
    """As `hash_columns`, of columns that are prepared already."""
    return combine_hashes([column.hashes() for column in columns])


def hash_batch(batch: pa.RecordBatch, keys: Sequence[str]) -> Words:
    """The stable hash of each record's key; without keys all records have one and the same."""
    if not keys:
        return np.full(batch.num_rows, NO_COLUMNS_HASH, dtype=np.uint64)
    return hash_columns([batch.column(batch.schema.get_field_index(key)) for key in keys])


def combine_hashes(hashes: Sequence[Words]) -> Words:
    combined = hashes[0]
    for following in hashes[1:]:
        combined = _mixed(combined * np.uint64(_COMBINE) + following)
    return combined


def keys_repeat(column: pa.Array) -> bool:
    """Whether values come so often in this column that it pays to look at each only once.

    Measured on 64k strings of 1,000 kinds: encoding them first is 1.5 times as fast as hashing
    each if they have 8 bytes, and 3 times if they have 16 or more. Numbers are quicker as they are.
    """
    if pt.is_dictionary(column.type):
        return len(column.dictionary) <= len(column)
    encodable = is_text(column.type) or is_binary(column.type)
    viewed = pt.is_string_view(column.type) or pt.is_binary_view(column.type)
    if not encodable or viewed or len(column) < 2 * _SAMPLE_ROWS:
        return False
    return len(column.slice(0, _SAMPLE_ROWS).unique()) <= _SAMPLE_DISTINCT_MAX


def _column_hashes(column: pa.Array) -> Words:
    if not keys_repeat(column):
        return key_column(column).hashes()
    if not pt.is_dictionary(column.type):
        column = column.dictionary_encode()
    of_dictionary = np.append(key_column(column.dictionary).hashes(), np.uint64(NULL_HASH))
    indices = column.indices.fill_null(len(column.dictionary)) if column.null_count else None
    return of_dictionary.take(fixed_width_values(column.indices if indices is None else indices))


def hash_row(values: Sequence[Any], types: Sequence[pa.DataType]) -> int:
    """The hash of one key given as Python values of the declared types; see `hash_columns`.

    Timestamps and durations may be given as integers in the type's unit or as Python's own.
    """
    if not values:
        return NO_COLUMNS_HASH
    hashes = [_value_hash(value, type_) for value, type_ in zip(values, types, strict=True)]
    combined = hashes[0]
    for following in hashes[1:]:
        combined = _mixed_word((combined * _COMBINE + following) & _WORD_MAX)
    return combined


def _value_hash(value: Any, type_: pa.DataType) -> int:
    if pt.is_dictionary(type_):
        return _value_hash(value, type_.value_type)
    if reason := unsupported_key_type(type_):
        raise BuildError(f"{reason}: convert it to a number or a string first")
    if value is None:
        return NULL_HASH
    if is_word_type(type_):
        return _mixed_word(_value_word(value, type_) & _WORD_MAX)
    data = _value_bytes(value, type_)
    return _mixed_bytes(_mixed_word((len(data) + _BYTES_SEED) & _WORD_MAX), data)


def _value_word(value: Any, type_: pa.DataType) -> int:
    if pt.is_floating(type_):
        return _float_word(float(value), type_)
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        integer = pa.int32() if type_.bit_width == 32 else pa.int64()
        return int(pa.scalar(value, type_).cast(integer).as_py())
    return int(value)


def _float_word(value: float, type_: pa.DataType) -> int:
    if math.isnan(value):
        return _NAN_BITS
    if pt.is_float32(type_):
        value = float(np.float32(value))
    return int.from_bytes(struct.pack("<d", value + 0.0), "little")


def _value_bytes(value: Any, type_: pa.DataType) -> bytes:
    if pt.is_decimal128(type_):
        with decimal.localcontext(prec=76):
            unscaled = int(decimal.Decimal(value).scaleb(type_.scale))
        return unscaled.to_bytes(_DECIMAL_BYTES, "little", signed=True)
    return value.encode() if isinstance(value, str) else bytes(value)


# --- key groups and the subtasks that own them


def key_groups_of(hashes: Words, max_parallelism: int) -> npt.NDArray[np.int32]:
    if max_parallelism & (max_parallelism - 1) == 0:
        # The same for powers of two, and a division takes ten times as long.
        return (hashes & np.uint64(max_parallelism - 1)).astype(np.int32)
    return (hashes % np.uint64(max_parallelism)).astype(np.int32)


def subtask_of_key_group(
    group: GroupOrGroups, parallelism: int, max_parallelism: int
) -> GroupOrGroups:
    """The subtask that owns a key group, or of each of several."""
    return group * parallelism // max_parallelism


def key_group_range(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """The key groups a subtask owns; empty if there are more subtasks than key groups."""
    return range(
        -(-subtask * max_parallelism // parallelism),
        -(-(subtask + 1) * max_parallelism // parallelism),
    )
