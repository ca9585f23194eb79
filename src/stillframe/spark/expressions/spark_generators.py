"""Generators that make one row of each row, made ready to be computed by Spark's own code."""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession

from stillframe.graph.expressions import SparkProjection
from stillframe.spark.expressions.evaluated import (
    Crossings,
    InTwo,
    attribute_of,
    java_options_of,
    schema_of_columns,
    serialized,
    settings_of,
)
from stillframe.spark.expressions.nodes import spark_type_of
from stillframe.spark.steps import as_scala, children


def generator_by_spark(
    spark: SparkSession,
    generator: JavaObject,
    outputs: list[JavaObject],
    crossings: Crossings,
    in_two: InTwo,
) -> SparkProjection:
    """The columns that it makes; what it reads is computed by `in_two`."""
    jvm: Any = spark._jvm
    read = [each for each in children(generator) if not each.foldable()]
    attributes = [attribute_of(spark, spark_type_of(each)) for each in read]
    waiting = iter(attributes)
    over = [each if each.foldable() else next(waiting) for each in children(generator)]
    expressions = jvm.org.apache.spark.sql.catalyst.expressions
    package = getattr(getattr(expressions, "package$"), "MODULE$")
    bound = expressions.BindReferences.bindReferences(
        as_scala(jvm, [generator.withNewChildren(as_scala(jvm, over))]),
        package.AttributeSeq(as_scala(jvm, attributes)),
    )
    return SparkProjection(
        inputs=tuple(crossings.settled([in_two.translate(each) for each in read])),
        takes_time=False,
        input_schema=schema_of_columns(attributes),
        output_schema=schema_of_columns(outputs),
        levels=(),
        conf=tuple(settings_of(spark)),
        java_options=java_options_of(jvm),
        generator=serialized(jvm, bound, str(generator.sql())),
    )
