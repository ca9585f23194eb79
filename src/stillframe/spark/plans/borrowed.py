"""DataFrame's own methods for a stream: what PySpark's can do, today or tomorrow, a stream can.

A method is called on the DataFrame that stands for the stream, and Spark's plan of what it gives is
read as any other is. So there is nothing here about any of them.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, DataFrameNaFunctions, DataFrameStatFunctions
from pyspark.sql.group import GroupedData

from stillframe.spark.plans.stand_ins import stand_in
from stillframe.spark.stream import Stream

if TYPE_CHECKING:
    from stillframe.spark.session import Still


def borrowed(stream: Stream, name: str) -> Any:
    """This attribute of a DataFrame, for the stream."""
    return _in_streams(stream.still, getattr(stand_in(stream), name))


class _Between:
    """What a DataFrame gives on the way to another: grouped rows, or `na`."""

    def __init__(self, still: Still, of: Any) -> None:
        self._still = still
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"there is no attribute {name!r}")
        return _in_streams(self._still, getattr(self._of, name))


def _in_streams(still: Still, value: Any) -> Any:
    """With a stream for each streaming DataFrame."""
    if isinstance(value, DataFrame):
        return still.stream(value) if value.isStreaming else value
    if isinstance(value, GroupedData | DataFrameNaFunctions | DataFrameStatFunctions):
        return _Between(still, value)
    if not inspect.isroutine(value):
        return value

    @functools.wraps(value)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = {name: _in_frames(each) for name, each in kwargs.items()}
        return _in_streams(still, value(*map(_in_frames, args), **given))

    return called


def _in_frames(value: Any) -> Any:
    return stand_in(value) if isinstance(value, Stream) else value
