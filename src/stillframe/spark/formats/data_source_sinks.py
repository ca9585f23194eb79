"""Sinks that are Python data sources of Spark's: `streamWriter`, in its row and its Arrow form.

Theory of operation
-------------------
Spark calls `write` in a task with the rows of a micro-batch, and `commit` on the driver with what
all tasks have returned. Here `write` is called in a slot when the barrier has come, with the rows
of the epoch, and its message is what the sink has prepared. It is in the checkpoint, and `commit`
is called on the driver when that is complete. The batch id is the checkpoint's number: it never
goes back, not even when an older checkpoint is restored.

A message is also noted in a file beside the checkpoints. What an attempt has left there that no
checkpoint holds was never committed, and never will be: `abort` is called with it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import re
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.errors import PySparkNotImplementedError
from pyspark.sql import Row
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkGuarantee,
    SinkWriter,
    Staging,
    committables_of,
)
from stillframe.config import parse_flag
from stillframe.connectors.transactional import required_staging
from stillframe.errors import BuildError, UserCodeError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.json_values import JsonObject, json_flaw
from stillframe.options import Options
from stillframe.spark.formats.data_sources import (
    described,
    made_data_source,
    public_options,
    revealed,
)
from stillframe.spark.types import from_arrow_schema
from stillframe.user_code import shown

log = logging.getLogger("stillframe")

OPAQUE = "opaqueCommitMessages"
GUARANTEE = "deliveryGuarantee"
_MESSAGE_BYTES_MAX = 1 << 20
_IN_MEMORY_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class PythonSinkFormat:
    """Makes sinks of a class of the user's, as `writeStream.format(...)` has named or given it."""

    option_names: ClassVar[None] = None
    secret_options: ClassVar[tuple[str, ...]] = ()

    kind: type[DataSource]

    def from_options(self, options: Options, schema: pa.Schema) -> Sink:
        guarantee = options.get(GUARANTEE, "at-least-once").lower()
        if guarantee not in ("at-least-once", "exactly-once"):
            raise BuildError(
                f"option {GUARANTEE} is at-least-once, or exactly-once for a writer whose commit"
                f" may come twice with the same batchId, not {guarantee!r}"
            )
        ours = (OPAQUE.lower(), GUARANTEE.lower())
        given = {k: v for k, v in revealed(options).items() if k.lower() not in ours}
        sink = PythonSink(
            made_data_source(self.kind, given),
            self.kind.name(),
            from_arrow_schema(schema),
            public_options(given),
            cast(SinkGuarantee, guarantee),
            parse_flag(OPAQUE, options.get(OPAQUE, "false")),
        )
        sink.writer()  # refuses one that writes no streams, before anything starts
        return sink


@dataclass(frozen=True)
class PythonSink(Sink):
    """One that a Python data source writes."""

    commits_at_coordinator: ClassVar[bool] = True

    data_source: DataSource = field(compare=False, repr=False)
    name: str
    columns: StructType
    options: tuple[tuple[str, str], ...]
    guarantee: SinkGuarantee = "at-least-once"
    keeps_opaque: bool = False
    is_whole: bool = False

    def of_mode(self, *, is_whole: bool) -> PythonSink:
        """The same; `is_whole`: every epoch overwrites what was written, in complete mode."""
        return replace(self, is_whole=is_whole)

    @property
    def weakness(self) -> str | None:  # type: ignore[override]
        if self.guarantee == "exactly-once":
            return None
        return "may be given its last batch again after a failure, with the same batchId"

    def writer(self) -> DataSourceStreamWriter:
        try:
            writer = self.data_source.streamWriter(self.columns, self.is_whole)
        except PySparkNotImplementedError:
            raise BuildError(
                f"the data source {self.name} has no streamWriter: write one, or use foreachBatch"
            ) from None
        if not isinstance(writer, DataSourceStreamWriter):
            raise BuildError(
                f"streamWriter of the data source {self.name} returned {shown(writer)}: return a"
                " DataSourceStreamWriter or a DataSourceStreamArrowWriter"
            )
        return writer

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _EpochWriter(self, context)

    def open_committer(self, context: CommitterContext) -> Committer:
        return _MessageCommitter(self, context)

    def describe(self) -> str:
        return described(self.name, self.options)


# --- In the slot -------------------------------------------------------------------------------


