"""Parquet files as a source."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.connectors.columns_in_files import fitted, names_in_file, refuse_unfit
from stillframe.connectors.files import (
    FileReader,
    FileSource,
    first_line,
    partitions_of,
    position_of,
    refuse_other_footer,
    unreadable,
)
from stillframe.errors import DataError, StorageError
from stillframe.storage.places import OpenFile

_BATCH_ROWS = 65_536
_ENCODED_VALUE_BYTES_MAX = 4
"""A value in Parquet that is written out takes four bytes for its length alone."""
_GROUP_ROWS_MIN = 8_192


class ParquetSource(FileSource):
    """Parquet files; columns are matched by name, one that a file lacks is null."""

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "rows": 0})

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _ParquetReader(self, splits, context)

    def describe(self) -> str:
        return self._described("parquet")


class _ParquetReader(FileReader):
    """Fetches and decodes only the columns that the job reads; files are held to all of them.

    What records are only grouped by is left encoded where the file has it as a small dictionary:
    a thousand different strings in a million rows take 4 ns for a row so, and 18 written out.
    """

    def __init__(
        self, source: ParquetSource, splits: Sequence[Split], context: SourceContext
    ) -> None:
        super().__init__(source, splits)
        schema = source.schema
        read = schema.names if context.columns is None else context.columns
        self._read_schema = pa.schema([schema.field(name) for name in read])
        self._grouped_by = context.grouped_by

    def has_ended(self, split: Split) -> bool:
        # A file that was read to its end may be archived; an empty one has no footer to read.
        return bool(split.position.get("ended")) or split.position["size"] == 0

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        path, done = str(split.position["path"]), position_of(split, "rows")
        try:
            with self._place(path).open(path) as raw, self._opened(raw) as file:
                size_bytes, footer = _size_and_footer(raw, file.metadata)
                refuse_other_footer(split, size_bytes, footer)
                total = file.metadata.num_rows
                for batch in self._batches(file, path, done, partitions_of(split)):
                    done += batch.num_rows
                    position = {"size": size_bytes, "rows": done, "footer_crc32": footer}
                    if done == total:
                        position["ended"] = True
                    yield Split(split.id, {**split.position, **position}), batch
        except (FileNotFoundError, StorageError) as error:
            raise unreadable(path, error) from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read as Parquet ({first_line(error)}): repair it or take it"
                " out of the path"
            ) from error

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

    def _batches(
        self, file: pq.ParquetFile, path: str, done: int, partitions: Collection[str]
    ) -> Iterator[pa.RecordBatch]:
        """The rows behind those that are done; partition columns, which come later, are null."""
        found, schema = file.schema_arrow, self._read_schema
        held = pa.schema([field for field in self._schema if field.name not in partitions])
        refuse_unfit(path, found, held, names_in_file(found, held))
        in_file = dict(zip(held.names, names_in_file(found, held), strict=True))
        names = [in_file.get(name) for name in schema.names]
        groups, skip = _groups_after(file.metadata, done)
        wanted = [name for name in names if name is not None]
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=wanted):
            unread = batch.slice(min(skip, batch.num_rows))
            skip -= batch.num_rows - unread.num_rows
            if unread.num_rows:
                yield fitted(path, unread, schema, names, self._grouped_by)


def _size_and_footer(file: OpenFile, metadata: pq.FileMetaData) -> tuple[int, str]:
    """How long a file is, and the checksum of its footer, which says what is where in it."""
    size_bytes = file.seek(0, os.SEEK_END)
    # Behind it are its length and a magic word, of four bytes each.
    file.seek(size_bytes - 8 - metadata.serialized_size)
    return size_bytes, f"{zlib.crc32(file.read()):08x}"


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
