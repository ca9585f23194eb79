"""Parquet files as a source."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.connectors.columns_in_files import fitted, names_in_file
from stillframe.connectors.footered import BATCH_ROWS, FooteredReader, FooteredSource
from stillframe.storage.places import OpenFile

_ENCODED_VALUE_BYTES_MAX = 4
"""A value in Parquet that is written out takes four bytes for its length alone."""
_GROUP_ROWS_MIN = 8_192


class ParquetSource(FooteredSource):
    """Parquet files."""

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _ParquetReader(self, splits, context)

    def describe(self) -> str:
        return self._described("parquet")


class _ParquetReader(FooteredReader[pq.ParquetFile]):
    """Fetches only the columns that the job reads.

    What records are only grouped by is left encoded where the file has it as a small dictionary:
    a thousand different strings in a million rows take 4 ns for a row so, and 18 written out.
    """

    format_name = "Parquet"

    def __init__(
        self, source: ParquetSource, splits: Sequence[Split], context: SourceContext
    ) -> None:
        super().__init__(source, splits, context)
        self._grouped_by = context.grouped_by

    def _opened(self, raw: OpenFile) -> pq.ParquetFile:
        # A file of a disk is read by Arrow itself, which is quicker.
        file = raw.name if isinstance(raw, io.FileIO) else pa.PythonFile(raw, mode="r")
        metadata = pq.read_metadata(file)
        grouped_by = pa.schema([self._schema.field(name) for name in self._grouped_by])
        names = names_in_file(metadata.schema.to_arrow_schema(), grouped_by)
        return pq.ParquetFile(
            file,
            metadata=metadata,
            pre_buffer=not isinstance(raw, io.FileIO),
            read_dictionary=[name for name in names if name and _is_encoded(metadata, name)],
            # Spark writes times as INT96, which Arrow otherwise takes for nanoseconds, until 2262.
            coerce_int96_timestamp_unit="us",
        )

    def _shape_of(self, file: pq.ParquetFile) -> tuple[pa.Schema, int, int]:
        # Behind the footer are its length and a magic word, of four bytes each.
        return file.schema_arrow, file.metadata.num_rows, 8 + file.metadata.serialized_size

    def _batches(
        self, file: pq.ParquetFile, path: str, done: int, names: list[str | None]
    ) -> Iterator[pa.RecordBatch]:
        groups, skip = _groups_after(file.metadata, done)
        wanted = [name for name in names if name is not None]
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=wanted):
            unread = batch.slice(min(skip, batch.num_rows))
            skip -= batch.num_rows - unread.num_rows
            if unread.num_rows:
                yield fitted(path, unread, self._read_schema, names, self._grouped_by)


def _is_encoded(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether a file has this column as small dictionaries, and hardly a value written out.

    Batches of dictionaries end where a row group does, so groups of a few rows do not count.
    """
    if metadata.num_rows < _GROUP_ROWS_MIN * (metadata.num_row_groups - 1):
        return False
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [
        chunk
        for group in groups
        for chunk in (group.column(number) for number in range(group.num_columns))
        if chunk.path_in_schema == name
    ]
    return bool(chunks) and all(
        chunk.physical_type == "BYTE_ARRAY"
        and chunk.has_dictionary_page
        and chunk.total_uncompressed_size < _ENCODED_VALUE_BYTES_MAX * chunk.num_values
        for chunk in chunks
    )


def _groups_after(metadata: pq.FileMetaData, done: int) -> tuple[list[int], int]:
    """The row groups that still have unread rows, and how many rows of the first to skip."""
    first = 0
    while first < metadata.num_row_groups and done >= metadata.row_group(first).num_rows:
        done -= metadata.row_group(first).num_rows
        first += 1
    return list(range(first, metadata.num_row_groups)), done
