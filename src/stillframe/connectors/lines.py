"""Files of lines as sources: what JSON, CSV and plain text have in common.

A position is a file and a byte: what comes next is a new line. Beside it is the checksum of all
before, so that a file with another past is refused.
"""

from __future__ import annotations

import bz2
import gzip
import sys
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import pyarrow as pa

from stillframe.api.sources import Split
from stillframe.connectors.files import (
    FileReader,
    FileSource,
    changed_past,
    position_of,
    refuse_other_size,
    unreadable,
)
from stillframe.errors import BuildError, DataError, NotHonoured, StorageError
from stillframe.json_texts.columns import Texts, is_utf8
from stillframe.json_texts.records import Malformed
from stillframe.json_texts.rules import Mode
from stillframe.json_values import JsonObject
from stillframe.storage.places import OpenFile

_BLOCK_BYTES = 1 << 20
_BLOCK_LINES, _BLOCK_GROWTH = 1 << 16, 8
"""Long lines come in blocks of up to so many times these bytes, until about so many are in a block:
whoever takes a batch apart by keys has something to do for each key of each batch."""
_LINE_BYTES_MAX = 64 << 20
_FILE_BYTES_MAX = 1 << 30
_READ_PACKED: Mapping[str, Callable[[Any], gzip.GzipFile | bz2.BZ2File]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": lambda file: bz2.BZ2File(file),
}
_COMPRESSED = (*_READ_PACKED, ".zst", ".lz4", ".snappy", ".deflate", ".xz")
_MODES: tuple[Mode, ...] = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")


class _Bytes(Protocol):
    def read(self, size: int = -1, /) -> bytes | None: ...


class LineFileSource(FileSource):
    """Files that are read from their first byte to their last."""

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "offset": 0})


class LineReader(FileReader):
    """Reads whole lines, a megabyte at a time; or each file as one text."""

    def __init__(
        self, source: LineFileSource, splits: Sequence[Split], *, is_whole: bool = False
    ) -> None:
        super().__init__(source, splits)
        self._is_whole = is_whole
        self._records_malformed = 0
        self._is_beginning = True
        """Whether no record of the file has been read."""

    def records_malformed(self) -> int:
        return self._records_malformed

    def has_ended(self, split: Split) -> bool:
        if _is_packed(str(split.position["path"])):
            return split.position.get("ended") is True
        return position_of(split, "offset") >= position_of(split, "size")

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        path, offset = str(split.position["path"]), position_of(split, "offset")
        if _is_packed(path):
            yield from self._read_packed(split, path, offset)
            return
        cut = _whole if self._is_whole else _blocks
        try:
            with self._place(path).open(path) as file:
                size_bytes = file.size_now()
                checksum = _checksum_of_past(file, split, size_bytes)
                self._is_beginning = offset == 0
                for block in cut(file, path, size_bytes - offset):
                    batch = self._parsed(path, offset, block)
                    offset += len(block)
                    checksum = zlib.crc32(block, checksum)
                    if offset == size_bytes:  # what is added later would never be read
                        _refuse_change(file, path, size_bytes)
                    if batch is not None:
                        self._is_beginning = False
                        yield _at(split, size_bytes, offset, checksum), batch
                if offset < size_bytes:
                    _refuse_change(file, path, size_bytes)
        except (OSError, StorageError) as error:
            raise unreadable(path, error) from error

    def _read_packed(
        self, split: Split, path: str, offset: int
    ) -> Iterator[tuple[Split, pa.RecordBatch]]:
        """Of a compressed file. Its bytes are counted as they were before; where it ends is known
        when nothing more has come."""
        cut = _whole if self._is_whole else _blocks
        ready: tuple[Split, pa.RecordBatch] | None = None
        try:
            with self._place(path).open(path) as packed, _unpacked(packed, path) as file:
                size_bytes = packed.size_now()
                checksum = _checksum_of_past(file, split, size_bytes)
                self._is_beginning = offset == 0
                for block in cut(file, path, _FILE_BYTES_MAX if self._is_whole else sys.maxsize):
                    if ready is not None:
                        yield ready
                        ready = None
                    batch = self._parsed(path, offset, block)
                    offset += len(block)
                    checksum = zlib.crc32(block, checksum)
                    if batch is not None:
                        self._is_beginning = False
                        ready = _at(split, size_bytes, offset, checksum), batch
                if file.read(1):
                    raise _too_long(path, f"more than {_FILE_BYTES_MAX}")
                _refuse_change(packed, path, size_bytes)
        except (EOFError, zlib.error) as error:
            raise unreadable(path, OSError(str(error))) from error
        except (OSError, StorageError) as error:
            raise unreadable(path, error) from error
        if ready is not None:
            after, batch = ready
            yield Split(after.id, {**after.position, "ended": True}), batch

    @abstractmethod
    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch | None:
        """The records of these lines, which begin at this byte of the file.

        None: the position is not moved yet, because what follows depends on this block.
        """

    def _refused(self, path: str, offset: int, texts: Texts, error: Malformed) -> DataError:
        """In mode FAILFAST, with the line's number."""
        begins_at = int(texts.starts[error.place])
        number = self._lines_before(path, offset + begins_at) + 1
        where = f"line {number} of {path}" if not self._is_whole else path
        begins = texts[error.place][:80].decode("utf-8", "replace").rstrip()
        return DataError(
            f"{where} does not fit the schema ({error.why}): correct the record or the schema,"
            f" or set mode to PERMISSIVE; {'the line' if not self._is_whole else 'it'}"
            f" begins {begins!r}"
        )

    def _lines_before(self, path: str, offset: int) -> int:
        count = 0
        with ExitStack() as opened:
            packed = opened.enter_context(self._place(path).open(path))
            file: _Bytes = packed
            if _is_packed(path):
                file = opened.enter_context(_unpacked(packed, path))
            while offset > 0 and (piece := file.read(min(offset, _BLOCK_BYTES))):
                count += piece.count(b"\n")
                offset -= len(piece)
        return count


