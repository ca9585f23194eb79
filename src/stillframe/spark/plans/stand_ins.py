"""A stream of ours inside of a plan of Spark's: a streaming DataFrame that only we can run.

To Spark it is a source of files without any, with the stream's columns. An option of its leaf names
the stream, so that who translates a plan (`leaves`) finds it again. PySpark's own verbs, views and
SQL go on behind it.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession

from stillframe.errors import BuildError
from stillframe.runtime.scratch import Scratch
from stillframe.spark.steps import analyzed

if TYPE_CHECKING:
    from stillframe.spark.stream import Stream

OPTION = "stillframe.stream"
_streams: dict[str, Stream] = {}
_empty: list[Scratch] = []


def stand_in(stream: Stream) -> DataFrame:
    """A streaming DataFrame of Spark's that stands for this stream."""
    _ = stream.node  # refuses columns of one name in our words
    name = uuid.uuid4().hex
    _streams[name] = stream
    spark = stream.still.spark
    reader = spark.readStream.schema(stream.schema).option(OPTION, name)
    leaf = analyzed(reader.parquet(str(_place())))
    jvm: Any = spark._jvm
    rows = jvm.org.apache.spark.sql.classic.Dataset.ofRows
    named = _with_output(spark, leaf, analyzed(stream.frame).output())
    return DataFrame(rows(spark._jsparkSession, named), spark)


def _with_output(spark: SparkSession, leaf: JavaObject, output: JavaObject) -> JavaObject:
    """The leaf with these columns, by which Spark knows those of the stream.

    By what the class is made of: what that is differs from version to version.
    """
    gateway: Any = spark.sparkContext._gateway
    parts = [leaf.productElement(place) for place in range(leaf.productArity())]
    names = [leaf.productElementName(place) for place in range(leaf.productArity())]
    given = gateway.new_array(gateway.jvm.Object, len(parts))
    for place, (name, part) in enumerate(zip(names, parts, strict=True)):
        given[place] = output if name == "output" else part
    (constructor,) = leaf.getClass().getConstructors()
    return constructor.newInstance(given)


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
