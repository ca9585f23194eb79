"""Parquet or JSON-lines files, committed in two phases: staged, then renamed into sight.

Theory of operation. A writer stages each epoch in `<path>/_stillframe/staging/`, which Spark and
pyarrow do not read because of the underscore. At the barrier the file is closed and made durable
in the background; its name is the committable. When the checkpoint is complete the file is
renamed into `<path>/`, which happens at once or not at all and may be repeated. Then a receipt, an
empty file of the staged one's name, is put into `<path>/_stillframe/receipts/`. It stays until a
completed checkpoint no longer holds this commit: a consumer may take a published file away at once.

Rules of this file:
1. A staged file's name says whose it is (job, operator, attempt, epoch of the writer, subtask);
   a published file's name says job, operator, checkpoint, subtask and attempt.
2. Both end in a few random letters, so that a job started afresh on an old directory can neither
   overwrite what is there nor mistake it for its own.
3. A file of an epoch that was not acknowledged is garbage: the next attempt sweeps it away.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
    committables_of,
)
from stillframe.errors import BuildError, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.json_texts.writing import json_lines
from stillframe.storage.places import address_of, is_on_disk

FileFormat = Literal["parquet", "json"]
STAGING = os.path.join("_stillframe", "staging")
RECEIPTS = os.path.join("_stillframe", "receipts")

log = logging.getLogger("stillframe")

_BUFFER_ROWS = 65_536
_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileSink(Sink):
    """A directory of files that Spark, pyarrow and others read as one table."""

    path: str
    format: FileFormat
    schema: pa.Schema
    zone: str = "UTC"
    """In which times are written as JSON."""

    def check(self) -> None:
        """Raise BuildError for what can be seen to be wrong on the driver, before anything runs."""
        path = address_of(self.path)
        if not is_on_disk(path):
            raise BuildError(f"{path} is no directory of a disk: give one that all machines share")
        if self.format not in ("parquet", "json"):
            raise BuildError(f"a file sink writes 'parquet' or 'json', not {self.format!r}")
        for field in self.schema if self.format == "json" else ():
            if pa.types.is_duration(field.type):
                raise BuildError(
                    f"column {field.name} is an interval, which is not written as JSON: cast it to"
                    " a string or a number"
                )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise BuildError(f"{path} is a file: a file sink needs a directory, give another path")

    def open_writer(self, context: SinkContext) -> SinkWriter:
        root = address_of(self.path)
        return StagingWriter(
            root, self.format, self.schema, context, publishes=True, zone=self.zone
        )

    def open_committer(self, context: CommitterContext) -> Committer:
        return FileCommitter(address_of(self.path), context.accepts_missing)

    def describe(self) -> str:
        return f"{self.format} {self.path}"


class StagingWriter(SinkWriter):
    """Stages one file per epoch under `root`; an epoch without records makes none."""

    def __init__(
        self,
        root: str,
        file_format: FileFormat,
        schema: pa.Schema,
        context: SinkContext,
        *,
        publishes: bool,
        zone: str = "UTC",
    ) -> None:
        self._root = root
        self._format = file_format
        self._schema = schema
        self._context = context
        self._publishes = publishes
        self._zone = zone
        self._token = secrets.token_hex(4)
        self._epochs = 0
        with _saying(root):
            os.makedirs(os.path.join(root, STAGING), exist_ok=True)
        self._staged = self._next_file()
        self._rotated: dict[str, _StagedFile] = {}
        """Files whose background part has not begun: it takes its file out, or `close` does."""

    def write(self, batch: pa.RecordBatch) -> None:
        self._staged.append(batch)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        ended, self._staged = self._staged, self._next_file()
        self._rotated[ended.relative] = ended
        return lambda: self._prepare(ended.relative, checkpoint_id)

    def close(self) -> None:
        self._staged.discard()
        while self._rotated:
            with suppress(KeyError):  # a background part was quicker
                self._rotated.popitem()[1].discard()

    def _next_file(self) -> _StagedFile:
        who = self._context
        name = StagedName(who.job, who.uid, who.attempt, self._epochs, who.subtask, self._token)
        self._epochs += 1
        relative = os.path.join(STAGING, f"{name.text()}.{self._format}")
        return _StagedFile(self._root, relative, self._format, self._schema, self._zone)

    def _prepare(self, relative: str, checkpoint_id: CheckpointId) -> list[Committable]:
        ended = self._rotated.pop(relative, None)
        if ended is None:
            raise StorageError(f"{relative} was given up: its writer is closed, this is too late")
        size_bytes = ended.finish()
        if size_bytes is None:
            return []
        sync_directories(self._root)
        staged: Committable = {"staged": ended.relative, "rows": ended.rows, "bytes": size_bytes}
        return [{**staged, "target": self._target(checkpoint_id)} if self._publishes else staged]

    def _target(self, checkpoint_id: CheckpointId) -> str:
        who = self._context
        parts = [_quoted(who.job), _quoted(who.uid), checkpoint_id, who.subtask, who.attempt]
        return f"part-{'-'.join(map(str, parts))}-{self._token}.{self._format}"


class FileCommitter(Committer):
    """Renames staged files into sight, and notes that it did."""

    def __init__(self, root: str, accepts_missing: Collection[str] = ()) -> None:
        self._root = root
        self._accepts_missing = accepts_missing

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        committables = committables_of(prepared)
        if not committables:
            return
        missing = [each for each in committables if not self._publish(each)]
        refused = [each for each in missing if not self._is_accepted(each)]
        with _saying(self._root):
            # First: after a loss of power a receipt must not be all that is left.
            _sync_directory(self._root)
            self._write_receipts(each for each in committables if each not in refused)
        if refused:
            raise StorageError(_missing_in_words(self._root, refused))

    def forget(self, committables: Sequence[Committable]) -> None:
        for committable in committables:
            with suppress(OSError):  # the next sweep finds it
                os.unlink(self._receipt(committable))

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        for directory in (STAGING, RECEIPTS):
            sweep_staging(self._root, job, uid, older_than, keep, directory)

    def _publish(self, committable: Committable) -> bool:
        """Whether it is published: now, or before, by us or by another who repeats the commit."""
        staged, target = (
            os.path.join(self._root, str(committable[name])) for name in ("staged", "target")
        )
        with _saying(target):
            try:
                os.rename(staged, target)
            except FileNotFoundError:
                return os.path.exists(self._receipt(committable)) or os.path.exists(target)
            return True

    def _receipt(self, committable: Committable) -> str:
        name = os.path.basename(str(committable["staged"]))
        return os.path.join(self._root, RECEIPTS, name)

    def _write_receipts(self, published: Iterable[Committable]) -> None:
        directory = os.path.join(self._root, RECEIPTS)
        if not os.path.isdir(directory):
            os.makedirs(directory, exist_ok=True)
            _sync_directory(os.path.dirname(directory))
        for committable in published:
            with open(self._receipt(committable), "ab"):
                pass
        _sync_directory(directory)

    def _is_accepted(self, missing: Committable) -> bool:
        """Whether somebody has said, by name and number of rows, that the job goes on without."""
        if _named_with_rows(missing) not in self._accepts_missing:
            return False
        log.warning(
            "the job goes on without %s and its %s rows: acceptMissingOutput names it",
            missing["target"],
            missing["rows"],
        )
        return True


def _named_with_rows(committable: Committable) -> str:
    return f"{committable['target']}:{committable['rows']}"


def _missing_in_words(root: str, missing: Sequence[Committable]) -> str:
    first, others = missing[0], len(missing) - 1
    more, verb = (f" and {others} more", "are") if others else ("", "is")
    option = f"acceptMissingOutput={','.join(map(_named_with_rows, missing))}"
    return (
        f"output file {first['target']} ({first['rows']} rows){more} of a completed checkpoint"
        f" {verb} missing from {root}, and {first['staged']} is gone too: restore the file, or go"
        f" on without its rows: option {option}"
    )


def sweep_staging(
    root: str,
    job: str,
    uid: OperatorUid,
    older_than: Attempt,
    keep: Sequence[Committable],
    below: str = STAGING,
) -> None:
    """Remove what older attempts of this job and operator staged, but not what `keep` names."""
    directory = os.path.join(root, below)
    kept = {os.path.basename(str(committable["staged"])) for committable in keep}
    with _saying(directory):
        for file_name in os.listdir(directory) if os.path.isdir(directory) else []:
            name = StagedName.parse(file_name)
            if name is None or (name.job, name.uid) != (job, uid) or file_name in kept:
                continue
            if name.attempt < older_than:
                # Two sweeps may meet: the old driver's last and the new one's first.
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, file_name))


@dataclass(frozen=True, slots=True)
class StagedName:
    """What a staged file's name says."""

    job: str
    uid: str
    attempt: int
    writer_epoch: int
    """Counts the writer's files: which checkpoint will end the epoch is not known yet."""
    subtask: int
    token: str

    def text(self) -> str:
        parts = [_quoted(self.job), _quoted(self.uid), self.attempt, self.writer_epoch]
        return "-".join(map(str, [*parts, self.subtask, self.token]))

    @classmethod
    def parse(cls, file_name: str) -> StagedName | None:
        """None for a name that is not one of ours."""
        match = re.fullmatch(r"([^-]+)-([^-]+)-(\d+)-(\d+)-(\d+)-([0-9a-f]+)\.\w+", file_name)
        if match is None:
            return None
        job, uid, attempt, epoch, subtask, token = match.groups()
        return cls(unquote(job), unquote(uid), int(attempt), int(epoch), int(subtask), token)


