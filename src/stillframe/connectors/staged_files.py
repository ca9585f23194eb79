"""Files on their way into a table: how a writer stages an epoch, and what their names say."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from stillframe.api.sinks import Committable, SinkContext, SinkWriter
from stillframe.connectors.file_encoders import Encoder, Encoding, partition_directory
from stillframe.errors import BuildError, StorageError
from stillframe.ids import CheckpointId
from stillframe.json_texts.writing import partition_texts
from stillframe.storage.places import Draft, Place

STAGING = "_stillframe/staging"
RECEIPTS = "_stillframe/receipts"

_BUFFER_ROWS = 1 << 20
_BUFFER_BYTES = 16 << 20
"""What a file gathers is a row group of Parquet: a small one costs more to write and to read."""
_BUFFER_BYTES_OF_MANY = 8 << 20
"""The same of each of several open files."""
_OPEN_FILES_MAX = 64
_UNDER_WAY_MAX = 4
_COPIED_BYTES_MAX = 1 << 30
"""An object store copies no object of more than five gigabytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are spread over files. A file ends with its epoch at the latest."""

    partition_by: tuple[str, ...] = ()
    """Columns that are directories, and not in the files."""
    rows_max: int | None = None
    bytes_max: int | None = None
    """A file that has reached one of them is the last with its name."""

    def check(self, schema: pa.Schema) -> None:
        for name in self.partition_by:
            if name not in schema.names:
                raise BuildError(
                    f"[PARTITION_COLUMN_NOT_FOUND_IN_SCHEMA] Partition column {name} not found in"
                    f" schema; there are {', '.join(schema.names)}: partition by one of them"
                )
            kind = schema.field(name).type
            if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_duration(kind):
                raise BuildError(
                    f"[INVALID_PARTITION_COLUMN_DATA_TYPE] Cannot use {kind} for partition column"
                    f" {name}: cast it to a string"
                )
        if len(self.partition_by) >= len(schema.names):
            raise BuildError(
                "[ALL_PARTITION_COLUMNS_NOT_ALLOWED] Cannot use all columns for partition columns:"
                " leave one of them for the files"
            )

    def inside(self, schema: pa.Schema) -> pa.Schema:
        """What is in the files."""
        return pa.schema([each for each in schema if each.name not in self.partition_by])


_ONE_FILE = Layout()


class StagingWriter(SinkWriter):
    """Stages the files of an epoch under `root`; an epoch without records makes none."""

    def __init__(
        self,
        place: Place,
        root: str,
        encoding: Encoding,
        schema: pa.Schema,
        context: SinkContext,
        *,
        publishes: bool,
        layout: Layout = _ONE_FILE,
    ) -> None:
        self._place = place
        self._root = root
        self._encoding = encoding
        self._schema = schema
        self._inside = layout.inside(schema)
        self._context = context
        self._publishes = publishes
        self._layout = layout
        self._bytes_max = layout.bytes_max
        if not place.has_rename:
            self._bytes_max = min(layout.bytes_max or _COPIED_BYTES_MAX, _COPIED_BYTES_MAX)
        self._token = secrets.token_hex(4)
        self._epochs = 0
        self._pool: ThreadPoolExecutor | None = None
        with saying(root):
            place.make_directory(f"{root}/{STAGING}")
        self._epoch = self._next_epoch()
        self._rotated: dict[int, _Epoch] = {}
        """Epochs whose background part has not begun: it takes its own out, or `close` does."""

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if not batch.schema.equals(self._schema):
            batch = batch.cast(self._schema)
        if not self._layout.partition_by:
            self._take("", batch)
            return
        for directory, rows in partitioned(batch, self._layout.partition_by, self._encoding.zone):
            self._take(directory, rows)

    def _take(self, directory: str, batch: pa.RecordBatch) -> None:
        rows_max = self._layout.rows_max
        while batch.num_rows:
            file = self._epoch.file_of(directory)
            room = batch.num_rows if rows_max is None else rows_max - file.rows
            file.append(batch.slice(0, room))
            if file.gathered_rows >= _BUFFER_ROWS or file.gathered_bytes >= self._buffer_bytes():
                file.flush()
            batch = batch.slice(min(room, batch.num_rows))
            is_full = rows_max is not None and file.rows >= rows_max
            if is_full or (self._bytes_max is not None and file.size_bytes >= self._bytes_max):
                self._finish_early(self._epoch.ended(directory))
        if len(self._epoch.open) > _OPEN_FILES_MAX:
            largest = max(self._epoch.open, key=lambda each: self._epoch.open[each].rows)
            self._finish_early(self._epoch.ended(largest))

    def _buffer_bytes(self) -> int:
        most = _BUFFER_BYTES if len(self._epoch.open) == 1 else _BUFFER_BYTES_OF_MANY
        return most if self._bytes_max is None else min(most, self._bytes_max)

    def _finish_early(self, file: _StagedFile) -> None:
        """While records flow, but not ever more of them at once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, "stillframe-files")
        under_way = self._epoch.under_way
        if len(under_way) >= _UNDER_WAY_MAX:
            under_way[-_UNDER_WAY_MAX].result()  # the place is behind: records wait
        under_way.append(self._pool.submit(file.finish))

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        ended, self._epoch = self._epoch, self._next_epoch()
        self._rotated[ended.number] = ended
        return lambda: self._prepare(ended.number, checkpoint_id)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._epoch.discard()
        while self._rotated:
            with suppress(KeyError):  # a background part was quicker
                self._rotated.popitem()[1].discard()

    def _next_epoch(self) -> _Epoch:
        number, self._epochs = self._epochs, self._epochs + 1

        def begin(sequence: int, directory: str) -> _StagedFile:
            who = self._context
            name = StagedName(who.job, who.uid, who.attempt, number, who.subtask, self._token)
            relative = f"{STAGING}/{name.text()}-{sequence}.{self._encoding.extension}"
            return _StagedFile(
                self._place, self._root, relative, directory, self._encoding, self._inside
            )

        return _Epoch(number, begin)

    def _prepare(self, number: int, checkpoint_id: CheckpointId) -> list[Committable]:
        ended = self._rotated.pop(number, None)
        if ended is None:
            raise StorageError(
                f"epoch {number} of {self._root} was given up: its writer is closed, this is too"
                " late"
            )
        try:
            for file in ended.open.values():
                file.finish()
            for future in ended.under_way:
                future.result()
        except BaseException:
            ended.discard()
            raise
        if ended.files:
            self._settle_way_there()
        return [
            self._committable(file, sequence, checkpoint_id)
            for sequence, file in enumerate(ended.files)
            if file.size_bytes
        ]

    def _settle_way_there(self) -> None:
        """Whoever made these directories may have died before they were durable."""
        with saying(self._root):
            directory = f"{self._root}/{STAGING}"
            while True:
                self._place.settle(directory)
                if directory == os.path.dirname(self._root):
                    return
                directory = os.path.dirname(directory)

    def _committable(
        self, file: _StagedFile, sequence: int, checkpoint_id: CheckpointId
    ) -> Committable:
        staged: Committable = {
            "staged": file.relative,
            "rows": file.rows,
            "bytes": file.size_bytes,
        }
        if not self._publishes:
            return staged
        who = self._context
        parts = [
            *(_quoted(who.job), _quoted(who.uid), f"{checkpoint_id:010d}", f"{who.subtask:05d}"),
            *(str(who.attempt), self._token, f"{sequence:05d}"),
        ]
        name = f"part-{'-'.join(parts)}.{self._encoding.extension}"
        return {**staged, "target": f"{file.directory}/{name}" if file.directory else name}


