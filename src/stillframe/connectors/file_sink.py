"""Parquet or JSON-lines files, committed in two phases: staged, then renamed into sight.

Theory of operation. A writer stages each epoch in `<path>/_stillframe/staging/`, which Spark and
pyarrow do not read because of the underscore. At the barrier the file is closed and made durable
in the background; its name is the committable. When the checkpoint is complete the file is
renamed into `<path>/`, which happens at once or not at all and may be repeated.

Rules of this file:
1. A staged file's name says whose it is (job, operator, attempt, epoch of the writer, subtask);
   a published file's name says job, operator, checkpoint, subtask and attempt.
2. Both end in a few random letters, so that a job started afresh on an old directory can neither
   overwrite what is there nor mistake it for its own.
3. A file of an epoch that was not acknowledged is garbage: the next attempt sweeps it away.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, BinaryIO, Literal, Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stillframe.api.sinks import Committable, Committer, Sink, SinkContext, SinkWriter
from stillframe.connectors.files import local_path
from stillframe.errors import BuildError, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid

FileFormat = Literal["parquet", "json"]
STAGING = os.path.join("_stillframe", "staging")

_BUFFER_ROWS = 65_536
_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileSink(Sink):
    """A directory of files that Spark, pyarrow and others read as one table."""

    path: str
    format: FileFormat
    schema: pa.Schema

    def check(self) -> None:
        """Raise BuildError for what can be seen to be wrong on the driver, before anything runs."""
        path = local_path(self.path)
        if self.format not in ("parquet", "json"):
            raise BuildError(f"a file sink writes 'parquet' or 'json', not {self.format!r}")
        if os.path.lexists(path) and not os.path.isdir(path):
            raise BuildError(f"{path} is a file: a file sink needs a directory, give another path")

    def open_writer(self, context: SinkContext) -> SinkWriter:
        root = local_path(self.path)
        return StagingWriter(root, self.format, self.schema, context, publishes=True)

    def open_committer(self) -> Committer:
        return FileCommitter(local_path(self.path))

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
    ) -> None:
        self._root = root
        self._format = file_format
        self._schema = schema
        self._context = context
        self._publishes = publishes
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
        return _StagedFile(self._root, relative, self._format, self._schema)

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
    """Renames staged files into sight."""

    def __init__(self, root: str) -> None:
        self._root = root

    def commit(self, epoch: Epoch, committables: Sequence[Committable]) -> None:
        for committable in committables:
            self._publish(str(committable["staged"]), str(committable["target"]))
        if committables:
            with _saying(self._root):
                _sync_directory(self._root)

    def _publish(self, staged: str, target: str) -> None:
        with _saying(os.path.join(self._root, target)):
            try:
                os.rename(os.path.join(self._root, staged), os.path.join(self._root, target))
            except FileNotFoundError:
                self._refuse_lost(staged, target)

    def _refuse_lost(self, staged: str, target: str) -> None:
        """Published before, by us or by another who repeats the commit: fine. Gone: not fine."""
        if not os.path.exists(os.path.join(self._root, target)):
            raise StorageError(
                f"a completed checkpoint promised {target} in {self._root}, but neither it nor"
                f" {staged} exists: somebody removed it; bring it back, or restore an earlier"
                " checkpoint"
            )

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        sweep_staging(self._root, job, uid, older_than, keep)


def sweep_staging(
    root: str, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
) -> None:
    """Remove what older attempts of this job and operator staged, but not what `keep` names."""
    directory = os.path.join(root, STAGING)
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
        self, root: str, relative: str, file_format: FileFormat, schema: pa.Schema
    ) -> None:
        self.relative = relative
        self.rows = 0
        self._path = os.path.join(root, relative)
        self._format = file_format
        self._schema = schema
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
            self._encoder = _encoder(self._format, self._file, self._schema)
        return self._encoder


def _encoder(file_format: FileFormat, file: BinaryIO, schema: pa.Schema) -> _Encoder:
    if file_format == "parquet":
        # A dictionary of numbers that hardly repeat was measured to cost more than all the rest.
        words = [field.name for field in schema if pa.types.is_string(field.type)]
        encoder: _Encoder = pq.ParquetWriter(file, schema, use_dictionary=words or False)
        return encoder
    return _JsonLinesEncoder(file)


# --- JSON lines ------------------------------------------------------------------------------


class _JsonLinesEncoder:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write_table(self, table: pa.Table) -> None:
        for batch in table.combine_chunks().to_batches():
            self._file.write(json_lines(batch))

    def close(self) -> None:
        """Nothing is held back."""


def json_lines(batch: pa.RecordBatch) -> memoryview:
    """One JSON object per row, as Spark writes them, with microseconds; nulls are left out.

    Works on whole columns: each becomes a column of `,"name":value` texts, empty where the value
    is null; a row is its texts end to end, without the first comma. Only nested columns and
    strings that need escapes cost a loop over rows.
    """
    members = [
        pc.coalesce(_joined(f",{json.dumps(name, ensure_ascii=False)}:", texts), _large(""))
        for name, texts in zip(batch.schema.names, map(_json_texts, batch.columns), strict=True)
    ]
    lines = _joined("{", pc.utf8_slice_codeunits(_joined(*members), 1), "}\n")
    assert len(lines) == batch.num_rows
    # The texts of a string column lie end to end in one buffer: that is the file's content.
    _, offsets, data = lines.buffers()
    end = np.frombuffer(offsets, dtype=np.int64)[len(lines)]
    return memoryview(data)[:end] if end else memoryview(b"")


def _json_texts(column: pa.Array) -> pa.Array:
    """The JSON text of each value, as large strings; null stays null."""
    kind, types = column.type, pa.types
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return column.cast(pa.large_string())
    if types.is_floating(kind) and pc.all(pc.is_finite(column), min_count=0).as_py():
        return column.cast(pa.large_string())
    if types.is_timestamp(kind):
        return _in_quotes(_timestamp_texts(column))
    if types.is_date(kind):
        return _in_quotes(column.cast(pa.string()))
    if _is_plain_text(column):
        return _in_quotes(column)
    texts = (None if value is None else _json_text(value, kind) for value in column.to_pylist())
    return pa.array(texts, pa.large_string())


def _timestamp_texts(column: pa.Array) -> pa.Array:
    # As a time without a zone, which is written in UTC: strftime, and the cast of a time with a
    # zone, were measured forty times slower.
    in_utc = column.cast(pa.timestamp("us", tz="UTC" if column.type.tz else None))
    texts = in_utc.view(pa.timestamp("us")).cast(pa.large_string())
    with_t = pc.utf8_replace_slice(texts, start=10, stop=11, replacement="T")
    return _joined(with_t, "Z") if column.type.tz else with_t


def _is_plain_text(column: pa.Array) -> bool:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return False
    escaped = pc.match_substring_regex(column, r'["\\\x00-\x1f]')
    return not pc.any(escaped, min_count=0).as_py()


def _in_quotes(texts: pa.Array) -> pa.Array:
    return _joined('"', texts.cast(pa.large_string()), '"')


def _joined(*parts: str | pa.Array) -> pa.Array:
    """The parts of each row end to end; null where one of them is. All are large strings."""
    large = [_large(part) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*large, _large(""))


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _json_text(value: object, kind: pa.DataType) -> str:
    return json.dumps(_plain(value, kind), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any, kind: pa.DataType) -> object:
    """A Python value as pyarrow gives it, made of what JSON has; Spark's choices throughout."""
    types = pa.types
    if value is None:
        return None
    if types.is_struct(kind):
        parts = {field.name: _plain(value[field.name], field.type) for field in kind}
        return {name: part for name, part in parts.items() if part is not None}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    if types.is_map(kind):
        return {str(key): _plain(part, kind.item_type) for key, part in value}
    return _plain_leaf(value)


def _plain_leaf(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case float():
            return value if math.isfinite(value) else _name_of(value)
        case Decimal():
            # Only inside nested columns; json has no way to write one exactly as a number.
            return float(value)
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case _:
            return value


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


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