def _quoted(name: str) -> str:
    """Without dashes, slashes and dots; letters of any script stay, for people who look."""
    return re.sub(r"\W", lambda found: "".join(f"%{b:02X}" for b in found[0].encode()), name)


# --- One staged file -------------------------------------------------------------------------


class _Encoder(Protocol):
    def write_table(self, table: pa.Table) -> None: ...

    def close(self) -> None: ...


class _StagedFile:
    """The file of one epoch, made when there is something to put into it.

    Small batches are gathered, or a stream of tiny updates would make a row group of each.
    Owned by the loop thread until the epoch is rotated, by one background thread after that.
    """

    def __init__(
        self, root: str, relative: str, file_format: FileFormat, schema: pa.Schema, zone: str
    ) -> None:
        self.relative = relative
        self.rows = 0
        self._path = os.path.join(root, relative)
        self._format = file_format
        self._schema = schema
        self._zone = zone
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._gathered_bytes = 0
        self._file: BinaryIO | None = None
        self._encoder: _Encoder | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if not batch.schema.equals(self._schema):
            batch = batch.cast(self._schema)
        self._gathered.append(batch)
        self._gathered_rows += batch.num_rows
        self._gathered_bytes += batch.nbytes
        if self._gathered_rows >= _BUFFER_ROWS or self._gathered_bytes >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> int | None:
        """Write the rest and make it durable; its size in bytes, or None if there is no file."""
        try:
            return self._finish()
        except BaseException:
            self.discard()
            raise

    def _finish(self) -> int | None:
        if self._gathered:
            self._flush()
        if self._file is None or self._encoder is None:
            return None
        with _saying(self._path), self._file as file:
            self._encoder.close()
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def discard(self) -> None:
        """Best effort: what stays behind is swept by the next attempt."""
        self._gathered = []
        if self._file is not None:
            with suppress(OSError, pa.ArrowException):
                if self._encoder is not None:
                    self._encoder.close()
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._path)
            self._file = self._encoder = None

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._gathered, self._schema)
        with _saying(self._path):
            self._opened().write_table(table)
        self.rows += table.num_rows
        self._gathered = []
        self._gathered_rows = self._gathered_bytes = 0

    def _opened(self) -> _Encoder:
        if self._encoder is None:
            self._file = open(self._path, "xb")  # noqa: SIM115 closed by finish or discard
            self._encoder = _encoder(self._format, self._file, self._schema, self._zone)
        return self._encoder


