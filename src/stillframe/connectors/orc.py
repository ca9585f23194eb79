"""ORC files as a source."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
from pyarrow import orc

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


class OrcSource(FileSource):
    """ORC files; columns are matched by name, one that a file lacks is null.

    A time without a zone is taken for one of UTC.
    """

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "rows": 0})

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _OrcReader(self, splits, context)

    def describe(self) -> str:
        return self._described("orc")


class _OrcReader(FileReader):
    """Decodes only the columns that the job reads, a stripe at a time."""

    def __init__(self, source: OrcSource, splits: Sequence[Split], context: SourceContext) -> None:
        super().__init__(source, splits)
        read = source.schema.names if context.columns is None else context.columns
        self._read_schema = pa.schema([source.schema.field(name) for name in read])

    def has_ended(self, split: Split) -> bool:
        return bool(split.position.get("ended")) or split.position["size"] == 0

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        path, done = str(split.position["path"]), position_of(split, "rows")
        try:
            with self._place(path).open(path) as raw:
                opened = raw.name if isinstance(raw, io.FileIO) else pa.PythonFile(raw, mode="r")
                file = orc.ORCFile(opened)
                size_bytes, footer = _size_and_footer(raw, file)
                refuse_other_footer(split, size_bytes, footer)
                for batch in self._batches(file, path, done, partitions_of(split)):
                    done += batch.num_rows
                    position = {"size": size_bytes, "rows": done, "footer_crc32": footer}
                    if done == file.nrows:
                        position["ended"] = True
                    yield Split(split.id, {**split.position, **position}), batch
        except (FileNotFoundError, StorageError) as error:
            raise unreadable(path, error) from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read as ORC ({first_line(error)}): repair it or take it out of"
                " the path"
            ) from error

    def _batches(
        self, file: orc.ORCFile, path: str, done: int, partitions: Collection[str]
    ) -> Iterator[pa.RecordBatch]:
        """The rows behind those that are done; partition columns, which come later, are null."""
        held = pa.schema([field for field in self._schema if field.name not in partitions])
        found = names_in_file(file.schema, held)
        refuse_unfit(path, file.schema, held, found)
        in_file = dict(zip(held.names, found, strict=True))
        names = [in_file.get(name) for name in self._read_schema.names]
        # A stripe without any column would not say how many rows it has.
        wanted = [name for name in names if name is not None] or file.schema.names[:1]
        for stripe in range(file.nstripes):
            rows = file.read_stripe(stripe, columns=wanted)
            for begin in range(min(done, rows.num_rows), rows.num_rows, _BATCH_ROWS):
                part = rows.slice(begin, _BATCH_ROWS)
                yield fitted(path, part, self._read_schema, names, ())
            done = max(0, done - rows.num_rows)


def _size_and_footer(file: OpenFile, opened: orc.ORCFile) -> tuple[int, str]:
    """How long a file is, and the checksum of its footer, which says what is where in it."""
    size_bytes = file.seek(0, os.SEEK_END)
    # Behind both is one byte, the length of the latter.
    file.seek(size_bytes - 1 - opened.file_postscript_length - opened.file_footer_length)
    return size_bytes, f"{zlib.crc32(file.read()):08x}"
