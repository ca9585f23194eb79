"""Aggregates that we have no form for, made ready to be computed by Spark's own code.

Theory of operation: Spark aggregates in steps. *Partial* makes buffers of records, *PartialMerge*
makes one buffer of several, *Final* makes the result. Each step is an iterator of Spark's over
rows, which are grouped by a number that we give. So it is one crossing to the JVM for a batch, and
knows nothing of keys, windows or state.

What the function reads becomes columns of the batch; what it is given as constants stays in it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, LongType

from stillframe.errors import BuildError
from stillframe.graph.expressions import Column, SparkAggregate, SparkProjection
from stillframe.spark.expressions.evaluated import (
    attribute_of,
    java_options_of,
    schema_of_columns,
    serialized,
    settings_of,
)
from stillframe.spark.expressions.nodes import refused, spark_type_of, type_of
from stillframe.spark.steps import as_scala, children, class_name, sequence


def aggregate_by_spark(
    spark: SparkSession, node: JavaObject, function: JavaObject
) -> tuple[list[JavaObject], SparkAggregate]:
    """What this `AggregateExpression` of this function reads, and how Spark computes it."""
    return _Making(spark).made(node, function)


class _Making:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._modes = jvm.org.apache.spark.sql.catalyst.expressions.aggregate
        self._arguments: list[JavaObject] = []
        self._inputs: list[JavaObject] = []

    def made(
        self, node: JavaObject, function: JavaObject
    ) -> tuple[list[JavaObject], SparkAggregate]:
        over = self._over_columns(function)
        group, counts = (attribute_of(self._spark, each()) for each in (LongType, BooleanType))
        whole = over.toAggregateExpression()
        records = [group, *self._inputs, counts]
        # Asked for once: they have other identities in each copy of the function.
        buffers = sequence(over.inputAggBufferAttributes())
        kept = [group, *buffers]
        result = whole.resultAttribute()

        def step(mode: str, given: list[JavaObject], gives: list[JavaObject]) -> SparkProjection:
            is_first, is_last = mode == "Partial", mode == "Final"
            condition = self._jvm.scala.Option.apply(counts if is_first else None)
            named = getattr(getattr(self._modes, f"{mode}$"), "MODULE$")
            aggregate = whole.copy(over, named, False, condition, whole.resultId())
            attributes = [result] if is_last else sequence(over.aggBufferAttributes())
            return self._crossing(
                given, gives, aggregate, group, attributes, 0 if is_first else 1, str(node.sql())
            )

        fields = _fields(buffers)
        return self._arguments, SparkAggregate(
            partial=step("Partial", records, kept),
            merge=step("PartialMerge", kept, kept),
            final=step("Final", kept, [group, result]),
            buffers=pa.struct(fields),
            version=".".join(self._spark.version.split(".")[:2]),
            sql=str(node.sql()),
        )

    def _over_columns(self, node: JavaObject) -> JavaObject:
        """The function, or an order within it, over attributes for what it reads."""
        below = children(node)
        if not below:
            return node
        return node.withNewChildren(as_scala(self._jvm, [self._given(each) for each in below]))

    def _given(self, node: JavaObject) -> JavaObject:
        if node.foldable():
            return node
        if class_name(node) == "SortOrder":
            return self._over_columns(node)
        for argument, known in zip(self._arguments, self._inputs, strict=True):
            if argument.semanticEquals(node):
                return known
        try:
            type_of(node)
        except BuildError:  # a variant, for one: what it is made of may be carried
            return self._below(node)
        attribute = attribute_of(self._spark, spark_type_of(node))
        self._arguments.append(node)
        self._inputs.append(attribute)
        return attribute

    def _below(self, node: JavaObject) -> JavaObject:
        if not children(node):
            raise refused(node, f"has the type {node.dataType().sql()}, which no stream carries")
        try:
            return self._over_columns(node.replacement())
        except Py4JError:
            return self._over_columns(node)

    def _crossing(
        self,
        given: list[JavaObject],
        gives: list[JavaObject],
        aggregate: JavaObject,
        group: JavaObject,
        attributes: list[JavaObject],
        offset: int,
        sql: str,
    ) -> SparkProjection:
        what = self._jvm.java.util.ArrayList()
        for part in (gives, [group], [aggregate], attributes, gives, given):
            what.add(as_scala(self._jvm, part))
        what.add(offset)
        return SparkProjection(
            inputs=tuple(Column(str(at), type_of(each)) for at, each in enumerate(given)),
            takes_time=False,
            input_schema=schema_of_columns(given),
            output_schema=schema_of_columns(gives),
            levels=(),
            conf=tuple(settings_of(self._spark)),
            java_options=java_options_of(self._jvm),
            aggregation=serialized(self._jvm, what, sql),
        )


def _fields(buffers: list[JavaObject]) -> list[pa.Field]:
    names = [str(each.name()) for each in buffers]
    if len(set(names)) < len(names):
        names = [f"{name} {place}" for place, name in enumerate(names)]
    return [pa.field(name, type_of(each)) for name, each in zip(names, buffers, strict=True)]
