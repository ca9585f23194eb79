"""`still.readStream`: PySpark's DataStreamReader for the sources that slots read themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from stillframe.api.sources import Source
from stillframe.config import is_storage_setting, storage_settings
from stillframe.connectors.files import FileSource
from stillframe.connectors.orc import OrcSource
from stillframe.connectors.socket import SocketSource
from stillframe.errors import BuildError
from stillframe.graph.logical import Node, Read
from stillframe.spark.deployment.checks import refuse_times_in_orc
from stillframe.spark.formats import choosing, ours
from stillframe.spark.formats.data_sources import PythonSource
from stillframe.spark.types import parse_schema, to_arrow_schema
from stillframe.storage.places import address_of, is_on_disk, place_of
from stillframe.storage.renewed import joined

if TYPE_CHECKING:
    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream


class StreamReader:
    """Collects what to read; `load` makes a stream of it. Nothing is read before the job starts."""

    def __init__(self, still: Still) -> None:
        self._still = still
        self._format = choosing.chosen_source("parquet")
        self._schema: StructType | None = None
        self._options: dict[str, str] = {}

    def format(self, source: str | type[Source] | Source | type[DataSource]) -> StreamReader:
        """A name of ours or one that a package has registered, or a class or instance; of a data
        source of Spark's the class, or the name that `spark.dataSource` knows it by."""
        self._format = choosing.chosen_source(source, self._still.spark)
        return self

    def schema(self, schema: str | StructType) -> StreamReader:
        self._schema = parse_schema(self._still.spark, schema)
        return self

    def option(self, key: str, value: Any) -> StreamReader:
        """None takes the option back."""
        self._options.pop(key, None)
        if value is not None:
            self._options[key] = ours.option_text(value)
        return self

    def options(self, **options: Any) -> StreamReader:
        for key, value in options.items():
            self.option(key, value)
        return self

    def load(
        self,
        path: str | None = None,
        format: str | type[Source] | Source | type[DataSource] | None = None,
        schema: str | StructType | None = None,
        **options: Any,
    ) -> Stream:
        """The stream of what was described; the arguments say last what the methods said first."""
        from stillframe.spark.stream import Stream

        if format is not None:
            self.format(format)
        if schema is not None:
            self.schema(schema)
        self.options(**options)
        if path is not None:
            self.option("path", path)
        declared = None if self._schema is None else to_arrow_schema(self._schema)
        given = {**self._session_options(), **self._options}
        if self._is_of_files:
            given = {name: text for name, text in given.items() if not is_storage_setting(name)}
        source = self._format.made(given, declared, self._still.spark_setting)
        if isinstance(source, FileSource):
            source = source.listing(settings=self._settings(source))
            source.refuse_missing()
            source = self._with_partitions(source)
            source.check()
        if isinstance(source, OrcSource):
            refuse_times_in_orc(self._still.spark, source.schema)
        node = Node(Read(source), source.schema)
        if isinstance(source, SocketSource | PythonSource):
            node = node.with_parallelism(1)  # one reads; what follows is spread over all slots
        return Stream.reading(self._still, node)

    @property
    def _is_of_files(self) -> bool:
        own = ours.OWN_SOURCES.get(self._format.name) if self._format.is_own else None
        return own is not None and issubclass(own.kind, FileSource)

    def _settings(self, source: FileSource) -> Mapping[str, str]:
        """How its files are reached: settled here, so that every slot reaches the same."""
        spark, asked = self._still.spark, self._still.spark_setting
        given = storage_settings(self._options, spark.conf.getAll, asked)
        places = [place_of(address_of(path), given) for path in source.paths]
        return joined(given, [place.settings for place in places])

    def _with_partitions(self, source: FileSource) -> FileSource:
        """With the columns that its directories stand for, in Spark's order and with its types."""
        spark = self._still.spark
        zone = ours.option_value(self._options, "timeZone")
        source = source.listing(zone=zone or str(spark.conf.get("spark.sql.session.timeZone")))
        keys = {key.lower() for file in source.files_now() for key, _ in file.partitions}
        if not keys or not all(is_on_disk(address_of(path)) for path in source.paths):
            return source  # of a bucket, which Spark may not reach, they have to be declared
        reader = spark.readStream.format(self._format.name)
        if self._schema is not None:
            reader = reader.schema(self._schema)
        if zone is not None:
            reader = reader.option("timeZone", zone)
        try:
            frame = reader.load(ours.option_value(self._options, "path"))
        except PySparkException as error:
            raise BuildError(str(error).partition("\n")[0]) from error
        found = to_arrow_schema(frame.schema)
        fields = [
            field if field.name.lower() in keys else source.schema.field(field.name)
            for field in found
        ]
        return source.listing(schema=pa.schema(fields))

    def _session_options(self) -> dict[str, str]:
        """What the session says about reading, below what the options say."""
        if not self._format.is_own or self._format.name not in ("json", "csv", "kafka"):
            return {}
        conf = self._still.spark.conf
        return {
            "timeZone": str(conf.get("spark.sql.session.timeZone")),
            "columnNameOfCorruptRecord": str(conf.get("spark.sql.columnNameOfCorruptRecord")),
        }

    def parquet(self, path: str) -> Stream:
        return self.load(path, "parquet")

    def orc(self, path: str) -> Stream:
        return self.load(path, "orc")

    def text(self, path: str, wholetext: bool = False) -> Stream:
        """A row for each line, or for each file."""
        return self.load(path, "text", wholetext=wholetext)

    def csv(self, path: str, schema: str | StructType | None = None, **options: Any) -> Stream:
        """CSV, one record in each line."""
        return self.load(path, "csv", schema, **options)

    def json(self, path: str, schema: str | StructType | None = None) -> Stream:
        """JSON, one record in each line; with the option multiLine, in each file."""
        return self.load(path, "json", schema)
