"""`stillframe.everywhere(spark)`: a program for Structured Streaming runs here without an edit.

PySpark's DataFrame has one property that begins a query, `writeStream`, and its session one that
knows them, `streams`. Both are replaced, for the sessions that asked for it; everything before them
stays Spark's own.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame

from stillframe.spark.session import Still
from stillframe.spark.streams import Streams

_asked: list[SparkSession] = []
_sparks_own: dict[str, Any] = {}


def everywhere(spark: SparkSession | None = None) -> None:
    """From now on queries of this session, or of every session, are run by Stillframe."""
    if spark is not None:
        Still(spark)  # refuses what is no session that could
        _asked.append(spark)
    if not _sparks_own:
        _sparks_own["writeStream"] = DataFrame.writeStream
        _sparks_own["streams"] = SparkSession.streams
        _give(property(_write_stream), property(_streams))
    if spark is None:
        _asked.clear()


def nowhere() -> None:
    """Give PySpark its own properties back."""
    if _sparks_own:
        _give(_sparks_own.pop("writeStream"), _sparks_own.pop("streams"))
    _asked.clear()


def _give(write_stream: Any, streams: Any) -> None:
    setattr(DataFrame, "writeStream", write_stream)  # noqa: B010 - to mypy it is a method
    setattr(SparkSession, "streams", streams)  # noqa: B010


def _is_ours(spark: SparkSession) -> bool:
    return not _asked or any(each is spark for each in _asked)


def _write_stream(frame: DataFrame) -> Any:
    if _is_ours(frame.sparkSession) and frame.isStreaming:
        return Still(frame.sparkSession).writeStream(frame)
    return _sparks_own["writeStream"].fget(frame)


def _streams(spark: SparkSession) -> Any:
    return Streams() if _is_ours(spark) else _sparks_own["streams"].fget(spark)
