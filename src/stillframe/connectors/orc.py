"""ORC files as a source."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa
from pyarrow import orc

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.connectors.columns_in_files import fitted
from stillframe.connectors.footered import BATCH_ROWS, FooteredReader, FooteredSource
from stillframe.storage.places import OpenFile


class OrcSource(FooteredSource):
    """ORC files. A time without a zone is taken for one of UTC."""

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _OrcReader(self, splits, context)

    def describe(self) -> str:
        return self._described("orc")


class _OrcReader(FooteredReader[orc.ORCFile]):
    """A stripe at a time."""

    format_name = "ORC"

    def _opened(self, raw: OpenFile) -> AbstractContextManager[orc.ORCFile]:
        file = raw.name if isinstance(raw, io.FileIO) else pa.PythonFile(raw, mode="r")
        return nullcontext(orc.ORCFile(file))

    def _shape_of(self, file: orc.ORCFile) -> tuple[pa.Schema, int, int]:
        # Behind both is one byte, the length of the latter.
        behind_bytes = 1 + file.file_postscript_length + file.file_footer_length
        return file.schema, file.nrows, behind_bytes

    def _batches(
        self, file: orc.ORCFile, path: str, done: int, names: list[str | None]
    ) -> Iterator[pa.RecordBatch]:
        # A stripe without any column would not say how many rows it has.
        wanted = [name for name in names if name is not None] or file.schema.names[:1]
        for stripe in range(file.nstripes):
            rows = file.read_stripe(stripe, columns=wanted)
            for begin in range(min(done, rows.num_rows), rows.num_rows, BATCH_ROWS):
                part = rows.slice(begin, BATCH_ROWS)
                yield fitted(path, part, self._read_schema, names, ())
            done = max(0, done - rows.num_rows)