class _Gathered:
    """The rows of an epoch: in memory, or in a file that nobody else sees if they are many."""

    def __init__(self, schema: pa.Schema) -> None:
        self._file: Any = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES_MAX)  # noqa: SIM115
        self._stream = pa.ipc.new_stream(self._file, schema)

    def add(self, batch: pa.RecordBatch) -> None:
        self._stream.write_batch(batch)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of them; once."""
        self._stream.close()
        self._file.seek(0)
        with pa.ipc.open_stream(self._file) as stream:
            yield from stream

    def close(self) -> None:
        self._file.close()


class _EpochWriter(SinkWriter):
    def __init__(self, sink: PythonSink, context: SinkContext) -> None:
        self._sink = sink
        self._staging = required_staging(context.staging, sink)
        directory = self._staging.directory(context.uid)
        self._prefix = f"{directory}/{context.attempt}-{context.subtask}-{secrets.token_hex(4)}"
        self._gathered: _Gathered | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._gathered = self._gathered or _Gathered(batch.schema)
            self._gathered.add(batch)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        ended, self._gathered = self._gathered, None
        return lambda: [] if ended is None else [self._prepared(ended, checkpoint_id)]

    def _prepared(self, ended: _Gathered, checkpoint_id: CheckpointId) -> Committable:
        try:
            writer = self._sink.writer()
            message = writer.write(cast(Any, _as_wanted(writer, ended, self._sink.columns)))
        finally:
            ended.close()
        if not isinstance(message, WriterCommitMessage):
            raise UserCodeError(
                f"write of the {self._sink.describe()} returned {shown(message)}: return a"
                " WriterCommitMessage"
            )
        told = _told(message, self._sink)
        return {"message": told, "note": self._noted(told, checkpoint_id)}

    def _noted(self, told: JsonObject, checkpoint_id: CheckpointId) -> str:
        """All that `abort` needs; the name says what a damaged file is known by."""
        content = json.dumps(told).encode()
        name = f"{self._prefix}-{checkpoint_id}.{len(content)}.{zlib.crc32(content)}.message"
        self._staging.write(name, [pa.py_buffer(content)])
        return name

    def close(self) -> None:
        if self._gathered is not None:
            self._gathered.close()


def _as_wanted(
    writer: DataSourceStreamWriter, gathered: _Gathered, columns: StructType
) -> Iterator[pa.RecordBatch] | Iterator[Row]:
    # By name: the class is not there before 4.1.
    if any(each.__name__ == "DataSourceStreamArrowWriter" for each in type(writer).__mro__):
        return gathered.batches()
    return rows_of(gathered.batches(), columns)


def rows_of(batches: Iterator[pa.RecordBatch], columns: StructType) -> Iterator[Row]:
    """As Spark gives them to Python."""
    for batch in batches:
        table = pa.Table.from_batches([batch])
        yield from ArrowTableToRowsConversion.convert(table, columns)


# --- Messages ----------------------------------------------------------------------------------


def _told(message: WriterCommitMessage, sink: PythonSink) -> JsonObject:
    """As it is kept: the fields of a dataclass, or nothing of one that has none."""
    kind: Any = type(message)
    attributes = set(getattr(message, "__dict__", ()))
    flaw: str | None = "is no dataclass"
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        fields = {each.name: getattr(message, each.name) for each in dataclasses.fields(kind)}
        flaw = json_flaw(fields, _MESSAGE_BYTES_MAX)
    elif not attributes:
        flaw = None
    if attributes - set(fields):
        flaw = flaw or "has attributes that are no fields"
    if flaw is None:
        return {"class": _class_name(kind), "fields": fields}
    if sink.keeps_opaque:
        pickled: bytes = cloudpickle.dumps(message)  # type: ignore[no-untyped-call]
        return {"pickled": base64.b64encode(pickled).decode()}
    raise UserCodeError(
        f"the commit message {kind.__name__} of the {sink.describe()} is kept in checkpoints as"
        f" JSON, but it {flaw.partition(':')[0]}: make it a dataclass of texts, numbers, lists and"
        f" dicts, or set option {OPAQUE}=true, and it is pickled"
    )


def _remade(told: JsonObject, sink: PythonSink) -> WriterCommitMessage:
    if "pickled" in told:
        if not sink.keeps_opaque:
            raise UserCodeError(
                f"a commit message of the {sink.describe()} was pickled, and nothing is unpickled"
                f" unasked: set option {OPAQUE}=true"
            )
        loaded = cloudpickle.loads(base64.b64decode(str(told["pickled"])))
        return cast(WriterCommitMessage, loaded)
    kind = _known_classes().get(str(told["class"]))
    if kind is None:
        raise UserCodeError(
            f"a commit message of the {sink.describe()} is a {told['class']}, which is not known"
            " here: define the class, or import its module, before the job is started"
        )
    message = object.__new__(kind)
    for name, value in cast(JsonObject, told["fields"]).items():
        object.__setattr__(message, name, value)
    return message


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known_classes() -> dict[str, type[WriterCommitMessage]]:
    """Those that this process has defined; of two with one name, the newer one."""
    found: dict[str, type[WriterCommitMessage]] = {}
    left = [WriterCommitMessage]
    while left:
        kind = left.pop(0)
        found[_class_name(kind)] = kind
        left += kind.__subclasses__()
    return found


# --- On the driver -----------------------------------------------------------------------------


class _MessageCommitter(Committer):
    def __init__(self, sink: PythonSink, context: CommitterContext) -> None:
        self._sink = sink
        self._given_staging = context.staging

    @property
    def _staging(self) -> Staging:
        return required_staging(self._given_staging, self._sink)

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        committables = committables_of(prepared)
        if not committables:
            return  # as in Spark there is no batch without rows
        messages = [_remade(cast(JsonObject, each["message"]), self._sink) for each in committables]
        self._sink.writer().commit(list(messages), prepared[0].mark.checkpoint_id)
        for each in committables:
            self._staging.delete(str(each["note"]))

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        if self._given_staging is None:
            return
        kept = {str(each["note"]) for each in keep}
        left: dict[int, list[JsonObject]] = {}
        for name in sorted(self._staging.names(self._staging.directory(uid)) - kept):
            found = re.search(r"/(\d+)-\d+-[0-9a-f]+-(\d+)\.(\d+)\.(\d+)\.message$", name)
            if found is not None and int(found[1]) < older_than:
                written: JsonObject = {
                    "name": name,
                    "length_bytes": int(found[3]),
                    "crc32": int(found[4]),
                }
                left.setdefault(int(found[2]), []).append(written)
        for batch_id, messages in left.items():
            self._abort(batch_id, messages)

    def _abort(self, batch_id: int, left: Sequence[JsonObject]) -> None:
        """What goes wrong is told only: the rows come again, whatever is left of these."""
        try:
            told = [json.loads(self._staging.read(each).to_pybytes()) for each in left]
            messages = [_remade(each, self._sink) for each in told]
            self._sink.writer().abort(list(messages), batch_id)
        except Exception as error:  # the user's code may raise anything
            log.warning(
                "abort of batch %d of the %s failed: %s", batch_id, self._sink.describe(), error
            )
        for each in left:
            self._staging.delete(str(each["name"]))
