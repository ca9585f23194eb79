"""Iceberg tables as sinks, by `pyiceberg`: the mark is a property of the table.

It is set in the same transaction as the files are added. A snapshot's own properties would go when
the snapshot expires.

What shuts a late committer out is that Iceberg's commit requires the branch to be where it was when
the table was opened. So every mark comes with a snapshot, one without files too: properties alone
require nothing. And pyiceberg is told not to repeat a commit by itself: it would do so on top of
whatever has come meanwhile, our own epoch among it.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
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
from stillframe.ids import CheckpointId, Mark, OperatorUid, Writer, incarnation_in
from stillframe.json_values import JsonObject
from stillframe.options import Options
from stillframe.secrets import Secret

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

ICEBERG_OPTIONS = ("table", "catalog", "catalog.*", "createTable", "partitionBy")
_MARKS = "stillframe.mark."
_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def iceberg_from_options(options: Options, schema: pa.Schema) -> IcebergSink:
    """What `writeStream.format("iceberg").option(…)` asks for."""
    table = options["table"]
    if "." not in table.strip("."):
        raise BuildError(
            f"option table is {table!r}: name a table with its namespace, as shop.views"
        )
    for field in schema:
        refuse_type(field)
    return IcebergSink(
        table,
        schema,
        options.get("catalog", "default"),
        tuple(sorted(options.below("catalog.").items())),
        partition_option(options, schema),
        parse_flag("createTable", options.get("createTable", "false")),
    )


@dataclass(frozen=True)
class IcebergSink(TableSink):
    table: str
    schema: pa.Schema
    catalog: str = "default"
    properties: tuple[tuple[str, str | Secret], ...] = ()
    """For pyiceberg's `load_catalog`, with what its own files of settings say of this catalog."""
    partition_by: tuple[str, ...] | None = None
    creates: bool = False

    def load_catalog(self) -> Catalog:
        given = {
            name: value.reveal() if isinstance(value, Secret) else value
            for name, value in self.properties
        }
        module = _library("catalog")
        password = given.pop("password", None)
        if password is not None and "uri" in given:
            url = importlib.import_module("sqlalchemy").make_url(given["uri"])
            given["uri"] = url.set(password=password).render_as_string(hide_password=False)
        return cast("Catalog", module.load_catalog(self.catalog, **given))

    def open_table(self) -> OpenTable | None:
        with _said(self):
            catalog = self.load_catalog()
            try:
                return OpenIceberg(self, catalog, catalog.load_table(self.table))
            except _library("exceptions").NoSuchTableError:
                return None
            finally:
                catalog.close()

    def create_table(self) -> None:
        with _said(self):
            catalog = self.load_catalog()
            try:
                catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
                with (
                    catalog.create_table_transaction(self.table, self.schema) as transaction,
                    transaction.update_spec() as spec,
                ):
                    for name in self.partition_by or ():
                        spec.add_identity(name)
            except _library("exceptions").TableAlreadyExistsError:
                pass
            finally:
                catalog.close()

    def mark_in_words(self, writer: Writer) -> str:
        return f"property {_property(writer)} of the table"

    def describe(self) -> str:
        return f"Iceberg table {self.table} of catalog {self.catalog}"


def _property(writer: Writer) -> str:
    return f"{_MARKS}{writer}"


def _library(module: str) -> Any:
    try:
        return importlib.import_module(f"pyiceberg.{module}")
    except ImportError as error:
        raise BuildError(
            f"the sink iceberg needs the package pyiceberg ({error}): pip install"
            " 'stillframe[iceberg]', on the executors too"
        ) from None


@contextmanager
def _said(sink: IcebergSink) -> Iterator[None]:
    """What pyiceberg and its clients raise, as one of ours."""
    known = _library("exceptions")
    try:
        yield
    except (DataError, BuildError, Unavailable):
        raise
    except (known.CommitFailedException, known.WaitingForLockException) as error:
        said = f"{sink.describe()} was changed at the same time ({in_one_line(error)})"
        raise Unavailable(said) from None
    except Exception as error:  # each catalog has errors of its client's
        if isinstance(error, _passing()):
            raise Unavailable(unreachable_in_words(sink.describe(), error)) from None
        said = f"{type(error).__name__}: {in_one_line(error)}"
        raise DataError(f"{sink.describe()} cannot be used: {said}") from None


def _passing() -> tuple[type[Exception], ...]:
    """What another try may mend."""
    known = _library("exceptions")
    found = [OSError, known.CommitStateUnknownException, known.ServerError]
    found += [known.ServiceUnavailableError, known.TooManyRequestsError]
    found += [known.AuthorizationExpiredError]
    with suppress(ImportError):  # it is needed by one kind of catalog only
        found.append(importlib.import_module("sqlalchemy.exc").OperationalError)
    return tuple(found)


