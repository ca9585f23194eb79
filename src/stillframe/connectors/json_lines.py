"""Files of JSON as a source; what is in a text `json_texts` knows."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

import pyarrow as pa

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.config import parse_flag
from stillframe.connectors.files import (
    FileReader,
    FileSource,
    Following,
    changed_past,
    path_of,
    position_of,
    refuse_other_size,
)
from stillframe.errors import BuildError, DataError
from stillframe.json_texts.columns import Texts
from stillframe.json_texts.records import Malformed, RecordReader, nullable, refuse_unreadable
from stillframe.json_texts.rules import JsonRules, Mode
from stillframe.json_values import JsonObject

_BLOCK_BYTES = 1 << 20
_LINE_BYTES_MAX = 64 << 20
_FILE_BYTES_MAX = 1 << 30
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4", ".snappy", ".deflate", ".xz")
_SPARKS_RULES = JsonRules()


@dataclass(frozen=True, init=False)
class JsonLinesSource(FileSource):
    """Files of JSON as Spark reads them: one record in each line, or in each file.

    A member that was not declared is passed over, one that is missing is null. No column is
    declared as never null: what is in a file nobody can declare.
    """

    rules: JsonRules
    is_multi_line: bool
    """Whether each file is one text."""

    def __init__(
        self,
        paths: str | Sequence[str],
        schema: pa.Schema,
        following: Following | None = None,
        rules: JsonRules = _SPARKS_RULES,
        *,
        is_multi_line: bool = False,
    ) -> None:
        super().__init__(paths, nullable(schema), following)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "is_multi_line", is_multi_line)

    def check(self) -> None:
        refuse_unreadable(self.schema, self.rules)
        super().check()

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "offset": 0})

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _JsonLinesReader(self, splits)

    def describe(self) -> str:
        return self._described("json")


class _JsonLinesReader(FileReader):
    def __init__(self, source: JsonLinesSource, splits: Sequence[Split]) -> None:
        super().__init__(source.schema, splits)
        self._is_multi_line = source.is_multi_line
        self._reader = RecordReader(source.schema, source.rules)
        self._records_malformed = 0

    def records_malformed(self) -> int:
        return self._records_malformed

    def has_ended(self, split: Split) -> bool:
        return position_of(split, "offset") >= position_of(split, "size")

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        path, offset = path_of(split), position_of(split, "offset")
        _refuse_compressed(path)
        cut = _whole if self._is_multi_line else _blocks
        try:
            with open(path, "rb", buffering=0) as file:
                size_bytes = _size_bytes(file)
                checksum = _checksum_of_past(file, split, size_bytes)
                for block in cut(file, path, size_bytes - offset):
                    batch = self._parsed(path, offset, block)
                    offset += len(block)
                    checksum = zlib.crc32(block, checksum)
                    if offset == size_bytes:  # what is added later would never be read
                        _refuse_change(file, path, size_bytes)
                    yield _at(split, size_bytes, offset, checksum), batch
                if offset < size_bytes:
                    _refuse_change(file, path, size_bytes)
        except OSError as error:
            raise DataError(
                f"source file {path} cannot be read ({error.strerror}): make it readable and"
                " start the job again"
            ) from error

    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch:
        texts = Texts.of([block]) if self._is_multi_line else Texts.lines(block)
        try:
            records = self._reader.read(texts)
        except Malformed as error:
            begins_at = int(texts.starts[error.place])
            number = _lines_before(path, offset + begins_at) + 1
            where = f"line {number} of {path}" if not self._is_multi_line else path
            begins = texts[error.place][:80].decode("utf-8", "replace").rstrip()
            raise DataError(
                f"{where} does not fit the schema ({error.why}): correct the record or the schema,"
                f" or set mode to PERMISSIVE; {'the line' if not self._is_multi_line else 'it'}"
                f" begins {begins!r}"
            ) from None
        self._records_malformed += records.malformed
        return records.batch


def _refuse_compressed(path: str) -> None:
    # Read as it is, each of its lines would be a malformed record.
    if path.lower().endswith(_COMPRESSED):
        raise DataError(
            f"{path} is compressed, which is not read here: decompress it, or read it with Spark"
            " and still.stream"
        )


def _at(split: Split, size_bytes: int, offset: int, checksum: int) -> Split:
    kept: JsonObject = {"size": size_bytes, "offset": offset, "crc32": f"{checksum:08x}"}
    return Split(split.id, {**split.position, **kept})


def _size_bytes(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _checksum_of_past(file: FileIO, split: Split, size_bytes: int) -> int:
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


def _refuse_change(file: FileIO, path: str, size_bytes: int) -> None:
    now_bytes = _size_bytes(file)
    if now_bytes != size_bytes:
        raise DataError(
            f"source file {path} has changed while it was read, from {size_bytes} to {now_bytes}"
            " bytes: write a file elsewhere and rename it when it is whole, then start the job"
            " again"
        )


def _blocks(file: FileIO, path: str, left_bytes: int) -> Iterator[bytes]:
    """The rest of a file in pieces of whole lines; the last line may lack its newline."""
    rest = b""
    while piece := file.read(min(left_bytes, _BLOCK_BYTES)):
        left_bytes -= len(piece)
        cut = piece.rfind(b"\n") + 1
        if cut:
            yield rest + piece[:cut]
            rest = piece[cut:]
        else:
            rest += piece
        if len(rest) > _LINE_BYTES_MAX:
            raise DataError(
                f"{path} has a line of more than {_LINE_BYTES_MAX} bytes: it is probably not"
                " JSON lines, one record per line"
            )
    if rest:
        yield rest


def _whole(file: FileIO, path: str, left_bytes: int) -> Iterator[bytes]:
    """The file as one text."""
    if left_bytes > _FILE_BYTES_MAX:
        raise DataError(
            f"{path} has {left_bytes} bytes, and with multiLine a file is read as a whole: write"
            f" one record per line, or files of less than {_FILE_BYTES_MAX} bytes"
        )
    pieces: list[bytes] = []
    while piece := file.read(left_bytes):
        pieces.append(piece)
        left_bytes -= len(piece)
    yield b"".join(pieces)


def _lines_before(path: str, offset: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while offset > 0 and (piece := file.read(min(offset, _BLOCK_BYTES))):
            count += piece.count(b"\n")
            offset -= len(piece)
    return count


# --- options -----------------------------------------------------------------------------------

_FLAGS: Mapping[str, str] = {
    "allowComments": "comments",
    "allowUnquotedFieldNames": "unquoted_names",
    "allowSingleQuotes": "single_quotes",
    "allowNumericLeadingZeros": "leading_zeros",
    "allowNonNumericNumbers": "non_numeric_numbers",
    "allowBackslashEscapingAnyCharacter": "any_escape",
    "allowUnquotedControlChars": "control_characters",
}
_PATTERN = "read the column as a string and convert it with an expression"
_INFERENCE = "it is about schemas that Spark infers, and yours is given: leave it out"
_LIMIT = "Jackson's own limit holds: leave it out"
_REFUSED: Mapping[str, str] = {
    "dateFormat": _PATTERN,
    "timestampFormat": _PATTERN,
    "timestampNTZFormat": _PATTERN,
    "enableDateTimeParsingFallback": _PATTERN,
    "locale": _PATTERN,
    "primitivesAsString": _INFERENCE,
    "prefersDecimal": _INFERENCE,
    "inferTimestamp": _INFERENCE,
    "samplingRatio": _INFERENCE,
    "dropFieldIfAllNull": _INFERENCE,
    "maxNestingDepth": _LIMIT,
    "maxNumLen": _LIMIT,
    "maxStringLen": _LIMIT,
    "compression": "compressed files are not read here: decompress them",
    "singleVariantColumn": "a stream cannot carry variants: declare columns, or a string",
}
_MODES: tuple[Mode, ...] = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
JSON_OPTIONS = (
    *_FLAGS,
    *_REFUSED,
    "mode",
    "columnNameOfCorruptRecord",
    "multiLine",
    "timeZone",
    "encoding",
    "charset",
    "lineSep",
)


def json_from_options(
    path: str, schema: pa.Schema, following: Following | None, options: Mapping[str, str]
) -> JsonLinesSource:
    """What `readStream.format("json").option(…)` asks for."""
    rules = rules_from_options(options, "the source json")
    is_multi_line = parse_flag("multiLine", _given(options).get("multiLine", "false"))
    return JsonLinesSource(path, schema, following, rules, is_multi_line=is_multi_line)


def rules_from_options(options: Mapping[str, str], of: str) -> JsonRules:
    """What Spark's options for JSON say; `of`: whose they are, in words."""
    given = _given(options)
    for name in given:
        if name in _REFUSED:
            raise BuildError(f"{of} does not take the option {name}: {_REFUSED[name]}")
    encoding = given.get("encoding", given.get("charset", "UTF-8"))
    if encoding.upper().replace("_", "-") not in ("UTF-8", "UTF8"):
        raise BuildError(f"option encoding is {encoding!r}, but only UTF-8 is read: convert it")
    if given.get("lineSep", "\n") != "\n":
        raise BuildError(
            f"option lineSep is {given['lineSep']!r}, but lines end with a line feed, a carriage"
            " return or both: leave it out"
        )
    return JsonRules(
        zone=given.get("timeZone", "UTC"),
        mode=_mode(given.get("mode", "PERMISSIVE")),
        corrupt_column=given.get("columnNameOfCorruptRecord", "_corrupt_record"),
        **{_FLAGS[name]: parse_flag(name, text) for name, text in given.items() if name in _FLAGS},
    )


def _given(options: Mapping[str, str]) -> dict[str, str]:
    spelled = {name.lower(): name for name in JSON_OPTIONS}
    return {spelled[name.lower()]: options[name] for name in options if name.lower() in spelled}


def _mode(text: str) -> Mode:
    for mode in _MODES:
        if text.strip().upper() == mode:
            return mode
    raise BuildError(f"option mode is one of {', '.join(_MODES)}, not {text!r}")
