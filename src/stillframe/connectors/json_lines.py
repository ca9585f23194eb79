"""Files of JSON lines as a source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import FileIO

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.connectors.files import (
    FileReader,
    FileSource,
    first_line,
    position_of,
    unchanged_path,
)
from stillframe.errors import BuildError, DataError
from stillframe.key_groups import is_binary

_BLOCK_BYTES = 1 << 20
_LINE_BYTES_MAX = 64 << 20


class JsonLinesSource(FileSource):
    """Files of one JSON object per line; timestamps are ISO 8601 strings, UTC if they do not say.

    A member that was not declared is passed over, one that is missing is null.
    """

    def check(self) -> None:
        for field in self.schema:
            if pa.types.is_map(field.type) or is_binary(field.type):
                raise BuildError(
                    f"column {field.name} is {field.type}, which is not read from JSON lines:"
                    " declare it as a string or a struct"
                )
        super().check()

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "offset": 0})

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _JsonLinesReader(self.schema, splits)

    def describe(self) -> str:
        return self._described("json")


class _JsonLinesReader(FileReader):
    def has_ended(self, split: Split) -> bool:
        return position_of(split, "offset") >= position_of(split, "size")

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        offset = position_of(split, "offset")
        path = unchanged_path(split)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                for block in _blocks(file, path):
                    batch = self._parsed(path, offset, block)
                    offset += len(block)
                    yield Split(split.id, {**split.position, "offset": offset}), batch
        except OSError as error:
            raise DataError(
                f"source file {path} cannot be read ({error.strerror}): make it readable and"
                " start the job again"
            ) from error

    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch:
        try:
            return _parse_lines(block, self._schema)
        except (pa.ArrowException, _RowsAreNotLines) as error:
            raise _unfit_line(path, offset, block, self._schema) from error


def _blocks(file: FileIO, path: str) -> Iterator[bytes]:
    """The rest of a file in pieces of whole lines; the last line may lack its newline."""
    rest = b""
    while piece := file.read(_BLOCK_BYTES):
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


class _RowsAreNotLines(Exception):
    """A record over several lines, or several on one line."""


def _parse_lines(block: bytes, schema: pa.Schema) -> pa.RecordBatch:
    table = pa_json.read_json(
        pa.BufferReader(block),
        # One block, or a parallel reader would cut it again, and not at the same places.
        pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
        pa_json.ParseOptions(
            explicit_schema=_as_written(schema), unexpected_field_behavior="ignore"
        ),
    )
    if table.num_rows != _count_records(block):
        raise _RowsAreNotLines
    batch = table.combine_chunks().to_batches()
    columns = batch[0].columns if batch else [pa.array([], field.type) for field in schema]
    fitted = [column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(fitted, schema=schema)


def _as_written(schema: pa.Schema) -> pa.Schema:
    """Dates are strings in JSON, which pyarrow's reader does not convert by itself."""
    return pa.schema(
        [
            field.with_type(pa.string()) if pa.types.is_date(field.type) else field
            for field in schema
        ]
    )


def _count_records(block: bytes) -> int:
    """How many lines are not blank; a line that begins with a printing character surely is not."""
    octets = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    starts = np.concatenate(([0], ends + 1))
    starts = starts[starts < len(octets)]
    if (octets[starts] > ord(" ")).all():
        return len(starts)
    return sum(1 for line in block.split(b"\n") if line.strip())


def _unfit_line(path: str, offset: int, block: bytes, schema: pa.Schema) -> DataError:
    """Which line it was: the shortest run of lines from the block's start that fails ends in it."""
    lines = block.splitlines(keepends=True)
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        if _complaint(b"".join(lines[:middle]), schema) is None:
            good = middle
        else:
            bad = middle
    line = lines[bad - 1]
    reason = _complaint(line, schema) or "it is not one whole record"
    number = _lines_before(path, offset) + bad
    return DataError(
        f"line {number} of {path} does not fit the schema ({reason}): correct the record or the"
        f" schema; the line begins {line[:80].decode('utf-8', 'replace').rstrip()!r}"
    )


def _complaint(lines: bytes, schema: pa.Schema) -> str | None:
    try:
        _parse_lines(lines, schema)
    except pa.ArrowException as error:
        # Row numbers count from the place where this parse happened to begin.
        return re.sub(r" in row \d+$", "", first_line(error).removeprefix("JSON parse error: "))
    except _RowsAreNotLines:
        return "it is not one whole record"
    return None


def _lines_before(path: str, offset: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while offset > 0 and (piece := file.read(min(offset, _BLOCK_BYTES))):
            count += piece.count(b"\n")
            offset -= len(piece)
    return count