class OpenIceberg(OpenTable):
    def __init__(self, sink: IcebergSink, catalog: Catalog, table: Table) -> None:
        self._sink = sink
        self._catalog = catalog
        self._table = table
        self.schema = _library("io.pyarrow").schema_to_pyarrow(table.schema())
        self.partitions = tuple(map(self._in_words, table.spec().fields))
        self._parting = list(map(self._parted_by, table.spec().fields))

    def _in_words(self, field: Any) -> str:
        name = self._table.schema().find_column_name(field.source_id)
        return str(name) if str(field.transform) == "identity" else f"{field.transform}({name})"

    def _parted_by(self, field: Any) -> tuple[str, Callable[[pa.ChunkedArray], pa.ChunkedArray]]:
        """A column, and what is made of it."""
        source = self._table.schema().find_field(field.source_id)
        if source.name not in self.schema.names:
            raise DataError(
                f"{self._sink.describe()} is partitioned by a part of a column, which Stillframe"
                " does not do: write to it with Spark, in foreachBatch"
            )
        return source.name, field.transform.pyarrow_transform(source.field_type)

    def split(self, rows: pa.Table) -> Sequence[tuple[Partition, pa.Table]]:
        return parted(rows, [made_of(rows[name]) for name, made_of in self._parting])

    def describe_file(
        self, name: str, partition: Partition, rows: pa.Table, written: pq.FileMetaData
    ) -> JsonObject:
        io, schema = _library("io.pyarrow"), self._table.schema()
        found = io.data_file_statistics_from_parquet_metadata(
            parquet_metadata=written,
            stats_columns=io.compute_statistics_plan(schema, self._table.properties),
            parquet_column_mapping=io.parquet_path_to_id_mapping(schema),
        ).to_serialized_dict()
        return {
            "location": self._location(name),
            "spec": self._table.spec().spec_id,
            "partition": self._encoded(partition),
            "splits": found["split_offsets"],
            "counts": {each: _by_text(found[each]) for each in _COUNTS},
            "bounds": {
                each: {str(id): _text(value) for id, value in found[each].items()}
                for each in _BOUNDS
            },
        }

    def _encoded(self, partition: Partition) -> list[str | None]:
        """As Iceberg has single values."""
        represent = _library("partitioning").partition_record_value
        to_bytes, schema = _library("conversions").to_bytes, self._table.schema()
        fields = zip(self._table.spec().fields, self._partition_types, partition, strict=True)
        return [
            None if value is None else _text(to_bytes(type_, represent(field, value, schema)))
            for field, type_, value in fields
        ]

    @cached_property
    def _partition_types(self) -> list[Any]:
        fields = self._table.spec().partition_type(self._table.schema()).fields
        return [field.field_type for field in fields]

    def _location(self, name: str) -> str:
        return self._table.location_provider().new_data_location(name)

    def put(self, name: str, content: pa.Buffer) -> None:
        location = self._location(name)
        path = local_or_none(location)
        if path is not None:
            return made_durable(path, content)
        # Names are never used twice: nobody has to look first.
        with self._table.io.new_output(location).create(overwrite=True) as stream:
            stream.write(content.to_pybytes())

    def delete(self, name: str) -> None:
        self._table.io.delete(self._location(name))

    def has(self, name: str) -> bool:
        return bool(self._table.io.new_input(self._location(name)).exists())

    def mark(self, writer: Writer) -> CheckpointId | None:
        found = self._table.properties.get(_property(writer))
        return None if found is None else CheckpointId(int(found))

    def commit(self, mark: Mark, files: Sequence[JsonObject]) -> None:
        self._refuse_other_partitions(files)
        with self._transaction() as transaction:
            transaction.set_properties({_property(mark.writer): str(mark.checkpoint_id)})
            with transaction.update_snapshot().fast_append() as snapshot:
                for file in files:
                    snapshot.append_data_file(self._data_file(file))

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        # Of this copy, and not of the table.
        self._table.metadata.properties["commit.retry.num-retries"] = "0"
        try:
            with _said(self._sink), self._table.transaction() as transaction:
                yield transaction
        finally:
            self._catalog.close()

    def _refuse_other_partitions(self, files: Sequence[JsonObject]) -> None:
        now = self._table.spec().spec_id
        if any(file["spec"] != now for file in files):
            raise DataError(
                f"{self._sink.describe()} is partitioned in another way than when its data files"
                " were written: give it the partitions back that it had, start the job, and change"
                " them when it has stopped with a savepoint"
            )

    def _data_file(self, file: JsonObject) -> DataFile:
        manifest, conversions = _library("manifest"), _library("conversions")
        counts = cast(Mapping[str, Mapping[str, int]], file["counts"])
        bounds = cast(Mapping[str, Mapping[str, str]], file["bounds"])
        partition = [
            None if text is None else conversions.from_bytes(type_, base64.b64decode(text))
            for type_, text in zip(
                self._partition_types, cast(list[str | None], file["partition"]), strict=True
            )
        ]
        return cast(
            "DataFile",
            manifest.DataFile.from_args(
                content=manifest.DataFileContent.DATA,
                file_path=file["location"],
                file_format=manifest.FileFormat.PARQUET,
                partition=_library("typedef").Record(*partition),
                record_count=file["rows"],
                file_size_in_bytes=file["bytes"],
                sort_order_id=None,
                spec_id=file["spec"],
                equality_ids=None,
                key_metadata=None,
                split_offsets=file["splits"],
                **{each: _by_id(counts[each]) for each in _COUNTS},
                **{
                    each: {int(id): base64.b64decode(text) for id, text in bounds[each].items()}
                    for each in _BOUNDS
                },
            ),
        )

    def in_log(self, names: Set[str]) -> Set[str]:
        """Of all snapshots: somebody may want to go back to one."""
        io, manifests = self._table.io, {}
        for snapshot in self._table.metadata.snapshots:
            manifests.update({each.manifest_path: each for each in snapshot.manifests(io)})
        committed = {
            entry.data_file.file_path
            for manifest in manifests.values()
            for entry in manifest.fetch_manifest_entry(io)
        }
        return {name for name in names if self._location(name) in committed}

    def forget(self, writer: Writer) -> None:
        with self._transaction() as transaction:
            transaction.remove_properties(_property(writer))

    def incarnations(self, uid: OperatorUid) -> Set[str]:
        marks = [name for name in self._table.properties if name.startswith(_MARKS)]
        found = (incarnation_in(mark.removeprefix(_MARKS), uid) for mark in marks)
        return {each for each in found if each is not None}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _by_text(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(id): count for id, count in counts.items()}


def _by_id(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(id): count for id, count in counts.items()}
