"""Files whose footer says what is where in them: how far one was read is a number of rows."""

from __future__ import annotations

import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Generic, TypeVar

import pyarrow as pa

from stillframe.api.sources import SourceContext, Split
from stillframe.connectors.columns_in_files import names_in_file, refuse_unfit
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

BATCH_ROWS = 65_536
Opened = TypeVar("Opened")
"""A file as Arrow reads it."""


class FooteredSource(FileSource):
    """Columns are matched by name, one that a file lacks is null."""

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "rows": 0})


class FooteredReader(FileReader, Generic[Opened]):
    """Decodes only the columns that the job reads; files are held to all of them."""

    format_name: ClassVar[str]

    def __init__(self, source: FileSource, splits: Sequence[Split], context: SourceContext) -> None:
        super().__init__(source, splits)
        read = source.schema.names if context.columns is None else context.columns
        self._read_schema = pa.schema([source.schema.field(name) for name in read])

    @abstractmethod
    def _opened(self, raw: OpenFile) -> AbstractContextManager[Opened]:
        """It may be read anywhere until it is left."""

    @abstractmethod
    def _shape_of(self, file: Opened) -> tuple[pa.Schema, int, int]:
        """Its columns, how many rows it has, and how many bytes its footer and what is behind."""

    @abstractmethod
    def _batches(
        self, file: Opened, path: str, done: int, names: list[str | None]
    ) -> Iterator[pa.RecordBatch]:
        """The rows behind those that are done; `names`: what the file calls the columns read."""

    def has_ended(self, split: Split) -> bool:
        # A file that was read to its end may be archived; an empty one has no footer to read.
        return bool(split.position.get("ended")) or split.position["size"] == 0

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        path, done = str(split.position["path"]), position_of(split, "rows")
        try:
            with self._place(path).open(path) as raw, self._opened(raw) as file:
                schema, rows, behind_bytes = self._shape_of(file)
                size_bytes, footer = _size_and_footer(raw, behind_bytes)
                refuse_other_footer(split, size_bytes, footer)
                for batch in self._batches(file, path, done, self._names_in(path, schema, split)):
                    done += batch.num_rows
                    position = {"size": size_bytes, "rows": done, "footer_crc32": footer}
                    if done == rows:
                        position["ended"] = True
                    yield Split(split.id, {**split.position, **position}), batch
        except (FileNotFoundError, StorageError) as error:
            raise unreadable(path, error) from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read as {self.format_name} ({first_line(error)}): repair it or"
                " take it out of the path"
            ) from error

    def _names_in(self, path: str, found: pa.Schema, split: Split) -> list[str | None]:
        """Partition columns, which come later, are in no file."""
        partitions = partitions_of(split)
        held = pa.schema([field for field in self._schema if field.name not in partitions])
        names = names_in_file(found, held)
        refuse_unfit(path, found, held, names)
        in_file = dict(zip(held.names, names, strict=True))
        return [in_file.get(name) for name in self._read_schema.names]


def _size_and_footer(file: OpenFile, behind_bytes: int) -> tuple[int, str]:
    """How long a file is, and the checksum of its footer, which says what is where in it."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(size_bytes - behind_bytes)
    return size_bytes, f"{zlib.crc32(file.read()):08x}"
