"""What a node of Spark's expressions says of itself: its type, its mode, its zone, its value.

Theory of operation: a node is an object in the JVM, and every question to it is a call there. Where
it keeps an answer has changed between Spark's versions, so that is asked for in one place. A part
that is the same for every row has a value already, which Spark computes, whatever functions it is
made of; we get it in the form that Spark uses within.

Rules of this file:
- what is asked for and not known is refused, with the expression in SQL words;
- what depends on the moment or on chance is no constant, even where Spark folds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyarrow import types
from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, StructType, _parse_datatype_json_value

from stillframe.errors import BuildError
from stillframe.graph.expressions import Literal
from stillframe.spark.expressions.places import placed
from stillframe.spark.steps import children, class_name, sequence
from stillframe.spark.types import to_arrow_type


def without_alias(node: JavaObject) -> JavaObject:
    """The node, or what it is a name for."""
    return node.child() if class_name(node) == "Alias" else node


def name_or_sql(node: JavaObject) -> str:
    """What people call it: a column by its name, anything else in SQL words.

    Without what the columns' tables are called: a view may get another name, and `spark.sql` draws
    one for a DataFrame that it is given, while states are known by these words in checkpoints.
    """
    if class_name(node) == "AttributeReference":
        return str(node.name())
    text = str(node.sql())
    for column in sequence(node.references().toSeq()):
        text = text.replace(str(column.sql()), str(column.name()))
    return text


def spark_type_of(node: JavaObject) -> DataType:
    return _parse_datatype_json_value(json.loads(node.dataType().json()))


def schema_of_plan(plan: JavaObject) -> StructType:
    """The columns that come out of a plan's node."""
    return StructType.fromJson(json.loads(plan.schema().json()))


def type_of(node: JavaObject) -> pa.DataType:
    """The Arrow type that our slots use for its type."""
    return to_arrow_type(spark_type_of(node))


def refused(
    node: JavaObject,
    why: str = "is outside what a stream evaluates itself",
    what_to_do: str = "compute it before still.stream(...), or in mapInArrow",
) -> BuildError:
    """The error for an expression that a stream cannot have."""
    return placed(f"the expression {node.sql()} {why}: {what_to_do}", [node])


def refused_mode(node: JavaObject, mode: str) -> BuildError:
    """The error for an expression in a mode of Spark's that ours has not."""
    why = f"runs in Spark's {mode} mode, but a stream evaluates it only in ANSI mode"
    return refused(node, why)


def mode_of(node: JavaObject) -> str:
    """ANSI, LEGACY or TRY; where the node says it has changed between Spark's versions."""
    for read in (
        lambda: node.evalMode().toString(),
        lambda: node.evalContext().evalMode().toString(),
        lambda: "ANSI" if node.failOnError() else "LEGACY",
    ):
        try:
            return str(read())
        except Py4JError:
            continue
    raise refused(node)


_NAMES_OF_UTC = {"Z": "UTC", "GMT": "UTC", "UTC": "UTC", "Etc/UTC": "UTC", "+00:00": "UTC"}


def zone_of(node: JavaObject) -> Literal:
    """The time zone in which it is evaluated, in a name that Arrow knows."""
    option = node.timeZoneId()
    zone = "UTC" if option.isEmpty() else str(option.get())
    zone = _NAMES_OF_UTC.get(zone, zone)
    try:
        pc.local_timestamp(pa.array([0], pa.timestamp("us", tz=zone)))
    except pa.ArrowInvalid:
        why = f"needs the time zone {zone}, which Arrow does not know"
        raise refused(node, why) from None
    return text_literal(zone)


def text_literal(value: str) -> Literal:
    return Literal(pa.scalar(value, pa.string()))


# --- Constants


_CHANGING = ("Current", "Now", "LocalTime", "Rand", "Uuid", "Input")


def _subtree(node: JavaObject) -> Iterator[JavaObject]:
    yield node
    for child in children(node):
        yield from _subtree(child)


def constant_of(node: JavaObject) -> JavaObject | None:
    """The node's value in Spark's internal form, if it is the same for every row, in a list."""
    if class_name(node) == "Literal":
        return [node.value()]
    if not node.foldable() or not node.deterministic():
        return None
    # Spark folds current_timestamp() to the start of a query; a stream has no such moment.
    if any(class_name(part).startswith(_CHANGING) for part in _subtree(node)):
        return None
    try:
        return [node.eval(None)]
    except (Py4JError, PySparkException):
        # Either it is a name for other expressions, or it fails: that is for the rows to find.
        return None


def literal_of(node: JavaObject, value: Any) -> Literal:
    """The value, which is in Spark's internal form, as a constant of the node's type."""
    return Literal(_scalar(value, type_of(node)))


def _scalar(value: Any, type_: pa.DataType) -> pa.Scalar:
    if value is None:
        return pa.scalar(None, type_)
    if types.is_string(type_):
        return pa.scalar(value.toString(), type_)
    if types.is_decimal(type_):
        return pa.scalar(Decimal(value.toString()), type_)
    if types.is_nested(type_):
        raise TypeError(str(type_))
    if types.is_temporal(type_):
        integer = pa.int32() if types.is_date32(type_) else pa.int64()
        return pa.scalar(value, integer).cast(type_)
    return pa.scalar(value, type_)
