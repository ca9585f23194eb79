"""Tables of Parquet files with a log: data files at the barrier, one entry of the log when the
checkpoint is complete.

Theory of operation
-------------------
A writer puts its rows into Parquet files at the table's own place. Nobody reads them there: no
entry of the table's log names them yet. When the checkpoint is complete the coordinator adds one
entry with the files of all subtasks and the mark of the checkpoint (`protocol/outside.py`). What
Delta and Iceberg do in their own ways is an `OpenTable`.

Rules of this file
------------------
1. Before a data file there is a note of it beside the checkpoints; the note's name says all names.
   So what a dead writer left is found without listing the table. The notes are the staged files of
   `transactional.py`: they go when the entry is written.
2. The log takes an entry only if no other of the same sink came since the table was opened. Then
   all is looked at again: the mark, and that the notes are there.
3. A file is swept in this order: its note is renamed, an entry without files is written, and the
   file is deleted unless the log names it by then. One that was overtaken and is about to commit
   the file is either seen in the log, or is refused by the log and misses the note.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, cast
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sinks import Committer, CommitterContext, Prepared, SinkContext, Target
from stillframe.connectors.table_columns import Partition, check_fits, fitted
from stillframe.connectors.table_options import in_one_line
from stillframe.connectors.transactional import (
    StagingWriter,
    TransactionalCommitter,
    TransactionalSink,
    part_names,
    required_staging,
)
from stillframe.errors import DataError, StartRefused, StorageError, Unavailable
from stillframe.ids import NO_CHECKPOINT, CheckpointId, Mark, OperatorUid, Writer
from stillframe.json_values import JsonObject

log = logging.getLogger("stillframe")

_PART_BYTES = 128 << 20
_FENCE_TRIES_MAX = 20
_OLD_SECONDS = 3600.0
"""After that somebody may have cleaned the table of files that its log does not name."""


class OpenTable(ABC):
    """One version of a table, as it was when it was opened.

    Raises `Unavailable` where a later try may succeed, an `OSError` too.
    """

    schema: pa.Schema
    """Its columns, as data files have them."""
    partitions: tuple[str, ...]
    """How it is partitioned, in words: names of columns where these are what parts it."""

    @abstractmethod
    def split(self, rows: pa.Table) -> Sequence[tuple[Partition, pa.Table]]:
        """The rows of each partition, with the columns that a data file has."""

    @abstractmethod
    def describe_file(
        self, name: str, partition: Partition, rows: pa.Table, written: pq.FileMetaData
    ) -> JsonObject:
        """What the log will want to know of this file."""

    @abstractmethod
    def put(self, name: str, content: pa.Buffer) -> None:
        """Make a data file, durably."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a data file; that there is none raises `FileNotFoundError`."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether this data file is there."""

    @abstractmethod
    def mark(self, writer: Writer) -> CheckpointId | None: ...

    @abstractmethod
    def commit(self, mark: Mark, files: Sequence[JsonObject]) -> None:
        """Add one entry to the log with these files and this mark, or raise `Unavailable`.

        Must not succeed if the sink of this mark has added one since the table was opened.
        """

    @abstractmethod
    def in_log(self, names: Set[str]) -> Set[str]:
        """Those of these data files that the log names."""

    def forget(self, writer: Writer) -> None:  # noqa: B027 - a mark takes little room
        """Remove its mark."""

    def incarnations(self, uid: OperatorUid) -> Set[str]:
        """Of jobs that have marks of a sink with this uid, as far as the table tells."""
        return frozenset()


class TableSink(TransactionalSink):
    """Rows show in the table with each checkpoint, each once, whatever is killed."""

    commits_at_coordinator: ClassVar[bool] = True
    marks_expire: ClassVar[bool] = True
    """Not by themselves, but a table is easily made again without them."""

    schema: pa.Schema
    partition_by: tuple[str, ...] | None
    """None: as the table is."""
    creates: bool

    @abstractmethod
    def open_table(self) -> OpenTable | None:
        """None: there is none."""

    @abstractmethod
    def create_table(self) -> None:
        """That somebody else has made it meanwhile is fine."""

    def required_table(self) -> OpenTable:
        table = self.open_table()
        if table is None:
            raise DataError(f"there is no {self.describe()} any more: bring it back")
        return table

    def open_target(self) -> Target:
        return _TableTarget(self)

    def open_writer(self, context: SinkContext) -> _DataFileWriter:
        return _DataFileWriter(self, context)

    def open_committer(self, context: CommitterContext) -> Committer:
        return _TableCommitter(self, context)

    def check_start(self) -> None:
        try:
            table = self.open_table()
            if table is None and self.creates:
                self.create_table()
                table = self.open_table()
            if table is None:
                raise DataError(
                    f"there is no {self.describe()}: create it, or say .option('createTable', True)"
                )
            check_fits(self.schema, table.schema, self.describe())
            if self.partition_by is not None and self.partition_by != table.partitions:
                raise DataError(
                    f"{self.describe()} is partitioned by {_listed(table.partitions)} and not by"
                    f" {_listed(self.partition_by)}: correct partitionBy, or leave it out"
                )
        except (DataError, Unavailable, OSError) as error:
            raise StartRefused(str(error)) from None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


# --- In the slots ----------------------------------------------------------------------------


class _DataFileWriter(StagingWriter):
    part_bytes = _PART_BYTES

    def __init__(self, sink: TableSink, context: SinkContext) -> None:
        super().__init__(
            required_staging(context.staging, sink),
            context,
            self._check_batch,
            draw_token=lambda: secrets.token_hex(8),  # of all who ever write to the table
        )
        self._sink = sink
        self._incarnation = context.incarnation

    @cached_property
    def _table(self) -> OpenTable:
        """Asked for when there is something to write."""
        table = self._sink.required_table()
        check_fits(self._sink.schema, table.schema, self._sink.describe())
        return table

    def _check_batch(self, batch: pa.RecordBatch) -> None:
        for column in self._table.schema:
            if not column.nullable and batch.column(column.name).null_count:
                raise DataError(
                    f"column {column.name} has a null, and {self._sink.describe()} takes none"
                    " there: correct the rows, or alter the table"
                )

    def _staged(self, name: str, batches: list[pa.RecordBatch]) -> JsonObject:
        table = self._table
        rows = fitted(pa.Table.from_batches(batches), table.schema)
        parts = table.split(rows)
        note = _note(name, self._incarnation, len(parts))
        self._staging.note(note)
        described, length_bytes = [], 0
        for file_name, (partition, part) in zip(_data_files(note), parts, strict=True):
            out = pa.BufferOutputStream()
            metadata: list[pq.FileMetaData] = []
            pq.write_table(part, out, compression="zstd", metadata_collector=metadata)
            content = out.getvalue()
            try:
                table.put(file_name, content)
            except OSError as error:
                raise StorageError(
                    f"cannot write a data file of {self._sink.describe()} ({in_one_line(error)}):"
                    " make room or correct the rights, the last completed checkpoint is untouched"
                ) from error
            except StorageError as error:  # which says what to do
                raise StorageError(
                    f"a data file of {self._sink.describe()} is not written, the last completed"
                    f" checkpoint is untouched: {error}"
                ) from error
            length_bytes += content.size
            described.append(
                {
                    **table.describe_file(file_name, partition, part, metadata[0]),
                    "name": file_name,
                    "rows": part.num_rows,
                    "bytes": content.size,
                    "at_ms": int(time.time() * 1000),
                }
            )
        return {"name": note, "length_bytes": length_bytes, "files": described}


def _note(name: str, incarnation: str, files: int) -> str:
    """The note of a part: in the same directory, and with the same beginning."""
    quoted = quote(incarnation, safe="").replace("-", "%2D")
    return f"{name.removesuffix('.arrow')}-{quoted}-{files}.files"


_NOTE = re.compile(r"/(?P<of>[^/]+)-(?P<incarnation>[^/-]*)-(?P<files>\d+)\.(files|swept)$")


def _data_files(note: str) -> list[str]:
    """The names of all data files of a part, whether they are there or not."""
    found = _NOTE.search(note)
    assert found is not None, f"{note} is no note"
    return [f"part-{found['of']}-{number}.parquet" for number in range(int(found["files"]))]


def _incarnation_of(note: str) -> str:
    found = _NOTE.search(note)
    assert found is not None, f"{note} is no note"
    return unquote(found["incarnation"])


# --- At the coordinator ----------------------------------------------------------------------


@dataclass
class _TableTarget(Target):
    """What it is given as rows are descriptions of data files."""

    sink: TableSink
    table: OpenTable | None = None

    def begin(self, writer: Writer) -> CheckpointId | None:
        self.table = self.sink.required_table()
        return self.table.mark(writer)

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        assert self.table is not None, "begin comes first"
        files = [json.loads(text.as_py()) for batch in rows for text in batch.column(0)]
        self._refuse_missing(self.table, files)
        self.table.commit(mark, files)

    def _refuse_missing(self, table: OpenTable, files: Sequence[JsonObject]) -> None:
        """An entry that names files which are gone would break the table for everybody."""
        old = (time.time() - _OLD_SECONDS) * 1000
        for file in files:
            if cast(int, file["at_ms"]) < old and not table.has(str(file["name"])):
                raise StorageError(
                    f"data file {file['name']} ({file['rows']} rows) of {self.sink.describe()} is"
                    " gone before it was committed: somebody has removed files that the table's log"
                    " does not name; bring it back, or restore an earlier checkpoint"
                )

    def forget(self, writer: Writer) -> None:
        self.sink.required_table().forget(writer)

    def incarnations(self, uid: OperatorUid) -> Set[str]:
        return self.sink.required_table().incarnations(uid)


class _TableCommitter(TransactionalCommitter):
    def __init__(self, sink: TableSink, context: CommitterContext) -> None:
        super().__init__(sink, context)
        self._of = sink

    def _rows(self, part: Prepared) -> Iterator[pa.RecordBatch]:
        """Read when the table is open: rule 2."""
        if not self._names(part) >= set(part_names(part.committables)):
            raise StorageError(self._lost_in_words(part))
        files = [
            json.dumps(file)
            for committable in part.committables
            for note in cast(Sequence[JsonObject], committable["parts"])
            for file in cast(Sequence[JsonObject], note["files"])
        ]
        yield pa.record_batch({"file": pa.array(files, pa.string())})

    def _discard(self, uid: OperatorUid, names: Sequence[str]) -> None:
        notes = [name for name in names if _NOTE.search(name)]
        super()._discard(uid, [name for name in names if name not in notes])
        if not notes:
            return
        try:
            self._sweep_files(uid, notes)
        except (DataError, Unavailable, OSError) as error:
            log.warning("files of %s are swept later: %s", self._of.describe(), error)

    def _sweep_files(self, uid: OperatorUid, notes: Sequence[str]) -> None:
        """Rule 3."""
        swept = sorted({f"{os.path.splitext(note)[0]}.swept" for note in notes})
        for name in swept:
            self._staging.note(name)
        for note in set(notes) - set(swept):
            self._staging.delete(note)
        table = self._of.required_table()
        for incarnation in set(map(_incarnation_of, swept)):
            table = self._fenced(Writer(incarnation, uid, None))
        files = {file for name in swept for file in _data_files(name)}
        for file in sorted(files - table.in_log(files)):
            with suppress(FileNotFoundError):
                table.delete(file)
        self._delete(swept)

    def _fenced(self, writer: Writer) -> OpenTable:
        """The table, after an entry for which nobody who opened it before can write another."""
        for _ in range(_FENCE_TRIES_MAX):
            table = self._of.required_table()
            newest = table.mark(writer)
            try:
                table.commit(Mark(writer, newest or NO_CHECKPOINT), [])
            except Unavailable as error:
                said = error
                continue
            return self._of.required_table()
        raise said
