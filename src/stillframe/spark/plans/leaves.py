"""Where a streaming plan of Spark's begins: the source that was asked for, read by ours."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from stillframe.connectors.files import FileSource
from stillframe.errors import BuildError, NotHonoured
from stillframe.graph.logical import Node, Read
from stillframe.spark.formats.data_sources import public_options, registered_data_source
from stillframe.spark.formats.ours import OWN_SOURCES
from stillframe.spark.frames.spooled_streams import UnresolvedLeaf
from stillframe.spark.plans.leaf_options import heeding
from stillframe.spark.plans.stand_ins import OPTION, stands_for
from stillframe.spark.steps import class_name, sequence
from stillframe.spark.stream import Stream, frame_of_columns
from stillframe.spark.types import to_arrow_schema

if TYPE_CHECKING:
    from stillframe.spark.session import Still

log = logging.getLogger("stillframe")

_OF_FILES = "_metadata"
"""Spark's hidden column with the name, size and time of the file that a row is from."""


def stream_of_leaf(still: Still, plan: JavaObject) -> Stream:
    """The rows that this leaf of a streaming plan reads, with its columns."""
    name, options, schema = _said(still, plan)
    if OPTION in options:
        ours = stands_for(options[OPTION])
        return ours.with_frame(frame_of_columns(still.spark, plan.output()))
    if name.lower() not in OWN_SOURCES and registered_data_source(still.spark, name) is None:
        return _read_by_spark(still, plan, name, options)
    columns = [str(column.name()) for column in sequence(plan.output())]
    try:
        if _OF_FILES in columns:
            raise NotHonoured(f"only Spark's reader has the column {_OF_FILES}")
        load = partial(_load, still, name, schema)
        node = (heeding(options, name, load) if name.lower() in OWN_SOURCES else load(options)).node
    except NotHonoured as error:
        log.warning("the source %s is read by a query of Spark's own: %s", name, error)
        return _read_by_spark(still, plan, name, options)
    if node.schema.names != columns:
        raise BuildError(
            f"the source {name} gives the columns {', '.join(node.schema.names)} here and"
            f" {', '.join(columns)} in Spark: give the schema with readStream.schema(...)"
        )
    return Stream(still, node, frame_of_columns(still.spark, plan.output()))


def _load(still: Still, name: str, schema: StructType | None, options: dict[str, str]) -> Stream:
    reader = still.readStream.format(name).options(**options)
    return (reader if schema is None else reader.schema(schema)).load()


def _read_by_spark(still: Still, plan: JavaObject, name: str, options: dict[str, str]) -> Stream:
    """Of a source that is not among ours."""
    jvm: Any = still.spark._jvm
    of_rows = jvm.org.apache.spark.sql.classic.Dataset.ofRows
    # A hidden column is there only if it is asked for.
    asked = jvm.org.apache.spark.sql.catalyst.plans.logical.Project(plan.output(), plan)
    frame = DataFrame(of_rows(still.spark._jsparkSession, asked), still.spark)
    schema = to_arrow_schema(frame.schema)
    words = " ".join(["source", name, *(f"{k}={v}" for k, v in public_options(options))])
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
    node = Node(Read(UnresolvedLeaf(frame, schema, words, digest)), schema)
    return Stream(still, node, frame_of_columns(still.spark, plan.output()))


def _said(still: Still, plan: JavaObject) -> tuple[str, dict[str, str], StructType | None]:
    """The source's name, its options and, of one that has none of its own, its schema."""
    if class_name(plan) == "StreamingRelation":
        source = plan.dataSource()
        jvm: Any = still.spark._jvm
        as_java = jvm.scala.jdk.javaapi.CollectionConverters.asJava
        name, options = str(source.className()), dict(as_java(source.options()))
        declared = source.userSpecifiedSchema()
        schema = declared.get() if declared.isDefined() else plan.schema()
    else:
        name, options = str(plan.sourceName()), dict(plan.extraOptions().asCaseSensitiveMap())
        schema = plan.schema()
    own = OWN_SOURCES.get(name.lower())
    if own is not None and not issubclass(own.kind, FileSource):
        return name, options, None
    return name, options, StructType.fromJson(json.loads(schema.json()))
