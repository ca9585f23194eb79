"""A stream of ours inside of a plan of Spark's: a streaming DataFrame that only we can run.

To Spark it is a source of files without any, with the stream's columns. An option of its leaf names
the stream, so that who translates a plan (`leaves`) finds it again. PySpark's own verbs, views and
SQL go on behind it.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from stillframe.errors import BuildError
from stillframe.runtime.scratch import Scratch

if TYPE_CHECKING:
    from stillframe.spark.stream import Stream

OPTION = "stillframe.stream"
_streams: dict[str, Stream] = {}
_empty: list[Scratch] = []


def stand_in(stream: Stream) -> DataFrame:
    """A streaming DataFrame of Spark's that stands for this stream."""
    name = uuid.uuid4().hex
    _streams[name] = stream
    reader = stream.still.spark.readStream.schema(stream.schema).option(OPTION, name)
    return reader.parquet(str(_place()))


def stands_for(name: str) -> Stream:
    """The stream of this name, as the option of the leaf has it."""
    if name not in _streams:
        raise BuildError(
            f"the DataFrame stands for a stream of another process ({name}): make it again here"
        )
    return _streams[name]


def _place() -> Path:
    """A directory without any file, removed with the process."""
    if not _empty:
        _empty.append(Scratch(purpose="leaf"))
    return _empty[0].directory
