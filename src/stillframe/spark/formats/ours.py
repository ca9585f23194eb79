"""Stillframe's own formats for `readStream` and `writeStream`, and the options of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from stillframe.api.sinks import Sink, SinkGuarantee
from stillframe.api.sources import Source
from stillframe.config import parse_duration_seconds, parse_flag
from stillframe.connectors.cleaning import Cleaning
from stillframe.connectors.csv_lines import CSV_OPTIONS, CsvSource, csv_from_options
from stillframe.connectors.database_options import SINK_OPTIONS as DATABASE_OPTIONS
from stillframe.connectors.database_options import WITHOUT_EFFECT
from stillframe.connectors.database_sink import (
    DatabaseSink,
    jdbc_from_options,
    mysql_from_options,
    postgres_from_options,
)
from stillframe.connectors.delta_table import DELTA_OPTIONS, DeltaSink, delta_from_options
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_encoders import FORMATS
from stillframe.connectors.file_options import FILE_SINK_OPTIONS
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.files import FileSource, Following
from stillframe.connectors.generate import (
    ClickSource,
    RateSource,
    clicks_from_options,
    rate_from_options,
)
from stillframe.connectors.iceberg_table import (
    ICEBERG_OPTIONS,
    IcebergSink,
    iceberg_from_options,
)
from stillframe.connectors.json_lines import JSON_OPTIONS, JsonLinesSource, json_from_options
from stillframe.connectors.kafka_options import SECRET_OPTIONS
from stillframe.connectors.kafka_sink import SINK_OPTIONS, KafkaSink, sink_from_options
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.connectors.orc import OrcSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.rate_micro_batch import (
    RateMicroBatchSource,
    rate_micro_batch_from_options,
)
from stillframe.connectors.socket import SocketSource, socket_from_options
from stillframe.connectors.staged import StagedSink
from stillframe.connectors.text_lines import (
    TEXT_OPTIONS,
    TEXT_SCHEMA,
    TextSource,
    text_from_options,
)
from stillframe.errors import BuildError
from stillframe.options import Options
from stillframe.secrets import Secret

_FILE_OPTIONS = (
    *("path", "followInterval", "maxFileAge", "recursiveFileLookup", "pathGlobFilter"),
    *("latestFirst", "cleanSource", "sourceArchiveDir", "fileNameOnly"),
    *("maxFilesPerTrigger", "maxBytesPerTrigger", "maxCachedFiles", "discardCachedInputRatio"),
)
log = logging.getLogger("stillframe")
_WITHOUT_EFFECT_ON_FILES = {
    "maxFilesPerTrigger": "records flow as they are read, no batch waits for them",
    "maxBytesPerTrigger": "records flow as they are read, no batch waits for them",
    "maxCachedFiles": "no list of files is kept between two listings",
    "discardCachedInputRatio": "no list of files is kept between two listings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFormat:
    """Says of one of ours what the class of a user's source or sink says of itself."""

    kind: type[Source] | type[Sink]
    guarantee: SinkGuarantee | None = None
    """Of a sink."""
    option_names: tuple[str, ...] | None = ()
    secret_options: ClassVar[tuple[str, ...]] = ()
    how: str
    needs: str
    tested_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files(OwnFormat):
    name: str
    make: Callable[[str, pa.Schema, Following, Options], FileSource]
    own_schema: pa.Schema | None = None
    """Of one that need not be told."""

    def from_options(self, options: Options, schema: pa.Schema | None) -> Source:
        path = options.get("path")
        if path is None:
            raise BuildError(f"the source {self.name} has no path: give one to load(...)")
        if schema is None:
            schema = self.own_schema
        if schema is None:
            raise BuildError(
                "Schema must be specified when creating a streaming source DataFrame: say"
                ' .schema("app_id string, at timestamp"), or take the one of a DataFrame,'
                f" .schema(spark.read.{self.name}({path!r}).schema)"
            )
        recursive = options.get("recursiveFileLookup", "false")
        for name, why in _WITHOUT_EFFECT_ON_FILES.items():
            if name in options:
                log.warning("option %s of the source %s has no effect: %s", name, self.name, why)
        return self.make(path, schema, _following(options), options).listing(
            is_recursive=parse_flag("recursiveFileLookup", recursive),
            name_pattern=options.get("pathGlobFilter"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generator(OwnFormat):
    option_names: None = None  # `make` refuses the others
    name: str
    make: Callable[[Options], Source]

    def from_options(self, options: Options, schema: pa.Schema | None) -> Source:
        if schema is not None:
            raise BuildError(
                f"the source {self.name} has a schema of its own: leave .schema(...) out"
            )
        return self.make(options)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeOfOptions(OwnFormat):
    """One of which the options say all."""

    make: Callable[[Options, Any], Source | Sink]

    def from_options(self, options: Options, schema: pa.Schema | None) -> Source | Sink:
        return self.make(options, schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kafka(MadeOfOptions):
    secret_options: ClassVar[tuple[str, ...]] = SECRET_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnSink(OwnFormat):
    """One that the writer builds, because it needs more than options."""


OWN_SOURCES: Mapping[str, OwnFormat] = {
    "parquet": _Files(
        kind=ParquetSource,
        name="parquet",
        option_names=_FILE_OPTIONS,
        make=lambda *asked: ParquetSource(*asked[:3]),
        how="a position is a file and a row group; a file that vanished, or whose part that was"
        " read has changed, is an error",
        needs="files that stay until they are read and then do not change",
        tested_by=("tests/connectors/test_files.py", "tests/scenarios/test_followed_directory.py"),
    ),
    "orc": _Files(
        kind=OrcSource,
        name="orc",
        option_names=_FILE_OPTIONS,
        make=lambda *asked: OrcSource(*asked[:3]),
        how="a position is a file and a row",
        needs="the same",
        tested_by=("tests/connectors/test_orc.py",),
    ),
    "json": _Files(
        kind=JsonLinesSource,
        name="json",
        option_names=(*_FILE_OPTIONS, *JSON_OPTIONS),
        make=json_from_options,
        how="a position is a file and a byte",
        needs="the same",
        tested_by=("tests/connectors/test_files.py", "tests/spark/test_followed_directory.py"),
    ),
    "csv": _Files(
        kind=CsvSource,
        name="csv",
        option_names=(*_FILE_OPTIONS, *CSV_OPTIONS),
        make=csv_from_options,
        how="the same",
        needs="the same",
        tested_by=("tests/spark/test_csv.py",),
    ),
    "text": _Files(
        kind=TextSource,
        name="text",
        option_names=(*_FILE_OPTIONS, *TEXT_OPTIONS),
        make=text_from_options,
        own_schema=TEXT_SCHEMA,
        how="the same",
        needs="the same",
        tested_by=("tests/spark/test_csv.py",),
    ),
    "clicks": _Generator(
        kind=ClickSource,
        name="clicks",
        make=clicks_from_options,
        how="every record follows from its number",
        needs="nothing",
        tested_by=("tests/connectors/test_generate.py", "tests/spark/test_kills.py"),
    ),
    "rate": _Generator(
        kind=RateSource,
        name="rate",
        make=rate_from_options,
        how="every row follows from its number and the job's first start",
        needs="nothing",
        tested_by=("tests/connectors/test_generate.py",),
    ),
    "rate-micro-batch": _Generator(
        kind=RateMicroBatchSource,
        name="rate-micro-batch",
        make=rate_micro_batch_from_options,
        how="every row follows from its number",
        needs="nothing",
        tested_by=("tests/connectors/test_rate_micro_batch.py",),
    ),
    "socket": _Generator(
        kind=SocketSource,
        name="socket",
        make=socket_from_options,
        how="what was sent is gone",
        needs="a server that lets one client connect again",
        tested_by=("tests/connectors/test_socket.py", "tests/scenarios/test_guarantees.py"),
    ),
    "kafka": _Kafka(
        kind=KafkaSource,
        option_names=KafkaSource.option_names,
        make=KafkaSource.from_options,
        how="a position is a partition's offset and the id of its topic; offsets that are gone, or"
        " a topic that was made again, are an error",
        needs="topics that keep records until they are read",
        tested_by=("tests/connectors/test_kafka_source.py", "tests/scenarios/test_kafka.py"),
    ),
}

_TABLE_TESTS = ("tests/connectors/test_tables.py", "tests/scenarios/test_tables.py")
_SHARED = "a checkpoint location that driver and executors share"
_DATABASE_TESTS = ("tests/connectors/test_databases.py", "tests/scenarios/test_databases.py")
OWN_SINKS: Mapping[str, OwnFormat] = {
    "parquet": _OwnSink(
        kind=FileSink,
        guarantee=FileSink.guarantee,
        option_names=FILE_SINK_OPTIONS["parquet"],
        how="files are prepared at the barrier and show when the checkpoint is complete; of a"
        " bucket, one after the other, unless `sparkMetadata` is asked for",
        needs="a bucket, or a file system that all machines share, whose rename is atomic",
        tested_by=(
            "tests/connectors/test_file_sink.py",
            "tests/scenarios/test_files_in_buckets.py",
            "tests/spark/test_kills.py",
        ),
    ),
    **{
        name: _OwnSink(
            kind=FileSink,
            guarantee=FileSink.guarantee,
            option_names=FILE_SINK_OPTIONS[name],
            how="the same",
            needs="the same",
            tested_by=("tests/connectors/test_file_sink.py",),
        )
        for name in FORMATS
        if name != "parquet"
    },
    "kafka": _Kafka(
        kind=KafkaSink,
        guarantee="exactly-once",
        option_names=SINK_OPTIONS,
        make=sink_from_options,
        how="rows are staged, then one transaction writes them with a mark, for readers with"
        " `read_committed`; with the option `deliveryGuarantee` they are written as they come, at"
        " least once",
        needs="brokers with transactions, and " + _SHARED,
        tested_by=("tests/connectors/test_kafka_sink.py", "tests/scenarios/test_kafka.py"),
    ),
    "postgres": MadeOfOptions(
        kind=DatabaseSink,
        guarantee="exactly-once",
        option_names=DATABASE_OPTIONS,
        make=postgres_from_options,
        how="rows are staged, then one transaction writes them with a mark; with the option"
        " `upsertKeys` they replace those with the same keys",
        needs="a table of marks in the same database, and " + _SHARED,
        tested_by=_DATABASE_TESTS,
    ),
    "mysql": MadeOfOptions(
        kind=DatabaseSink,
        guarantee="exactly-once",
        option_names=DATABASE_OPTIONS,
        make=mysql_from_options,
        how="the same",
        needs="the same, and tables with the engine InnoDB",
        tested_by=_DATABASE_TESTS,
    ),
    "jdbc": MadeOfOptions(
        kind=DatabaseSink,
        guarantee="exactly-once",
        option_names=(*DATABASE_OPTIONS, "driver", *WITHOUT_EFFECT),
        make=jdbc_from_options,
        how="one of the two above, as its `url` says",
        needs="the same",
        tested_by=("tests/connectors/test_databases.py", "tests/spark/test_databases.py"),
    ),
    "delta": MadeOfOptions(
        kind=DeltaSink,
        guarantee="exactly-once",
        option_names=DELTA_OPTIONS,
        make=delta_from_options,
        how="data files are written at the barrier; one entry of the table's log, on the driver,"
        " names them with a mark",
        needs="a table that all machines reach, and " + _SHARED,
        tested_by=_TABLE_TESTS,
    ),
    "iceberg": MadeOfOptions(
        kind=IcebergSink,
        guarantee="exactly-once",
        option_names=ICEBERG_OPTIONS,
        make=iceberg_from_options,
        how="the same, with one snapshot",
        needs="the same, and a catalog that all machines reach",
        tested_by=_TABLE_TESTS,
    ),
    "memory": _OwnSink(
        kind=StagedSink,
        guarantee="at-most-once",
        option_names=("maxRows",),
        how="an epoch that comes again is ignored, but the table is the driver's and starts over"
        " with the next one",
        needs=_SHARED,
        tested_by=("tests/spark/test_dialect.py", "tests/spark/test_guarantees.py"),
    ),
    "console": _OwnSink(
        kind=StagedSink,
        guarantee=StagedSink.guarantee,
        option_names=("numRows", "truncate"),
        how="after a failure the last epoch may be printed again, with the same number",
        needs=_SHARED,
        tested_by=("tests/spark/test_dialect.py",),
    ),
    "noop": _OwnSink(
        kind=DiscardSink,
        guarantee=DiscardSink.guarantee,
        how="so nothing can be lost or doubled, and the state of the job is as exact as its sources"
        " let it be",
        needs="nothing",
        tested_by=("tests/graph/test_guarantees.py",),
    ),
}


def option_text(value: object) -> str:
    """An option's value as Spark spells it."""
    if isinstance(value, Secret):
        return value.reveal()
    return str(value).lower() if isinstance(value, bool) else str(value)


def option_value(options: Mapping[str, str], name: str) -> str | None:
    """The value of an option; where it was given in two spellings, the later one."""
    found = [value for given, value in options.items() if given.lower() == name.lower()]
    return found[-1] if found else None


def _following(options: Options) -> Following:
    usual = Following()
    interval, age = options.get("followInterval"), options.get("maxFileAge")
    seconds = usual.interval_seconds
    if interval is not None:
        seconds = parse_duration_seconds("followInterval", interval)
    if seconds <= 0:
        raise BuildError(
            f"option followInterval is {interval!r}, which leaves no pause between two listings:"
            " give a duration such as '1 second'"
        )
    latest_first = parse_flag("latestFirst", options.get("latestFirst", "false"))
    seconds_max = usual.file_age_seconds_max
    if age is not None:
        seconds_max = parse_duration_seconds("maxFileAge", age)
    by_name = parse_flag("fileNameOnly", options.get("fileNameOnly", "false"))
    return Following(seconds, seconds_max, latest_first, _cleaning(options), by_name)


def _cleaning(options: Options) -> Cleaning | None:
    how, archive = (
        options.get("cleanSource", "off").strip().lower(),
        options.get("sourceArchiveDir"),
    )
    if how not in ("off", "archive", "delete"):
        raise BuildError(f"option cleanSource is off, archive or delete, not {how!r}")
    if (how == "archive") != (archive is not None):
        raise BuildError(
            f"option cleanSource is {how!r} and sourceArchiveDir is {archive!r}: an archive has a"
            " directory, and nothing else has one"
        )
    return None if how == "off" else Cleaning(archive)