def _is_packed(path: str) -> bool:
    return path.lower().endswith(_COMPRESSED)


def _unpacked(file: OpenFile, path: str) -> gzip.GzipFile | bz2.BZ2File:
    """What was compressed. Read as it is, each of its lines would be a malformed record."""
    for end, reading in _READ_PACKED.items():
        if path.lower().endswith(end):
            return reading(file)
    known = " and ".join(f"*{end}" for end in _READ_PACKED)
    raise DataError(
        f"{path} is compressed, and only {known} are read here: compress it so, or read it with"
        " Spark and still.stream"
    )


def _at(split: Split, size_bytes: int, offset: int, checksum: int) -> Split:
    kept: JsonObject = {"size": size_bytes, "offset": offset, "crc32": f"{checksum:08x}"}
    return Split(split.id, {**split.position, **kept})


def _checksum_of_past(file: _Bytes, split: Split, size_bytes: int) -> int:
    """Of all before the position, to which this reads; raises if it is not what was read before."""
    left, kept = position_of(split, "offset"), split.position.get("crc32")
    if left and kept is None:
        refuse_other_size(split, size_bytes)
    checksum = 0
    while left and (piece := file.read(min(left, _BLOCK_BYTES))):
        checksum = zlib.crc32(piece, checksum)
        left -= len(piece)
    if left or kept not in (None, f"{checksum:08x}"):
        read = position_of(split, "offset")
        raise changed_past(split, f"its first {read} bytes are others, or gone")
    return checksum


def _refuse_change(file: OpenFile, path: str, size_bytes: int) -> None:
    now_bytes = file.size_now()
    if now_bytes != size_bytes:
        raise DataError(
            f"source file {path} has changed while it was read, from {size_bytes} to {now_bytes}"
            " bytes: write a file elsewhere and rename it when it is whole, then start the job"
            " again"
        )


def _blocks(file: _Bytes, path: str, left_bytes: int) -> Iterator[bytes]:
    """The rest of a file in pieces of whole lines; the last line may lack its newline."""
    rest, block_bytes = b"", 0
    while piece := file.read(min(left_bytes, block_bytes or _BLOCK_BYTES)):
        left_bytes -= len(piece)
        cut = piece.rfind(b"\n") + 1
        if cut:
            block = b"".join((rest, memoryview(piece)[:cut]))
            block_bytes = block_bytes or _bytes_at_once(block)
            yield block
            rest = piece[cut:]
        else:
            rest += piece
        if len(rest) > _LINE_BYTES_MAX:
            raise DataError(
                f"{path} has a line of more than {_LINE_BYTES_MAX} bytes: it is probably not a"
                " file of lines, one record per line"
            )
    if rest:
        yield rest


def _bytes_at_once(lines: bytes) -> int:
    """Of a file whose first lines these are."""
    wanted = _BLOCK_LINES * len(lines) // lines.count(b"\n")
    return min(max(wanted, _BLOCK_BYTES), _BLOCK_GROWTH * _BLOCK_BYTES)


def _whole(file: _Bytes, path: str, left_bytes: int) -> Iterator[bytes]:
    """The file as one text."""
    if left_bytes > _FILE_BYTES_MAX:
        raise _too_long(path, str(left_bytes))
    pieces: list[bytes] = []
    while piece := file.read(left_bytes):
        pieces.append(piece)
        left_bytes -= len(piece)
    yield b"".join(pieces)


def _too_long(path: str, bytes_in_words: str) -> DataError:
    return DataError(
        f"{path} has {bytes_in_words} bytes and is to be read as a whole: write one record per"
        f" line, or files of less than {_FILE_BYTES_MAX} bytes"
    )


_MARK = b"\xef\xbb\xbf"


def decoded(block: bytes, *, is_first: bool) -> bytes:
    """The lines as UTF-8, with a sign in place of what is none, and without the mark of a file's
    beginning."""
    if is_first and block.startswith(_MARK):
        block = block[len(_MARK) :]
    return block if is_utf8(block) else block.decode("utf-8", "replace").encode()


# --- options ---------------------------------------------------------------------------------


def given_of(options: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """The options that are among those known, spelled as these are."""
    spelled = {name.lower(): name for name in known}
    return {spelled[name.lower()]: options[name] for name in options if name.lower() in spelled}


def utf8_of(given: Mapping[str, str]) -> None:
    """Raise BuildError where the options ask for other texts than lines of UTF-8."""
    encoding = given.get("encoding", given.get("charset", "UTF-8"))
    if encoding.upper().replace("_", "-") not in ("UTF-8", "UTF8"):
        raise NotHonoured(f"option encoding is {encoding!r}, but only UTF-8 is read: convert it")
    if given.get("lineSep", "\n") != "\n":
        raise NotHonoured(
            f"option lineSep is {given['lineSep']!r}, but lines end with a line feed, a carriage"
            " return or both: leave it out"
        )


def mode_of(text: str) -> Mode:
    for mode in _MODES:
        if text.strip().upper() == mode:
            return mode
    raise BuildError(f"option mode is one of {', '.join(_MODES)}, not {text!r}")
