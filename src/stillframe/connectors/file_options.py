"""The options of file sinks: Spark's, and ours for what Spark has no word for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stillframe.config import parse_bytes, parse_count, parse_duration_seconds, parse_flag
from stillframe.connectors.csv_lines import signs_of
from stillframe.connectors.csv_writing import CsvWriting
from stillframe.connectors.file_encoders import FileFormat
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.lines import given_of, utf8_of
from stillframe.connectors.staged_files import Layout
from stillframe.errors import BuildError

_OF_ALL = ("path", "compression", "maxRecordsPerFile", "maxFileSize", "sparkMetadata", "retention")
_OF_LINES = ("encoding", "charset", "lineSep")
PATTERNS = ("dateFormat", "timestampFormat", "timestampNTZFormat")
"""How times are written; who makes the rows makes texts of them."""
_CSV = ("header", "sep", "delimiter", "quote", "escape", "nullValue", "emptyValue", "quoteAll")
_PATTERN = "select the column as a string, in the form that is wanted"
_REFUSED: Mapping[str, str] = {
    "timeZone": "times are written in spark.sql.session.timeZone: set that",
    "locale": _PATTERN,
    "escapeQuotes": "quotes are escaped: leave it out",
    "charToEscapeQuoteEscaping": "the escape character escapes itself: leave it out",
    "ignoreLeadingWhiteSpace": "Spark's way is followed, which trims: leave it out",
    "ignoreTrailingWhiteSpace": "Spark's way is followed, which trims: leave it out",
    "ignoreNullFields": "Spark's way is followed, which leaves them out: leave it out",
    "pretty": "a record is a line: leave it out",
    "writeNonAsciiCharacterAsCodePoint": "characters are written as they are: leave it out",
}
FILE_SINK_OPTIONS: Mapping[FileFormat, tuple[str, ...]] = {
    "parquet": _OF_ALL,
    "orc": _OF_ALL,
    "json": (*_OF_ALL, *_OF_LINES, *PATTERNS, *_REFUSED),
    "csv": (*_OF_ALL, *_OF_LINES, *_CSV, *PATTERNS, *_REFUSED),
    "text": (*_OF_ALL, *_OF_LINES),
}


def file_sink_from_options(
    sink: FileSink, options: Mapping[str, str], partition_by: tuple[str, ...]
) -> FileSink:
    """This sink as the options have it."""
    given = given_of(options, FILE_SINK_OPTIONS[sink.format])
    for name in given:
        if name in _REFUSED:
            raise BuildError(f"the sink {sink.format} does not take {name}: {_REFUSED[name]}")
    utf8_of(given)
    compression = given.get("compression")
    made = replace(
        sink,
        compression=None if compression is None else compression.strip().lower(),
        csv=_csv(given) if sink.format == "csv" else sink.csv,
        layout=Layout(partition_by, _rows_max(given), _bytes_max(given)),
    )
    retention = given.get("retention")
    if not parse_flag("sparkMetadata", given.get("sparkMetadata", "false")):
        if retention is not None:
            raise BuildError(
                f"option retention is {retention!r}, which is about Spark's log of files, and there"
                " is none: set sparkMetadata to true, or leave it out"
            )
        return made
    seconds = None if retention is None else parse_duration_seconds("retention", retention)
    return made.logged(seconds)


def _rows_max(given: Mapping[str, str]) -> int | None:
    text = given.get("maxRecordsPerFile", "0").strip()
    # As in Spark, 0 and less is no limit.
    return (
        None
        if text.lstrip("-") == "0" or text.startswith("-")
        else parse_count("maxRecordsPerFile", text)
    )


def _bytes_max(given: Mapping[str, str]) -> int | None:
    text = given.get("maxFileSize")
    return None if text is None else parse_bytes("maxFileSize", text)


def _csv(given: Mapping[str, str]) -> CsvWriting:
    usual = CsvWriting()
    return CsvWriting(
        signs=signs_of(given),
        has_header=parse_flag("header", given.get("header", "false")),
        null_value=given.get("nullValue", usual.null_value),
        empty_value=given.get("emptyValue", usual.empty_value),
        quotes_all=parse_flag("quoteAll", given.get("quoteAll", "false")),
    )
