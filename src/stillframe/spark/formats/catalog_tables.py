"""Tables that Spark's own catalog knows, as sinks: `toTable("counts")`.

Such a table is a directory of files with a name. We write the files, with Spark's own log of them:
by it Spark reads a table that a stream has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from stillframe.errors import BuildError
from stillframe.spark.steps import sequence

_OF_NO_SINK = ("path", "serialization.format")
"""What a catalog notes with every table."""


@dataclass(frozen=True, slots=True)
class CatalogTable:
    name: str
    format: str
    location: str
    schema: StructType
    partition_by: tuple[str, ...]
    options: Mapping[str, str]
    """That its files are written with."""


def table_for(
    spark: SparkSession, name: str, format: str, schema: StructType, partition_by: Sequence[str]
) -> CatalogTable:
    """The table of this name; it is created if there is none."""
    try:
        if not spark.catalog.tableExists(name):
            _create(spark, name, format, schema, partition_by)
        return _described(spark, name)
    except PySparkException as error:
        first = str(error).partition("\n")[0]
        raise BuildError(f"toTable({name!r}) finds no table of files: {first}") from error


def refuse_other_columns(table: CatalogTable, schema: StructType) -> None:
    declared = {field.name: field.dataType for field in table.schema}
    found = {field.name: field.dataType for field in schema}
    if declared != found:
        told = ", ".join(f"{name} {kind.simpleString()}" for name, kind in declared.items())
        raise BuildError(
            f"the table {table.name} has the columns {told}, and the stream has"
            f" {schema.simpleString()}: select what the table has, or write to another one"
        )


def _create(
    spark: SparkSession, name: str, format: str, schema: StructType, partition_by: Sequence[str]
) -> None:
    parted = ", ".join(f"`{column}`" for column in partition_by)
    spark.sql(
        f"CREATE TABLE {name} ({schema.toDDL()}) USING {format}"
        + (f" PARTITIONED BY ({parted})" if parted else "")
    )


def _described(spark: SparkSession, name: str) -> CatalogTable:
    session: Any = spark._jsparkSession
    jvm: Any = spark._jvm
    state = session.sessionState()
    found = state.catalog().getTableMetadata(state.sqlParser().parseTableIdentifier(name))
    if str(found.tableType().name()) == "VIEW" or not found.provider().isDefined():
        raise BuildError(f"{name} is a view, which has no files to write: give another name")
    as_java = jvm.scala.jdk.javaapi.CollectionConverters.asJava
    storage = dict(as_java(found.storage().properties()))
    return CatalogTable(
        name,
        str(found.provider().get()).lower(),
        str(found.location().toString()),
        # Not by `spark.table`, which would keep a list of its files as they are now.
        StructType.fromJson(json.loads(found.schema().json())),
        tuple(str(each) for each in sequence(found.partitionColumnNames())),
        {key: text for key, text in storage.items() if key.lower() not in _OF_NO_SINK},
    )