def partitioned(
    batch: pa.RecordBatch, names: tuple[str, ...], zone: str
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each partition directory, without the columns that it stands for."""
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    values = []
    for name in names:
        encoded = partition_texts(batch.column(name), zone).dictionary_encode(
            null_encoding="encode"
        )
        values.append(encoded.dictionary)
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    rows = batch.drop_columns(list(names)).take(pa.array(order))
    ends = [*starts[1:], len(order)]
    for code, start, end in zip(found, starts, ends, strict=True):
        texts: list[str | None] = []
        for dictionary in reversed(values):
            code, at = divmod(int(code), len(dictionary))
            texts.insert(0, dictionary[at].as_py())
        yield partition_directory(names, tuple(texts)), rows.slice(int(start), int(end - start))


@dataclass(frozen=True, slots=True)
class StagedName:
    """What a staged file's name says."""

    job: str
    uid: str
    attempt: int
    writer_epoch: int
    """Counts the writer's epochs: which checkpoint will end one is not known yet."""
    subtask: int
    token: str

    def text(self) -> str:
        parts = [_quoted(self.job), _quoted(self.uid), self.attempt, self.writer_epoch]
        return "-".join(map(str, [*parts, self.subtask, self.token]))

    @classmethod
    def parse(cls, file_name: str) -> StagedName | None:
        """None for a name that is not one of ours."""
        match = re.fullmatch(
            r"([^-]+)-([^-]+)-(\d+)-(\d+)-(\d+)-([0-9a-f]+)(?:-\d+)?\.[\w.]+", file_name
        )
        if match is None:
            return None
        job, uid, attempt, epoch, subtask, token = match.groups()
        return cls(unquote(job), unquote(uid), int(attempt), int(epoch), int(subtask), token)


def _quoted(name: str) -> str:
    """Without dashes, slashes and dots; letters of any script stay, for people who look."""
    return re.sub(r"\W", lambda found: "".join(f"%{b:02X}" for b in found[0].encode()), name)


# --- One epoch of one writer -----------------------------------------------------------------


class _Epoch:
    def __init__(self, number: int, begin: Callable[[int, str], _StagedFile]) -> None:
        self.number = number
        self.files: list[_StagedFile] = []
        self.open: dict[str, _StagedFile] = {}
        """By directory: those that still take rows."""
        self.under_way: list[Future[None]] = []
        self._begin = begin

    def file_of(self, directory: str) -> _StagedFile:
        if directory not in self.open:
            self.open[directory] = self._begin(len(self.files), directory)
            self.files.append(self.open[directory])
        return self.open[directory]

    def ended(self, directory: str) -> _StagedFile:
        return self.open.pop(directory)

    def discard(self) -> None:
        for file in self.files:
            file.discard()


class _StagedFile:
    """One file, made when there is something to put into it.

    Small batches are gathered, or a stream of tiny updates would make a row group of each.
    Owned by the loop thread until it is ended, by one background thread after that.
    """

    def __init__(
        self,
        place: Place,
        root: str,
        relative: str,
        directory: str,
        encoding: Encoding,
        schema: pa.Schema,
    ) -> None:
        self.relative = relative
        self.directory = directory
        """In which it is to be seen."""
        self.rows = 0
        self.size_bytes = 0
        """What has been written of it."""
        self._place = place
        self._path = f"{root}/{relative}"
        self._encoding = encoding
        self._schema = schema
        self._gathered: list[pa.RecordBatch] = []
        self.gathered_rows = 0
        self.gathered_bytes = 0
        self._draft: Draft | None = None
        self._encoder: Encoder | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        self._gathered.append(batch)
        self.rows += batch.num_rows
        self.gathered_rows += batch.num_rows
        self.gathered_bytes += batch.nbytes

    def finish(self) -> None:
        """Write the rest and make it durable."""
        try:
            if self._gathered:
                self.flush()
            if self._draft is not None and self._encoder is not None:
                with saying(self._path):
                    self._encoder.close()
                    self.size_bytes = self._draft.finish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Best effort: what stays behind is swept by the next attempt."""
        self._gathered = []
        if self._draft is not None:
            with suppress(OSError, ValueError, pa.ArrowException):
                if self._encoder is not None:
                    self._encoder.close()
            self._draft.discard()
            self._draft = self._encoder = None

    def flush(self) -> None:
        table = pa.Table.from_batches(self._gathered, self._schema)
        with saying(self._path):
            if self._draft is None or self._encoder is None:
                self._draft = self._place.draft(self._path)
                self._encoder = self._encoding.open(self._draft.file, self._schema)
            self._encoder.write_table(table)
            self.size_bytes = self._draft.file.tell()
        self._gathered = []
        self.gathered_rows = self.gathered_bytes = 0


@contextmanager
def saying(path: str) -> Iterator[None]:
    """Turn what the system says into one sentence with the path and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path} ({error.strerror or error}): make room or correct the rights,"
            " the last completed checkpoint is untouched"
        ) from error
