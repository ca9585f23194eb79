"""`stillframe.everywhere(spark)`: a program for Structured Streaming runs here without an edit.

PySpark's DataFrame has one property that begins a query, `writeStream`, and its session one that
knows them, `streams`. Both are replaced, for the sessions that asked for it. So is `load` of a
reader where it is asked for Kafka, which Spark itself reads only with a jar. Everything else stays
Spark's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

from stillframe.spark.formats.ours import option_text
from stillframe.spark.plans.leaf_options import heeding
from stillframe.spark.plans.translation import writer_of
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream
from stillframe.spark.streams import Streams

_asked: list[SparkSession] = []
_sparks_own: list[tuple[type, str, Any]] = []


def everywhere(spark: SparkSession | None = None) -> None:
    """From now on queries of this session, or of every session, are run by Stillframe."""
    if spark is not None:
        Still(spark)  # refuses what is no session that could
        _asked.append(spark)
    else:
        _asked.clear()
    if not _sparks_own:
        _replace(DataFrame, "writeStream", lambda own: property(partial(_write_stream, own)))
        _replace(SparkSession, "streams", lambda own: property(partial(_streams, own)))
        _replace(DataStreamReader, "load", lambda own: partialmethod(_load, own))


def nowhere() -> None:
    """Give PySpark its own back."""
    while _sparks_own:
        setattr(*_sparks_own.pop())
    _asked.clear()


def _replace(owner: type, name: str, ours: Callable[[Any], Any]) -> None:
    own = getattr(owner, name)
    _sparks_own.append((owner, name, own))
    setattr(owner, name, ours(own))


def _is_ours(spark: SparkSession) -> bool:
    return not _asked or any(each is spark for each in _asked)


def _write_stream(own: property, frame: DataFrame) -> Any:
    if _is_ours(frame.sparkSession) and frame.isStreaming:
        return writer_of(Still(frame.sparkSession), frame, is_unchanged=True)
    return own.__get__(frame)


def _streams(own: property, spark: SparkSession) -> Any:
    return Streams() if _is_ours(spark) else own.__get__(spark)


def _load(
    reader: DataStreamReader,
    own: Callable[..., DataFrame],
    path: str | None = None,
    format: str | None = None,
    schema: StructType | str | None = None,
    **options: Any,
) -> Any:
    java = reader._jreader
    asked = format or str(_field(java, "source"))
    if asked.lower() != "kafka" or not _is_ours(reader._spark):
        return own(reader, path, format, schema, **options)
    jvm: Any = reader._spark._jvm
    as_java = jvm.scala.jdk.javaapi.CollectionConverters.asJava
    said = dict(as_java(_field(java, "extraOptions").originalMap()))
    given = {**said, **{name: option_text(value) for name, value in options.items()}}
    still = Still(reader._spark)
    stream = heeding(given, "kafka", lambda known: _of_kafka(still, known))
    return stream.toDataFrame()


def _of_kafka(still: Still, options: dict[str, str]) -> Stream:
    return still.readStream.format("kafka").options(**options).load()


def _field(java: Any, name: str) -> Any:
    """A private one of a Java object."""
    field = java.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field.get(java)
