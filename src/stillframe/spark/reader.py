"""`still.readStream`: PySpark's DataStreamReader for the sources that slots read themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from stillframe.connectors.socket import SocketSource
from stillframe.graph.logical import Node, Read
from stillframe.spark import formats
from stillframe.spark.types import parse_schema, to_arrow_schema

if TYPE_CHECKING:
    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream


class StreamReader:
    """Collects what to read; `load` makes a stream of it. Nothing is read before the job starts."""

    def __init__(self, still: Still) -> None:
        self._still = still
        self._format = "parquet"
        self._schema: StructType | None = None
        self._options: dict[str, str] = {}

    def format(self, source: str) -> StreamReader:
        self._format = formats.known_source(source)
        return self

    def schema(self, schema: str | StructType) -> StreamReader:
        self._schema = parse_schema(self._still.spark, schema)
        return self

    def option(self, key: str, value: Any) -> StreamReader:
        """None takes the option back."""
        self._options.pop(key, None)
        if value is not None:
            self._options[key] = formats.option_text(value)
        return self

    def options(self, **options: Any) -> StreamReader:
        for key, value in options.items():
            self.option(key, value)
        return self

    def load(
        self,
        path: str | None = None,
        format: str | None = None,
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
        source = formats.make_source(self._format, self._options, declared)
        node = Node(Read(source), source.schema)
        if isinstance(source, SocketSource):
            node = node.with_parallelism(1)  # one reads; what follows is spread over all slots
        return Stream.reading(self._still, node)

    def parquet(self, path: str) -> Stream:
        return self.load(path, "parquet")

    def json(self, path: str, schema: str | StructType | None = None) -> Stream:
        """JSON lines: one object per line."""
        return self.load(path, "json", schema)
