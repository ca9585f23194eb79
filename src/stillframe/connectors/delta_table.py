"""Delta tables as sinks, by `deltalake`: the mark is an application transaction of Delta's log.

An entry with a `txn` of the same application is refused if another came since the table was read:
Delta sees to it that of two committers one fails. It then looks again.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stillframe.config import parse_flag
from stillframe.connectors.table_columns import Partition, parted
from stillframe.connectors.table_options import (
    in_one_line,
    local_or_none,
    made_durable,
    partition_option,
    refuse_type,
    unreachable_in_words,
)
from stillframe.connectors.table_sink import OpenTable, TableSink
from stillframe.errors import BuildError, DataError, Unavailable
from stillframe.ids import CheckpointId, Mark, Writer
from stillframe.json_values import JsonObject
from stillframe.options import Options
from stillframe.secrets import Secret
from stillframe.storage.places import Place, address_of, place_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

DELTA_OPTIONS = ("path", "storage.*", "createTable", "partitionBy")
_KNOWN_FEATURES = frozenset(
    {
        "appendOnly", "changeDataFeed", "checkConstraints", "deletionVectors", "domainMetadata",
        "generatedColumns", "invariants", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck",
    }
)  # fmt: skip
"""Features of a table that a writer who only adds files has to know, and does."""
_AS_HADOOP_SAYS = {
    "endpoint": "endpoint",
    "endpoint_url": "endpoint",
    "access_key_id": "access.key",
    "secret_access_key": "secret.key",
    "session_token": "session.token",
    "token": "session.token",
    "region": "endpoint.region",
    "default_region": "endpoint.region",
    "timeout": "connection.request.timeout",
}
_ONLY_OF_LIBRARY = re.compile(
    r"allow_http|max_retries|retry_timeout|backoff_config\..*|connect_timeout|conditional_put"
    r"|s3_(locking_provider|allow_unsafe_rename)|dynamo.*|endpoint_url_dynamodb"
)
"""Options that do not say how a data file is put."""
_LONG_TEXT = 32
_COLUMNS_WITH_STATISTICS_MAX = 32


def delta_from_options(options: Options, schema: pa.Schema) -> DeltaSink:
    """What `writeStream.format("delta").option(…)` asks for."""
    path = options["path"]
    path = local_or_none(path) or path
    partition_by = partition_option(options, schema)
    for field in schema:
        refuse_type(field)
    if partition_by and len(partition_by) == len(schema):
        raise BuildError("partitionBy names all columns: leave one for the data files")
    return DeltaSink(
        path,
        schema,
        partition_by,
        parse_flag("createTable", options.get("createTable", "false")),
        tuple(sorted(options.below("storage.").items())),
    )


@dataclass(frozen=True)
class DeltaSink(TableSink):
    path: str
    schema: pa.Schema
    partition_by: tuple[str, ...] | None = None
    creates: bool = False
    storage: tuple[tuple[str, str | Secret], ...] = ()

    @property
    def storage_options(self) -> dict[str, str]:
        return {
            name: value.reveal() if isinstance(value, Secret) else value
            for name, value in self.storage
        }

    def open_table(self) -> OpenTable | None:
        deltalake = _library()
        with _said(self):
            try:
                table = deltalake.DeltaTable(self.path, storage_options=self.storage_options)
            except deltalake.exceptions.TableNotFoundError:
                return None
        return OpenDelta(self, table)

    def create_table(self) -> None:
        deltalake = _library()
        with _said(self):
            deltalake.DeltaTable.create(
                self.path,
                deltalake.Schema.from_arrow(self.schema),
                mode="ignore",
                partition_by=list(self.partition_by or ()),
                storage_options=self.storage_options,
            )

    def mark_in_words(self, writer: Writer) -> str:
        return f"application transaction {_app_id(writer)} of the table's log"

    def describe(self) -> str:
        return f"Delta table {self.path}"


def _library() -> Any:
    try:
        importlib.import_module("deltalake.exceptions")
        return importlib.import_module("deltalake")
    except ImportError as error:
        raise BuildError(
            f"the sink delta needs the package deltalake ({error}): pip install"
            " 'stillframe[delta]', on the executors too"
        ) from None


@contextmanager
def _said(sink: DeltaSink) -> Iterator[None]:
    """What deltalake raises, as one of ours."""
    exceptions = _library().exceptions
    try:
        yield
    except exceptions.CommitFailedError as error:
        said = f"{sink.describe()} was changed at the same time ({in_one_line(error)})"
        raise Unavailable(said) from None
    except exceptions.TableNotFoundError:
        raise
    except OSError as error:
        raise Unavailable(unreachable_in_words(sink.describe(), error)) from None
    except (exceptions.DeltaError, ValueError) as error:
        raise DataError(f"{sink.describe()} cannot be used: {in_one_line(error)}") from None


def _app_id(writer: Writer) -> str:
    return f"stillframe/{writer}"


class OpenDelta(OpenTable):
    def __init__(self, sink: DeltaSink, table: DeltaTable) -> None:
        self._sink = sink
        self._delta = table
        metadata = table.metadata()
        self._refuse_unknown(metadata.configuration)
        self.schema = pa.schema(table.schema().to_arrow())
        self.partitions = tuple(metadata.partition_columns)

    def _refuse_unknown(self, configuration: Mapping[str, str]) -> None:
        """What deltalake would see to if it wrote the files: they are ours."""
        protocol = self._delta.protocol()
        unknown = set(protocol.writer_features or ()) - _KNOWN_FEATURES
        unknown |= {name for name in configuration if name.startswith("delta.constraints.")}
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            unknown.add("columnMapping")
        for field in self._delta.schema().fields:
            of_writers = ("delta.invariants", "delta.generationExpression", "delta.identity")
            unknown |= {name for name in field.metadata if name.startswith(of_writers)}
        if unknown:
            raise DataError(
                f"{self._sink.describe()} asks of whoever writes to it what Stillframe does not do"
                f" ({', '.join(sorted(unknown))}): write to it with Spark, in foreachBatch"
            )

    def split(self, rows: pa.Table) -> Sequence[tuple[Partition, pa.Table]]:
        columns = [rows.column(name) for name in self.partitions]
        return parted(rows.drop_columns(list(self.partitions)), columns)

    def describe_file(
        self, name: str, partition: Partition, rows: pa.Table, written: pq.FileMetaData
    ) -> JsonObject:
        values = {
            column: _partition_text(value)
            for column, value in zip(self.partitions, partition, strict=True)
        }
        return {"partition": values, "statistics": _statistics(rows)}

    @property
    def _directory(self) -> str | None:
        return local_or_none(self._sink.path)

    def _handler(self) -> Any:
        fs = importlib.import_module("deltalake.fs")
        # Around it is a file of pyarrow's, which deltalake 1.6 does not take bytes from.
        return fs.DeltaStorageHandler(self._sink.path, self._sink.storage_options)._handler

    @cached_property
    def _bucket(self) -> Place | None:
        """Of S3 our own way there: until deltalake's has an answer, no thread of the process runs.

        Where it is told something that ours does not know, it has to be deltalake's.
        """
        settings = s3_settings(self._sink.path, self._sink.storage_options)
        return None if settings is None else place_of(address_of(self._sink.path), settings)

    def put(self, name: str, content: pa.Buffer) -> None:
        if self._directory is not None:
            return made_durable(os.path.join(self._directory, name), content)
        if self._bucket is not None:
            return _put(self._bucket, f"{address_of(self._sink.path)}/{name}", content)
        stream = self._handler().open_output_stream(name)
        stream.write(content.to_pybytes())
        stream.close()

    def delete(self, name: str) -> None:
        if self._bucket is not None:
            self._bucket.delete(f"{address_of(self._sink.path)}/{name}")
        else:
            self._handler().delete_file(name)

    def has(self, name: str) -> bool:
        [found] = self._handler().get_file_info([name])
        return bool(found.is_file)

    def mark(self, writer: Writer) -> CheckpointId | None:
        found = self._delta.transaction_version(_app_id(writer))
        return None if found is None else CheckpointId(found)

    def commit(self, mark: Mark, files: Sequence[JsonObject]) -> None:
        deltalake = _library()
        action = importlib.import_module("deltalake.transaction").AddAction
        added = [
            action(
                path=str(file["name"]),
                size=file["bytes"],
                partition_values=cast(Mapping[str, str | None], file["partition"]),
                modification_time=file["at_ms"],
                data_change=True,
                stats=json.dumps(file["statistics"]),
            )
            for file in files
        ]
        transaction = deltalake.Transaction(_app_id(mark.writer), mark.checkpoint_id)
        with _said(self._sink):
            self._delta.create_write_transaction(
                added,
                mode="append",
                schema=self._delta.schema(),
                partition_by=list(self.partitions),
                commit_properties=deltalake.CommitProperties(app_transactions=[transaction]),
            )

    def in_log(self, names: Set[str]) -> Set[str]:
        return names & {uri.rpartition("/")[2] for uri in self._delta.file_uris()}


def _put(place: Place, path: str, content: pa.Buffer) -> None:
    draft = place.draft(path)
    try:
        draft.file.write(content)
        draft.finish()
    except BaseException:
        draft.discard()
        raise


def s3_settings(path: str, options: Mapping[str, str]) -> dict[str, str] | None:
    """How our own client reaches the bucket; None: there is no bucket, or it cannot be told."""
    if not path.startswith(("s3://", "s3a://")):
        return None
    found = {}
    for name, text in options.items():
        known = name.lower().removeprefix("aws_")
        if known in _AS_HADOOP_SAYS:
            found[f"fs.s3a.{_AS_HADOOP_SAYS[known]}"] = text
        elif known == "virtual_hosted_style_request":
            found["fs.s3a.path.style.access"] = "false" if text.lower() == "true" else "true"
        elif not _ONLY_OF_LIBRARY.fullmatch(known):
            return None
    has_keys = "fs.s3a.access.key" in found or "AWS_ACCESS_KEY_ID" in os.environ
    return found if has_keys or not _has_profiles() else None


def _has_profiles() -> bool:
    """Whether there may be keys in files of Amazon's, which deltalake reads and our client not."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(os.path.exists(os.path.expanduser(each)) for each in files)


