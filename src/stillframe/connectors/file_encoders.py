"""What is in the files of a file sink: Parquet, ORC, JSON, CSV or text, as Spark writes them."""

from __future__ import annotations

import bz2
import gzip
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from stillframe.connectors.csv_lines import refuse_no_text
from stillframe.connectors.csv_writing import CsvWriting, csv_header, csv_lines, text_lines
from stillframe.errors import BuildError
from stillframe.json_texts.writing import json_lines

FileFormat = Literal["parquet", "orc", "json", "csv", "text"]
FORMATS: tuple[FileFormat, ...] = ("parquet", "orc", "json", "csv", "text")
_PARQUET_CODECS = ("none", "uncompressed", "snappy", "gzip", "zstd", "brotli", "lz4_raw")
_ORC_CODECS = ("none", "uncompressed", "snappy", "zlib", "lz4", "zstd")
_LINE_CODECS: Mapping[str, str] = {"none": "", "uncompressed": "", "gzip": ".gz", "bzip2": ".bz2"}
_USUAL_CSV = CsvWriting()


class Encoder(Protocol):
    def write_table(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a file holds, and how."""

    format: FileFormat = "parquet"
    zone: str = "UTC"
    """In which times are written as text."""
    compression: str | None = None
    """None: as is usual, snappy for Parquet and nothing for lines."""
    csv: CsvWriting = _USUAL_CSV

    def check(self, schema: pa.Schema) -> None:
        """Raise BuildError for columns that such files cannot hold."""
        if self.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise BuildError(f"a file sink writes one of {known}, not {self.format!r}")
        codecs = {"parquet": _PARQUET_CODECS, "orc": _ORC_CODECS}.get(
            self.format, tuple(_LINE_CODECS)
        )
        if self.compression is not None and self.compression not in codecs:
            raise BuildError(
                f"option compression is {self.compression!r}, but {self.format} is written with one"
                f" of {', '.join(codecs)}: choose one of them"
            )
        for field in schema if self.format in ("json", "orc") else ():
            if pa.types.is_duration(field.type):
                raise BuildError(
                    f"column {field.name} is an interval, which is not written as"
                    f" {self.format.upper()}: cast it to a string or a number"
                )
        for field in schema if self.format == "csv" else ():
            refuse_no_text(field, "written as CSV")
        if self.format == "text" and (len(schema) != 1 or not pa.types.is_string(schema.types[0])):
            shown = ", ".join(f"{field.name} {field.type}" for field in schema)
            raise BuildError(
                "Text data source supports only a single column of strings, and there are:"
                f" {shown}; select one, cast to a string"
            )

    @property
    def extension(self) -> str:
        if self.format in ("parquet", "orc"):
            return self.format
        name = "txt" if self.format == "text" else self.format
        return name + _LINE_CODECS[self.compression or "none"]

    def open(self, file: BinaryIO, schema: pa.Schema) -> Encoder:
        if self.format == "parquet":
            # A dictionary of numbers that hardly repeat was measured to cost more than all else.
            words = [field.name for field in schema if pa.types.is_string(field.type)]
            codec = (self.compression or "snappy").replace("uncompressed", "none")
            encoder: Encoder = pq.ParquetWriter(
                file, schema, use_dictionary=words or False, compression=codec
            )
            return encoder
        if self.format == "orc":
            return _OrcEncoder(file, (self.compression or "zstd").replace("none", "uncompressed"))
        return _LineEncoder(_compressed(file, self.compression), self._lines(), self._head(schema))

    def _lines(self) -> Callable[[pa.RecordBatch], memoryview]:
        match self.format:
            case "csv":
                return lambda batch: csv_lines(batch, self.zone, self.csv)
            case "text":
                return text_lines
            case _:
                return lambda batch: json_lines(batch, self.zone)

    def _head(self, schema: pa.Schema) -> bytes:
        has_header = self.format == "csv" and self.csv.has_header
        return csv_header(schema.names, self.csv) if has_header else b""


def _compressed(file: BinaryIO, codec: str | None) -> BinaryIO:
    match codec:
        case "gzip":
            # Without the time of day, so that equal rows are equal files.
            return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="wb", mtime=0))
        case "bzip2":
            return cast(BinaryIO, bz2.BZ2File(file, "wb"))
        case _:
            return file


class _OrcEncoder:
    def __init__(self, file: BinaryIO, codec: str) -> None:
        self._writer = orc.ORCWriter(file, compression=codec)

    def write_table(self, table: pa.Table) -> None:
        self._writer.write(table)

    def close(self) -> None:
        """The file itself stays open."""
        self._writer.close()


class _LineEncoder:
    def __init__(
        self, file: BinaryIO, lines: Callable[[pa.RecordBatch], memoryview], head: bytes
    ) -> None:
        self._file = file
        self._lines = lines
        self._file.write(head)

    def write_table(self, table: pa.Table) -> None:
        for batch in table.combine_chunks().to_batches():
            self._file.write(self._lines(batch))

    def close(self) -> None:
        """What compresses holds something back; the file itself stays open."""
        if isinstance(self._file, gzip.GzipFile | bz2.BZ2File):
            self._file.close()


# --- partition directories ---------------------------------------------------------------------

_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
_NULL = "__HIVE_DEFAULT_PARTITION__"


def partition_directory(names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """As Spark names it, out of the texts of the values; null where there is none."""
    parts = [
        f"{_escaped(name)}={_escaped(value) if value else _NULL}"
        for name, value in zip(names, values, strict=True)
    ]
    return "/".join(parts)


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)
