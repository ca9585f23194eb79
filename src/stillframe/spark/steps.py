"""Steps through Spark's plans and expressions, whose nodes are objects in the JVM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame

ExprId = int
"""What Spark knows a column by, whatever its name."""


def analyzed(frame: DataFrame) -> JavaObject:
    """What Spark understood: names, types and implicit casts are resolved."""
    return frame._jdf.queryExecution().analyzed()


def is_leaf(plan: JavaObject) -> bool:
    return bool(plan.children().isEmpty())


def class_name(node: JavaObject) -> str:
    return str(node.getClass().getSimpleName())


def sequence(scala_seq: JavaObject) -> list[JavaObject]:
    return [scala_seq.apply(index) for index in range(scala_seq.size())]


def as_scala(jvm: Any, items: Iterable[JavaObject]) -> JavaObject:
    """The reverse of `sequence`."""
    listed = jvm.java.util.ArrayList()
    for item in items:
        listed.add(item)
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(listed)


def children(node: JavaObject) -> list[JavaObject]:
    return sequence(node.children())


def id_of(node: JavaObject) -> ExprId:
    return int(node.exprId().id())


def below_aliases(plan: JavaObject) -> JavaObject:
    while class_name(plan) == "SubqueryAlias":
        plan = plan.child()
    return plan