# --- As Delta's log has values ---------------------------------------------------------------


def _partition_text(value: object) -> str | None:
    """An empty text is a null there."""
    match value:
        case None | "":
            return None
        case bool():
            return str(value).lower()
        case datetime.datetime():
            return f"{value.astimezone(datetime.UTC) if value.tzinfo else value:%F %T.%f}"
        case bytes():
            raise DataError("a Delta table cannot be partitioned by a binary column")
        case _:
            return str(value)


def _statistics(rows: pa.Table) -> JsonObject:
    """What lets a reader skip the file."""
    nulls: dict[str, Any] = {}
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for field in list(rows.schema)[:_COLUMNS_WITH_STATISTICS_MAX]:
        column = rows.column(field.name)
        if pa.types.is_nested(field.type):
            continue
        nulls[field.name] = column.null_count
        if _is_compared(field.type):
            ends = pc.min_max(column).as_py()
            shown = [_shown(ends[end]) for end in ("min", "max")]
            if None not in shown:
                least[field.name], most[field.name] = shown
    return {"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}


def _is_compared(type_: pa.DataType) -> bool:
    types = pa.types
    of = (types.is_integer, types.is_floating, types.is_string, types.is_date32, types.is_timestamp)
    return any(each(type_) for each in of)


def _shown(value: Any) -> Any:
    """None: it is better left out."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case str():
            return value if len(value) <= _LONG_TEXT else None
        case datetime.datetime():
            at = value.astimezone(datetime.UTC) if value.tzinfo else value
            return f"{at:%FT%T.%f}{'Z' if value.tzinfo else ''}"
        case datetime.date():
            return value.isoformat()
        case _:
            return value