def _encoder(file_format: FileFormat, file: BinaryIO, schema: pa.Schema, zone: str) -> _Encoder:
    if file_format == "parquet":
        # A dictionary of numbers that hardly repeat was measured to cost more than all the rest.
        words = [field.name for field in schema if pa.types.is_string(field.type)]
        encoder: _Encoder = pq.ParquetWriter(file, schema, use_dictionary=words or False)
        return encoder
    return _JsonLinesEncoder(file, zone)


# --- JSON lines ------------------------------------------------------------------------------


class _JsonLinesEncoder:
    def __init__(self, file: BinaryIO, zone: str) -> None:
        self._file = file
        self._zone = zone

    def write_table(self, table: pa.Table) -> None:
        for batch in table.combine_chunks().to_batches():
            self._file.write(json_lines(batch, self._zone))

    def close(self) -> None:
        """Nothing is held back."""


# --- The file system -------------------------------------------------------------------------


def sync_directories(root: str) -> None:
    """Make the names under `root`'s staging directory, and the way there, durable."""
    with _saying(root):
        directory = os.path.join(root, STAGING)
        while True:
            _sync_directory(directory)
            if directory == os.path.dirname(root):
                return
            directory = os.path.dirname(directory)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _saying(path: str) -> Iterator[None]:
    """Turn what the system says into one sentence with the path and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path} ({error.strerror or error}): make room or correct the rights,"
            " the last completed checkpoint is untouched"
        ) from error
