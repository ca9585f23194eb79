"""Keys as bytes: the key group in two, then each column.

Theory of operation: columns of fixed width come first, each as a byte that says whether it is null
and the 64-bit word that is hashed (`key_groups`); then those of variable length, each with its
length before it. So equal keys have equal bytes (0.0 and -0.0, one NaN and another), the bytes say
themselves where they end, and whole columns are made of them and they of whole columns.

Keys that came lately are remembered with their bytes, as many as the memory for it holds: only new
ones are encoded. When it is full all are forgotten.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.key_groups import (
    BytesColumn,
    Positions,
    WordColumn,
    Words,
    key_column,
    key_groups_of,
)
from stillframe.state.key_index import FrozenBytes, KeyIndex, arrow_of_words, joined_bytes

GROUP_BYTES = 2
_WORD_BYTES = 9
"""Whether it is there, and the word."""
_LENGTH = struct.Struct("<I")
_NULL_LENGTH = 0xFFFFFFFF
_REMEMBERED_BYTES_MAX = 4 << 20
_SLOTS_LOG2 = 14
_NAME_BYTES_BESIDE = sys.getsizeof(b"") + 16
"""What a name occupies beside its own bytes: as an object, and in the list of names."""

Octets = npt.NDArray[np.uint8]


class KeyNames:
    """The names of keys with these columns."""

    def __init__(
        self,
        key_schema: pa.Schema,
        max_parallelism: int,
        remembered_bytes_max: int = _REMEMBERED_BYTES_MAX,
    ) -> None:
        self._remembered_bytes_max = remembered_bytes_max
        self._types = [field.type for field in key_schema]
        self._max_parallelism = max_parallelism
        empty = [key_column(pa.array([], type_)) for type_ in self._types]
        self._word_places = [n for n, c in enumerate(empty) if isinstance(c, WordColumn)]
        self._bytes_places = [n for n, c in enumerate(empty) if isinstance(c, BytesColumn)]
        self._fixed_bytes = GROUP_BYTES + _WORD_BYTES * len(self._word_places)
        self._forget()

    def of(self, columns: Sequence[pa.Array]) -> tuple[Positions, Sequence[bytes]]:
        """A number for each row, and by it the key's name."""
        if self.remembered_bytes > self._remembered_bytes_max:
            self._forget()
        before = len(self._index)
        numbers = self._index.rows_of(columns)
        added = np.arange(before, len(self._index))
        if len(added):
            stored = self._index.freeze().columns
            new = [column.take(added) for column in stored]
            names = self._encoded(new, self._index.hashes_from(before))
            self._names += names
            self._names_bytes += sum(map(len, names)) + len(names) * _NAME_BYTES_BESIDE
        return numbers, self._names

    @property
    def remembered_bytes(self) -> int:
        """Roughly what the remembered keys occupy."""
        return self._index.nbytes + self._names_bytes if self._names else 0

    def length(self, key: bytes, start: int) -> int:
        """How long the name is that begins here, without its key group."""
        end = start + self._fixed_bytes - GROUP_BYTES
        for _ in self._bytes_places:
            (length,) = _LENGTH.unpack_from(key, end)
            end += _LENGTH.size + (0 if length == _NULL_LENGTH else length)
        return end - start

    def columns(self, names: Sequence[bytes]) -> list[pa.Array]:
        """The key columns of these names."""
        columns, _ = self.columns_at(GROUP_BYTES, names)
        return columns

    def columns_at(self, start: int, keys: Sequence[bytes]) -> tuple[list[pa.Array], Positions]:
        """The key columns of names that begin, without their key group, at this byte of longer
        keys; and where they end in these."""
        data: Octets = np.frombuffer(b"".join(keys), np.uint8)
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        starts = np.cumsum(lengths) - lengths
        found: dict[int, pa.Array] = {}
        at = starts + start
        for place in self._word_places:
            words = _gathered(data, at + 1, 8).view("<u8").reshape(-1).astype(np.uint64)
            found[place] = arrow_of_words(words, data[at] != 0, self._types[place])
            at = at + _WORD_BYTES
        for place in self._bytes_places:
            found[place], at = _bytes_array(data, at, self._types[place])
        return [found[place] for place in range(len(self._types))], at - starts

    def _forget(self) -> None:
        self._index = KeyIndex(self._types, slots_log2=_SLOTS_LOG2)
        # A new list: the old one was answered.
        self._names: list[bytes] = []
        self._names_bytes = 0

    def _encoded(self, columns: Sequence[pa.Array], hashes: Words) -> list[bytes]:
        count = len(hashes)
        fixed: Octets = np.zeros((count, self._fixed_bytes), np.uint8)
        groups = key_groups_of(hashes, self._max_parallelism).astype(">u2")
        fixed[:, :GROUP_BYTES] = groups.view(np.uint8).reshape(count, GROUP_BYTES)
        for number, place in enumerate(self._word_places):
            column = key_column(columns[place])
            assert isinstance(column, WordColumn)
            at = GROUP_BYTES + number * _WORD_BYTES
            fixed[:, at] = 1 if column.valid is None else column.valid
            words = np.ascontiguousarray(column.words, "<u8").view(np.uint8)
            fixed[:, at + 1 : at + _WORD_BYTES] = words.reshape(count, 8)
        data, width = fixed.tobytes(), self._fixed_bytes
        names = [data[at : at + width] for at in range(0, count * width, width)]
        for place in self._bytes_places:
            tails = _tails(columns[place])
            names = [name + tail for name, tail in zip(names, tails, strict=True)]
        return names


def _tails(column: pa.Array) -> list[bytes]:
    """Each key with its length before it."""
    prepared = key_column(column)
    assert isinstance(prepared, BytesColumn)
    data = prepared.padded.tobytes()
    starts, lengths = prepared.starts.tolist(), prepared.lengths.tolist()
    valid = [True] * len(starts) if prepared.valid is None else prepared.valid.tolist()
    null = _LENGTH.pack(_NULL_LENGTH)
    return [
        _LENGTH.pack(length) + data[start : start + length] if is_valid else null
        for start, length, is_valid in zip(starts, lengths, valid, strict=True)
    ]


def _gathered(data: Octets, starts: Positions, width: int) -> Octets:
    """So many bytes at each start."""
    return np.ascontiguousarray(data[starts[:, None] + np.arange(width)])


def _bytes_array(data: Octets, at: Positions, type_: pa.DataType) -> tuple[pa.Array, Positions]:
    """A column of variable length, and where the next one begins."""
    said = _gathered(data, at, _LENGTH.size).view("<u4").reshape(-1).astype(np.int64)
    valid = said != _NULL_LENGTH
    lengths = np.where(valid, said, 0)
    starts = at + _LENGTH.size
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    stored = FrozenBytes(type_, joined_bytes(data, starts, lengths), ends, valid)
    return stored.take(np.arange(len(at))), starts + lengths
