"""Scalar subqueries: run once by Spark, when the job starts, and constants from then on."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession

from stillframe.errors import StartRefused
from stillframe.graph.expressions import Expression, Literal, Named, Rewriting, StartValue
from stillframe.graph.logical import Filter, Operator, Project, read_at_start
from stillframe.spark.types import to_arrow_schema


class ScalarOfPlan:
    """The one value that a plan of Spark's gives."""

    def __init__(self, plan: JavaObject) -> None:
        self._plan = plan

    def read(self) -> pa.Scalar:
        """Run the plan; without a row it is null."""
        spark = SparkSession.active()
        jvm: Any = spark._jvm
        made = jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, self._plan)
        frame = DataFrame(made, spark).toDF("value")
        rows = frame.limit(2).toArrow()
        if rows.num_rows > 1:
            raise StartRefused(
                "[SCALAR_SUBQUERY_TOO_MANY_ROWS] a subquery that is used as a value gives more than"
                " one row: aggregate its rows, or add LIMIT 1"
            )
        [field] = to_arrow_schema(frame.schema)
        values = rows.column(0).cast(field.type).combine_chunks()
        return values[0] if rows.num_rows else pa.scalar(None, field.type)


def with_values_read(operator: Operator) -> Operator:
    """The operator with the values of its subqueries in it."""
    if not read_at_start(operator):
        return operator
    read = Rewriting(_read)
    match operator:
        case Project(columns):
            return Project(tuple(Named(each.name, read(each.expression)) for each in columns))
        case Filter(condition):
            return Filter(read(condition))
    raise AssertionError(f"no subquery may be in {operator}")


def _read(expression: Expression) -> Expression | None:
    return Literal(expression.source.read()) if isinstance(expression, StartValue) else None
